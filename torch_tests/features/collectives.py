"""Collectives, messages, objects, groups."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.nn import functional as differentiable
from torch.testing import assert_close

from torch_tests.features import feature

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)


def here() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def values(rank: int, dtype: torch.dtype = torch.float32, count: int = 5) -> Tensor:
    return (torch.arange(count) % 3 + rank + 1).to(dtype)


def each(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.stack([values(rank, dtype) for rank in range(size)])


@feature()
def reductions(backend: str) -> None:
    _, size = here()
    for dtype in FLOATS + INTEGERS:
        rows = each(size, torch.int64)
        for op, expected in (
            (dist.ReduceOp.SUM, rows.sum(0)),
            (dist.ReduceOp.PRODUCT, rows.prod(0)),
            (dist.ReduceOp.MIN, rows.amin(0)),
            (dist.ReduceOp.MAX, rows.amax(0)),
        ):
            for async_op in (False, True):
                x = values(dist.get_rank(), dtype)
                work = dist.all_reduce(x, op, async_op=async_op)
                if work is not None:
                    work.wait()
                assert_close(x, expected.to(dtype))


@feature(sabotage="bytes")
def bitwise_reductions(backend: str) -> None:
    rank, size = here()
    for op, function in (
        (dist.ReduceOp.BAND, torch.bitwise_and),
        (dist.ReduceOp.BOR, torch.bitwise_or),
        (dist.ReduceOp.BXOR, torch.bitwise_xor),
    ):
        x = values(rank, torch.int32)
        expected = values(0, torch.int32)
        for other in range(1, size):
            expected = function(expected, values(other, torch.int32))
        dist.all_reduce(x, op)
        assert_close(x, expected)


@feature()
def averages(backend: str) -> None:
    rank, size = here()
    x = values(rank)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert_close(x, each(size).mean(0))


@feature(sabotage="bytes")
def averages_of_integers(backend: str) -> None:
    """Rounded towards 0."""
    rank, size = here()
    for sign in (1, -1):
        x = sign * values(rank, torch.int64) * 3
        dist.all_reduce(x, dist.ReduceOp.AVG)
        assert_close(x, sign * (each(size, torch.int64).sum(0) * 3).div(size, rounding_mode="trunc"))


@feature()
def scaled_sums(backend: str) -> None:
    rank, size = here()
    x = values(rank)
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    assert_close(x, each(size).sum(0) / 2)


@feature()
def complex_numbers(backend: str) -> None:
    rank, size = here()
    x = torch.complex(values(rank), -values(rank))
    dist.all_reduce(x)
    assert_close(x, torch.complex(each(size).sum(0), -each(size).sum(0)))


@feature()
def copies(backend: str) -> None:
    rank, size = here()
    for async_op in (False, True):
        works = []
        broadcast = values(rank)
        works.append(dist.broadcast(broadcast, size - 1, async_op=async_op))
        rows = [torch.zeros(5) for _ in range(size)]
        works.append(dist.all_gather(rows, values(rank), async_op=async_op))
        table = torch.zeros(size * 5)
        works.append(dist.all_gather_into_tensor(table, values(rank), async_op=async_op))
        gathered = [torch.zeros(5) for _ in range(size)] if rank == 1 else None
        works.append(dist.gather(values(rank), gathered, dst=1, async_op=async_op))
        mine = torch.zeros(5)
        parts = [values(other) for other in range(size)] if rank == 0 else None
        works.append(dist.scatter(mine, parts, src=0, async_op=async_op))
        for work in works:
            if work is not None:
                work.wait()
        assert_close(broadcast, values(size - 1))
        assert_close(torch.stack(rows), each(size))
        assert_close(table.view(size, 5), each(size))
        if gathered:
            assert_close(torch.stack(gathered), each(size))
        assert_close(mine, values(rank))


@feature()
def reduce_to_one(backend: str) -> None:
    rank, size = here()
    x = values(rank)
    dist.reduce(x, dst=size - 1)
    if rank == size - 1:
        assert_close(x, each(size).sum(0))


@feature()
def reduce_scatters(backend: str) -> None:
    rank, size = here()
    expected = sum(range(1, size + 1)) * (torch.arange(4.0) + rank)
    given = [(rank + 1) * (torch.arange(4.0) + other) for other in range(size)]
    output = torch.zeros(4)
    dist.reduce_scatter(output, list(given))
    assert_close(output, expected)
    output = torch.zeros(4)
    dist.reduce_scatter_tensor(output, torch.cat(given))
    assert_close(output, expected)


@feature()
def all_to_alls(backend: str) -> None:
    rank, size = here()
    output = torch.zeros(size)
    dist.all_to_all_single(output, torch.arange(size) + 10.0 * rank)
    assert_close(output, rank + 10.0 * torch.arange(size))
    sizes = [(rank + other) % 3 for other in range(size)]  # what each pair exchanges, the same both ways
    output = torch.zeros(sum(sizes))
    dist.all_to_all_single(output, torch.full((sum(sizes),), float(rank)), sizes, sizes)
    assert_close(output, torch.cat([torch.full((n,), float(other)) for other, n in enumerate(sizes)]))
    outputs = [torch.zeros(2) for _ in range(size)]
    dist.all_to_all(outputs, [torch.full((2,), 10.0 * rank + other) for other in range(size)])
    assert_close(torch.stack(outputs)[:, 0], rank + 10.0 * torch.arange(size))


@feature()
def strided_tensors(backend: str) -> None:
    """A column of a table."""
    rank, size = here()
    table = torch.zeros(6, 4)
    columns = table[:, 1]
    columns += rank + 1
    dist.all_reduce(columns)
    expected = torch.zeros(6, 4)
    expected[:, 1] = sum(range(1, size + 1))
    assert_close(table, expected)


@feature()
def small_tensors(backend: str) -> None:
    """Tensors of no dimension, and without elements."""
    rank, size = here()
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    assert_close(scalar, torch.tensor(float(sum(range(size)))))
    dist.all_reduce(torch.empty(0))


@feature()
def messages(backend: str) -> None:
    rank, size = here()
    following, previous = (rank + 1) % size, (rank - 1) % size
    for count in (3, 100_000):
        got, tagged = torch.zeros(count), torch.zeros(count)
        works = [
            dist.isend(torch.full((count,), rank + 0.5), following, tag=2),
            dist.isend(torch.full((count,), rank + 0.25), following, tag=1),
            dist.irecv(tagged, previous, tag=1),
            dist.irecv(got, previous, tag=2),
        ]
        for work in works:
            work.wait()
        assert_close(got, torch.full((count,), previous + 0.5))
        assert_close(tagged, torch.full((count,), previous + 0.25))


@feature()
def batched_messages(backend: str) -> None:
    rank, size = here()
    got = [torch.zeros(4) for _ in range(size)]
    others = [other for other in range(size) if other != rank]
    operations = [dist.P2POp(dist.isend, torch.full((4,), float(rank)), other) for other in others]
    operations += [dist.P2POp(dist.irecv, got[other], other) for other in others]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for other in others:
        assert_close(got[other], torch.full((4,), float(other)))


@feature()
def messages_from_any_rank(backend: str) -> None:
    rank, size = here()
    for count in (2, 50_000):
        if rank == 0:
            seen = set()
            for _ in range(size - 1):
                got = torch.zeros(count)
                source = dist.recv(got)
                assert_close(got, torch.full((count,), float(source)))
                seen.add(source)
            assert seen == set(range(1, size))
        else:
            dist.send(torch.full((count,), float(rank)), 0)
        dist.barrier()


@feature(sabotage="bytes")
def objects(backend: str) -> None:
    rank, size = here()
    every: list[Any] = [None] * size
    dist.all_gather_object(every, {"rank": rank, "text": "x" * 1000 * rank})
    assert every == [{"rank": other, "text": "x" * 1000 * other} for other in range(size)]
    told = [("a", 1), None] if rank == 0 else [None, None]
    dist.broadcast_object_list(told, src=0)
    assert told == [("a", 1), None]
    gathered: Any = [None] * size if rank == 0 else None
    dist.gather_object(rank, gathered, dst=0)
    assert rank or gathered == list(range(size))
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {other}" for other in range(size)] if rank == 0 else None, src=0)
    assert mine == [f"for {rank}"]
    letter = ["letter", rank]
    if rank == 0:
        dist.send_object_list(letter, dst=1)
    elif rank == 1:
        dist.recv_object_list(letter, src=0)
        assert letter == ["letter", 0]


@feature()
def groups(backend: str) -> None:
    rank, size = here()
    halves = [list(range(0, size, 2)), list(range(1, size, 2))]
    made = [dist.new_group(ranks) for ranks in halves]
    ranks, group = halves[rank % 2], made[rank % 2]
    assert dist.get_process_group_ranks(group) == ranks
    for _ in range(3):
        x = values(rank)
        dist.all_reduce(x, group=group)
        assert_close(x, torch.stack([values(other) for other in ranks]).sum(0))
    x = values(rank)
    dist.broadcast(x, src=ranks[-1], group=group)
    assert_close(x, values(ranks[-1]))
    x = values(rank)
    dist.all_reduce(x)
    assert_close(x, each(size).sum(0))
    dist.destroy_process_group(group)
    everyone = dist.new_group(timeout=timedelta(seconds=60), use_local_synchronization=True)
    x = values(rank)
    dist.all_reduce(x, group=everyone)
    assert_close(x, each(size).sum(0))


@feature(sizes=(4,))
def subgroups(backend: str) -> None:
    rank, _ = here()
    mine, _ = dist.new_subgroups(2)
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=mine)
    assert_close(x, torch.tensor([1.0 if rank < 2 else 5.0]))


@feature()
def coalescing(backend: str) -> None:
    rank, size = here()
    xs = [values(rank) * k for k in (1, 2, 3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    for k, x in zip((1, 2, 3), xs, strict=True):
        assert_close(x, each(size).sum(0) * k)
    outputs = [torch.zeros(size * 5) for _ in range(2)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for output in outputs:
            dist.all_gather_into_tensor(output, values(rank))
    manager.wait()
    for output in outputs:
        assert_close(output.view(size, 5), each(size))
    slices = [torch.zeros(2) for _ in range(2)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for part in slices:
            dist.reduce_scatter_tensor(part, torch.arange(2.0 * size) * (rank + 1))
    manager.wait()
    for part in slices:
        assert_close(part, torch.arange(2.0 * rank, 2.0 * rank + 2) * sum(range(1, size + 1)))


@feature()
def futures(backend: str) -> None:
    """Callbacks of futures see results, and may make further calls."""
    rank, size = here()
    x = values(rank)
    future = dist.all_reduce(x, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert_close(doubled.wait(), each(size).sum(0) * 2)
    seen = dist.all_reduce(values(rank), async_op=True).get_future()

    def again(done: Any) -> Tensor:
        y = done.value()[0].clone()
        dist.all_reduce(y)
        return y

    assert_close(seen.then(again).wait(), each(size).sum(0) * size)


@feature()
def functional_collectives(backend: str) -> None:
    rank, size = here()
    group = dist.group.WORLD
    assert_close(functional.all_reduce(values(rank), "sum", group) + 0, each(size).sum(0))
    assert_close(functional.all_gather_tensor(values(rank), 0, group).view(size, 5) + 0, each(size))
    given = torch.arange(2.0 * size)
    part = functional.reduce_scatter_tensor(given, "sum", 0, group) + 0
    assert_close(part, size * torch.arange(2.0 * rank, 2.0 * rank + 2))
    assert_close(functional.broadcast(values(rank), 0, group) + 0, values(0))
    swapped = functional.all_to_all_single(torch.arange(size) + 10.0 * rank, None, None, group) + 0
    assert_close(swapped, rank + 10.0 * torch.arange(size))
    pair = functional.all_reduce_coalesced([values(rank), values(rank) * 2], "sum", group)
    assert_close(pair[1] + 0, each(size).sum(0) * 2)


@feature()
def compiled_collectives(backend: str) -> None:
    rank, size = here()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x: Tensor) -> Tensor:
        return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    assert_close(step(values(rank)), each(size).sum(0) * 2 + 1)


@feature()
def differentiable_collectives(backend: str) -> None:
    rank, size = here()
    x = values(rank).requires_grad_()
    y = differentiable.all_reduce(x)
    assert_close(y, each(size).sum(0))
    (y * (rank + 1)).sum().backward()
    assert x.grad is not None
    assert_close(x.grad, torch.full((5,), float(sum(range(1, size + 1)))))
    x = values(rank).requires_grad_()
    rows = torch.stack(list(differentiable.all_gather(x)))
    assert_close(rows, each(size))
    (rows * (rank + 1)).sum().backward()
    assert x.grad is not None
    assert_close(x.grad, torch.full((5,), float(sum(range(1, size + 1)))))


@feature(alone=True)
def initialised_again(backend: str) -> None:
    """One process joins one world after another, each over a store of its own."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder = os.environ["TORCH_TESTS_FOLDER"]
    for turn in range(4):
        dist.init_process_group(backend, init_method=f"file://{folder}/turn{turn}", rank=rank, world_size=size)
        x = values(rank)
        dist.all_reduce(x)
        assert_close(x, each(size).sum(0))
        dist.destroy_process_group()


@feature(alone=True)
def stores(backend: str) -> None:
    """A TCP store that the program made; ranks leave one after the other."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shared = dist.FileStore(os.path.join(os.environ["TORCH_TESTS_FOLDER"], "shared"), size)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        shared.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(shared.get("port")), size, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    x = values(rank)
    dist.all_reduce(x)
    assert_close(x, each(size).sum(0))
    dist.barrier()
    if rank:
        shared.wait([f"rank {rank - 1} has left"])
    dist.destroy_process_group()
    shared.set(f"rank {rank} has left", "")


@feature(sabotage=None)
def monitored_barriers(backend: str) -> None:
    """All ranks pass, and rank 0 alone does not.

    Not torch.distributed.monitored_barrier: it refuses every name but Gloo's.
    """
    barrier = dist.new_group().monitored_barrier  # a group of its own: the error ends Gloo's
    barrier(timedelta(seconds=60))
    if dist.get_rank() == 0:
        said = ""
        try:
            barrier(timedelta(seconds=0.05))
        except RuntimeError as error:
            said = str(error)
        assert "Rank 1 failed to pass" in said, said


@feature()
def several_threads(backend: str) -> None:
    """Groups used from several threads, each from one."""
    import threading

    rank, size = here()
    groups = [dist.new_group() for _ in range(3)]
    wrong: list[BaseException] = []

    def use(group: Any) -> None:
        try:
            for _ in range(10):
                x = values(rank)
                dist.all_reduce(x, group=group)
                assert_close(x, each(size).sum(0))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=use, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise wrong[0]
