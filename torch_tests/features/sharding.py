"""Fully sharded data parallel of both kinds, and distributed checkpoints."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.testing import assert_close

from torch_tests.features import feature
from torch_tests.features.ddp import STEPS, batch, mine, model, reference, sgd, step, train


def whole(net: nn.Module) -> list[torch.Tensor]:
    return [x.full_tensor() for x in net.parameters()]  # type: ignore[attr-defined]


def check(net: nn.Module, expected: nn.Module, tolerance: float = 1e-5) -> None:
    for x, y in zip(whole(net), expected.parameters(), strict=True):
        assert_close(x, y.detach(), rtol=tolerance, atol=tolerance)


def sharded(net: nn.Module, **settings: Any) -> nn.Module:
    for layer in net.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **settings)
    fully_shard(net, **settings)
    return net


def _fsdp1(strategy: ShardingStrategy) -> None:
    net = FullyShardedDataParallel(model(), sharding_strategy=strategy, device_id=torch.device("cpu"))
    train(net)
    expected = reference()
    with FullyShardedDataParallel.summon_full_params(net):
        for x, y in zip(net.parameters(), expected.parameters(), strict=True):
            assert_close(x.detach().view_as(y), y.detach(), rtol=1e-5, atol=1e-5)


@feature()
def fsdp1_full_shard(backend: str) -> None:
    _fsdp1(ShardingStrategy.FULL_SHARD)


@feature()
def fsdp1_shard_grad_op(backend: str) -> None:
    _fsdp1(ShardingStrategy.SHARD_GRAD_OP)


@feature()
def fsdp1_state_dict(backend: str) -> None:
    net = FullyShardedDataParallel(model(), device_id=torch.device("cpu"))
    train(net)
    state = net.state_dict()
    for name, y in reference().state_dict().items():
        assert_close(state[name], y, rtol=1e-5, atol=1e-5)


@feature()
def fsdp2(backend: str) -> None:
    net = sharded(model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    train(net)
    check(net, reference())


@feature()
def fsdp2_no_reshard(backend: str) -> None:
    net = sharded(model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)), reshard_after_forward=False)
    train(net)
    check(net, reference())


@feature()
def fsdp2_mixed_precision(backend: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = sharded(model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=policy)
    train(net)
    check(net, reference(), 3e-2)


@feature(sizes=(4,))
def fsdp2_hybrid(backend: str) -> None:
    """Sharded in pairs, replicated over two of them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    net = sharded(model(), mesh=mesh)
    train(net)
    check(net, reference())


@feature()
def fsdp2_gradient_accumulation(backend: str) -> None:
    net = sharded(model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    expected = model()
    optimizers = sgd(net), sgd(expected)
    for number in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for part in range(2):
            inputs, targets = batch(2 * number + part)
            net.set_requires_gradient_sync(part == 1)  # type: ignore[operator]
            nn.functional.mse_loss(net(mine(inputs)), mine(targets)).backward()
            nn.functional.mse_loss(expected(inputs), targets).backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5).full_tensor()  # type: ignore[attr-defined]
        assert_close(norm, nn.utils.clip_grad_norm_(expected.parameters(), 0.5), rtol=1e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
    check(net, expected)


@feature()
def fsdp2_memory_of_the_group(backend: str) -> None:
    """Each layer's buffers of the all-gather and the reduce-scatter come from the process group. Gloo has none."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = sharded(model(), mesh=mesh)
    layers = [module for module in net.modules() if isinstance(module, FSDPModule) and module is not net]
    for layer in layers:
        layer.set_allocate_memory_from_process_group_for_comm(True)
    if backend == "gloo":
        train(net)
    else:
        group = mesh.get_group()
        with mock.patch.object(group, "allocate_tensor", wraps=group.allocate_tensor) as allocate:
            train(net)
        assert allocate.call_count >= 2 * len(layers) * STEPS, allocate.call_count
    check(net, reference())


def _checkpoint(save: Any) -> None:
    """Train, save, train on; load into a fresh model, train on: the same."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    path = os.path.join(os.environ["TORCH_TESTS_FOLDER"], "checkpoint")
    net = sharded(model(), mesh=mesh)
    optimizer = sgd(net)
    for number in range(2):
        inputs, targets = batch(number)
        step(net, optimizer, mine(inputs), mine(targets))
    parameters, state = get_state_dict(net, optimizer)
    save({"model": parameters, "optimizer": state}, path)
    fresh = sharded(model(seed=5), mesh=mesh)
    other = sgd(fresh)
    parameters, state = get_state_dict(fresh, other)
    wanted = {"model": parameters, "optimizer": state}
    dcp.load(wanted, checkpoint_id=path)
    set_state_dict(fresh, other, model_state_dict=wanted["model"], optim_state_dict=wanted["optimizer"])
    for number in range(2, 4):
        inputs, targets = batch(number)
        step(fresh, other, mine(inputs), mine(targets))
    check(fresh, reference())


@feature(sabotage="bytes")
def checkpoint(backend: str) -> None:
    _checkpoint(lambda state, path: dcp.save(state, checkpoint_id=path))


@feature(sabotage="bytes")
def checkpoint_in_the_background(backend: str) -> None:
    """The thread that writes uses a group of its own, while the main thread makes calls."""
    group = dist.new_group()

    def save(state: Any, path: str) -> None:
        future = dcp.async_save(state, checkpoint_id=path, process_group=group)
        x = torch.ones(3)
        dist.all_reduce(x)
        assert_close(x, torch.full((3,), float(dist.get_world_size())))
        future.result()  # type: ignore[union-attr]

    _checkpoint(save)
