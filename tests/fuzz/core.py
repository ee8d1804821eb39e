"""Feed damaged shared memory and wrong arguments to the compiled core: `python -m tests.fuzz.core [SEED]`.

Each input is a valid state of a control block, damaged at a few cells, and one call of a method of the core on it. The
call returns or raises; it writes nothing outside of its memory, and releases the lock. A breach is reported with the
seed and the number of the input, or ends the process; under AddressSanitizer (`make sanitize`) each array and each
block is an allocation of its own, so an access outside of it ends the process, too.

A second kind of inputs (`--writers`) has a process that writes random numbers into the cells all the time.

The bytes of a `pthread_mutex_t` are not damaged: the C library trusts them.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import random
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from asyncoll import _core
from asyncoll.algorithms.dense.compiled import meetings_of
from asyncoll.algorithms.dense.rendezvous import RendezvousArea, signed
from asyncoll.algorithms.dense.tuning import Sizes
from asyncoll.algorithms.rounds.block_layout import BlockLayout
from asyncoll.algorithms.rounds.compiled_rounds import rounds_of
from asyncoll.algorithms.rounds.one_sided import OneSidedRounds, Setting
from asyncoll.algorithms.rounds.operation import Opening, Operation
from asyncoll.algorithms.rounds.operation_registry import OperationRegistry
from asyncoll.algorithms.rounds.round_record import Memory
from asyncoll.errors import AsyncollError
from asyncoll.runtime.group import Group
from asyncoll.runtime.trace import Trace
from asyncoll.tensors.operands import bundle
from asyncoll.tensors.reductions import ReduceOp, kernel_number
from asyncoll.transport.control_block import DOORBELLS, control_block_bytes
from asyncoll.transport.lock_cells import MUTEX_BYTES
from asyncoll.transport.memory.arena import HostArena, local_world
from asyncoll.transport.memory.mutex import LockPolicy, RobustMutex

_SIZES = Sizes(
    shown=1 << 9, short=1 << 11, chunk=1 << 9, window=1 << 9, piece=1 << 9, whole=1 << 11, private_max=0, calls=2
)
_ALLOWED = (AsyncollError, OSError, TypeError, ValueError, OverflowError, IndexError, BufferError, MemoryError)
_CANARY = bytes(range(200, 232))
_BATCH = 200  # inputs on one world
_ADDRESSES = 1 << 40  # those of the arena are below
_SEGMENT = 1 << 20  # bytes of the memory of a rank that the rounds see


class _Random(random.Random):
    def number(self, *near: int) -> int:
        """A number of 64 bits: one that a cell often has, one of `near` or beside it, an extreme one, or any."""
        kind = self.randrange(5)
        if kind == 0:
            return self.randrange(-2, 70)
        if kind == 1 and near:
            return max(-(1 << 63), min(self.choice(near) + self.randrange(-1, 2), (1 << 63) - 1))
        if kind == 2:
            return self.choice((-(1 << 63), (1 << 63) - 1, 1 << 32, -(1 << 32), 1 << 62, 1 << 31, -1))
        return self.getrandbits(64) - (1 << 63) if kind == 3 else self.getrandbits(12)


@dataclass
class _Argument:
    """An argument of a method: valid values, and whether wrong ones are tried, too."""

    draw: Callable[[_Random], Any]
    is_exact: bool = False


def _exactly(draw: Callable[[_Random], Any]) -> _Argument:
    """An argument of this process that the core trusts: it says how long to wait."""
    return _Argument(draw, is_exact=True)


class _Image:
    """The memory of one control block, and the control blocks of all ranks on it."""

    def __init__(self, cells: int, size: int, *, shared: bool) -> None:
        nbytes = MUTEX_BYTES + control_block_bytes(cells, size)
        room: Any = mmap.mmap(-1, nbytes + 2 * len(_CANARY)) if shared else bytearray(nbytes + 2 * len(_CANARY))
        whole = memoryview(room)
        self._guards = whole[: len(_CANARY)], whole[-len(_CANARY) :]
        for guard in self._guards:
            guard[:] = _CANARY
        self.memory = whole[len(_CANARY) : -len(_CANARY)]
        RobustMutex.initialize(self.memory[:MUTEX_BYTES])
        ranks, doorbells = range(size), [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(size * DOORBELLS)]
        self._doorbells = doorbells
        self.blocks = [
            _core.native.ControlBlock(  # type: ignore[union-attr]
                self.memory,
                tuple(doorbells),
                RobustMutex(self.memory[:MUTEX_BYTES], rank, ranks, LockPolicy()),
                rank,
                AsyncollError,
                True,
            )
            for rank in ranks
        ]
        self.damageable = self.memory[MUTEX_BYTES - 8 :].cast("q")  # the holder, the flags and the user's cells

    def load(self, cells: bytes, draw: _Random) -> None:
        """Take over the cells, and damage a few."""
        self.damageable[0] = 0
        whole = self.memory[MUTEX_BYTES:]
        whole[: -len(cells)] = bytes(len(whole) - len(cells))
        whole[-len(cells) :] = cells
        for _ in range(draw.choice((0, 1, 1, 2, 3, 10))):
            index = draw.randrange(len(self.damageable))
            self.damageable[index] = draw.number(self.damageable[index], self.damageable[index - 1])

    def check(self) -> None:
        """Raise AssertionError if there is a breach."""
        assert all(guard == _CANARY for guard in self._guards), "memory beside the control block has changed"
        assert self.memory[:4] == bytes(4), "the lock is still held"

    def close(self) -> None:
        for doorbell in self._doorbells:
            os.close(doorbell)


class _FuzzedMemory:
    """Stands in for the memory of an arena: each block is an allocation of its own."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], np.ndarray[Any, Any]] = {}

    def view(self, address: int, nbytes: int) -> np.ndarray[Any, Any]:
        if not 0 <= address < _ADDRESSES or nbytes > 1 << 20:
            raise IndexError(address)
        block = self._blocks.setdefault((address, nbytes), np.zeros(nbytes, np.uint8))
        return block[: address % 1024] if address % 7 == 3 else block  # at the end of a segment there is less

    def locate(self, flat: object) -> None:
        return None


@dataclass
class _Target:
    """A family of primitives on one image: valid states, the objects of all ranks, and the methods to call."""

    image: _Image
    states: Sequence[bytes]
    objects: Sequence[Any]
    methods: dict[str, list[_Argument]]

    def strike(self, draw: _Random) -> None:
        """One input."""
        self.image.load(draw.choice(self.states), draw)
        name = draw.choice(list(self.methods))
        arguments = [self._argument(each, draw) for each in self.methods[name]]
        if not draw.randrange(50):
            arguments = arguments[:-1] if draw.randrange(2) else [*arguments, 0]
        with contextlib.suppress(*_ALLOWED):
            getattr(draw.choice(self.objects), name)(*arguments)
        self.image.check()

    @staticmethod
    def _argument(argument: _Argument, draw: _Random) -> Any:
        if argument.is_exact or draw.randrange(25):
            return argument.draw(draw)
        wrong = (None, 1.5, "x", b"bytes", (), [1, -1], object(), bytearray(3), (9, -9), np.zeros(3)[::2], 1 << 64)
        return draw.choice(wrong) if draw.randrange(2) else draw.number()


def _array(draw: _Random) -> Any:
    size = draw.choice((0, 8, 64, 512, 1024, 2048, 2056))
    array = np.zeros(size // 8)
    array.flags.writeable = draw.randrange(20) > 0
    return array


def _kernel(draw: _Random) -> int:
    op, dtype = draw.choice(list(ReduceOp)), draw.choice(("float64", "int8", "bfloat16", "bool"))
    return kernel_number(op, dtype, _core.native)


_any_array = _Argument(_array)
_flag = _Argument(lambda draw: bool(draw.randrange(2)))
_divisor = _Argument(lambda draw: draw.randrange(1, 5))


def _control_blocks(draw: _Random, shared: bool) -> _Target:
    size = draw.choice((1, 2, 5))
    image = _Image(8, size, shared=shared)
    states = [b"".join(draw.number().to_bytes(8, "little", signed=True) for _ in range(8)) for _ in range(4)]
    names = {"enter": "wake", "wake": "wake", "ring_at_next_wake": "ring_at_next_wake"}
    locked = [
        SimpleNamespace(**{name: _locked(block, method) for name, method in names.items()}) for block in image.blocks
    ]
    number = _Argument(lambda draw: draw.number())
    return _Target(image, states, locked, {"enter": [], "wake": [number], "ring_at_next_wake": [number]})


def _locked(block: Any, method: str) -> Callable[..., None]:
    """A method of the block, which is called under its lock."""

    def call(*arguments: Any) -> None:
        with block, contextlib.suppress(*_ALLOWED):
            getattr(block, method)(*arguments)

    return call


def _meetings(draw: _Random, shared: bool) -> _Target:
    assert _core.native is not None
    size = draw.choice((1, 2, 3, 5))
    states, sum_of, numbers = [], kernel_number(ReduceOp.SUM, "float64", _core.native), [1]
    with local_world(size, (_core.native,)) as arenas:
        areas = [RendezvousArea(arena, size, rank, 7, _SIZES) for rank, arena in enumerate(arenas)]
        ranks = [meetings_of(area, _core.native) for area in areas]
        for area in areas:
            area.short_address(area.rank, 0)
        for number in range(1, 4):
            array = None if number == 2 else np.ones(draw.choice((8, 128)))
            for rank, meetings in enumerate(ranks):
                meetings.arrive(number, signed(number), array, 0, sum_of, 1, rank == 0)
                states.append(areas[0].control_block.cells.tobytes())
                numbers.append(number)
        areas_cells = len(areas[0].control_block.cells)
        areas.clear()
    image, memory = _Image(areas_cells, size, shared=shared), _FuzzedMemory()
    objects = [
        meetings_of(
            SimpleNamespace(  # type: ignore[arg-type]
                arena=SimpleNamespace(view=memory.view, cores=2),
                sizes=_SIZES,
                shown=_SIZES.shown,
                control_block=block,
                size=size,
                rank=rank,
            ),
            _core.native,
        )
        for rank, block in enumerate(image.blocks)
    ]
    valid = _Argument(lambda draw: draw.choice(numbers))
    kept: deque[Any] = deque(maxlen=10_000)  # a private array must live until its call is over

    def array_that_lives(draw: _Random) -> Any:
        kept.append(_array(draw))
        return kept[-1]

    any_array, done = _Argument(array_that_lives), _Argument(lambda draw: draw.choice((1, 64, 1024)))
    fingerprint = _Argument(lambda draw: signed(draw.choice(numbers)))
    address = _Argument(lambda draw: draw.choice((0, 0, 4096, -4096)))
    polls, sleep_ns = _exactly(lambda draw: draw.randrange(3)), _exactly(lambda draw: draw.randrange(200))
    methods = {
        "arrive": [valid, fingerprint, any_array, address, _Argument(_kernel), _divisor, _flag],
        "complete": [valid, done, any_array, _flag],
        "look": [valid, done, polls, sleep_ns, _Argument(_kernel), _divisor],
    }
    return _Target(image, states, objects, methods)


def _rounds(draw: _Random, shared: bool) -> _Target:
    size = draw.choice((1, 2, 3, 5))
    opening = draw.choice([each for each in Opening if each is not Opening.POLICY])
    options: dict[str, Any] = {"history": draw.choice((0, 0, 2)), "sync_every": draw.choice((0, 0, 3))}
    if opening is Opening.SOLO and draw.randrange(2):
        options["group_size"] = draw.randrange(1, size + 1)
    operation = Operation("g", (("float64", draw.choice((1, 9))),), ReduceOp.SUM, opening, **options)
    states: list[bytes] = []
    layout = BlockLayout.of(operation)
    with local_world(size, (None,)) as arenas:
        ranks = [_one_sided(arena, operation) for arena in arenas]
        for _ in range(12):
            _call(draw.choice(ranks), operation)
            states.append(_at_small_addresses(ranks[0]._control_block.cells, arenas[0].segments[0].size))
        record = ranks[0]._rounds
        image = _Image(len(record.cells), size, shared=shared)
        segments = [np.zeros(_SEGMENT, np.uint8) for _ in range(size)]
        arena: Any = SimpleNamespace(native=_core.native, segments=segments, cores=2)
        is_short = bool(draw.randrange(2))
        objects = []
        for rank, block in enumerate(image.blocks):
            fields = {"control_block": block, "blocks": record.blocks, "reduces_at_once": is_short}
            group = Group(tuple(range(size)), rank, 7)
            compiled = rounds_of(_core.native, arena, group, operation, layout, SimpleNamespace(**fields))  # type: ignore[arg-type]
            objects.append(compiled)
        ranks.clear()
        del record
    count = operation.layout[0][1]
    arrays = _Argument(lambda draw: [np.zeros(count) if draw.randrange(10) else _array(draw)])
    number = _Argument(lambda draw: draw.randrange(1, 9))
    ranks_of = _Argument(lambda draw: tuple(draw.randrange(-1, size + 1) for _ in range(draw.randrange(size + 1))))
    groups = _Argument(lambda draw: tuple([draw.randrange(size)] for _ in range(draw.randrange(size + 2))))
    unused = _Argument(lambda draw: [draw.randrange(20) for _ in range(draw.randrange(3))])
    address = _Argument(lambda draw: draw.choice((-1, -1, draw.randrange(size * _SEGMENT + 99), 1 << 62)))
    methods = {
        "begin": [arrays, _Argument(lambda draw: draw.random()), number, unused, address],
        "resume": [arrays, number, number, number, number],
        "is_needed": [number],
        "plan": [number, ranks_of, groups],
    }
    return _Target(image, states, [_planned(each, size) for each in objects], methods)


def _at_small_addresses(cells: memoryview[int], capacity: int) -> bytes:
    """The cells, with addresses in segments of `capacity` bytes moved to segments of `_SEGMENT` bytes."""
    whole = np.asarray(cells)
    ranks, offsets = np.divmod(whole, capacity)
    return np.where(ranks > 0, ranks * _SEGMENT + offsets, whole).tobytes()


class _planned:  # noqa: N801 (stands in for an object of the core)
    """A `CompiledRounds` that calls `plan` and then again what wants it, as `OneSidedRounds` does."""

    def __init__(self, rounds: Any, size: int) -> None:
        self._rounds, self._everyone = rounds, tuple(range(size))
        self.is_needed, self.plan = rounds.is_needed, rounds.plan

    def begin(self, *arguments: Any) -> Any:
        return self._answer(self._rounds.begin, arguments)

    def resume(self, *arguments: Any) -> Any:
        return self._answer(self._rounds.resume, arguments)

    def _answer(self, method: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        answer = method(*arguments)
        if isinstance(answer, int) and answer > 0:
            self._rounds.plan(answer, self._everyone, (self._everyone,))
            answer = method(*arguments)
        return answer


def _one_sided(arena: HostArena, operation: Operation) -> OneSidedRounds:
    group = Group(arena.ranks, arena.local_rank, 7)
    registry = OperationRegistry(arena, len(arena.ranks), arena.local_rank, 7)
    setting = Setting(Memory(arena, registry, group), str, Trace(group.rank, group.size), lambda: False)
    return OneSidedRounds(setting, operation)


def _call(rounds: OneSidedRounds, operation: Operation) -> None:
    """A call, which is given up if it has to wait."""
    answer = rounds.call(bundle(np.ones(operation.layout[0][1]), operation.op, 1.0))
    with contextlib.suppress(StopIteration, AsyncollError):
        answer.send(None)
    answer.close()


def _pieces(draw: _Random, shared: bool) -> _Target:
    size, piece, nbytes = draw.choice((1, 2, 3, 5)), 64 * draw.randrange(1, 4), 8 * draw.randrange(1, 100)
    image = _Image(4 * size + 8, size, shared=shared)
    states = [np.array([draw.randrange(12) for _ in range(4 * size + 8)]).tobytes() for _ in range(6)]
    slots = [np.zeros(min(nbytes, 2 * piece), np.uint8) for _ in range(size)]
    kernel = kernel_number(ReduceOp.SUM, "float64", _core.native)
    objects = []
    for rank, block in enumerate(image.blocks):
        right: list[Any] = [block, 3, 4, rank, slots, np.zeros(nbytes // 8), piece, kernel, 1, rank == 0, 2]
        objects.append(SimpleNamespace(perform=_core.native.Pieces(*right).perform, create=_create(right, draw)))  # type: ignore[union-attr]
    step = _Argument(lambda draw: draw.randrange(-1, 40))
    index, wrong = _exactly(lambda draw: draw.randrange(1, 10)), _exactly(lambda draw: draw.number(4, 64))
    return _Target(image, states, objects, {"perform": [step, step], "create": [index, wrong]})


def _create(right: list[Any], draw: _Random) -> Callable[..., None]:
    def create(index: int = 1, wrong: Any = 0, *_more: Any) -> None:
        """Pieces with a wrong argument, and a few steps of it if there are any."""
        arguments = [*right[:index], wrong, *right[index + 1 :]]
        pieces = _core.native.Pieces(*arguments)  # type: ignore[union-attr]
        for _ in range(3):
            pieces.perform(draw.randrange(9), 9)

    return create


def _reductions(draw: _Random, shared: bool) -> _Target:
    image = _Image(1, 1, shared=shared)
    arrays = _Argument(lambda draw: [_array(draw) for _ in range(draw.randrange(4))])
    text = _Argument(lambda draw: draw.choice(("sum", "avg", "float64", "int8", "bool", "", "x" * 99)))
    number = _Argument(lambda draw: draw.choice((_kernel(draw), draw.randrange(-2, 300))))
    # This process has memory at some of the addresses, and there is no process of the other numbers.
    room = np.zeros(1 << 10)
    pid = _Argument(lambda draw: draw.choice((os.getpid(), os.getpid(), -1, 0, 1 << 30)))
    address = _Argument(lambda draw: draw.choice((room.ctypes.data, room.ctypes.data, draw.number(room.ctypes.data))))
    pids = _Argument(lambda draw: tuple(pid.draw(draw) for _ in range(draw.randrange(1, 4))))
    addresses = _Argument(lambda draw: tuple(address.draw(draw) for _ in range(draw.randrange(1, 4))))
    rank, place = _Argument(lambda draw: draw.randrange(-1, 3)), _Argument(lambda draw: 8 * draw.randrange(-1, 300))
    same = np.zeros(64)
    equal = _Argument(lambda draw: [same] * draw.randrange(1, 4))
    methods = {
        "reduce": [number, _any_array, arrays, _divisor],
        "reduce_to_all": [number, arrays, _divisor],
        "reduce_from_peers": [number, pids, addresses, rank, _any_array, place, place, _any_array, _divisor],
        "read_memory": [pid, address, _any_array],
        "find_kernel": [text, text, _flag],
    }
    if draw.randrange(2):
        methods["reduce"] = [number, _Argument(lambda draw: np.zeros(64)), equal, _divisor]
    return _Target(image, [bytes(8)], [_core.native], methods)


def _sparse(draw: _Random, shared: bool) -> _Target:
    image = _Image(1, 1, shared=shared)
    number = _Argument(lambda draw: draw.number(100))
    width = draw.choice((4, 8))

    def numbers(draw: _Random) -> np.ndarray[Any, Any]:
        size = draw.choice((width, width, width, 12 - width, 1))
        found = [draw.choice((each, each, each, draw.number(100))) for each in range(draw.choice((3, 3, 3, 0, 40)))]
        signs = [draw.choice((1, 1, 1, 1, 1, -1)) for _ in found]
        return np.array(
            [sign * (each % (1 << 8 * size - 1)) for sign, each in zip(signs, found, strict=True)], f"i{size}"
        )

    array = _Argument(numbers)
    arrays = _Argument(lambda draw: [numbers(draw)] * draw.randrange(4))
    shift = _Argument(lambda draw: draw.randrange(-1, 65))
    methods = {
        "select": [array, number, array, array],
        "keep_largest": [array, array, number],
        "count_magnitudes": [array, number, shift, array],
        "sum_parts": [arrays, arrays, number, number, array, array],
        "common": [array, array, array],
    }
    return _Target(image, [bytes(8)], [_core.native], methods)


_FAMILIES = (_control_blocks, _meetings, _meetings, _rounds, _rounds, _pieces, _reductions, _sparse)


def fuzz(seed: int, inputs: int, *, writers: bool = False) -> None:
    """Try `inputs` inputs. Raises AssertionError, naming the seed and the input, at a breach."""
    for first in range(0, inputs, _BATCH):
        draw = _Random(f"{seed} {first}")
        target = draw.choice(_FAMILIES)(draw, writers)
        with _writer(target.image) if writers else contextlib.nullcontext(), contextlib.closing(target.image):
            for number in range(first, min(first + _BATCH, inputs)):
                try:
                    target.strike(draw)
                except Exception as error:
                    raise AssertionError(f"seed {seed}, batch {first}, input {number}: {error!r}") from error


@contextlib.contextmanager
def _writer(image: _Image) -> Iterator[None]:
    """A process that writes random numbers into the cells until the block ends."""
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        draw = _Random(parent)
        try:
            while os.getppid() == parent:
                for _ in range(1000):
                    image.damageable[draw.randrange(1, len(image.damageable))] = draw.number()
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Feed damaged shared memory and wrong arguments to the compiled core.")
    parser.add_argument("seed", nargs="?", type=int, default=0)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--writers", action="store_true", help="A second process writes into the memory meanwhile.")
    chosen = parser.parse_args()
    if _core.native is None:
        sys.exit(f"there is no compiled core: {_core.reason}")
    began_s = time.monotonic()
    fuzz(chosen.seed, chosen.inputs, writers=chosen.writers)
    took_s = time.monotonic() - began_s
    print(f"seed {chosen.seed}: the compiled core withstood {chosen.inputs:,} inputs in {took_s:.0f} s")


if __name__ == "__main__":
    main()
