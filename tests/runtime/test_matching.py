"""Matching of posted receives with arriving segments, in any order."""

from __future__ import annotations

import numpy as np
import pytest

from asyncoll.errors import ProtocolError
from asyncoll.runtime.matching import Mailbox, Receive
from asyncoll.tensors.reductions import DTYPES, ReduceOp, combiner, storage
from tests.support.properties import given, st

add = combiner(ReduceOp.SUM, "int32")


def segments(x: np.ndarray, cuts: list[int]) -> list[bytes]:
    """The segments of `x`: none is empty, except the only one of an empty array."""
    return [piece.tobytes() for piece in np.split(x, sorted(set(cuts))) if piece.size] or [b""]


class Posted:
    """A receive, and a count of the calls of `on_complete`."""

    def __init__(self, count: int, combine=None) -> None:
        self.into = np.full(count, 100, "i4")
        self.receive = Receive(self.into, combine)
        self.completions = 0
        self.receive.on_complete = self.completed

    def completed(self) -> None:
        self.completions += 1


@given(st.data())
def test_any_interleaving_gives_the_same_arrays(data):
    keys = [(source, step) for source in range(2) for step in range(2)]
    sent = {key: np.arange(data.draw(st.integers(0, 9)), dtype="i4") + 10 * index for index, key in enumerate(keys)}
    combine = data.draw(st.sampled_from([None, add]))
    mailbox, posted = Mailbox(), {key: Posted(x.size, combine) for key, x in sent.items()}
    pending = {key: segments(x, data.draw(st.lists(st.integers(1, 8)))) for key, x in sent.items()}
    events = [key for key, pieces in pending.items() for _ in pieces] + [("post", key) for key in keys]
    early = dict.fromkeys(keys, 0)
    for event in data.draw(st.permutations(events)):
        if event[0] == "post":
            assert len(mailbox.post(event[1], posted[event[1]].receive)) == early[event[1]]
            continue
        consumed = mailbox.arrive(event, pending[event].pop(0))
        early[event] += not consumed
    for key, x in sent.items():
        np.testing.assert_array_equal(posted[key].into, x if combine is None else x + 100)
        assert (posted[key].receive.complete, posted[key].completions) == (True, 1)
    assert mailbox.waiting_for() == []


@pytest.mark.parametrize("posted_first", [True, False])
@pytest.mark.parametrize(
    "pieces",
    [[4], [16], [8, 8], [8, 0], [3], [8, 5], [8, 4, 4], [0]],
    ids=lambda pieces: "+".join(map(str, pieces)),
)
def test_segments_of_a_wrong_total_size_are_refused(pieces, posted_first):
    """The receive expects three elements, 12 bytes."""
    mailbox, posted = Mailbox(), Posted(3)
    sizes = iter(pieces)
    if posted_first:
        mailbox.post((0, 0), posted.receive)

    def all_of_it() -> None:
        for size in sizes:
            mailbox.arrive((0, 0), bytes(size))
        if not posted_first:
            mailbox.post((0, 0), posted.receive)

    if pieces == [4]:
        all_of_it()
        assert mailbox.waiting_for() == [(0, 0)]
    elif pieces == [8, 4, 4]:
        all_of_it()  # the third segment is of the next array
        assert posted.completions == 1
        rest = Posted(1)
        assert mailbox.post((0, 0), rest.receive) == [bytes(4)]
        assert rest.completions == 1
    else:
        with pytest.raises(ProtocolError, match="a segment of"):
            all_of_it()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_of_an_element_is_refused(dtype):
    width = storage(dtype).itemsize
    receive = Receive(np.zeros(4, storage(dtype)))
    receive.take(bytes(width))
    if width > 1:
        with pytest.raises(ProtocolError, match=f"not a multiple of the {width}"):
            receive.take(bytes(2 * width - 1))
    assert receive.filled == 1


@pytest.mark.parametrize("early", [True, False])
def test_an_empty_array_is_one_empty_segment(early):
    mailbox, posted = Mailbox(), Posted(0)
    if early:
        assert not mailbox.arrive((0, 0), b"")
        assert mailbox.post((0, 0), posted.receive) == [b""]
    else:
        assert mailbox.post((0, 0), posted.receive) == []
        assert mailbox.waiting_for() == [(0, 0)]
        assert mailbox.arrive((0, 0), b"")
    assert posted.completions == 1
    assert mailbox.waiting_for() == []


def test_an_empty_array_takes_no_elements():
    with pytest.raises(ProtocolError, match="a segment of 1 elements; 0 were expected"):
        Receive(np.zeros(0, "i4")).take(bytes(4))


def test_a_second_receive_for_one_key_is_refused():
    mailbox = Mailbox()
    mailbox.post((0, 0), Posted(1).receive)
    with pytest.raises(AssertionError, match="two receives"):
        mailbox.post((0, 0), Posted(1).receive)
