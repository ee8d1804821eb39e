"""D-PSGD: each rank averages its model with those of its two neighbours in a ring (algorithm 1).

Lian, Zhang, Zhang, Hsieh, Zhang, Liu, "Can decentralized algorithms outperform centralized algorithms? A case study for
decentralized parallel stochastic gradient descent", NeurIPS 2017. No rank waits for all others: a late rank delays its
neighbours in this step, and theirs in the next one.
"""

from __future__ import annotations

from typing import ClassVar

from asyncoll.training.step import Step
from asyncoll.training.trainer import Trainer


class DPSGD(Trainer):
    """Average the model with those of the neighbours in a ring, and take a local step from there.

    The weights of the three models are 1/3 each. Two ranks are each other's only neighbour: the weights are then 1/2.

    All ranks make the same number of steps. Each has its own model and its own state of the optimizer; `finish()` gives
    all ranks the mean of all models. Buffers are each rank's own until then. Clipping applies to the local gradient.

    A checkpoint is each rank's own, and all ranks load the same round. See `Trainer` for the arguments; a `weight` is
    refused, because models are averaged, and not gradients.

    Memory: the gradients, as one flat tensor, and two copies of the parameters during the average.
    """

    has_local_state: ClassVar[bool] = True
    _has_rounds_of_all: ClassVar[bool] = False

    async def _update(self, weight: float | None) -> Step:
        self._refuse_weight(weight)  # G = mean gradient at x_i
        await self.comm.neighbor_average(self._flat.trainable, graph="ring")  # lines 4 and 5: x = Wx
        self._apply()  # line 6: x_i = mean - ηG
        return self._exchanged(self.comm.neighbors(graph="ring"))

    async def _finish(self) -> None:
        await self._average_models()
