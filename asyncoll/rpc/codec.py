"""Values to bytes and back: msgpack for what is structured, and arrays beside it, which are not copied into it.

What may be sent is closed: the types below, nested in each other. Nothing that comes is ever code, and the name of a
class is only looked up among those that the receiver expects. Everything is checked before memory is taken for it.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np

from asyncoll.errors import ProtocolError, UsageError
from asyncoll.rpc.carrier import ARRAYS_MAX
from asyncoll.tensors import reductions
from asyncoll.tensors.operands import as_operand, build, is_tensor
from asyncoll.tensors.reductions import DTYPES, MAX_DIMENSIONS, Array

INLINE_BYTES = 2048  # an array of at most so many bytes goes inside the structured part
MAX_DEPTH = 64
ALLOWED = (
    "None, bool, int, float, complex, str, bytes, list, tuple, set, dict, dataclasses, numpy arrays and scalars, and "
    "torch tensors"
)
_UNCHECKED_BYTES = 512  # lists inside lists that all announce too much take little memory in so few bytes
_TUPLE, _SET, _COMPLEX, _DATACLASS, _ARRAY = 1, 2, 3, 4, 5
_NUMPY, _TORCH, _SCALAR = 0, 1, 2
_OUTSIDE, _INSIDE = 0, 1
_COMPLEX_FORM = struct.Struct("<dd")
_ARRAY_FORM = struct.Struct("<BBBB")  # family, dtype, where its bytes are, dimensions; then the shape
_INDEX = struct.Struct("<I")


class Expected(NamedTuple):
    """A dataclass that may come, and what checks its fields."""

    type: type
    check: Callable[[dict[str, Any]], None]  # raises UsageError


Types = Mapping[str, Expected]  # by qualified name
NO_TYPES: Types = {}


def encode(value: object, name: str = "value") -> tuple[bytes, list[Array]]:
    """`value` as structured bytes, and flat uint8 arrays that go beside them: views of the caller's memory.

    Raises UsageError, with the path from `name` to what cannot be sent.
    """
    encoder = _Encoder()
    try:
        return encoder.pack(value), encoder.arrays
    except Exception:
        _explain(value, name, 0)
        raise


class _Encoder:
    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self._depth = 0

    def pack(self, value: object) -> bytes:
        packed: bytes = msgpack.Packer(default=self._default, strict_types=True, buf_size=512).pack(value)
        return packed

    def _nested(self, code: int, value: object) -> msgpack.ExtType:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise UsageError(f"values are nested more than {MAX_DEPTH} deep")
        packed = self.pack(value)
        self._depth -= 1
        return msgpack.ExtType(code, packed)

    def _default(self, value: Any) -> Any:
        """What msgpack itself does not know."""
        kind = type(value)
        if kind is tuple:
            return self._nested(_TUPLE, list(value))
        if kind is set:
            return self._nested(_SET, list(value))
        if kind is complex:
            return msgpack.ExtType(_COMPLEX, _COMPLEX_FORM.pack(value.real, value.imag))
        if kind is OrderedDict:
            return dict(value)
        if isinstance(value, np.generic):
            return self._array(np.asarray(value), _SCALAR)
        if is_tensor(value):
            return self._array(value, _NUMPY if isinstance(value, np.ndarray) else _TORCH)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._nested(_DATACLASS, [kind.__qualname__, _fields(value)])
        raise UsageError(f"{kind} cannot be sent")

    def _array(self, value: object, family: int) -> msgpack.ExtType:
        operand = as_operand(value)
        flat, shape = operand.flat.view(np.uint8), operand.shape
        where = _INSIDE if flat.size <= INLINE_BYTES else _OUTSIDE
        form = _ARRAY_FORM.pack(family, DTYPES.index(operand.dtype), where, len(shape))
        form += struct.pack(f"<{len(shape)}Q", *shape)
        if where == _INSIDE:
            return msgpack.ExtType(_ARRAY, form + flat.tobytes())
        if len(self.arrays) == ARRAYS_MAX - 1:  # the structured part may become one more
            raise UsageError(f"{ARRAYS_MAX} arrays in one message are too many: stack them")
        self.arrays.append(flat)
        return msgpack.ExtType(_ARRAY, form + _INDEX.pack(len(self.arrays) - 1))


def _fields(value: Any) -> dict[str, Any]:
    """What a dataclass is made of again."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}


def _explain(value: Any, path: str, depth: int) -> None:
    """Raise UsageError for the first thing in `value` that cannot be sent, if there is one."""
    if depth > MAX_DEPTH:
        raise UsageError(f"{path[:100]}... is nested more than {MAX_DEPTH} deep, or contains itself")
    kind = type(value)
    if kind in (list, tuple):
        for place, item in enumerate(value):
            _explain(item, f"{path}[{place}]", depth + 1)
    elif kind in (dict, OrderedDict):
        for key, item in value.items():
            _explain(key, f"the key {key!r:.50} of {path}", depth + 1)
            _explain(item, f"{path}[{key!r:.50}]", depth + 1)
    elif kind is set:
        for item in value:
            _explain(item, f"{item!r:.50} in {path}", depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for name, item in _fields(value).items():
            _explain(item, f"{path}.{name}", depth + 1)
    else:
        _explain_leaf(value, path)


def _explain_leaf(value: object, path: str) -> None:
    if type(value) is int and not -(1 << 63) <= value < 1 << 64:
        raise UsageError(f"{path} is an int of {value.bit_length()} bits; at most 64 can be sent: send it as a str")
    try:
        _Encoder().pack(value)
    except UnicodeEncodeError as error:
        raise UsageError(f"{path} is a str that is not valid Unicode: {error}") from None
    except UsageError as error:
        if is_tensor(value):
            raise UsageError(f"{path}: {error}") from None
        raise UsageError(f"{path} is a {type(value)}, which cannot be sent; what can is {ALLOWED}") from None


def decode(body: bytes, arrays: Sequence[Array] = (), types: Types = NO_TYPES) -> Any:
    """The value that `encode` was given. Its tensors take over the memory of `arrays`.

    Raises ProtocolError for anything that `encode` does not make, and UsageError for a dataclass that is not one of
    `types` or does not have the fields of its own.
    """
    decoder = _Decoder(arrays, types)
    try:
        value = decoder.unpack(body)
    except (ProtocolError, UsageError):
        raise
    except Exception as error:  # msgpack raises many kinds; each means: not made by `encode`
        raise ProtocolError(f"not a value: {error!r:.200}") from None
    if len(decoder.used) != len(arrays):
        raise ProtocolError(f"a value of {len(decoder.used)} arrays, but {len(arrays)} came along")
    return value


class _Decoder:
    def __init__(self, arrays: Sequence[Array], types: Types) -> None:
        self._arrays = arrays
        self._types = types
        self._depth = 0
        self.used: set[int] = set()

    def unpack(self, body: bytes) -> Any:
        if len(body) > _UNCHECKED_BYTES:
            _check_counts(body)
        return msgpack.unpackb(body, ext_hook=self._extension, strict_map_key=False)

    def _nested(self, body: bytes) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ProtocolError(f"values are nested more than {MAX_DEPTH} deep")
        value = self.unpack(body)
        self._depth -= 1
        return value

    def _extension(self, code: int, body: bytes) -> Any:
        if code == _ARRAY:
            return self._array(body)
        if code == _TUPLE:
            return tuple(_a_list(self._nested(body)))
        if code == _SET:
            return set(_a_list(self._nested(body)))
        if code == _COMPLEX:
            return complex(*_COMPLEX_FORM.unpack(body))
        if code == _DATACLASS:
            return self._dataclass(self._nested(body))
        raise ProtocolError(f"a value of the unknown kind {code}")

    def _array(self, body: bytes) -> Any:
        family, dtype, where, dimensions = _ARRAY_FORM.unpack_from(body)
        start = _ARRAY_FORM.size + 8 * dimensions
        if family > _SCALAR or dtype >= len(DTYPES) or where > _INSIDE or dimensions > MAX_DIMENSIONS:
            raise ProtocolError(f"an array of kind {family}, dtype {dtype}, {dimensions} dimensions")
        shape = struct.unpack_from(f"<{dimensions}Q", body, _ARRAY_FORM.size)
        flat: Array = np.frombuffer(body[start:], np.uint8).copy() if where == _INSIDE else self._take(body[start:])
        storage = reductions.storage(DTYPES[dtype])
        if math.prod(shape) * storage.itemsize != flat.size or (family == _SCALAR and shape):
            raise ProtocolError(f"{flat.size} bytes for an array of shape {shape} and dtype {DTYPES[dtype]}")
        if storage.kind == "b":
            np.minimum(flat, 1, out=flat)  # any other byte is no bool to numpy or torch
        array = build(flat.view(storage), DTYPES[dtype], shape, as_torch=family == _TORCH)
        return array[()] if family == _SCALAR else array

    def _take(self, body: bytes) -> Array:
        """One of the arrays that came along."""
        (index,) = _INDEX.unpack(body)
        if index in self.used or index >= len(self._arrays):
            raise ProtocolError(f"array {index} of {len(self._arrays)}, or twice the same")
        self.used.add(index)
        array: Array = self._arrays[index]
        return array

    def _dataclass(self, parts: Any) -> Any:
        name, fields = parts
        if type(name) is not str or type(fields) is not dict:
            raise ProtocolError("not a dataclass")
        expected = self._types.get(name)
        if expected is None:
            known = ", ".join(self._types) or "none"
            raise UsageError(f"a dataclass {name:.100} came, which no annotation here names; those that are: {known}")
        own = {field.name for field in dataclasses.fields(expected.type) if field.init}
        if set(fields) != own:
            raise UsageError(f"a {name} has the fields {sorted(own)} here, but {sorted(map(str, fields))} came")
        expected.check(fields)
        try:
            return expected.type(**fields)
        except Exception as error:  # its own __init__ or __post_init__ may object to anything
            raise UsageError(f"no {name} can be made of what came: {error!r}") from None


def _a_list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ProtocolError(f"{type(value).__name__} in place of items")
    return value


def _check_counts(body: bytes) -> None:
    """Raise if any list or dict announces more than comes: nothing is made yet, so that a lie costs no memory."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(body), read_size=len(body))
    unpacker.feed(body)
    unpacker.skip()
