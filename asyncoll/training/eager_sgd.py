"""Eager-SGD: SGD that does not wait for slow ranks.

Li, Ben-Nun, Di Girolamo, Alistarh, Hoefler, "Taming unbalanced training workloads in deep learning with partial
collective operations", PPoPP 2020, section 5. Line 7 of its algorithm is the only difference from synchronous SGD: a
partial allreduce takes the gradients of the ranks that have arrived. A gradient that comes too late is not lost: the
collective keeps it, and it enters a later round.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar, Literal, NamedTuple, Unpack

import torch
from torch import nn

import asyncoll
from asyncoll.extending import policies
from asyncoll.training import replicas
from asyncoll.training.due import Due
from asyncoll.training.recovery import Recovery
from asyncoll.training.step import Step, step_of
from asyncoll.training.step_metrics import beside, means, without
from asyncoll.training.trainer import MODELS_MAY_DIFFER, Options, Trainer
from asyncoll.training.training_epochs import RankPart, members_of
from asyncoll.training.under_way import UnderWay
from asyncoll.training.untaken import Untaken

Partial = Literal["solo", "majority", "quorum"]
HISTORY = 64  # results that a training keeps for late ranks
UNEQUAL = f"{MODELS_MAY_DIFFER}, and late gradients may be in no round"


class EagerSGD(Trainer):
    """Average the gradients of the ranks that have arrived, and add late ones to a later round.

    A late rank makes fewer steps than there are rounds, so programs count `Trainer.round`, never their own steps.

    A rank that is late by no more than `history` rounds applies every result that it has missed. So all replicas that
    have applied the same round are equal to the bit. A rank that is later takes the model, the optimizer and the round
    of another rank, to the bit, and buffers unless they are "local" (`Step.recovered`): `history` bounds memory, and
    not lateness. That rank gives a copy of them in its next step, or while it waits in one. Only the late rank waits
    for that. With `sync_every` a rank that is later loses results instead, until the next synchronous round makes all
    replicas equal again, optimizer state included. (A history of `sync_every` rounds is always enough.) Without
    history, as in the paper, models drift apart until they are averaged.

    Ranks may end at different rounds: `finish()` gives all of them the newest one. Each has made a step by then.

    Where models are equal, at the start and after a round that is `synchronous` with history, a checkpoint of one rank
    is one of all. A checkpoint of another moment lacks the gradients that are staged and in no round yet. If the ranks
    have loaded different rounds, all go on from the newest.

    Args:
        partial: a round starts with the first rank ("solo"), with any of `candidates` drawn ranks ("majority"), with
            the `quorum`-th rank ("quorum"), or by a policy: the name that `asyncoll.extending.register_policy` gave it.
        candidates: the number of ranks that are drawn for a round of "majority" or of a policy.
        quorum: the number of ranks for which a round of "quorum" waits; by default size // 2 + 1.
        history: the number of results that are kept for late ranks; by default 64, with `average_every` 0.
        sync_every: every so many rounds, one waits for all ranks (0: none): the rounds whose `Trainer.round` is a
            multiple, also after a checkpoint.
        average_every: without history, models are averaged every so many rounds (0: only at the end).
        op: AVG, as in the paper, divides the sum of the gradients of a round by the number of all ranks, so a round
            with few active ranks makes a short step. AVG_ACTIVE divides by the number of active ranks. With weights,
            the sum is divided by the weights in the round.
        seed: of the ranks that are drawn; the same at every rank.
        name: of the rounds: a second training on one communicator needs another one.

    See `Trainer` for the other arguments.

    Memory: the gradients, as one flat tensor. The rounds hold about three more of that size by message (the staged
    contribution, the sum that is reduced, and the result), and one for each result of the history.
    """

    _carries_metrics: ClassVar[bool] = True
    _is_elastic: ClassVar[bool] = True
    _steps_together: ClassVar[bool | None] = False

    def __init__(
        self,
        comm: asyncoll.Communicator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        partial: Partial | str = "solo",
        candidates: int = 1,
        quorum: int | None = None,
        history: int | None = None,
        sync_every: int = 0,
        average_every: int = 0,
        op: asyncoll.ReduceOp = asyncoll.AVG,
        seed: int = 0,
        name: str = "eager-sgd",
        **options: Unpack[Options],
    ) -> None:
        if history and average_every:
            raise asyncoll.UsageError("with history no replica drifts: average_every is for training with history=0")
        if history is None:
            history = 0 if average_every else HISTORY
        if options.get("elastic") and not history:
            raise asyncoll.UsageError("elastic needs history, by which the models of all ranks stay equal")
        super().__init__(comm, model, optimizer, **options)
        self._rule: tuple[str, int, int | None, int] = partial, candidates, quorum, seed
        self._op = op
        self._history = history
        self._are_equal = True  # the models of all ranks, and no gradient is staged
        self._sync_every = sync_every
        self._average_every = average_every
        self._name = name
        self._untaken = Untaken()
        self._has_stepped = False
        self._own_metrics: asyncoll.Metrics | None = None  # of the step under way
        self._is_repeated = False  # the call under way: its gradient is what is carried over
        self._recovery = self._recovery_in(comm)
        self._renew(comm)

    def _recovery_in(self, comm: asyncoll.Communicator) -> Recovery:
        return Recovery(comm, self._name, self._copy, history=self._history, sync_every=self._sync_every)

    def _renew(self, comm: asyncoll.Communicator) -> None:
        """Go on with the rounds of `comm`, whose ranks have one state, and have contributed nothing."""
        partial, candidates, quorum, seed = self._rule
        if self._elastic and comm.epoch > 1:
            candidates, quorum = min(candidates, comm.size), None if quorum is None else min(quorum, comm.size)
        self._rounds = _with_rounds_over_deaths(comm) if self._elastic else comm
        self._allreduce = functools.partial(
            partial_allreduce(self._rounds, partial, candidates, quorum, seed),
            name=self._name,
            op=self._op,
            sync_every=self._sync_every,
            sync_offset=self.round,
            history=self._history,
        )
        self._base = self.round  # rounds before those, of which a checkpoint tells, or an earlier epoch
        self._has_called = False
        self._due = Due(self.round)
        self._passed = _Passed(self.round, [0] * comm.size)

    async def _update(self, weight: float | None) -> Step:
        self._has_stepped = self._has_called = True
        self._are_equal = False
        # G_local = mean gradient of b local samples at w
        metrics = self._metrics.taken()
        if self._elastic:
            self._own_metrics = metrics if metrics is None or self._is_repeated else metrics.copy()
            weight = self._untaken.add(self._flat.gradients, weight, metrics, steps=int(not self._is_repeated))
        contribution = beside(self._flat.gradients, metrics)
        try:
            with self._recovery.opened(self.round):
                reduction = await self._without_loss(self._allreduce(contribution, weight=weight))  # line 7: U_sum / P
        except asyncoll.UsageError:  # no room for the contribution: it was not made
            self._untaken.undo()
            raise
        if self._elastic:
            operations = self._rounds._core.operations
            self._untaken.drop(operations.taken(self._name, operations.newest(self._name))[self._rounds.rank])
        reduction = without(reduction, metrics)
        self._due.hear(reduction, self._base + reduction.round)
        recovered = await self._recover()
        before = self.round
        self._apply_results()
        # A rank that is given only the newest result misses those before it, so the models drift apart. The paper
        # makes them equal every few epochs (section 5). Here they are averaged once for each multiple of
        # `average_every` that a rank's round passes. Counting rounds and not local steps makes all ranks average
        # equally often.
        every = self._average_every
        for _ in range(before // every, self.round // every) if every else ():
            await self._average_unless_all_leave(leaves=False)
        if self._history and reduction.synchronous:  # all ranks are here, after the same round
            await self._settle_buffers()
            await self._resynchronise()
            self._are_equal = True
        with self._recovery.opened(self.round):  # for ranks that wait for the end of this round
            return self._at_own_round(reduction, recovered=recovered, metrics=means(metrics))

    async def _recover(self) -> bool:
        """If results are lost, take the state of another rank that has applied them. Returns whether this was due."""
        if not self._recovery.is_due(self.round, self._due.needed):
            return False
        self._due.copy(self._flat.gradients)  # cleared if the step is cancelled; the next one goes on here
        with self._recovery.opened(self.round):  # it may be of use to a rank that is later, as the newest that there is
            state = await self._without_loss(self._recovery.take(self._due.needed))
        self._put_back(state)
        return True

    def _apply_results(self) -> None:
        """Take a step with each result that is due: w = w + U(G, w, t)."""
        self._due.count_lost(self.round)
        self._skip_to(self._due.needed)
        # The state that was taken may have some.
        for gradients in self._due.after(self.round):
            self._flat.gradients.copy_(gradients)
            self._apply()
        self._skip_to(self._due.newest)

    async def _average_unless_all_leave(self, *, leaves: bool) -> bool:
        """Average the models, unless all ranks leave the training. Returns whether they do. Collective."""
        leaving = await self.comm.allreduce(torch.tensor(int(leaves)))
        if int(leaving) == self.comm.size:
            return True
        await self._average_weights()
        await self._settle_buffers()
        return False

    def _differs(self) -> str:
        return "" if self._are_equal else UNEQUAL

    def _release(self) -> None:
        self._recovery.end()

    async def _finish(self) -> None:
        self._check_stepped(self._has_stepped)
        are_all_over = all(part.is_over for part in self._epochs[-1].parts.values())
        if self._has_stepped and not are_all_over:
            if not self._has_called:  # in this epoch
                await self._update(self._restore(0.0 if self._is_weighted else None))
            # No round waits for this rank any more.
            metrics = self._metrics.taken()
            joining = UnderWay(self._rounds.join(self._name, beside(self._flat.gradients, metrics)))
            if self._average_every:  # but the averages of the others do
                while not await self._average_unless_all_leave(leaves=True):
                    pass
            with self._recovery.opened(self.round):
                reduction = await joining
            self._recovery.end()
            await self._schedule.end(self.comm, self.round)
            if reduction is not None:
                self._due.hear(without(reduction, metrics), self._base + reduction.round)
                self._apply_results()
        if self._history:
            await self._resynchronise()
            await self._unite_buffers()
        else:
            await self._average_models()

    async def _resynchronise(self) -> None:
        """All ranks have passed the same rounds: those that have lost results take the state of the one with fewest."""
        await self._take_newest()
        self._due.lost = 0

    async def _begin(self) -> None:
        if self._rounds.epoch != self.comm.epoch:  # a rank has died while all started
            self._recovery = self._recovery_in(self.comm)
        self._serve()
        await super()._begin()

    def _serve(self) -> None:
        """Let ranks that are late ask this one for its state."""
        if self._recovery.is_used:
            self._recovery.serve(self.comm.rpc)

    async def _resume(self) -> None:
        self._renew(self.comm)

    # -- after a death ----------------------------------------------------------------------------
    #
    # `_rounds` is the communicator whose rounds have this rank's contributions. It is of an older epoch than `comm`
    # until all ranks have settled. So no rank contributes to later rounds before the others know what is in these.

    async def _settle(self) -> None:
        self._recovery = self._recovery_in(self.comm)
        self._serve()
        await self._settle_rounds()
        await self._settle_buffers()

    def _train_on(self) -> None:
        super()._train_on()
        self._untaken.carry()  # what is in no round yet
        self._renew(self._next[0])

    def _own_part(self) -> RankPart:
        untaken, has_left = self._untaken.steps, bool(self._untaken)
        ended = self._is_finishing
        return RankPart(self._made, untaken * self._accumulate, has_left or ended, ended, ended and not has_left)

    def _steps_of_lost(self, member: int) -> int:
        part = self._epochs[-1].parts[member]
        taken = dict(zip(members_of(self._rounds), self._passed.taken, strict=True))[member]
        return part.steps + (taken - part.repeats) * self._accumulate if taken else part.steps - part.untaken

    async def _settle_rounds(self) -> None:
        """Apply all rounds, the newest that a survivor knows among them, and learn which contributions are in them."""
        operations, name, base = self._rounds._core.operations, self._name, self._base
        newest = max(base + operations.newest(name), self._passed.round)
        rounds = (await self.comm.allgather(torch.tensor(newest))).tolist()
        last, source = max(rounds), rounds.index(max(rounds))
        taken = torch.zeros(self._rounds.size, dtype=torch.int64)
        if self.comm.rank == source:
            known = self._passed.taken if self._passed.round == last else operations.taken(name, last - base)
            taken = torch.tensor(known)
        await self.comm.broadcast(taken, root=source)
        self._apply_kept(self._results_up_to(last))
        await self._complete_one(last, source)
        await self._take_newest()
        self._skip_to(last)  # if no rank has the results any more
        self._passed = _Passed(last, taken.tolist())
        self._untaken.drop(int(taken[self._rounds.rank]))

    def _results_up_to(self, last: int) -> Results:
        """Those of the rounds that come next to this rank, up to `last`, as far as it has them."""
        base, operations = self._base, self._rounds._core.operations
        like = torch.empty_like(self._flat.gradients, device="cpu")
        kept = operations.results(self._name, like, self.round - base + 1, last - base)
        return [(base + number, result) for number, result in kept]

    def _apply_kept(self, results: Results) -> None:
        """Take a step with each of `results`, oldest first, unless some before them are missing."""
        if not results or results[0][0] > self.round + 1:
            return
        for number, result in results:
            if number > self.round and result is not None:  # a round without contributors has none
                self._flat.gradients.copy_(result)
                self._apply()
            self._skip_to(number)

    async def _complete_one(self, last: int, source: int) -> None:
        """If the rank that knows round `last` lacks others, and a rank that has those lacks it: that gets it."""
        rounds = (await self.comm.allgather(torch.tensor(self.round))).tolist()
        furthest = max(rounds)
        if furthest == last:
            return
        own = {"results": self._results_up_to(last)} if self.comm.rank == source else {}
        given: Results = (await replicas.sent(self.comm, own, source))["results"]
        if self.round == furthest:
            self._apply_kept([(number, result) for number, result in given if number > furthest])

    def _lost_results(self) -> int:
        return self._due.lost

    def _complete_after_death(self) -> Step:
        # Other ranks contribute again, and have another round: no rank may take this one for one of all.
        return step_of(self._complete(), synchronous=False, metrics=means(self._own_metrics))

    def _keep(self) -> None:
        self._is_repeated = False  # and each call keeps what it contributes

    def _is_over(self, before: int) -> bool:
        return not self._untaken

    def _restore(self, weight: float | None) -> float | None:
        # What is carried over is added to it.
        self._is_repeated = True
        self._flat.zero_gradients()
        return None if weight is None else 0.0


Results = list[tuple[int, torch.Tensor | None]]  # by round; None of a round without contributors


class _Passed(NamedTuple):
    """The newest round that is settled, and how many calls of each rank are in the rounds up to it."""

    round: int
    taken: list[int]


def _with_rounds_over_deaths(comm: asyncoll.Communicator) -> asyncoll.Communicator:
    core = comm._core.for_rounds_over_deaths()
    return comm if core is comm._core else comm._renewed(core, comm.hosts)


def partial_allreduce(
    comm: Any, partial: Partial | str, candidates: int, quorum: int | None, seed: int
) -> functools.partial[Any]:
    """The wait-avoiding allreduce of `comm`, with the arguments that decide when a round starts.

    Raises UsageError for another value of `partial`, and for `quorum` or `candidates` of another rule.
    """
    if quorum is not None and partial != "quorum":
        raise asyncoll.UsageError(f'quorum={quorum} belongs to partial="quorum", and partial is {partial!r}')
    if candidates != 1 and partial in ("solo", "quorum"):
        raise asyncoll.UsageError(f'candidates={candidates} belongs to partial="majority", and partial is {partial!r}')
    match partial:
        case "solo":
            return functools.partial(comm.solo_allreduce)
        case "majority":
            return functools.partial(comm.majority_allreduce, candidates=candidates, seed=seed)
        case "quorum":
            return functools.partial(comm.quorum_allreduce, quorum=quorum, seed=seed)
    if partial in policies():
        return functools.partial(comm.policy_allreduce, policy=partial, candidates=candidates, seed=seed)
    known = ", ".join(["solo, majority, quorum", *policies()])
    raise asyncoll.UsageError(
        f"partial is one of {known}, not {partial!r:.50}: asyncoll.extending.register_policy adds to them"
    )
