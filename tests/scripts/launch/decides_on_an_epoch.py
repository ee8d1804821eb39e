"""Proposes an epoch with this rank alone, prints the decision, and what a question that is none is answered."""

import os
import socket
from pathlib import Path

from asyncoll.runtime.epochs import Decision
from asyncoll.transport.keys import read_key
from asyncoll.world.environment import Environment
from asyncoll.world.epoch_stores import decisions_of
from asyncoll.world.launcher_store import LauncherStore
from asyncoll.world.write_once import ENTRY_BYTES

environment = Environment.read()
decisions = decisions_of(environment, "1", read_key(Path(environment.key_file)))
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
    asking.connect(os.environ["ASYNCOLL_LAUNCHER"])
    asking.send(b"\xff" * 100_000)
    refused = asking.recv(100)
print(decisions.read(3), decisions.decide(Decision(2, (environment.rank,))) == decisions.read(2), refused)
print(decisions.read(2).members)
longest = os.urandom(ENTRY_BYTES)
name = f"of-{environment.rank}"
assert LauncherStore(Path(environment.launcher), "x").compare_and_set(name, longest) == longest
