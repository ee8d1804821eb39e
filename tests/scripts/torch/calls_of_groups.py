"""A rank of a process group of torch: runs the cases of its arguments, and prints a line once they have passed.

Every rank knows the inputs of all ranks, and so the values that each call must give.
"""

import os
import sys
import threading
import warnings
import weakref
from datetime import timedelta
from functools import partial, reduce
from itertools import product

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import asyncoll
import asyncoll.torch.work
from asyncoll.torch.futures import FutureThreads
from asyncoll.torch.registered_pool import RegisteredPool
from tests.support.raising import caught

SECONDS = timedelta(seconds=60)
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
REDUCED = [*INTEGERS, *FLOATS, *COMPLEX, torch.bool]
COPIED = [*REDUCED, torch.float8_e4m3fn, torch.float8_e5m2]
BITS = {ReduceOp.BAND: "bitwise_and", ReduceOp.BOR: "bitwise_or", ReduceOp.BXOR: "bitwise_xor"}
COMPARED = {ReduceOp.MIN: "minimum", ReduceOp.MAX: "maximum"}
checks = {}


def check(*parameters):
    """A check of values: once for each combination of the parameters."""

    def add(function):
        for values in product(*parameters):
            checks[f"{function.__name__}{values}"] = partial(function, *values)
        return function

    return add


# -- inputs and expected values ---------------------------------------------------------------------


def wide(dtype):
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64


def given(rank, shape, dtype, seed=0):
    """The input of `rank`: small whole numbers, whose sums and products every dtype holds exactly."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randint(0, 2 if dtype is torch.bool else 4, shape, generator=generator)
    if dtype.is_complex:
        x = x + 1j * torch.randint(0, 3, shape, generator=generator)
    return x.to(dtype)


def laid(x, layout):
    """A tensor with the values of `x`, in this layout."""
    if layout == "transposed":
        return x.t().contiguous().t() if x.dim() == 2 else x
    if layout == "strided":
        room = torch.zeros((*x.shape, 2), dtype=x.dtype)
        room[..., 1] = x
        return room[..., 1]
    if layout == "offset":
        room = torch.zeros(x.numel() + 3, dtype=x.dtype)
        return room[3:].view(x.shape).copy_(x)
    if layout == "conjugated" and x.is_complex():
        return x.conj().resolve_conj().conj()
    return x.clone().requires_grad_() if layout == "graded" and (x.is_floating_point() or x.is_complex()) else x.clone()


def total(op, parts):
    """The reduction of `parts`, computed in wide numbers."""
    dtype = parts[0].dtype
    if op in BITS:
        return reduce(getattr(torch, BITS[op]), parts)
    if dtype is torch.bool:
        stacked = torch.stack(list(parts))
        return stacked.all(0) if op in (ReduceOp.PRODUCT, ReduceOp.MIN) else stacked.any(0)
    parts = [part.to(wide(dtype)) for part in parts]
    if op in COMPARED:
        return reduce(getattr(torch, COMPARED[op]), parts).to(dtype)
    if op == ReduceOp.PRODUCT:
        return reduce(torch.mul, parts).to(dtype)
    found = reduce(torch.add, parts)
    return (found / len(parts) if op == ReduceOp.AVG else found).to(dtype)


def same(found, expected):
    """Equal, but for the last bit of an average."""
    found, expected = found.detach(), expected.detach()
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), (found, expected)
    if found.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        found, expected = found.view(torch.uint8), expected.view(torch.uint8)
    torch.testing.assert_close(
        found, expected, rtol=1e-2 if found.dtype in (torch.bfloat16, torch.float16) else 1e-6, atol=0
    )


def sizes():
    return dist.get_world_size()


def ranks():
    return range(dist.get_world_size())


def ended(form, work):
    """Wait for `work`, in this form."""
    if form == "future":
        work.get_future().wait()
    elif form == "polled":
        while not work.is_completed():
            pass
        assert work.is_success()
    else:
        work.wait()


FORMS = ["waited", "polled", "future"]
SHAPES = [(5,), (3, 4), (), (0,), (70_000,)]
LAYOUTS = ["plain", "transposed", "strided", "offset", "conjugated", "graded"]

# -- reductions -------------------------------------------------------------------------------------


def defined(op, dtype):
    if op in BITS:
        return not (dtype.is_floating_point or dtype.is_complex)
    if op in COMPARED:
        return not dtype.is_complex
    return op != ReduceOp.AVG or dtype is not torch.bool


OPS = [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.AVG, *COMPARED, *BITS]


@check([(op, dtype) for op in OPS for dtype in REDUCED if defined(op, dtype)])
def allreduces(kind):
    op, dtype = kind
    x = given(dist.get_rank(), (3, 4), dtype)
    # torch sees complex numbers as pairs of real ones in all_reduce, and refuses other reductions.
    dist.group.WORLD.allreduce([x], op).wait()
    same(x, total(op, [given(rank, (3, 4), dtype) for rank in ranks()]))


@check(SHAPES, LAYOUTS, [torch.float32, torch.complex64])
def allreduces_layouts(shape, layout, dtype):
    for form in FORMS:
        x = laid(given(dist.get_rank(), shape, dtype), layout)
        ended(form, dist.group.WORLD.allreduce([x]))
        same(x, total(ReduceOp.SUM, [given(rank, shape, dtype) for rank in ranks()]))


@check([torch.float32, torch.float16], [2.0, "tensor"])
def premultiplies(dtype, factor):
    mine = dist.get_rank() + 1.0
    op = dist._make_nccl_premul_sum(torch.tensor(mine) if factor == "tensor" else mine)
    parts = [given(rank, (6,), dtype) * (rank + 1) for rank in ranks()]
    x = given(dist.get_rank(), (6,), dtype)
    dist.all_reduce(x, op)
    same(x, total(ReduceOp.SUM, parts))
    x = given(dist.get_rank(), (6,), dtype)
    dist.reduce(x, 0, op)
    same(x, total(ReduceOp.SUM, parts) if dist.get_rank() == 0 else given(dist.get_rank(), (6,), dtype))


@check(["method", "manager"], LAYOUTS)
def allreduces_together(form, layout):
    shapes = [(3, 4), (0,), (), (20_000,)]
    dtypes = [torch.float32, torch.float64, torch.int32, torch.float32] if form == "method" else [torch.float32] * 4
    xs = [laid(given(dist.get_rank(), *kind), layout) for kind in zip(shapes, dtypes, strict=True)]
    if form == "method":
        dist.group.WORLD.allreduce_coalesced(xs).wait()
    else:
        with dist._coalescing_manager():
            for x in xs:
                dist.all_reduce(x)
    for x, shape, dtype in zip(xs, shapes, dtypes, strict=True):
        same(x, total(ReduceOp.SUM, [given(rank, shape, dtype) for rank in ranks()]))


@check(["uint16", "uint32", "uint64"])
def averages_of_unsigned_integers(name):
    """torch has no division of them."""
    x = torch.tensor([3, 4 + dist.get_rank()]).to(getattr(torch, name))
    dist.group.WORLD.allreduce([x], ReduceOp.AVG).wait()
    assert x.tolist() == [3, sum(4 + rank for rank in ranks()) // len(ranks())]


@check(REDUCED, ["plain", "strided"])
def reduces(dtype, layout):
    for root in ranks():
        x = laid(given(dist.get_rank(), (3, 4), dtype), layout)
        dist.group.WORLD.reduce([x], root).wait()
        if dist.get_rank() == root:
            same(x, total(ReduceOp.SUM, [given(rank, (3, 4), dtype) for rank in ranks()]))


@check(
    [torch.float32, torch.bfloat16, torch.int64, torch.complex64], ["plain", "strided"], ["list", "single", "together"]
)
def scatters_reductions(dtype, layout, form):
    for op in (ReduceOp.SUM, ReduceOp.AVG) if dtype.is_floating_point else (ReduceOp.SUM,):
        inputs = [laid(given(dist.get_rank(), (2, 3), dtype, seed=to), layout) for to in ranks()]
        output = laid(torch.zeros((2, 3), dtype=dtype), layout)
        whole = laid(torch.cat(inputs), layout)
        if form == "list":
            dist.reduce_scatter(output, inputs, op)
        elif form == "single":
            dist.reduce_scatter_single(output, whole, op)
        else:
            with dist._coalescing_manager():
                dist.reduce_scatter_single(output, whole, op)
        same(output, total(op, [given(rank, (2, 3), dtype, seed=dist.get_rank()) for rank in ranks()]))


@check()
def scatters_reductions_of_unequal_sizes_and_in_place():
    me = dist.get_rank()
    output = torch.zeros(me + 1)
    dist.group.WORLD.reduce_scatter([output], [[given(me, (to + 1,), torch.float32) for to in ranks()]]).wait()
    same(output, total(ReduceOp.SUM, [given(rank, (me + 1,), torch.float32) for rank in ranks()]))
    whole = torch.cat([given(me, (300_000,), torch.float32, seed=to) for to in ranks()])
    output = whole[me * 300_000 : (me + 1) * 300_000]  # as FSDP does
    dist.reduce_scatter_single(output, whole)
    same(output, total(ReduceOp.SUM, [given(rank, (300_000,), torch.float32, seed=me) for rank in ranks()]))


@check(["float32", "float64"], [ReduceOp.SUM, ReduceOp.AVG])
def allreduces_sparse_tensors(name, op):
    dtype = getattr(torch, name)

    def part(rank):
        indices = torch.tensor([[0, rank, 3], [rank % 2, 1, 0]])
        return torch.sparse_coo_tensor(indices, given(rank, (3, 2), dtype) + 1, (5, 3, 2))

    x = part(dist.get_rank())
    dist.group.WORLD.allreduce([x], op).wait()
    assert x.is_sparse
    same(x.to_dense(), total(op, [part(rank).to_dense() for rank in ranks()]))


# -- copies -----------------------------------------------------------------------------------------


@check(COPIED, ["plain", "strided", "conjugated"])
def broadcasts(dtype, layout):
    for root in ranks():
        x = laid(given(dist.get_rank(), (3, 4), dtype), layout)
        dist.group.WORLD.broadcast([x], root).wait()
        same(x, given(root, (3, 4), dtype))


@check(SHAPES)
def broadcasts_shapes(shape):
    for form in FORMS:
        x = given(dist.get_rank(), shape, torch.float32)
        ended(form, dist.broadcast(x, sizes() - 1, async_op=True))
        same(x, given(sizes() - 1, shape, torch.float32))


@check(COPIED, ["plain", "strided", "conjugated"], ["list", "single", "together"])
def gathers_everywhere(dtype, layout, form):
    if form == "together" and dtype.itemsize == 1 and dtype.is_floating_point:
        layout = "plain"
    x = laid(given(dist.get_rank(), (2, 3), dtype), layout)
    expected = [given(rank, (2, 3), dtype) for rank in ranks()]
    if form == "list":
        row = [laid(torch.zeros((2, 3), dtype=dtype), layout) for _ in ranks()]
        dist.group.WORLD.allgather([row], [x]).wait()
        for output, value in zip(row, expected, strict=True):
            same(output, value)
        return
    output = laid(torch.zeros((2 * sizes(), 3), dtype=dtype), layout)
    if form == "single":
        dist.group.WORLD.all_gather_single(output, x).wait()
    else:
        other = torch.zeros(sizes(), dtype=torch.int64)
        dist.group.WORLD.all_gather_single_coalesced([output, other], [x, torch.tensor([dist.get_rank()])]).wait()
        same(other, torch.arange(sizes()))
    same(output.view(torch.uint8) if dtype.itemsize == 1 else output, cat(expected))


def cat(parts):
    return torch.cat([part.view(torch.uint8) if part.dtype.itemsize == 1 else part for part in parts])


@check(SHAPES)
def gathers_everywhere_shapes(shape):
    for form in FORMS:
        x = given(dist.get_rank(), shape, torch.float32)
        row = [torch.zeros(shape) for _ in ranks()]
        ended(form, dist.all_gather(row, x, async_op=True))
        for rank, output in enumerate(row):
            same(output, given(rank, shape, torch.float32))


@check()
def gathers_everywhere_unequal_sizes_and_in_place():
    row = [torch.zeros(rank) for rank in ranks()]
    dist.group.WORLD.allgather([row], [given(dist.get_rank(), (dist.get_rank(),), torch.float32)]).wait()
    for rank, output in enumerate(row):
        same(output, given(rank, (rank,), torch.float32))
    whole = torch.zeros(sizes() * 9)
    mine = whole[9 * dist.get_rank() : 9 * (dist.get_rank() + 1)].copy_(given(dist.get_rank(), (9,), torch.float32))
    dist.all_gather_single(whole, mine)
    same(whole, torch.cat([given(rank, (9,), torch.float32) for rank in ranks()]))
    lists = [[torch.zeros(3), torch.zeros(2, dtype=torch.int64)] for _ in ranks()]
    mine = [given(dist.get_rank(), (3,), torch.float32), given(dist.get_rank(), (2,), torch.int64)]
    dist.group.WORLD.allgather_coalesced(lists, mine).wait()
    for rank, (first, second) in enumerate(lists):
        same(first, given(rank, (3,), torch.float32))
        same(second, given(rank, (2,), torch.int64))


@check(COPIED, ["plain", "strided"], ["equal", "unequal"])
def gathers_and_scatters(dtype, layout, size):
    def count(rank):
        return rank + 1 if size == "unequal" else 4

    me = dist.get_rank()
    for root in ranks():
        x = laid(given(me, (count(me),), dtype), layout)
        row = [laid(torch.zeros(count(rank), dtype=dtype), layout) for rank in ranks()] if me == root else []
        dist.group.WORLD.gather([row] if row else [], [x], root).wait()
        for rank, output in enumerate(row):
            same(output, given(rank, (count(rank),), dtype))
        output = laid(torch.zeros(count(me), dtype=dtype), layout)
        parts = [laid(given(root, (count(to),), dtype, seed=to), layout) for to in ranks()] if me == root else []
        dist.group.WORLD.scatter([output], [parts] if parts else [], root).wait()
        same(output, given(root, (count(me),), dtype, seed=me))


@check(COPIED, ["plain", "strided"])
def gathers_in_one(dtype, layout):
    xs = [given(rank, (2, 3), dtype) for rank in ranks()]
    into = laid(torch.zeros(2 * sizes(), 3, dtype=dtype), layout)
    opts = dist.GatherOptions()
    opts.rootRank = sizes() - 1
    is_root = dist.get_rank() == opts.rootRank
    output = into if is_root else torch.empty(0, dtype=dtype)
    dist.group.WORLD.gather_single(output, laid(xs[dist.get_rank()], layout), opts).wait()
    if is_root:
        same(cat([into]), cat(xs))


@check()
def scatters_when_the_output_of_the_root_is_an_input():
    parts = [given(0, (4,), torch.float32, seed=to) for to in ranks()]
    output = parts[-1] if dist.get_rank() == 0 else torch.zeros(4)
    dist.scatter(output, parts if dist.get_rank() == 0 else None, 0)
    same(output, given(0, (4,), torch.float32, seed=dist.get_rank()))


@check(COPIED, ["plain", "strided"], ["list", "single", "rows"])
def exchanges(dtype, layout, form):
    def rows(source, dest):
        return 2 if form == "single" else source + 2 * dest

    me = dist.get_rank()
    inputs = [given(me, (rows(me, to), 3), dtype, seed=to) for to in ranks()]
    expected = [given(rank, (rows(rank, me), 3), dtype, seed=me) for rank in ranks()]
    if form == "list":
        outputs = [laid(torch.zeros_like(x), layout) for x in expected]
        dist.group.WORLD.alltoall(outputs, [laid(x, layout) for x in inputs]).wait()
        for output, x in zip(outputs, expected, strict=True):
            same(output, x)
        return
    into, out = [len(x) for x in expected], [len(x) for x in inputs]
    output = laid(torch.zeros((sum(into), 3), dtype=dtype), layout)
    given_ = laid(cat(inputs).view(dtype), layout)
    split = ([], []) if form == "single" else (into, out)
    dist.group.WORLD.all_to_all_single(output, given_, *split).wait()
    same(output.contiguous().view(torch.uint8) if dtype.itemsize == 1 else output, cat(expected))


# -- messages and objects ---------------------------------------------------------------------------


@check(COPIED, ["plain", "strided"])
def passes(dtype, layout):
    if sizes() == 1:
        raise AssertionError("no other rank")
    me, after, before = dist.get_rank(), (dist.get_rank() + 1) % sizes(), (dist.get_rank() - 1) % sizes()
    pg = dist.group.WORLD
    outputs = [laid(torch.zeros((2, 3), dtype=dtype), layout) for _ in range(2)]
    sent = [pg.send([laid(given(me, (2, 3), dtype, seed=tag), layout)], after, tag) for tag in (5, 6)]
    received = [pg.recv([outputs[tag - 5]], before, tag) for tag in (6, 5)]  # in the other order
    for work in sent + received:
        work.wait()
    for tag, output in zip((5, 6), outputs, strict=True):
        same(output, given(before, (2, 3), dtype, seed=tag))
    assert received[0]._source_rank() == before


@check(["batch", "coalesced"])
def passes_batches(form):
    me, after, before = dist.get_rank(), (dist.get_rank() + 1) % sizes(), (dist.get_rank() - 1) % sizes()
    into = [torch.zeros(400_000), torch.zeros(3)]
    out = [given(me, x.shape, torch.float32) for x in into]
    if form == "batch":
        ops = [dist.P2POp(dist.isend, x, after) for x in out] + [dist.P2POp(dist.irecv, x, before) for x in into]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    else:
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            for x, y in zip(out, into, strict=True):
                dist.isend(x, after)
                dist.irecv(y, before)
        manager.wait()
    for x in into:
        same(x, given(before, x.shape, torch.float32))


@check()
def passes_objects():
    found = [None] * sizes()
    dist.all_gather_object(found, {"rank": dist.get_rank(), "more": "x" * 10 * dist.get_rank()})
    assert [x["rank"] for x in found] == list(ranks())
    told = [("of", 0)] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(told)
    assert told == [("of", 0)]
    mine = [None]
    dist.scatter_object_list(mine, [[rank] * rank for rank in ranks()] if dist.get_rank() == 0 else None)
    assert mine == [[dist.get_rank()] * dist.get_rank()]


# -- cases ------------------------------------------------------------------------------------------


def values():
    """Every call gives the values that it must."""
    for name, act in checks.items():
        try:
            act()
        except Exception as error:
            error.add_note(name)
            raise


class Sabotaged:
    """Calls that end at once and do nothing."""

    def __init__(self, calls, runner):
        self._calls = calls
        self._runner = runner

    def __getattr__(self, name):
        found = getattr(self._calls, name)
        return self._do_nothing if callable(found) else found

    def _do_nothing(self, *_):
        return self._runner.done(None)


def sabotaged():
    """The checks fail if the calls do nothing, at least at one rank; those of no elements cannot."""
    pg = dist.group.WORLD
    right = pg._calls
    wrong = Sabotaged(right, pg._comm._core.member.runner)
    passed = []
    for name, act in checks.items():
        pg._calls = wrong
        try:
            act()
        except (AssertionError, EOFError):  # that of an object of no bytes
            has_failed = True
        else:
            has_failed = False
        pg._calls = right
        failures = torch.tensor(int(has_failed))
        dist.all_reduce(failures)
        if not failures:
            passed.append(name)
    assert len(checks) > 300
    assert passed
    assert all("(0,)" in name for name in passed), passed


# -- what else a group promises ---------------------------------------------------------------------


def by_a_deprecated_name(pg, size):
    with warnings.catch_warnings(action="ignore"):
        return dist.all_gather_into_tensor(torch.zeros(pg.size() * size), torch.zeros(size), group=pg, async_op=True)


MISMATCHES = {
    "allreduce of other sizes": lambda pg, odd: pg.allreduce([torch.zeros(3 + odd)]),
    "allreduce of other dtypes": lambda pg, odd: pg.allreduce(
        [torch.zeros(3, dtype=torch.int32 if odd else torch.int64)]
    ),
    "allreduce by other operations": lambda pg, odd: pg.allreduce(
        [torch.zeros(3)], ReduceOp.MAX if odd else ReduceOp.MIN
    ),
    "long allreduce of other sizes": lambda pg, odd: pg.allreduce([torch.zeros(3_000_000 + odd)]),
    "reduce to other roots": lambda pg, odd: pg.reduce([torch.zeros(3)], int(odd)),
    "broadcast of other sizes": lambda pg, odd: pg.broadcast([torch.zeros(3 + odd)], 0),
    "allgather of other sizes": lambda pg, odd: pg.all_gather_single(
        torch.zeros(pg.size(), 3 + odd), torch.zeros(3 + odd)
    ),
    "allgather of other sizes by a deprecated name": lambda pg, odd: by_a_deprecated_name(pg, 3 + odd),
    "gather of other sizes": lambda pg, odd: pg.gather(
        [torch.zeros(3) for _ in range(pg.size())] if pg.rank() == 0 else [], torch.zeros(3 + odd), 0
    ),
    "scatter of other sizes": lambda pg, odd: pg.scatter(
        [torch.zeros(3 + odd)], [torch.zeros(3) for _ in range(pg.size())] if pg.rank() == 0 else [], 0
    ),
    "alltoall of other sizes": lambda pg, odd: pg.alltoall(
        [torch.zeros(3) for _ in range(pg.size())], [torch.zeros(3 + odd) for _ in range(pg.size())]
    ),
    "other calls": lambda pg, odd: pg.barrier() if odd else pg.allreduce([torch.zeros(3)]),
    "other calls that have been made before": lambda pg, odd: after_equal_ones(pg, odd),
}


def after_equal_ones(pg, odd):
    """Short calls that are repeated begin in another way than the first ones."""
    for _ in range(3):
        dist.all_reduce(torch.zeros(3), group=pg)
        dist.barrier(pg)
    if odd:
        return dist.barrier(pg, async_op=True)
    return dist.all_reduce(torch.zeros(3), group=pg, async_op=True)


def mismatches():
    """Calls that differ at one rank are an error at every rank, which names both; the other groups go on."""
    for name, call in MISMATCHES.items():
        pg = dist.new_group()
        work = call(pg, dist.get_rank() == sizes() - 1)
        future = work.get_future()
        error = caught(asyncoll.MismatchError, work.wait, SECONDS)
        assert isinstance(error, dist.DistBackendError), name
        for file in ("typing_extensions.py", "distributed_c10d.py"):  # the user's lines are told, and not torch's
            assert file not in str(error), error
        assert isinstance(work.exception(), asyncoll.MismatchError), name
        assert work.is_completed(), name
        assert not work.is_success(), name
        assert "MismatchError" in str(caught(RuntimeError, future.wait)), name
        assert "MismatchError" in str(caught(RuntimeError, future.then(lambda f: f.value()).wait)), name
        assert work.get_future_result().wait() == 2, name
        later = pg.barrier()
        caught(asyncoll.MismatchError, later.wait, SECONDS)
        dist.barrier()


def overdue():
    """A call that is not over within the timeout of its group, or of its options, is an error that names who misses."""
    for limited in (True, False):
        pg = dist.new_group(timeout=timedelta(seconds=0.3 if limited else 60))
        if dist.get_rank() != 1:
            opts = dist.AllreduceOptions()
            if not limited:
                opts.timeout = timedelta(seconds=0.3)
            error = caught(asyncoll.DeadlineError, pg.allreduce([torch.zeros(3)], opts).wait)
            assert isinstance(error, TimeoutError)
            assert isinstance(error, dist.DistBackendError)
            assert error.missing == (1,), error
            assert "rank 1 (host" in str(error), error
            assert "the process group timed out" in str(error), error
            assert pg.get_error() == torch._C._distributed_c10d.ErrorType.TIMEOUT
        dist.barrier()
    pg = dist.new_group()
    pg.set_timeout(timedelta(seconds=0.3))
    assert pg.get_timeout() == timedelta(seconds=0.3)
    if dist.get_rank() != 1:
        assert caught(TimeoutError, pg.barrier().wait).missing == (1,)
    dist.barrier()


def waits():
    """A wait that is too short raises an error, and the call goes on."""
    x = torch.ones(3)
    if dist.get_rank() == 0:
        work = dist.all_reduce(x, async_op=True)
        error = caught(TimeoutError, work.wait, timedelta(seconds=0.05))
        assert isinstance(error, dist.DistBackendError)
        assert not work.is_completed()
        assert not work.is_success()
        assert work.exception() is None
    dist.group.WORLD.monitored_barrier(SECONDS)
    if dist.get_rank() != 0:
        work = dist.all_reduce(x, async_op=True)
    assert work.wait(SECONDS)
    assert work.wait()
    assert work.result() == [x]
    assert work.get_future().wait() == [x]
    assert (x == sizes()).all()
    caught(RuntimeError, work.source_rank)


def callbacks():
    """Callbacks of futures make further calls, and wait for them; those of C++ get values and errors."""
    xs = [torch.ones(2) for _ in range(4)]

    def again(future, depth):
        dist.all_reduce(xs[depth])
        return future.value()[0] + xs[depth]

    future = dist.all_reduce(xs[0], async_op=True).get_future()
    assert (future.then(lambda f: again(f, 1)).wait() == 2 * sizes()).all()
    works = [dist.all_reduce(torch.ones(50_000), async_op=True) for _ in range(20)]
    sums = torch.futures.collect_all([work.get_future() for work in works]).wait()
    assert all((each.value()[0] == sizes()).all() for each in sums)
    empty = dist.barrier(async_op=True).get_future()
    assert empty.wait() == []
    without_new_threads()
    with asyncoll.torch.work._making:
        child = os.fork()
        if not child:
            os._exit(int(asyncoll.torch.work._making.locked()))
    assert os.waitpid(child, 0)[1] == 0
    for _ in range(2_000):
        dist.all_reduce(torch.ones(8), async_op=True)
        dist.all_reduce(torch.ones(8), async_op=True).get_future()
    dist.barrier()


def without_new_threads():
    """Futures are completed also if the system starts no more threads: by those there are, or by the caller."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    pool, ended, start = FutureThreads(), [threading.Event() for _ in range(3)], threading.Thread.start
    busy, go_on = threading.Event(), threading.Event()
    try:
        threading.Thread.start = refuse
        pool.run(ended[0].set)
        assert ended[0].is_set()
        threading.Thread.start = start
        pool.run(lambda: busy.set() or go_on.wait())
        busy.wait()
        threading.Thread.start = refuse
        for event in ended[1:]:
            pool.run(event.set)
        assert not ended[1].is_set()
        go_on.set()
        assert all(event.wait(60) for event in ended)
    finally:
        threading.Thread.start = start


def usage():
    """What cannot be is an error at once, at its rank, and the group goes on."""
    pg = dist.group.WORLD
    x, size = torch.ones(3), sizes()
    for act in (
        lambda: pg.broadcast([x], size),
        lambda: pg.allreduce([torch.ones(3, dtype=torch.bool)], ReduceOp.AVG),
        lambda: pg.allreduce([torch.ones(3).to(torch.float8_e5m2)]),
        lambda: pg.allreduce([torch.ones(1).expand(3)]),
        lambda: pg.allreduce([torch.ones(3, device="meta")]),
        lambda: pg.allgather([[x]] if size > 1 else [[x, x]], [x]),
        lambda: pg.all_gather_single(torch.ones(3 * size + 1), x),
        lambda: pg.all_gather_single(torch.ones(3 * size, dtype=torch.int32), x),
        lambda: pg.reduce_scatter_single(x, torch.ones(3 * size + 1)),
        lambda: pg.all_to_all_single(torch.ones(size), torch.ones(size), [1] * size, [2] * size),
        lambda: pg.send([x], pg.rank()),
        lambda: pg.recv([x], size),
        lambda: pg.allreduce([torch.ones(3).to_sparse()], ReduceOp.MAX),
        lambda: pg.allreduce([x, x]),
        lambda: pg.allreduce_coalesced([]),
        lambda: pg.alltoall([], []),
        lambda: pg.all_to_all_single(torch.tensor(0.0), torch.tensor(1.0), [], []),
        lambda: pg.allgather([[torch.zeros(3)] * size], [x]),
        lambda: pg.allgather([[torch.zeros(6)[::2]] * size], [x]),
        lambda: pg.allgather([list(torch.zeros(size + 2).unfold(0, 3, 1))], [x]),
        lambda: pg.set_timeout(timedelta(0)),
        lambda: pg.set_timeout(timedelta(seconds=-1)),
    ):
        error = caught(asyncoll.UsageError, act)
        assert isinstance(error, dist.DistBackendError)
    error = caught(asyncoll.UsageError, lambda: pg.allgather([[torch.zeros(2) for _ in ranks()]], [x]))
    expected = f"all_gather: output {pg.rank()} must have as many elements as the input of this rank: 2 is not 3"
    assert str(error) == expected, error
    rows = torch.zeros(4, size)
    pg.allgather([list(rows.t())], [torch.full((4,), float(pg.rank()))]).wait()  # outputs in the gaps of each other
    assert torch.equal(rows, torch.arange(float(size)).expand(4, size))
    pg.allreduce([x]).wait()
    assert (x == size).all()


def identity():
    """A group has the names, numbers and other properties of torch's groups."""
    pg = dist.group.WORLD
    assert (pg.rank(), pg.size(), pg.name()) == (dist.get_rank(), sizes(), "asyncoll")
    assert dist.get_backend() == "asyncoll"
    assert pg._device_types == [torch.device("cpu"), torch.device("cuda")]
    assert pg._get_backend(torch.device("cpu")) is pg
    assert pg._get_backend(torch.device("cuda")) is pg
    half = dist.new_group([0, 1], group_desc="two")
    before = pg._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1))
    assert pg._get_sequence_number_for_group() == before + 1
    if dist.get_rank() < 2:
        assert half.group_name == dist.distributed_c10d._get_process_group_name(half)
        assert half.group_desc == "two"
        assert dist.ProcessGroup.unbox(half.boxed()) is half
        work = half.barrier()
        assert dist.distributed_c10d.Work.unbox(work.boxed()) is work
        work.wait()
    mine = pg.split_group([sizes() - 1, 0])
    if dist.get_rank() in (0, sizes() - 1):
        x = torch.ones(1)
        mine.allreduce([x]).wait()
        assert (mine.rank(), x.item()) == (int(dist.get_rank() == 0), 2)
    else:
        assert mine is None
    pg.bound_device_id = torch.device("cpu:0")
    assert pg.bound_device_id == torch.device("cpu:0")
    pg.bound_device_id = None
    pg.get_group_store().set(f"from {dist.get_rank()}", "here")
    dist.barrier()
    assert pg.get_group_store().get("from 0") == b"here"


def allocated():
    """Memory is used again, and there is never more of it than was in use at one time."""

    class Memory:
        def __init__(self):
            self.blocks = weakref.WeakValueDictionary()
            self.count = 0

        def empty(self, nbytes, dtype):
            block = self.blocks[self.count] = np.empty(nbytes, dtype)
            self.count += 1
            return block

    memory = Memory()
    pool = RegisteredPool(memory)
    most = 0
    for turn in range(100):
        tensors = [pool.allocate(10 + size, torch.float32) for size in (turn, 3, turn % 7, 3)]
        most = max(most, sum(x.nbytes for x in tensors))
        del tensors
        assert sum(block.nbytes for block in memory.blocks.values()) <= most
    before = memory.count
    for _ in range(9):
        tensors = [pool.allocate(13, torch.float32) for _ in range(2)]
        del tensors
    assert memory.count == before


def monitored():
    """The monitored barrier names the ranks that miss, and leaves the group usable."""
    pg = dist.group.WORLD
    pg.monitored_barrier(SECONDS)
    for wait_all_ranks in (False, True):
        if dist.get_rank() == 0:
            error = caught(RuntimeError, pg.monitored_barrier, timedelta(seconds=0.2), wait_all_ranks)
            names = ", ".join(map(str, range(1, sizes())))
            assert (f"Ranks {names} failed" if wait_all_ranks else "Rank 1 failed") in str(error), error
        dist.barrier()
        if dist.get_rank() != 0:
            assert "Rank" in str(caught(RuntimeError, pg.monitored_barrier, timedelta(seconds=5)))
        dist.barrier()
    pg.monitored_barrier(SECONDS)


def aborted():
    """`abort`, in another thread, ends the calls of a group under way at all ranks."""
    pg = dist.new_group()
    if dist.get_rank() == 0:
        thread = threading.Thread(target=pg.abort)
        thread.start()
        thread.join()
        caught(dist.DistBackendError, lambda: pg.barrier().wait())
    else:
        error = caught(asyncoll.AbortedError, lambda: pg.allreduce([torch.ones(3)]).wait())
        assert error.rank == 0
        assert isinstance(error, dist.DistBackendError)
    dist.barrier()


def recorded():
    """Profilers have a record of each call, from its beginning to its end, with the shapes of its inputs."""
    with torch.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(3, 5))
        dist.broadcast(torch.ones(7), 0, async_op=True).wait()
        caught(asyncoll.UsageError, lambda: dist.reduce(torch.ones(1).expand(3), dist.get_rank()))
    found = {event.name: event for event in profile.events() if event.name.startswith("asyncoll:")}
    assert found.keys() == {"asyncoll:all_reduce", "asyncoll:broadcast", "asyncoll:reduce"}, found
    assert not found.pop("asyncoll:reduce").is_async  # it could not begin
    assert found["asyncoll:all_reduce"].input_shapes == [[3, 5]]
    assert all(event.is_async for event in found.values())


def hooked():
    """Hooks run around each call with its tensors, its root and its Work, as those of torch do around Gloo's."""
    me, size = dist.get_rank(), sizes()
    x, y, row, other, wide = torch.ones(2), torch.zeros(2), *lists(2), torch.zeros(2 * size)
    following, before = (me + 1) % size, (me - 1) % size
    pg, seen, ended = dist.new_group(), [], []
    pg.register_pre_hook(1, seen.append)
    pg.register_post_hook(1, ended.append)
    opts = dist.AllreduceCoalescedOptions()
    for call, expected in (
        (lambda: dist.all_reduce(x, group=pg), ("ALLREDUCE", [x], [], -1)),
        (lambda: pg.allreduce_coalesced([x, y], opts).wait(), ("ALLREDUCE", [x, y], [], -1)),
        (lambda: dist.reduce(x, size - 1, group=pg), ("REDUCE", [x], [], size - 1)),
        (lambda: dist.broadcast(x, size - 1, group=pg), ("BROADCAST", [x], [], size - 1)),
        (lambda: dist.all_gather(row, x, group=pg), ("ALLGATHER", [x], row, -1)),
        (lambda: pg.all_gather_single(wide, x).wait(), ("ALLGATHER", [x], [wide], -1)),
        (lambda: dist.reduce_scatter(x, row, group=pg), ("REDUCE_SCATTER", row, [x], -1)),
        (lambda: pg.reduce_scatter_single(x, wide).wait(), ("REDUCE_SCATTER", [wide], [x], -1)),
        (
            lambda: dist.gather(x, row if me == 0 else None, group=pg),
            ("GATHER", [x], row if me == 0 else [], 0),
        ),
        (
            lambda: dist.scatter(x, row if me == 0 else None, group=pg),
            ("SCATTER", row if me == 0 else [], [x], 0),
        ),
        (lambda: dist.all_to_all(row, other, group=pg), ("ALLTOALL", other, row, -1)),
        (lambda: pg.barrier().wait(), ("BARRIER", [], [], -1)),
    ):
        call()
        (name, _, inputs, outputs, root, number), (after, _, work, same) = seen.pop(), ended.pop()
        assert (name.name, root) == (expected[0], expected[3]), expected
        assert list(map(id, inputs)) == list(map(id, expected[1])), expected
        assert list(map(id, outputs)) == list(map(id, expected[2])), expected
        assert (after, same, work.is_completed()) == (name, number, True), expected
    for work in [dist.isend(x, following, pg), dist.irecv(y, before, pg)]:
        work.wait()
    assert [(each.name.name, each.root) for each in seen] == [("SEND", following), ("RECV", before)]
    assert list(map(id, [*seen[0].input_tensors, *seen[1].output_tensors])) == [id(x), id(y)]
    pg.unregister_pre_hook(1)
    pg.unregister_post_hook(1)
    pg.barrier().wait()
    assert (len(seen), len(ended)) == (2, 2)
    refused_by_a_hook(pg)


def lists(count):
    return [[torch.zeros(2) for _ in ranks()] for _ in range(count)]


def refused_by_a_hook(pg):
    """The error of a hook leaves the call at its rank, and the other ranks are told."""

    def refuse(call):
        raise ValueError("no more")

    if dist.get_rank() == 1:
        pg.register_pre_hook(1, refuse)
        caught(ValueError, pg.allreduce, [torch.ones(2)])
    else:
        error = caught(asyncoll.MismatchError, pg.allreduce([torch.ones(2)]).wait, SECONDS)
        assert "ValueError: no more" in str(error), error
    dist.barrier()


def not_a_number():
    """With TORCH_DIST_NAN_CHECK=1 a rank that gives NaN to a call raises an error, and the other ranks are told."""
    os.environ["TORCH_DIST_NAN_CHECK"] = "1"
    try:
        groups = [dist.new_group() for _ in range(9)]
    finally:
        del os.environ["TORCH_DIST_NAN_CHECK"]
    bad = dist.get_rank() == 1
    nan = torch.tensor([1.0, torch.nan]) if bad else torch.ones(2)
    few, fewer = nan.bfloat16(), nan.to(torch.float8_e4m3fn)
    row = [torch.zeros(2) for _ in ranks()]
    for group, call in zip(
        groups,
        (
            lambda pg: pg.allreduce([nan]),
            lambda pg: pg.allreduce([few]),
            lambda pg: pg.allreduce([torch.complex(nan, nan)]),
            lambda pg: pg.broadcast([fewer], 1),
            lambda pg: pg.allreduce_coalesced([torch.ones(3), nan]),
            lambda pg: pg.reduce_scatter([torch.ones(2)], [[*row[1:], nan]]),
            lambda pg: pg.allgather([row], [nan]),
            lambda pg: pg.gather([row] if dist.get_rank() == 0 else [], [nan]),
            lambda pg: pg.alltoall(row, [*[torch.zeros(2) for _ in row[1:]], nan]),
        ),
        strict=True,
    ):
        if bad:
            error = caught(asyncoll.UsageError, call, group)
            assert isinstance(error, dist.DistBackendError)
        else:
            error = caught(asyncoll.MismatchError, lambda group=group, call=call: ended_in(group, call(group)))
        assert "NaN found in input tensor" in str(error), error
        assert "rank 1" in str(error), error
        dist.barrier()
    overwritten(nan)


def ended_in(group, work):
    """Wait for the call, and for the next one: a rank may be done with its part before it hears of the refusal."""
    work.wait(SECONDS)
    group.barrier().wait(SECONDS)


def overwritten(nan):
    """What a call only writes may hold NaN, and so may what an unchecked group sends."""
    os.environ["TORCH_DIST_NAN_CHECK"] = "1"
    try:
        pg = dist.new_group()
    finally:
        del os.environ["TORCH_DIST_NAN_CHECK"]
    pg.broadcast([nan], 0).wait()
    assert (nan == 1).all()
    row = [torch.full((2,), torch.nan) for _ in ranks()]
    pg.allgather([row], [nan]).wait()
    assert all((each == 1).all() for each in row)
    pg.allreduce([torch.full((2,), torch.inf)]).wait()
    dist.all_reduce(torch.full((2,), torch.nan))


def joins():
    """DDP with uneven inputs (`Join`), a sparse gradient, and buffers: replicas stay equal."""
    torch.manual_seed(dist.get_rank())
    layers = [
        torch.nn.Embedding(10, 4, sparse=True),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 2),
        torch.nn.BatchNorm1d(2),
    ]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), gradient_as_bucket_view=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for _ in range(3 + 2 * dist.get_rank()):
            model(torch.randint(0, 10, (6, 2))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for parameter in model.parameters():
        parts = [torch.zeros_like(parameter) for _ in ranks()]
        dist.all_gather(parts, parameter)
        assert all(torch.equal(part, parts[0]) for part in parts)


def mixed():
    """A group of several devices: its own calls for the CPU, and the backend that was named for the other one."""
    dist.destroy_process_group()
    dist.init_process_group("cpu:asyncoll,cuda:gloo", timeout=SECONDS)
    for pg in (dist.group.WORLD, dist.new_group()):
        x = torch.ones(3)
        dist.all_reduce(x, group=pg)
        other = pg._get_backend(torch.device("cuda"))
        assert isinstance(other, dist.ProcessGroupGloo)
        assert pg._get_backend(torch.device("cuda")) is other
        other.allreduce([x]).wait()
        assert (x == sizes() ** 2).all()
        assert pg._device_types == [torch.device("cpu"), torch.device("cuda")]
        caught(asyncoll.UsageError, lambda pg=pg: pg.allreduce([torch.ones(3, device="meta")]))


def compiled():
    """Calls in functions of torch.compile, in a graph and between graphs. The methods of groups are not compiled."""
    import torch.distributed._functional_collectives as functional

    def step(x):
        y = functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1
        work = dist.all_reduce(y, async_op=True)  # torch.compile does not take it into a graph
        work.wait()
        return y

    x = torch.ones(4)
    assert torch.equal(torch.compile(step, backend="eager")(x), torch.full((4,), (2.0 * sizes() + 1) * sizes()))


def main():
    warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0", RuntimeWarning)  # of torch.compile
    torch.sparse.check_sparse_tensor_invariants.enable()
    dist.init_process_group("asyncoll", timeout=SECONDS)
    for case in sys.argv[1:]:
        globals()[case]()
    dist.destroy_process_group()
    print("passed")


if __name__ == "__main__":
    main()
