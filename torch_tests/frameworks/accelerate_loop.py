"""Accelerate, under torchrun: `accelerate_loop.py BACKEND`."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torch_tests import frameworks
from torch_tests.features.sabotage import named


def main(backend: str) -> None:
    dist.init_process_group(named(backend))  # before Accelerate, which takes Gloo on the CPU
    accelerator = Accelerator(cpu=True)
    net = frameworks.model()
    loader = DataLoader(TensorDataset(*frameworks.data()), batch_size=frameworks.EACH)
    net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=frameworks.RATE), loader)
    assert accelerator.num_processes == dist.get_world_size() > 1
    for _ in range(frameworks.EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(net(inputs), targets))
            optimizer.step()
    frameworks.check(accelerator.unwrap_model(net), dist.get_world_size())
    ranks = accelerator.gather(torch.tensor([float(dist.get_rank())]))
    assert ranks.tolist() == list(range(dist.get_world_size()))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
