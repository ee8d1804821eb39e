"""How the ranks of a host hand each other their descriptors, before any loop runs.

The first rank listens on a unix socket, and the others connect to it. In four steps everybody knows that all have an
arena, or why nobody has one:

  each to the first    who I am, and the descriptors of my segment; or why I have none
  the first to each    the descriptors of all parts, by local rank
  each to the first    that I could use them; or why not
  the first to each    that everybody could

Instead of the second or the last it may say why there is no arena. A message is a packet: it comes whole or not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgpack

from asyncoll.errors import AsyncollError, DeadlineError, PeerLostError, ProtocolError, UsageError
from asyncoll.transport.addresses import check_path, user_of
from asyncoll.transport.joining import Joining
from asyncoll.transport.memory.arena import HostArena
from asyncoll.transport.memory.segment import LAYOUT, Segment, capacity_of, check_segment, close_segment, make_segment

_MAGIC = "asyncoll arena"
_MESSAGE_BYTES = 4096
_REASON_CHARACTERS = 1000
_BATCH = 240  # descriptors in one message; the kernel takes 253
_GREETING_TIMEOUT_S = 30.0  # whoever has connected must say who it is
_PAUSE_S = 0.02
_HELLO_FIELDS = 7
_NOBODY = -1  # instead of a rank
_NOT_HERE = "not here yet to share the memory of this host"
_CLOSED = "it closed its connection before the ranks of its host shared memory"
GIVEN_UP = "it has removed the folder of the sockets of its host before all ranks had joined"
logger = logging.getLogger("asyncoll")


class ArenaUnavailable(AsyncollError):  # noqa: N818 (nothing is wrong: the ranks of this host talk by messages)
    """There is no arena at any rank of this host; the message says why."""


def join(folder: Path, rank: int, ranks: tuple[int, ...], joining: Joining | None = None) -> HostArena:
    """The arena of `rank`. All `ranks` of this host, by local rank, call this; it blocks until everybody has done so.

    `folder` is private, and the same for all. Raises ArenaUnavailable, at all of them for the same reason,
    PeerLostError for a rank that goes away meanwhile, and DeadlineError if `joining` has taken too long.
    """
    path = folder / "arena"
    check_path(_unready(path))
    joining = joining or Joining(rank, len(ranks))
    with contextlib.ExitStack() as stack:  # of every descriptor; an arena has its own copies of those that it needs
        me = _introduce(stack, rank, ranks)
        if rank == ranks[0]:
            return _lead(stack, path, me, ranks, joining)
        return _follow(stack, path, me, ranks, joining)


@dataclass(frozen=True, slots=True)
class _Member:
    """A rank as it introduces itself. The first four fields never change, so versions that differ can say so."""

    magic: str
    layout: int
    version: str
    rank: int
    boot: str = ""
    capacity: int = 0
    failure: str = ""  # why it has no segment
    segment: Segment | None = None

    def hello(self) -> list[object]:
        return [self.magic, self.layout, self.version, self.rank, self.boot, self.capacity, self.failure]


def _introduce(stack: contextlib.ExitStack, rank: int, ranks: tuple[int, ...]) -> _Member:
    from importlib.metadata import version  # takes long to import

    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    capacity = capacity_of(len(ranks))
    segment, failure = None, ""
    try:
        segment = make_segment(ranks.index(rank), capacity)
        stack.callback(close_segment, segment)
    except (OSError, AttributeError) as error:
        failure = f"rank {rank} cannot make memory to share: {error}"
    return _Member(_MAGIC, LAYOUT, version("asyncoll"), rank, boot, capacity, failure, segment)


class _Line:
    """A connection to another rank. It, and the descriptors that come through it, are closed with the stack."""

    def __init__(self, stack: contextlib.ExitStack, connection: socket.socket) -> None:
        self._stack = stack
        self._connection = stack.enter_context(connection)
        if (uid := user_of(connection)) != os.getuid():
            raise ProtocolError(f"a process of user {uid} is at the other end")

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        socket.send_fds(self._connection, [msgpack.packb(message)], list(descriptors))

    def receive(self, check: Callable[[], None], descriptors_max: int = 0) -> tuple[Any, list[int]]:
        """The next message and its descriptors. `check` is called again and again meanwhile, and may raise."""
        self._connection.settimeout(_PAUSE_S)
        while True:
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
            raise ProtocolError("there came an empty or a broken message") from error


# -- the first rank -------------------------------------------------------------------------------


def _lead(stack: contextlib.ExitStack, path: Path, me: _Member, ranks: tuple[int, ...], joining: Joining) -> HostArena:
    lines: dict[int, _Line] = {}  # by rank
    try:
        members = {me.rank: me} | _gather(stack, path, ranks, lines, joining)
        parts = [_examine(members[rank], me, ranks) for rank in ranks]
        for rank, line in lines.items():  # one by one: the kernel bounds how many may be on their way
            _hand_over(rank, line, parts, joining)
        arena = _build(me, ranks, parts)
    except ArenaUnavailable as error:
        _tell(lines.values(), str(error))
        raise
    except PeerLostError as error:
        _tell(lines.values(), error.cause, error.rank)
        raise
    except DeadlineError as error:
        _tell(lines.values(), str(error), error.missing)
        raise
    _tell(lines.values())
    return arena


def _gather(
    stack: contextlib.ExitStack, path: Path, ranks: tuple[int, ...], lines: dict[int, _Line], joining: Joining
) -> dict[int, _Member]:
    """The other ranks, whose lines are in `lines` as soon as they are there."""
    members: dict[int, _Member] = {}
    with _listen(path, len(ranks)) as listener:
        listener.settimeout(_PAUSE_S)
        while missing := [rank for rank in ranks[1:] if rank not in members]:
            check = partial(joining.check, lambda missing=missing: missing, _NOT_HERE)  # type: ignore[misc]
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                check()
                continue
            with contextlib.ExitStack() as undo:
                try:
                    line = _Line(undo, connection)
                    member = _greet(line, missing, check)
                except (OSError, ProtocolError) as error:
                    logger.warning("turned a stranger away who came to %s: %s", path, error)
                    continue
                lines[member.rank], members[member.rank] = line, member
                stack.push(undo.pop_all())
    return members


@contextlib.contextmanager
def _listen(path: Path, backlog: int) -> Iterator[socket.socket]:
    """A socket that listens at `path`. It gets that name once it listens, so a refused connection means a death."""
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
    """What the socket at `path` is called until it listens."""
    return path.with_name(f"{path.name}.new")


def _greet(line: _Line, missing: Sequence[int], check: Callable[[], None]) -> _Member:
    """Raises OSError or ProtocolError if it is none of the missing ranks."""
    ends_s = _now() + _GREETING_TIMEOUT_S

    def check_both() -> None:
        check()
        if _now() > ends_s:
            raise ProtocolError(f"it has not said who it is within {_GREETING_TIMEOUT_S:.0f} s")

    hello, descriptors = line.receive(check_both, len(Segment._fields))
    if not isinstance(hello, list) or len(hello) < 4 or hello[0] != _MAGIC or hello[3] not in missing:
        raise ProtocolError("it is no rank that is expected here")
    if len(hello) != _HELLO_FIELDS:
        return _Member(*hello[:4])
    segment = Segment(*descriptors) if len(descriptors) == len(Segment._fields) else None
    return dataclasses.replace(_Member(*hello), segment=segment)


def _examine(member: _Member, me: _Member, ranks: tuple[int, ...]) -> Segment:
    """What `member` brings. Raises ArenaUnavailable if that will not do."""
    if (member.layout, member.version) != (me.layout, me.version):
        raise ArenaUnavailable(
            f"rank {member.rank} runs asyncoll {member.version} and rank {me.rank} runs {me.version}: install the same "
            "version for all ranks of a host"
        )
    if member.boot != me.boot:
        raise ArenaUnavailable(f"rank {member.rank} and rank {me.rank} run on different kernels")
    if member.capacity != me.capacity:
        raise ArenaUnavailable(
            f"rank {member.rank} sees another size of this host's memory (parts of {member.capacity} bytes) than rank "
            f"{me.rank} (of {me.capacity})"
        )
    if member.failure or member.segment is None:
        raise ArenaUnavailable(member.failure or f"the descriptors of rank {member.rank} have not come with its hello")
    _check(member.rank, member.segment, me, ranks)
    return member.segment


def _hand_over(rank: int, line: _Line, parts: Sequence[Segment], joining: Joining) -> None:
    descriptors = [descriptor for segment in parts for descriptor in segment]
    try:
        line.send(["", _NOBODY])
        for start in range(0, len(descriptors), _BATCH):
            line.send(start, descriptors[start : start + _BATCH])
        failure, _ = line.receive(lambda: joining.check(lambda: [rank], _NOT_HERE))
    except (OSError, ProtocolError) as error:
        raise PeerLostError(rank, f"{_CLOSED} ({error})") from error
    if failure:
        raise ArenaUnavailable(failure)


def _tell(lines: Iterable[_Line], failure: str = "", ranks: int | Sequence[int] = _NOBODY) -> None:
    """How it has ended; `ranks` is the rank that is lost, or those that are missing.

    A rank that is gone by now will be missed by those that talk to it.
    """
    for line in lines:
        with contextlib.suppress(OSError):
            line.send([failure[:_REASON_CHARACTERS], ranks])


# -- the other ranks ------------------------------------------------------------------------------


def _follow(
    stack: contextlib.ExitStack, path: Path, me: _Member, ranks: tuple[int, ...], joining: Joining
) -> HostArena:
    connection = _connect(path, ranks, joining)
    check = partial(joining.check, lambda: ranks[:1], "which gathers the ranks of this host", is_told=True)
    try:
        line = _Line(stack, connection)
        line.send(me.hello(), me.segment or ())
        _heed(line, check)
        return _agree(line, me, ranks, check)
    except (OSError, ProtocolError) as error:
        raise PeerLostError(ranks[0], f"{_CLOSED} ({error})") from error


def _connect(path: Path, ranks: tuple[int, ...], joining: Joining) -> socket.socket:
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(bytes(path))
        except ConnectionRefusedError as error:
            connection.close()
            raise PeerLostError(ranks[0], f"{_CLOSED} ({error})") from error
        except OSError as error:  # it does not listen yet
            connection.close()
            joining.check(lambda: ranks[:1], _NOT_HERE)
            if not path.parent.exists():  # the first rank removes it when it gives up
                raise PeerLostError(ranks[0], GIVEN_UP) from error
            time.sleep(joining.pause_s)  # noqa: TID251 (no loop runs yet)
        else:
            return connection


def _heed(line: _Line, check: Callable[[], None]) -> None:
    """Raises what the first rank says has gone wrong. Its patience with others ends before mine with it."""
    (failure, ranks), _ = line.receive(check)
    if isinstance(ranks, list):
        raise DeadlineError(failure, missing=tuple(ranks))
    if ranks != _NOBODY:
        raise PeerLostError(ranks, failure)
    if failure:
        raise ArenaUnavailable(failure)


def _agree(line: _Line, me: _Member, ranks: tuple[int, ...], check: Callable[[], None]) -> HostArena:
    with contextlib.ExitStack() as undo:
        arena, failure = None, ""
        try:
            arena = _build(me, ranks, _collect(line, me, ranks, check))
            undo.callback(arena.close)
        except ArenaUnavailable as error:
            failure = str(error)
        line.send(failure[:_REASON_CHARACTERS])
        _heed(line, check)
        assert arena is not None, "the first rank has been told why not"
        undo.pop_all()
        return arena


def _collect(line: _Line, me: _Member, ranks: tuple[int, ...], check: Callable[[], None]) -> list[Segment]:
    count = len(ranks) * len(Segment._fields)
    found = [descriptor for _ in range(0, count, _BATCH) for descriptor in line.receive(check, _BATCH)[1]]
    if len(found) < count:
        raise ArenaUnavailable(f"rank {me.rank} may not have {count} more files open: raise the limit (ulimit -n)")
    parts = [Segment(*found[start : start + len(Segment._fields)]) for start in range(0, count, len(Segment._fields))]
    for rank, segment in zip(ranks, parts, strict=True):
        _check(rank, segment, me, ranks)
    return parts


# -- both -----------------------------------------------------------------------------------------


def _check(rank: int, segment: Segment, me: _Member, ranks: tuple[int, ...]) -> None:
    assert me.segment is not None, "whoever has none does not come so far"
    try:
        check_segment(segment, ranks.index(rank), me.capacity, me.segment)
    except ProtocolError as error:
        raise ArenaUnavailable(f"rank {me.rank} cannot use the memory of rank {rank}: {error}") from error


def _build(me: _Member, ranks: tuple[int, ...], parts: Sequence[Segment]) -> HostArena:
    try:
        return HostArena(ranks.index(me.rank), ranks, parts)
    except (OSError, AttributeError) as error:
        raise ArenaUnavailable(f"rank {me.rank} cannot map the memory of the ranks of its host: {error}") from error


def _now() -> float:
    return time.monotonic()  # noqa: TID251 (no loop runs yet, whose clock it could be)
