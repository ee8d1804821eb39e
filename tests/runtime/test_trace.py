"""The trace seam: events of calls and rounds, which every carrier raises alike, with and without the compiled core."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from collections import deque
from typing import Any

import numpy as np
import pytest

from asyncoll import AbortedError
from asyncoll.runtime.trace import What, events_of
from asyncoll.testing import Network, fake_device, run_ranks, simulate
from tests.support import tracing
from tests.support.cases import looped
from tests.support.places import ROOT, SCRIPTS
from tests.support.tracing import Told

SCRIPT = str(SCRIPTS / "runtime" / "traced_ranks.py")
RANKS = [1, 2, 3, 4, 5, 8, 13]
WEATHER = Network(latency_s=20e-6, jitter_s=1e-3)


PAGE = (ROOT / "docs" / "design" / "extending.md").read_text()
COUNTER = re.search(r"## A counter over events\n.*?```python\n(.*?)```", PAGE, re.DOTALL)[1]


def hosts(size):
    return [rank % 3 for rank in range(size)]


def simulated(**more):
    return lambda size, main: simulate(size, main, WEATHER, **more).results


def between_hosts(size, main):
    return simulate(size, main, WEATHER, shared_memory=True, hosts=hosts(size)).results


CARRIERS = {
    "messages": simulated(),
    "memory": simulated(shared_memory=True),
    "hosts": between_hosts,
    "inproc": lambda size, main: run_ranks(size, main),
    "shm": lambda size, main: run_ranks(size, main, "shm"),
    "shm-mixed": lambda size, main: run_ranks(size, main, "shm-mixed"),
    "shm-hosts": lambda size, main: run_ranks(size, main, "shm", hosts=hosts(size)),
}
programs = pytest.mark.parametrize("program", [tracing.in_step, tracing.at_will])


@pytest.mark.parametrize("carrier", CARRIERS)
@programs
@looped("size", RANKS)
def test_the_laws_of_events_hold_on_every_carrier(carrier, program, size):
    tracing.check(CARRIERS[carrier](size, lambda comm: tracing.traced(comm, program)))


@pytest.mark.parametrize("carrier", ["shm-mixed", "messages", "memory"])
@looped("size", [2, 5])
def test_compiled_calls_have_the_events_of_those_in_python(carrier, size):
    """In a mixed world every second rank does without the core, and the calls of all ranks are the same."""
    tracing.alike(CARRIERS[carrier](size, lambda comm: tracing.traced(comm, tracing.in_step)))


DEVICES = {
    "device memory": "short=64,device=64,device_window=1024,staged=4096,window=2048",
    "mirrors": "short=64,device=67108864,staged=67108864",
    "mirrors in windows": "short=64,device=67108864,staged=4096,window=2048",
}


@pytest.mark.parametrize("sizes", DEVICES)
@pytest.mark.parametrize("carrier", ["inproc", "shm", "shm-mixed", "messages", "memory", "hosts"])
@looped("size", [1, 2, 3, 5])
def test_calls_of_tensors_on_devices_have_the_same_events(carrier, sizes, size, monkeypatch):
    import torch

    monkeypatch.setenv("ASYNCOLL_SIZES", DEVICES[sizes])

    async def in_step(comm, move):
        for _ in range(2):
            for elements in (4, 1500):
                await comm.allreduce(move(torch.ones(elements)))
                await comm.allgather(move(torch.ones(elements)))
                await comm.reduce_scatter(move(torch.ones(elements * comm.size)))
                await comm.solo_allreduce(move(torch.ones(elements)), name=f"solo {elements}", sync_every=1)
            if comm.size > 1:
                sent = comm.send(move(torch.ones(1500)), (comm.rank + 1) % comm.size)
                await asyncio.gather(sent, comm.recv(move(torch.zeros(1500)), (comm.rank - 1) % comm.size))

    def run(move):
        events = CARRIERS[carrier](size, lambda comm: tracing.traced(comm, lambda comm: in_step(comm, move)))
        tracing.check(events)
        numbered = [[event for event in mine if event.verb != "send/recv"] for mine in events]
        tracing.alike(numbered)  # a send and a receive are under way at the same time
        return numbered

    with fake_device(size, "loop") as device:
        on_device, on_host = run(device.tensor), run(torch.clone)
    tracing.alike([on_device[0], on_host[0]])


CALLS = {
    "compiled allreduce": lambda comm: comm.allreduce(np.ones(8)),
    "long allreduce": lambda comm: comm.allreduce(np.ones(200_000)),
    "allgather": lambda comm: comm.allgather(np.ones(8)),
    "solo": lambda comm: comm.solo_allreduce(np.ones(8), sync_every=1),
    "recv": lambda comm: comm.recv(np.ones(8), 1),
}


@pytest.mark.parametrize("carrier", CARRIERS)
@looped("kind", CALLS)
@looped("error", [asyncio.CancelledError, AbortedError])
def test_a_call_without_a_result_ends_by_cancel_or_fail(carrier, kind, error):
    """Rank 0 calls, and is cancelled, or rank 1 aborts the communicator, which never makes the call."""

    async def main(comm):
        of_call, ring = await comm.split(0), deque(maxlen=100)
        for _ in range(2):  # the core learns a call from the first one
            await of_call.allreduce(np.ones(8))
            await of_call.allreduce(np.ones(200_000))
        if comm.rank == 0:
            with contextlib.suppress(AbortedError, TimeoutError), of_call._core.member.trace.into(ring):
                async with asyncio.timeout(0.01 if error is asyncio.CancelledError else None):
                    await CALLS[kind](of_call)
        elif error is AbortedError:
            await asyncio.sleep(0.01)
            of_call.abort("no")
        await comm.barrier()
        return [event.what for event in events_of(ring)]

    outcome = What.CANCEL if error is asyncio.CancelledError else What.FAIL
    events, _ = CARRIERS[carrier](2, main)
    assert events == [What.BEGIN, What.ARRIVE, outcome]


@pytest.mark.parametrize("carrier", CARRIERS)
@looped("size", [1, 2, 3, 8])
@looped("elements", [8, 30_000])
def test_the_counter_of_the_page_counts_contributions_that_came_late(carrier, size, elements):
    page: dict[str, Any] = {}
    exec(COUNTER, page)

    async def main(comm):
        with page["Late"](comm) as counter:
            for _ in range(3):
                for rank in range(size):
                    if comm.rank == rank:
                        await comm.solo_allreduce(np.ones(elements))
                    await comm.barrier()
            return counter.late

    assert CARRIERS[carrier](size, main) == [0, *[3] * (size - 1)]


@pytest.mark.slow
@programs
@looped("settings", [{}, {"ASYNCOLL_TRANSPORT": "zmq"}, {"ASYNCOLL_CORE": "python"}])
def test_the_laws_of_events_hold_among_processes(forked_world, program, settings):
    events = []
    for each in forked_world(os.environ | settings, 3, SCRIPT, program.__name__):
        code, out, err = each.end()
        assert (code, err) == (0, "")
        events.append([Told(*event) for event in json.loads(out)])
    tracing.check(events)
    if program is tracing.in_step:
        tracing.alike(events)
