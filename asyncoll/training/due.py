"""Which results of rounds a replica has still to apply, and which ones it has lost: the lateness of one rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from torch import Tensor

import asyncoll


class Due:
    """The results that this rank was told of and that are not in its model yet: those of consecutive rounds."""

    def __init__(self, newest: int = 0) -> None:
        self.newest = newest  # the newest round that this rank was told of
        self.lost = 0  # results that are lost to this rank since all replicas were equal
        self._results = deque[tuple[int, Tensor]]()  # by round

    @property
    def needed(self) -> int:
        """The round whose model the results continue."""
        # A round without contributors has no result, and changes no model.
        return (self._results[0][0] if self._results else self.newest) - 1

    def hear(self, reduction: asyncoll.Reduction, round_: int) -> None:
        """Note the results that a call tells of: those of consecutive rounds, up to `round_`, its own."""
        oldest = round_ - len(reduction.missed)
        # The results between are lost.
        if oldest > self.newest + 1:
            self._results.clear()
        self._results += enumerate(reduction.results(), oldest)
        self.newest = round_

    def copy(self, own: Tensor) -> None:
        """Keep the result that is in `own`, which is used for something else from now on."""
        self._results = deque((number, result.clone() if result is own else result) for number, result in self._results)

    def count_lost(self, round_: int) -> None:
        """The model is that of round `round_`, and goes on with the results: those between are lost."""
        self.lost += max(0, self.needed - round_)

    def after(self, round_: int) -> Iterator[Tensor]:
        """Take out all results. Those of rounds after `round_`, oldest first: the model has those before."""
        while self._results:
            number, result = self._results.popleft()
            if number > round_:
                yield result
