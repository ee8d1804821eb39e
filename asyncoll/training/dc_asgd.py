"""DC-ASGD: a parameter server that compensates for the delay of gradients (algorithms 1 and 2).

Zheng, Meng, Wang, Chen, Yu, Ma, Liu, "Asynchronous stochastic gradient descent with delay compensation", ICML 2017,
sections 3 and 4. A gradient of an old model w_bak is moved to the newest model w by the first term of its Taylor
expansion. The Hessian in it is replaced by a cheap estimate, the diagonal matrix λ G∘G.
"""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor, nn

import asyncoll
from asyncoll.training import saved
from asyncoll.training.parameter_server import ModelServer, ParameterServerSGD
from asyncoll.training.trainer import Options

_EPSILON = 1e-7


class DCASGD(ParameterServerSGD):
    """A parameter server that corrects each gradient for the updates that its model has missed.

    A gradient that has missed no update is not changed, so with P = 1
    this is plain training.

    Clipping applies to the corrected gradient. A checkpoint of rank 0 also has the moving average.

    Args:
        lambda0: λ, the weight of the correction: by default 0.04 (DC-ASGD-c), and 2 if `adaptive`. 0 leaves the
            gradients uncorrected.
        adaptive: λ is `lambda0` divided by the root of a moving average of G∘G, element by element (DC-ASGD-a).
        decay: the share of the moving average that each update keeps.
        staleness: see `ParameterServerSGD`.
        name: see `ParameterServerSGD`.

    See `ParameterServerSGD` for the rest.

    Memory: that of `ParameterServerSGD`, and at rank 0 one copy of the trainable parameters for each worker, one
    tensor of that size for the correction, and another for the moving average.
    """

    def __init__(
        self,
        comm: asyncoll.Communicator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        lambda0: float | None = None,
        adaptive: bool = False,
        decay: float = 0.95,
        staleness: int | None = None,
        name: str = "dc_asgd",
        **options: Unpack[Options],
    ) -> None:
        if lambda0 is None:
            lambda0 = 2.0 if adaptive else 0.04
        if not 0 <= lambda0 < math.inf:
            raise asyncoll.UsageError(f"lambda0 is at least 0, not {lambda0}")
        if not 0 <= decay < 1:
            raise asyncoll.UsageError(f"decay is at least 0 and below 1, not {decay}")
        self._lambda0 = lambda0
        self._decay = decay if adaptive else None
        super().__init__(comm, model, optimizer, staleness=staleness, name=name, **options)

    def _make_server(self) -> ModelServer:
        return CompensatingServer(self, self._staleness, self._lambda0, self._decay)


class CompensatingServer(ModelServer):
    """A server that keeps the model that it has last handed out to each worker, w_bak(m)."""

    def __init__(self, trainer: ParameterServerSGD, staleness: int | None, lambda0: float, decay: float | None) -> None:
        """`decay` is None for a constant λ."""
        super().__init__(trainer, staleness)
        self._lambda0 = lambda0
        self._decay = decay
        self._copies: dict[int, Tensor] = {}  # w_bak
        self._mean_square = None if decay is None else torch.zeros_like(self.parameters)

    def hand_out(self, worker: int) -> Tensor:
        """A copy of w for `worker`, which this server keeps: w_bak(m) = w."""
        self._copies[worker] = super().hand_out(worker)
        return self._copies[worker]

    def correct(self, worker: int, skipped: int) -> None:
        """Correct the gradient of `worker`: G = G + λ G∘G∘(w - w_bak(m))."""
        g = self.gradients
        if self._mean_square is not None and self._decay is not None:
            self._mean_square.mul_(self._decay).addcmul_(g, g, value=1 - self._decay)
        if skipped and self._lambda0:
            correction = torch.sub(self.parameters, self._copies[worker]).mul_(g).mul_(g)
            if self._mean_square is not None:
                correction.div_(torch.sqrt(self._mean_square + _EPSILON))  # λ = λ0 / sqrt(MeanSquare + ε)
            g.add_(correction, alpha=self._lambda0)

    def state(self) -> dict[str, Any]:
        """As the server's, with the moving average."""
        return super().state() | {"mean_square": None if self._mean_square is None else self._mean_square.clone()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Raises UsageError if the checkpoint is of another kind of λ."""
        there = saved.entry(state, "mean_square", lambda value: value is None or isinstance(value, Tensor), "a tensor")
        if (there is None) is not (self._mean_square is None):
            raise asyncoll.UsageError("the checkpoint is of another kind of lambda: take the same value of adaptive")
        if self._mean_square is not None:
            there = saved.tensor(state, "mean_square", self._mean_square)
        super().load_state(state)
        if self._mean_square is not None:
            self._mean_square.copy_(there)

    def close(self) -> None:
        """Free the memory."""
        super().close()
        self._copies.clear()
