"""The wire format: encoded messages decode to the same values, and all other bytes raise ProtocolError."""

from __future__ import annotations

import subprocess
import sys
from typing import get_type_hints

import msgpack
import pytest

from asyncoll.arguments import digest
from asyncoll.errors import ProtocolError
from asyncoll.transport import wire
from tests.support.processes import PATIENCE_S
from tests.support.properties import given, st

KINDS = [wire.DATA, wire.GRANT, wire.CREDIT, wire.SIGNAL, wire.CONTROL, wire.OFFER, wire.CHECK]
LIMITS = [(wire.DATA, wire.SEGMENT_BYTES), (wire.SIGNAL, wire.SEGMENT_BYTES), (wire.CONTROL, wire.CONTROL_BYTES)]
WITH_PAYLOAD = {kind for kind, _ in LIMITS}
uint64s = st.integers(0, 2**64 - 1)
uint32s = st.integers(0, 2**32 - 1)


def message(kind: int, payload: bytes = b"", epoch: int = 1, **fields: int) -> list[bytes]:
    return [wire.encode(kind, epoch, **fields), payload][: 2 if kind in WITH_PAYLOAD else 1]


def decodes_or_raises(frames: list[bytes]) -> None:
    """Anything but ProtocolError escapes and fails the test."""
    try:
        header = wire.decode(frames)
        if header.kind == wire.CONTROL:
            wire.decode_control(frames[1])
    except ProtocolError:
        return
    assert (
        wire.encode(header.kind, header.epoch, header.context, header.number, header.step, header.fingerprint)
        == frames[0]
    )


@given(st.sampled_from(KINDS), uint32s, uint64s, uint64s, uint32s, uint64s, st.binary(max_size=50))
def test_a_header_decodes_to_its_values(kind, epoch, context, number, step, fingerprint, payload):
    fields = {"epoch": epoch, "context": context, "number": number, "step": step, "fingerprint": fingerprint}
    header = wire.decode(message(kind, payload, **fields))
    assert header._asdict() == {"kind": kind, **fields}


@given(st.lists(st.binary(max_size=80), max_size=4))
def test_random_frames_decode_or_raise(frames):
    decodes_or_raises(frames)


@given(st.sampled_from(KINDS), st.integers(0, wire.HEADER_BYTES - 1), st.integers(0, 255), st.binary(max_size=50))
def test_mutated_headers_decode_or_raise(kind, index, value, payload):
    frames = message(kind, payload)
    frames[0] = frames[0][:index] + bytes([value]) + frames[0][index + 1 :]
    decodes_or_raises(frames)


@given(st.binary(max_size=200))
def test_random_control_payloads_decode_or_raise(payload):
    decodes_or_raises(message(wire.CONTROL, payload))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [0, 1, wire.HEADER_BYTES - 1, wire.HEADER_BYTES + 1, 1000])
def test_a_header_of_another_length_is_refused(kind, length):
    frames = message(kind)
    frames[0] = (frames[0] * 40)[:length]
    with pytest.raises(ProtocolError, match="one frame of"):
        wire.decode(frames)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_number_of_frames_is_refused(kind):
    frames = message(kind)
    with pytest.raises(ProtocolError, match="frames"):
        wire.decode([*frames, *[b""] * (2 if kind == wire.DATA else 1)])
    with pytest.raises(ProtocolError, match="frames"):
        wire.decode([frames[0], *[b""] * (kind not in WITH_PAYLOAD)])


@pytest.mark.parametrize(
    ("index", "value", "complaint"),
    [(0, b"x", "not an asyncoll peer"), (2, b"\x01", "wire version 1"), (3, b"\x00", "kind"), (3, b"\x08", "kind")],
)
def test_the_error_names_the_wrong_field_of_a_header(index, value, complaint):
    header = bytearray(wire.encode(wire.GRANT, 1))
    header[index : index + 1] = value
    with pytest.raises(ProtocolError, match=complaint):
        wire.decode([bytes(header)])


def test_a_piggyback_of_data_has_a_limit():
    frames = message(wire.DATA, b"data")
    assert wire.decode([*frames, bytes(wire.PIGGYBACK_BYTES)]).kind == wire.DATA
    with pytest.raises(ProtocolError, match="piggyback"):
        wire.decode([*frames, bytes(wire.PIGGYBACK_BYTES + 1)])


@pytest.mark.parametrize(("kind", "limit"), LIMITS)
def test_the_limit_of_payloads_is_exact(kind, limit):
    assert wire.decode(message(kind, bytes(limit))).kind == kind
    with pytest.raises(ProtocolError, match=f"more than {limit}"):
        wire.decode(message(kind, bytes(limit + 1)))


# -- control messages ----------------------------------------------------------------------------

numbers = st.integers(-(2**63), 2**64 - 1)
texts = st.text(max_size=30)
CONTROLS = [wire.Announce, wire.Dispute, wire.Mismatch, wire.Abort]
KINDS = {int: numbers, str: texts, bool: st.booleans()}
controls = st.one_of(st.builds(cls, *map(KINDS.get, get_type_hints(cls).values())) for cls in CONTROLS)
ABORT = ["Abort", 1, 2, "tired"]


@given(controls)
def test_a_control_message_decodes_to_its_values(control):
    frames = wire.encode_control(control, 1)
    assert wire.decode(frames).kind == wire.CONTROL
    assert wire.decode_control(frames[1]) == control


@pytest.mark.parametrize("letter", ["a", "\N{GREEK SMALL LETTER ALPHA}", "\N{SNOWMAN}", "\N{BUG}"])
@pytest.mark.parametrize("cls", CONTROLS)
def test_long_texts_are_cut_to_fit(cls, letter):
    long = letter * 100_000
    values = {str: long, int: 2**63, bool: True}
    control = cls(*map(values.get, get_type_hints(cls).values()))
    frames = wire.encode_control(control, 1)
    assert wire.decode(frames).kind == wire.CONTROL
    assert type(wire.decode_control(frames[1])) is cls


def test_a_text_with_lone_surrogates_can_be_sent():
    """File names, and so call sites, may contain bytes that are not UTF-8: Python decodes them to lone surrogates."""
    frames = wire.encode_control(wire.Abort(1, 2, "at caf\udce9.py:3"), 1)
    assert "at caf" in wire.decode_control(frames[1]).reason


@pytest.mark.parametrize(
    "values",
    [
        [],
        None,
        7,
        "Abort",
        {"Abort": 1},
        ["Abort"],
        ["Abort", 1, 2],
        [*ABORT, 3],
        ["Abort", "1", 2, "tired"],
        ["Abort", 1, True, "tired"],
        ["Abort", 1, 2.0, "tired"],
        ["Abort", 1, None, "tired"],
        ["Abort", 1, 2, b"tired"],
        ["Abort", 1, 2, ["tired"]],
        ["Abort", 1, 2, {"tired": 1}],
        ["Control", 1, 2, "tired"],
        ["__class__"],
        [["Abort"], 1, 2, "tired"],
        [None, 1, 2, "tired"],
        list(range(65)),
    ],
    ids=repr,
)
def test_other_values_than_control_messages_are_refused(values):
    with pytest.raises(ProtocolError):
        wire.decode_control(msgpack.packb(values))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 60_000,  # deeply nested arrays
        b"\xdd\xff\xff\xff\xff",  # an array of 2^32 - 1 elements
        b"\xdb\xff\xff\xff\xff",  # a text of as many bytes
        b"\xc7\x08\xff" + bytes(8),  # a time stamp
        msgpack.packb(ABORT)[:-1],
        msgpack.packb(ABORT) + b"\x00",
        msgpack.packb(["Abort", 1, 2, "x" * 8]).replace(b"x", b"\xff"),
    ],
    ids=["nothing", "reserved", "nested", "huge array", "huge text", "extension", "cut", "trailing", "not unicode"],
)
def test_malicious_msgpack_is_refused(payload):
    with pytest.raises(ProtocolError):
        wire.decode_control(payload)


# -- digests -------------------------------------------------------------------------------------

DIGEST = 3295537554666469659


def test_digest_is_the_same_in_every_process():
    assert digest("world", 1, "é") == DIGEST
    code = "from asyncoll.arguments import digest; print(digest('world', 1, 'é'))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert int(run.stdout) == DIGEST


@given(st.lists(st.one_of(texts, numbers), max_size=4), st.lists(st.one_of(texts, numbers), max_size=4))
def test_different_values_have_different_digests(parts, others):
    assert (digest(*parts) == digest(*others)) == (parts == others)
