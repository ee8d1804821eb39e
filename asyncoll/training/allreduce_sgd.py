"""Synchronous data-parallel SGD: the "synch-SGD" with which the papers compare.

Li, Ben-Nun, Di Girolamo, Alistarh, Hoefler, "Taming unbalanced training workloads in deep learning with partial
collective operations", PPoPP 2020, section 3.
"""

from __future__ import annotations

from typing import ClassVar

from asyncoll.training.step import Step
from asyncoll.training.trainer import Trainer


class AllreduceSGD(Trainer):
    """Average the gradients of all ranks in each step.

    All ranks make the same number of steps, and have the same model after each, to the bit. See `Trainer` for the
    arguments.

    Memory: the gradients, as one flat tensor.
    """

    _is_elastic: ClassVar[bool] = True

    async def _update(self, weight: float | None) -> Step:
        # G_local = mean gradient of b local samples at w
        await self._average_gradients(weight)  # G = sum of G_local / P, once the slowest rank has called
        self._apply()  # w = w + U(G, w, t)
        await self._settle_buffers()
        return self._complete()

    def _differs(self) -> str:
        return ""  # models are equal after each step

    async def _finish(self) -> None:
        await self._unite_buffers()
