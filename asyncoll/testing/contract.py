"""What every transport promises, as one suite: run it on a transport of your own too."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager

from asyncoll.errors import UsageError
from asyncoll.transport import MAX_FRAME_BYTES, Buffer, Transport

OpenWorld = Callable[[int], AbstractContextManager[Sequence[Transport]]]
Message = tuple[int, list[bytes]]  # source, frames


def check_transport(
    open_world: OpenWorld, loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
) -> None:
    """Raise AssertionError, naming the promise, if the transports of `open_world(size)` break one.

    Every check runs on a loop of its own, with 1 to 5 ranks on it.
    """
    for size, check in _CHECKS:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            try:
                runner.run(_checked(open_world, size, check))
            except Exception as error:
                raise AssertionError(f"{check.__name__}: {check.__doc__}") from error


async def _checked(open_world: OpenWorld, size: int, check: Callable[[_World], Awaitable[None]]) -> None:
    with open_world(size) as transports:
        world = _World(transports)
        try:
            await check(world)
        finally:
            for transport in transports:
                await transport.close()


class _Recorder:
    """A `Receiver` that keeps what it is told."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.losses: list[tuple[int, int]] = []  # (source, how many messages had come by then)
        self._changed = asyncio.Event()

    def received(self, source: int, frames: list[Buffer]) -> None:
        self.messages.append((source, [bytes(frame) for frame in frames]))
        self._changed.set()

    def lost(self, source: int, cause: str) -> None:
        assert cause, "a loss has a cause"
        self.losses.append((source, len(self.messages)))
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def next_messages(self, count: int) -> list[Message]:
        await self.until(lambda: len(self.messages) >= count)
        return self.messages[:count]


class _World:
    def __init__(self, transports: Sequence[Transport]) -> None:
        self.transports = transports
        self.recorders = [_Recorder() for _ in transports]

    async def start(self) -> None:
        starts = zip(self.transports, self.recorders, strict=True)
        await asyncio.gather(*(transport.start(recorder) for transport, recorder in starts))


async def _knows_its_place(world: _World) -> None:
    """rank and size are those of the world"""
    assert [transport.rank for transport in world.transports] == list(range(3))
    assert {transport.size for transport in world.transports} == {3}


async def _keeps_order(world: _World) -> None:
    """messages from one rank to another arrive in order, whole and unchanged, whatever their sizes"""
    await world.start()
    sizes = [0, 1, 3, 70_000, 2, 300_000, 0, 5] * 10
    sent = [[index.to_bytes(4, "big"), bytes([index]) * size] for index, size in enumerate(sizes)]
    for frames in sent:
        world.transports[0].send(1, frames)
    assert await world.recorders[1].next_messages(len(sent)) == [(0, frames) for frames in sent]


async def _takes_one_frame(world: _World) -> None:
    """a message of one frame arrives as one frame"""
    await world.start()
    world.transports[1].send(0, [b"header"])
    assert await world.recorders[0].next_messages(1) == [(1, [b"header"])]


async def _reaches_itself(world: _World) -> None:
    """a rank can send to itself, and hears of it after `send` has returned"""
    await world.start()
    world.transports[0].send(0, [b"me", b"again"])
    assert not world.recorders[0].messages
    assert await world.recorders[0].next_messages(1) == [(0, [b"me", b"again"])]


async def _copies_what_it_sends(world: _World) -> None:
    """the sender may reuse its frames as soon as `send` returns"""
    await world.start()
    frame = bytearray(b"a" * 200_000)
    for letter in b"abc":
        frame[:] = bytes([letter]) * len(frame)
        world.transports[0].send(1, [b"", frame])
    frame[:] = b"x" * len(frame)
    received = await world.recorders[1].next_messages(3)
    assert [frames[1][:1] + frames[1][-1:] for _, frames in received] == [b"aa", b"bb", b"cc"]


async def _connects_everybody(world: _World) -> None:
    """every rank reaches every rank, and each message names its source"""
    await world.start()
    size = len(world.transports)
    for transport in world.transports:
        for dest in range(size):
            transport.send(dest, [bytes([transport.rank, dest])])
    for rank, recorder in enumerate(world.recorders):
        received = sorted(await recorder.next_messages(size))
        assert received == [(source, [bytes([source, rank])]) for source in range(size)]


async def _carries_the_largest_frame(world: _World) -> None:
    """a frame of MAX_FRAME_BYTES arrives, and one byte more is refused by the sender and harms nothing"""
    await world.start()
    try:
        world.transports[0].send(1, [b"", bytes(MAX_FRAME_BYTES + 1)])
    except UsageError:
        pass
    else:
        raise AssertionError("an oversized frame was accepted")
    world.transports[0].send(1, [b"", bytes(MAX_FRAME_BYTES)])
    assert await world.recorders[1].next_messages(1) == [(0, [b"", bytes(MAX_FRAME_BYTES)])]


async def _refuses_strange_ranks(world: _World) -> None:
    """sending to a rank outside the world is a UsageError"""
    await world.start()
    for dest in (-1, 2):
        try:
            world.transports[0].send(dest, [b""])
        except UsageError:
            continue
        raise AssertionError(f"a message to rank {dest} of 2 was accepted")


async def _drains(world: _World) -> None:
    """`drain` returns once a burst has left, and nothing of the burst is lost"""
    await world.start()
    piece = bytes(100_000)
    for index in range(300):
        world.transports[0].send(1, [index.to_bytes(4, "big"), piece])
        await world.transports[0].drain(1)
    received = await world.recorders[1].next_messages(300)
    assert [int.from_bytes(frames[0], "big") for _, frames in received] == list(range(300))


async def _tells_of_a_loss(world: _World) -> None:
    """peers hear once that a rank has closed, after its last message; sending to it is then dropped"""
    await world.start()
    for index in range(50):
        world.transports[2].send(0, [bytes([index])])
    await world.recorders[0].next_messages(50)
    await world.transports[2].close()
    await world.transports[2].close()
    for rank in (0, 1):
        recorder = world.recorders[rank]
        await recorder.until(lambda recorder=recorder: bool(recorder.losses))  # type: ignore[misc]
        world.transports[rank].send(2, [b"too late"])
        await world.transports[rank].drain(2)
    world.transports[0].send(1, [b"still here"])
    assert await world.recorders[1].next_messages(1) == [(0, [b"still here"])]
    assert [recorder.losses for recorder in world.recorders] == [[(2, 50)], [(2, 0)], []]


async def _is_silent_when_closed(world: _World) -> None:
    """a closed transport delivers nothing and sends nothing"""
    await world.start()
    world.transports[0].send(1, [b"one"])
    await world.recorders[1].next_messages(1)
    await world.transports[1].close()
    world.transports[1].send(0, [b"nobody hears this"])
    await world.recorders[0].until(lambda: bool(world.recorders[0].losses))
    assert world.recorders[0].messages == []
    assert len(world.recorders[1].messages) == 1


async def _flushes(world: _World) -> None:
    """what was sent before `close(flush=True)` arrives, and only then the loss"""
    await world.start()
    for index in range(20):
        world.transports[0].send(1, [bytes([index]), bytes(50_000)])
    await world.transports[0].close(flush=True)
    await world.recorders[1].until(lambda: bool(world.recorders[1].losses))
    assert world.recorders[1].losses == [(0, 20)]


_CHECKS: list[tuple[int, Callable[[_World], Awaitable[None]]]] = [
    (3, _knows_its_place),
    (2, _keeps_order),
    (2, _takes_one_frame),
    (1, _reaches_itself),
    (2, _copies_what_it_sends),
    (5, _connects_everybody),
    (2, _carries_the_largest_frame),
    (2, _refuses_strange_ranks),
    (2, _drains),
    (3, _tells_of_a_loss),
    (2, _is_silent_when_closed),
    (2, _flushes),
]
