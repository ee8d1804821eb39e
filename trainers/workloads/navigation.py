"""Reinforcement learning: PPO on mazes, with episodes of different length.

Schulman et al., "Proximal policy optimization algorithms", arXiv:1707.06347, 2017, with the constants of DD-PPO
(Wijmans et al., ICLR 2020, section 4). Each rank collects its own rollouts, as in DD-PPO.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

import asyncoll
from trainers.workloads.base import check_identity, evaluating, refuse_data, seeded

if TYPE_CHECKING:
    import gymnasium

_OBSERVATION, _MOVES = 29, 4  # `maze.OBSERVATION` and `maze.MOVES`: importing that module needs gymnasium
_DISCOUNT, _TRACE = 0.99, 0.95  # gamma and lambda of generalised advantage estimation
_CLIP, _VALUE, _ENTROPY = 0.2, 0.5, 0.01
_EPOCHS, _MINIBATCHES = 4, 2  # over a rollout, and of each epoch
_HELD_OUT = 32  # mazes that the score uses
_HELD_OUT_SEED = 1 << 30  # far from the seeds of training


class ActorCritic(nn.Module):
    """A policy and a value with separate layers: in shared ones the large errors of early values hide the policy."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.policy, self.value = (_perceptron(width, layers, outputs) for outputs in (_MOVES, 1))

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the moves (number, 4), and values (number,), of observations (number, 29)."""
        return self.policy(observations).log_softmax(dim=1), self.value(observations)[:, 0]


def _perceptron(width: int, layers: int, outputs: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for inputs in [_OBSERVATION, *[width] * (layers - 1)]:
        parts += [nn.Linear(inputs, width), nn.Tanh()]
    return nn.Sequential(*parts, nn.Linear(width, outputs))


@dataclass(frozen=True, slots=True)
class Rollout:
    """The steps of whole episodes, one after another: all tensors have one row for each step."""

    observations: Tensor
    moves: Tensor
    log_probabilities: Tensor  # of the moves, when they were taken
    advantages: Tensor
    returns: Tensor


class Navigation:
    """Mazes with episodes of different length, by PPO; a small stand-in for DD-PPO on Habitat.

    A rollout is `batch` whole episodes of this rank; it gives eight losses: four epochs of two minibatches each. The
    first loss of a rollout takes the time of its episodes, which differ in number of steps; `weight` is the number of
    steps in the minibatch. Mazes have 9x9 cells, and the networks of policy and value 12,485 parameters. At the full
    size mazes have 33x33 cells, and the networks have 8,475,084 parameters: that of the WAGMA paper has 8,476,421, and
    sees camera images.
    """

    name: ClassVar[str] = "navigation"
    summary: ClassVar[str] = "PPO finds ways through mazes; episodes differ in length."
    paper: ClassVar[str] = "Wijmans et al., DD-PPO, ICLR 2020; Li et al., WAGMA-SGD, TPDS 2021, section V"
    metric: ClassVar[str] = "success by path length in held-out mazes"
    defaults: ClassVar[dict[str, Any]] = {
        "rounds": 800, "batch": 16, "learning_rate": 5e-3, "momentum": 0.9, "target": 0.45,
    }  # fmt: skip
    is_weighted: ClassVar[bool] = True
    is_synthetic = True

    def __init__(
        self, rank: int, size: int, batch: int, seed: int, *, full: bool = False, data: Path | None = None
    ) -> None:
        refuse_data(self.name, data)
        if batch < _MINIBATCHES:  # an episode may have one step, and a minibatch needs one
            raise asyncoll.UsageError(f"{self.name} needs a batch of at least {_MINIBATCHES} episodes, not {batch}")
        side = 33 if full else 9
        self._mazes = [_maze(side) for _ in range(batch)]
        self._test_mazes = [_maze(side) for _ in range(_HELD_OUT)]
        with seeded(seed):
            self.model: nn.Module = self.network(full)
        self.weight = 0.0
        self._rank, self._seed = rank, seed
        self._identity = {
            "workload": self.name, "rank": rank, "batch": batch, "size": size, "seed": seed, "full": full,
        }  # fmt: skip
        self._collected, self._used = 0, 0  # rollouts, and losses of the last one
        self._device = torch.device("cpu")
        self._rollout: Rollout | None = None

    def move(self, device: torch.device) -> None:
        """Move the model to `device`. Episodes are played on the host, which sees each observation and each move."""
        self.model.to(device)
        self._device = device

    @staticmethod
    def network(full: bool) -> nn.Module:
        """The model of that size."""
        return ActorCritic(1447, 3) if full else ActorCritic(64, 2)

    def loss(self) -> Tensor:
        """PPO's loss of the next minibatch: policy, value and entropy; collects a rollout if the last is used up."""
        if self._rollout is None or self._used == _EPOCHS * _MINIBATCHES:
            self._rollout, self._used = self._collect(), 0
            self._collected += 1
        rows = self._minibatch(len(self._rollout.moves))
        self._used += 1
        self.weight = float(len(rows))
        return _ppo_loss(self.model, self._rollout, rows)

    def _minibatch(self, steps: int) -> Tensor:
        epoch, part = divmod(self._used, _MINIBATCHES)
        generator = np.random.default_rng((self._seed, self._rank, self._collected, epoch))
        rows = np.array_split(generator.permutation(steps), _MINIBATCHES)[part]
        return torch.from_numpy(rows).to(self._device)

    def _collect(self) -> Rollout:
        seeds = np.random.SeedSequence((self._seed, self._rank, self._collected)).generate_state(len(self._mazes) + 1)
        mazes = [int(seed) % _HELD_OUT_SEED for seed in seeds[1:]]
        episodes = play(self.model, self._mazes, mazes, torch.Generator().manual_seed(int(seeds[0])))
        parts = [_judge(episode) for episode in episodes]
        fields = (torch.cat([getattr(part, f.name) for part in parts]) for f in dataclasses.fields(Rollout))
        return Rollout(*(rows.to(self._device) for rows in fields))

    def score(self) -> float:
        """Mean SPL of 32 mazes; moves are drawn from the policy, with equal random numbers in each call."""
        seeds = [_HELD_OUT_SEED + number for number in range(_HELD_OUT)]
        episodes = play(self.model, self._test_mazes, seeds, torch.Generator().manual_seed(0))
        return sum(episode.spl for episode in episodes) / _HELD_OUT

    def optimizer(self, learning_rate: float, momentum: float) -> torch.optim.Optimizer:
        """Adam, with the epsilon that is usual for PPO."""
        return torch.optim.Adam(self.model.parameters(), lr=learning_rate, betas=(momentum, 0.999), eps=1e-5)

    def state_dict(self) -> dict[str, Any]:
        """The numbers of rollouts and of losses of the last one, and its steps: models of the past have played it."""
        steps = None
        if self._rollout is not None:
            steps = {f.name: getattr(self._rollout, f.name).clone() for f in dataclasses.fields(Rollout)}
        return {**self._identity, "collected": self._collected, "used": self._used, "steps": steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`. Raises UsageError if it is that of another stream."""
        check_identity(self._identity, state)
        self._collected, self._used = state["collected"], state["used"]
        steps = state["steps"]
        if steps is not None:
            steps = Rollout(**{name: rows.to(self._device, copy=True) for name, rows in steps.items()})
        self._rollout = steps


# -- episodes ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Episode:
    """One episode: a list item for each of its steps."""

    observations: list[Tensor] = dataclasses.field(default_factory=list)
    moves: list[int] = dataclasses.field(default_factory=list)
    log_probabilities: list[float] = dataclasses.field(default_factory=list)
    values: list[float] = dataclasses.field(default_factory=list)
    rewards: list[float] = dataclasses.field(default_factory=list)
    spl: float = 0.0


def play(
    model: nn.Module, mazes: list[gymnasium.Env[Any, Any]], seeds: list[int], generator: torch.Generator
) -> list[Episode]:
    """One whole episode in each of the mazes, which are drawn from the `seeds`; moves are drawn from the policy."""
    episodes, device = [Episode() for _ in mazes], next(model.parameters()).device
    seen = {place: mazes[place].reset(seed=seed)[0] for place, seed in enumerate(seeds)}  # of running episodes
    while seen:
        observations = torch.from_numpy(np.stack(list(seen.values())))
        with evaluating(model):
            log_probabilities, values = (x.cpu() for x in model(observations.to(device)))
        moves = torch.multinomial(log_probabilities.exp(), 1, generator=generator)
        drawn = zip(
            list(seen),
            observations.unbind(),
            moves[:, 0].tolist(),
            log_probabilities.gather(1, moves)[:, 0].tolist(),
            values.tolist(),
            strict=True,
        )
        for place, observation, move, log_probability, value in drawn:
            episode = episodes[place]
            seen[place], reward, is_there, is_over, info = mazes[place].step(move)
            episode.observations.append(observation)
            episode.moves.append(move)
            episode.log_probabilities.append(log_probability)
            episode.values.append(value)
            episode.rewards.append(float(reward))
            if is_there or is_over:
                episode.spl = info["spl"]
                del seen[place]
    return episodes


def _judge(episode: Episode) -> Rollout:
    """The steps of an episode with their advantages (Schulman et al., 2016, "High-dimensional continuous control").

    An episode that was cut counts as ended: the limit is a rule of the maze.
    """
    advantages, ahead, next_value = [], 0.0, 0.0
    for reward, value in zip(reversed(episode.rewards), reversed(episode.values), strict=True):
        ahead = reward + _DISCOUNT * next_value - value + _DISCOUNT * _TRACE * ahead
        next_value = value
        advantages.append(ahead)
    advantage = torch.tensor(advantages[::-1])
    return Rollout(
        observations=torch.stack(episode.observations),
        moves=torch.tensor(episode.moves),
        log_probabilities=torch.tensor(episode.log_probabilities),
        advantages=advantage,
        returns=advantage + torch.tensor(episode.values),
    )


def _ppo_loss(model: nn.Module, rollout: Rollout, rows: Tensor) -> Tensor:
    """Clipped surrogate objective, squared error of the values, and entropy: equation 9 of Schulman et al., 2017."""
    log_probabilities, values = model(rollout.observations[rows])
    mine = log_probabilities.gather(1, rollout.moves[rows, None])[:, 0]
    ratio = (mine - rollout.log_probabilities[rows]).exp()
    advantages = rollout.advantages[rows]
    advantages = (advantages - rollout.advantages.mean()) / (rollout.advantages.std() + 1e-5)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - _CLIP, 1 + _CLIP) * advantages).mean()
    entropy = -(log_probabilities.exp() * log_probabilities).sum(dim=1).mean()
    error = nn.functional.mse_loss(values, rollout.returns[rows])
    loss: Tensor = _VALUE * error - surrogate - _ENTROPY * entropy
    return loss


def _maze(side: int) -> gymnasium.Env[Any, Any]:
    try:
        import gymnasium

        from trainers.workloads.maze import NAME
    except ImportError as error:
        raise asyncoll.UsageError("navigation needs gymnasium: pip install 'asyncoll[trainers]'") from error
    return gymnasium.make(NAME, side=side, disable_env_checker=True)
