"""Lightning: `lightning_ddp.py BACKEND RANKS [HOOK]`, of `HOOKS`, starts the other ranks itself."""

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

from asyncoll.torch import hooks
from asyncoll.torch.lightning import DDPStrategy
from torch_tests import frameworks
from torch_tests.features.sabotage import named

seen: list[int] = []  # buckets, by `hook`
by_wrapper: list[int] = []
states: list[Any] = []  # of the hooks of asyncoll


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


def counted(wrapped):  # type: ignore[no-untyped-def]
    """A wrapper of hooks, as torch's fp16_compress_wrapper."""

    def wrapper(state, bucket):  # type: ignore[no-untyped-def]
        by_wrapper.append(bucket.index())
        return wrapped(state, bucket)

    return wrapper


def register(model: DistributedDataParallel, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    (optimizer,) = optimizers
    assert optimizer.param_groups[0]["lr"] == frameworks.RATE
    model.register_comm_hook(None, hook)


def register_oktopk(model: DistributedDataParallel, _: Sequence[torch.optim.Optimizer]) -> None:
    """All elements are sent, so the result can be compared."""
    states.append(hooks.OkTopkState(model, density=1.0))
    model.register_comm_hook(states[0], hooks.oktopk)


def register_eager_sgd(model: DistributedDataParallel, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """All ranks are waited for, so the result can be compared."""
    states.append(hooks.EagerSGDState(model, optimizers[0], partial="quorum", quorum=dist.get_world_size()))
    model.register_comm_hook(states[0], hooks.eager_sgd)


HOOKS: dict[str, dict[str, Any]] = {
    "hook": {"ddp_comm_hook": hook},
    "wrapped_hook": {"ddp_comm_hook": hook, "ddp_comm_wrapper": counted},
    "registered_hook": {"register_hook": register},
    "oktopk": {"register_hook": register_oktopk},
    "eager_sgd": {"register_hook": register_eager_sgd},
}


class End(lightning.Callback):
    """All ranks leave the hook's rounds together."""

    def on_train_end(self, *_: Any) -> None:
        for state in states:
            state.finish()


def main(backend: str, ranks: int, settings: dict[str, Any]) -> None:
    backend = named(backend)
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=DDPStrategy(process_group_backend=backend, **settings),
        plugins=[LightningEnvironment()],
        callbacks=[End()],
        max_epochs=frameworks.EPOCHS,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    frameworks.check(module.net, ranks)
    assert trainer.global_step == frameworks.steps(ranks)
    assert all(state.round == trainer.global_step for state in states)
    assert bool(seen or states) == bool(settings)
    assert by_wrapper == (seen if "ddp_comm_wrapper" in settings else [])
    assert torch.isfinite(trainer.callback_metrics["loss_epoch"])
    assert dist.get_backend() == backend


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), HOOKS[sys.argv[3]] if sys.argv[3:] else {})
