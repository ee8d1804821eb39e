"""A rank whose communication hooks fail: prints whose the errors are, and the files of the lines that they name."""

import os
import re
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from asyncoll.errors import AsyncollError
from asyncoll.torch import hooks
from tests.support.raising import caught

STATES = {
    hooks.allreduce: lambda ddp, optimizer: hooks.AllreduceState(ddp),
    hooks.eager_sgd: lambda ddp, optimizer: hooks.EagerSGDState(ddp, optimizer),
    hooks.oktopk: lambda ddp, optimizer: hooks.OkTopkState(ddp),
    hooks.dc_s3gd: lambda ddp, optimizer: hooks.DCS3GDState(ddp, optimizer),
}


class Training:
    """A model with a buffer and a hook, on a group of its own."""

    def __init__(self, hook):
        self.name = hook.__name__
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.group = dist.new_group(timeout=timedelta(seconds=60))
        self.ddp = DistributedDataParallel(
            module, process_group=self.group, forward_sync_buffers=False, gradient_as_bucket_view=True
        )
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        self.state = STATES[hook](self.ddp, self.optimizer)
        self.ddp.register_comm_hook(self.state, hook)

    def step(self, scale=1.0):
        self.ddp(scale * torch.ones(5, 4)).square().mean().backward()
        self.optimizer.step()

    def steps(self):
        while True:
            self.step()

    def finish(self):
        self.state.finish()

    def gather(self):
        dist.all_gather(list(torch.empty(dist.get_world_size(), 7)), torch.ones(7), group=self.group)

    def show(self, act):
        """Print the libraries that have the error of `act`, and the files of the lines that it names."""
        error = caught((AsyncollError, RuntimeError), act)
        kinds = {"asyncoll": AsyncollError, "torch": dist.DistBackendError}
        libraries = [name for name, kind in kinds.items() if isinstance(error, kind)]
        print(self.name, *libraries, *sorted(set(re.findall(r"(\S+\.py):\d+", str(error)))))


def mismatches():
    """Rank 0 makes another call than the hooks of the others."""
    for hook in STATES:
        training = Training(hook)
        training.show(training.gather if dist.get_rank() == 0 else training.step)
    training = Training(hooks.dc_s3gd)
    training.step()
    training.show(training.gather if dist.get_rank() == 0 else training.finish)


def not_finite():
    """The gradient of all ranks is NaN."""
    for hook in (hooks.eager_sgd, hooks.oktopk):
        training = Training(hook)
        training.show(lambda training=training: training.step(torch.nan))


def deaths():
    """Rank 1 dies in a backward pass."""
    trainings = [Training(hook) for hook in STATES]
    for training in trainings:
        training.step()
    if dist.get_rank() == 1:
        weight = trainings[0].ddp.module[0].weight
        weight.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
    for training in trainings:
        training.show(training.steps)


CASES = {case.__name__: case for case in (mismatches, not_finite, deaths)}
dist.init_process_group("asyncoll", timeout=timedelta(seconds=60))
for name in sys.argv[1:]:
    CASES[name]()
sys.exit()
