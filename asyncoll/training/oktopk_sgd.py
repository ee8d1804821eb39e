"""Ok-Topk SGD: only the largest updates are sent; the others stay with their rank (algorithm 2).

Li, Hoefler, "Near-optimal sparse allreduce for distributed deep learning", PPoPP 2022, section 4. Each rank adds its
step to its residual, sends the largest elements of the sum, about a share `density` of all, and keeps the rest. So a
small update that recurs is sent in the end. The algorithms that section 5 of the paper compares with train in the same
way, so that they differ in nothing but their allreduce.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, Unpack, get_args

import torch
from torch import nn

import asyncoll
from asyncoll.extending import sparse_algorithms
from asyncoll.training import saved
from asyncoll.training.step import Step
from asyncoll.training.trainer import Options, Trainer

Algorithm = Literal["oktopk", "topka", "topkdsa", "gtopk", "gaussiank", "dense"]
Residual = Literal["updates", "gradients"]
_PLAIN = {"momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False}


class OkTopkSGD(Trainer):
    """Send the largest elements of the sum of residual and gradient, about a share `density`, and keep the others.

    All ranks make the same number of steps, and have the same model after each, to the bit.

    `residual` says what the residual ε holds, and so how the result u of the allreduce becomes a step. By default it is
    "updates" if that is possible, and "gradients" otherwise.

    - "updates", as in the paper: acc = ε + ηG, w = w - u/P. Residuals keep the learning rate of their own round. The
      optimizer lends its learning rates and takes no step; it must be plain SGD, with all trainable parameters. A
      gradient is not clipped, because there is no dense one.
    - "gradients", as in the authors' code: acc = ε + G, and any optimizer takes a step with the gradient u/P. Momentum,
      weight decay and Adam's moments act on all elements. Residuals get the learning rate of the round they enter.

    While ε fills up, for about 1 / density rounds, accumulators grow. A threshold that is
    reused, as in the paper (τ' = 32 or 128), then selects several times k. With "updates" a rising learning rate has
    the same effect.

    A checkpoint has ε, the thresholds and the regions: it is each rank's own, and all ranks load the same round.

    Args:
        algorithm: of `comm.sparse_allreduce`.
        density: the share of the elements that are sent, above 0 and at most 1.
        residual: what the residual holds, "updates" or "gradients".
        thresholds_every: τ': thresholds are exact in every so many rounds, and reused in between.
        regions_every: τ: the regions that ranks reduce are cut anew every so many rounds.
        feedback: lets reused thresholds follow the number of elements that they select.
        warm_up: the number of first rounds that are "dense": they leave no residual, so ε is 0 when the sparse rounds
            begin, and thresholds and regions are counted from there.
        observe: is called with the round and the result of each sparse allreduce.
        name: of thresholds and regions: a second training on one communicator needs another one.

    See `Trainer` for the other arguments; a `weight` is refused.

    A step raises NonFiniteError at every rank, with the parameters of the round before, if any rank's gradient holds
    NaN or infinity.

    Memory: the gradients, as one flat tensor, and the residual; during the step about one and a half more of that size,
    to select elements.
    """

    has_local_state: ClassVar[bool] = True

    def __init__(
        self,
        comm: asyncoll.Communicator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        algorithm: Algorithm | str = "oktopk",
        density: float = 0.01,
        residual: Residual | None = None,
        thresholds_every: int = 1,
        regions_every: int = 64,
        feedback: asyncoll.Feedback | None = None,
        warm_up: int = 0,
        observe: Callable[[int, asyncoll.SparseReduction], None] = lambda round_, total: None,
        name: str = "oktopk-sgd",
        **options: Unpack[Options],
    ) -> None:
        if residual is None:
            is_plain = _is_plain(model, optimizer) and options.get("clip_norm") is None
            residual = "updates" if is_plain else "gradients"
        _check(model, optimizer, algorithm, residual, density, warm_up, options)
        super().__init__(comm, model, optimizer, **options)
        self._algorithm = algorithm
        self._rules: dict[str, Any] = {
            "density": density,
            "thresholds_every": thresholds_every,
            "regions_every": regions_every,
            "feedback": feedback,
        }
        self._residual_kind = residual
        self._warm_up = warm_up
        self._observe = observe
        self._name = name
        if any(comm.sparse_state(self._name_of(method)) is not None for method in ("dense", algorithm)):
            raise asyncoll.UsageError(
                f"a training named {name!r} has used this communicator, and its thresholds and regions belong to the "
                "name: use another name"
            )
        gradients = self._flat.gradients
        self._residual = comm.empty(gradients.numel(), gradients.dtype, device=gradients.device).zero_()  # ε = 0

    async def _update(self, weight: float | None) -> Step:
        self._refuse_weight(weight, "a residual holds gradients of several rounds")
        if self._residual_kind == "updates":
            self._scale_by_rate()  # ηG
        method = self._algorithm if self.round >= self._warm_up else "dense"
        try:
            total = await self.comm.sparse_allreduce(
                self._residual.add_(self._flat.gradients),  # acc = ε + ηG
                algorithm=method,
                name=self._name_of(method),
                **self._rules,
            )  # u and idx; ε = acc, but 0 at idx
        except asyncoll.NonFiniteError as error:
            self._state = "finished"  # the residual has the gradient
            ranks = ", ".join(map(str, error.ranks))
            raise asyncoll.NonFiniteError(
                error.ranks,
                f"the gradient for round {self.round + 1} holds NaN or infinity at rank {ranks}: look at the loss. "
                "The model is that of the round before, and the training cannot go on",
            ) from None
        self._observe(self.round + 1, total)
        self._apply_sparse(total)
        await self._settle_buffers()
        return self._complete()

    def _apply_sparse(self, total: asyncoll.SparseReduction) -> None:
        mean = (total.values / self.comm.size).to(self._flat.gradients.dtype)  # u / P
        if self._residual_kind == "updates":
            self._flat.parameters.index_add_(0, total.indices, mean, alpha=-1)  # w = w - u / P
            self._pass_round()
        else:
            self._flat.zero_gradients()
            self._flat.gradients.index_add_(0, total.indices, mean)
            self._apply()

    def _scale_by_rate(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(group["lr"])

    async def _check_gradient(self) -> None:
        """Nothing: the sparse allreduce refuses NaN and infinity, at every rank."""

    def _name_of(self, method: str) -> str:
        return f"{self._name}, {method}"

    def _differs(self) -> str:
        return ""  # models are equal after each step

    async def _finish(self) -> None:
        await self._unite_buffers()

    def _own_state(self) -> dict[str, Any]:
        return {
            "kind": [self._residual_kind, self._algorithm, self._name],
            "residual": self._residual.clone(),
            "operations": {name: self.comm.sparse_state(name) for name in self._operations()},
        }

    def _operations(self) -> list[str]:
        """The names of the sparse allreduces."""
        return sorted({self._name_of(method) for method in ("dense", self._algorithm)})

    def _load_own_state(self, own: dict[str, Any]) -> None:
        kind = [self._residual_kind, self._algorithm, self._name]
        if (there := saved.entry(own, "kind", lambda value: isinstance(value, list), "a list")) != kind:
            raise asyncoll.UsageError(
                f"the checkpoint is of residual, algorithm and name {there}, and this training of {kind}: use "
                "the same, or begin a new training from the model and the optimizer alone"
            )
        for name, state in saved.sparse(own, self._residual, self._operations()).items():
            self.comm.load_sparse_state(name, state)


def _check(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    algorithm: str,
    residual: str,
    density: float,
    warm_up: int,
    options: Options,
) -> None:
    for what, value, choices in (
        ("algorithm", algorithm, sparse_algorithms()),
        ("residual", residual, get_args(Residual)),
    ):
        if value not in choices:
            raise asyncoll.UsageError(f"{what} is one of {', '.join(choices)}, not {value!r}")
    if not 0 < density <= 1:
        raise asyncoll.UsageError(f"density is above 0 and at most 1, not {density}")
    if warm_up < 0:
        raise asyncoll.UsageError(f"warm_up is a number of rounds, not {warm_up}")
    if residual == "updates":
        if not _is_plain(model, optimizer):
            raise asyncoll.UsageError(
                "residual='updates' is plain SGD on all trainable parameters: without momentum and weight decay; "
                "for another optimizer, take residual='gradients'"
            )
        if options.get("clip_norm") is not None:
            raise asyncoll.UsageError("clip_norm needs a dense gradient: take residual='gradients'")


def _is_plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's step is -ηG for all trainable parameters, as w = w - u/P is."""
    groups = optimizer.param_groups
    is_plain = type(optimizer) is torch.optim.SGD and all(
        group[option] == off for group in groups for option, off in _PLAIN.items()
    )
    stepped = {parameter for group in groups for parameter in group["params"]}
    return is_plain and stepped == {parameter for parameter in model.parameters() if parameter.requires_grad}
