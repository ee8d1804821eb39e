"""Connecting to ranks of other hosts: how long one waits for an answer, and what an error says that names the cause.

A rank tells its address once it listens there. From then on the kernel of its host answers, also for a process that is
stopped or busy. So a refusal means that the process has ended, and no answer means that the network, or a firewall, is
in the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

from asyncoll.errors import PeerLostError, UsageError

ANSWER_S = 30.0  # from the first attempt to connect; four packets may be lost in this time
_AGAIN_S = 0.02  # until the next attempt
_SHOWN = 4  # addresses in an error
_REMEDY = (
    "set ASYNCOLL_INTERFACE to a network that connects the hosts; behind a firewall set ASYNCOLL_PORTS, and open these "
    "ports in both directions; behind a NAT set ASYNCOLL_ADDRESS, too"
)


class NoAnswerError(Exception):
    """An address neither accepts nor refuses connections. Its text is the system's reason."""


async def check_answer(rank: int, address: str, connected: asyncio.Future[None], answers: Callable[[], bool]) -> None:
    """Raise UsageError if ZeroMQ gets no answer from `address` of `rank`. It does not say so itself.

    Returns once `connected` is done. `answers` tells whether ZeroMQ has had an answer.
    """
    await asyncio.wait([connected], timeout=ANSWER_S / 2)
    if connected.done() or answers():
        return
    with contextlib.suppress(ConnectionRefusedError):  # of which ZeroMQ tells
        try:
            (await reach(address, ANSWER_S / 2)).close()
        except NoAnswerError as error:
            raise unanswered(address, rank, error) from None


async def reach(address: str, answer_s: float) -> socket.socket:
    """Connect to `address`, `tcp://ip:port`, and return the socket, which does not block.

    Raises ConnectionRefusedError, and NoAnswerError if there is no other answer for `answer_s` seconds. Cancelling it
    closes the socket.
    """
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + answer_s
    while True:
        try:
            return await _attempt(address, ends_s)
        except ConnectionRefusedError:
            raise
        except OSError as error:  # a network may need a while until it knows its routes
            if loop.time() >= ends_s:
                raise NoAnswerError(os.strerror(error.errno or 0)) from error
        await asyncio.sleep(_AGAIN_S)


async def reach_rank(rank: int, address: str) -> socket.socket:
    """Connect to `rank` at the `address` that it has told.

    Raises PeerLostError if it refuses, and UsageError if there is no answer.
    """
    try:
        return await reach(address, ANSWER_S)
    except ConnectionRefusedError:
        raise PeerLostError(rank, refused(address)) from None
    except NoAnswerError as error:
        raise unanswered(address, rank, error) from None


async def _attempt(address: str, ends_s: float) -> socket.socket:
    """Connect once. Raises the OSError that prevents it, and TimeoutError at `ends_s` on the loop's clock."""
    family, where = resolved(address)
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(socket.socket(family))
        connection.setblocking(False)
        try:
            async with asyncio.timeout_at(ends_s):
                await asyncio.get_running_loop().sock_connect(connection, where)
        except TimeoutError as error:
            if not _is_connected(connection):  # it may be, in a process that was stopped meanwhile
                raise TimeoutError(errno.ETIMEDOUT, "no answer") from error
        undo.pop_all()
        return connection


def _is_connected(connection: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        connection.getpeername()
        return True
    return False


def resolved(address: str) -> tuple[int, Any]:
    """The family and the address of a socket, for `tcp://ip:port`. Raises UsageError for any other text."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, ValueError) as error:
        raise UsageError(f"{address} is not tcp://ip:port: {error}") from None
    # The text of the host stays, because uvloop takes the zone of an IPv6 address from nowhere else.
    return found[0][0], (host.strip("[]"), *found[0][4][1:])


def refused(address: str) -> str:
    """The cause of the loss of a rank that has told `address` and refuses connections there."""
    if not address.startswith("tcp:"):
        return f"its process has ended: {address} refuses connections"
    return (
        f"its process has ended, or a firewall rejects connections from {socket.gethostname()} (ASYNCOLL_PORTS): "
        f"{address} refuses connections"
    )


def unanswered(address: str, rank: int, reason: NoAnswerError) -> UsageError:
    """The error for the `address` of `rank`, which gives no answer to this host."""
    return UsageError(
        f"this host ({socket.gethostname()}) gets no answer from {address} of rank {rank} ({reason}): {_REMEDY}"
    )


def why_unconnected(addresses: Sequence[str], ranks: Sequence[int]) -> str:
    """Why this rank waits for connections: `ranks`, of all whose `addresses` are given, have not answered it."""
    away = [f"{addresses[rank]} of rank {rank}" for rank in ranks if addresses[rank].startswith("tcp:")]
    if not away:
        return "not connected yet"
    return (
        f"not connected yet: this host ({socket.gethostname()}) gets no answer from {', '.join(away[:_SHOWN])}; "
        f"{_REMEDY}"
    )
