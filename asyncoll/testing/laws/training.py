"""A world of `EagerSGD` with history, in which ranks are later than that, the record of its steps, and their laws.

Each step of each rank has a gradient of 1 at an element of its own, and the optimizer subtracts gradients. So a model
shows which gradients are in it. A second parameter has momentum, of which the optimizer keeps a state.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from asyncoll.communicator import Communicator
from asyncoll.tensors.reductions import Array
from asyncoll.testing.laws.rounds import Breach
from asyncoll.testing.laws.story import NAP_S, STEP_S, Case, CaseRank, WorldStory

_STEPS = 40  # the most steps of a rank
_PARTIALS = ("solo", "solo", "majority", "quorum")
_KEYS = ("loss", "accuracy", "norm")


class TrainingProgram:
    """What the ranks of a case do, drawn from it."""

    def __init__(self, case: Case) -> None:
        self.case = case
        draw = np.random.default_rng([case.seed, case.size, 7])
        drawn = _PARTIALS[draw.integers(len(_PARTIALS))]
        self.partial = case.method_name or drawn
        self.history = int((1, 1, 2, 5)[draw.integers(4)])
        self.has_metrics = bool(draw.integers(2))
        self.rounds = draw.integers(12, 25, size=case.size).tolist()  # by rank: where its loop ends
        # Naps of one rank, of some, or of all but one: by rank, the step before which it sleeps.
        lazy = draw.permutation(case.size)[: draw.integers(case.size + 1) if case.sleeper is not None else 0].tolist()
        self.naps = {rank: int(draw.integers(1, 9)) for rank in lazy}
        self.validates = bool(draw.integers(2))  # between steps other weights are in the models for some time

    def metrics(self, rank: int, step: int) -> dict[str, float]:
        """The metrics of a step: keys differ by rank and step."""
        draw = np.random.default_rng([self.case.seed, rank, step])
        return {key: float(draw.normal()) for key in (*_KEYS, f"of rank {rank}") if draw.random() < 0.7}


@dataclass(frozen=True, slots=True, repr=False)
class Done:
    """A step that has returned."""

    index: int
    round: int
    recovered: bool
    lost: bool  # results between the model that its rank had and those that it was told of
    metrics: dict[str, float]
    newest: int  # the round that the call was given, of which the metrics are
    held: Array  # the gradients in the model, by [step, rank], as they were subtracted
    state: str  # a digest of the model and the optimizer
    took_s: float


@dataclass(frozen=True, slots=True, repr=False)
class TrainingPart:
    """What one rank did."""

    made: list[int]  # the steps that it began, those that were cancelled among them
    done: list[Done] = field(default_factory=list)  # the last one is the end of the training


TrainingStory = WorldStory[TrainingProgram, TrainingPart]


class Learner(CaseRank):
    """One rank of a case."""

    def __init__(self, comm: Communicator, case: Case) -> None:
        import torch

        from asyncoll.training import EagerSGD

        super().__init__(comm, case)
        self._program = TrainingProgram(case)
        self._held = torch.nn.Parameter(torch.zeros(_STEPS, comm.size))
        self._moving = torch.nn.Parameter(torch.zeros(3))
        self._optimizer = torch.optim.SGD(
            [{"params": [self._held], "momentum": 0.0}, {"params": [self._moving], "momentum": 0.9}], lr=1.0
        )
        model = torch.nn.ParameterList([self._held, self._moving])
        program = self._program
        self._sgd: Any = EagerSGD(
            comm,
            model,
            self._optimizer,
            partial=program.partial,
            history=program.history,
        )

    async def run(self) -> TrainingPart:
        program, rank = self._program, self._comm.rank
        part = TrainingPart([])
        await self._sgd.start()
        while self._sgd.round < program.rounds[rank] and len(part.made) < _STEPS:
            await self._compute()
            if len(part.made) == program.naps.get(rank):
                await asyncio.sleep(NAP_S)
            part.made.append(len(part.made))
            done = await self._step(part.made[-1])
            if done is not None:
                part.done.append(done)
            if program.validates and self._generator.random() < 0.3:
                await self._validate()
        await self._sgd.finish()
        part.done.append(self._record(len(part.made), None, 0.0))
        return part

    async def _validate(self) -> None:
        """Await something while other weights are in the model, as a validation with averaged ones does."""
        parameters = self._held.data, self._moving.data
        own = [each.clone() for each in parameters]
        for each in parameters:
            each.fill_(1e6)
        await self._compute()
        for each, before in zip(parameters, own, strict=True):
            each.copy_(before)

    async def _step(self, index: int) -> Done | None:
        """Make a step. None: the impatient rank has cancelled it."""
        program, rank, now = self._program, self._comm.rank, asyncio.get_running_loop().time
        loss = self._held[index, rank] + (self._moving * float(self._generator.integers(-3, 4))).sum()
        loss.backward()
        began_s, before = now(), self._sgd.round
        metrics = program.metrics(rank, index) if program.has_metrics else None
        step = asyncio.ensure_future(self._sgd.step(metrics=metrics))
        if rank == program.case.impatient and self._generator.random() < 0.5:
            await asyncio.wait([step], timeout=float(self._generator.exponential(STEP_S)))
            step.cancel()
        await asyncio.wait([step])
        return None if step.cancelled() else self._record(index, step.result(), now() - began_s, before)

    def _record(self, index: int, step: Any, took_s: float, before: int = 0) -> Done:
        momentum = self._optimizer.state.get(self._moving, {}).get("momentum_buffer")
        tensors = [self._held, self._moving, *([] if momentum is None else [momentum])]
        digest = hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()
        held = -self._held.detach().numpy().copy()
        if step is None:
            return Done(index, self._sgd.round, False, False, {}, 0, held, digest, took_s)
        newest = self._sgd._due.newest
        lost = newest - len(step.missed) > before + 1
        return Done(index, step.round, step.recovered, lost, step.metrics, newest, held, digest, took_s)


# -- the laws ------------------------------------------------------------------------------------


def equal(story: TrainingStory) -> Iterator[Breach]:
    """Replicas that are at the same round are equal to the bit, with the optimizer: also after a recovery."""
    states: dict[int, str] = {}
    for rank, done in _all(story):
        if states.setdefault(done.round, done.state) != done.state:
            yield Breach(done.round, rank, f"step {done.index} left another model than that of another rank")
    ends = {part.done[-1].round for part in story.parts}
    if len(ends) > 1:
        yield Breach(max(ends), 0, f"the ranks have ended at the rounds {sorted(ends)}")


def once(story: TrainingStory) -> Iterator[Breach]:
    """No gradient is in a model twice, or in part."""
    share = _share(story)
    for rank, done in _all(story):
        for step, owner in np.argwhere((done.held != 0) & (done.held != share)).tolist():
            yield Breach(done.round, rank, f"it holds {done.held[step, owner]:g} of step {step} of rank {owner}")


def whole(story: TrainingStory) -> Iterator[Breach]:
    """In the end all models hold the gradients of all steps, also of cancelled ones, and nothing else."""
    made = np.zeros((_STEPS, story.program.case.size), bool)
    for rank, part in enumerate(story.parts):
        made[part.made, rank] = True
    for rank, part in enumerate(story.parts):
        for step, owner in np.argwhere((part.done[-1].held != 0) != made).tolist():
            what = "lacks" if made[step, owner] else "holds"
            yield Breach(part.done[-1].round, rank, f"its last model {what} step {step} of rank {owner}")


def recovery(story: TrainingStory) -> Iterator[Breach]:
    """A rank that has lost results recovers, and no other; it is at the round of its call then, or a later one."""
    for rank, part in enumerate(story.parts):
        for done in part.done:
            is_due = done.lost if rank != story.program.case.impatient else done.lost or done.recovered
            if done.recovered != is_due or done.round < done.newest:
                yield Breach(done.round, rank, f"step {done.index}: lost {done.lost}, recovered {done.recovered}")


def prompt(story: TrainingStory) -> Iterator[Breach]:
    """A step waits for no rank that sleeps, where its rounds do not: also not for one that recovers."""
    if story.program.partial != "solo":
        return
    for rank, part in enumerate(story.parts):
        for done in part.done:
            if not done.recovered and done.took_s > NAP_S / 2:
                yield Breach(done.round, rank, f"step {done.index} took {done.took_s:.0f} s")


def metrics(story: TrainingStory) -> Iterator[Breach]:
    """The metrics of a step are the means over the contributions of the round, each step of a rank counting one."""
    held = {done.round: done.held for _, done in _all(story)}
    held[0] = np.zeros((_STEPS, story.program.case.size))
    for rank, part in enumerate(story.parts):
        for done in part.done[:-1]:
            if not story.program.has_metrics:
                if done.metrics:
                    yield Breach(done.newest, rank, f"step {done.index} returned {done.metrics}")
            elif done.newest in held and done.newest - 1 in held:
                given = np.argwhere(held[done.newest] != held[done.newest - 1]).tolist()
                yield from _means(story.program, rank, done, [story.program.metrics(of, step) for step, of in given])


def _means(program: TrainingProgram, rank: int, done: Done, given: list[dict[str, float]]) -> Iterator[Breach]:
    keys = {key for each in given for key in each}
    if set(done.metrics) != keys:
        yield Breach(done.newest, rank, f"step {done.index} has metrics {sorted(done.metrics)}, and not {sorted(keys)}")
        return
    for key in sorted(keys):
        expected = np.mean([each[key] for each in given if key in each])
        if abs(done.metrics[key] - expected) > 1e-12:
            yield Breach(done.newest, rank, f"step {done.index}: {key} is {done.metrics[key]}, and not {expected}")


def _share(story: TrainingStory) -> Any:
    """What a gradient of 1 takes from the model: a round divides by the number of ranks."""
    return np.float32(1) / np.float32(story.program.case.size)


def _all(story: TrainingStory) -> Iterator[tuple[int, Done]]:
    return ((rank, done) for rank, part in enumerate(story.parts) for done in part.done)


LAWS: tuple[Callable[[TrainingStory], Iterator[Breach]], ...] = (equal, once, whole, recovery, prompt, metrics)
