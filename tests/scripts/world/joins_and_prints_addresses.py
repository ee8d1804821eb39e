"""Joins a world and says, as JSON, how that ended: the sum of an allreduce and where the ranks listen, or the error."""

import json
import os
import time

import numpy as np

import asyncoll
from asyncoll.transport import joining
from asyncoll.transport.messages import reach
from asyncoll.world import sealed_store, store, told_failure

joining._FIRST_WARNING_S = 0.2
told_failure._TELLING_S = told_failure._FAREWELL_S = 60.0  # on a busy machine ranks may be slow to tell why they end
reach.ANSWER_S = float(os.environ.get("ANSWER_S", reach.ANSWER_S))
store._NAME_S = 0.5
if version := os.environ.get("VERSION"):
    sealed_store._version = lambda: version
if ahead_s := float(os.environ.get("AHEAD_S", "0")):  # the wall clock of this host, too, which has no namespace
    wall_clock = time.time
    time.time = lambda: wall_clock() + 2 * ahead_s


async def main(comm):
    x = np.ones(100_000)  # its payloads use the second stream
    await comm.allreduce(x)
    clock_s = time.monotonic()
    await comm.solo_allreduce(np.ones(10), name="x")
    transport = comm._core.member.endpoint.transport
    return {"result": float(x[0]), "clock_s": clock_s, "peers": [*getattr(transport, "_inner", transport).peers]}


try:
    print(json.dumps(asyncoll.run(main)))
except asyncoll.AsyncollError as error:
    print(json.dumps({"error": type(error).__name__, "text": str(error)}))
