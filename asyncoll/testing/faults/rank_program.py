"""The program of one rank of a cell. It reports to the driver the strike of the fault, its error and its end."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import faulthandler
import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import uvloop

from asyncoll.communicator import Communicator
from asyncoll.launch import control
from asyncoll.testing.faults.cells import JOINING, KINDS, Cell, CellPlan
from asyncoll.testing.faults.checked_calls import OPERATIONS, echo
from asyncoll.testing.faults.injection_points import InjectionPoints
from asyncoll.testing.faults.injectors import Fault, FaultPlace, OfProcess, fault
from asyncoll.testing.faults.left_record import left_records
from asyncoll.testing.faults.lingering import linger
from asyncoll.testing.faults.programs import PROGRAMS, EarlyReturn
from asyncoll.testing.faults.staged_calls import STAGED
from asyncoll.world.join import connect

_Call = Callable[[], Awaitable[None]]
_LATE_S = 0.002  # the longest time that a rank is late
_CALLS_AFTER = 10  # calls after a fault that no rank may notice


def be_rank(cell: Cell, rank: int, channel: socket.socket, began_s: float) -> NoReturn:
    """Run the rank in this process, which was forked for it. Never returns: the process exits with code 0 or 1.

    `began_s` is the time on the clock of `time.monotonic` at which the first rank was forked.
    """
    code = 1
    try:
        faulthandler.register(signal.SIGUSR1)
        if cell.kind == "interrupt":
            signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
        if cell.kind == "signal":
            # SystemExit in the main thread, wherever that is: many programs end like this on SIGTERM.
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
        if KINDS[cell.kind].lingers_s:
            linger(KINDS[cell.kind].lingers_s)
        part = _CellPart(cell, rank, channel)
        if cell.operation == JOINING and rank in cell.lost:
            threading.Thread(
                target=part.strike_at, args=(began_s + CellPlan.draw(cell).joining_s,), daemon=True
            ).start()
        if cell.operation in PROGRAMS:
            _run_as_program(part.play_program)
        else:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, contextlib.suppress(Exception):
                runner.run(part.play())
        code = 0
    finally:
        os._exit(code)


def _run_as_program(main: Callable[[], None]) -> None:
    """Call `main` as the interpreter runs a program: the functions at its end find the exception that has ended it."""
    # The functions registered so far are those of the driver.
    atexit._clear()
    try:
        main()
    except (SystemExit, EarlyReturn):
        pass
    except BaseException as error:
        sys.last_value = error
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def _run_without_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that waits for nothing but turns of a loop."""
    with contextlib.suppress(StopIteration):
        while True:
            work.send(None)


@dataclass(frozen=True, slots=True)
class _Reported(OfProcess):
    """A fault that reports to the driver just before it strikes. All faults are of a process: each rank is one."""

    what: Fault
    part: _CellPart

    def strike(self, place: FaultPlace) -> None:
        self.part.tell("struck")
        self.what.strike(place)


class _CellPart:
    """The part of this rank in the cell: a call, a counted call, the call that the fault strikes, and later calls."""

    def __init__(self, cell: Cell, rank: int, channel: socket.socket) -> None:
        self._cell = cell
        self._kind = KINDS[cell.kind]
        self._plan = CellPlan.draw(cell)
        self._rank = rank
        self._channel = channel
        self._has_failed = False

    def tell(self, what: str, **more: Any) -> None:
        control.send(self._channel, {"rank": self._rank, "what": what, "at_s": time.monotonic(), **more})

    async def play(self) -> None:
        with self._telling():
            async with connect() as comm:
                with self._telling(comm):
                    await self._calls_of_loop(comm)
        self.tell("left")

    def play_program(self) -> None:
        """Make the calls of the cell in a program that has no event loop."""
        with self._telling(), PROGRAMS[self._cell.operation](self._plan.elements) as (comm, step):

            async def call() -> None:
                step()

            with self._telling(comm):
                _run_without_loop(self._calls(comm, call))
        self.tell("left")

    def strike_at(self, when_s: float) -> None:
        """Strike while the ranks join: each process of the host, which all do this at the same time, or its network."""
        time.sleep(max(0.0, when_s - time.monotonic()))
        if self._rank == self._plan.victim:
            self.tell("struck")
        if self._kind.signal:
            os.kill(os.getpid(), self._kind.signal)
        elif self._rank == self._plan.victim:
            self._kind.make().strike(None)  # type: ignore[arg-type]

    async def _calls_of_loop(self, comm: Communicator) -> None:
        # Joining is over: the fault comes after it.
        if self._cell.operation == JOINING:
            while True:
                await comm.barrier()
        comm.rpc.register(echo)
        await self._calls(comm, partial((OPERATIONS | STAGED)[self._cell.operation], comm, self._plan.elements))

    async def _calls(self, comm: Communicator, call: _Call) -> None:
        await call()
        with InjectionPoints(comm) as rehearsed:
            await call()
        is_inside = self._cell.moment == "inside"
        injection_point = 1 + int(self._plan.depth * rehearsed.count) if is_inside else 1
        what = _Reported(self._kind.make(), self)
        if self._cell.is_at_core_point:
            with fault(comm, what, rank=self._plan.victim, at=self._cell.moment, injection_point=self._plan.passing):
                await self._dawdle(call)

        with fault(comm, what, rank=self._plan.victim, at=self._cell.moment, injection_point=injection_point):
            await call()
        for _ in itertools.count() if self._kind.told else range(_CALLS_AFTER):
            await call()
            await asyncio.sleep(0)
        self.tell("done")

    async def _dawdle(self, call: _Call) -> NoReturn:
        """Call again and again, and let ranks be late in turn: each must be the last one, and wait, before long."""
        random = np.random.default_rng([self._cell.seed, self._rank])
        while True:
            if random.random() < 0.5:
                await asyncio.sleep(random.random() * _LATE_S)
            await call()

    @contextlib.contextmanager
    def _telling(self, comm: Communicator | None = None) -> Iterator[None]:
        """Tell of the first error of this rank, and of what its end has left in `comm`."""
        try:
            yield
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                self._tell_error(error)
                if comm is not None:
                    self._tell_left(comm)
            raise

    def _tell_left(self, comm: Communicator) -> None:
        """Tell of contributions of this rank that the death of another one has lost or doubled: each of them is 1."""
        for left in left_records(comm):
            staged = left.ticket - left.published
            if (left.staged != staged).any():
                self.tell("record", text=f"{left.staged[:3]}... are left of {staged} contributions: {left}"[:2000])

    def _tell_error(self, error: Exception) -> None:
        named, missing = getattr(error, "rank", None), getattr(error, "missing", ())
        ranks = getattr(error, "ranks", (named,))
        more = {"named": named, "ranks": ranks, "missing": missing, "host": getattr(error, "host", "")}
        self.tell("error", type=type(error).__name__, text=str(error)[:2000], **more)
