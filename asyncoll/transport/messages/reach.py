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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import zmq

from asyncoll.errors import PeerLostError, UsageError
from asyncoll.transport.addresses import unacknowledged

T = TypeVar("T")
ANSWER_S = 30.0  # from the first attempt to connect; four packets may be lost in this time
_AGAIN_S = 0.02  # until the next attempt
_SHOWN = 4  # addresses in an error
_REMEDY = (
    "set ASYNCOLL_INTERFACE to a network that connects the hosts; behind a firewall set ASYNCOLL_PORTS, and open these "
    "ports in both directions; behind a NAT set ASYNCOLL_ADDRESS, too"
)


# What is sent first on a connection is longer than any packet. So a network that drops long packets, and passes those
# by which a connection is made, is noticed while ranks join.
LONG = bytes(1 << 14)


class NoAnswerError(Exception):
    """An address neither accepts nor refuses connections. Its text is the system's reason."""


async def check_answer(rank: int, address: str, connected: asyncio.Future[None], answers: Callable[[], bool]) -> None:
    """Raise UsageError if ZeroMQ gets no answer from `address` of `rank` within `ANSWER_S`. It does not say so itself.

    Returns once `connected` is done, or after half of that time if `answers` tells that ZeroMQ has had an answer.
    """
    await asyncio.wait([connected], timeout=ANSWER_S / 2)
    if connected.done() or answers():
        return
    # ZeroMQ reports a refusal itself.
    with contextlib.suppress(ConnectionRefusedError):
        try:
            (await reach(address, ANSWER_S / 2)).close()
        except NoAnswerError as error:
            raise unanswered(address, rank, error) from None


async def check_long_packets(rank: int, address: str, connection: int) -> None:
    """Wait until the host of `rank` has acknowledged `LONG`, sent on `connection`, a descriptor of another owner.

    The kernel does that, also for a process that is stopped or busy. Raises UsageError if it does not for `ANSWER_S`.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    _, (_, port, *_) = resolved(address)
    # A thread of ZeroMQ sends it: before that nothing is unacknowledged.
    await asyncio.sleep(_AGAIN_S)
    while waits := unacknowledged(connection, port):
        if loop.time() - began_s >= ANSWER_S:
            raise UsageError(
                f"this host ({socket.gethostname()}) has connected to {address} of rank {rank}, but long packets do "
                f"not arrive there ({waits} bytes are not acknowledged after {ANSWER_S:g} s): set the MTU of the "
                "interfaces of both hosts to what the whole way between them carries, as `ip link set dev eth0 mtu "
                "1400` does, or ASYNCOLL_INTERFACE to another network"
            )
        await asyncio.sleep(max(_AGAIN_S, min(loop.time() - began_s, 1.0) / 10))


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
        # A network may need a while until it knows its routes. So other errors are no answer yet.
        except OSError as error:
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
            # This process may have been stopped while the connection was made: then the time is over, and it is there.
            if not _is_connected(connection):
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


def bind_to_one(address: str, ports: Sequence[int], bind: Callable[[str], T]) -> tuple[str, T]:
    """Call `bind(address)`, or with `ports` bind to the first of them at `address` that is free.

    Returns the address with the port, and the result. Raises UsageError if that fails.
    """
    for each in [f"{address}:{port}" for port in ports] or [address]:
        try:
            return each, bind(each)
        except (OSError, zmq.ZMQError) as error:
            if error.errno != errno.EADDRINUSE or not ports:
                raise UsageError(f"cannot listen on {each}: {error}") from error
    raise UsageError(
        f"cannot listen on {address}: all ports of ASYNCOLL_PORTS={ports[0]}-{ports[-1]} are in use; each rank of a "
        "host needs two of them (one with ASYNCOLL_ENCRYPT=all)"
    )


async def all_done(ends: Sequence[asyncio.Future[None]]) -> None:
    """Wait for all of `ends`. Raises the error of one that has failed."""
    await asyncio.wait(ends, return_when=asyncio.FIRST_EXCEPTION)
    for end in ends:
        if end.done() and not end.cancelled():
            end.result()


def refused(address: str) -> str:
    """The cause of the loss of a rank that has told `address` and refuses connections there."""
    if not address.startswith("tcp:"):
        return f"its process has ended: {address} refuses connections"
    return (
        f"its process has ended, or a firewall rejects connections from {socket.gethostname()} (ASYNCOLL_PORTS), or "
        f"its address is that of another host (ASYNCOLL_ADDRESS): {address} refuses connections"
    )


def unanswered(address: str, rank: int, reason: NoAnswerError) -> UsageError:
    """The error for the `address` of `rank`, which gives no answer to this host."""
    return UsageError(
        f"this host ({socket.gethostname()}) gets no answer from {address} of rank {rank} ({reason}): {_REMEDY}"
    )


def another_answers(address: str, rank: int) -> str:
    """What is wrong if `address` of `rank` accepts connections, and ends them before the handshake is over."""
    return (
        f"{address} answers this host ({socket.gethostname()}), but not as rank {rank} of this job: it must be an "
        "address of that rank's host, or of a NAT that leads there (ASYNCOLL_ADDRESS), and hosts behind one NAT need "
        "different ports (ASYNCOLL_PORTS)"
    )


def why_unconnected(addresses: Sequence[str], turn_away: Mapping[int, bool]) -> str:
    """Why this rank waits for connections, to those ranks in `turn_away`, of all whose `addresses` are given.

    `turn_away`: whether the rank has ended a connection before the handshake was over, as another program does, or a
    busy one.
    """
    if any(turn_away.values()):
        rank = next(filter(turn_away.get, turn_away))
        return f"not connected yet: {another_answers(addresses[rank], rank)}"
    away = [f"{addresses[rank]} of rank {rank}" for rank in turn_away if addresses[rank].startswith("tcp:")]
    if not away:
        return "not connected yet"
    return (
        f"not connected yet: this host ({socket.gethostname()}) gets no answer from {', '.join(away[:_SHOWN])}; "
        f"{_REMEDY}"
    )
