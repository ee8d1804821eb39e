"""Several arrays as the payload of one signal: one after another, without a header."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from asyncoll.tensors.reductions import Array
from asyncoll.transport.wire import Buffer


def packed(arrays: Iterable[Array]) -> bytes:
    return b"".join([array.view(np.uint8).data for array in arrays])


def unpack(payload: Buffer, into: Iterable[Array]) -> None:
    """Copy a payload into the arrays that it consists of. A payload is read-only, and may be unaligned."""
    raw, start = np.frombuffer(payload, np.uint8), 0
    for array in into:
        end = start + array.nbytes
        array.view(np.uint8)[...] = raw[start:end]
        start = end
