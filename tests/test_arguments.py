"""Strings and numbers that ranks must agree on match if they are equal, whatever their types; others are refused."""

from __future__ import annotations

import enum
import random

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from asyncoll import Feedback, Metrics, UsageError
from asyncoll.arguments import digest
from asyncoll.testing import run_ranks, simulate


class Printed(str):
    """A string whose `str` differs from its value."""

    __slots__ = ()

    def __repr__(self):
        return "<printed>"

    __str__ = __repr__


class Whole(int):
    """A number whose `repr` differs from its value."""

    def __repr__(self):
        return "<whole>"

    __str__ = __repr__


def members(base, value):
    return base("Members", {"ONLY": value}).ONLY


STRINGS = [
    str,
    np.str_,
    Printed,
    lambda value: members(enum.StrEnum, value),
    lambda value: enum.Enum("Members", {"ONLY": value}, type=str).ONLY,
]
NUMBERS = [
    int,
    np.int8,
    np.uint16,
    np.int64,
    np.array,
    torch.tensor,
    Whole,
    lambda value: members(enum.IntEnum, value),
]
REALS = [float, np.float32, np.float64, np.float16]


class Drawn:
    """The same values at every rank, of types that each rank draws independently."""

    def __init__(self, seed, rank):
        self._draw = random.Random(f"{seed} {rank}")

    def text(self, value):
        return self._draw.choice(STRINGS)(value)

    def whole(self, value):
        return self._draw.choice(NUMBERS)(value)

    def real(self, value):
        return self._draw.choice(REALS)(value)

    def flag(self, value):
        return self._draw.choice([bool, np.bool_, int])(value)


async def rounds(comm, drawn):
    """Every wait-avoiding allreduce, twice, with all ranks: the number of contributions in each result."""
    number, name, one = drawn.whole, drawn.text, np.ones(2)
    for _ in range(2):
        options = {"sync_every": number(1), "history": number(2)}
        yield await comm.solo_allreduce(one.copy(), name=name("s"), **options)
        options["seed"] = number(7)
        yield await comm.majority_allreduce(one.copy(), name=name("m"), candidates=number(2), **options)
        yield await comm.quorum_allreduce(one.copy(), name=name("q"), quorum=number(comm.size), seed=number(3))
        options = {"group_size": number(comm.size), "fixed": drawn.flag(1), "sync_every": number(1)}
        yield await comm.group_allreduce(one.copy(), name=name("g"), **options)


async def sparse(comm, drawn):
    x = np.ones(8, "f4")
    await comm.sparse_allreduce(
        x,
        density=drawn.real(0.5),
        algorithm=drawn.text("oktopk"),
        name=drawn.text("w"),
        thresholds_every=drawn.whole(2),
        regions_every=drawn.whole(3),
        feedback=Feedback(low=drawn.real(0.5), high=drawn.real(1.5), factor=drawn.real(2.0)),
        global_threshold=drawn.text("histogram"),
        dense=drawn.flag(1),
    )


async def pairs(comm, drawn):
    """Every rank sends to the next one, under a tag."""
    received = np.zeros(1)
    sending = comm.send(np.full(1, comm.rank), drawn.whole((comm.rank + 1) % comm.size), drawn.whole(9))
    await comm.recv(received.astype(int), drawn.whole((comm.rank - 1) % comm.size), drawn.whole(9))
    await sending


async def calls(comm, drawn):
    for _ in range(2):
        await comm.broadcast(np.ones(1), drawn.whole(1))
        await comm.gather(np.ones(1), root=drawn.whole(1))
        await sparse(comm, drawn)
        await pairs(comm, drawn)
    part = await comm.split(drawn.whole(5), drawn.whole(comm.rank))
    assert (part.rank, part.size) == (comm.rank, comm.size)
    assert (await part.allreduce(np.ones(1)))[0] == comm.size
    comm.rpc.register(lambda: comm.rank, name=drawn.text("who"))
    await comm.barrier()
    for rank in range(comm.size):
        assert await comm.rpc.call(drawn.whole(rank), drawn.text("who")) == rank


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_equal_values_of_different_types_match(seed, size, run):
    async def main(comm):
        drawn = Drawn(seed, comm.rank)
        assert [r.active async for r in rounds(comm, drawn)] == [size] * 8
        assert set(comm.statistics().operations) == {"s", "m", "q", "g"}
        await calls(comm, drawn)

    run(size, main)


TRUTHS = [True, np.True_]
REFUSED = {
    "quorum": lambda comm, value: comm.quorum_allreduce(np.ones(1), quorum=value),
    "seed": lambda comm, value: comm.majority_allreduce(np.ones(1), seed=value),
    "sync_every": lambda comm, value: comm.solo_allreduce(np.ones(1), sync_every=value),
    "group_size": lambda comm, value: comm.group_allreduce(np.ones(1), group_size=value),
    "root": lambda comm, value: comm.broadcast(np.ones(1), value),
    "tag": lambda comm, value: comm.send(np.ones(1), 1 - comm.rank, value),
    "color": lambda comm, value: comm.split(value),
    "key": lambda comm, value: comm.split(0, value),
    "thresholds_every": lambda comm, value: comm.sparse_allreduce(np.ones(1), density=1, thresholds_every=value),
    "density": lambda comm, value: comm.sparse_allreduce(np.ones(1), density=value),
    "factor": lambda comm, value: Feedback(factor=value),
    "a rank": lambda comm, value: comm.rpc.stream(value, "name"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_bool_is_refused_as_a_number(what):
    async def main(comm):
        for value in TRUTHS:
            with pytest.raises(UsageError, match=f"{what}.* must be a (whole )?number, got .*True"):
                REFUSED[what](comm, value)

    simulate(2, main)


@pytest.mark.parametrize("transport", ["inproc", "shm"])
@pytest.mark.parametrize("call", ["solo_allreduce", "sparse_allreduce"])
def test_a_name_that_cannot_be_sent_is_refused(call, transport):
    options = {"density": 1} if call == "sparse_allreduce" else {}

    async def main(comm):
        with pytest.raises(UsageError, match=r"name must be Unicode text, but 'caf.udce9' has lone surrogates"):
            getattr(comm, call)(np.ones(1), name="caf\udce9", **options)
        with pytest.raises(UsageError, match="name must be a string, got b'w'"):
            getattr(comm, call)(np.ones(1), name=b"w", **options)

    run_ranks(2, main, transport)


@pytest.mark.parametrize("part", [np.str_("w"), Printed("w"), np.int64(1), Whole(1), True, None, 1.0, b"w"])
def test_a_digest_refuses_parts_whose_repr_may_differ(part):
    with pytest.raises(TypeError, match="exact ints and strs"):
        digest("world", part)


SHAPES = [
    (5, (5,)),
    (np.int64(5), (5,)),
    (np.array(5), (5,)),
    (torch.tensor(5), (5,)),
    ([2, np.int32(3)], (2, 3)),
    (np.array([2, 3]), (2, 3)),
    (torch.Size([2, 3]), (2, 3)),
    ((), ()),
]


@pytest.mark.parametrize(("shape", "expected"), SHAPES)
@pytest.mark.parametrize("dtype", ["f4", torch.float32])
def test_a_shape_takes_integers_of_any_type(shape, expected, dtype, run):
    async def main(comm):
        return tuple(comm.empty(shape, dtype).shape)

    assert run(2, main) == [expected] * 2


@pytest.mark.parametrize("shape", [2.0, (2, 2.0), True, None, "ab"])
def test_a_shape_of_other_values_is_refused(shape):
    async def main(comm):
        with pytest.raises(UsageError, match="an extent of a shape must be a whole number"):
            comm.empty(shape, "f4")

    simulate(2, main)


@pytest.mark.parametrize("real", [{}, {"allow_non_fake_inputs": True}], ids=["fake only", "real, too"])
@pytest.mark.parametrize("call", ["allreduce", "broadcast", "recv", "solo_allreduce", "neighbor_average"])
def test_a_tensor_is_refused_while_torch_makes_fake_ones(call, real, run):
    """Its view would be of other memory: the call would be over, and the tensor as before."""

    async def main(comm):
        x, apart = torch.ones(4), torch.ones(4, 2)[:, 0]
        arguments = (1 - comm.rank,) if call == "recv" else ()
        with FakeTensorMode(**real):
            fake = torch.empty(4)
            for tensor in (x, apart, fake):
                with pytest.raises(UsageError, match=r"[Ff]ake"):
                    getattr(comm, call)(tensor, *arguments)
        with TorchDispatchLog():  # any other mode is no reason
            assert (await comm.allreduce(x) == 2).all()
            assert (await comm.allreduce(apart) == 2).all()

    run(2, main)


class TorchDispatchLog(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def released(x):
    """`x` without the memory of its elements, as between two uses of a shard."""
    x.untyped_storage().resize_(0)
    return x


WITHOUT_PLAIN_ELEMENTS = {
    "meta": lambda: torch.ones(4, device="meta"),
    "sparse": lambda: torch.ones(4).to_sparse(),
    "csr": lambda: torch.ones(2, 2).to_sparse_csr(),
    "quantized": lambda: torch._empty_affine_quantized([4], scale=0.1, zero_point=0, dtype=torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "mkldnn": lambda: torch.ones(4).to_mkldnn(),
    "uninitialized": torch.nn.UninitializedParameter,
    "released": lambda: released(torch.ones(4)),
    "released, a part": lambda: released(torch.ones(8)[4:]),
    "released, not contiguous": lambda: released(torch.ones(4, 2)[:, 0]),
    "float8": lambda: torch.ones(4).to(torch.float8_e4m3fn),
    "objects": lambda: np.array([1, None]),
    "text": lambda: np.array(["a"]),
    "records": lambda: np.zeros(2, [("a", "f4")]),
    "a list of numbers": lambda: [1.0, 2.0],
    "a number": lambda: 3,
    "nothing": lambda: None,
    "a string": lambda: "abcd",
}
TAKERS = {
    "allreduce": lambda comm, x: comm.allreduce(x),
    "broadcast": lambda comm, x: comm.broadcast(x),
    "reduce": lambda comm, x: comm.reduce(x),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "allgather": lambda comm, x: comm.allgather(x),
    "allgatherv": lambda comm, x: comm.allgatherv(x),
    "gather": lambda comm, x: comm.gather(x),
    "scatter": lambda comm, x: comm.scatter([x] * comm.size, comm.rank),
    "alltoall": lambda comm, x: comm.alltoall(x),
    "alltoallv": lambda comm, x: comm.alltoallv([x] * comm.size),
    "send": lambda comm, x: comm.send(x, 1 - comm.rank),
    "recv": lambda comm, x: comm.recv(x, 1 - comm.rank),
    "recv_any": lambda comm, x: comm.recv_any(x),
    "solo_allreduce": lambda comm, x: comm.solo_allreduce(x),
    "majority_allreduce": lambda comm, x: comm.majority_allreduce([np.ones(1), x]),
    "quorum_allreduce": lambda comm, x: comm.quorum_allreduce((x,)),
    "group_allreduce": lambda comm, x: comm.group_allreduce(x, group_size=2),
    "join": lambda comm, x: comm.join("known", x),
    "sparse_allreduce": lambda comm, x: comm.sparse_allreduce(x, density=1),
    "neighbor_average": lambda comm, x: comm.neighbor_average(x),
    "push_sum": lambda comm, x: comm.push_sum(x, 1.0),
    "gossip": lambda comm, x: comm.gossip(x),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch: some of these are in beta state
@pytest.mark.parametrize("what", WITHOUT_PLAIN_ELEMENTS)
def test_what_has_no_plain_elements_is_refused(what, run):
    """By each call, before anything is sent: the ranks go on."""

    async def main(comm):
        await comm.solo_allreduce(np.ones(4), name="known")
        for taker in TAKERS.values():
            with pytest.raises(UsageError):
                taker(comm, WITHOUT_PLAIN_ELEMENTS[what]())
        assert (await comm.allreduce(np.ones(1)) == comm.size).all()

    run(2, main)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("what", ["meta", "sparse", "nested", "mkldnn", "uninitialized"])
def test_such_a_tensor_is_no_sequence_of_tensors(what):
    async def main(comm):
        for call in (comm.alltoallv, lambda xs: comm.scatter(xs, comm.rank)):
            with pytest.raises(UsageError):
                call(WITHOUT_PLAIN_ELEMENTS[what]())

    simulate(2, main)


NO_TEXTS = ["caf\udce9", b"w", 3, None, 1.5, ["w"]]
NAMED = {
    "solo_allreduce": lambda comm, name: comm.solo_allreduce(np.ones(1), name=name),
    "group_allreduce": lambda comm, name: comm.group_allreduce(np.ones(1), group_size=2, name=name),
    "join": lambda comm, name: comm.join(name, np.ones(1)),
    "sparse_allreduce": lambda comm, name: comm.sparse_allreduce(np.ones(1), density=1, name=name),
    "algorithm": lambda comm, name: comm.sparse_allreduce(np.ones(1), density=1, algorithm=name),
    "threshold": lambda comm, name: comm.sparse_allreduce(np.ones(1), density=1, global_threshold=name),
    "sparse_state": lambda comm, name: comm.sparse_state(name),
    "load_sparse_state": lambda comm, name: comm.load_sparse_state(name, None),
    "graph": lambda comm, name: comm.neighbor_average(np.ones(1), graph=name),
    "push_sum": lambda comm, name: comm.push_sum(np.ones(1), 1.0, graph=name),
    "gossip": lambda comm, name: comm.gossip(np.ones(1), graph=name),
    "neighbors": lambda comm, name: comm.neighbors(graph=name),
    "tag": lambda comm, name: comm.send(np.ones(1), 1 - comm.rank, tag=name if name != 3 else "3"),
    "reduction": lambda comm, name: comm.allreduce(np.ones(1), name),
    "color": lambda comm, name: comm.split(name if name not in (3, None) else "3"),
    "dtype": lambda comm, name: comm.empty(3, name if name is not None else "none"),
    "device": lambda comm, name: comm.empty(3, torch.float32, device=name if name is not None else "none"),
    "rpc.register": lambda comm, name: comm.rpc.register(len, name=name if name is not None else 3),
    "metrics": lambda comm, name: Metrics({name if isinstance(name, (str, bytes)) else 3: 1}),
}


@pytest.mark.parametrize("what", NAMED)
@pytest.mark.parametrize("value", NO_TEXTS, ids=ascii)
def test_what_is_no_text_is_refused_in_words_that_can_be_printed(value, what):
    async def main(comm):
        with pytest.raises(UsageError) as raised:
            NAMED[what](comm, value)
        assert str(raised.value).encode()

    simulate(2, main)


@pytest.mark.parametrize(
    "what", sorted(NAMED.keys() - {"sparse_allreduce", "sparse_state", "load_sparse_state", "rpc.register"})
)
def test_a_long_text_is_not_repeated_in_whole(what):
    async def main(comm):
        with pytest.raises(UsageError) as raised:
            NAMED[what](comm, "x" * 100_000 + "\0")
        assert len(str(raised.value)) < 1000

    simulate(2, main)
