"""The codec of RPC: values round-trip, and invalid bytes are refused before memory is allocated."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import socket
import struct
import tracemalloc
from collections import OrderedDict
from typing import Any, Generic, NewType, TypedDict, TypeVar

import msgpack
import numpy as np
import pytest
import torch
from hypothesis.extra import numpy as arrays_of
from torch._subclasses.fake_tensor import FakeTensorMode

from asyncoll.errors import ProtocolError, RemoteError, UsageError
from asyncoll.rpc import codec, failure, hints, protocol
from asyncoll.rpc.carrier import ARRAYS_MAX, HEAD_BYTES
from asyncoll.tensors.reductions import DTYPES
from tests.support.properties import given, st


@dataclasses.dataclass(frozen=True)
class Point:
    x: float
    y: float = 0.0
    label: str = dataclasses.field(default="", compare=False)
    norm: float = dataclasses.field(init=False, default=0.0)


@dataclasses.dataclass
class Path:
    points: list[Point]
    weights: Any = None


T = TypeVar("T")


@dataclasses.dataclass
class Box(Generic[T]):
    inside: T


class Linked(TypedDict):
    at: Point
    further: list[Linked]


class Marked(TypedDict):
    at: Point


Place = NewType("Place", Point)
TYPES = hints.dataclasses_in([list[Path]])


def through(value: object, types: codec.Types = TYPES) -> Any:
    """`value`, encoded and decoded; its arrays are copied in between, as a carrier does."""
    body, arrays, _ = codec.encode(value)
    assert all(array.dtype == np.uint8 and array.ndim == 1 for array in arrays)
    return codec.decode(body, [array.copy() for array in arrays], types)


def same(a: object, b: object) -> bool:
    """Whether two values are equal and of the same types at every level; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor)
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if dataclasses.is_dataclass(a):
        return same(vars(a), vars(b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(same, a.values(), b.values()))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    return a == b


numbers = st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.complex_numbers(allow_nan=False)
texts = st.text() | st.binary()
plain = st.none() | st.booleans() | numbers | texts
keys = st.booleans() | st.integers(-(1 << 63), 1 << 63) | texts | st.tuples(st.integers(0, 9), st.text())
dtypes = st.sampled_from([dtype for dtype in DTYPES if dtype != "bfloat16"]).map(np.dtype)
ndarrays = arrays_of.arrays(dtypes, arrays_of.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=20))
values = st.recursive(
    plain | ndarrays,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner)
        | st.sets(keys)
        | st.builds(Path, st.lists(st.builds(Point, st.floats(allow_nan=False))), inner)
    ),
    max_leaves=20,
)


@given(values)
def test_values_round_trip(value):
    assert same(through(value), value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (0, 5), (4, 3, 2), (40, 50)])
def test_tensors_of_every_dtype_and_shape(dtype, shape):
    x = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    assert same(through({"x": [x]}), {"x": [x]})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(10)[::3],
        torch.ones(1).expand(50, 60),
        torch.complex(torch.ones(40, 40), torch.ones(40, 40)).conj(),
        torch.nn.Parameter(torch.ones(3)),
        np.arange(12).reshape(3, 4)[:, ::2],
        np.arange(10)[::-1],
        np.arange(5, dtype=">i4"),
        np.asfortranarray(np.ones((30, 40))),
    ],
    ids=repr,
)
def test_any_layout(tensor):
    arrived = through(tensor)
    assert arrived.shape == tensor.shape
    assert (torch.equal if isinstance(tensor, torch.Tensor) else np.array_equal)(arrived, tensor)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != "bfloat16"])
def test_numpy_scalars(dtype):
    assert same(through(np.dtype(dtype).type(1)), np.dtype(dtype).type(1))


def test_a_long_contiguous_tensor_is_not_copied():
    x = torch.ones(10_000)
    _, (flat,), _ = codec.encode([x])
    assert flat.ctypes.data == x.data_ptr()


def test_decoded_tensors_are_writable_views_of_the_received_arrays():
    body, arrays, _ = codec.encode((torch.ones(10_000), np.ones(3)))
    memory = [array.copy() for array in arrays]
    long, short = codec.decode(body, memory)
    assert long.data_ptr() == memory[0].ctypes.data
    long += 1
    short += 1


def test_a_model():
    state = torch.nn.Linear(40, 50).state_dict()
    assert isinstance(state, OrderedDict)
    arrived = through(state)
    assert list(arrived) == ["weight", "bias"]
    assert torch.equal(arrived["weight"], state["weight"])


# -- values that cannot be sent ------------------------------------------------------------------


class Mine:
    pass


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
UNSENDABLE = {
    "an object": ({"x": [1, 2, 3, Mine()]}, r"result\['x'\]\[3\] is a <class '.*Mine'>, which cannot be sent"),
    "a class": ((socket.socket,), r"result\[0\] is a <class 'type'>"),
    "a function": ([len], r"result\[0\] is a <class 'builtin_function"),
    "in a dataclass": (Path([], {"k": Mine()}), r"result.weights\['k'\] is a <class"),
    "a key": ({frozenset(): 1}, "the key .* of result is a <class 'frozenset'>"),
    "in a set": ({1, frozenset()}, "in result is a <class 'frozenset'>"),
    "a large int": ([1 << 70], r"result\[0\] is an int of 71 bits; at most 64"),
    "a small int": (-(1 << 63) - 1, "result is an int of 64 bits"),
    "itself": (CYCLE, r"result\[0\]\[0\].* deep, or contains itself"),
    "half a character": ({"k": "\ud800"}, r"result\['k'\] is a str that is not valid Unicode"),
    "a sparse tensor": ([torch.ones(3).to_sparse()], r"result\[0\]: layout torch.sparse_coo .*to_dense"),
    "a tensor elsewhere": ([torch.ones(3, device="meta")], r"result\[0\]: tensors on meta are not supported"),
    "objects": (np.array([Mine()]), "result: dtype object is not supported"),
    "text": (np.array(["x"]), "result: dtype <U1 is not supported"),
    "a mask": (np.ma.masked_array([1, 2], [True, False]), "result is a <class 'numpy.ma"),
    "a subclass": ([type("Sub", (dict,), {})()], r"result\[0\] is a <class"),
}


@pytest.mark.parametrize(("value", "message"), UNSENDABLE.values(), ids=UNSENDABLE.keys())
def test_the_error_names_the_path_of_a_value_that_cannot_be_sent(value, message):
    with pytest.raises(UsageError, match=message):
        codec.encode(value, "result")


def test_nested_tuples_are_bounded():
    value: tuple[Any, ...] = ()
    for _ in range(codec.MAX_DEPTH + 2):
        value = (value,)
    with pytest.raises(UsageError, match="deep"):
        codec.encode(value)


def test_too_many_arrays():
    with pytest.raises(UsageError, match="stack them"):
        codec.encode([np.ones(codec.INLINE_BYTES, np.uint16)] * ARRAYS_MAX)


# -- dataclasses ---------------------------------------------------------------------------------


def test_only_expected_dataclasses_are_decoded():
    body, _, _ = codec.encode([Point(1.0)])
    with pytest.raises(
        UsageError, match="dataclass Point was received, which no annotation here names; those named here: none"
    ):
        codec.decode(body)


@pytest.mark.parametrize(
    ("annotation", "value", "wrong"),
    [(Box[int], Box(1), 1), (Place, Point(1.0), 1.0), (Marked, {"at": Point(1.0)}, {"to": Point(1.0)})],
    ids=repr,
)
def test_annotations_that_name_a_dataclass_indirectly(annotation, value, wrong):
    arrived, check = through(value, hints.dataclasses_in([annotation])), hints.checker(annotation)
    assert arrived == value
    check(arrived, "it")
    with pytest.raises(UsageError, match="it must be"):
        check(wrong, "it")


def test_a_typed_dict_may_name_itself():
    assert hints.dataclasses_in([Linked]).keys() == {"Point"}


def test_fields_are_checked():
    body, _, _ = codec.encode([Point("no")])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"Point\.x must be float, got str"):
        codec.decode(body, (), TYPES)


def test_a_tensor_is_refused_while_torch_makes_fake_ones():
    x = torch.ones(3)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(UsageError, match="FakeTensorMode"):
        codec.encode(x)


def test_a_dataclass_with_other_fields_is_refused():
    @dataclasses.dataclass
    class Point:
        z: int

    Point.__qualname__ = "Point"
    body, _, _ = codec.encode(Point(1))
    with pytest.raises(
        UsageError, match=r"a Point has the fields \['label', 'x', 'y'\] here, but was received with \['z'\]"
    ):
        codec.decode(body, (), TYPES)


def test_two_dataclasses_of_one_name():
    first = dataclasses.make_dataclass("Twin", [("a", int)])
    second = dataclasses.make_dataclass("Twin", [("b", int)])
    with pytest.raises(UsageError, match="two dataclasses called Twin"):
        hints.dataclasses_in([first, second])


# -- failures ------------------------------------------------------------------------------------


def test_a_forwarded_failure_keeps_the_beginning_of_its_message():
    """The traceback keeps its end, which names the cause."""
    there = RemoteError(2, "ValueError", "the root cause", "x" * 100_000)
    error = failure.decode(failure.encode(there), 1)
    assert error.message.startswith("ValueError at rank 2: the root cause")
    assert error.traceback.endswith("xxx\ndocs: troubleshooting#remoteerror\n")
    assert len(str(error)) < 11_000


# -- invalid bytes -------------------------------------------------------------------------------


@given(st.binary(), st.lists(st.binary(max_size=64), max_size=3))
def test_random_bytes_are_refused_or_are_values(body, parts):
    arrays = [np.frombuffer(part, np.uint8).copy() for part in parts]
    with contextlib.suppress(ProtocolError, UsageError):
        codec.decode(body, arrays, TYPES)


@given(values, st.data())
def test_changed_bytes_are_refused_or_are_values(value, data):
    body, arrays, _ = codec.encode(value)
    position = data.draw(st.integers(0, len(body) - 1))
    changed = body[:position] + bytes([data.draw(st.integers(0, 255))]) + body[position + 1 :]
    with contextlib.suppress(ProtocolError, UsageError):
        codec.decode(changed, [array.copy() for array in arrays], TYPES)


@given(st.binary(max_size=200))
def test_random_messages_and_failures_are_refused(head):
    for read in (lambda: protocol.decode(head, ()), lambda: failure.decode(head, 0)):
        with contextlib.suppress(ProtocolError):
            read()


def an_array(form: bytes) -> bytes:
    return msgpack.packb(msgpack.ExtType(5, form))


FLOAT32 = DTYPES.index("float32")
IMPOSSIBLE = {
    "more elements than bytes": (an_array(struct.pack("<BBBBQI", 0, FLOAT32, 0, 1, 1000, 0)), 1),
    "a product beyond 64 bits": (an_array(struct.pack("<BBBBQQI", 0, FLOAT32, 0, 2, 1 << 63, 1 << 63, 0)), 1),
    "no such array": (an_array(struct.pack("<BBBBQI", 0, FLOAT32, 0, 1, 2, 7)), 1),
    "one array twice": (
        msgpack.packb([msgpack.ExtType(5, struct.pack("<BBBBQI", 0, FLOAT32, 0, 1, 2, 0))] * 2),
        1,
    ),
    "an array without a reference": (msgpack.packb(1), 1),
    "no such dtype": (an_array(struct.pack("<BBBBQI", 0, 99, 0, 1, 2, 0)), 1),
    "no such family": (an_array(struct.pack("<BBBBQI", 9, FLOAT32, 0, 1, 2, 0)), 1),
    "too many dimensions": (an_array(struct.pack("<BBBB", 0, FLOAT32, 0, 200) + bytes(8 * 200)), 0),
    "a scalar of several": (an_array(struct.pack("<BBBBQI", 2, FLOAT32, 0, 1, 2, 0)), 1),
    "a truncated header": (an_array(b"\0"), 0),
    "another kind": (msgpack.packb(msgpack.ExtType(99, b"")), 0),
    "a timestamp": (msgpack.packb(msgpack.ExtType(-1 & 0x7F, b"1234")), 0),
    "a tuple of no list": (msgpack.packb(msgpack.ExtType(1, msgpack.packb(1))), 0),
    "a dataclass of nothing": (msgpack.packb(msgpack.ExtType(4, msgpack.packb(1))), 0),
    "an unhashable key": (msgpack.packb({msgpack.ExtType(1, msgpack.packb([[]])): 1}), 0),
    "a rest": (msgpack.packb(1) + b"1", 0),
}


@pytest.mark.parametrize(("body", "count"), IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_impossible_values(body, count):
    with pytest.raises(ProtocolError):
        codec.decode(body, [np.zeros(8, np.uint8) for _ in range(count)], TYPES)


def test_nested_extensions_are_bounded():
    body = msgpack.packb([])
    for _ in range(codec.MAX_DEPTH + 1):
        body = msgpack.packb([msgpack.ExtType(1, body)])
    with pytest.raises(ProtocolError):
        codec.decode(body)


def test_false_lengths_cost_no_memory():
    lists = (b"\xdd" + struct.pack(">I", 60_000)) * 400 + b"\xc0" * 60_000
    tracemalloc.start()
    with pytest.raises(ProtocolError):
        codec.decode(lists)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_bools_are_normalized_to_0_and_1():
    form = struct.pack("<BBBBQ", 1, DTYPES.index("bool"), 1, 1, 2) + b"\x02\xff"
    assert codec.decode(an_array(form)).view(torch.uint8).tolist() == [1, 1]


class AtTheHost:
    """A place that leaves tensors where they are."""

    def __init__(self, shown):
        self.shown = shown.get

    def take(self, x):
        return x

    def as_bools(self, flat):
        flat.clamp_(max=1)


def test_tensors_that_were_shown():
    body, _, _ = codec.encode([torch.ones(50, 20), torch.zeros(1000), torch.ones(3000, dtype=torch.bool)])
    arrays = [np.empty(0, np.uint8), np.zeros(4000, np.uint8), np.empty(0, np.uint8)]
    shown = {0: torch.ones(1000).view(torch.uint8), 2: torch.full((3000,), 7, dtype=torch.uint8)}
    first, second, third = codec.decode(body, arrays, place=AtTheHost(shown))
    assert torch.equal(first, torch.ones(50, 20))
    assert torch.equal(second, torch.zeros(1000))
    assert third.view(torch.uint8).tolist() == [1] * 3000


@pytest.mark.parametrize("shown", [{}, {0: torch.ones(999).view(torch.uint8)}, {1: torch.ones(1000).view(torch.uint8)}])
@pytest.mark.parametrize("value", [torch.ones(1000), np.ones(1000, np.float32)])
def test_tensors_that_were_shown_with_other_bytes(shown, value):
    body, _, _ = codec.encode([value])
    with pytest.raises(ProtocolError, match="bytes"):
        codec.decode(body, [np.empty(0, np.uint8)], place=AtTheHost(shown))


def test_a_tensor_that_was_shown_and_sent():
    body, arrays, _ = codec.encode([torch.ones(1000)])
    with pytest.raises(ProtocolError, match="4000 bytes were shown"):
        codec.decode(body, arrays, place=AtTheHost({0: torch.ones(1000).view(torch.uint8)}))


# -- messages ------------------------------------------------------------------------------------


@given(
    st.sampled_from(range(protocol.CALL, protocol.SHOW_ARGUMENT + 1)),
    st.integers(0, (1 << 64) - 1),
    st.text(max_size=200),
    st.booleans(),
)
def test_messages_round_trip(kind, call, name, is_on_device):
    head, arrays = protocol.encode(kind, call, b"body", name=name, number=3, seconds=1.5, is_on_device=is_on_device)
    message, rest = protocol.decode(head, arrays)
    assert message == (kind, call, 3, 1.5, name, b"body", is_on_device)
    assert not rest


def test_a_long_body_travels_beside_the_head():
    body, arrays, _ = codec.encode([[1.5] * 50_000, np.ones(9999)])
    head, out = protocol.encode(protocol.CALL, 1, body, arrays, name="f")
    assert len(head) <= HEAD_BYTES
    message, rest = protocol.decode(head, [np.array(array) for array in out])
    value = codec.decode(message.body, rest)
    assert value[0] == [1.5] * 50_000
    assert math.isclose(value[1].sum(), 9999)


@pytest.mark.parametrize("change", [(0, 99), (1, 0), (1, 99), (3, 99)], ids=["version", "kind", "kinds", "number"])
def test_invalid_messages_are_refused(change):
    head = bytearray(protocol.encode(protocol.CALL, 1, name="f")[0])
    head[change[0]] = change[1]
    with pytest.raises(ProtocolError):
        protocol.decode(bytes(head), ())


@pytest.mark.parametrize("error", [KeyboardInterrupt, UsageError])
def test_an_encoder_is_as_new_after_a_value_that_raises(error):
    @dataclasses.dataclass
    class Raising:
        x: int = 0

        def __getattribute__(self, name: str) -> Any:
            if name == "x":
                raise error
            return super().__getattribute__(name)

    encoder = codec.Encoder()
    for _ in range(2):
        with pytest.raises(error):
            encoder.encode([Raising()])
        assert encoder._depth == -1
    assert encoder.encode([1])[0] == codec.encode([1])[0]
