"""A training that ends without `finish()`: an error where ranks differ, a warning if the program never leaves."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

import asyncoll
from asyncoll.testing import run_ranks, simulate
from asyncoll.training import DPSGD, AllreduceSGD, EagerSGD, LocalSGD, Trainer, WagmaSGD
from tests.support.cases import looped
from tests.support.places import SCRIPTS
from tests.support.processes import ForkedRank
from tests.support.training_loops import ALGORITHMS, AT_OWN_PACE, Algorithm, loss, network, parameters, plain

SCRIPT = SCRIPTS / "training/ends_without_finish.py"
EVERY = ALGORITHMS | AT_OWN_PACE
EQUAL = ("synchronous", "overlapped", "sparse")  # models are, after each step
SIZES = [1, 2, 3]
FACADES = {
    "run": "EagerSGD",
    "connect": "EagerSGD",
    "init": "DPSGD",
    "eager_sgd": "EagerSGDState",
    "dc_s3gd": "DCS3GDState",
}
ERROR = "ends without finish() of "


async def step(sgd: Trainer, steps: int = 1) -> None:
    await sgd.start()
    for index in range(steps):
        loss(sgd.model, sgd.comm.rank, index).backward()
        await sgd.step()


def made(algorithm: Callable[..., Trainer], comm: asyncoll.Communicator, **rules: Any) -> Trainer:
    model = network()
    return algorithm(comm, model, plain(model), **rules)


# -- which trainings need it ----------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
@looped("size", SIZES)
def test_a_training_whose_models_differ_is_an_error_at_the_end_of_the_world(name: str, size: int) -> None:
    async def main(comm: asyncoll.Communicator) -> int:
        await step(made(EVERY[name], comm))
        gc.collect()  # the trainer is gone
        return comm.rank

    if size == 1 or name in EQUAL:
        assert simulate(size, main).results == [*range(size)]
        return
    with pytest.raises(asyncoll.UsageError) as raised:
        simulate(size, main)
    kind = type(made_alone(EVERY[name])).__name__
    assert f"{ERROR}{kind}, made at test_unfinished.py:" in str(raised.value)
    assert "the ranks' models may differ" in str(raised.value)
    assert "call it at every rank after the last step, or discard() if the result is not wanted" in str(raised.value)


def made_alone(algorithm: Algorithm) -> Trainer:
    async def main(comm: asyncoll.Communicator) -> Trainer:
        return made(algorithm, comm)

    return run_ranks(1, main)[0]


@pytest.mark.parametrize("name", EVERY)
@looped("size", SIZES)
@looped("verb", ["finish", "discard"])
def test_finish_and_discard_end_it(name: str, size: int, verb: str) -> None:
    async def main(comm: asyncoll.Communicator) -> int:
        sgd = made(EVERY[name], comm)
        await step(sgd)
        await comm.barrier()
        if verb == "discard":
            sgd.discard()
            sgd.discard()
            model = parameters(sgd.model)
            await sgd.finish()
            assert torch.equal(model, parameters(sgd.model))
            loss(sgd.model, 0, 0).backward()
            with pytest.raises(asyncoll.UsageError, match="the training has ended"):
                await sgd.step()
        else:
            await sgd.finish()
            sgd.discard()
        return comm.rank

    assert simulate(size, main).results == [*range(size)]


@pytest.mark.parametrize(
    ("algorithm", "rules", "steps", "is_open"),
    [
        (LocalSGD, {"every": 3}, 3, False),
        (LocalSGD, {"every": 3}, 4, True),
        (EagerSGD, {"sync_every": 2}, 2, False),
        (EagerSGD, {"sync_every": 1}, 3, False),
        (EagerSGD, {"sync_every": 1, "history": 0}, 3, True),  # models drift apart for good
        (EagerSGD, {"average_every": 1}, 3, True),  # late gradients are in no round
        (WagmaSGD, {"sync_every": 1}, 3, False),
        (WagmaSGD, {"sync_every": 1, "order": "average-then-step"}, 3, True),
        (WagmaSGD, {"sync_every": 4, "group_size": 2}, 5, True),
        (AllreduceSGD, {"buffers": "local"}, 1, False),
    ],
)
def test_nothing_is_missing_after_a_step_that_has_made_all_models_equal(
    algorithm: type[Trainer], rules: dict[str, Any], steps: int, is_open: bool
) -> None:
    async def main(comm: asyncoll.Communicator) -> list[float]:
        sgd = made(algorithm, comm, **rules)
        await step(sgd, steps)
        return parameters(sgd.model).tolist()

    if is_open:
        with pytest.raises(asyncoll.UsageError, match=f"{algorithm.__name__}.*round {steps}"):
            simulate(4, main)
    else:
        results = simulate(4, main).results
        assert results == [results[0]] * 4


def test_a_training_without_a_step_needs_no_end() -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        await made(EagerSGD, comm).start()
        made(DPSGD, comm)

    simulate(2, main)


def test_an_algorithm_of_a_user_needs_finish_unless_it_says_otherwise() -> None:
    class Own(Trainer):
        is_equal: ClassVar[bool] = False

        async def _update(self, weight: float | None) -> Any:
            self._apply()
            return self._complete()

        async def _finish(self) -> None:
            await self._average_models()

    class Equal(Own):
        def _differs(self) -> str:
            return ""

    async def main(comm: asyncoll.Communicator, kind: type[Trainer]) -> None:
        await step(made(kind, comm))

    simulate(2, lambda comm: main(comm, Equal))
    with pytest.raises(asyncoll.UsageError, match=r"finish\(\) of Own, made at test_unfinished.py"):
        simulate(2, lambda comm: main(comm, Own))


# -- one rank of several, several trainings, parts of the world ------------------------------------


def test_all_trainings_that_lack_it_are_named() -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        trainings = [made(EagerSGD, comm, name=name) for name in ("a", "b")] + [made(DPSGD, comm)]
        for sgd in trainings:
            await step(sgd)
        await trainings[1].finish()

    with pytest.raises(asyncoll.UsageError, match=r"finish\(\) of EagerSGD, .* and of DPSGD, made at [^)]*\): call it"):
        simulate(2, main)


@looped("transport", ["inproc", "shm"])
def test_a_rank_alone_that_lacks_it_ends_the_others(transport: str) -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        sgd = made(EagerSGD, comm)
        await step(sgd)
        if comm.rank != 1:
            await sgd.finish()

    with pytest.raises(asyncoll.UsageError, match=r"^rank 1 ends without finish\(\) of EagerSGD"):
        run_ranks(3, main, transport)


def test_a_training_of_a_part_of_the_world_counts_also_after_the_end_of_the_part() -> None:
    async def main(comm: asyncoll.Communicator, color: int) -> None:
        part = await comm.split(color)
        assert part is not None
        await step(made(DPSGD, part))
        await part.barrier()
        part.close()

    simulate(3, lambda comm: main(comm, comm.rank))  # each alone
    with pytest.raises(asyncoll.UsageError, match=r"rank 2 ends without finish\(\) of DPSGD|rank 1 ends"):
        simulate(3, lambda comm: main(comm, int(comm.rank > 0)))


# -- with an exception, nothing is added -----------------------------------------------------------


def test_an_exception_of_the_program_is_the_only_error() -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        await step(made(DPSGD, comm))
        raise ValueError("of the program")

    with pytest.raises(ValueError, match="of the program") as raised:
        simulate(2, main)
    assert raised.value.__context__ is None


def test_a_failure_that_the_program_handles_is_enough() -> None:
    async def main(comm: asyncoll.Communicator) -> str:
        part = await comm.split(0)
        assert part is not None
        sgd = made(DPSGD, part)
        await step(sgd)
        await part.barrier()
        if comm.rank == 1:
            part.abort("given up")
            sgd.discard()
        with pytest.raises(asyncoll.AbortedError, match="given up") as raised:
            await part.barrier()
        return str(raised.value)

    assert len(simulate(3, main).results) == 3


def test_a_step_that_was_cancelled_and_loses_nothing_counts() -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        sgd = made(EagerSGD, comm, partial="quorum", quorum=2)
        await sgd.start()
        loss(sgd.model, comm.rank, 0).backward()
        if comm.rank == 0:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(sgd.step(), 1.0)
        else:
            await asyncio.sleep(5.0)
            await sgd.step()
            await sgd.finish()

    with pytest.raises(asyncoll.UsageError, match="rank 0 ends without"):
        simulate(2, main)


def test_a_late_rank_hears_of_a_training_that_was_discarded() -> None:
    """It asks the others for their state, and would wait for ever."""

    async def main(comm: asyncoll.Communicator) -> str:
        sgd = made(EagerSGD, comm, history=1)
        await step(sgd)
        await comm.barrier()
        if comm.rank == 0:
            await step(sgd, 5)
            sgd.discard()
            return ""
        await asyncio.sleep(100.0)
        with pytest.raises(asyncoll.RemoteError) as raised:
            await step(sgd)
        sgd.discard()
        return str(raised.value)

    assert "the training has ended at this rank" in simulate(2, main).results[1]


# -- real processes --------------------------------------------------------------------------------


def ended(
    forked_world: Callable[..., list[ForkedRank]], size: int, facade: str, end: str
) -> list[tuple[int, str, str]]:
    return [rank.end() for rank in forked_world(dict(os.environ), size, SCRIPT, facade, end)]


@pytest.mark.slow
@pytest.mark.parametrize("facade", FACADES)
@pytest.mark.parametrize("size", SIZES)
def test_leaving_without_it_is_an_error(forked_world: Callable[..., list[ForkedRank]], size: int, facade: str) -> None:
    """`asyncoll.run`, `connect`, `init` and `destroy_process_group`."""
    for code, out, err in ended(forked_world, size, facade, "none"):
        if size == 1:
            assert (code, out, err) == (0, "ended\n", "")
        else:
            assert (code, out) == (1, "")
            assert f"{ERROR}{FACADES[facade]}, made at ends_without_finish.py:" in err
            assert "warning" not in err


@pytest.mark.slow
@pytest.mark.parametrize("facade", FACADES)
@pytest.mark.parametrize("end", ["finish", "discard"])
def test_after_it_programs_end_as_ever(forked_world: Callable[..., list[ForkedRank]], facade: str, end: str) -> None:
    assert ended(forked_world, 2, facade, end) == [(0, "ended\n", "")] * 2


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_rank_may_be_late_when_others_discard_the_training(
    forked_world: Callable[..., list[ForkedRank]], transport: str
) -> None:
    """By message its rounds need the ranks that wait in `destroy_process_group`."""
    ranks = forked_world(os.environ | {"ASYNCOLL_TRANSPORT": transport}, 3, SCRIPT, "eager_sgd", "apart")
    assert [rank.end() for rank in ranks] == [(0, "ended\n", "")] * 3


@pytest.mark.slow
@pytest.mark.parametrize("facade", FACADES)
def test_the_error_of_a_program_is_all_that_it_prints(
    forked_world: Callable[..., list[ForkedRank]], facade: str
) -> None:
    for code, _, err in ended(forked_world, 2, facade, "raise"):
        assert code == 1
        assert "ValueError: of the program" in err
        assert ERROR not in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("facade", "end"), [("connect", "stay"), ("init", "stay"), ("eager_sgd", "stay"), ("dc_s3gd", "exit")]
)
@pytest.mark.parametrize("size", [1, 3])
def test_a_program_that_never_leaves_is_warned(
    forked_world: Callable[..., list[ForkedRank]], size: int, facade: str, end: str
) -> None:
    """Without a process group the end of the first rank is a loss for the others, which are not warned then."""
    warned = 0
    for rank, (code, _, err) in enumerate(ended(forked_world, size, facade, end)):
        warning = f"asyncoll: warning: rank {rank} {ERROR}{FACADES[facade]}, made at ends_without_finish.py:"
        assert code == 0, err
        assert err.count(warning) == err.count("warning") <= 1, err
        warned += warning in err
    least = 1 if facade in ("connect", "init") else size
    assert warned in (range(least, size + 1) if size > 1 else [0])


@pytest.mark.slow
def test_a_forked_child_is_not_warned_of_the_training_of_its_rank(
    forked_world: Callable[..., list[ForkedRank]],
) -> None:
    for code, out, err in ended(forked_world, 2, "eager_sgd", "forked"):
        assert (code, out, err) == (0, "ended\n", "")
