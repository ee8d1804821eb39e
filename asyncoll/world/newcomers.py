"""How processes join a world that has begun, on one host: what they and its members tell each other in its store.

A newcomer registers. The coordinator of the members begins an attempt with all that wait: an entry with the epoch and
its members, and a folder, in which these meet as ranks that start together do. If the attempt fails, a newcomer that
lives registers again. So each registration has a member number of its own, which is never given again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from asyncoll.errors import AsyncollError, ServiceLostError, UsageError
from asyncoll.runtime.endpoint import Endpoint, NextEpoch
from asyncoll.runtime.linking import GrowthAttempt
from asyncoll.transport.joining import Joining
from asyncoll.transport.keys import read_key
from asyncoll.transport.processes import is_gone
from asyncoll.world.connecting import connect_all
from asyncoll.world.environment import Environment
from asyncoll.world.epoch_stores import decisions_of
from asyncoll.world.host_attempt import newest_attempt
from asyncoll.world.rank_links import end_joining, endpoint_of, meeting
from asyncoll.world.write_once import Decisions, SealedOnce, members_of

_LINK_S = 10.0  # for an attempt: all of its ranks run, and wait for nothing else
_OVER = "over"  # the entry of a world that has ended


class WorldOverError(UsageError):
    """A newcomer has come to a world that has ended."""


class Seat(NamedTuple):
    """The place of one rank in an attempt: where it meets the others, and what it is then."""

    attempt: GrowthAttempt
    environment: Environment
    joining: Joining


class Newcomers:
    """The newcomers of a world in the folder of its job, for one member: a `runtime.linking.NewcomerSource`."""

    def __init__(self, environment: Environment, entries: SealedOnce, first_size: int) -> None:
        """`first_size` is the number of ranks in the first epoch: the numbers of newcomers follow theirs."""
        self.first_size = first_size
        self._environment = environment
        self._entries = entries
        self._waiting: dict[int, int] = {}  # the process ids of newcomers, by the number of their registration
        self._registrations = 0  # those that have been read
        self._attempts = 0
        self._lock = threading.Lock()  # of what has been read

    def begin(self, epoch: int, members: tuple[int, ...]) -> GrowthAttempt | None:
        with self._lock:
            return self._begin(epoch, members)

    def count(self) -> int:
        with self._lock:
            self._look()
            return len(self._waiting)

    def _begin(self, epoch: int, members: tuple[int, ...]) -> GrowthAttempt | None:
        self._look()
        while self._waiting:
            newcomers = (self.first_size + index for index in sorted(self._waiting))
            attempt = GrowthAttempt(self._attempts, epoch, (*members, *newcomers))
            _make_folder(self._environment, attempt)  # before others can know of it
            held = self._entries.write(_name_of_attempt(attempt.number), *self._texts(attempt))
            self._look()
            if held == self._texts(attempt):
                return attempt
        return None

    async def connect(self, attempt: GrowthAttempt, number: int, succession: NextEpoch) -> Endpoint:
        seat = seat_of(attempt, number, self._environment)
        links = await meeting(seat.environment, seat.joining)
        endpoint = endpoint_of(links, seat.environment, attempt.epoch, attempt.members)
        endpoint.succession, endpoint.is_ahead = succession, True  # others may be in the new epoch before this rank is
        try:
            await connect_all(endpoint, seat.joining, links.hosts[endpoint.rank])
        except BaseException as error:
            await end_joining(links, error)
            if links.arena is not None:
                links.arena.close()
            raise
        links.until_joined.close()
        if endpoint.rank == 0:  # all are connected; of an attempt that has failed, the others read why
            shutil.rmtree(seat.environment.folder, ignore_errors=True)
        return endpoint

    def end(self) -> None:
        """The world is over: those that wait learn it. Blocks."""
        self._entries.write(_OVER, "")

    def _texts(self, attempt: GrowthAttempt) -> list[str]:
        return [str(attempt.epoch), ",".join(map(str, attempt.members)), str(self.first_size)]

    def _look(self) -> None:
        """Read what is new: the newcomers that have registered, and those that were in an attempt or have given up."""
        while (texts := self._entries.read(_registration(self._registrations))) is not None:
            if reason := self._misfit(*texts[1:3]):
                self._entries.write(_refusal(self._registrations), reason)
            else:
                self._waiting[self._registrations] = int(texts[0])
            self._registrations += 1
        while (found := _read_attempt(self._entries, self._attempts)) is not None:
            for number in found[0].members:
                self._waiting.pop(number - self.first_size, None)
            self._attempts += 1
        gone = [index for index, pid in self._waiting.items() if is_gone(pid) or self._entries.read(_withdrawal(index))]
        for index in gone:
            del self._waiting[index]

    def _misfit(self, release: str, carrier: str) -> str:
        """Why a newcomer cannot join these ranks; empty if it can."""
        if release != (own := version("asyncoll")):
            return f"the newcomer has version {release} of asyncoll, and the ranks have {own}: install the same"
        if carrier != (own := _carrier(self._environment)):
            return f"the newcomer has ASYNCOLL_TRANSPORT={carrier}, and the ranks have {own}: give it the same"
        return ""


class Newcomer:
    """A process that waits to join the newest world of its job. Its methods block."""

    decisions: Decisions  # of that world

    def __init__(self, environment: Environment, limit_s: float) -> None:
        """It has `limit_s` to become a member. Raises UsageError if there is no such job."""
        self.first_size = 0  # known with the first attempt
        self._environment = environment
        self._job = Path(environment.folder)
        self._key = read_key(self._job / "job")
        self._world = 0  # none yet
        self._attempts = 0  # those of this world that have been read
        self._wait = Joining(0, 1, limit_s)

    def seat(self) -> Seat:
        """Register, and wait for an attempt. Raises WorldOverError, DeadlineError, and ClosedError after `cancel`."""
        while True:
            self._enter_newest_world()
            if (seat := self._await_seat()) is not None:
                return seat

    def cancel(self) -> None:
        """End the wait. In any thread."""
        self._wait.cancel()

    def _enter_newest_world(self) -> None:
        while not (world := self._newest_world()):
            self._pause("the job has no world yet")
        if world != self._world:
            decisions = decisions_of(self._environment, str(world), self._key)
            assert decisions is not None, "a job with a folder has a store"
            self.decisions, self._world, self._attempts = decisions, world, 0

    def _newest_world(self) -> int:
        try:
            return newest_attempt(self._job)
        except FileNotFoundError:
            raise WorldOverError("the job has ended") from None

    def _await_seat(self) -> Seat | None:
        """None if another world begins: this one was not formed, or is over."""
        entries = self.decisions.entries
        own = [str(os.getpid()), version("asyncoll"), _carrier(self._environment), secrets.token_hex(8)]
        index = next(index for index in itertools.count() if entries.write(_registration(index), *own) == own)
        try:
            while self._newest_world() == self._world:
                while (found := _read_attempt(entries, self._attempts)) is not None:
                    self._attempts += 1
                    attempt, self.first_size = found
                    if (number := self.first_size + index) in attempt.members:
                        return seat_of(attempt, number, self._environment)
                if (refusal := entries.read(_refusal(index))) is not None:
                    raise UsageError(*refusal)
                if entries.read(_OVER) is not None:
                    raise WorldOverError("the world has ended")
                self._pause("the ranks have not connected to this process: all call `waiting`, or `grow`")
        except AsyncollError:
            with contextlib.suppress(ServiceLostError):
                entries.write(_withdrawal(index), "-")
            raise
        return None

    def is_admitted(self, attempt: GrowthAttempt, has_failed: Callable[[], bool]) -> bool:
        """Wait for the decision on the epoch of `attempt`. False if it is another, or `has_failed` comes before it."""
        while True:
            failed = has_failed()
            decision = self.decisions.read(attempt.epoch)
            if decision is not None or failed:
                return decision is not None and decision.members == attempt.members
            self._pause("the others have not gone on to the next epoch")

    def _pause(self, why: str) -> None:
        self._wait.check(list, why)
        time.sleep(self._wait.pause_s)  # noqa: TID251 (another thread has the loop)


def seat_of(attempt: GrowthAttempt, number: int, environment: Environment) -> Seat:
    """The place of the member `number`."""
    rank, size = attempt.members.index(number), len(attempt.members)
    folder = str(_folder(environment, attempt))
    return Seat(attempt, replace(environment, rank=rank, size=size, folder=folder), Joining(rank, size, _LINK_S))


def _folder(environment: Environment, attempt: GrowthAttempt) -> Path:
    return Path(environment.folder, f"newcomers-{attempt.number}")


def _make_folder(environment: Environment, attempt: GrowthAttempt) -> None:
    """Make the folder in which the ranks of `attempt` meet, with the key of the job."""
    folder = _folder(environment, attempt)
    folder.mkdir(0o700, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.link(Path(environment.folder, "job"), folder / "job")


def _read_attempt(entries: SealedOnce, number: int) -> tuple[GrowthAttempt, int] | None:
    """The attempt of this number, and the number of ranks in the first epoch; None if it has not begun."""
    if (texts := entries.read(_name_of_attempt(number))) is None:
        return None
    epoch, listed, first_size = texts
    return GrowthAttempt(number, int(epoch), members_of(listed) or ()), int(first_size)


def _name_of_attempt(number: int) -> str:
    return f"attempt-{number}"


def _registration(index: int) -> str:
    return f"newcomer-{index}"


def _refusal(index: int) -> str:
    return f"refusal-{index}"


def _withdrawal(index: int) -> str:
    return f"withdrawal-{index}"


def _carrier(environment: Environment) -> str:
    return "shm" if environment.shares_memory else "zmq"
