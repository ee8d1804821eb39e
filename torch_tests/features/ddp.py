"""DistributedDataParallel in its variants, its hooks, and optimizers beside it.

Each trains a small model on a batch that the ranks share, and compares the parameters with those of one process that
trains on the whole batch.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from torch_tests.features import feature

STEPS = 4
ROWS = 12  # of the whole batch: a multiple of 2, 3 and 4


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def batch(step: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(100 + step)
    return torch.randn(ROWS, 6, generator=made), torch.randn(ROWS, 3, generator=made)


def mine(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def step(net: nn.Module, optimizer: Any, inputs: Tensor, targets: Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.mse_loss(net(inputs), targets).backward()
    optimizer.step()


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def reference(steps: int = STEPS, make: Callable[[nn.Module], Any] = sgd) -> nn.Module:
    net = model()
    optimizer = make(net)
    for number in range(steps):
        step(net, optimizer, *batch(number))
    return net


def check(net: nn.Module, expected: nn.Module, tolerance: float = 1e-5) -> None:
    for x, y in zip(net.parameters(), expected.parameters(), strict=True):
        assert_close(x, y, rtol=tolerance, atol=tolerance)


def train(net: nn.Module, steps: int = STEPS, make: Callable[[nn.Module], Any] = sgd) -> None:
    optimizer = make(net)
    for number in range(steps):
        inputs, targets = batch(number)
        step(net, optimizer, mine(inputs), mine(targets))


def trains_like_one(
    hook: Any = None, state: Any = None, tolerance: float = 1e-5, **settings: Any
) -> DistributedDataParallel:
    net = DistributedDataParallel(model(seed=dist.get_rank()), **settings)  # rank 0's parameters become everyone's
    if hook is not None:
        net.register_comm_hook(state, hook)
    train(net)
    check(net, reference(), tolerance)
    return net


@feature()
def ddp(backend: str) -> None:
    trains_like_one()


@feature()
def ddp_small_buckets(backend: str) -> None:
    """DDP makes them in the second step; the first one has a single bucket."""
    net = trains_like_one(bucket_cap_mb=0.0005)
    sizes = net._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    assert "," in sizes, f"one bucket of {sizes} bytes"


@feature()
def ddp_bucket_views(backend: str) -> None:
    trains_like_one(gradient_as_bucket_view=True)


@feature()
def ddp_static_graph(backend: str) -> None:
    trains_like_one(static_graph=True)


@feature()
def ddp_in_a_group(backend: str) -> None:
    trains_like_one(process_group=dist.new_group())


@feature()
def ddp_unused_parameters(backend: str) -> None:
    """Which parameters are used differs between ranks and steps."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(model(seed) for seed in range(3))

        def forward(self, x: Tensor, branch: int) -> Any:
            return self.parts[0](x) + self.parts[branch](x)

    size = dist.get_world_size()
    net, expected = DistributedDataParallel(Branches(), find_unused_parameters=True), Branches()
    optimizers = sgd(net), sgd(expected)
    for number in range(STEPS):
        inputs, targets = batch(number)
        for optimizer in optimizers:
            optimizer.zero_grad()
        branch = 1 + (dist.get_rank() + number) % 2
        nn.functional.mse_loss(net(mine(inputs), branch), mine(targets)).backward()
        for rank, rows in enumerate(zip(inputs.chunk(size), targets.chunk(size), strict=True)):
            loss = nn.functional.mse_loss(expected(rows[0], 1 + (rank + number) % 2), rows[1])
            (loss / size).backward()
        for optimizer in optimizers:
            optimizer.step()
    check(net, expected)


@feature()
def ddp_no_sync(backend: str) -> None:
    """Gradients of three batches are added up before they are exchanged."""
    net, expected = DistributedDataParallel(model()), model()
    optimizers = sgd(net), sgd(expected)
    for number in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for part in range(3):
            inputs, targets = batch(3 * number + part)
            with net.no_sync() if part < 2 else contextlib.nullcontext():
                nn.functional.mse_loss(net(mine(inputs)), mine(targets)).backward()
            nn.functional.mse_loss(expected(inputs), targets).backward()
        for optimizer in optimizers:
            optimizer.step()
    check(net, expected)


@feature()
def ddp_uneven_inputs(backend: str) -> None:
    """Rank r has r batches more than rank 0. A gradient is the sum over ranks that have one, divided by all."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net, expected = DistributedDataParallel(model()), model()
    optimizers = sgd(net), sgd(expected)
    with net.join():
        for number in range(3 + rank):
            inputs, targets = batch(number)
            step(net, optimizers[0], mine(inputs), mine(targets))
    for number in range(3 + size - 1):
        inputs, targets = batch(number)
        optimizers[1].zero_grad()
        for other, rows in enumerate(zip(inputs.chunk(size), targets.chunk(size), strict=True)):
            if number < 3 + other:
                (nn.functional.mse_loss(expected(rows[0]), rows[1]) / size).backward()
        optimizers[1].step()
    check(net, expected)


@feature()
def ddp_buffers(backend: str) -> None:
    """Rank 0's buffers are everyone's at each forward pass."""
    net = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(6), model()))
    optimizer = sgd(net)
    expected = nn.BatchNorm1d(6)
    for number in range(STEPS):
        inputs, targets = batch(number)
        step(net, optimizer, mine(inputs), mine(targets))
        expected(inputs.chunk(dist.get_world_size())[0])
    with torch.no_grad():
        net(mine(batch(0)[0]))  # begins with the exchange; adds this rank's batch on top
        expected(mine(batch(0)[0]))
    assert_close(net.module[0].running_mean, expected.running_mean)


@feature()
def ddp_hook_allreduce(backend: str) -> None:
    trains_like_one(default_hooks.allreduce_hook)


@feature()
def ddp_hook_fp16(backend: str) -> None:
    trains_like_one(default_hooks.fp16_compress_hook, tolerance=1e-2)


@feature()
def ddp_hook_wrapped(backend: str) -> None:
    trains_like_one(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), tolerance=1e-2)


@feature()
def ddp_hook_powersgd(backend: str) -> None:
    """With full rank the approximation is exact. It saves nothing, so the least compression is 0."""
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=16, start_powerSGD_iter=2, min_compression_rate=0
    )
    trains_like_one(powerSGD_hook.powerSGD_hook, state, tolerance=1e-3)
    assert all(factors.numel() for factors in state.p_memory_dict.values())
    assert state.p_memory_dict


@feature()
def ddp_hook_post_local_sgd(backend: str) -> None:
    """Two steps of all ranks, then two within each half of them. The models are averaged after the first of these."""
    size = dist.get_world_size()
    halves = [list(range(size))[::2], list(range(size))[1::2]]
    half, _ = dist.new_subgroups_by_enumeration(halves)
    net = DistributedDataParallel(model())
    net.register_comm_hook(
        post_localSGD_hook.PostLocalSGDState(process_group=None, subgroup=half, start_localSGD_iter=2),
        post_localSGD_hook.post_localSGD_hook,
    )
    train(net, make=lambda net: PostLocalSGDOptimizer(sgd(net), PeriodicModelAverager(period=2, warmup_steps=2)))
    check(net, post_local_sgd(halves)[dist.get_rank() % 2])


def post_local_sgd(halves: list[list[int]]) -> list[nn.Module]:
    """The models of both halves of the ranks, trained in one process."""
    every = [rank for half in halves for rank in half]
    nets = [model() for _ in halves]
    optimizers = [sgd(net) for net in nets]
    for number in range(STEPS):
        inputs, targets = (x.chunk(len(every)) for x in batch(number))
        for net, optimizer, half in zip(nets, optimizers, halves, strict=True):
            ranks = every if number < 2 else half
            step(net, optimizer, torch.cat([inputs[r] for r in ranks]), torch.cat([targets[r] for r in ranks]))
        if number == 2:
            with torch.no_grad():
                for parameters in zip(*(net.parameters() for net in nets), strict=True):
                    mean = sum(x * len(half) / len(every) for x, half in zip(parameters, halves, strict=True))
                    for x in parameters:
                        x.copy_(mean)
    return nets


@feature()
def model_averaging(backend: str) -> None:
    size = dist.get_world_size()
    net = model(seed=dist.get_rank())
    for x in net.parameters():
        x.grad = torch.zeros_like(x)  # parameters without a gradient are not averaged
    averager = PeriodicModelAverager(period=1, warmup_steps=0)
    averager.average_parameters(net.parameters())
    averager.average_parameters(net.parameters())
    every = [list(model(seed=rank).parameters()) for rank in range(size)]
    for number, x in enumerate(net.parameters()):
        assert_close(x.detach(), torch.stack([one[number].detach() for one in every]).mean(0))


@feature()
def ddp_own_hook(backend: str) -> None:
    def hook(group, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        size = dist.get_world_size()
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0] / size)

    trains_like_one(hook)


@feature()
def ddp_gradient_clipping(backend: str) -> None:
    net, expected = DistributedDataParallel(model()), model()
    optimizers = sgd(net), sgd(expected)
    for number in range(STEPS):
        inputs, targets = batch(number)
        for each, optimizer, rows in (
            (net, optimizers[0], (mine(inputs), mine(targets))),
            (expected, optimizers[1], (inputs, targets)),
        ):
            optimizer.zero_grad()
            nn.functional.mse_loss(each(rows[0]), rows[1]).backward()
            nn.utils.clip_grad_norm_(each.parameters(), 0.1)
            optimizer.step()
    check(net, expected)


@feature()
def ddp_compiled(backend: str) -> None:
    """In the graphs that DDP asks for: one for each bucket."""

    class Own(nn.Module):
        """Below DDP, torch compiles no module of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = model()

        def forward(self, x: Tensor) -> Any:
            return self.layers(x)

    with mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 256):  # the default is more than the model has
        net: Any = torch.compile(DistributedDataParallel(Own()), backend="aot_eager")
        train(net)
    check(net, reference())
    assert graphs_made() > 1


@feature()
def ddp_compiled_inside(backend: str) -> None:
    net = DistributedDataParallel(torch.compile(model(), backend="aot_eager"))  # type: ignore[arg-type]
    train(net)
    check(net, reference())
    assert graphs_made()


def graphs_made() -> int:
    """The number of graphs that torch.compile has made in this process."""
    return counters["aot_autograd"]["ok"]


@feature()
def zero_redundancy_optimizer(backend: str) -> None:
    def adam(net: nn.Module) -> Any:
        return torch.optim.Adam(net.parameters(), lr=0.01)

    def sharded(net: nn.Module) -> Any:
        return ZeroRedundancyOptimizer(net.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)

    net = DistributedDataParallel(model())
    optimizer = sharded(net)
    for number in range(STEPS):
        inputs, targets = batch(number)
        step(net, optimizer, mine(inputs), mine(targets))
    check(net, reference(make=adam))
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        state = copy.deepcopy(optimizer.state_dict())
        one = reference()
        whole = adam(one)
        whole.load_state_dict(state)
        expected = model()
        plain = adam(expected)
        for number in range(STEPS):
            step(expected, plain, *batch(number))
        for x, y in zip(whole.state.values(), plain.state.values(), strict=True):
            assert_close(x["exp_avg"], y["exp_avg"], rtol=1e-4, atol=1e-6)
