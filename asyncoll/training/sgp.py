"""SGP, stochastic gradient push: push-sum averages over a directed graph that changes in each step (algorithm 1).

Assran, Loizou, Ballas, Rabbat, "Stochastic gradient push for distributed deep learning", ICML 2019. Each rank keeps a
part of its numerator x and its weight q, and pushes equal parts to its peers of this step. The gradient is taken at
z = x / q. The overlap adds what a rank has received one step later, so that a step hides the exchange.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Unpack

import torch
from torch import Tensor, nn

import asyncoll
from asyncoll.training import saved
from asyncoll.training.step import Step
from asyncoll.training.trainer import Options, Trainer
from asyncoll.training.under_way import UnderWay


class Mass(NamedTuple):
    """A numerator of the length of the parameters, and its weight, one float64."""

    x: Tensor
    q: Tensor


class SGP(Trainer):
    """Take a local step, push parts of the numerator to `peers` ranks, and add what the others have pushed.

    The graph is the directed exponential one, with other peers in each step. With `overlap`, a step adds the parts of
    the step before: they travel while the next gradient is computed. `Reduction.ranks` are this rank and those whose
    parts were added in this step; in the first step with `overlap`, this rank alone.

    All ranks make the same number of steps. Each has its own model and its own state of the optimizer; `finish()` gives
    all ranks the mean of all models. Buffers are each rank's own until then. Clipping applies to the local gradient.
    A step that is cancelled ends the communicator, because parts of the numerators would be lost. Dropping
    the trainer without `finish()` ends it, too, while parts are under way: with `overlap`, after every step.

    A checkpoint has the numerator and the weight, and with `overlap` those before the parts that are under way were
    taken: it is each rank's own, and all ranks load the same round.

    Args:
        peers: the number of ranks to which a step pushes.
        overlap: a step adds the parts of the step before.

    See `Trainer` for the other arguments; a `weight` is refused, because models are averaged, and not gradients.

    Memory: the gradients, as one flat tensor, the numerator, and in an exchange one more for this rank and for each
    peer. With `overlap` one more.
    """

    has_local_state: ClassVar[bool] = True
    _has_rounds_of_all: ClassVar[bool] = False

    def __init__(
        self,
        comm: asyncoll.Communicator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        peers: int = 1,
        overlap: bool = False,
        **options: Unpack[Options],
    ) -> None:
        if peers < 1:
            raise asyncoll.UsageError(f"peers is a number of ranks, at least 1, not {peers}")
        super().__init__(comm, model, optimizer, **options)
        self._peers = peers
        self._overlap = overlap
        self._own = Mass(torch.empty_like(self._flat.trainable), torch.ones(1, dtype=torch.float64))
        self._before: Mass | None = None  # with `overlap`: the mass before the last parts were taken
        self._pushing: UnderWay[tuple[Tensor, float]] | None = None  # with `overlap`

    async def _update(self, weight: float | None) -> Step:
        self._refuse_weight(weight)  # line 3: G = ∇F(z_i)
        z = self._flat.trainable
        z.copy_(self._own.x)
        iteration = self.round
        self._apply()  # line 4: x_i = x_i - ηG
        self._own.x.copy_(z)
        sources: tuple[int, ...] = ()
        if self._overlap:
            received, self._pushing = self._pushing, self._push_later(iteration)
            # The parts that are added were pushed in the iteration before.
            iteration -= 1
        else:
            received = self._push(self._own, iteration)  # line 5
        if received is not None:
            await self._add(received)  # line 6
            sources = self.comm.neighbors(graph="exponential", iteration=iteration, peers=self._peers)
        torch.div(self._own.x, float(self._own.q), out=z)  # line 8: z_i = x_i / q_i
        return self._exchanged(sources)

    def _push(self, mass: Mass, iteration: int) -> UnderWay[tuple[Tensor, float]]:
        return UnderWay(self.comm.push_sum(mass.x, mass.q, iteration=iteration, peers=self._peers))

    def _push_later(self, iteration: int) -> UnderWay[tuple[Tensor, float]]:
        if self._before is None:
            self._before = Mass(torch.empty_like(self._own.x), torch.empty_like(self._own.q))
        self._before.x.copy_(self._own.x)
        self._before.q.copy_(self._own.q)
        return self._push(self._own, iteration)

    async def _add(self, received: UnderWay[tuple[Tensor, float]]) -> None:
        x, q = await received
        self._own.x.add_(x)
        self._own.q.add_(q)

    async def _finish(self) -> None:
        received, self._pushing = self._pushing, None
        if received is not None:
            await self._add(received)
        await self.comm.allreduce(self._own.x)
        await self.comm.allreduce(self._own.q)
        # No mass is lost: the mean of all models.
        torch.div(self._own.x, float(self._own.q), out=self._flat.trainable)
        await self._unite_buffers()

    async def _resume(self) -> None:
        if not self.round:
            self._own.x.copy_(self._flat.trainable)
        elif self._before is not None:  # push the parts that were under way again
            self._pushing = self._push(Mass(self._before.x.clone(), self._before.q.clone()), self.round - 1)

    def _own_state(self) -> dict[str, Any]:
        state = {"x": self._own.x.clone(), "q": float(self._own.q)}
        if self._before is not None:
            state |= {"x before": self._before.x.clone(), "q before": float(self._before.q)}
        return state

    def _load_own_state(self, own: dict[str, Any]) -> None:
        if self._overlap is not ("x before" in own):
            raise asyncoll.UsageError("the checkpoint was saved with another setting of overlap: use the same")
        x, q = saved.tensor(own, "x", self._own.x), saved.positive(own, "q")
        if self._overlap:
            # It may have been saved on another device.
            before = saved.tensor(own, "x before", self._own.x).to(self._own.x.device, copy=True)
            weight = saved.positive(own, "q before")
            self._before = Mass(before, torch.tensor([weight], dtype=torch.float64))
        self._own.x.copy_(x)
        self._own.q.fill_(q)
