"""How ranks join: errors for ranks that die, stop or never come, and several worlds one after another."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import asyncoll
from asyncoll import testing
from asyncoll.errors import DeadlineError, PeerLostError, ServiceLostError, UsageError, describe
from asyncoll.transport.joining import Joining
from asyncoll.transport.keys import Key, write_key
from asyncoll.transport.meeting_folder import meeting_folder
from asyncoll.transport.memory import fd_passing
from asyncoll.world.environment import Environment
from asyncoll.world.host_attempt import HostAttempt
from asyncoll.world.meeting import meet
from asyncoll.world.sealed_store import SealedStore
from tests.support.places import ROOT, SCRIPTS
from tests.support.processes import LIGHT, PATIENCE_S

OURS = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "TORCHELASTIC_", "ASYNCOLL_")


def environment(**more: str) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return plain | {"ASYNCOLL_FREEZE_S": "20"} | more


@pytest.fixture
def play(forked):
    """Gives the output of each rank in each case; see the script."""

    def joined(*cases):
        code, out, err = forked(environment(), SCRIPTS / "world/joins_with_a_fault.py", *map(json.dumps, cases))
        assert code == 0, err
        return json.loads(out)

    return joined


def assert_named(play, cases, error, names):
    """In each case, all ranks but the faulty one raise `error`, which names the faulty one."""
    for case, ends in zip(cases, play(*cases), strict=True):
        ((faulty, _),) = case["faults"].items()
        for rank, end in enumerate(ends):
            if rank != int(faulty):
                assert end["said"], (case, rank, end["wrote"])
                assert end["said"].get("error") == error, (case, rank, end)
                assert int(faulty) in names(end["said"]), (case, rank, end)


def faults(kind, phases, **more):
    return [{"size": 3, "faults": {str(rank): f"{kind} {phase}"}, **more} for rank, phase in phases]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["memory", "hosts"])
def test_a_rank_that_dies_while_it_joins_is_named(play, place):
    cases = {
        "memory": faults("dies", [(0, "listen"), (0, "barrier"), (2, "host"), (2, "connect"), (2, "collect")])
        + faults("dies", [(0, "lock")], first=0)
        + faults("dies", [(2, "lock")], first=2)
        + faults("dies", [(0, "start"), (2, "start")], env={"ASYNCOLL_TRANSPORT": "zmq"}),
        "hosts": faults("dies", [(0, "host"), (2, "start"), (0, "start"), (2, "barrier")], hosts=True),
    }[place]
    assert_named(play, cases, "PeerLostError", lambda said: [said["rank"]])


@pytest.mark.slow
def test_a_rank_that_cannot_join_is_named_with_the_reason(play):
    cases = faults("refuses", [(0, "host"), (2, "host"), (1, "folder")]) + faults("refuses", [(0, "start")], hosts=True)
    assert_named(play, cases, "PeerLostError", lambda said: [said["rank"]] if "no route at all" in said["text"] else [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "values"), [("ASYNCOLL_TRANSPORT", ("shm", "zmq")), ("ASYNCOLL_ENCRYPT", ("all", "control"))]
)
def test_ranks_with_different_settings_say_which(forked_world, variable, values):
    program = [SCRIPTS / "world/joins_with_another_setting.py", variable, *values]
    for rank in forked_world(environment(), 3, *program):
        code, out, _ = rank.end()
        assert code == 0
        assert f"settings of {variable}: '{values[0]}' (rank 0, 2); '{values[1]}' (rank 1); give all the same" in out


@pytest.mark.slow
def test_a_dead_rank_is_named_if_the_folder_of_sockets_is_gone(play):
    slow = [faults("dies", [(1, "folder")], slow={"2": phase}) for phase in ("folder", "connect")]
    assert_named(play, [case for cases in slow for case in cases], "PeerLostError", lambda said: [said["rank"]])


@pytest.mark.slow
def test_the_deadline_holds_while_ranks_join_and_names_the_missing_ranks(play):
    cases = faults("stops", [(0, "host"), (2, "host"), (2, "connect"), (1, "hello"), (2, "start")], deadline_s=1)
    cases += [{"size": 3, "faults": {rank: "absent"}, "deadline_s": 1} for rank in "02"]
    cases.append({"size": 2, "faults": {"1": "absent"}, "env": {"ASYNCOLL_DEADLINE_S": "1"}})
    assert_named(play, cases, "DeadlineError", lambda said: said["missing"])  # a slow rank may be missing, too


@pytest.mark.slow
def test_a_waiting_rank_logs_the_missing_ranks(play):
    """Rank 2 joins after it has read that message."""
    (ends,) = play({"size": 3, "faults": {"2": "late"}})
    assert [end["said"] for end in ends] == [{"result": 3.0}] * 3, ends
    for rank in (0, 1):
        assert f"rank {rank}: waiting for rank 2 (0 s, of at most 300 s; not in the store " in ends[rank]["wrote"]
    assert "not in the store at 127.0.0.1:" in ends[0]["wrote"]  # which other hosts may not reach


@pytest.mark.slow
def test_joining_can_be_cancelled(play):
    cases = [{"size": 2, "faults": {rank: "absent"}, "program": "impatient"} for rank in "01"]
    for case, ends in zip(cases, play(*cases), strict=True):
        said = [end["said"] for rank, end in enumerate(ends) if str(rank) not in case["faults"]]
        assert said == [{"result": "timed out"}], ends


@pytest.mark.parametrize("interrupted", [0, 1])
def test_ranks_meet_again_after_one_of_them_was_interrupted(tmp_path, interrupted):
    def attempts():
        return [HostAttempt(tmp_path, rank, 2, Joining(rank, 2, 10.0)) for rank in (0, 1)]

    first = attempts()
    entered = [attempt.__enter__().folder for attempt in first]
    assert entered[0] == entered[1]
    error = asyncio.CancelledError()
    first[interrupted].__exit__(asyncio.CancelledError, error, None)
    with pytest.raises(PeerLostError, match=f"rank {interrupted} is gone: it was interrupted") as told:
        first[1 - interrupted]._joining.check(list, "not here")
    first[1 - interrupted].__exit__(PeerLostError, told.value, None)
    early = HostAttempt(tmp_path, 1, 2, Joining(1, 2, 0.0))
    with pytest.raises(DeadlineError, match="missing: rank 0"):
        early.__enter__()
    again = [attempt.__enter__().folder for attempt in attempts()]
    assert again[0] == again[1] != entered[0]


def test_a_rank_tells_in_the_folder_once_why_it_ends_joining_and_may_do_so_before_its_attempt_ends(tmp_path):
    waiting, ending = Joining(1, 2, 10.0), Joining(0, 2, 10.0)
    attempt = HostAttempt(tmp_path, 0, 2, ending).__enter__()
    HostAttempt(tmp_path, 1, 2, waiting).__enter__()
    asyncio.run(ending.fail(asyncio.CancelledError()))
    with pytest.raises(PeerLostError, match="rank 0 is gone: it was interrupted"):
        waiting.check(list, "not here")
    attempt.__exit__(ValueError, ValueError("later"), None)
    with pytest.raises(PeerLostError, match="rank 0 is gone: it was interrupted"):
        waiting.check(list, "not here")


def test_a_launched_rank_connects_to_the_others_once_all_of_them_listen(tmp_path):
    """Before that it would try again and again, and take the time that the others need to come."""
    write_key(tmp_path / "job")
    world = {"RANK": "0", "WORLD_SIZE": "3", "ASYNCOLL_FOLDER": str(tmp_path), "ASYNCOLL_TRANSPORT": "zmq"}
    with pytest.raises(DeadlineError, match=re.escape("missing: ranks 1, 2 (not listening yet)")) as raised:
        meet(Environment.read(world), Joining(0, 3, 0.0)).transport.discard()
    assert (raised.value.arrived, raised.value.missing) == ((0,), (1, 2))


class UntilTheStoreEnds(Joining):
    """The store ends when this rank waits there for the next world."""

    def __init__(self, rank, size, store):
        super().__init__(rank, size)
        self.store = store

    def check(self, missing, reason, **more):
        if reason == "not in the store yet":
            self.store.is_over = True
        super().check(missing, reason, **more)


class EndingStore:
    def __init__(self, store):
        self._store = store
        self.is_over = False

    def __getattr__(self, name):
        method = getattr(self._store, name)

        def call(*arguments):
            if self.is_over:
                raise RuntimeError("the connection was closed")
            return method(*arguments)

        return call


@pytest.mark.parametrize(
    ("is_of_rank_0", "error", "text"),
    [
        (True, UsageError, r"settings of WORLD_SIZE: 4 \(rank 2\), 2 \(rank 0\); give all the same"),
        (False, ServiceLostError, "the store of this job is gone"),  # earlier processes may have left a world there
    ],
)
def test_a_rank_beyond_the_world_of_rank_0_names_both_sizes_if_the_store_is_that_of_rank_0(is_of_rank_0, error, text):
    distributed = pytest.importorskip("torch.distributed")
    store = EndingStore(distributed.HashStore())

    def meet(rank, size, joining):
        entered = SealedStore(store, "job", rank, size, Key(b""), joining, serves=is_of_rank_0)
        entered.begin_turn()
        entered.begin_session()

    with ThreadPoolExecutor(2) as ranks:
        for met in [ranks.submit(meet, rank, 2, Joining(rank, 2)) for rank in range(2)]:
            met.result()
    with pytest.raises(error, match=text):
        meet(2, 4, UntilTheStoreEnds(2, 4, store))


@pytest.mark.parametrize("is_of_rank_0", [True, False])
@pytest.mark.parametrize(
    "noticed",
    [PeerLostError(1, "it refuses connections"), DeadlineError("nothing", (0, 2), (1,)), UsageError("no path")],
)
def test_a_rank_that_has_given_up_since_rank_0_died_is_not_named_in_its_place(noticed, is_of_rank_0):
    """Rank 0 serves the store. A failure of another rank, it would have told, or waited for it to be read."""
    distributed = pytest.importorskip("torch.distributed")
    store = EndingStore(distributed.HashStore())
    entered = SealedStore(store, "job", 2, 3, Key(b""), Joining(2, 3), serves=is_of_rank_0)
    store.is_over = True
    if isinstance(noticed, UsageError) or not is_of_rank_0:
        entered.warn(type(noticed), noticed, None)
        return
    with pytest.raises(PeerLostError, match="the store that it serves has ended") as raised:
        entered.warn(type(noticed), noticed, None)
    assert (raised.value.rank, raised.value.__cause__) == (0, noticed)


# -- several worlds --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_may_join_one_world_after_another(play):
    thrice, hasty = play({"size": 3, "program": "thrice"}, {"size": 2, "program": "hasty"})
    assert [end["said"] for end in thrice] == [{"result": [3.0] * 3}] * 3, thrice
    assert [end["said"] for end in hasty] == [{"result": 2.0}] * 2, hasty


@pytest.mark.slow
@pytest.mark.parametrize("how", ["launch", "torchrun"])
def test_launched_ranks_may_join_one_world_after_another(how):
    """Also from one program after another, as entries of a world stay in the store of torchrun's agent."""
    command = {
        "launch": [sys.executable, "-m", "asyncoll", "launch", "-n", "2"],
        "torchrun": [Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node", "2"],
    }[how]
    done = subprocess.run(
        [*command, SCRIPTS / "world/joins_three_worlds.py", "again"],
        env=environment(**LIGHT),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout.count("three worlds")) == (0, 4), done.stderr


async def nest(comm):
    async with asyncoll.connect():
        pass


@pytest.fixture
def alone(monkeypatch):
    for name in [*os.environ]:
        if name.startswith(OURS):
            monkeypatch.delenv(name)
    return monkeypatch


def test_a_process_is_in_one_world_at_a_time(alone):
    with pytest.raises(UsageError, match="this process is in a world already: leave it before"):
        asyncoll.run(nest)
    assert asyncoll.run(size_of) == 1  # the first one has been left


@pytest.mark.slow
def test_a_rank_is_in_one_world_at_a_time(play):
    (ends,) = play({"size": 2, "program": "nested"})
    assert ["this process is in a world already" in end["said"]["text"] for end in ends] == [True] * 2, ends


# -- what the environment says ---------------------------------------------------------------------


async def size_of(comm):
    return comm.size


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"},
        {"SLURM_PROCID": "3"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
        {"PMI_RANK": "0", "PMI_SIZE": "2"},
        {"PMIX_RANK": "1"},
        {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2"},
    ],
)
def test_ranks_of_an_unknown_launcher_are_no_worlds_of_one(alone, environ):
    for name, value in environ.items():
        alone.setenv(name, value)
    with pytest.raises(UsageError, match=r"one of several processes that .* has started .*RANK and WORLD_SIZE"):
        asyncoll.run(size_of)


SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "job 1"}
PLACE = {"MASTER_ADDR": "head", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "rank", "size", "address"),
    [
        (SLURM | {"SLURM_STEP_NODELIST": "n[03-05,9]-ib,x2"}, 3, 8, "n03-ib"),
        (SLURM | {"SLURM_JOB_NODELIST": "alone"}, 3, 8, "alone"),
        (SLURM | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "n1"}, 3, 8, "127.0.0.1"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 1, 2, "127.0.0.1"),
        (OPEN_MPI | PLACE, 1, 2, "head"),
        (OPEN_MPI | PLACE | SLURM, 1, 2, "head"),  # srun has started the daemons of mpirun
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MASTER_PORT": "29500"}, 0, 2, "127.0.0.1"),
        ({"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2"} | PLACE, 0, 2, "head"),
    ],
)
def test_variables_of_other_launchers_that_tell_all_are_read(environ, rank, size, address):
    world = Environment.read(environ)
    assert (world.rank, world.size, world.master_addr) == (rank, size, address)
    assert world.master_port == 29500 if "MASTER_PORT" in environ else 15_000 <= world.master_port < 25_000
    other = dict.fromkeys([name for name in environ if name.endswith(("_RANK", "PROCID"))], "0")
    assert Environment.read(environ | other).master_port == world.master_port  # the same at all ranks


def test_jobs_of_other_launchers_meet_at_different_ports():
    ports = {
        Environment.read(SLURM | {"SLURM_JOB_ID": str(job), **PLACE, "MASTER_PORT": ""}).master_port for job in (1, 2)
    }
    assert len(ports) == 2


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4"},  # a shell of salloc
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # a batch script
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # srun -n1
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_a_single_process_of_a_launcher_is_a_world_of_one(alone, environ):
    for name, value in environ.items():
        alone.setenv(name, value)
    assert asyncoll.run(size_of) == 1


def test_rank_and_world_size_take_precedence_over_variables_of_launchers():
    environ = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "RANK": "0", "WORLD_SIZE": "1"}
    world = Environment.read(environ)
    assert world is not None
    assert world.size == 1


# -- what a process may do -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rank_raises_its_soft_limit_of_files_and_refuses_a_hard_limit_that_is_too_low(play):
    raised, refused = play({"size": 3, "files": [60, 1000]}, {"size": 3, "files": [60, 60]})
    assert [end["said"] for end in raised] == [{"result": 3.0}] * 3, raised
    for end in refused:
        assert end["said"]["error"] == "UsageError", end
        assert "opens up to 93 files" in end["said"]["text"]
        assert "its limit is 60; raise it (ulimit -n)" in end["said"]["text"]


@pytest.mark.slow
def test_a_folder_for_temporary_files_may_have_any_name(play, tmp_path):
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(folder)
    env = environment(XDG_RUNTIME_DIR="", ASYNCOLL_PRELOAD="numpy") | {"TMPDIR": os.fsdecode(folder)}
    launched = [sys.executable, "-m", "asyncoll", "launch", "-n", "2", SCRIPTS / "world/joins_three_worlds.py"]
    served = [sys.executable, SCRIPTS / "world/serves_in_temporary_folder.py"]
    for command, said in ((launched, "three worlds\n"), (served, "answered\n")):
        done = subprocess.run(
            command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert (done.returncode, said in done.stdout) == (0, True), done.stderr
    (ends,) = play({"size": 2, "folder": "\udcff"})
    assert [end["said"] for end in ends] == [{"result": 2.0}] * 2, ends
    assert os.listdir(folder) == []


# -- exceptions without a text ---------------------------------------------------------------------


class MuteError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def test_the_error_cites_the_variable_that_shows_several_processes(alone):
    alone.setenv("PMI_RANK", "0")
    alone.setenv("PMI_SIZE", "2")
    with pytest.raises(UsageError, match=r"\(PMI_SIZE=2\)"):
        asyncoll.run(size_of)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_the_text_of_an_exception_may_raise_anything(kind):
    class LoudError(Exception):
        def __str__(self):
            raise kind

    assert describe(LoudError()) == f"LoudError: (its __str__ raised {kind.__name__})"

    async def main(comm):
        comm.abort(LoudError())
        with pytest.raises(asyncoll.AbortedError, match=f"its __str__ raised {kind.__name__}"):
            await comm.barrier()

    testing.run_ranks(2, main)


def test_an_exception_without_a_text_is_described():
    assert describe(MuteError()) == "MuteError: (its __str__ raised RuntimeError)"
    assert describe(ValueError("a\udcffb")) == "ValueError: a\\udcffb"


@pytest.mark.parametrize("how", ["inproc", "shm"])
def test_a_world_ends_by_an_exception_without_a_text(how):
    heard = {}

    async def main(comm):
        try:
            await comm.barrier()  # so each rank is in its `main`
            if comm.rank == 1:
                raise MuteError
            await comm.barrier()
        except asyncoll.AbortedError as error:
            heard[comm.rank] = error.rank, error.reason
            raise

    with pytest.raises(MuteError):
        testing.run_ranks(3, main, transport=how)
    assert heard == dict.fromkeys((0, 2), (1, "MuteError: (its __str__ raised RuntimeError)"))


@pytest.mark.slow
def test_a_rank_that_raises_an_exception_without_a_text_is_named(play):
    ((first, _),) = play({"size": 2, "program": "unprintable"})
    assert first["said"]["text"] == "rank 1 aborted: MuteError: (its __str__ raised RuntimeError)"


# -- the folder of sockets -------------------------------------------------------------------------


def test_a_folder_that_a_killed_rank_has_left_is_removed_by_the_next_world(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, other = tmp_path / "asyncoll-join-left", tmp_path / "asyncoll-else"
    for folder in (left, other):
        folder.mkdir()
    with meeting_folder() as first, meeting_folder() as second:
        assert {*tmp_path.iterdir()} == {first, second, other}
        assert first.stat().st_mode & 0o777 == 0o700
    assert [*tmp_path.iterdir()] == [other]


def test_a_rank_that_closes_its_connection_as_it_gives_up_tells_why_a_moment_later(tmp_path):
    """The first rank of a host notices the death of a third one before it has read the hello of this one."""
    joining, has_closed, looks = Joining(1, 3), threading.Event(), []

    def hear():
        looks.extend([1] * has_closed.is_set())
        if len(looks) > 2:
            raise PeerLostError(2, "its process has ended")

    joining.listen(hear)
    with fd_passing._listen(tmp_path / "arena", 3) as first, ThreadPoolExecutor(1) as ranks:
        joined = ranks.submit(fd_passing.join, tmp_path, 1, (0, 1, 2), joining)
        first.accept()[0].close()
        has_closed.set()
        error = joined.exception(PATIENCE_S)
    assert (type(error), error.rank) == (PeerLostError, 2)
