"""Checkpoints of trainers in which a value is missing, of another type, negative or NaN: an error that names it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch.optim import lr_scheduler

import asyncoll
from asyncoll.testing import run_ranks
from asyncoll.torch.hooks.option_schedule import OptionSchedule
from asyncoll.training import DCASGD, SGP, OkTopkSGD, Trainer
from tests.support.damage import damaged
from tests.support.training_loops import ALGORITHMS, AT_OWN_PACE, loss, momentum, network

TRAINERS: dict[str, Any] = (
    ALGORITHMS
    | AT_OWN_PACE
    | {
        "sgp with overlap": partial(SGP, overlap=True),
        "adaptive": partial(DCASGD, adaptive=True),
        "dense first": partial(OkTopkSGD, density=0.3, residual="gradients", warm_up=2),
    }
)


def made(comm: asyncoll.Communicator, algorithm: str) -> Trainer:
    model = network()
    trainer: Trainer = TRAINERS[algorithm](comm, model, momentum(model))
    return trainer


@pytest.mark.parametrize("algorithm", TRAINERS)
def test_a_damaged_checkpoint_of_a_trainer_is_a_usage_error(algorithm: str) -> None:
    async def saved(comm: asyncoll.Communicator) -> dict[str, Any]:
        sgd = made(comm, algorithm)
        await sgd.start()
        for call in range(4):
            loss(sgd.model, comm.rank, call).backward()
            await sgd.step()
        state = sgd.state_dict()
        await sgd.finish()
        return state

    async def taken(comm: asyncoll.Communicator) -> list[str]:
        """The damages that do not raise."""
        sgd, found = made(comm, algorithm), []
        for what, each in [*damaged(states[comm.rank]), ("a list", []), ("None", None), ("a text", "abc")]:
            try:
                sgd.load_state_dict(each)  # type: ignore[arg-type]
            except asyncoll.UsageError:
                assert sgd.round == 0
            else:
                found.append(what)
                sgd.round = 0
        sgd.load_state_dict(states[comm.rank])
        return found

    states = run_ranks(2, saved)
    for each in run_ranks(2, taken):
        assert [what for what in each if not is_harmless(what)] == []


SCHEDULERS: dict[str, Any] = {
    "one": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(optimizer, 0.9)]),
    "in turn": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
    ),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_hook_goes_on_with_the_state_of_every_kind_of_scheduler(kind: str) -> None:
    def scheduled() -> OptionSchedule:
        optimizer = momentum(network())
        return OptionSchedule(optimizer, SCHEDULERS[kind](optimizer))

    one, other = scheduled(), scheduled()
    one._optimizer.step()
    for round_ in (1, 2, 3):
        one.step(round_)
    other.load(one.state())
    assert other.state() == one.state()


def is_harmless(what: str) -> bool:
    """Whether a checkpoint with this damage may be taken.

    A rank is not compared where any one's checkpoint is that of all. A sparse allreduce without a state begins anew.
    """
    is_anew = what.startswith("('own', 'operations', ") and what.endswith("is a NoneType") and what.count("', '") == 2
    return what.startswith("('rank',)") or is_anew
