"""Lightning: `lightning_ddp.py BACKEND RANKS [hook|register]` starts the other ranks itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from asyncoll.torch.lightning import DDPStrategy
from torch_tests import frameworks
from torch_tests.features.sabotage import named

seen: list[int] = []


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = frameworks.model()

    def training_step(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def train_dataloader(self) -> Any:
        """In order: Lightning's own sampler shuffles."""
        rows = TensorDataset(*frameworks.data())
        sampler: Any = DistributedSampler(rows, shuffle=False)
        return DataLoader(rows, batch_size=frameworks.EACH, sampler=sampler)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=frameworks.RATE)


def hook(state, bucket):  # type: ignore[no-untyped-def]
    seen.append(bucket.index())
    size = dist.get_world_size()
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0] / size)


def register(model: DistributedDataParallel, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    (optimizer,) = optimizers
    assert optimizer.param_groups[0]["lr"] == frameworks.RATE
    model.register_comm_hook(None, hook)


SETTINGS: dict[str, dict[str, Any]] = {"hook": {"ddp_comm_hook": hook}, "register": {"register_hook": register}}


def main(backend: str, ranks: int, settings: dict[str, Any]) -> None:
    backend = named(backend)
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=DDPStrategy(process_group_backend=backend, **settings),
        plugins=[LightningEnvironment()],
        max_epochs=frameworks.EPOCHS,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    frameworks.check(module.net, ranks)
    assert bool(seen) == bool(settings)
    assert torch.isfinite(trainer.callback_metrics["loss_epoch"])
    assert dist.get_backend() == backend


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), SETTINGS[sys.argv[3]] if sys.argv[3:] else {})
