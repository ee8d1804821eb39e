"""Accelerate, under torchrun: `accelerate_loop.py BACKEND [oktopk|eager_sgd]`."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from asyncoll.torch import hooks
from torch_tests import frameworks
from torch_tests.features.sabotage import named


def register(name: str, net: Any, optimizer: Any) -> Any:
    """All ranks and all elements are in each round, so the result can be compared."""
    state: Any
    if name == "oktopk":
        state = hooks.OkTopkState(net, density=1.0)
    else:  # Accelerate has wrapped the optimizer, too
        state = hooks.EagerSGDState(net, optimizer.optimizer, partial="quorum", quorum=dist.get_world_size())
    net.register_comm_hook(state, getattr(hooks, name))
    return state


def main(backend: str, hook: str) -> None:
    dist.init_process_group(named(backend))  # before Accelerate, which takes Gloo on the CPU
    accelerator = Accelerator(cpu=True)
    net = frameworks.model()
    loader = DataLoader(TensorDataset(*frameworks.data()), batch_size=frameworks.EACH)
    net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=frameworks.RATE), loader)
    assert accelerator.num_processes == dist.get_world_size() > 1
    state = register(hook, net, optimizer) if hook else None
    for _ in range(frameworks.EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(net(inputs), targets))
            optimizer.step()
    if state is not None:
        state.finish()
        assert state.round == frameworks.steps(dist.get_world_size())
    frameworks.check(accelerator.unwrap_model(net), dist.get_world_size())
    ranks = accelerator.gather(torch.tensor([float(dist.get_rank())]))
    assert ranks.tolist() == list(range(dist.get_world_size()))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if sys.argv[2:] else "")
