"""Let foreign peers speak to the sockets of services and ranks: `python -m tests.fuzz.sockets [SEED]`.

A foreign peer speaks some version of ZMTP, the protocol of ZeroMQ, rightly or wrongly: greetings of 1.0, 2.0, 3.0 and
3.1, also cut ones, any type of socket, commands, messages of several frames, announced lengths up to 2^63, and segments
of a service in between. Meanwhile good clients call the service, or ranks work. Every call must return its value.
Nothing may reach the exception handler of the loop. The log and the memory must stay small.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import socket
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import uvloop

from asyncoll.communicator import Communicator
from asyncoll.rpc import connect, serve
from asyncoll.testing import worlds
from asyncoll.transport.keys import write_key
from asyncoll.transport.messages import segment_stream, service_protocol, service_sockets
from asyncoll.transport.messages.zeromq import ZeroMQTransport, ipc_address

SERVICES: Final = ("ipc", "tcp", "ipc with a key", "tcp with a key")
RANKS: Final = ("ranks over ipc", "ranks over tcp", "ranks over tcp, encrypted")
_LOCAL = "tcp://127.0.0.1:0"
_SIZE = 3  # ranks
_PATIENCE_S = 60.0  # for a round of good calls
_ANSWER_S = 0.01  # for which a foreign peer stays to hear an answer
_AT_ONCE = 8  # foreign peers that are connected at one time
_LINES_MAX = 60  # in the log: each reporter writes the 1st, 2nd, 4th, 8th … event
_MEMORY_MAX = 128 << 20  # bytes by which the process may grow
_FREEZE_S = 20.0  # the ranks share this process, whose threads may wait for a processor
_MORE, _LONG, _COMMAND = 1, 2, 4  # flags of a frame of ZMTP 2.0 and later
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_TYPES = (b"PAIR", b"PUB", b"SUB", b"REQ", b"REP", b"DEALER", b"ROUTER", b"PULL", b"PUSH", b"XPUB", b"XSUB", b"SERVER")
_MECHANISMS = (b"NULL", b"NULL", b"NULL", b"PLAIN", b"CURVE", b"GSSAPI", b"\xff" * 20)
_COMMANDS = (
    b"\5READY",
    b"\4PING\0\x0a",
    b"\4PONG",
    b"\5ERROR\2no",
    b"\x09SUBSCRIBE",
    b"\6CANCEL",
    b"\5HELLO",
    b"\xff",
    b"",
)
_LENGTHS = (1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)

_Attack = Callable[[str], Coroutine[Any, Any, None]]  # of an address


class _Service:
    async def echo(self, x: int) -> int:
        return x


def fuzz(target: str, seed: int, count: int) -> None:
    """Let `count` foreign peers speak to `target`, one of SERVICES or RANKS.

    Raises AssertionError, naming target and seed, if a call fails, a callback raises, or the log or the memory grows.
    """
    raised: list[dict[str, Any]] = []
    before = _resident_bytes()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, _recorded() as lines:
            runner.get_loop().set_exception_handler(lambda _, context: raised.append(context))
            runner.run(_beside(target, partial(_foreign_peers, seed, count)))
        assert not raised, f"callbacks of the loop raised {len(raised)} times, first {raised[0]}"
        assert len(lines) <= _LINES_MAX, f"{len(lines)} lines in the log, the last one: {lines[-1]}"
        assert _resident_bytes() - before < _MEMORY_MAX, "the memory of the process has grown"
    except Exception as error:
        raise AssertionError(f"{target}, seed {seed}, {count} peers: {error!r}") from error


@contextlib.contextmanager
def _recorded() -> Iterator[list[str]]:
    """Yields the list of the lines that the library logs inside the block, instead of showing them."""
    lines: list[str] = []
    logger = logging.getLogger("asyncoll")

    def record(line: logging.LogRecord) -> bool:
        lines.append(line.getMessage())
        return False

    logger.addFilter(record)
    try:
        yield lines
    finally:
        logger.removeFilter(record)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# -- good calls ------------------------------------------------------------------------------------


async def _beside(target: str, attack: _Attack) -> None:
    """Run `attack(address)` beside good calls to the target, and make more of them after it."""
    with tempfile.TemporaryDirectory(prefix="asyncoll-") as folder:
        beside = _beside_ranks if target in RANKS else _beside_service
        await beside(target, Path(folder), attack)


async def _beside_service(target: str, folder: Path, attack: _Attack) -> None:
    key: dict[str, Any] = {}
    if target.endswith("key"):
        write_key(folder / "key")
        key["key_file"] = folder / "key"
    url = f"ipc://{folder}/service" if target.startswith("ipc") else _LOCAL
    async with serve(_Service(), url, **key) as address, connect(address, **key) as client:

        async def call(number: int) -> None:
            assert await client.call("echo", number) == number
            if number % _AT_ONCE == 1:
                async with connect(address, **key) as another:
                    assert await another.call("echo", -number) == -number

        attacks = asyncio.ensure_future(attack(address))
        await _repeat(call, attacks.done)
        await attacks


async def _beside_ranks(target: str, folder: Path, attack: _Attack) -> None:
    places = [ipc_address(folder, rank) if target.endswith("ipc") else _LOCAL for rank in range(_SIZE)]
    is_encrypted = target.endswith("encrypted")
    transports = [ZeroMQTransport(n, _SIZE, b"job", encrypted=is_encrypted, freeze_s=_FREEZE_S) for n in range(_SIZE)]
    addresses = [transport.bind(place) for transport, place in zip(transports, places, strict=True)]
    for transport in transports:
        transport.peers = addresses
    attacks = asyncio.ensure_future(attack(addresses[1]))

    async def main(comm: Communicator) -> None:
        is_over = [False]

        async def call(number: int) -> None:
            mine = attacks.done() and comm.rank == 0
            total, over = await comm.allreduce(np.array([number, mine]))
            assert total == comm.size * number
            is_over[0] = over > 0

        await _repeat(call, lambda: is_over[0])

    await worlds._run_all((transports, [None] * _SIZE), [0] * _SIZE, main, {})
    await attacks


async def _repeat(call: Callable[[int], Coroutine[Any, Any, None]], is_over: Callable[[], bool]) -> None:
    """Make calls, numbered from 1, until `is_over`, and then one more."""
    number, is_last = 0, False
    while not is_last:
        number, is_last = number + 1, is_over()
        async with asyncio.timeout(_PATIENCE_S):
            await call(number)


# -- foreign peers ---------------------------------------------------------------------------------


async def _foreign_peers(seed: int, count: int, address: str) -> None:
    """Let `count` peers connect, a few at a time. Each sends all it has, stays or ends, and perhaps resets."""
    peers: list[socket.socket] = []
    with contextlib.ExitStack() as closing:
        for number in range(count):
            draw = np.random.default_rng([seed, number])
            peer = closing.enter_context(_connected(address))
            with contextlib.suppress(OSError, TimeoutError):  # the target has ended the connection, or does not read
                async with asyncio.timeout(_ANSWER_S):
                    await asyncio.get_running_loop().sock_sendall(peer, said(draw))
                    await asyncio.get_running_loop().sock_recv(peer, 1 << 16)
            peers.append(peer)
            if len(peers) >= _AT_ONCE:
                peers.pop(int(draw.integers(_AT_ONCE))).close()


def _connected(address: str) -> socket.socket:
    scheme, _, where = address.partition("://")
    host, _, port = where.rpartition(":")
    if scheme == "ipc":
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(where)
    else:
        peer = socket.create_connection((host, int(port)))
    peer.setblocking(False)
    return peer


def said(draw: np.random.Generator) -> bytes:
    """All bytes that one foreign peer sends: a greeting of some version of ZMTP, messages, and perhaps a cut."""
    greet, frame = _VERSIONS[int(draw.integers(len(_VERSIONS)))]
    messages = [_message(draw, frame) for _ in range(int(draw.integers(20)))]
    sent = greet(draw) + b"".join(messages)
    return sent if draw.integers(4) else sent[: int(draw.integers(len(sent) + 1))]


def _greeting_1(draw: np.random.Generator) -> bytes:
    """ZMTP 1.0: the identity alone."""
    return _frame_1(_identity(draw), _odd(draw, 0, _MORE))


def _greeting_2(draw: np.random.Generator) -> bytes:
    """ZMTP 2.0: the signature, the version, the type of the socket, and the identity."""
    return _SIGNATURE + bytes([1, _odd(draw, int(draw.integers(12)), 255)]) + _frame(_identity(draw), 0)


def _greeting_3(draw: np.random.Generator) -> bytes:
    """ZMTP 3: the signature, the version, the mechanism and whether it is its server; then the command READY."""
    mechanism = _MECHANISMS[int(draw.integers(len(_MECHANISMS)))]
    server = _odd(draw, 0, 1)
    greeting = _SIGNATURE + bytes([3, int(draw.integers(2))]) + mechanism.ljust(20, b"\0") + bytes([server]) + bytes(31)
    kind = b"DEALER" if draw.integers(2) else _TYPES[int(draw.integers(len(_TYPES)))]
    ready = b"\5READY"
    for name, value in ((b"Socket-Type", kind), (b"Identity", _identity(draw))):
        ready += bytes([len(name)]) + name + _odd(draw, len(value), 1 << 31).to_bytes(4, "big") + value
    return greeting + _frame(ready, _COMMAND)


def _identity(draw: np.random.Generator) -> bytes:
    """Often none; otherwise bytes like those that ZeroMQ makes up for a peer, or any."""
    return (b"", b"", b"\0" + draw.bytes(4), draw.bytes(int(draw.integers(256))))[int(draw.integers(4))]


def _message(draw: np.random.Generator, frame: Callable[[bytes, int], bytes]) -> bytes:
    """A message of one frame or several, a command, or the begin of a frame that is announced too long."""
    kind = int(draw.integers(8))
    if kind == 0:
        return frame(_COMMANDS[int(draw.integers(len(_COMMANDS)))], _odd(draw, _COMMAND, int(draw.integers(256))))
    if kind == 1 and not draw.integers(4):
        nbytes = _LENGTHS[int(draw.integers(len(_LENGTHS)))]
        return bytes([0xFF if frame is _frame_1 else _LONG]) + nbytes.to_bytes(8, "big") + draw.bytes(20)
    contents = [_content(draw) for _ in range(int(draw.choice([1, 1, 2, 2, 3, 40])))]
    return b"".join(frame(content, _MORE) for content in contents[1:]) + frame(contents[0], 0)


def _content(draw: np.random.Generator) -> bytes:
    """A segment of a service, whole or its header alone, or random bytes."""
    kind = int(draw.choice([service_protocol.HELLO, service_protocol.BYE, int(draw.integers(256))]))
    number = int(draw.choice([service_protocol.VERSION, int(draw.integers(1 << 40))]))
    payload = draw.bytes(int(draw.choice([0, 0, 10, 300])))
    return (
        service_sockets._FORM.pack(kind, number) + payload,
        segment_stream.HEADER.pack(len(payload), kind, number) + payload,
        draw.bytes(int(draw.integers(300))),
    )[int(draw.integers(3))]


def _frame(body: bytes, flags: int) -> bytes:
    """A frame of ZMTP 2.0 and later."""
    if len(body) < 256:
        return bytes([flags & ~_LONG, len(body)]) + body
    return bytes([flags | _LONG]) + len(body).to_bytes(8, "big") + body


def _frame_1(body: bytes, flags: int) -> bytes:
    """A frame of ZMTP 1.0: its length counts the flags."""
    nbytes = len(body) + 1
    return (bytes([nbytes]) if nbytes < 255 else b"\xff" + nbytes.to_bytes(8, "big")) + bytes([flags]) + body


_VERSIONS = (
    (_greeting_1, _frame_1),
    (_greeting_2, _frame),
    (_greeting_3, _frame),
    (_greeting_3, _frame),
    (lambda draw: draw.bytes(20), _frame),
)


def _odd(draw: np.random.Generator, usual: int, odd: int) -> int:
    return usual if draw.integers(8) else odd


def main() -> None:
    parser = argparse.ArgumentParser(description="Let foreign peers speak to the sockets of services and ranks.")
    parser.add_argument("seed", nargs="?", type=int, default=0)
    parser.add_argument("--peers", type=int, default=2_000, help="foreign peers for each target")
    chosen = parser.parse_args()
    for target in (*SERVICES, *RANKS):
        fuzz(target, chosen.seed, chosen.peers)
        print(f"seed {chosen.seed}: {target}: no good call was lost beside {chosen.peers:,} foreign peers", flush=True)


if __name__ == "__main__":
    main()
