"""Values to bytes and back: msgpack for the structure, and the arrays beside it, without a copy.

The set of types is closed: see `ALLOWED`. Received bytes are never executed as code. The name of a dataclass is looked
up only among those that the receiver expects. All sizes are checked before memory is allocated for them.
"""

from __future__ import annotations

import dataclasses
import math
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgpack
import numpy as np

from asyncoll.errors import AsyncollError, ProtocolError, UsageError
from asyncoll.rpc.carrier import ARRAYS_MAX
from asyncoll.tensors import reductions
from asyncoll.tensors.operands import as_operand, has_memory, is_in_mode, is_tensor
from asyncoll.tensors.reductions import BFLOAT16, DTYPES, MAX_DIMENSIONS, Array, torch_maker, torch_view
from asyncoll.tensors.staged import Staged, hidden, is_hidden

INLINE_BYTES = 2048  # an array of at most this size is copied into the structured part
MAX_DEPTH = 64  # nested values
ALLOWED = (
    "None, bool, int, float, complex, str, bytes, list, tuple, set, dict, dataclasses, numpy arrays and scalars, and "
    "torch tensors"
)
_KEPT_BYTES = 1 << 16  # an encoder gives up its packers after a longer value, because packers keep their memory
# In so few bytes, false lengths of nested lists make msgpack allocate little memory.
_UNCHECKED_BYTES = 512
_TUPLE, _SET, _COMPLEX, _DATACLASS, _ARRAY = 1, 2, 3, 4, 5
_NUMPY, _TORCH, _SCALAR = 0, 1, 2
_OUTSIDE, _INSIDE = 0, 1
_COMPLEX_STRUCT = struct.Struct("<dd")
_DIMENSION = 8  # bytes of a dimension in a form
_KNOWN_MAX = 256  # forms of short arrays that the decoder remembers
_ARRAY_HEADER = struct.Struct("<BBBB")  # family, dtype, where its bytes are, dimensions; then the shape
_FORMS = [struct.Struct(f"<BBBB{dimensions}Q") for dimensions in range(MAX_DIMENSIONS + 1)]  # the same with the shape
_STORAGE = [reductions.storage(dtype) for dtype in DTYPES]
_NATIVE = {np.dtype(name): code for code, name in enumerate(DTYPES) if name != BFLOAT16}  # of numpy
_INDEX = struct.Struct("<I")  # of an array beside the structured part


class Expected(NamedTuple):
    """A dataclass that may be received, and the checks of its fields."""

    type: type
    checks: Mapping[str, Callable[[Any, str], None]]  # by field: takes a value and its name; raises UsageError


Types = Mapping[str, Expected]  # by qualified name
NO_TYPES: Types = {}
Encoded = tuple[bytes, list[Array], list[Staged]]  # structured bytes, arrays beside them, and tensors of devices


class TensorPlace(Protocol):
    """The device on which the torch tensors of one value belong."""

    def take(self, x: Any) -> Any:
        """`x`, a tensor on the CPU which nothing else uses, on the device."""

    def shown(self, index: int) -> Any:
        """The bytes of that array as a flat tensor of the device, to which they have come already. None: they have not.

        The array itself is empty then.
        """

    def as_bools(self, flat: Any) -> None:
        """Make all bytes of a tensor that was `shown` 0 or 1."""


def encode(value: object, name: str = "value") -> Encoded:
    """A single value as bytes, and the arrays of its tensors. Raises UsageError, with its `name`, if it cannot."""
    return Encoder().encode(value, name)


class Encoder:
    """Encodes values, one after another. Each end of a connection keeps one: a new packer for each value costs more
    than to pack a short value. Only one thread uses it.
    """

    def __init__(self) -> None:
        self._arrays: list[Array] = []  # of the value that is being encoded
        self._staged: list[Staged] = []  # in that value
        self._packers: list[msgpack.Packer] = []  # by depth of the value: a packer packs one value at a time
        self._depth = -1

    def encode(self, value: object, name: str = "value") -> Encoded:
        """`value` as structured bytes, and the arrays beside them: flat uint8 views of the caller's memory.

        Tensors of devices are mirrors among the arrays, which have their elements once they are fetched (`fetching`).

        Raises UsageError with the path, beginning with `name`, of the part that cannot be sent.
        """
        self._arrays = arrays = list[Array]()
        self._staged = staged = list[Staged]()
        try:
            body = self._pack(value)
        except BaseException as error:
            self.__init__()  # type: ignore[misc]
            if isinstance(error, Exception):
                _raise_for_unsendable(value, name, 0)
            raise
        if len(body) > _KEPT_BYTES:
            self._packers.clear()
        return body, arrays, staged

    def _pack(self, value: object) -> bytes:
        self._depth = depth = self._depth + 1
        if depth > MAX_DEPTH:
            raise UsageError(f"values are nested more than {MAX_DEPTH} deep")
        if depth == len(self._packers):
            self._packers.append(msgpack.Packer(default=self._default, strict_types=True, buf_size=512))
        packed: bytes = self._packers[depth].pack(value)
        self._depth = depth - 1
        return packed

    def _nested(self, code: int, value: object) -> msgpack.ExtType:
        return msgpack.ExtType(code, self._pack(value))

    def _default(self, value: Any) -> Any:
        """Encode a value of a type that msgpack does not know."""
        kind = type(value)
        if kind is np.ndarray:
            return self._array(value, value, _NUMPY)
        if kind is getattr(sys.modules.get("torch"), "Tensor", None):
            return self._array(value, _as_numpy(value), _TORCH)
        if kind is tuple:
            return self._nested(_TUPLE, list(value))
        if kind is set:
            return self._nested(_SET, list(value))
        if kind is complex:
            return msgpack.ExtType(_COMPLEX, _COMPLEX_STRUCT.pack(value.real, value.imag))
        if kind is OrderedDict:
            return dict(value)
        if isinstance(value, np.generic):
            scalar = np.asarray(value)
            return self._array(scalar, scalar, _SCALAR)
        if is_tensor(value):  # of a subclass
            return self._array(value, None, _NUMPY if isinstance(value, np.ndarray) else _TORCH)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._nested(_DATACLASS, [kind.__qualname__, _fields(value)])
        raise UsageError(f"{kind} cannot be sent")

    def _array(self, value: Any, array: Array | None, family: int) -> tuple[int, bytes]:
        """Encode a tensor; `array` is its memory, or None if the tensor may be more than its memory."""
        if array is not None and array.nbytes <= INLINE_BYTES and (dtype := _NATIVE.get(array.dtype)) is not None:
            shape = array.shape
            form = _FORMS[len(shape)].pack(family, dtype, _INSIDE, len(shape), *shape)
            return _extension(_ARRAY, form + array.tobytes())
        operand = as_operand(value, may_stage=True)
        flat, shape = operand.flat.view(np.uint8), operand.shape
        # Without elements there is nothing to fetch.
        is_staged = operand.staged is not None and flat.size > 0
        where = _INSIDE if flat.size <= INLINE_BYTES and not is_staged else _OUTSIDE
        form = _FORMS[len(shape)].pack(family, DTYPES.index(operand.dtype), where, len(shape), *shape)
        if where == _INSIDE:
            return _extension(_ARRAY, form + flat.tobytes())
        if len(self._arrays) == ARRAYS_MAX - 1:  # `protocol` may send the structured part as one more array
            raise UsageError(f"{ARRAYS_MAX} arrays in one message are too many: stack them")
        self._arrays.append(flat)
        if operand.staged is not None:
            self._staged.append(operand.staged)
        return _extension(_ARRAY, form + _INDEX.pack(len(self._arrays) - 1))


def _extension(code: int, data: bytes) -> tuple[int, bytes]:
    """`msgpack.ExtType(code, data)` without its checks, which take as long as to encode a short array."""
    extension: tuple[int, bytes] = tuple.__new__(msgpack.ExtType, (code, data))
    return extension


def _as_numpy(tensor: Any) -> Array | None:
    """The memory of a torch tensor as a numpy array, if that is all that the tensor is; None if it may be more.

    `as_operand`, which handles all tensors, takes several times longer than the rest of a short message.
    """
    if (hidden and is_hidden(tensor)) or is_in_mode():
        return None
    try:
        array: Array | None = tensor.numpy() if has_memory(tensor) else None
    # It is of another device or layout, or has a gradient, or a dtype that numpy does not have.
    except (RuntimeError, TypeError):
        return _as_numpy(tensor.detach()) if tensor.requires_grad else None
    return array


def _fields(value: Any) -> dict[str, Any]:
    """The fields that the `__init__` of a dataclass takes."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}


def _raise_for_unsendable(value: Any, path: str, depth: int) -> None:
    """Raise UsageError for the first part of `value` that cannot be sent, if there is one; `path` names `value`."""
    if depth > MAX_DEPTH:
        raise UsageError(f"{path[:100]}... is nested more than {MAX_DEPTH} deep, or contains itself")
    kind = type(value)
    if kind in (list, tuple):
        for index, item in enumerate(value):
            _raise_for_unsendable(item, f"{path}[{index}]", depth + 1)
    elif kind in (dict, OrderedDict):
        for key, item in value.items():
            _raise_for_unsendable(key, f"the key {key!r:.50} of {path}", depth + 1)
            _raise_for_unsendable(item, f"{path}[{key!r:.50}]", depth + 1)
    elif kind is set:
        for item in value:
            _raise_for_unsendable(item, f"{item!r:.50} in {path}", depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for name, item in _fields(value).items():
            _raise_for_unsendable(item, f"{path}.{name}", depth + 1)
    else:
        _raise_for_leaf(value, path)


def _raise_for_leaf(value: object, path: str) -> None:
    if type(value) is int and not -(1 << 63) <= value < 1 << 64:
        raise UsageError(f"{path} is an int of {value.bit_length()} bits; at most 64 can be sent: send it as a str")
    try:
        Encoder()._pack(value)
    except UnicodeEncodeError as error:
        raise UsageError(f"{path} is a str that is not valid Unicode: {error}") from None
    except UsageError as error:
        if is_tensor(value):
            raise UsageError(f"{path}: {error}") from None
        raise UsageError(f"{path} is a {type(value)}, which cannot be sent; these types can: {ALLOWED}") from None


def decode(body: bytes, arrays: Sequence[Array] = (), types: Types = NO_TYPES, place: TensorPlace | None = None) -> Any:
    """The value that `encode` was given. Its tensors use the memory of `arrays`, without a copy.

    With a `place`, its torch tensors are on the device of that.

    Raises ProtocolError for bytes that `encode` does not make, and UsageError for a dataclass that is not in `types`,
    has other fields, or cannot be made of them.
    """
    decoder = _Decoder(arrays, types) if place is None else _PlacingDecoder(arrays, types, place)
    try:
        value = decoder.unpack(body)
    except AsyncollError:
        raise
    # msgpack raises many types; each means that `encode` has not made these bytes.
    except Exception as error:
        raise ProtocolError(f"not a value: {error!r:.200}") from None
    if len(decoder.used) != len(arrays):
        raise ProtocolError(f"a value refers to {len(decoder.used)} arrays, but the message has {len(arrays)}")
    return value


class _Decoder:
    def __init__(self, arrays: Sequence[Array], types: Types) -> None:
        self._arrays = arrays
        self._types = types
        self._depth = 0
        self.used: set[int] = set()

    def unpack(self, body: bytes) -> Any:
        if len(body) > _UNCHECKED_BYTES:
            # Raises if a list or a dict announces more items than there are: msgpack's decoder allocates lists by their
            # announced length, so a false length would cost memory. `skip` parses without making objects.
            unpacker = msgpack.Unpacker(max_buffer_size=len(body), read_size=len(body))
            unpacker.feed(body)
            unpacker.skip()
        return msgpack.unpackb(body, ext_hook=self.extension, strict_map_key=False)

    def _nested(self, body: bytes) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ProtocolError(f"values are nested more than {MAX_DEPTH} deep")
        value = self.unpack(body)
        self._depth -= 1
        return value

    def extension(self, code: int, body: bytes) -> Any:
        if code == _ARRAY:
            return self._array(body)
        if code == _TUPLE:
            return tuple(_require_list(self._nested(body)))
        if code == _SET:
            return set(_require_list(self._nested(body)))
        if code == _COMPLEX:
            return complex(*_COMPLEX_STRUCT.unpack(body))
        if code == _DATACLASS:
            return self._dataclass(self._nested(body))
        raise ProtocolError(f"a value of the unknown kind {code}")

    def _array(self, body: bytes) -> Any:
        start = _ARRAY_HEADER.size + _DIMENSION * body[_ARRAY_HEADER.size - 1]
        form = body[:start]
        known = _known.get(form)
        if known is not None and known.end == len(body):
            return known.make(bytearray(body[start:]))
        family, dtype, where, dimensions = _ARRAY_HEADER.unpack_from(body)
        if family > _SCALAR or dtype >= len(DTYPES) or where > _INSIDE or dimensions > MAX_DIMENSIONS:
            raise ProtocolError(f"an array of kind {family}, dtype {dtype}, {dimensions} dimensions")
        shape, rest = _FORMS[dimensions].unpack_from(body)[4:], body[start:]
        memory: bytearray | Array = bytearray(rest) if where == _INSIDE else self._take(rest)
        storage = _STORAGE[dtype]
        if math.prod(shape) * storage.itemsize != len(memory) or (family == _SCALAR and shape):
            raise ProtocolError(f"{len(memory)} bytes for an array of shape {shape} and dtype {DTYPES[dtype]}")
        if storage.kind == "b":
            flat = np.frombuffer(memory, np.uint8)
            np.minimum(flat, 1, out=flat)  # numpy and torch misbehave with a bool of another byte than 0 or 1
        if family == _TORCH and not len(memory):
            return torch_view(np.empty(shape, storage), DTYPES[dtype])
        make = torch_maker(DTYPES[dtype], shape) if family == _TORCH else _numpy_maker(family, dtype, shape)
        if where == _INSIDE and storage.kind != "b" and len(_known) < _KNOWN_MAX:
            _known[form] = _Known(len(body), make)
        return make(memory)

    def _take(self, body: bytes) -> Array:
        """An array from beside the structured part. Each may be used once: a second use would share its memory."""
        (index,) = _INDEX.unpack(body)
        if index in self.used or index >= len(self._arrays):
            raise ProtocolError(f"array {index} of {len(self._arrays)} does not exist, or is used twice")
        self.used.add(index)
        array: Array = self._arrays[index]
        return array

    def _dataclass(self, parts: Any) -> Any:
        name, fields = parts
        if type(name) is not str or type(fields) is not dict:
            raise ProtocolError("a dataclass without a name and a dict of fields")
        expected = self._types.get(name)
        if expected is None:
            known = ", ".join(self._types) or "none"
            raise UsageError(
                f"a dataclass {name:.100} was received, which no annotation here names; those named here: {known}. "
                "Name it in the annotations of the function, and call by proxy(Class), which reads them"
            )
        own = {field.name for field in dataclasses.fields(expected.type) if field.init}
        if set(fields) != own:
            raise UsageError(
                f"a {name} has the fields {sorted(own)} here, but was received with {sorted(map(str, fields))}"
            )
        for field, value in fields.items():
            expected.checks[field](value, f"{name}.{field}")
        try:
            return expected.type(**fields)
        # Its own __init__ or __post_init__ may object to anything.
        except Exception as error:
            raise UsageError(f"no {name} can be made of the fields that were received: {error!r}") from None


class _PlacingDecoder(_Decoder):
    """Its torch tensors go to a device."""

    def __init__(self, arrays: Sequence[Array], types: Types, place: TensorPlace) -> None:
        super().__init__(arrays, types)
        self._place = place

    def _array(self, body: bytes) -> Any:
        family, dtype, where, dimensions = _ARRAY_HEADER.unpack_from(body)
        if where == _OUTSIDE and family == _TORCH and dimensions <= MAX_DIMENSIONS:
            form = _FORMS[dimensions]
            if (flat := self._place.shown(*_INDEX.unpack(body[form.size :]))) is not None:
                return self._shown(flat, DTYPES[dtype], form.unpack_from(body)[4:], body[form.size :])
        value = super()._array(body)
        return value if isinstance(value, np.ndarray | np.generic) else self._place.take(value)

    def _shown(self, flat: Any, dtype: str, shape: tuple[int, ...], index: bytes) -> Any:
        nbytes = math.prod(shape) * reductions.storage(dtype).itemsize
        if self._take(index).nbytes or nbytes != flat.numel():
            raise ProtocolError(f"{flat.numel()} bytes were shown for an array of shape {shape} and dtype {dtype}")
        if dtype == "bool":
            self._place.as_bools(flat)
        return flat.view(getattr(sys.modules["torch"], dtype)).view(shape)


class _Known(NamedTuple):
    """What the decoder has found out of a form of short arrays."""

    end: int  # bytes of the form and of the array
    make: Callable[[Any], Any]  # takes the memory


# By form, whose dtype and shape fit the bytes: most programs send few forms, and each check takes time.
_known: dict[bytes, _Known] = {}


def _numpy_maker(family: int, dtype: int, shape: tuple[int, ...]) -> Callable[[Any], Any]:
    """A function that makes a numpy array or scalar over the memory that it is given."""
    flat = partial(np.frombuffer, dtype=_STORAGE[dtype])
    if family == _SCALAR:
        return lambda memory: flat(memory)[0]
    return flat if len(shape) == 1 else lambda memory: flat(memory).reshape(shape)


def _require_list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ProtocolError(f"{type(value).__name__} in place of a list")
    return value
