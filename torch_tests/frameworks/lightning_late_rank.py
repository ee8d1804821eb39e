"""Lightning with the hook `eager_sgd`, and a rank that is late: `lightning_late_rank.py BACKEND RANKS`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from asyncoll.torch import hooks
from asyncoll.torch.lightning import DDPStrategy
from torch_tests import frameworks
from torch_tests.features.sabotage import named

LATE_AT, AHEAD, ROUNDS = 4, 12, 30  # the late rank's step; the round that it waits for in it; the last round


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = frameworks.model()
        self.state: Any = None

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        if number == LATE_AT and dist.get_rank() == dist.get_world_size() - 1:
            _get_default_store().wait(["ahead"])
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.state.round >= AHEAD and dist.get_rank() == 0:
            _get_default_store().set("ahead", "")
        self.trainer.should_stop = self.state.round >= ROUNDS

    def on_train_end(self) -> None:
        self.state.finish()

    def train_dataloader(self) -> Any:
        rows = TensorDataset(*(x.repeat(2 * ROUNDS, 1) for x in frameworks.data()))  # more than are needed
        return DataLoader(rows, batch_size=frameworks.ROWS)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=frameworks.RATE)

    def register(self, model: DistributedDataParallel, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.state = hooks.EagerSGDState(model, optimizers[0])
        model.register_comm_hook(self.state, hooks.eager_sgd)


def main(backend: str, ranks: int) -> None:
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=DDPStrategy(process_group_backend=named(backend), register_hook=module.register),
        plugins=[LightningEnvironment()],
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    print(f"rank {dist.get_rank()}: {trainer.global_step} steps, {module.state.round} rounds")
    if dist.get_rank() == ranks - 1:
        assert trainer.global_step <= module.state.round - (AHEAD - LATE_AT - 1)
    mine = torch.cat([x.detach().flatten() for x in module.net.parameters()])
    every = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(every, mine)
    assert all(torch.equal(x, mine) for x in every)
    inputs, targets = frameworks.data()
    before, after = (nn.functional.mse_loss(net(inputs), targets).item() for net in (frameworks.model(), module.net))
    assert after < 0.9 * before, (before, after)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
