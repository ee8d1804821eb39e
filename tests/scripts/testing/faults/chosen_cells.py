"""Some cells of the matrix of faults, by name: what is broken in each of them. With --hosts, on two hosts."""

import json
import sys

import asyncoll
from asyncoll.testing.faults.cells import select
from asyncoll.testing.faults.matrix import check_cell
from asyncoll.testing.faults.staged_calls import STAGED

transport, size, *names = sys.argv[1:]
hosts = 1
if names[0] == "--hosts":
    hosts = 2
    del names[0]
cells = [select(name, None, range(1), transport, int(size), hosts)[0] for name in names]
if any(cell.operation in STAGED for cell in cells):
    import torch as torch  # once, and not in each rank, which is forked
try:
    print(json.dumps({cell.name: check_cell(cell).broken for cell in cells}))
except asyncoll.UsageError as error:  # this machine makes no network namespaces
    print(error, file=sys.stderr)
    sys.exit(77)
