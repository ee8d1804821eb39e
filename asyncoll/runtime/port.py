"""The access of rounds to the runtime: signals, lanes, time, tasks and failures.

The rounds of an operation see a `Port` and not the endpoint. So the list of its methods is all that they use of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from asyncoll.arguments import digest
from asyncoll.errors import ProtocolError
from asyncoll.runtime.group import Group, Lane
from asyncoll.runtime.member import Member
from asyncoll.tensors.reductions import Array
from asyncoll.transport import Buffer, wire

Heard = Callable[[int, int, int, Buffer], None]  # source (a rank of the group), number, step, payload


def context_of(communicator: int, name: str, kind: str = "persistent") -> int:
    """The context of the messages of the operation called `name`. Wait-avoiding ones are persistent."""
    return digest(communicator, kind, name)


class Port:
    """The access of one operation at one rank to the runtime.

    All methods but `post`, and all callbacks, run on the runtime's loop.
    """

    def __init__(self, member: Member, name: str, fingerprint: int, kind: str = "persistent") -> None:
        """`fingerprint` is the hash of the operation called `name`. Signals with another fingerprint are dropped.

        Operations of different `kind` may have the same name.
        """
        self.group = member.group
        self._member = member
        self._departed: Callable[[], None] | None = None
        self._endpoint = member.endpoint
        self.post = member.post  # schedules a callback on the runtime's loop, from any thread
        self.now_s = member.endpoint.now_s
        self.spawn = partial(member.endpoint.spawn, communicator=member.communicator)  # a background task
        self.check, self.watch = member.check, member.watch  # for failures of the communicator
        self.trace = member.trace
        self._context = context_of(member.communicator, name, kind)
        self._fingerprint = fingerprint
        self._group_ranks = {rank: group_rank for group_rank, rank in enumerate(member.group.ranks)}

    def open(self, heard: Heard, departed: Callable[[], None] | None = None) -> None:
        """Call `heard` for every signal of the operation, and `departed` when this rank has made its last call.

        `heard` is called at once for the signals that have come before. The handler raises ProtocolError for a signal
        from a rank outside of the group.
        """

        def signalled(source: int, number: int, step: int, fingerprint: int, payload: Buffer) -> None:
            if fingerprint != self._fingerprint:
                # The announcement of the operation, which came before, has already failed the communicator.
                return
            group_rank = self._group_ranks.get(source)
            if group_rank is None:
                raise ProtocolError("a signal for an operation from a rank that has no part in it")
            heard(group_rank, number, step, payload)

        self._member.ports += 1
        self._endpoint.router.on_signal(self._context, signalled)
        if departed is not None:
            self._departed = departed
            self._endpoint.at_depart.append(departed)

    def close(self) -> None:
        """The operation has ended at all ranks: no signal of it comes any more."""
        self._member.ports -= 1
        self._endpoint.router.off_signal(self._context)

    def depart(self) -> None:
        """This rank has closed the communicator: it has made its last call."""
        if self._departed is not None:
            self._departed()

    def send(self, dest: int, number: int, step: int, payload: Buffer = b"") -> None:
        """Send a signal to group rank `dest`, with `payload`, of at most one segment. Returns at once."""
        group = self.group
        header = wire.encode(wire.SIGNAL, group.epoch, self._context, number, step, self._fingerprint)
        self._endpoint.router.send(group.ranks[dest], [header, payload])

    def lane(self, group: Group, number: int, describe: Callable[[], str], piggyback: Array | None = None) -> Lane:
        """A lane between the ranks of `group` for the reduction of round `number`.

        `describe` gives the text for errors. `piggyback` is the short array that each message carries (`Lane`), if any.
        """
        executions = self._endpoint.executions
        return Lane(executions, group, self._context, number, self._fingerprint, describe, piggyback)

    @property
    def departed(self) -> bool:
        """Whether this rank has made its last call and only serves the others."""
        return self._endpoint.departed or self._member.is_closed

    @property
    def has_failed(self) -> bool:
        """Whether the communicator has failed."""
        return self._endpoint.failures.has_failed(self.group.communicator)
