"""Feed random and damaged bytes to every decoder of peer data: `python -m tests.fuzz.decoders [SEED [COUNT]]`.

For any input, a decoder returns or raises ProtocolError, or raises UsageError when a dataclass has other fields here
than at the sender. Any other exception is a bug; it is reported with the seed and the number of the input.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from asyncoll.errors import ProtocolError, UsageError
from asyncoll.rpc import codec, failure, hints, packing, protocol, segments
from asyncoll.tensors.shapes import SHAPE_WORDS, decode_head
from asyncoll.transport import wire
from asyncoll.transport.keys import Key
from asyncoll.transport.messages import payload_stream, split, zeromq

_LENGTH_MAX = 200  # bytes


@dataclass(frozen=True)
class _Point:
    x: int
    y: list[float] = field(default_factory=list)


_TYPES = hints.dataclasses_in([_Point])
_VALUES: list[object] = [
    {"a": [1, (2, 3), {4}, 1j]},
    _Point(1, [2.0]),
    np.arange(10.0),
    [np.float32(3), np.zeros((2, 0))],
    ["x" * 600, [1] * 600],
    {"k" * 10: _Point(3)},
    np.ones(1000),
]


def fuzz(seed: int, count: int) -> None:
    """Try `count` inputs on every decoder. Raises AssertionError, naming the seed and the input, if a decoder fails."""
    for number in range(count):
        draw = np.random.default_rng([seed, number])
        for decode in (_message, _control, _split, _long, _seal, _head, _rpc, _value, _failure, _packed):
            try:
                with contextlib.suppress(ProtocolError, UsageError):
                    decode(draw)
            except Exception as error:
                raise AssertionError(f"{decode.__name__} failed at seed {seed}, input {number}") from error


def _message(draw: np.random.Generator) -> None:
    frames = [wire.encode(int(draw.integers(0, 9)), *map(int, draw.integers(0, 1 << 31, 5))), _random(draw)]
    sent = [bytes(frame) for frame in zeromq._pack(frames)]
    wire.decode([bytes(frame) for frame in zeromq._unpack([_damaged(draw, sent[0]), *sent[1:]])])


def _control(draw: np.random.Generator) -> None:
    message = wire.Dispute(int(draw.integers(1 << 40)), 2, 3, "x" * int(draw.integers(50)))
    wire.decode_control(_damaged(draw, wire.encode_control(message, int(draw.integers(1 << 32)))[1]))


def _split(draw: np.random.Generator) -> None:
    wire.decode(split._uncounted([_random(draw), _random(draw)])[1])


def _long(draw: np.random.Generator) -> None:
    payload_stream._ArrivingMessage(draw.bytes(payload_stream.HEAD_BYTES), payload_stream.PayloadMemory())


def _seal(draw: np.random.Generator) -> None:
    key, message = Key(b"fuzz"), _random(draw)
    sealed = key.seal(message, "topic", 1)
    damaged = _damaged(draw, sealed)
    key.open(damaged, "topic", 1)
    assert damaged == sealed, "a damaged message passed as authentic"


def _head(draw: np.random.Generator) -> None:
    integers: Callable[..., np.ndarray[tuple[int], np.dtype[np.int64]]] = draw.integers
    head = integers(0, 8, 2 + SHAPE_WORDS)
    head[draw.integers(head.size)] = draw.integers(-(1 << 62), 1 << 62)
    decode_head(head)


def _rpc(draw: np.random.Generator) -> None:
    call, level = int(draw.integers(1 << 60)), int(draw.integers(protocol.MAX_DEPTH + 1))
    head, arrays = protocol.encode(int(draw.integers(1, 9)), call, _random(draw), name="f", number=level)
    protocol.decode(_damaged(draw, head), arrays)
    segments._opened(memoryview(_random(draw)))


def _value(draw: np.random.Generator) -> None:
    value = _VALUES[int(draw.integers(len(_VALUES)))]
    body, arrays, _ = codec.encode(value)
    codec.decode(_damaged(draw, body), [array.copy() for array in arrays], _TYPES)


def _failure(draw: np.random.Generator) -> None:
    failure.decode(_damaged(draw, failure.encode(ValueError("x"))), 0)


def _packed(draw: np.random.Generator) -> None:
    joined = bytearray(packing.Packing([np.frombuffer(_random(draw), np.uint8)] * 2).joined())
    packing.unpack(bytearray(_damaged(draw, bytes(joined))), int(draw.integers(4)))


def _random(draw: np.random.Generator) -> bytes:
    return draw.bytes(int(draw.integers(_LENGTH_MAX)))


def _damaged(draw: np.random.Generator, data: bytes) -> bytes:
    """`data` with one bit flipped, cut off, extended, or cut off and extended; or unrelated random bytes."""
    how, index = int(draw.integers(4)), int(draw.integers(len(data) + 1))
    if how == 0 and index < len(data):
        changed = data[index] ^ 1 << int(draw.integers(8))
        return data[:index] + bytes([changed]) + data[index + 1 :]
    return (data[:index], data + _random(draw), data[:index] + _random(draw), _random(draw))[how]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Feed random and damaged bytes to every decoder of peer data.")
    parser.add_argument("seed", nargs="?", type=int, default=0)
    parser.add_argument("count", nargs="?", type=int, default=100_000, help="inputs for each decoder")
    chosen = parser.parse_args()
    fuzz(chosen.seed, chosen.count)
    print(f"seed {chosen.seed}: every decoder accepted or refused {chosen.count:,} inputs")
