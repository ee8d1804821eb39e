"""Joins a world and says, as JSON, how that ended: the sum of an allreduce and where the ranks listen, or the error."""

import json
import os
import time

import numpy as np

import asyncoll
from asyncoll.transport import joining
from asyncoll.transport.messages import reach
from asyncoll.world import store

joining._FIRST_WARNING_S = 0.2
store._TELLING_S = store._FAREWELL_S = 60.0  # on a busy machine ranks may be slow to tell why they end
reach.ANSWER_S = float(os.environ.get("ANSWER_S", reach.ANSWER_S))
store._NAME_S = 0.5
if version := os.environ.get("VERSION"):
    store._version = lambda: version
if late_s := float(os.environ.get("LATE_S", "0")):  # this host's clocks are ahead
    clocks = time.time, time.monotonic
    time.time, time.monotonic = lambda: clocks[0]() + late_s, lambda: clocks[1]() + 2 * late_s


async def main(comm):
    x = np.ones(100_000)  # its payloads use the second stream
    await comm.allreduce(x)
    transport = comm._core.member.endpoint.transport
    return {"result": float(x[0]), "peers": [*getattr(transport, "_inner", transport).peers]}


try:
    print(json.dumps(asyncoll.run(main)))
except asyncoll.AsyncollError as error:
    print(json.dumps({"error": type(error).__name__, "text": str(error)}))
