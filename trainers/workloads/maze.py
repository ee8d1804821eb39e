"""A maze as a gymnasium environment: find the way to a goal whose direction is known, past walls seen from near.

It stands in for point-goal navigation in buildings (Wijmans et al., "DD-PPO", ICLR 2020): the reward, the episodes
whose length follows the distance and the skill, and the score, which is success weighted by path length (SPL, Anderson
et al., "On evaluation of embodied navigation agents", 2018, section 3).
"""

from __future__ import annotations

from collections import deque
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

NAME = "asyncoll/Maze-v0"
SIGHT = 2  # cells that are seen in each direction
OBSERVATION = (2 * SIGHT + 1) ** 2 + 4  # cells in sight, the goal's direction and the last move
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))

_SUCCESS, _PER_MOVE = 2.5, 0.01  # DD-PPO, section 5: reward at the goal, and cost of a step
_WALLS = 0.2  # the share of cells that are walls

Observation = NDArray[np.float32]
Cell = tuple[int, int]


class Maze(gymnasium.Env[Observation, np.int64]):
    """A square of `side` * `side` cells, 20 % of them walls; an episode ends at the goal or after 4 * `side` moves.

    An observation has 29 numbers: the 5x5 cells around the agent, row by row (1 for a wall), the offset of the goal as
    (rows, columns) / `side`, and the last move, likewise. Actions are the moves up, down, left and right; a move
    against a wall is lost. The reward is how much nearer the goal is by the shortest way, less 0.01, and 2.5 at the
    goal. The `info` of the last step has "spl": shortest / taken moves if the goal was reached, else 0.
    """

    def __init__(self, side: int) -> None:
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (OBSERVATION,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(len(MOVES))
        self._side = side
        self._limit = 4 * side

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """A new maze with a new start and goal, which have a way between them; a function of the seed."""
        super().reset(seed=seed)
        while True:
            free = np.zeros((self._side + 2 * SIGHT, self._side + 2 * SIGHT), bool)
            inside = slice(SIGHT, SIGHT + self._side)
            free[inside, inside] = self.np_random.random((self._side, self._side)) >= _WALLS
            cells = np.argwhere(free)
            goal, start = (tuple(map(int, cells[self.np_random.integers(len(cells))])) for _ in range(2))
            self._left = _distances(free, (goal[0], goal[1]))
            if (start[0], start[1]) in self._left and start != goal:
                break
        self._walls = (~free).astype(np.float32)
        self._goal, self._at = (goal[0], goal[1]), (start[0], start[1])
        self._last: Cell = (0, 0)
        self._shortest, self._taken = self._left[self._at], 0
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Make a move."""
        before = self._left[self._at]
        self._last = MOVES[int(action)]
        ahead = self._at[0] + self._last[0], self._at[1] + self._last[1]
        if ahead in self._left:
            self._at = ahead
        self._taken += 1
        is_there = self._at == self._goal
        is_over = not is_there and self._taken == self._limit
        reward = before - self._left[self._at] - _PER_MOVE + (_SUCCESS if is_there else 0.0)
        info = {"spl": self._shortest / self._taken if is_there else 0.0} if is_there or is_over else {}
        return self._observe(), reward, is_there, is_over, info

    def _observe(self) -> Observation:
        row, column = self._at
        seen = self._walls[row - SIGHT : row + SIGHT + 1, column - SIGHT : column + SIGHT + 1]
        towards = (self._goal[0] - row) / self._side, (self._goal[1] - column) / self._side
        return np.concatenate([seen.ravel(), towards, self._last], dtype=np.float32)


def _distances(free: NDArray[np.bool_], goal: Cell) -> dict[Cell, int]:
    """The moves to the goal from each cell that has a way to it."""
    found, pending = {goal: 0}, deque([goal])
    while pending:
        row, column = pending.popleft()
        for down, right in MOVES:
            cell = row + down, column + right
            if free[cell] and cell not in found:
                found[cell] = found[row, column] + 1
                pending.append(cell)
    return found


gymnasium.register(id=NAME, entry_point=f"{__name__}:{Maze.__name__}")
