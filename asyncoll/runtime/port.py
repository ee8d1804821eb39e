"""What the rounds of one operation need of the runtime of their rank: signals, lanes, time, tasks, failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any

from asyncoll.arguments import digest
from asyncoll.errors import ProtocolError
from asyncoll.runtime.group import Group, Lane
from asyncoll.runtime.member import Member
from asyncoll.tensors.reductions import Array
from asyncoll.transport.wire import Buffer

Heard = Callable[[int, int, int, Buffer], None]  # source (a rank of the group), number, step, payload


class Port:
    """Of one operation at one rank. Everything happens on the runtime's loop."""

    def __init__(self, member: Member, name: str, fingerprint: int) -> None:
        """`fingerprint` tells the ranks that `name` stands for the same operation at all of them."""
        self.group = member.group
        self._endpoint = member.endpoint
        self._context = digest(member.communicator, "persistent", name)
        self._fingerprint = fingerprint
        self._group_ranks = {rank: group_rank for group_rank, rank in enumerate(member.group.ranks)}

    def open(self, heard: Heard, departed: Callable[[], None]) -> None:
        """Hear signals, those that have come already first; and be told when this rank has made its last call."""

        def signalled(source: int, number: int, step: int, fingerprint: int, payload: Buffer) -> None:
            if fingerprint != self._fingerprint:
                return  # the announcement that came before it has already failed the communicator
            group_rank = self._group_ranks.get(source)
            if group_rank is None:
                raise ProtocolError("a signal for an operation from a rank that has no part in it")
            heard(group_rank, number, step, payload)

        self._endpoint.router.on_signal(self._context, signalled)
        self._endpoint.on_depart(departed)

    def send(self, dest: int, number: int, step: int, payload: Buffer = b"") -> None:
        """Send a signal to rank `dest` of the group."""
        rank = self.group.ranks[dest]
        self._endpoint.router.signal(rank, self._context, number, step, self._fingerprint, payload)

    def lane(self, group: Group, number: int, describe: Callable[[], str], piggyback: Array) -> Lane:
        """A lane among the ranks of `group` for the reduction of round `number`."""
        executions = self._endpoint.executions
        return Lane(executions, group, self._context, number, self._fingerprint, describe, piggyback)

    @property
    def departed(self) -> bool:
        """Whether this rank has made its last call and only serves the others."""
        return self._endpoint.departed

    def now_s(self) -> float:
        """The time of the runtime's loop: virtual in a simulated world."""
        return self._endpoint.now_s()

    def spawn(self, task: Coroutine[Any, Any, None]) -> None:
        """Run `task` beside everything else. If it fails, the world does, unless the communicator has failed before."""
        self._endpoint.spawn(task, self.group.communicator)

    def check(self) -> None:
        """Raise what has ended the communicator, if anything has."""
        self._endpoint.failures.check(self.group.communicator)

    @property
    def has_failed(self) -> bool:
        return self._endpoint.failures.has_failed(self.group.communicator)

    def watch(self, what: str) -> AbstractContextManager[asyncio.Future[Any]]:
        """A future that a failure of the communicator ends. `what` says what it waits for."""
        return self._endpoint.failures.watch(self.group.communicator, what)
