"""Sharded models, each of which `flatten` must refuse. Prints the names of those that it has refused."""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module

import asyncoll


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))


def refuse(name: str, model: nn.Module) -> None:
    """Print the name if the model is refused with a reason."""
    try:
        asyncoll.flatten(model)
    except asyncoll.UsageError as error:
        print(name if "sharded" in str(error) else error)


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
refuse("fsdp2", fully_shard(perceptron(), mesh=mesh))
model = perceptron()
fully_shard(model[0], mesh=mesh)
refuse("part", model)
model[0].unshard()
refuse("unsharded", model)
cpu = torch.device("cpu")
with warnings.catch_warnings(action="ignore"):  # torch's own, about a world of one rank
    refuse("fsdp1", FullyShardedDataParallel(perceptron(), device_id=cpu))
    refuse("original", FullyShardedDataParallel(perceptron(), device_id=cpu, use_orig_params=True))
refuse("dtensor", distribute_module(perceptron(), mesh))
dist.destroy_process_group()
