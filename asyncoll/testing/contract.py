"""Contract suites: `check_transport` and `check_arena` check the promises of every `Transport` and every `Arena`.

The library runs them on its own transports and arenas. Run them on one that you write.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence

import numpy as np

from asyncoll.errors import AsyncollError, UsageError
from asyncoll.transport import MAX_FRAME_BYTES, Arena, Buffer, ControlBlock, Loss, Transport, Wait

OpenWorld = Callable[[int], contextlib.AbstractContextManager[Sequence[Transport]]]
OpenArenas = Callable[[int], contextlib.AbstractContextManager[Sequence[Arena]]]
Message = tuple[int, list[bytes]]  # source, frames


def check_transport(
    open_world: OpenWorld, loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
) -> None:
    """Check the transports that `open_world(size)` yields. Raises AssertionError, naming the promise, if one is broken.

    `open_world` is a context manager that yields one unstarted transport for each rank. Every check opens a world of 1
    to 5 ranks, and runs on a new loop from `loop_factory`.
    """
    for size, check in _CHECKS:
        with checking(check, loop_factory) as runner:
            runner.run(_checked(open_world, size, check))


def check_arena(
    open_arenas: OpenArenas, loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
) -> None:
    """Check the arenas that `open_arenas(size)` yields. Raises AssertionError, naming the promise, if one is broken.

    `open_arenas` is a context manager that yields the arena of each rank. Every check opens 1 to 5 arenas, and runs on
    a new loop from `loop_factory`.
    """
    for size, check in _ARENA_CHECKS:
        with checking(check, loop_factory) as runner, open_arenas(size) as arenas:
            runner.run(check(arenas))


@contextlib.contextmanager
def checking(
    check: Callable[..., object], loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> Iterator[asyncio.Runner]:
    """A runner for a check, whose docstring states a promise. Raises AssertionError, naming it, if the block fails."""
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        try:
            yield runner
        except Exception as error:
            raise AssertionError(f"{check.__name__}: {check.__doc__}") from error


async def _checked(open_world: OpenWorld, size: int, check: Callable[[_ContractWorld], Awaitable[None]]) -> None:
    with open_world(size) as transports:
        world = _ContractWorld(transports)
        try:
            await world.start()
            await check(world)
        finally:
            for transport in transports:
                await transport.close()


@contextlib.contextmanager
def _refused(error: type[Exception], otherwise: str) -> Iterator[None]:
    """Check that the block raises `error`; raise AssertionError with the text `otherwise` if it ends."""
    try:
        yield
    except error:
        return
    raise AssertionError(otherwise)


class _Recorder:
    """A `Receiver` that records messages and losses."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.losses: list[tuple[int, int]] = []  # (lost rank, number of messages received before)
        self._changed = asyncio.Event()

    def received(self, source: int, frames: list[Buffer]) -> None:
        self.messages.append((source, [bytes(frame) for frame in frames]))
        self._changed.set()

    def lost(self, loss: Loss) -> None:
        assert loss.cause, "a loss has a cause"
        assert loss.last_seen_s >= 0
        self.losses.append((loss.rank, len(self.messages)))
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def next_messages(self, count: int) -> list[Message]:
        await self.until(lambda: len(self.messages) >= count)
        return self.messages[:count]


class _ContractWorld:
    def __init__(self, transports: Sequence[Transport]) -> None:
        self.places = [(transport.rank, transport.size) for transport in transports]  # before they start
        self.transports = transports
        self.recorders = [_Recorder() for _ in transports]

    async def start(self) -> None:
        starts = zip(self.transports, self.recorders, strict=True)
        await asyncio.gather(*(transport.start(recorder) for transport, recorder in starts))


async def _knows_its_rank(world: _ContractWorld) -> None:
    """rank and size are those of the world"""
    assert world.places == [(rank, 3) for rank in range(3)]


async def _keeps_order(world: _ContractWorld) -> None:
    """messages from one rank to another arrive in order, whole and unchanged, whatever their sizes"""
    sizes = [0, 1, 3, 70_000, 2, 300_000, 0, 5] * 10
    sent = [[index.to_bytes(4, "big"), bytes([index]) * size] for index, size in enumerate(sizes)]
    for frames in sent:
        world.transports[0].send(1, frames)
    assert await world.recorders[1].next_messages(len(sent)) == [(0, frames) for frames in sent]


async def _takes_one_frame(world: _ContractWorld) -> None:
    """a message of one frame arrives as one frame"""
    world.transports[1].send(0, [b"header"])
    assert await world.recorders[0].next_messages(1) == [(1, [b"header"])]


async def _reaches_itself(world: _ContractWorld) -> None:
    """a rank can send to itself, and receives the message after `send` has returned"""
    world.transports[0].send(0, [b"me", b"again"])
    assert not world.recorders[0].messages
    assert await world.recorders[0].next_messages(1) == [(0, [b"me", b"again"])]


async def _copies_what_it_sends(world: _ContractWorld) -> None:
    """the sender may reuse its frames as soon as `send` returns"""
    frame = bytearray(b"a" * 200_000)
    for letter in b"abc":
        frame[:] = bytes([letter]) * len(frame)
        world.transports[0].send(1, [b"", frame])
    frame[:] = b"x" * len(frame)
    received = await world.recorders[1].next_messages(3)
    assert [frames[1][:1] + frames[1][-1:] for _, frames in received] == [b"aa", b"bb", b"cc"]


async def _connects_all_ranks(world: _ContractWorld) -> None:
    """every rank reaches every rank, and each message names its source"""
    size = len(world.transports)
    for transport in world.transports:
        for dest in range(size):
            transport.send(dest, [bytes([transport.rank, dest])])
    for rank, recorder in enumerate(world.recorders):
        received = sorted(await recorder.next_messages(size))
        assert received == [(source, [bytes([source, rank])]) for source in range(size)]


async def _carries_the_largest_frame(world: _ContractWorld) -> None:
    """a frame of MAX_FRAME_BYTES arrives; `send` refuses a frame with one byte more, and later messages arrive"""
    with _refused(UsageError, "an oversized frame was accepted"):
        world.transports[0].send(1, [b"", bytes(MAX_FRAME_BYTES + 1)])
    world.transports[0].send(1, [b"", bytes(MAX_FRAME_BYTES)])
    assert await world.recorders[1].next_messages(1) == [(0, [b"", bytes(MAX_FRAME_BYTES)])]


async def _refuses_ranks_outside_the_world(world: _ContractWorld) -> None:
    """sending to a rank outside the world is a UsageError"""
    for dest in (-1, 2):
        with _refused(UsageError, f"a message to rank {dest} of 2 was accepted"):
            world.transports[0].send(dest, [b""])


async def _sends_directly(world: _ContractWorld) -> None:
    """a message that `send_directly` accepts in another thread arrives, whole and in order; a refused one does not"""
    sender, sent = world.transports[0], []

    def send_directly(index: int) -> None:
        if sender.send_directly(1, [index.to_bytes(4, "big"), bytes(index)]):
            sent.append(index)

    for index in range(0, 200, 2):
        sender.send(1, [index.to_bytes(4, "big"), bytes(index)])
        sent.append(index)
        thread = threading.Thread(target=send_directly, args=(index + 1,))
        thread.start()
        thread.join()
    received = await world.recorders[1].next_messages(len(sent))
    assert received == [(0, [index.to_bytes(4, "big"), bytes(index)]) for index in sent]
    await world.transports[1].close()
    await world.recorders[0].until(lambda: bool(world.recorders[0].losses))
    assert len(world.recorders[1].messages) == len(sent)
    sender.send_directly(1, [b"too late"])


async def _drains(world: _ContractWorld) -> None:
    """`drain` returns when the burst has been sent, and no message of the burst is lost"""
    piece = bytes(100_000)
    for index in range(300):
        world.transports[0].send(1, [index.to_bytes(4, "big"), piece])
        await world.transports[0].drain(1)
    received = await world.recorders[1].next_messages(300)
    assert [int.from_bytes(frames[0], "big") for _, frames in received] == list(range(300))


async def _reports_a_loss(world: _ContractWorld) -> None:
    """each peer is told once of a closed rank, after its last message; later messages to that rank are dropped"""
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


async def _is_silent_when_closed(world: _ContractWorld) -> None:
    """a closed transport delivers nothing and sends nothing"""
    world.transports[0].send(1, [b"one"])
    await world.recorders[1].next_messages(1)
    await world.transports[1].close()
    world.transports[1].send(0, [b"after close"])
    await world.recorders[0].until(lambda: bool(world.recorders[0].losses))
    assert world.recorders[0].messages == []
    assert len(world.recorders[1].messages) == 1


async def _flushes(world: _ContractWorld) -> None:
    """all messages sent before `close(flush=True)` arrive, and the loss is reported after them"""
    for index in range(20):
        world.transports[0].send(1, [bytes([index]), bytes(50_000)])
    await world.transports[0].close(flush=True)
    await world.recorders[1].until(lambda: bool(world.recorders[1].losses))
    assert world.recorders[1].losses == [(0, 20)]


async def _enters(world: _ContractWorld) -> None:
    """after `enter` the new receiver gets all messages; none goes to a rank that is not among the members"""
    sender, dest, stranger = world.transports
    sender.send(1, [b"before"])
    await world.recorders[1].next_messages(1)
    later = [_Recorder(), _Recorder()]
    for transport, recorder in zip((sender, dest), later, strict=True):
        transport.enter(recorder, (0, 1))
    for index in range(50):
        sender.send(2, [b"to no member"])
        assert not sender.send_directly(2, [b"to no member"])
        sender.send(1, [bytes([index])])
        dest.send(0, [bytes([index])])
    await sender.drain(2)
    assert await later[1].next_messages(50) == [(0, [bytes([index])]) for index in range(50)]
    assert await later[0].next_messages(50) == [(1, [bytes([index])]) for index in range(50)]
    await stranger.close()
    await sender.close()
    await later[1].until(lambda: bool(later[1].losses))
    assert later[1].losses == [(0, 50)]  # and none of a rank that is not among the members
    assert [len(recorder.messages) for recorder in world.recorders] == [0, 1, 0]


_CHECKS: list[tuple[int, Callable[[_ContractWorld], Awaitable[None]]]] = [
    (3, _knows_its_rank),
    (2, _keeps_order),
    (2, _takes_one_frame),
    (1, _reaches_itself),
    (2, _copies_what_it_sends),
    (5, _connects_all_ranks),
    (2, _carries_the_largest_frame),
    (2, _refuses_ranks_outside_the_world),
    (2, _sends_directly),
    (2, _drains),
    (3, _reports_a_loss),
    (2, _is_silent_when_closed),
    (2, _flushes),
    (3, _enters),
]


# -- arenas ---------------------------------------------------------------------------------------


class _StoppedError(Exception):
    """The wait was ended by its check."""


async def _wait(
    arena: Arena, control_block: ControlBlock, ready: Callable[[], bool], stopped: Sequence[object] = ()
) -> None:
    """Wait for `ready`. Raises _StoppedError once `stopped` is not empty."""

    def check() -> None:
        if stopped:
            raise _StoppedError

    await arena.wait(Wait(control_block, ready), check, lambda: f"rank {arena.local_rank}")


async def _until_asleep(arena: Arena, count: int = 1) -> None:
    while len(arena.waiting()) < count:
        # Not 0: virtual time has to advance, too.
        await asyncio.sleep(1e-6)


def _is_set(control_block: ControlBlock, cell: int) -> Callable[[], bool]:
    return lambda: control_block.cells[cell] != 0


def _change(control_block: ControlBlock, cell: int, by: int = 1) -> None:
    with control_block:
        control_block.cells[cell] += by
        control_block.wake()


async def _numbers_its_ranks(arenas: Sequence[Arena]) -> None:
    """every rank has a local rank of its own, and all ranks agree on them"""
    assert [arena.local_rank for arena in arenas] == list(range(3))
    assert len({arena.ranks for arena in arenas}) == 1
    assert len(set(arenas[0].ranks)) == 3


async def _shares_a_clock(arenas: Sequence[Arena]) -> None:
    """the time is the same at every rank, and does not go back"""
    times = [arena.now_s() for arena in [*arenas, *arenas]]
    assert times == sorted(times)


async def _shares_memory(arenas: Sequence[Arena]) -> None:
    """an address means the same byte at every rank, and all ranks read what one rank has written"""
    for owner in arenas:
        address = owner.allocate(100)
        for writer in arenas:
            writer.view(address + 10, 5)[:] = writer.local_rank + 1
            for reader in arenas:
                assert reader.view(address, 100)[10:15].tolist() == [writer.local_rank + 1] * 5


async def _keeps_blocks_apart(arenas: Sequence[Arena]) -> None:
    """an allocated block is aligned to 64 bytes, has the requested size, and overlaps no block in use"""
    blocks: dict[int, tuple[int, int]] = {}
    for number, nbytes in enumerate([1, 64, 65, 0, 4096, 100_000, 3 << 20, 17] * 3):
        arena = arenas[number % len(arenas)]
        if number % 5 == 4:
            address = min(address for address in blocks if blocks[address][0] % len(arenas) == arena.local_rank)
            arena.free(address)
            del blocks[address]
        address = arena.allocate(nbytes)
        assert address % 64 == 0
        blocks[address] = (number, nbytes)
        arena.view(address, nbytes)[:] = number
    for address, (number, nbytes) in blocks.items():
        view = arenas[0].view(address, nbytes)
        assert view.dtype == np.uint8
        assert view.shape == (nbytes,)
        assert (view == number).all()


async def _locates_its_own(arenas: Sequence[Arena]) -> None:
    """`locate` returns the address of an array in this rank's part of the memory, and None for other arrays"""
    for arena in arenas:
        address = arena.allocate(1000)
        flat = arena.view(address, 1000)
        assert arena.locate(flat) == address
        assert arena.locate(flat[24:800].view(np.float64)) == address + 24
        assert arena.locate(np.zeros(1000, np.uint8)) is None


async def _shares_control_blocks(arenas: Sequence[Arena]) -> None:
    """a context has one control block, the same at every rank; the first rank that asks creates it, with zero cells"""
    first, second = ([arena.control_block(context, 4) for arena in arenas] for context in (7, (1 << 64) - 1))
    for control_blocks in (first, second):
        assert [control_block.created for control_block in control_blocks] == [True, False, False]
        assert [list(control_block.cells) for control_block in control_blocks] == [[0] * 4] * 3
    for local_rank, control_block in enumerate(first):
        _change(control_block, local_rank, by=-(2**63) + local_rank)
    assert [list(control_block.cells) for control_block in first] == [[-(2**63), 1 - 2**63, 2 - 2**63, 0]] * 3
    assert [list(control_block.cells) for control_block in second] == [[0] * 4] * 3
    assert [list(arena.control_block(7, 4).cells) for arena in arenas] == [list(first[0].cells)] * 3


async def _refuses_another_size(arenas: Sequence[Arena]) -> None:
    """asking for an existing control block with another number of cells is an error, and leaves its cells unchanged"""
    _change(arenas[0].control_block(7, 4), 3)
    with _refused(AsyncollError, "one control block had two sizes"):
        arenas[1].control_block(7, 5)
    assert list(arenas[1].control_block(7, 4).cells) == [0, 0, 0, 1]


async def _sees_what_is_ready(arenas: Sequence[Arena]) -> None:
    """a wait whose condition holds already returns, and `waiting` is empty afterwards"""
    control_block = arenas[0].control_block(1, 1)
    await _wait(arenas[0], control_block, lambda: control_block.cells[0] == 0)
    assert arenas[0].waiting() == []


async def _turns_the_loop(arenas: Sequence[Arena]) -> None:
    """a wait with `yielding=True` yields to the loop in each turn, and ends when its condition holds"""
    control_blocks = [arena.control_block(1, 1) for arena in arenas]
    wait = Wait(control_blocks[0], lambda: control_blocks[0].cells[0] == 3)
    task = asyncio.create_task(arenas[0].wait(wait, lambda: None, lambda: "", yielding=True))
    for _ in range(3):
        await asyncio.sleep(0)
        assert not task.done()
        _change(control_blocks[1], 0)
    await task
    assert arenas[0].waiting() == []


async def _wakes_sleepers(arenas: Sequence[Arena]) -> None:
    """`waiting` lists a sleeping wait, and the wait wakes when another rank has changed the cells"""
    control_blocks = [arena.control_block(1, 2) for arena in arenas]
    task = asyncio.create_task(_wait(arenas[0], control_blocks[0], lambda: control_blocks[0].cells[0] == 2))
    for _ in range(2):
        await _until_asleep(arenas[0])
        assert arenas[0].waiting() == ["rank 0"]
        assert not task.done()
        _change(control_blocks[1], 0)
    await task
    assert arenas[0].waiting() == []


async def _wakes_many(arenas: Sequence[Arena]) -> None:
    """any number of tasks may wait, at each rank and on several control blocks; each wakes when its condition holds"""
    contexts = range(3)
    control_blocks = [[arena.control_block(context, 5) for context in contexts] for arena in arenas]
    tasks = [
        asyncio.create_task(_wait(arena, control_block, _is_set(control_block, cell)))
        for arena, mine in zip(arenas, control_blocks, strict=True)
        for control_block in mine
        for cell in range(5)
    ]
    for arena in arenas:
        await _until_asleep(arena, 15)
    for cell in range(5):
        for context in contexts:
            _change(control_blocks[cell][context], cell)
    await asyncio.gather(*tasks)


async def _meets(arenas: Sequence[Arena]) -> None:
    """no wake-up is lost: ranks that meet at a counter a hundred times never stop"""

    async def rank(arena: Arena) -> None:
        control_block = arena.control_block(3, 1)
        for turn in range(1, 101):
            _change(control_block, 0)
            await _wait(arena, control_block, lambda turn=turn: control_block.cells[0] >= turn * len(arenas))  # type: ignore[misc]

    await asyncio.gather(*map(rank, arenas))


async def _rechecks(arenas: Sequence[Arena]) -> None:
    """`recheck` makes every waiter of this rank, and of no other, ask whether it should go on"""
    stopped: list[object] = []
    control_blocks = [arena.control_block(1, 1) for arena in arenas]
    tasks = [
        asyncio.create_task(_wait(arena, control_block, _is_set(control_block, 0), stopped))
        for arena, control_block in zip(arenas, control_blocks, strict=True)
        for _ in range(2)
    ]
    for arena in arenas:
        await _until_asleep(arena, 2)
    arenas[0].recheck()  # and they go on
    await _until_asleep(arenas[0], 2)
    stopped.append("now")
    arenas[0].recheck()
    results = await asyncio.gather(*tasks[:2], return_exceptions=True)
    assert [type(result) for result in results] == [_StoppedError, _StoppedError]
    assert arenas[0].waiting() == []
    assert len(arenas[1].waiting()) == 2
    stopped.clear()
    _change(control_blocks[0], 0)
    await asyncio.gather(*tasks[2:])


async def _asks_before_it_sleeps(arenas: Sequence[Arena]) -> None:
    """a recheck before the wait is not lost: a wait calls its check before it sleeps"""
    arenas[0].recheck()
    control_block = arenas[0].control_block(1, 1)
    with _refused(_StoppedError, "the wait ended although its condition never held"):
        await _wait(arenas[0], control_block, lambda: False, ["stopped"])


async def _survives_cancelling(arenas: Sequence[Arena]) -> None:
    """a cancelled wait leaves nothing behind, and the other waits still wake"""

    control_blocks = [arena.control_block(1, 1) for arena in arenas]
    tasks = [
        asyncio.create_task(_wait(arenas[0], control_blocks[0], lambda: control_blocks[0].cells[0] > 0))
        for _ in range(3)
    ]
    await _until_asleep(arenas[0], 3)
    tasks[1].cancel()
    await asyncio.wait([tasks[1]])
    assert tasks[1].cancelled()
    assert len(arenas[0].waiting()) == 2
    _change(control_blocks[1], 0)
    await asyncio.gather(tasks[0], tasks[2])
    _change(control_blocks[1], 0)
    await _wait(arenas[0], control_blocks[0], lambda: control_blocks[0].cells[0] == 2)


_ARENA_CHECKS: list[tuple[int, Callable[[Sequence[Arena]], Coroutine[None, None, None]]]] = [
    (3, _numbers_its_ranks),
    (3, _shares_a_clock),
    (3, _shares_memory),
    (3, _keeps_blocks_apart),
    (3, _locates_its_own),
    (3, _shares_control_blocks),
    (2, _refuses_another_size),
    (1, _sees_what_is_ready),
    (2, _turns_the_loop),
    (2, _wakes_sleepers),
    (5, _wakes_many),
    *((size, _meets) for size in range(1, 6)),
    (2, _rechecks),
    (1, _asks_before_it_sleeps),
    (2, _survives_cancelling),
]
