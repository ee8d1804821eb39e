"""Print what the launcher promises a rank, as JSON on one line."""

import json
import os
import sys

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS")
found = {name: os.environ.get(name) for name in NAMES}
address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
line = json.dumps({**found, "here": address in ("localhost", "127.0.0.1"), "port": port.isdigit()})
sys.stdout.write(line + "\n")  # in one piece: under torchrun the ranks share one pipe, and print() writes two
