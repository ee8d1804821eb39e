"""The Trainer of transformers, under torchrun: `transformers_trainer.py BACKEND [oktopk]`."""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from asyncoll.torch import hooks
from torch_tests import frameworks
from torch_tests.features.sabotage import named


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = frameworks.model()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = self.net(inputs)
        return {"loss": nn.functional.mse_loss(outputs, labels), "logits": outputs}


class InOrder(Trainer):
    """Rows in their order, so that the result can be compared."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class OkTopk(TrainerCallback):
    """Registers the hook when the Trainer has wrapped the model. All elements are sent: the result can be compared."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.state: Any = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        ddp = self.trainer.model_wrapped
        self.state = hooks.OkTopkState(ddp, density=1.0)
        ddp.register_comm_hook(self.state, hooks.oktopk)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.state.finish()
        assert self.state.round == frameworks.steps(dist.get_world_size())


def check_that_accelerate_refuses_the_name() -> None:
    """docs/howto/switch-from-gloo.md names this text, and the two lines that `main` has instead."""
    text = ""
    try:
        TrainingArguments(output_dir=tempfile.mkdtemp(), use_cpu=True, ddp_backend="asyncoll")
    except ValueError as error:
        text = str(error)
    assert "Your assigned backend asyncoll is not available" in text, "the page can be shorter"


def main(backend: str, hook: str) -> None:
    check_that_accelerate_refuses_the_name()
    dist.init_process_group(named(backend))  # before the Trainer, whose Accelerate takes Gloo on the CPU
    model = Model()
    rows = [{"inputs": x, "labels": y} for x, y in zip(*frameworks.data(), strict=True)]
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        per_device_train_batch_size=frameworks.EACH,
        num_train_epochs=frameworks.EPOCHS,
        learning_rate=frameworks.RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,  # which the Trainer sets, and oktopk refuses
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=frameworks.RATE)
    trainer = InOrder(model, arguments, train_dataset=rows, optimizers=(optimizer, None))
    if hook:
        trainer.add_callback(OkTopk(trainer))
    trainer.train()
    frameworks.check(model.net, dist.get_world_size())
    assert trainer.evaluate(rows)["eval_loss"] > 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if sys.argv[2:] else "")
