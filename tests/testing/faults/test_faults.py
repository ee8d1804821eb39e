"""Faults at named points: at every injection point of every operation in virtual time, and among real processes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile

import numpy as np
import pytest
from click.testing import CliRunner

from asyncoll import AbortedError, Communicator, PeerLostError, UsageError, _core, cli, init
from asyncoll.tensors.operands import build
from asyncoll.testing import (
    Disconnect,
    Exit,
    HoldGil,
    Kill,
    Network,
    Orphan,
    Raise,
    Signal,
    Slow,
    Stop,
    fault,
    run_ranks,
    simulate,
)
from asyncoll.testing.devices.of_rank import device_of
from asyncoll.testing.faults import matrix
from asyncoll.testing.faults.cell_processes import CellStory
from asyncoll.testing.faults.cells import JOINING, KINDS, Cell, CellPlan, select
from asyncoll.testing.faults.checked_calls import OPERATIONS, echo
from asyncoll.testing.faults.core_points import PASSED
from asyncoll.testing.faults.host_faults import KillHost
from asyncoll.testing.faults.injection_points import InjectionPoints
from asyncoll.testing.faults.judging import Verdict, judge
from asyncoll.testing.faults.programs import PROGRAMS
from asyncoll.testing.faults.staged_calls import STAGED
from tests.support.places import SCRIPTS
from tests.support.processes import LIGHT, PATIENCE_S

WEATHER = Network(latency_s=10e-6, jitter_s=50e-6)
ELEMENTS = 6
SIZE = 3
VICTIM = 1
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # of a driver, which forks
SURVIVORS = {0: VICTIM, 2: VICTIM}  # the rank that each survivor must name

memory = pytest.mark.parametrize("memory", [False, True], ids=["messages", "memory"])
every_operation = pytest.mark.parametrize("operation", OPERATIONS)


CALLS = OPERATIONS | STAGED


class TroubleError(Exception):
    pass


def world(size, main, memory, seed=0):
    return simulate(size, main, WEATHER, seed, shared_memory=memory).results


def injection_points_of(operation, memory):
    """The number of injection points that the victim passes in its second call."""

    async def main(comm: Communicator) -> int:
        comm.rpc.register(echo)
        await OPERATIONS[operation](comm, ELEMENTS)
        with InjectionPoints(comm) as injection_points:
            await OPERATIONS[operation](comm, ELEMENTS)
        await comm.barrier()
        return injection_points.count

    return world(SIZE, main, memory)[VICTIM]


def outcomes(operation, memory, what, at="inside", injection_point=1):
    """The errors of all ranks, in a world where `what` strikes the victim and the others call until they raise.

    No survivor leaves before all have raised, because leaving would be another loss.
    """
    raised, knowing = {}, asyncio.Barrier(SIZE - 1)

    async def main(comm: Communicator) -> None:
        comm.rpc.register(echo)
        try:
            await CALLS[operation](comm, ELEMENTS)
            with fault(comm, what, rank=VICTIM, at=at, injection_point=injection_point):
                await CALLS[operation](comm, ELEMENTS)
            while True:
                await CALLS[operation](comm, ELEMENTS)
                await asyncio.sleep(1e-5)
        except BaseException as error:
            raised[comm.rank] = error
            if comm.rank != VICTIM:
                await knowing.wait()
            raise

    with contextlib.suppress(PeerLostError, AbortedError, TroubleError):
        world(SIZE, main, memory)
    return raised


@memory
@every_operation
def test_all_survivors_learn_of_a_death_at_any_injection_point(operation, memory):
    for injection_point in range(1, injection_points_of(operation, memory) + 1):
        raised = outcomes(operation, memory, Kill(), injection_point=injection_point)
        assert isinstance(raised.pop(VICTIM), asyncio.CancelledError)
        assert {rank: error.rank for rank, error in raised.items()} == SURVIVORS, injection_point
        assert all(isinstance(error, PeerLostError) for error in raised.values())


@memory
@every_operation
def test_all_survivors_learn_of_an_exception_at_any_injection_point(operation, memory):
    trouble = TroubleError("here")
    for injection_point in range(1, injection_points_of(operation, memory) + 1):
        raised = outcomes(operation, memory, Raise(trouble), injection_point=injection_point)
        assert raised.pop(VICTIM) is trouble
        assert {rank: error.rank for rank, error in raised.items()} == SURVIVORS, injection_point


@memory
@pytest.mark.parametrize("at", ["before", "inside", "after"])
def test_a_fault_strikes_before_inside_or_after_the_block(at, memory):
    done = []

    async def main(comm: Communicator) -> None:
        with fault(comm, Raise(TroubleError(at)), rank=VICTIM, at=at):
            # In memory the last rank to come does not wait, so it could not be cancelled.
            await asyncio.sleep(comm.rank != VICTIM)
            await comm.barrier()
            done.append(comm.rank)

    with pytest.raises(TroubleError, match=at):
        world(2, main, memory)
    assert (VICTIM in done) == (at == "after")


def test_control_blocks_that_are_made_inside_the_block_are_watched():
    async def main(comm: Communicator) -> int:
        arena = comm._core.member.endpoint.arena
        with InjectionPoints(comm) as injection_points:
            with arena.control_block(1 << 40, 1):
                pass
        return injection_points.count

    assert run_ranks(1, main, transport="shm") == [3]  # before the lock, before its signature, and after it
    assert world(1, main, memory=True) == [2]


@memory
def test_a_block_with_fewer_injection_points_is_struck_at_its_end(memory):
    struck = []

    async def main(comm: Communicator) -> None:
        with pytest.raises(TroubleError) if comm.rank == VICTIM else contextlib.nullcontext():
            with fault(comm, Raise(TroubleError()), rank=VICTIM, injection_point=10**6):
                await comm.barrier()
                struck.append(comm.rank)
        await comm.barrier()  # nothing was cancelled

    world(3, main, memory)
    assert sorted(struck) == [0, 1, 2]


def test_a_block_that_fails_or_is_cancelled_before_is_not_struck():
    async def main(comm: Communicator) -> None:
        with pytest.raises(KeyError):
            with fault(comm, Raise(TroubleError()), rank=0, at="after"):
                raise KeyError
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sleep(comm), 1.0)

    async def sleep(comm: Communicator) -> None:
        with fault(comm, Raise(TroubleError()), rank=0):
            await asyncio.sleep(2.0)

    simulate(1, main)


def test_an_interrupted_task_may_go_on():
    async def main(comm: Communicator) -> int:
        with pytest.raises(TroubleError) if comm.rank == VICTIM else contextlib.nullcontext():
            with fault(comm, Raise(TroubleError()), rank=VICTIM):
                await comm.solo_allreduce(np.ones(3))
        await asyncio.sleep(1.0)
        assert not asyncio.current_task().cancelling()
        return (await comm.solo_allreduce(np.ones(3), sync_every=0)).active

    assert max(simulate(3, main, WEATHER).results) > 0


def test_without_an_event_loop_a_fault_raises_at_the_end_of_the_block(monkeypatch):
    done = []

    def call(comm, at):
        with fault(comm, Raise(TroubleError(at)), rank=0, at=at):
            comm.barrier().wait()
            done.append(at)

    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with init() as comm:
        for at in ("before", "inside", "after"):
            with pytest.raises(TroubleError, match=at):
                call(comm, at)
    assert done == ["inside", "after"]


@memory
def test_injection_points_restore_what_they_wrapped(memory):
    async def main(comm: Communicator) -> None:
        endpoint = comm._core.member.endpoint
        await comm.barrier()
        before = [dict(vars(thing)) for thing in (endpoint.transport, endpoint, endpoint.arena) if thing is not None]
        blocks = list(endpoint.arena._control_blocks.values()) if memory else []
        with InjectionPoints(comm) as outer:
            await comm.barrier()
            with InjectionPoints(comm) as inner:
                await comm.barrier()
        assert 0 < inner.count < outer.count
        after = [vars(thing) for thing in (endpoint.transport, endpoint, endpoint.arena) if thing is not None]
        assert [set(each) for each in after] == [set(each) for each in before]
        assert not any(control_block.passing for control_block in blocks)
        await comm.barrier()

    world(2, main, memory)


@pytest.mark.parametrize(
    "what", [Kill(), Orphan(), Exit(), Signal(), Stop(), Slow(), Disconnect()], ids=lambda what: type(what).__name__
)
def test_faults_of_processes_are_refused_where_one_process_holds_all_ranks(what):
    async def main(comm: Communicator) -> None:
        with fault(comm, what, rank=0):
            await comm.barrier()

    with pytest.raises(UsageError, match=f"{type(what).__name__}.* use processes"):
        run_ranks(2, main)


@pytest.mark.parametrize("point", [{"at": "never"}, {"injection_point": 0}])
def test_a_moment_or_injection_point_that_does_not_exist(point):
    async def main(comm: Communicator) -> None:
        with fault(comm, HoldGil(1.0), rank=0, **point):
            pass

    with pytest.raises(UsageError, match="before, inside, after"):
        run_ranks(1, main)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_a_held_gil_causes_no_error(transport):
    async def main(comm: Communicator) -> float:
        with fault(comm, HoldGil(0.02), rank=VICTIM):
            x = await comm.allreduce(np.ones(3))
        return x[0]

    assert run_ranks(3, main, transport) == [3.0] * 3


# -- passages of the copies of a device ------------------------------------------------------------


@memory
@pytest.mark.parametrize("at", ["begun", "landed", "inside"])
@pytest.mark.parametrize("operation", STAGED)
def test_all_survivors_learn_of_a_failure_at_each_passage_of_a_copy(operation, at, memory):
    trouble = TroubleError("here")
    for what in (Kill(), Raise(trouble)):
        raised = outcomes(operation, memory, what, at)
        assert isinstance(raised.pop(VICTIM), asyncio.CancelledError if isinstance(what, Kill) else TroubleError)
        assert {rank: error.rank for rank, error in raised.items()} == SURVIVORS


@memory
@pytest.mark.parametrize("at", ["begun", "landed"])
def test_a_fault_strikes_where_a_copy_is_queued_or_has_arrived(at, memory):
    passed = []

    @dataclasses.dataclass(frozen=True)
    class Note:
        of_process = False

        def strike(self, place):
            passed.append(device._copying[-1].done)

    async def main(comm: Communicator) -> None:
        nonlocal device
        with device_of(comm) as device:
            x = device.tensor(build(np.ones(5), "float64", (5,), as_torch=True))
            with fault(comm, Note(), rank=0, at=at):
                await comm.allreduce(x)

    device = None
    world(1, main, memory)
    assert passed == [0 if at == "begun" else 40]


# -- points of the compiled core ------------------------------------------------------------------

needs_core = pytest.mark.skipif(_core.native is None, reason="the compiled core is not there")
ROUNDS = [(*call, points) for call, points in PASSED.items() if "round-filled" in points]
WAIT_AVOIDING = {operation for operation, _, _ in ROUNDS}


@needs_core
def test_every_point_of_the_compiled_core_has_a_cell_and_every_cell_a_point():
    points = set(_core.native.points)
    assert set().union(*PASSED.values()) == points
    assert len(points) == len(_core.native.points)
    cells = select("*/*/*-*", None, range(1), "shm", 4)
    assert {cell.moment for cell in cells if cell.kind == "kill"} == points
    assert {cell.moment for cell in cells if cell.kind == "stop"} == points
    assert {cell.moment for cell in cells if cell.kind == "linger"} == {"lock-taken"}
    assert not [cell for cell in select("*", None, range(1), "zmq", 4) if cell.is_at_core_point]
    for transport, size in (("shm-mixed", 4), ("shm", 8)):  # no rank reads the private memory of another
        struck = {cell.moment for cell in select("*/*/*-*", None, range(1), transport, size)}
        assert points - struck == {"peer-read", "peers-reduced", "peer-taken"}


@needs_core
@pytest.mark.slow
def test_operations_pass_their_points_of_the_compiled_core():
    """The job runs into its timeout if an operation never passes one of them."""
    operations = {operation for operation, _ in PASSED} - WAIT_AVOIDING
    program = [SCRIPTS / "testing/faults/passes_all_points.py", *operations]
    command = [sys.executable, "-m", "asyncoll", "launch", "-n", "3", "--timeout", str(PATIENCE_S), *program]
    done = subprocess.run(command, env=os.environ | LIGHT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@needs_core
@pytest.mark.parametrize(("operation", "elements", "points"), ROUNDS)
def test_rounds_pass_their_points_of_the_compiled_core(operation, elements, points):
    passed = set()

    async def main(comm: Communicator) -> None:
        for _ in range(20):
            await OPERATIONS[operation](comm, elements)
            await asyncio.sleep(0)

    before = _core.native.watch(passed.add)
    try:
        run_ranks(4, main, "shm")
    finally:
        assert _core.native.watch(before) == passed.add
    assert {point for point in points if point.startswith("round")} <= passed


@needs_core
def test_a_fault_strikes_at_a_point_of_the_compiled_core(monkeypatch):
    struck, reported = [], []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: reported.append(unraisable.exc_type))

    @dataclasses.dataclass(frozen=True)
    class Note:
        of_process = False

        def strike(self, place):
            struck.append(place.comm.rank)
            raise TroubleError  # reported, and the primitive goes on

    async def main(comm: Communicator) -> None:
        await comm.barrier()
        with fault(comm, Note(), rank=VICTIM, at="meeting-arrived", injection_point=1):
            await comm.barrier()
            assert len(struck) <= 1
        await comm.barrier()

    run_ranks(3, main, "shm")
    assert struck == [VICTIM]
    assert reported == [TroubleError]
    with pytest.raises(UsageError, match="at a point of the compiled core"):
        run_ranks(1, lambda comm: _enter(fault(comm, Note(), rank=0, at="meeting-over")))


async def _enter(context):
    with context:
        pass


# -- the matrix ----------------------------------------------------------------------------------


def test_cells_are_chosen_by_name_and_drawn_by_seed():
    everything = select("*", None, range(1), "zmq", 4)
    kinds = [kind for kind in KINDS.values() if not kind.of_host]
    of_runs = [kind for kind in kinds if not kind.of_program]
    assert len(everything) == len(of_runs) * (len(OPERATIONS) * 3 + len(STAGED) * 5) + len(kinds) * len(PROGRAMS) * 3
    assert {cell.operation for cell in everything if cell.kind == "return"} == set(PROGRAMS)
    assert {cell.name for cell in select("kill/*/inside,stop/solo/after", None, range(1), "shm", 4)} == {
        *(f"kill/{operation}/inside" for operation in (*OPERATIONS, *STAGED, *PROGRAMS)),
        "stop/solo/after",
    }
    drawn = select("*", 10, range(5, 8), "zmq", 3)
    assert drawn == select("*", 10, range(5, 8), "zmq", 3)
    assert [cell.seed for cell in drawn] == [5] * 10 + [6] * 10 + [7] * 10
    assert {cell.name for cell in drawn[:10]} != {cell.name for cell in drawn[10:20]}
    assert drawn[25] in select(drawn[25].name, None, range(7, 8), "zmq", 3), "one cell of many can be repeated alone"
    assert len({CellPlan.draw(cell).victim for cell in everything}) == 4
    recorded = select("kill/*/record", None, range(9), "shm-mixed", 4)
    assert {CellPlan.draw(cell).victim for cell in recorded} == {1, 3}, "only these change the record in Python"


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ("kil/*", "use FAULT/OPERATION/MOMENT"),
        ("kil/*/inside", "no fault is 'kil'; there is kill"),
        ("kill/nope/inside", "no operation of kill is 'nope'; there is allreduce, registered_allreduce,"),
        ("kill/barier/inside", "no operation of kill is 'barier'; there is barrier"),
        ("gil/allreduce/meeting-arrived", "no moment of gil/allreduce is 'meeting-arrived'; there is before, inside,"),
        ("kill-host/*/*", "kill-host needs --hosts N, of at least 2"),
    ],
)
def test_a_pattern_that_matches_no_cell(cells, why):
    result = CliRunner().invoke(cli.main, ["faults", "--cells", cells])
    assert result.exit_code == 2
    assert f"'{cells}' names no cell: {why}" in " ".join(result.output.split())


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_table_is_cut_between_faults_and_never_in_a_word(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    cells = select("*/allreduce/inside,*/init_allreduce/inside", None, range(2), "zmq", 4)
    verdicts = [Verdict(cell, ("wrong",), (0.012, 0.25), ("gone",) * 2) for cell in cells]
    matrix.show(verdicts)
    table = capsys.readouterr().out.partition("time from a fault")[2]
    words = table.split()
    assert max(map(len, table.splitlines()[1:-1])) <= columns
    for kind in {cell.kind for cell in cells}:
        assert words.count(kind) == 1, kind
    assert words.count("131/250") == len(cells) / 2  # seeds
    late = sum(bool(verdict.late) for verdict in verdicts)
    total = f"{len(cells)} cells, {len(cells)} broken, {late} late (right errors after more than 100 ms, or 1 s after a"
    assert total in table


def told(rank, what, at_s=0.0, **more):
    return {"rank": rank, "what": what, "at_s": at_s, **more}


def good_story(cell):
    """A story in which every survivor raises the right error 10 ms after the fault."""
    victim, kind = CellPlan.draw(cell).victim, KINDS[cell.kind]
    events = [told(victim, "struck", 1.0)]
    for rank in range(cell.size):
        if not kind.told:
            events.append(told(rank, "done", 2.0))
        elif rank != victim:
            events.append(told(rank, "error", 1.01, type=kind.told[0], named=victim, text="gone"))
    codes, output = dict.fromkeys(range(cell.size), 0), dict.fromkeys(range(cell.size), "")
    return CellStory(told=events, codes=codes, output=output)


def spoiled(story, rank, **more):
    index = next(i for i, each in enumerate(story.told) if each["rank"] == rank and each["what"] in ("error", "done"))
    changed = [each | more if i == index else each for i, each in enumerate(story.told)]
    return dataclasses.replace(story, told=changed)


LETHAL = Cell("kill", "allreduce", "inside", "shm", 3, 0)
HARMLESS = Cell("gil", "allreduce", "inside", "shm", 3, 0)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not KINDS[kind].of_host])
def test_a_correct_story_passes(kind):
    cell = Cell(kind, "allreduce", "inside", "shm", 3, 0)
    verdict = judge(cell, good_story(cell))
    assert (verdict.broken, verdict.late) == ((), ())
    assert len(verdict.heard_s) == (2 if KINDS[kind].told else 0)


@pytest.mark.parametrize(
    ("cell", "what", "complaint"),
    [
        (LETHAL, {"named": 7}, "was not told of rank"),
        (LETHAL, {"type": "AbortedError"}, "was not told of rank"),
        (LETHAL, {"what": "done"}, "was told nothing"),
        (HARMLESS, {"what": "error", "type": "PeerLostError", "named": 1, "text": "gone"}, "was disturbed"),
        (HARMLESS, {"what": "left"}, "ended with code 0"),
    ],
)
def test_a_wrong_error_breaks_a_cell(cell, what, complaint):
    rank = next(rank for rank in range(3) if rank != CellPlan.draw(cell).victim)
    (broken,) = judge(cell, spoiled(good_story(cell), rank, **what)).broken
    assert complaint in broken


def test_a_late_error_is_late():
    rank = next(rank for rank in range(3) if rank != CellPlan.draw(LETHAL).victim)
    verdict = judge(LETHAL, spoiled(good_story(LETHAL), rank, at_s=1.2))
    assert verdict.broken == ()
    assert verdict.late == (f"heard after 200 ms by rank {rank}: PeerLostError: gone",)


STACK = 'Thread 1 (most recent call first):\n  File "/x/asyncoll/transport/memory/arena.py", line 7 in wait'


@pytest.mark.parametrize("cell", [LETHAL, HARMLESS])
@pytest.mark.parametrize(
    ("what", "complaint"),
    [
        ({"told": []}, "the fault did not strike"),
        ({"left": ["process 7"]}, "left behind: process 7"),
        ({"codes": {0: 1, 1: 1, 2: 1}}, "ended with code 1"),
        ({"hung": {0: STACK}}, "rank 0 hung: wait transport/memory/arena.py:7"),
    ],
)
def test_any_other_breach_breaks_a_cell(cell, what, complaint):
    broken = judge(cell, dataclasses.replace(good_story(cell), **what)).broken
    assert any(complaint in each for each in broken)


CHOSEN_CELLS = SCRIPTS / "testing/faults/chosen_cells.py"
CELLS = ("kill/allreduce/inside", "exit/solo/after", "raise/alltoallv/inside", "disconnect/send_recv/inside")
CELLS += ("slow/ddp_step/inside", "kill/eager_step/before", "raise/sparse/inside", "exit/broadcast/inside")
CELLS += ("interrupt/solo/inside", "terminate/majority/after", "crash/rpc/inside", "fatal/allreduce/before")
CELLS += ("orphan/allreduce/inside", "orphan/registered_allreduce/before", "orphan/quorum/inside")
CELLS += ("signal/allreduce/inside", "signal/solo/inside", "signal/rpc/inside")

STAGED_CELLS = ("kill/staged_allreduce/begun", "exit/staged_solo/landed", "raise/staged_send_recv/landed")
STAGED_CELLS += ("signal/staged_allgather/begun", "kill/staged_solo/begun")


PROGRAM_CELLS = ("return/init_allreduce/inside", "interrupt/init_solo/inside", "raise/torch_all_reduce/after")
PROGRAM_CELLS += ("return/ddp_solo/inside", "raise/ddp_solo/before", "signal/ddp_solo/inside", "kill/ddp_solo/inside")
PROGRAM_CELLS += ("slow/ddp_solo/inside",)

CORE_CELLS = ("kill/allreduce/lock-taken", "kill/registered_allreduce/meeting-counted", "kill/solo/round-taken")
CORE_CELLS += ("linger/solo/lock-taken",)

# Where the record of rounds changes.
DEADLY_POINTS = (
    "eager_step/round-opened",
    "majority/round-granted",
    "quorum/round-published",
    "majority/round-claimed",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "cells"),
    [
        ("shm", (*CELLS, *STAGED_CELLS[:3])),
        ("zmq", (*CELLS, *STAGED_CELLS[3:])),
        ("shm", PROGRAM_CELLS),
        ("zmq", PROGRAM_CELLS),
        pytest.param("shm", CORE_CELLS, marks=needs_core),
        pytest.param("shm-mixed", ("kill/quorum/inside", *CORE_CELLS), marks=needs_core),
        pytest.param("shm", [f"kill/{point}" for point in DEADLY_POINTS], marks=needs_core),
        pytest.param("shm-mixed", [f"kill/{operation}/record" for operation in ("majority", "eager_step")]),
    ],
)
def test_a_few_cells_among_processes(transport, cells, forked, tmp_path):
    """Times are not checked: that needs an idle machine, and is the job of the command."""
    with tempfile.TemporaryDirectory() as temporary:  # its path is shorter than that of `tmp_path`: sockets are in it
        environment = os.environ | {"TMPDIR": temporary, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)} | ONE_THREAD
        code, out, err = forked(environment, CHOSEN_CELLS, transport, "3", *cells)
        assert (code, json.loads(out)) == (0, {cell: [] for cell in cells}), err
        assert os.listdir(temporary) == []


@pytest.mark.slow
def test_the_command(tmp_path):
    command = [sys.executable, "-m", "asyncoll", "faults", "--cells", "raise/barrier/after", "-n", "2"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert "1 cells, 0 broken" in done.stdout
    assert "barrier" in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["Stop(0.05)", "Slow(10.0, 0.1)"])
def test_a_stopped_process_continues(what):
    program = (
        "import asyncoll; from asyncoll.testing import *\n"
        "async def main(comm):\n"
        f"    with fault(comm, {what}, rank=0, at='before'): print('on')\n"
        "asyncoll.run(main)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert done.stdout == "on\n"


# -- hosts -----------------------------------------------------------------------------------------

BETWEEN = ("allreduce", "broadcast", "barrier", "send_recv", "solo", "majority", "synchronous_solo", "rpc", "ddp_step")


def of_host(operation, what, injection_point):
    """The errors of ranks 0, 1 and 4, while `what` strikes rank 2 of the host of ranks 2 and 3."""
    raised, knowing = {}, asyncio.Barrier(3)

    async def main(comm: Communicator) -> None:
        comm.rpc.register(echo)
        try:
            await comm.barrier()  # all have joined
            await OPERATIONS[operation](comm, 10)
            with fault(comm, what, rank=2, injection_point=injection_point):
                await OPERATIONS[operation](comm, 10)
            while True:
                await OPERATIONS[operation](comm, 10)
                await asyncio.sleep(1e-5)
        except BaseException as error:
            raised[comm.rank] = error
            if comm.rank not in (2, 3):
                await knowing.wait()
            raise

    with contextlib.suppress(PeerLostError):
        simulate(5, main, WEATHER, injection_point, shared_memory=True, hosts="aabba")
    return raised


@pytest.mark.parametrize("operation", BETWEEN)
def test_all_survivors_learn_of_a_host_that_vanishes_in_the_middle_of_a_call(operation):
    for injection_point in (1, 2, 4, 7, 11, 16):
        raised = of_host(operation, KillHost(), injection_point)
        assert isinstance(raised.pop(2), asyncio.CancelledError)
        assert isinstance(raised.pop(3), asyncio.CancelledError)
        assert {rank: (error.ranks, error.host) for rank, error in raised.items()} == dict.fromkeys(
            (0, 1, 4), ((2, 3), "b")
        )


def test_cells_between_hosts():
    cells = select("*", None, range(1), "shm", 5, hosts=2)
    assert {cell.name for cell in cells if cell.operation == JOINING} == {
        f"{kind}-host/joining/inside" for kind in ("kill", "stop", "down", "cut")
    }
    assert not [cell for cell in select("*", None, range(1), "shm", 5) if KINDS[cell.kind].of_host]
    assert {cell.lost for cell in cells if cell.kind == "cut-host"} == {(0, 1, 2), (3, 4)}
    assert {cell.lost for cell in cells if cell.kind == "kill"} == {(rank,) for rank in range(5)}
    assert str(cells[0]).endswith("-n 5 --hosts 2 --seed 0")
    with pytest.raises(UsageError, match="5 ranks are on 1 to 5 hosts, not 6"):
        select("*", None, range(1), "shm", 5, hosts=6)


VANISHED = Cell("cut-host", "allreduce", "inside", "shm", 4, 0, hosts=2)


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({}, None),
        ({"ranks": [VANISHED.lost[0]]}, "was not told of ranks"),
        ({"host": "c"}, "was not told of ranks"),
        ({"what": "left"}, "was told nothing of ranks"),
    ],
)
def test_an_error_names_the_host_that_has_vanished(more, complaint):
    survivors = [rank for rank in range(4) if rank not in VANISHED.lost]
    of_all = {"named": VANISHED.lost[0], "ranks": list(VANISHED.lost), "text": "gone", "type": "PeerLostError"}
    of_all["host"] = VANISHED.placement.host_of(VANISHED.lost[0])
    events = [told(CellPlan.draw(VANISHED).victim, "struck", 1.0)]
    events += [told(rank, "error", 1.5, **of_all) for rank in range(4)]
    story = CellStory(told=events, codes=dict.fromkeys(range(4), 0), output=dict.fromkeys(range(4), ""))
    verdict = judge(VANISHED, spoiled(story, survivors[0], **more))
    assert [complaint in each for each in verdict.broken] == [True] * (complaint is not None)
    assert verdict.late == ()


@pytest.mark.slow
def test_hosts_that_vanish_among_processes(forked):
    """Times are not checked. Two hosts are network namespaces; an exit code of 77 tells that they cannot be made."""
    cells = ("kill-host/solo/inside", "kill-host/allreduce/inside")  # a silence is noticed after ASYNCOLL_FREEZE_S
    code, out, err = forked(os.environ | ONE_THREAD, CHOSEN_CELLS, "shm", "4", "--hosts", *cells)
    if code == 77:
        pytest.skip(err)
    assert json.loads(out) == {cell: [] for cell in cells}, err
