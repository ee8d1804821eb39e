"""A rank of a process group of torch: its calls have wrong arguments, at one rank or at all of them."""

import os
from datetime import timedelta
from itertools import chain, repeat

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import asyncoll
from tests.support.raising import caught

SECONDS = timedelta(seconds=60)
BY_MESSAGE = os.environ.get("ASYNCOLL_TRANSPORT") == "zmq"


def ones(count=4, dtype=torch.float32):
    return torch.ones(count, dtype=dtype)


def expanded():
    return torch.ones(1).expand(4)


def each(count, size=4):
    return [ones(size) for _ in range(count)]


def calls(pg):
    """Of each kind of mistake: the right call, the wrong one, and what its error says."""
    return [*reductions(pg), *copies(pg), *exchanges(pg)]


def reductions(pg):
    size = pg.size()
    root = size // 2
    half = dist._make_nccl_premul_sum(0.5)
    return [
        (lambda: pg.allreduce([ones()]), lambda: pg.allreduce([expanded()]), "its elements overlap"),
        (lambda: pg.allreduce([ones()]), lambda: pg.allreduce([ones(), ones()]), "exactly one"),
        (lambda: pg.allreduce([ones()]), lambda: pg.allreduce([torch.ones(4, device="meta")]), "name a backend"),
        (lambda: pg.allreduce([ones(5)]), lambda: pg.allreduce([ones(5).to(torch.float8_e5m2)]), "cannot be reduced"),
        (
            lambda: pg.allreduce([ones(3, torch.int32)], ReduceOp.BOR),
            lambda: pg.allreduce([ones()], ReduceOp.BOR),
            "BOR",
        ),
        (
            lambda: pg.allreduce([ones()], half),
            lambda: pg.allreduce([ones(dtype=torch.int32)], half),
            "does not fit a tensor of torch.int32",
        ),
        (
            lambda: pg.allreduce([torch.eye(3).to_sparse()]),
            lambda: pg.allreduce([torch.eye(3).to_sparse()], ReduceOp.MAX),
            "MAX of sparse tensors",
        ),
        (lambda: pg.allreduce_coalesced(each(2)), lambda: pg.allreduce_coalesced([]), "at least one"),
        (lambda: pg.reduce([ones()], root), lambda: pg.reduce([ones()], size), "is not one of the ranks"),
        (lambda: pg.reduce_scatter([ones()], [each(size)]), lambda: pg.reduce_scatter([ones()], [[]]), "0 inputs for"),
        (
            lambda: pg.reduce_scatter_single(ones(), ones(4 * size)),
            lambda: pg.reduce_scatter_single(ones(), ones(4 * size + 1)),
            f"{4 * size + 1} is not {4 * size}",
        ),
        (
            lambda: pg.reduce_scatter_single_coalesced(each(2), each(2, 4 * size)),
            lambda: pg.reduce_scatter_single_coalesced(each(2), each(1, 4 * size)),
            "one for each other",
        ),
    ]


def copies(pg):
    size = pg.size()
    root = size // 2
    at_root = pg.rank() == root

    def scattered(output, inputs):
        return pg.scatter([output], [inputs] if at_root else [], root)

    def gathered(outputs, x):
        return pg.gather([outputs] if at_root else [], [x], root)

    return [
        (lambda: pg.broadcast([ones()], root), lambda: pg.broadcast([ones()], -1), "the root -1"),
        (
            lambda: pg.broadcast([ones()], root),
            lambda: pg.broadcast([torch.eye(2).to_sparse()], root),
            "pass a dense tensor",
        ),
        (
            lambda: pg.allgather([each(size)], [ones()]),
            lambda: pg.allgather([[ones()] * (size + 1)], [ones()]),
            "outputs for",
        ),
        (
            lambda: pg.allgather([each(size)], [ones()]),
            lambda: pg.allgather([each(size, 3)], [ones()]),
            "the input of this rank: 3 is not 4",
        ),
        (
            lambda: pg.all_gather_single(ones(4 * size), ones()),
            lambda: pg.all_gather_single(ones(4 * size), ones(dtype=torch.int32)),
            "one dtype",
        ),
        (
            lambda: pg.allgather_coalesced([each(2) for _ in range(size)], each(2)),
            lambda: pg.allgather_coalesced([each(2)] * (size - 1) + [each(3)], each(2)),
            "as many for each rank" if size > 1 else "one for each other",
        ),
        (
            lambda: pg.all_gather_single_coalesced(each(2, 4 * size), each(2)),
            lambda: pg.all_gather_single_coalesced(each(3, 4 * size), each(2)),
            "one for each other",
        ),
        (
            lambda: gathered(each(size), ones()),
            lambda: gathered(each(size - 1), ones() if at_root else torch.eye(2).to_sparse()),
            "",
        ),
        (
            lambda: scattered(ones(), each(size)),
            lambda: scattered(ones() if at_root else expanded(), each(size - 1)),
            "",
        ),
    ]


def exchanges(pg):
    size = pg.size()
    return [
        (lambda: pg.alltoall(each(size), each(size)), lambda: pg.alltoall(each(size + 1), each(size)), "outputs for"),
        (
            lambda: pg.all_to_all_single(ones(size), ones(size), [], []),
            lambda: pg.all_to_all_single(ones(size), ones(size), [1] * size, [2] * size),
            "cannot be split",
        ),
        (
            lambda: pg.all_to_all_single(ones(size), ones(size), [], []),
            lambda: pg.all_to_all_single(ones(size), ones(size), [], [size + 1, -1] + [0] * (size - 2)),
            "cannot be split" if size > 1 else "sizes for",
        ),
    ]


def refused_by_all():
    """Each rank has its own error at once, and the group stays in step."""
    pg = dist.group.WORLD
    for right, wrong, text in calls(pg):
        before = pg._get_sequence_number_for_group()
        for _ in range(2):
            error = caught(asyncoll.UsageError, wrong)
            assert text in str(error), error
            assert isinstance(error, dist.DistBackendError)
        right().wait()
        assert pg._get_sequence_number_for_group() == before + 3
    made, handle = [], pg._calls._handle

    def kept(call):
        made.append(handle(call))
        return made[-1]

    pg._calls._handle = kept
    for _ in range(100):  # more than may be under way at once
        caught(asyncoll.UsageError, lambda: pg.broadcast([ones()], -1))
    x = ones()
    pg.allreduce([x]).wait()
    assert (x == pg.size()).all()
    del pg._calls._handle
    assert len(made) == 101
    for call in made:
        call.wait()
    assert not pg._comm._calls._pending._pending


def refused_by_one():
    """All other ranks are told which rank has refused the call, and why."""
    world, size = dist.group.WORLD, dist.get_world_size()
    for index in range(len(calls(world))):
        for bad in range(size):
            pg = world.split_group(list(range(size)), SECONDS, group_name=f"refused {index} by {bad}")
            right, wrong, text = calls(pg)[index]
            if pg.rank() == bad:
                caught(asyncoll.UsageError, wrong)
                failing = repeat(pg.barrier)
            elif BY_MESSAGE:  # a rank may be done with its part of a call before it hears of the refusal
                failing = chain([right], repeat(pg.barrier))
            else:
                failing = [right]
            error = caught(asyncoll.MismatchError, lambda failing=failing: [act().wait() for act in failing])
            assert isinstance(error, dist.DistBackendError)
            for expected in (f"rank {bad} called", "refused at wrong_arguments.py:", text):
                assert expected in str(error), (expected, error)
            pg.shutdown()


def refused_message():
    """A message that is refused is not told: its rank may send it again."""
    pg, last = dist.group.WORLD, dist.get_world_size() - 1
    if pg.rank() == 0 < last:
        for message in ([torch.eye(2).to_sparse()], last, 7), ([ones()], float(last), 7), ([ones()], last, 7.0):
            caught(asyncoll.UsageError, lambda message=message: pg.send(*message))
        pg.send([ones()], last, 7).wait()
    elif pg.rank() == last > 0:
        x = torch.zeros(4)
        caught(asyncoll.UsageError, lambda: pg.recv([expanded()], 0, 7))
        work = pg.recv([x], 0, 7)
        work.wait()
        assert work._source_rank() == 0
        assert (x == 1).all()
        caught(RuntimeError, pg.barrier()._source_rank)
    if 0 <= pg.rank() < last:
        pg.barrier()


def refused_after_one_has_left():
    """A rank that has left after its part of a call does not keep the refusal from the others."""
    pg, world = dist.new_group(), dist.group.WORLD
    size = pg.size()
    if pg.rank() == size - 1:
        pg.gather([], [ones()], 0).wait()
        pg.shutdown()
    world.barrier().wait()
    if pg.rank() == 0:
        error = caught(asyncoll.MismatchError, pg.gather([each(size)], [ones()], 0).wait)
        assert "rank 1 called gather #1, refused" in str(error), error
    elif pg.rank() == 1:
        caught(asyncoll.UsageError, lambda: pg.gather([], [torch.eye(2).to_sparse()], 0))


def refused_in_a_block():
    """The first error ends a block of coalesced calls."""
    pg, device = dist.group.WORLD, torch.device("cpu")
    for _ in range(2):
        pg._start_coalescing(device)
        pg.allreduce([ones()])
        caught(asyncoll.UsageError, lambda: pg.allreduce([expanded()]))
    pg._start_coalescing(device)
    pg.allreduce([ones()])
    work = pg._end_coalescing(device)
    work.wait()
    assert len(work.result()) == 1


def elsewhere():
    """The calls with tensors of another device go to the group that has its backend, as torch made them."""

    class Other:
        def __getattr__(self, name):
            return lambda *arguments, **named: made.append((name, arguments, named))

    pg, made = dist.new_group(), []
    x, opts = torch.ones(2, device="meta"), dist.AllreduceOptions()
    pg._others = Other()
    pg._other_devices.append("meta")
    for name in ("allreduce", "allreduce_coalesced", "reduce", "broadcast"):
        getattr(pg, name)([x], opts)
        assert made.pop() == (name, ([x], opts), {})
    for name in ("reduce_scatter", "allgather", "gather", "scatter", "alltoall", "allgather_coalesced"):
        getattr(pg, name)([x], [[x]], opts=opts)
        assert made.pop() == (name, ([x], [[x]]), {"opts": opts})
    for name in ("reduce_scatter_single", "all_gather_single"):
        for called in (name, f"_{name.replace('all_gather', 'allgather').replace('single', 'base')}"):
            getattr(pg, called)(x, x, opts)
            assert made.pop() == (name, (x, x, opts), {})
    for name in ("reduce_scatter_single_coalesced", "all_gather_single_coalesced"):
        getattr(pg, name)([x], [x], opts)
        assert made.pop() == (name, ([x], [x], opts), {})
    pg.alltoall_base(x, x, [1], [1], opts)
    assert made.pop() == ("all_to_all_single", (x, x, [1], [1], opts), {})
    for name, arguments in (("send", (0, 3)), ("recv", (0, 3)), ("recv_anysource", (3,))):
        getattr(pg, name)([x], *arguments)
        assert made.pop() == (name, ([x], *arguments), {})
    pg._start_coalescing(x.device)
    pg._end_coalescing(x.device)
    assert [name for name, _, _ in made] == ["_start_coalescing", "_end_coalescing"]
    x = ones()
    pg.allreduce([x]).wait()
    assert (x == pg.size()).all()


def main():
    torch.sparse.check_sparse_tensor_invariants.enable()
    dist.init_process_group("asyncoll", timeout=SECONDS)
    refused_by_all()
    refused_message()
    refused_in_a_block()
    if dist.get_world_size() > 1:
        refused_by_one()
    if BY_MESSAGE:  # in memory, no rank is done with its part before all have come
        refused_after_one_has_left()
    elsewhere()
    dist.destroy_process_group()
    print("passed")


if __name__ == "__main__":
    main()
