"""Policies and sparse algorithms of a program's own."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

import asyncoll
from asyncoll import AbortedError, NonFiniteError, UsageError
from asyncoll.extending import Part, SparseAlgorithm, register_policy, register_sparse_algorithm
from asyncoll.testing import Network, run_ranks, simulate
from asyncoll.training import OkTopkSGD
from tests.support.cases import SIZES, looped
from tests.support.processes import LIGHT, PATIENCE_S

TRANSPORTS = ["inproc", "zmq", "shm", "shm-mixed"]


def all_but_one(view):
    return view.count() >= view.size - 1


def drawn_pair(view):
    return all(map(view.has, view.drawn))


register_policy("all but one", all_but_one)
register_policy("drawn pair", drawn_pair)
register_policy("never", lambda view: False)


class EveryOther(SparseAlgorithm):
    """Every second element, the odd ones in every second round. Has no exchange of its own."""

    def select(self, x):
        return np.arange(self.round % 2, x.size, 2)


class Shared(SparseAlgorithm):
    """The same elements at all ranks, by an allreduce."""

    def select(self, x):
        return np.random.default_rng(self.round).permutation(x.size)[: self.k]

    async def exchange(self, collectives, given):
        total = given.values.copy()
        await collectives.allreduce(total, asyncoll.SUM, total.dtype.name)
        return Part(given.indices, total)


register_sparse_algorithm("every other", EveryOther)
register_sparse_algorithm("shared", Shared)


# -- policies ------------------------------------------------------------------------------------


@looped("size", SIZES)
@pytest.mark.parametrize(("dtype", "count"), [("int16", 0), ("float16", 5), ("int16", 1), ("float32", 20_000)])
def test_every_contribution_is_in_one_round_of_a_policy(size, dtype, count):
    async def main(comm):
        draw = np.random.default_rng(comm.rank)
        total, active = np.zeros(count), []
        for _ in range(3 + comm.rank % 3):
            await asyncio.sleep(draw.exponential())
            x = np.ones(count, dtype)
            reduction = await comm.policy_allreduce(x, policy="all but one", history=100)
            total += sum(result.astype(float) for result in reduction.results())
            active.append((reduction.active, reduction.ranks))
        last = await comm.join("policy", np.zeros(count, dtype))
        total += sum(result.astype(float) for result in last.results()) if last else 0
        return total, active

    given = sum(3 + rank % 3 for rank in range(size))
    for hosts, memory in [(None, False), (None, True), ([rank % 3 for rank in range(size)], True)]:
        network = Network(latency_s=1e-3, jitter_s=1e-2)
        for total, active in simulate(size, main, network, seed=size, shared_memory=memory, hosts=hosts).results:
            assert (total == given).all()
            assert all(number >= 1 for number, _ in active)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_policy_sees_arrivals_and_drawn_ranks_on_every_transport(transport):
    async def main(comm):
        found = []
        for _ in range(5):
            await asyncio.sleep(0.003 * comm.rank)
            reduction = await comm.policy_allreduce(np.ones(3), policy="drawn pair", candidates=2, seed=7, name="pair")
            found.append((reduction.round, reduction.ranks))
        await comm.barrier()
        return found

    for found in run_ranks(5, main, transport):
        assert all(len(ranks) >= 2 for _, ranks in found)


def test_all_ranks_begin_a_round_that_the_policy_forbids():
    async def main(comm):
        await asyncio.sleep(comm.rank)
        return (await comm.policy_allreduce(np.ones(1), policy="never")).active

    for shared_memory in (False, True):
        assert simulate(4, main, shared_memory=shared_memory).results == [4] * 4


def test_synchronous_rounds_wait_for_all_whatever_the_policy_says():
    register_policy("at once", lambda view: True)

    async def main(comm):
        await asyncio.sleep(comm.rank)
        return (await comm.policy_allreduce(np.ones(1), policy="at once", sync_every=1)).active

    for shared_memory in (False, True):
        assert simulate(4, main, shared_memory=shared_memory).results == [4] * 4


def test_an_unknown_policy_is_an_error_before_anything_is_sent():
    async def main(comm):
        with pytest.raises(UsageError, match=r"no policy 'flor' is registered .*all but one.*register_policy"):
            await comm.policy_allreduce(np.ones(1), policy="flor")
        for bad in ("", None, 3):
            with pytest.raises(UsageError, match="policy"):
                await comm.policy_allreduce(np.ones(1), policy=bad)
        return (await comm.allreduce(np.ones(1)))[0]

    assert simulate(3, main).results == [3] * 3


def missing(view):
    raise KeyError("missing")


async def waits(view):
    return True


register_policy("missing key", missing)
register_policy("a coroutine", lambda view: waits(view))
register_policy("rank beyond", lambda view: view.has(view.size))
register_policy("rank below", lambda view: view.has(-1))


@pytest.mark.parametrize("transport", ["simulated", "memory", "hosts", *TRANSPORTS])
@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("missing key", r"the policy 'missing key' raised KeyError: 'missing' at test_extending\.py:\d+"),
        ("a coroutine", "the policy 'a coroutine' returned an awaitable, <coroutine .*: it has to return a bool"),
        ("rank beyond", "the policy 'rank beyond' raised UsageError: there is no rank 3 in a round of 3 ranks"),
        ("rank below", "the policy 'rank below' raised UsageError: there is no rank -1 in a round of 3 ranks"),
    ],
)
def test_the_error_of_a_policy_ends_the_communicator_and_names_both(policy, told, transport):
    errors = {}

    async def main(comm):
        try:
            await comm.barrier()  # all have joined
            await comm.policy_allreduce(np.ones(1), policy=policy)
        except AbortedError as error:
            errors[comm.rank] = error
            raise

    hosts = [0, 0, transport == "hosts"]
    world = functools.partial(simulate, 3, main, shared_memory=transport != "simulated", hosts=hosts)
    if transport in TRANSPORTS:
        world = functools.partial(run_ranks, 3, main, transport)
    with pytest.raises(AbortedError, match=told):
        world()
    assert len(errors) == 3
    for error in errors.values():
        assert re.match(rf"rank {error.rank} aborted: {told}", str(error))


class Waiting:
    async def __call__(self, view):
        return True


@pytest.mark.parametrize("policy", [waits, Waiting(), functools.partial(waits)])
def test_a_policy_is_no_coroutine_function(policy):
    with pytest.raises(UsageError, match="the policy 'waits' is a coroutine function: register a plain one"):
        register_policy("waits", policy)


@pytest.mark.parametrize(("name", "policy"), [("", all_but_one), (3, all_but_one), ("x", None)])
def test_a_policy_has_a_name_and_is_a_function(name, policy):
    with pytest.raises(UsageError, match="register_policy takes a name and a function"):
        register_policy(name, policy)


PROGRAM = """
import os, numpy, asyncoll
from asyncoll.extending import register_policy
if os.environ["RANK"] != "1":
    register_policy("half", lambda view: 2 * view.count() >= view.size)
async def main(comm):
    if comm.rank == 1:
        await comm.recv(numpy.zeros(1), 0)  # which is never sent
    await comm.policy_allreduce(numpy.ones(3), policy="half")
asyncoll.run(main)
"""


@pytest.mark.slow
def test_a_rank_without_the_policy_of_an_announced_operation_ends_the_job_and_names_it(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    launch = ["-m", "asyncoll", "launch", "-n", "3", "--transport", "zmq", "program.py"]
    done = subprocess.run(
        [sys.executable, *launch],
        cwd=tmp_path,
        env=os.environ | LIGHT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "cannot take part in policy allreduce 'policy'" in done.stdout + done.stderr
    assert "no policy 'half' is registered at this rank" in done.stdout + done.stderr


# -- sparse algorithms ---------------------------------------------------------------------------


@looped("size", SIZES)
@pytest.mark.parametrize("algorithm", ["every other", "shared"])
@pytest.mark.parametrize(("dtype", "count"), [("float16", 0), ("float32", 1), ("float16", 300), ("float64", 7)])
def test_an_own_sparse_algorithm_loses_nothing(size, algorithm, dtype, count):
    async def main(comm):
        draw = np.random.default_rng(comm.rank)
        given, total, residual = np.zeros(count), np.zeros(count), np.zeros(count, dtype)
        for number in range(1, 4):
            added = draw.integers(-4, 5, count).astype(dtype)
            residual += added
            given += added
            found = await comm.sparse_allreduce(residual, algorithm=algorithm, density=0.5)
            assert found.round == number
            total[found.indices] += found.values
        return given, total, residual.astype(float)

    for options in ({}, {"shared_memory": True}, {"shared_memory": True, "hosts": [rank // 2 for rank in range(size)]}):
        ranks = simulate(size, main, seed=size, **options).results
        assert all((total == ranks[0][1]).all() for _, total, _ in ranks)
        given, _, residuals = (np.sum(column, axis=0) for column in zip(*ranks, strict=True))
        assert (given == ranks[0][1] + residuals).all()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_own_sparse_algorithms_on_every_transport(transport):
    async def main(comm):
        x = np.full(10, float(comm.rank))
        found = await comm.sparse_allreduce(x, algorithm="every other", density=0.5)
        return found.indices.tolist(), found.values.tolist(), x[::2].tolist()

    assert run_ranks(3, main, transport) == [([0, 2, 4, 6, 8], [3.0] * 5, [0.0] * 5)] * 3


def test_nan_at_one_rank_is_refused_at_all_although_it_is_not_selected():
    async def main(comm):
        x = np.ones(4)
        x[1] = np.nan if comm.rank == 1 else 1
        with pytest.raises(NonFiniteError) as error:
            await comm.sparse_allreduce(x, algorithm="every other", density=0.5)
        assert error.value.ranks == (1,)
        return (await comm.sparse_allreduce(np.ones(4), algorithm="every other", density=0.5)).indices.tolist()

    assert simulate(3, main).results == [[0, 2]] * 3  # the refused round is none


def test_its_round_is_in_the_state_of_the_operation():
    async def main(comm):
        first = await comm.sparse_allreduce(np.ones(4), algorithm="every other", density=0.5)
        return first.indices.tolist(), comm.sparse_state()

    (before, state), _ = simulate(2, main).results

    async def goes_on(comm):
        comm.load_sparse_state("sparse", state)
        found = await comm.sparse_allreduce(np.ones(4), algorithm="every other", density=0.5)
        return found.round, found.indices.tolist()

    assert before == [0, 2]
    assert simulate(2, goes_on).results == [(2, [1, 3])] * 2


@pytest.mark.parametrize("indices", [np.array([1.5]), np.array([-1]), np.array([4]), [1, 1], None])
def test_indices_that_are_none_are_an_error_that_names_the_class(indices):
    class Wrong(SparseAlgorithm):
        def select(self, x):
            return indices

    register_sparse_algorithm("wrong", Wrong)

    async def main(comm):
        await comm.sparse_allreduce(np.ones(4), algorithm="wrong", density=0.5)

    with pytest.raises(UsageError, match=r"Wrong\.select has to return indices below 4"):
        simulate(2, main)


ONE = np.ones(1, np.float32)


@pytest.mark.parametrize("shared_memory", [False, True])
@pytest.mark.parametrize(
    ("total", "told"),
    [
        (Part(np.int32([1, 1]), np.ones(2, np.float32)), r"2 of int32 .*array\(\[1, 1\]"),
        (Part(np.int32([2, 1]), np.ones(2, np.float32)), r"array\(\[2, 1\]"),
        (Part(np.int32([-1]), ONE), r"array\(\[-1\]"),
        (Part(np.int32([4]), ONE), r"array\(\[4\]"),
        (Part(np.int32([1, 2]), ONE), "2 of int32 and 1 of float32"),
        (Part(np.int64([1]), ONE), "1 of int64 and 1 of float32"),
        (Part(np.int32([1]), np.ones(1)), "1 of int32 and 1 of float64"),
        (Part(np.int32([[1]]), ONE), "Part"),
        (Part([1], [1.0]), "Part"),
        ((np.int32([1]), ONE), r"\(array"),
        ([np.int32([1]), ONE], r"\[array"),
        (None, "None"),
    ],
)
def test_an_exchange_that_returns_no_sum_is_an_error_that_names_it(total, told, shared_memory):
    class Wrong(SparseAlgorithm):
        def select(self, x):
            return [1]

        async def exchange(self, collectives, given):
            await collectives.barrier()
            return total

    register_sparse_algorithm("wrong", Wrong)

    async def main(comm):
        await comm.sparse_allreduce(np.ones(4, np.float32), algorithm="wrong", density=0.5)

    needed = r"Wrong\.exchange has to return a Part of ascending int32 indices below 4, .* values of float32, got .*"
    with pytest.raises(UsageError, match=needed + told):
        simulate(2, main, shared_memory=shared_memory)


@pytest.mark.parametrize("transport", ["shm", "shm-mixed"])
@pytest.mark.parametrize("delay_s", [0, 0.01])
def test_an_exchange_in_memory_that_awaits_something_else_is_an_error(delay_s, transport):
    class Sleeping(SparseAlgorithm):
        def select(self, x):
            return [1]

        async def exchange(self, collectives, given):
            await collectives.barrier()
            for _ in range(2):
                await asyncio.sleep(delay_s)
            return given

    register_sparse_algorithm("sleeping", Sleeping)

    async def main(comm):
        await comm.sparse_allreduce(np.ones(4), algorithm="sleeping", density=0.5)

    with pytest.raises((UsageError, AbortedError), match="may await only methods of its collectives"):
        run_ranks(3, main, transport)


def test_a_maker_that_makes_no_algorithm_is_an_error_that_names_it():
    register_sparse_algorithm("nothing", lambda count, k: None)

    async def main(comm):
        await comm.sparse_allreduce(np.ones(4), algorithm="nothing", density=0.5)

    with pytest.raises(UsageError, match=r"registered as 'nothing' has to return an instance of SparseAl.* None"):
        simulate(2, main)


def test_names_of_sparse_algorithms():
    with pytest.raises(UsageError, match="'oktopk' is a sparse algorithm of the library"):
        register_sparse_algorithm("oktopk", EveryOther)
    for name, make in [("", EveryOther), (3, EveryOther), ("x", None)]:
        with pytest.raises(UsageError, match="register_sparse_algorithm takes a name and a class"):
            register_sparse_algorithm(name, make)

    async def main(comm):
        await comm.sparse_allreduce(np.ones(4), algorithm="evry other", density=0.5)

    with pytest.raises(UsageError, match=r"unknown algorithm 'evry other': use one of oktopk, .*, every other"):
        simulate(2, main)


def test_a_trainer_takes_an_own_sparse_algorithm():
    async def main(comm):
        model = torch.nn.Linear(3, 2, bias=False)
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = OkTopkSGD(comm, model, optimizer, algorithm="every other", density=0.5)
        for _ in range(4):
            model(torch.full((1, 3), float(comm.rank))).sum().backward()
            await trainer.step()
        await trainer.finish()
        return model.weight.detach().clone()

    first, *others = simulate(3, main).results
    assert all(torch.equal(first, other) for other in others)
    assert not torch.equal(first, torch.ones(2, 3))
