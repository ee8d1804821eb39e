"""Builds the arenas of a host: its ranks pass each other the descriptors of their segments, before any loop runs.

The first rank listens on a unix socket and the other ranks connect to it. Four messages make sure that either all ranks
have an arena, or none has one and all know the same reason:

  each to the first    its identity and the descriptors of its segment, or the reason why it has none
  the first to each    the descriptors of all segments, by local rank
  each to the first    whether it could map them, or the reason why not
  the first to each    that all ranks could

In place of the second or the fourth message, the first rank may send the reason why there is no arena. The sockets are
of type SOCK_SEQPACKET, so a message arrives whole or not at all.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgpack

from asyncoll import _core
from asyncoll.errors import AsyncollError, DeadlineError, PeerLostError, ProtocolError, UsageError
from asyncoll.transport.addresses import check_path, user_of
from asyncoll.transport.joining import Joining
from asyncoll.transport.memory.arena import HostArena
from asyncoll.transport.memory.segment import LAYOUT, Segment, capacity_of, check_segment, close_segment, make_segment

_MAGIC = "asyncoll arena"
_MESSAGE_BYTES = 4096
_REASON_CHARACTERS = 1000
_BATCH = 240  # descriptors in one message; the limit of the kernel is 253
_HELLO_FIELDS = ("magic", "layout", "version", "rank", "boot", "capacity", "failure")  # of `_Greeted`
_NO_RANK = -1  # in place of a rank
_NOT_HERE = "not here yet to share the memory of this host"
_CLOSED = "it closed its connection before the ranks of its host shared memory"
GIVEN_UP = "it has removed the folder of the sockets of its host before all ranks had joined"
logger = logging.getLogger("asyncoll")


class ArenaUnavailable(AsyncollError):  # noqa: N818 (it is no error: the ranks go on by messages)
    """No rank of this host has an arena. The message contains the reason."""


def join(folder: Path, rank: int, ranks: tuple[int, ...], joining: Joining | None = None) -> HostArena:
    """Build and return the arena of world rank `rank`.

    All ranks of the host call this, with the same `ranks` (the world ranks by local rank) and the same `folder`, which
    only their user can enter. It blocks the thread until all of them have called it.

    Raises ArenaUnavailable, with the same reason at all ranks, if the host cannot have an arena; PeerLostError if a
    rank ends meanwhile; DeadlineError if the time of `joining` is over; and UsageError for a folder with too long a
    name.
    """
    path = folder / "arena"
    check_path(_unready(path))
    joining = joining or Joining(rank, len(ranks))
    with contextlib.ExitStack() as stack:  # closes all descriptors; an arena has copies of those that it needs
        own = _introduce(stack, rank, ranks)
        if rank == ranks[0]:
            return _join_as_first(stack, path, own, ranks, joining)
        return _join_as_other(stack, path, own, ranks, joining)


@dataclass(frozen=True, slots=True)
class _Greeted:
    """The identity of a rank, from its hello.

    The first four fields are the same in all versions of asyncoll, so that ranks of different versions can tell.
    """

    magic: str
    layout: int
    version: str
    rank: int
    boot: str = ""
    capacity: int = 0
    failure: str = ""  # the reason why it has no segment
    segment: Segment | None = None


def _introduce(stack: contextlib.ExitStack, rank: int, ranks: tuple[int, ...]) -> _Greeted:
    from importlib.metadata import version  # slow to import

    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    capacity = capacity_of(len(ranks))
    segment, failure = None, ""
    try:
        segment = make_segment(ranks.index(rank), capacity)
        stack.callback(close_segment, segment)
    except (OSError, AttributeError) as error:
        failure = f"rank {rank} cannot make memory to share: {error}"
    return _Greeted(_MAGIC, LAYOUT, version("asyncoll"), rank, boot, capacity, failure, segment)


class _Link:
    """A connection to another rank. `close`, or at last `stack`, closes it and the descriptors that it has received."""

    def __init__(self, stack: contextlib.ExitStack, connection: socket.socket, joining: Joining) -> None:
        self._joining = joining
        self._stack = stack.enter_context(contextlib.ExitStack())
        self._connection = self._stack.enter_context(connection)
        if (uid := user_of(connection)) != os.getuid():
            self.close()
            raise ProtocolError(f"a process of user {uid} is at the other end")

    def close(self) -> None:
        self._stack.close()

    def fileno(self) -> int:
        """For a selector."""
        return self._connection.fileno()

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        socket.send_fds(self._connection, [msgpack.packb(message)], list(descriptors))

    def receive(self, check: Callable[[], None], descriptors_max: int = 0) -> tuple[Any, list[int]]:
        """Return the next message and its descriptors, at most `descriptors_max`.

        This calls `check`, which may raise, every `Joining.pause_s` while it waits. Raises ProtocolError for a
        malformed message, and OSError if the connection breaks.
        """
        while True:
            self._connection.settimeout(self._joining.pause_s)
            try:
                message, descriptors, _, _ = socket.recv_fds(
                    self._connection, _MESSAGE_BYTES, descriptors_max, socket.MSG_CMSG_CLOEXEC
                )
                break
            except TimeoutError:
                check()
        for descriptor in descriptors:
            self._stack.callback(os.close, descriptor)
        try:
            return msgpack.unpackb(message), descriptors
        except ValueError as error:
            raise ProtocolError("its message is empty or malformed") from error


# -- the first rank -------------------------------------------------------------------------------


def _join_as_first(
    stack: contextlib.ExitStack, path: Path, own: _Greeted, ranks: tuple[int, ...], joining: Joining
) -> HostArena:
    links: dict[int, _Link] = {}  # by rank
    try:
        members = {own.rank: own} | _gather(stack, path, ranks, links, joining)
        segments = [_examine(members[rank], own, ranks) for rank in ranks]
        for rank, link in links.items():  # one by one: the kernel limits the descriptors in flight
            _hand_over(rank, link, segments, joining)
        arena = _make_arena(own, ranks, segments)
    except (ArenaUnavailable, PeerLostError, DeadlineError) as error:
        _send_outcome(links.values(), error)
        raise
    _send_outcome(links.values())
    return arena


def _gather(
    stack: contextlib.ExitStack, path: Path, ranks: tuple[int, ...], links: dict[int, _Link], joining: Joining
) -> dict[int, _Greeted]:
    """Accept the other ranks and return their identities, by rank. `links` gets each link as soon as its rank is known.

    A connection that sends no hello, because its process is stopped, keeps no other rank waiting.
    """
    members: dict[int, _Greeted] = {}

    def missing() -> list[int]:
        return [rank for rank in ranks[1:] if rank not in members]

    with _listen(path, len(ranks)) as listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while missing():
            ready = selector.select(joining.pause_s)
            if not ready:
                joining.check(missing, _NOT_HERE)
            for key, _ in ready:
                try:
                    if key.fileobj is listener:
                        arrived = _Link(stack, listener.accept()[0], joining)
                        selector.register(arrived, selectors.EVENT_READ, arrived)
                    else:
                        link: _Link = key.data
                        selector.unregister(link)
                        member = _greet(link, missing())
                        links[member.rank], members[member.rank] = link, member
                except (OSError, ProtocolError) as error:
                    logger.warning("rejected an unauthenticated connection to %s: %s", path, error)
    return members


@contextlib.contextmanager
def _listen(path: Path, backlog: int) -> Iterator[socket.socket]:
    """Listen at `path`.

    The socket gets this name only once it listens. So a refused connection means that the listening process has died,
    and a missing file that it does not listen yet.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(bytes(_unready(path)))
        except OSError as error:
            raise UsageError(f"cannot listen on {path}: {error}") from error
        try:
            _unready(path).chmod(0o600)
            listener.listen(backlog)
            _unready(path).rename(path)
            yield listener
        finally:
            path.unlink(missing_ok=True)
            _unready(path).unlink(missing_ok=True)


def _unready(path: Path) -> Path:
    """The name of the socket until it listens."""
    return path.with_name(f"{path.name}.new")


def _greet(link: _Link, missing: Sequence[int]) -> _Greeted:
    """Receive the hello of a rank, which is there.

    Raises OSError or ProtocolError, and closes the link, if it is none of the missing ranks.
    """
    try:
        hello, descriptors = link.receive(lambda: None, len(Segment._fields))
        if not isinstance(hello, list) or len(hello) < 4 or hello[0] != _MAGIC or hello[3] not in missing:
            raise ProtocolError("it is none of the ranks that are expected here")
    except (OSError, ProtocolError):
        link.close()
        raise
    if len(hello) != len(_HELLO_FIELDS):
        # A rank of another version of asyncoll has another hello. `_examine` says so.
        return _Greeted(*hello[:4])
    segment = Segment(*descriptors) if len(descriptors) == len(Segment._fields) else None
    return _Greeted(**dict(zip(_HELLO_FIELDS, hello, strict=True)), segment=segment)


def _examine(member: _Greeted, own: _Greeted, ranks: tuple[int, ...]) -> Segment:
    """Return the segment of `member`. Raises ArenaUnavailable if the ranks of this host cannot use it."""
    if (member.layout, member.version) != (own.layout, own.version):
        raise ArenaUnavailable(
            f"rank {member.rank} runs asyncoll {member.version} and rank {own.rank} runs {own.version}: install the "
            "same version for all ranks of a host"
        )
    if member.boot != own.boot:
        raise ArenaUnavailable(f"rank {member.rank} and rank {own.rank} run on different kernels")
    if member.capacity != own.capacity:
        raise ArenaUnavailable(
            f"rank {member.rank} sees another size of this host's memory (segments of {member.capacity} bytes) than "
            f"rank {own.rank} (of {own.capacity})"
        )
    if member.failure or member.segment is None:
        raise ArenaUnavailable(member.failure or f"the descriptors of rank {member.rank} have not come with its hello")
    _check(member.rank, member.segment, own, ranks)
    return member.segment


def _hand_over(rank: int, link: _Link, segments: Sequence[Segment], joining: Joining) -> None:
    descriptors = [descriptor for segment in segments for descriptor in segment]
    try:
        link.send(["", _NO_RANK])
        for start in range(0, len(descriptors), _BATCH):
            link.send(start, descriptors[start : start + _BATCH])
        failure, _ = link.receive(lambda: joining.check(lambda: [rank], _NOT_HERE))
    except (OSError, ProtocolError) as error:
        raise PeerLostError(rank, f"{_CLOSED} ({error})") from error
    if failure:
        raise ArenaUnavailable(failure)


def _send_outcome(links: Iterable[_Link], error: AsyncollError | None = None) -> None:
    """Send the outcome to the other ranks: a text, empty on success, and ranks.

    These are the lost rank of a PeerLostError, and a list of the missing ranks of a DeadlineError.
    """
    failure = error.cause if isinstance(error, PeerLostError) else str(error or "")
    ranks = getattr(error, "missing", getattr(error, "rank", _NO_RANK))
    for link in links:
        with contextlib.suppress(OSError):  # the transport will notice that its rank is gone
            link.send([failure[:_REASON_CHARACTERS], ranks])


# -- the other ranks ------------------------------------------------------------------------------


def _join_as_other(
    stack: contextlib.ExitStack, path: Path, own: _Greeted, ranks: tuple[int, ...], joining: Joining
) -> HostArena:
    check = partial(joining.check, lambda: ranks[:1], "which gathers the ranks of this host", is_told=True)
    try:
        link = _Link(stack, _connect(path, ranks, joining), joining)
        link.send([getattr(own, field) for field in _HELLO_FIELDS], own.segment or ())
        _receive_outcome(link, check)
        return _confirm(link, own, ranks, check)
    except (OSError, ProtocolError) as error:
        joining.await_cause(ranks[0])
        raise PeerLostError(ranks[0], f"{_CLOSED} ({error})") from error


def _connect(path: Path, ranks: tuple[int, ...], joining: Joining) -> socket.socket:
    """Connect to the first rank as soon as it listens. Raises ConnectionRefusedError if it has ended."""
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(bytes(path))
            return connection
        except OSError as error:
            connection.close()
            # Any other error means that the first rank does not listen yet.
            if isinstance(error, ConnectionRefusedError):
                raise
            joining.check(lambda: ranks[:1], _NOT_HERE)
            if not path.parent.exists():  # the first rank has removed it because joining has failed
                raise PeerLostError(ranks[0], GIVEN_UP) from error
            time.sleep(joining.pause_s)  # noqa: TID251 (no loop runs yet)


def _receive_outcome(link: _Link, check: Callable[[], None]) -> None:
    """Receive the outcome from the first rank, and raise its failure.

    `check` here gives the first rank more time than the first rank gives the others, so that its error, which names
    the missing ranks, comes first.
    """
    (failure, ranks), _ = link.receive(check)
    if isinstance(ranks, list):
        raise DeadlineError(failure, missing=tuple(ranks))
    if ranks != _NO_RANK:
        raise PeerLostError(ranks, failure)
    if failure:
        raise ArenaUnavailable(failure)


def _confirm(link: _Link, own: _Greeted, ranks: tuple[int, ...], check: Callable[[], None]) -> HostArena:
    with contextlib.ExitStack() as undo:
        arena, failure = None, ""
        try:
            arena = _make_arena(own, ranks, _receive_segments(link, own, ranks, check))
            undo.callback(arena.close)
        except ArenaUnavailable as error:
            failure = str(error)
        link.send(failure[:_REASON_CHARACTERS])
        _receive_outcome(link, check)
        assert arena is not None, "the first rank knows of the failure, and has sent it back"
        undo.pop_all()
        return arena


def _receive_segments(link: _Link, own: _Greeted, ranks: tuple[int, ...], check: Callable[[], None]) -> list[Segment]:
    width = len(Segment._fields)
    count = len(ranks) * width
    found = [descriptor for _ in range(0, count, _BATCH) for descriptor in link.receive(check, _BATCH)[1]]
    if len(found) < count:
        raise ArenaUnavailable(f"rank {own.rank} may not have {count} more files open: raise the limit (ulimit -n)")
    segments = [Segment(*found[start : start + width]) for start in range(0, count, width)]
    for rank, segment in zip(ranks, segments, strict=True):
        _check(rank, segment, own, ranks)
    return segments


# -- all ranks ------------------------------------------------------------------------------------


def _check(rank: int, segment: Segment, own: _Greeted, ranks: tuple[int, ...]) -> None:
    assert own.segment is not None, "a rank without a segment has already made all ranks fail"
    try:
        check_segment(segment, ranks.index(rank), own.capacity, own.segment)
    except ProtocolError as error:
        raise ArenaUnavailable(f"rank {own.rank} cannot use the memory of rank {rank}: {error}") from error


def _make_arena(own: _Greeted, ranks: tuple[int, ...], segments: Sequence[Segment]) -> HostArena:
    try:
        return HostArena(ranks.index(own.rank), ranks, segments, _core.of_rank())
    except (OSError, AttributeError) as error:
        raise ArenaUnavailable(f"rank {own.rank} cannot map the memory of the ranks of its host: {error}") from error
