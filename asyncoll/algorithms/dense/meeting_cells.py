"""The cells of a `RendezvousArea`, and the arithmetic on them that all ranks share, with the core and without it.

The core is generated from this module (`hatch_build.py`), which imports nothing but the standard library. A function
here is one expression of integers that are not negative.
"""

from __future__ import annotations

# The cells of a record: first those of the rendezvous, then the part of each rank.
#   TAG          the rendezvous that uses the record; 0 if none has used it yet
#   ARRIVED      the number of ranks that have shown their memory
#   DIRECT       the number of ranks that show their callers' own memory, not a slot; a rank that asks for windows adds
#                more than all ranks
#   CLAIMED      the bytes that ranks have claimed to reduce
#   DONE         the bytes that ranks have reduced
#   LEFT         the number of ranks that have left
#   FINGERPRINT  that of the call, to compare; FIRST: the rank that wrote it
#   WITHDRAWN    1 if a rank has withdrawn from it
#   SLEEPERS     the number of ranks that sleep, for a short time, in a futex at DONE or LEFT
#   PRIVATE      the number of ranks that show private memory, which the others read through the kernel (`peers`)
TAG, ARRIVED, DIRECT, CLAIMED, DONE, LEFT, FINGERPRINT, FIRST, WITHDRAWN, SLEEPERS, PRIVATE, RECORD_HEAD = range(12)

# The part of a rank.
#   PART_ADDRESS  that of the memory that it shows, negated if it is the caller's own and registered
#   PART_BYTES    the bytes of this memory
#   PART_BUSY     1 while the rank reduces a chunk; in a reduction by pieces the number of its steps; at a rendezvous of
#                 neighbours how many have read the memory; HAS_LEFT or CANNOT_READ with private memory
#   PART_BITS     at a rendezvous of neighbours the tag, when the rank has arrived; with private memory a bit for each
#                 chunk whose result is in this rank's memory
PART_ADDRESS, PART_BYTES, PART_BUSY, PART_BITS, PART_CELLS = range(5)

HAS_LEFT = -1  # only the compiled core writes this, and the next one
CANNOT_READ = -2  # the rank could not read the memory of another rank

# The cells of a rank for `peers`. All are 0 until the rank has joined.
#   PEER_PID, PEER_ADDRESS, PEER_TOKEN  its process, and where there is a token in its memory, and which one
#   PEER_CAN_READ                       1 if the rank can read the tokens of all ranks, -1 if not
PEER_PID, PEER_ADDRESS, PEER_TOKEN, PEER_CAN_READ, PEER_CELLS = range(5)

# The steps of each piece (`pieces`): copy the next piece in, reduce a share of this one, copy this one out.
COPY_IN, REDUCE_SHARE, COPY_OUT, STEPS = range(4)

# The ways of an allreduce that the compiled core carries out, too. Of several, a call may take the first that it can.
BY_MEETING, IN_PLACE, IN_A_COPY, IN_PRIVATE_MEMORY = 1, 2, 4, 8

# How many times as often as usual a rank polls before it sleeps, where the others only end what they do: a sleep and a
# wake-up take longer.
PATIENCE = 16

NUMBERS = 1 << 30  # call numbers are taken modulo this, so that a tag fits into a signed cell
PRIVATE_CHUNKS = 62  # of an array in private memory, at most: a bit for each fits into a signed cell
PRIVATE_LEAST = 1 << 18  # bytes of such a chunk: one system call for each rank takes some microseconds
SCRATCH = 1 << 19  # bytes: a block of the private array of each other rank, in the cache of a core
PAGE = 4096
ALIGNED = 64  # bytes: no element lies across the boundary of two chunks or shares


def record_cells(size: int) -> int:
    """The cells of a record."""
    return RECORD_HEAD + PART_CELLS * size


def record_index(number: int, count: int, calls: int) -> int:
    """The record of rendezvous number `count`, from 0, of call `number`, if `calls` may be under way."""
    return 2 * (number % calls) + count % 2


def tag_of(number: int, count: int) -> int:
    """Identifies a rendezvous among those that use the same record. Never 0. Repeats after 2^30 calls."""
    return (number % NUMBERS + 1) << 32 | count


def is_left(tag: int, own: int, left: int, size: int) -> bool:
    """Whether a rank may use the record for the rendezvous `own`, if the record has this `tag`, and LEFT is `left`.

    All ranks have left the one before, or none has used the record yet, or another rank has opened `own` already.
    """
    return tag == 0 or tag == own or left == size


def addresses_at(size: int, calls: int) -> int:
    """The first of `size` cells: the address of each rank's short arrays. The records are before it."""
    return 2 * calls * record_cells(size)


def newest_at(size: int, calls: int) -> int:
    """The first of `size` cells: each rank's newest call, for error messages only."""
    return addresses_at(size, calls) + size


def peers_at(size: int, calls: int) -> int:
    """The first of PEER_CELLS cells for each rank."""
    return newest_at(size, calls) + size


def private_chunk(total: int) -> int:
    """The bytes of a chunk of private arrays of `total` bytes: there are at most PRIVATE_CHUNKS."""
    return max(PRIVATE_LEAST, (total + PRIVATE_CHUNKS * PAGE - 1) // (PRIVATE_CHUNKS * PAGE) * PAGE)


def steps_of(total: int, piece: int) -> int:
    """The steps of a reduction of `total` bytes in pieces of `piece` bytes."""
    return STEPS * max(1, (total + piece - 1) // piece)


def needed(step: int) -> int:
    """The number of steps that all ranks must have done before a rank begins this step.

    To copy the next piece in: the one before, in the same half, is copied out. To reduce: all have copied this piece
    in. To copy out: all have reduced.
    """
    return step - STEPS if step % STEPS == REDUCE_SHARE else step


def half_at(index: int, piece: int) -> int:
    """The first byte of the half of a slot that piece `index` is in: the pieces use the halves in turn."""
    return index % 2 * piece


def share_at(rank: int, size: int, nbytes: int) -> int:
    """The first byte of the share of `rank` of a piece of `nbytes` bytes: that of the next rank is behind it."""
    return min(rank * ((nbytes + size * ALIGNED - 1) // (size * ALIGNED)) * ALIGNED, nbytes)
