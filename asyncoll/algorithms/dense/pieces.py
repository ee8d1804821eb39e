"""The reduction of arrays that are not registered, piece by piece through shared memory.

Each rank shows a slot of two halves, and the pieces use the halves in turn. Of each piece every rank reduces one share,
always the same one. So it copies only the other ranks' shares of its array into the slot. It reduces its own share of
all arrays, in the order of ranks, into its array and its slot. Then it copies the other shares of the result from the
slots of the other ranks. For an array of N bytes and P ranks a rank copies N (P - 1) / P bytes in and as many out.

The pieces are small enough that a piece of the array is still in the rank's cache when its result comes. A rank copies
the next piece in before it reduces the one before, so that no rank waits for one that is a little slower.

A rank counts its steps, three for each piece, in its cell of the rendezvous: copy the next piece in, reduce a share of
this piece, copy this piece out. A rank arrives with the first piece in its slot. Before a step it waits until all ranks
have done all steps that it depends on (`needed`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from asyncoll.algorithms.dense.arriving import arrived
from asyncoll.algorithms.dense.meeting_cells import STEPS, half_at, needed, share_at, steps_of
from asyncoll.algorithms.dense.rendezvous import Rendezvous, RendezvousArea
from asyncoll.tensors.reductions import Array, Reduce
from asyncoll.tensors.staged import Staged
from asyncoll.transport.control_block import checkpoint

_POLLS = 200  # looks at the cells of the other ranks, each with an offer of the core to them, before a rank sleeps


class Summand(NamedTuple):
    """An array to reduce at one rank."""

    raw: Array  # its bytes
    dtype: Any  # that of numpy
    reduce: Reduce
    divisor: int
    kernel: int  # the number of the compiled kernel; 0: use `reduce`
    is_wanted: bool  # whether this rank gets the result, in `raw`
    staged: Staged | None = None  # the tensor of a device that is arriving in `raw`, and goes back from there


class Perform(Protocol):
    """Performs the step of this number, whose condition is met. Returns the number of the next step.

    It may perform the following steps before `stop`, too, as long as their conditions are met.
    """

    def __call__(self, step: int, stop: int, /) -> int: ...


def slot_bytes(total: int, piece: int) -> int:
    """The bytes of a slot for arrays of `total` bytes."""
    return min(total, 2 * piece)


def put_first(operand: Summand, slot: Array, rank: int, size: int, piece: int) -> None:
    """Copy the first piece of the array into the slot, before this rank arrives."""
    _put(operand.raw[:piece], slot[:piece], rank, size)


async def reduce_in_pieces(area: RendezvousArea, rendezvous: Rendezvous, operand: Summand) -> None:
    """Reduce. All ranks have arrived, with slots that contain the first pieces; the caller leaves the rendezvous."""
    end = steps_of(operand.raw.size, area.sizes.piece)
    slots = [area.arena.view(address, nbytes) for address, nbytes, _ in rendezvous.shown()]
    perform = _performer(area, rendezvous, operand, slots, end)
    if operand.staged is None:
        await _perform(rendezvous, perform, 0, end)
    else:
        await _perform_as_it_arrives(area, rendezvous, operand, operand.staged, perform, end)


async def _perform(rendezvous: Rendezvous, perform: Perform, step: int, stop: int) -> None:
    while step < stop:
        await rendezvous.reached(needed(step))
        await checkpoint(rendezvous.control_block)
        step = perform(step, stop)


async def _perform_as_it_arrives(
    area: RendezvousArea, rendezvous: Rendezvous, operand: Summand, staged: Staged, perform: Perform, end: int
) -> None:
    """All steps, for an array of a device: the next piece is copied in once it has arrived. No other rank notices."""
    total, piece, returned = operand.raw.size, area.sizes.piece, 0
    for step in range(0, end, STEPS):
        reduced = min((step // STEPS + 1) * piece, total)
        await arrived(staged, min(reduced + piece, total))
        await _perform(rendezvous, perform, step, step + STEPS)
        if operand.is_wanted and reduced - returned >= area.sizes.staged:
            staged.put(reduced)
            returned = reduced


def _performer(area: RendezvousArea, rendezvous: Rendezvous, operand: Summand, slots: list[Array], end: int) -> Perform:
    native, rank, piece = area.arena.native, area.rank, area.sizes.piece
    if not operand.kernel:
        return _python_performer(rendezvous, operand, slots, rank, piece, end)
    assert native is not None, "a kernel is one of the core"
    pieces = native.Pieces(
        rendezvous.control_block,
        *rendezvous.step_cells(),
        rank,
        slots,
        operand.raw,
        piece,
        operand.kernel,
        operand.divisor,
        operand.is_wanted,
        _POLLS if area.arena.polls else 0,
    )
    perform: Perform = pieces.perform
    return perform


def _python_performer(
    rendezvous: Rendezvous, operand: Summand, slots: list[Array], rank: int, piece: int, end: int
) -> Perform:
    """One step at a time. Its counterpart in C is in asyncoll/_core/pieces.c."""
    size = len(slots)

    def half(index: int, slot: Array) -> Array:
        return slot[half_at(index, piece) :][:piece]

    def copy_in(index: int) -> None:
        # The next piece goes into the half that the piece before has left. Others still read the current one.
        if (index + 1) * STEPS < end:
            _put(operand.raw[(index + 1) * piece :][:piece], half(index + 1, slots[rank]), rank, size)

    def reduce(index: int) -> None:
        own = operand.raw[index * piece :][:piece]
        first, last = share(rank, size, own.size)
        shares = [(own if other == rank else half(index, slot))[first:last] for other, slot in enumerate(slots)]
        # Into the slot, from which the other ranks copy it out.
        result = half(index, slots[rank])[first:last]
        operand.reduce(result.view(operand.dtype), [each.view(operand.dtype) for each in shares], operand.divisor)
        if operand.is_wanted:
            own[first:last] = result

    def copy_out(index: int) -> None:
        own = operand.raw[index * piece :][:piece]
        for other, slot in enumerate(slots):
            if operand.is_wanted and other != rank:
                first, last = share(other, size, own.size)
                own[first:last] = half(index, slot)[first:last]

    steps: tuple[Callable[[int], None], ...] = (copy_in, reduce, copy_out)

    def perform(step: int, stop: int) -> int:
        del stop
        steps[step % STEPS](step // STEPS)
        rendezvous.advance(step + 1)
        return step + 1

    return perform


def _put(own: Array, half: Array, rank: int, size: int) -> None:
    """Copy all shares of a piece but the rank's own into a half of its slot."""
    # The rank reduces its own share from its own array, so nothing reads that share in the slot.
    first, last = share(rank, size, own.size)
    half[:first] = own[:first]
    half[last : own.size] = own[last:]


def share(rank: int, size: int, nbytes: int) -> tuple[int, int]:
    """The first byte, and that behind the last one, of the share of `rank` of a piece of `nbytes` bytes."""
    return share_at(rank, size, nbytes), share_at(rank + 1, size, nbytes)


def traffic(total: int, piece: int, rank: int, size: int, *, is_wanted: bool) -> tuple[int, int]:
    """The bytes that a rank makes readable for the others, and those that it reads from them."""
    shares = (share(rank, size, min(piece, total - start)) for start in range(0, total, piece))
    own = sum(last - first for first, last in shares)
    return total, own * (size - 1) + (total - own) * is_wanted
