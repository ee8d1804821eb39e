"""What only a GPU can show of `init_process_group("asyncoll")`: a check of `gpu.py`, in worlds of torch.distributed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from gpu_checks import COUNT, DTYPES, LAYOUTS, SLEEP_CYCLES, Tell, made, same, values
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import asyncoll
from asyncoll.torch import hooks

HOST = torch.device("cpu")
STEPS = 6
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT)


@dataclass(frozen=True, slots=True)
class GroupCheck:
    """A check in a process group: `body(device)` raises at a rank if it fails there."""

    name: str
    what: str
    body: Callable[[torch.device], None]
    ranks: tuple[int, ...] = ()  # empty: those of the command line
    lost: tuple[int, ...] = ()

    def environment(self) -> Mapping[str, str]:
        return {}

    def run(self, tell: Tell) -> None:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("asyncoll")
        self.body(device)
        dist.destroy_process_group()
        tell("pass")

    def judge(self, values: object) -> str:
        del values
        return "pass"


# -- values and order -----------------------------------------------------------------------------


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def reductions(dtype: torch.dtype) -> Iterable[Any]:
    """Those that are defined for the dtype, by torch and by this library."""
    if dtype.is_complex:
        return OPS[:2]
    return (op for op in OPS if dtype is not torch.bool or op is not dist.ReduceOp.AVG)


def collectives(make: Callable[[int], Tensor]) -> list[Tensor]:
    """The results of the calls of tensors that `make(seed)` gives."""
    me, count = rank(), size()
    results = []
    for op in reductions(make(0).dtype):
        results.append(make(me))
        dist.all_reduce(results[-1], op)
    results.append(make(me))
    dist.broadcast(results[-1], count - 1)
    results += [torch.zeros_like(make(0)) for _ in range(count)]
    dist.all_gather(results[-count:], make(me))
    if make(0).dim():
        results += [torch.cat([torch.zeros_like(make(0))] * count), torch.zeros_like(make(0).contiguous())]
        group: Any = dist.group.WORLD  # the functions have other names in other versions of torch
        group._allgather_base(results[-2], make(me).contiguous()).wait()
        group._reduce_scatter_base(results[-1], torch.cat([make(me * count + to) for to in range(count)])).wait()
        results.append(torch.cat([make(me * count + to) for to in range(count)]))
        dist.all_to_all_single(results[-1], results[-1].clone())
    if count > 1:
        results.append(torch.zeros_like(make(0)))
        sent = dist.P2POp(dist.isend, make(me), (me + 1) % count)
        for work in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, results[-1], (me - 1) % count)]):
            work.wait()
    return results


def bits(device: torch.device) -> None:
    """Every call gives the bits of the host."""
    for dtype, layout in [*((torch.float32, each) for each in LAYOUTS), *zip(DTYPES, cycle(LAYOUTS), strict=False)]:
        expected, found = (collectives(partial(made, dtype, layout, on)) for on in (HOST, device))
        for one, other in zip(expected, found, strict=True):
            assert other.device == device, f"a result is on {other.device}"
            assert same(one, other), f"other bits: {dtype}, shape {tuple(one.shape)}"
    objects: list[Any] = [None] * size()
    dist.all_gather_object(objects, {"rank": rank()})
    assert [each["rank"] for each in objects] == list(range(size()))
    dist.barrier()


def order(device: torch.device) -> None:
    """Work before and after calls is in order, on side streams and in callbacks, too. The host does not wait for it."""
    side = torch.cuda.Stream(device)
    total = size() * (size() + 1) / 2
    for _ in range(4):
        with torch.cuda.stream(side):
            x, y = torch.zeros(COUNT, device=device), torch.zeros(COUNT, device=device)
            torch.cuda._sleep(SLEEP_CYCLES)
            x.add_(rank() + 1)
            y.add_(rank() + 1)
            works = [dist.all_reduce(each, async_op=True) for each in (x, y)]
        tripled = works[1].get_future().then(lambda future: future.value()[0].mul(3))
        works[0].wait()
        x.mul_(2)  # on the current stream
        z = tripled.wait()
        z.add_(1)
        assert same(x, torch.full((COUNT,), 2 * total)), "work after a call has overtaken it"
        assert same(z, torch.full((COUNT,), 3 * total + 1)), "the callback of a future has overtaken its call"


def capture(device: torch.device) -> None:
    """A call inside of a capture is refused, and the next one is right."""
    x, refused = torch.ones(10, device=device), ""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        try:
            dist.all_reduce(x)
        except asyncoll.UsageError as error:
            refused = str(error)
    assert "captur" in refused, f"the call was not refused: {refused!r}"
    dist.barrier()
    y = torch.ones(10, device=device)
    dist.all_reduce(y)
    assert bool((y == size()).all())


# -- DDP --------------------------------------------------------------------------------------------


class Elementwise(nn.Module):
    """A model all of whose steps are elementwise, so that a GPU gives the bits of the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([values(torch.float32, seed, 30_000 + seed) for seed in range(6)])
        self.register_buffer("steps", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        return torch.stack([(error := weight * x[: len(weight)] - 1).mul(error).sum() for weight in self.weights]).sum()


Register = Callable[[DistributedDataParallel], object]
DDP: dict[str, tuple[dict[str, Any], Register]] = {
    "default": ({}, lambda ddp: None),
    "bucket views": ({"gradient_as_bucket_view": True}, lambda ddp: None),
    "static graph": ({"static_graph": True, "gradient_as_bucket_view": True}, lambda ddp: None),
    "unused parameters": ({"find_unused_parameters": True}, lambda ddp: None),
    "hook": (
        {"gradient_as_bucket_view": True},
        lambda ddp: ddp.register_comm_hook(hooks.AllreduceState(ddp), hooks.allreduce),
    ),
}


def trained(device: torch.device, options: dict[str, Any], register: Register) -> list[Tensor]:
    """The parameters and buffers after a few steps. The learning rate is a power of two: its product is exact."""
    model = Elementwise().to(device)
    with torch.no_grad():
        for weight in model.weights:
            weight.mul_(rank() + 1)  # DDP gives all ranks rank 0's
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.25, **options)
    register(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=2**-5)
    for step in range(STEPS):
        optimizer.zero_grad()
        ddp(values(torch.float32, 100 * step + rank(), 40_000).to(device)).backward()
        optimizer.step()
    return [each.detach().clone() for each in (*model.parameters(), *model.buffers())]


def ddp(device: torch.device) -> None:
    """DDP trains as on the CPU, to the bit."""
    for name, (options, register) in DDP.items():
        expected, found = (trained(on, options, register) for on in (HOST, device))
        for one, other in zip(expected, found, strict=True):
            assert same(one, other), f"DDP, {name}: another model than on the CPU"


def eager(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> Any:
    state = hooks.EagerSGDState(ddp, optimizer, partial="majority", sync_every=5)
    ddp.register_comm_hook(state, hooks.eager_sgd)
    return state


def oktopk(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> Any:
    del optimizer
    state = hooks.OkTopkState(ddp, density=0.1)
    ddp.register_comm_hook(state, hooks.oktopk)
    return state


def delayed(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> Any:
    state = hooks.DCS3GDState(ddp, optimizer)
    ddp.register_comm_hook(state, hooks.dc_s3gd)
    return state


def learns(device: torch.device, make: Callable[[DistributedDataParallel, torch.optim.Optimizer], Any]) -> None:
    """A hook that does not wait, or sends less, learns, and leaves one model at all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    state, losses = make(wrapped, optimizer), []
    torch.manual_seed(rank() + 1)
    while state.round < 100:
        x = torch.randn(32, 20, device=device)
        loss = nn.functional.mse_loss(wrapped(x), x.sum(1, keepdim=True).tanh())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state.finish()
    assert math.isfinite(losses[-1])
    assert losses[-1] < losses[0], f"{make.__name__}: the loss has gone from {losses[0]:.3f} to {losses[-1]:.3f}"
    for parameter in model.parameters():
        parts = [torch.zeros_like(parameter) for _ in range(size())]
        dist.all_gather(parts, parameter.detach())
        assert all(same(part, parts[0]) for part in parts), f"{make.__name__}: the ranks have different models"


def on_devices(device: torch.device) -> None:
    """All of it, but for what needs streams."""
    bits(device)
    ddp(device)
    for make in (eager, oktopk, delayed):
        learns(device, make)


def whole(device: torch.device) -> None:
    order(device)
    on_devices(device)
    capture(device)


WHAT = "a process group of torch: the bits of every call, streams, futures, DDP as on the CPU, its hooks, a capture"
GROUP_CHECKS = [GroupCheck("torch-group", WHAT, whole, ranks=(1, 2, 3))]
