"""The lines of calls in errors: those of the user, or the line that a library reports for its user (`reported_at`)."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncoll import Communicator, MismatchError, _core
from asyncoll.runtime.signature import Site, place_outside, reported_at
from asyncoll.testing import run_ranks
from asyncoll.training import EagerSGD
from tests.support.places import SCRIPTS
from tests.support.processes import LIGHT
from tests.support.training_loops import ALGORITHMS, AT_OWN_PACE, loss, network, plain

SCRIPT = SCRIPTS / "runtime/mismatched_calls.py"
needs_core = pytest.mark.skipif(_core.native is None, reason="the compiled core is not there")
LEARNED = 4  # calls of one kind until the short way knows it, and more


def users_place():
    """A line of a user, whose library makes calls for it."""
    return sys._getframe().f_code, sys._getframe().f_lasti


PLACE = users_place()
CALLS = {
    "allreduce": lambda comm, x: comm.allreduce(x),
    "barrier": lambda comm, x: comm.barrier(),
    "broadcast": lambda comm, x: comm.broadcast(x),
    "reduce": lambda comm, x: comm.reduce(x),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "allgather": lambda comm, x: comm.allgather(x),
    "allgatherv": lambda comm, x: comm.allgatherv(x),
    "gather": lambda comm, x: comm.gather(x),
    "scatter": lambda comm, x: comm.scatter([x] * comm.size),
    "alltoall": lambda comm, x: comm.alltoall(x),
    "alltoallv": lambda comm, x: comm.alltoallv([x] * comm.size),
    "sparse_allreduce": lambda comm, x: comm.sparse_allreduce(x, density=0.5),
    "neighbor_average": lambda comm, x: comm.neighbor_average(x),
    "push_sum": lambda comm, x: comm.push_sum(x, x[:1]),
    "split": lambda comm, x: comm.split(0),
    "solo": lambda comm, x: comm.solo_allreduce(x, name="g"),
    "majority": lambda comm, x: comm.majority_allreduce(x, name="g"),
    "quorum": lambda comm, x: comm.quorum_allreduce(x, name="g", quorum=comm.size),
    "group": lambda comm, x: comm.group_allreduce(x, name="g", group_size=1),
}
ROUNDS = ("solo", "majority", "quorum", "group")
TENSORS = {
    "numpy": np.ones,
    "torch": lambda count: torch.ones(count, dtype=torch.float64),
    "long": lambda count: np.ones(count << 15),
}


async def told(comm, call, x, calls_before, *, is_reported):
    """What a rank is told of a call of rank 0 that the others do not make, after so many calls that all have made."""
    async with await comm.split(0) as part:
        with reported_at(PLACE) if is_reported else contextlib.nullcontext():
            with pytest.raises(MismatchError) as caught:
                await differ(part, call, x, calls_before)
    return str(caught.value)


async def differ(comm, call, x, calls_before):
    for _ in range(calls_before):
        await CALLS[call](comm, x)
    while True:  # a rank may complete rounds before it learns of the mismatch
        await (CALLS[call](comm, x) if comm.rank == 0 else other(comm, call, x))


def other(comm, call, x):
    if call in ROUNDS:
        return comm.solo_allreduce(x, name="g", sync_every=3)
    return comm.barrier() if call != "barrier" else comm.allreduce(x)


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("transport", ["inproc", "shm", "shm-mixed"])
def test_every_call_is_reported_at_the_line_of_the_user(transport, tensor):
    reported = Site(*PLACE).line

    async def main(comm: Communicator):
        wrong = []
        for call, calls_before, is_reported in itertools.product(CALLS, (0, LEARNED), (False, True)):
            text = await told(comm, call, TENSORS[tensor](comm.size * 2), calls_before, is_reported=is_reported)
            lines = set(map(int, re.findall(r"test_sites.py:(\d+)", text)))
            own = CALLS[call].__code__.co_firstlineno
            if lines != {reported} if is_reported else own not in lines or reported in lines:
                wrong.append((call, calls_before, is_reported, text))
        return wrong

    assert run_ranks(2, main, transport) == [[], []]


@pytest.mark.parametrize("transport", ["inproc", "shm"])
@pytest.mark.parametrize("algorithm", ALGORITHMS | AT_OWN_PACE)
def test_every_call_of_a_trainer_is_reported_at_the_line_of_the_user(algorithm, transport, monkeypatch):
    """All calls of a whole training, from `start` to `finish`, also those that `backward` makes."""
    places = set()

    def noted(*arguments):
        place = place_outside(*arguments)
        places.add(Site(*place).code.co_filename)
        return place

    monkeypatch.setattr("asyncoll.runtime.signature.place_outside", noted)
    monkeypatch.setattr("asyncoll.algorithms.rounds.repeats.place_outside", noted)
    monkeypatch.setattr("asyncoll.algorithms.dense.compiled.place_outside", noted)

    async def main(comm):
        model = network()
        sgd = (ALGORITHMS | AT_OWN_PACE)[algorithm](comm, model, plain(model))
        await sgd.start()
        for step in range(9):
            loss(model, comm.rank, step).backward()
            await sgd.step()
        await sgd.finish()

    run_ranks(2, main, transport)
    assert places == {__file__}


@pytest.mark.parametrize("verb", ["start", "step"])
def test_a_mismatch_of_two_trainers_names_the_lines_of_the_user(verb):
    async def main(comm):
        model = network()
        sgd = EagerSGD(comm, model, plain(model), history=4)
        if verb == "start" and comm.rank == 0:
            await comm.barrier()
        await sgd.start()
        loss(model, comm.rank, 1).backward()
        await sgd.step(metrics={} if comm.rank else None)
        await comm.barrier()  # the first rank opens its round without the other

    with pytest.raises(MismatchError) as caught:
        run_ranks(2, main)
    places = re.findall(r"at (\S+):\d+", str(caught.value))
    assert places == [Path(__file__).name] * 2, caught.value


@pytest.mark.parametrize("core", [pytest.param("c", marks=needs_core), "python"])
def test_every_call_without_a_loop_is_reported_at_the_line_of_the_user(forked_world, tmp_path, core):
    environment = os.environ | LIGHT | {"TMPDIR": str(tmp_path), _core.VARIABLE: core}
    for rank in forked_world(environment, 2, SCRIPT):
        code, out, err = rank.end()
        assert (code, out) == (0, "all right\n"), err


ENDS = SCRIPTS / "runtime/program_ends_at_a_call.py"


@pytest.mark.parametrize("way", ["run", "connect", "block", "close"])
def test_a_mismatch_with_the_end_of_a_program_names_the_line_that_ends_it(forked_world, way):
    lines = [number for number, line in enumerate(ENDS.read_text().splitlines(), 1) if "# the line of the end" in line]
    where = "|".join(f"program_ends_at_a_call.py:{line}" for line in lines)
    for code, out, err in (rank.end() for rank in forked_world(os.environ | LIGHT, 2, ENDS, way)):
        assert code == 0, err
        assert re.search(rf"rank 0 has come to the end of its program #1 at ({where})\b", out), (out, err)
