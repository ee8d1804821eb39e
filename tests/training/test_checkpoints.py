"""Checkpoints: a training that was killed and goes on ends with the bits of an unbroken one."""

from __future__ import annotations

import os
import re
import runpy
import signal
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import asyncoll
from asyncoll.testing import Network, run_ranks, simulate
from asyncoll.training import DCS3GD, DPSGD, SGP, AllreduceSGD, Checkpoints, LocalSGD, OkTopkSGD, WagmaSGD
from tests.support.cases import looped
from tests.support.places import SCRIPTS
from tests.support.processes import ForkedRank
from tests.support.training_loops import ALGORITHMS, DETERMINISTIC, momentum, network, on_batches, state, trained, whole

SCRIPT = SCRIPTS / "training/resumes_from_checkpoints.py"
ROUNDS = 11


class KilledError(Exception):
    """The end of a rank."""


def train(size: int, algorithm: str, folder: Path, killed: tuple[int, int] | None = None) -> list[str]:
    """The digests at the ranks. `killed` is a rank, and the round that it begins when it dies."""
    main = runpy.run_path(str(SCRIPT))["main"]

    async def job(comm: asyncoll.Communicator) -> str:
        def tell(line: str) -> None:
            if killed and comm.rank == killed[0] and line.endswith(f"begins round {killed[1]}"):
                raise KilledError

        digest: str = await main(comm, algorithm, str(folder), ROUNDS, tell)
        return digest

    return simulate(size, job, Network(jitter_s=1e-3)).results


@looped("size", [1, 3, 5])
@pytest.mark.parametrize("algorithm", DETERMINISTIC)
def test_a_training_that_is_killed_and_goes_on_ends_with_the_bits_of_an_unbroken_one(
    algorithm: str, size: int, tmp_path: Path
) -> None:
    """Killed twice, in the middle of the periods of thresholds and of regions."""
    unbroken = train(size, algorithm, tmp_path / f"unbroken {size}")
    folder = tmp_path / f"killed {size}"
    for killed in [(size - 1, 6), (0, 10)]:
        with pytest.raises(KilledError):
            train(size, algorithm, folder, killed)
    assert train(size, algorithm, folder) == unbroken


@pytest.mark.slow
def test_real_processes_that_are_killed_at_a_random_moment_go_on_with_the_same_bits(
    tmp_path: Path, forked_world: Callable[..., list[ForkedRank]]
) -> None:
    size, algorithm = 3, "dc_s3gd"  # its averages are under way between steps

    def run(killed: int = 0) -> str:
        """The output. When the middle rank begins round `killed`, it is killed, wherever it is by then."""
        ranks = forked_world(dict(os.environ), size, SCRIPT, algorithm, tmp_path / "killed")
        for line in ranks[1].stdout if killed else ():
            if f"begins round {killed}" in line:
                os.kill(ranks[1].pid, signal.SIGKILL)
        return "".join(rank.end()[1] for rank in ranks)

    assert "ended with" not in run(killed=17)
    resumed = run()
    assert min(int(round_) for round_ in re.findall(r"begins round (\d+)", resumed)) > 10
    main = runpy.run_path(str(SCRIPT))["main"]
    unbroken = run_ranks(size, lambda comm: main(comm, algorithm, tmp_path / "unbroken", tell=len), "shm")
    assert sorted(re.findall(r"ended with (\w+)", resumed)) == sorted(unbroken)


@pytest.mark.slow
def test_real_processes_have_the_bits_of_ranks_on_one_loop(
    tmp_path: Path, forked_world: Callable[..., list[ForkedRank]]
) -> None:
    size, algorithm = 3, "sgp with overlap"
    ended = [rank.end() for rank in forked_world(dict(os.environ), size, SCRIPT, algorithm, tmp_path / "own")]
    main = runpy.run_path(str(SCRIPT))["main"]
    expected = run_ranks(size, lambda comm: main(comm, algorithm, tmp_path / "one loop", tell=len), "shm")
    assert len(set(expected)) == size  # the states of the optimizers differ
    assert [re.findall(r"ended with (\w+)", out) for _, out, _ in ended] == [[bits] for bits in expected], ended


# -- the state of a trainer ----------------------------------------------------------------------


def saved(algorithm: str, size: int = 3, rounds: int = 4) -> list[dict[str, Any]]:
    """The states of the trainers after some rounds, by rank."""

    async def main(comm: asyncoll.Communicator) -> dict[str, Any]:
        model = network()
        sgd = ALGORITHMS[algorithm](comm, model, momentum(model))
        await trained(sgd, on_batches(comm, model), rounds)
        return sgd.state_dict()

    return simulate(size, main).results


def load(algorithm: str, size: int, choose: Callable[[int], dict[str, Any] | None], hidden: int = 8) -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(5, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 3))
        sgd = ALGORITHMS[algorithm](comm, model, momentum(model))
        chosen = choose(comm.rank)
        if chosen:
            sgd.load_state_dict(chosen)
        await sgd.start()

    run_ranks(size, main)


@pytest.mark.parametrize("algorithm", ["synchronous", "dc_s3gd", "sparse"])
def test_a_checkpoint_of_something_else_is_an_error_that_says_what(algorithm: str) -> None:
    states = saved(algorithm)
    load(algorithm, 3, lambda rank: states[rank])  # is no error
    name = states[0]["algorithm"]
    for other, words in [
        ({"algorithm": "OtherSGD"}, f"algorithm 'OtherSGD', and not '{name}'"),
        ({"ranks": 4}, "ranks 4, and not 3"),
        ({"model": "0"}, "other parameters"),
    ]:
        with pytest.raises(asyncoll.UsageError, match=f"the checkpoint of the trainer has {words}: load the one"):
            load(algorithm, 3, lambda rank, other=other: states[rank] | other)
    with pytest.raises(asyncoll.UsageError, match="the checkpoint of the trainer has other parameters"):
        load(algorithm, 3, lambda rank: states[rank], hidden=9)
    with pytest.raises(asyncoll.UsageError, match="ranks 3, and not 2"):
        load(algorithm, 2, lambda rank: states[rank])
    with pytest.raises(asyncoll.UsageError, match="algorithm 'missing'"):
        load(algorithm, 3, lambda rank: {"round": 4})


@pytest.mark.parametrize("algorithm", ["dc_s3gd", "sparse", "wagma", "local", "dpsgd", "sgp", "sgp with overlap"])
def test_where_ranks_differ_each_needs_its_own_checkpoint_of_one_round(algorithm: str) -> None:
    states, older = saved(algorithm), saved(algorithm, rounds=3)
    with pytest.raises(asyncoll.UsageError, match="rank 1, and not 0"):
        load(algorithm, 3, lambda rank: states[max(rank, 1)])
    words = r"the ranks have loaded different rounds \(rank 0: 4, rank 1: 3, rank 2: 4\): .*Checkpoints.newest"
    with pytest.raises(asyncoll.UsageError, match=words):
        load(algorithm, 3, lambda rank: (older if rank == 1 else states)[rank])
    with pytest.raises(asyncoll.UsageError, match=r"different rounds \(rank 0: 4, rank 1: 0, rank 2: 4\)"):
        load(algorithm, 3, lambda rank: None if rank == 1 else states[rank])


@pytest.mark.parametrize("algorithm", ["synchronous", "overlapped", "eager with history"])
@pytest.mark.parametrize("loaded", [{0}, {2}, {1, 2}])
def test_where_ranks_are_equal_one_checkpoint_is_enough(algorithm: str, loaded: set[int]) -> None:
    """All ranks go on from the newest round: model, optimizer, schedule and clock."""

    async def main(comm: asyncoll.Communicator) -> tuple[Any, ...]:
        model = network()
        optimizer = momentum(model)
        scheduler = LambdaLR(optimizer, lambda round_: 1 / (1 + round_))
        sgd = ALGORITHMS[algorithm](comm, model, optimizer, scheduler=scheduler)
        if comm.rank in loaded:
            torch.nn.init.constant_(model[0].weight, 0.1 * comm.rank)
            rounds = 4 + comm.rank
            for _ in range(rounds):
                optimizer.step()
                scheduler.step()
            sgd.load_state_dict(sgd.state_dict() | {"round": rounds})
        await sgd.start()
        assert sgd.round == scheduler.last_epoch == 4 + max(loaded)
        assert model[0].weight[0, 0].item() == pytest.approx(0.1 * max(loaded)) or loaded == {0}
        await trained(sgd, on_batches(comm, model), 8)
        assert sgd.round == scheduler.last_epoch >= 8
        return whole(model), state(optimizer)

    results = simulate(3, main).results
    assert results == [results[0]] * 3


def test_a_scheduler_that_some_ranks_have_not_loaded_is_an_error() -> None:
    """The ranks would step with different rates."""

    async def main(comm: asyncoll.Communicator) -> None:
        model = network()
        optimizer = momentum(model)
        scheduler = LambdaLR(optimizer, lambda round_: 1 / (1 + round_))
        sgd = AllreduceSGD(comm, model, optimizer, scheduler=scheduler)
        sgd.load_state_dict(sgd.state_dict() | {"round": 4})
        if comm.rank == 0:
            scheduler.load_state_dict(scheduler.state_dict() | {"last_epoch": 4})
        await sgd.start()

    with pytest.raises(asyncoll.UsageError, match=r"schedulers are at different steps \(rank 0: 4, rank 1: 0\)"):
        run_ranks(2, main)


def test_a_checkpoint_is_loaded_before_the_training_begins() -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        model = network()
        sgd = AllreduceSGD(comm, model, momentum(model))
        state = sgd.state_dict()
        await sgd.start()
        sgd.load_state_dict(state)

    with pytest.raises(asyncoll.UsageError, match=r"load a checkpoint before the first step, and before start\(\)"):
        run_ranks(1, main)


@looped("algorithm", [AllreduceSGD, DCS3GD, OkTopkSGD, WagmaSGD, LocalSGD, DPSGD, SGP, partial(SGP, overlap=True)])
def test_a_state_is_a_snapshot_of_plain_values(algorithm: Any, tmp_path: Path) -> None:
    """It is read without unpickling other objects, and later steps do not change it."""

    async def main(comm: asyncoll.Communicator) -> None:
        model = network()
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        sgd = algorithm(comm, model, plain)
        await sgd.start()
        for round_ in (1, 2, 3):
            await on_batches(comm, model)(round_)
            await sgd.step()
        snapshot, path = sgd.state_dict(), tmp_path / f"{comm.rank}"
        torch.save(snapshot, path)
        before = str(torch.load(path, weights_only=True))
        assert before == str(snapshot)
        for tensor in (sgd._residual,) if algorithm is OkTopkSGD else ():
            tensor.add_(1.0)
        await on_batches(comm, model)(4)
        await sgd.step()
        assert str(snapshot) == before
        await sgd.finish()

    run_ranks(2, main)


# -- files ---------------------------------------------------------------------------------------


def rounds_in(folder: Path, rank: int) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.glob(f"round-*-rank-{rank}-of-*.pt"))


@looped(
    ("rounds", "newest"),
    [
        ([[], []], None),
        ([[3], [3]], 3),
        ([[3, 6], [3]], 3),
        ([[3, 6, 9], [3, 6]], 6),
        ([[6, 9], [3, 6]], 6),
    ],
)
def test_the_newest_round_is_one_that_all_ranks_have(rounds: list[list[int]], newest: int | None) -> None:
    with tempfile.TemporaryDirectory() as folder:

        async def main(comm: asyncoll.Communicator) -> tuple[Any, list[int]]:
            checkpoints = Checkpoints(comm, folder, keep=3)
            for round_ in rounds[comm.rank]:
                checkpoints.save(round_, round=round_, rank=comm.rank)
            (Path(folder) / f"round-12-rank-{comm.rank}-of-2.new").write_bytes(b"unfinished")
            found = await checkpoints.newest()
            return found, rounds_in(Path(folder), comm.rank)

        for rank, (found, left) in enumerate(run_ranks(2, main)):
            assert found == (newest and {"round": newest, "rank": rank})
            # Those of later rounds are of a run that was left: with rounds of the next run they would be no state.
            assert left == [round_ for round_ in rounds[rank] if newest and round_ <= newest]


def test_the_oldest_rounds_are_deleted_and_no_others(tmp_path: Path) -> None:
    async def main(comm: asyncoll.Communicator) -> list[int]:
        checkpoints = Checkpoints(comm, tmp_path, keep=2)
        for round_ in (5, 10, 15):
            checkpoints.save(round_, rank=comm.rank)
        return rounds_in(tmp_path, comm.rank)

    (tmp_path / "best.pt").write_bytes(b"of the program")
    (tmp_path / "round-5-rank-0-of-7.pt").write_bytes(b"of another job")
    assert run_ranks(2, main) == [[5, 10, 15], [10, 15]]
    assert len(list(tmp_path.iterdir())) == 6


def test_checkpoints_without_a_common_round_are_an_error(tmp_path: Path) -> None:
    """A new training would overwrite them, and a user would lose the old one without a word."""

    async def main(comm: asyncoll.Communicator) -> None:
        checkpoints = Checkpoints(comm, tmp_path)
        checkpoints.save(5 + comm.rank)
        await checkpoints.newest()

    with pytest.raises(asyncoll.UsageError, match=r"no round of which all ranks .* \(rank 0: 5; rank 1: 6\)"):
        run_ranks(2, main)


@looped("rounds", [[[3, 6, 9], [], [3, 6, 9]], [[3], [], []]])
def test_a_rank_that_has_lost_its_files_costs_the_others_none(rounds: list[list[int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:

        async def main(comm: asyncoll.Communicator) -> tuple[str, list[int]]:
            checkpoints = Checkpoints(comm, Path(folder) / f"host {comm.rank}")
            for round_ in rounds[comm.rank]:
                checkpoints.save(round_, rank=comm.rank)
            with pytest.raises(asyncoll.UsageError) as caught:
                await checkpoints.newest()
            return str(caught.value), rounds_in(Path(folder) / f"host {comm.rank}", comm.rank)

        without = ", ".join(str(rank) for rank, each in enumerate(rounds) if not each)
        for rank, (words, left) in enumerate(run_ranks(3, main)):
            assert f"rank {without} has none: bring its files back; or delete those of all ranks" in words
            assert left == rounds[rank]


def test_checkpoints_of_another_number_of_ranks_are_an_error(tmp_path: Path) -> None:
    async def save(comm: asyncoll.Communicator) -> None:
        Checkpoints(comm, tmp_path).save(3)

    async def newest(comm: asyncoll.Communicator) -> None:
        await Checkpoints(comm, tmp_path).newest()

    run_ranks(3, save)
    with pytest.raises(asyncoll.UsageError, match="has checkpoints of 3 ranks, and this job has 2: start as many"):
        run_ranks(2, newest)


def test_one_round_is_not_enough(tmp_path: Path) -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        Checkpoints(comm, tmp_path, keep=1)

    with pytest.raises(asyncoll.UsageError, match="keep is a number of rounds, at least 2, not 1"):
        run_ranks(1, main)


def test_a_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        checkpoints = Checkpoints(comm, tmp_path)
        path = checkpoints.save(3, value=torch.ones(1000))
        if comm.rank == 1:
            path.write_bytes(path.read_bytes()[:500])
        await checkpoints.newest()

    with pytest.raises(asyncoll.UsageError, match=r"round-3-rank-1-of-2\.pt cannot be read"):
        run_ranks(2, main)


def test_tensors_of_a_gpu_are_read_where_it_is_not(tmp_path: Path) -> None:
    async def main(comm: asyncoll.Communicator) -> list[Any]:
        checkpoints = Checkpoints(comm, tmp_path)
        with mock.patch("torch.serialization.location_tag", return_value="cuda:7"):
            checkpoints.save(1, x=torch.arange(3))
        saved = await checkpoints.newest()
        assert saved is not None
        return [saved["x"].device.type, saved["x"].tolist()]

    assert run_ranks(1, main) == [["cpu", [0, 1, 2]]]


def test_each_rank_may_go_on_from_its_own_newest_round(tmp_path: Path) -> None:
    async def main(comm: asyncoll.Communicator) -> int:
        for round_ in range(comm.rank, 12 * comm.rank + 1, 1 + comm.rank):
            Checkpoints(comm, tmp_path).save(round_, round=round_)
        await comm.barrier()
        saved = await Checkpoints(comm, tmp_path).newest(common=False)
        assert saved is not None
        return saved["round"]

    assert run_ranks(3, main) == [0, 11, 23]
    assert len(list(tmp_path.iterdir())) == 1 + 3 + 3  # no file of another round is deleted
