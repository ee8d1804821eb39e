"""Meshes, distributed tensors, tensor parallel and pipeline parallel."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing import assert_close

from torch_tests.features import feature


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@feature(sizes=(4,))
def device_mesh(backend: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    for name, expected in (("rows", {0: 2.0, 1: 4.0}), ("columns", {0: 1.0, 1: 5.0})):
        x = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(x, group=mesh[name].get_group())
        other = mesh["columns" if name == "rows" else "rows"].get_local_rank()
        assert_close(x, torch.tensor([expected[other]]))
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x, group=mesh._flatten("all").get_group())
    assert_close(x, torch.tensor([6.0]))


@feature()
def distributed_tensors(backend: str) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size,))
    for rows in (2 * size, 2 * size + 1):  # the second cannot be cut evenly
        x, w = drawn(rows, 4), drawn(4, 6, seed=1)
        by_rows = distribute_tensor(x, mesh, [Shard(0)])
        assert_close(by_rows.full_tensor(), x)
        assert_close(by_rows.redistribute(mesh, [Shard(1)]).full_tensor(), x)
        assert_close(by_rows.redistribute(mesh, [Replicate()]).to_local(), x)
        product = by_rows @ distribute_tensor(w, mesh, [Replicate()])
        assert_close(product.full_tensor(), x @ w)
        assert_close(by_rows.sum().full_tensor(), x.sum())
    partial = DTensor.from_local(torch.full((size, 3), rank + 1.0), mesh, [Partial()])
    total = float(sum(range(1, size + 1)))
    assert_close(partial.full_tensor(), torch.full((size, 3), total))
    assert_close(partial.redistribute(mesh, [Shard(0)]).to_local(), torch.full((1, 3), total))


@feature()
def tensor_parallel(backend: str) -> None:
    """Columns, then rows: one all-reduce forward and one backward."""
    size = dist.get_world_size()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    mesh = init_device_mesh("cpu", (size,))
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = drawn(5, 6)
    output, expected = net(x), plain(x)
    assert_close(output, expected)
    output.square().sum().backward()
    expected.square().sum().backward()
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert_close(one.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-5)  # type: ignore[attr-defined]


@feature()
def sequence_parallel(backend: str) -> None:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6))

    net, plain = made(), made()
    parallelize_module(
        net,
        mesh,
        {
            "0": SequenceParallel(),
            "1": ColwiseParallel(input_layouts=Shard(1)),
            "3": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        },
    )
    x = drawn(2, 2 * size, 6)
    output, expected = net(x.chunk(size, 1)[dist.get_rank()]), plain(x)
    assert_close(output.full_tensor(), expected)
    output.square().sum().full_tensor().backward()
    expected.square().sum().backward()
    assert_close(net[1].weight.grad.full_tensor(), plain[1].weight.grad, rtol=1e-4, atol=1e-4)


@feature()
def parallel_loss(backend: str) -> None:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    x, targets = drawn(5, 12), torch.tensor([0, 3, 7, 11, 2])
    logits = distribute_tensor(x.clone().requires_grad_(), mesh, [Shard(1)])
    plain = x.clone().requires_grad_()
    expected = nn.functional.cross_entropy(plain, targets)
    expected.backward()
    with loss_parallel():
        loss = nn.functional.cross_entropy(logits, distribute_tensor(targets, mesh, [Replicate()]))
        gradient = torch.autograd.grad(loss, logits)[0]
    assert_close(loss.full_tensor(), expected)  # type: ignore[attr-defined]
    assert_close(gradient.full_tensor(), plain.grad)  # type: ignore[attr-defined]


@feature(sizes=(4,))
def data_and_tensor_parallel(backend: str) -> None:
    """FSDP2 over one dimension of the mesh, tensor parallel over the other."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
    parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=mesh["data"])
    x = drawn(8, 6)
    net(x.chunk(2)[mesh["data"].get_local_rank()]).square().mean().backward()
    plain(x).square().mean().backward()
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert_close(one.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-5)  # type: ignore[attr-defined]


def _pipeline(schedule: type, stages: int) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(stages * size)]
    plain = nn.Sequential(*parts)
    x, target = drawn(8, 5), drawn(8, 5, seed=1)
    expected = plain(x)
    nn.functional.mse_loss(expected, target).backward()
    gradients = [part[0].weight.grad.clone() for part in parts]
    plain.zero_grad()
    own = [number for number in range(len(parts)) if number % size == rank]
    made = [PipelineStage(parts[number], number, len(parts), torch.device("cpu")) for number in own]
    run = schedule(made if stages > 1 else made[0], n_microbatches=2 * size if size != 3 else 8, loss_fn=nn.MSELoss())
    first = (x,) if rank == 0 else ()
    last = rank == size - 1
    got = run.step(*first, target=target if last else None)
    if last:
        assert_close(got, expected)
    for number in own:
        assert_close(parts[number][0].weight.grad, gradients[number], rtol=1e-4, atol=1e-5)


@feature()
def pipeline_gpipe(backend: str) -> None:
    _pipeline(ScheduleGPipe, 1)


@feature()
def pipeline_1f1b(backend: str) -> None:
    _pipeline(Schedule1F1B, 1)


@feature(sizes=(2, 4))
def pipeline_interleaved(backend: str) -> None:
    _pipeline(ScheduleInterleaved1F1B, 2)
