"""What a process group of torch says to a program that uses it wrongly, in worlds of one rank."""

from __future__ import annotations

import contextlib

import pytest

from asyncoll.errors import AbortedError, ClosedError, UsageError

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")


@contextlib.contextmanager
def world():
    dist.init_process_group("asyncoll", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def reduce(group):
    group.allreduce([torch.ones(2)]).wait()


def test_a_destroyed_group_is_closed():
    with world() as whole:
        part = dist.new_group([0])
        dist.destroy_process_group(part)
        with pytest.raises(ClosedError, match="closed: it takes no more calls"):
            reduce(part)
        reduce(whole)
    for group in (whole, part):
        with pytest.raises(ClosedError, match="closed"):
            reduce(group)


def test_an_aborted_group_says_so_in_all_later_calls():
    with world() as whole:
        part = dist.new_group([0])
        part.abort()
        for _ in range(2):
            with pytest.raises(AbortedError, match="the process group was aborted"):
                reduce(part)
        reduce(whole)
        whole.abort()
        for group in (whole, part):
            with pytest.raises(AbortedError, match="the process group was aborted"):
                reduce(group)


@pytest.mark.parametrize("backend", ["asyncoll", "cpu:asyncoll,cuda:nccl"])
def test_a_group_is_made_for_a_device(backend):
    """torch asks the group for the backend of the device before it has noted which one was named for it."""
    with world():
        part = dist.new_group([0], backend=backend, device_id=torch.device("cuda", 0))
        reduce(part)
        assert (part._own() == ["cpu", "cuda"]) == (backend == "asyncoll")


def test_a_refused_call_has_the_name_of_the_call():
    x, row = torch.ones(2), [torch.ones(3)]
    with world() as whole:
        refused = []
        whole._calls.refuse = lambda name, _: refused.append(name)
        for call in (
            lambda: dist.all_reduce(x.expand(3, 2)),
            lambda: dist.all_gather(row, x),
            lambda: whole._allgather_base(row[0], x),
            lambda: dist.reduce_scatter(x, row),
            lambda: whole._reduce_scatter_base(row[0], x),
            lambda: dist.all_to_all([x.expand(3, 2)], [x]),
            lambda: dist.all_to_all_single(x.expand(3, 2), torch.ones(3, 2)),
        ):
            with pytest.raises(UsageError):
                call()
    scattered = ["reduce_scatter"] * 2
    assert refused == ["allreduce", "allgather", "allgather", *scattered, "alltoall", "alltoall"]
