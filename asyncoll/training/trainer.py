"""What all training algorithms have in common: the program keeps its loop, and awaits one verb after `backward()`.

    sgd = EagerSGD(comm, model, optimizer, clip_norm=1.0, scheduler=scheduler)
    await sgd.start()
    for batch in batches:
        loss(model, batch).backward()
        reduction = await sgd.step()
    await sgd.finish()

`Trainer` prepares this rank's gradient, takes steps of the optimizer, counts rounds, and has the state for
checkpoints. An algorithm is a subclass that says how ranks work together in one step (`_update`) and at the end
(`_finish`).
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal, TypedDict, TypeVar, Unpack, get_args

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

import asyncoll
from asyncoll.runtime.unfinished import Training
from asyncoll.training import replicas, saved
from asyncoll.training.scheduled import ScheduledRounds
from asyncoll.training.step import Step, step_of, step_of_ranks
from asyncoll.training.step_metrics import StepMetrics, means, means_of_all
from asyncoll.training.training_epochs import RankPart, TrainingEpoch, members_of

T = TypeVar("T")
Buffers = Literal["broadcast", "average", "local"]
MODELS_MAY_DIFFER = "the ranks' models may differ"


class Options(TypedDict, total=False):
    """The options that all algorithms have. `Trainer` describes them."""

    clip_norm: float | None
    accumulate: int
    scheduler: LRScheduler | None
    scaler: torch.amp.GradScaler | None
    buffers: Buffers
    elastic: bool


class Trainer(ABC):
    """One rank's part of a data-parallel training. Subclasses are the algorithms.

    Every rank makes one, with a model and an optimizer of the same structure. Making it flattens the model
    (`asyncoll.flatten`), so the model has its final form, dtype and device before. Then each iteration of the program's
    loop calls `loss.backward()` once, and awaits `step()`. `step()` clears the gradients; `optimizer.zero_grad()` is
    not needed, and does no harm.

    Args:
        comm: the communicator; its ranks train together.
        model: any module that `asyncoll.flatten` accepts.
        optimizer: any `torch.optim` optimizer of parameters of the model.
        clip_norm: the largest norm of a gradient that a step is taken with, as for `torch.nn.utils.clip_grad_norm_`.
            It is applied to the reduced gradient, so replicas that apply the same one stay equal to the bit. Algorithms
            that take local steps clip the local gradient. None: no clipping.
        accumulate: calls of `step` that make one gradient, their mean. The others return None and send nothing. The
            sum takes memory of its own, as much as the gradients.
        scheduler: a learning-rate scheduler of `optimizer`. The trainer steps it once for each round, also for a round
            that this rank has skipped; the program does not step it. `finish()` may make a last round, which takes what
            is staged, and for which it is not stepped: it ends with the newest round that any rank's `step` was given.
        scaler: the `torch.amp.GradScaler` that has scaled the loss. The gradient is divided by its scale before it is
            sent. A gradient that has overflowed is replaced by zeros, and lowers the scale of this rank only. If those
            of all ranks have overflowed, the optimizer takes no step.
        buffers: what happens to the model's buffers, such as the statistics of BatchNorm, in every round that makes all
            models equal. "broadcast": all ranks take rank 0's, as in DistributedDataParallel. "average": floating
            buffers become their mean, others rank 0's. "local": each rank keeps its own. At the end of the training all
            ranks have rank 0's in any case, or the mean.
        elastic: whether the training goes on without ranks that are lost. `start`, `step` and `finish` then call
            `shrink` where they would raise PeerLostError, make all survivors equal to the bit, and do again what has
            not taken place: no gradient of a survivor is lost, or counted twice. They raise the errors of `shrink`.
            `comm` is the newest communicator, and `Step.epoch` its epoch. All ranks of the world that live are in this
            training, the only elastic one at that time. For AllreduceSGD, OverlappedSGD, LocalSGD, WagmaSGD, and
            EagerSGD with history. Costs a copy of the gradient in each step, or of the model in each average.

    Parameters that are frozen (`requires_grad` False) do not change. A parameter that a step does not use has a
    gradient of 0, and not None: weight decay and momentum act on it.

    Raises UsageError for impossible options, and for `elastic` where the ranks have no store of epochs (`shrink`).
    """

    _is_elastic: ClassVar[bool] = False
    """Whether it can go on after a death."""

    _steps_together: ClassVar[bool | None] = True
    """Whether all ranks make the same number of steps; None if it is not known how many a lost rank has made."""

    has_local_state: ClassVar[bool] = False
    """Whether ranks differ between steps, so that each rank must save and load its own checkpoint."""

    counts_own_rounds: ClassVar[bool] = False
    """Whether `round` is a number of this rank's own, so that ranks may load checkpoints of different rounds."""

    _has_rounds_of_all: ClassVar[bool] = True
    """Whether all ranks meet in a round, so that metrics can be averaged over them."""

    _carries_metrics: ClassVar[bool] = False
    """Whether `_update` carries metrics with its contribution; otherwise a collective gathers them after it."""

    def __init__(
        self,
        comm: asyncoll.Communicator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        **options: Unpack[Options],
    ) -> None:
        self.comm = comm
        self.model = model
        self.optimizer = optimizer
        self.round = 0
        """The newest round whose result is in the model: the clock of schedules.

        All ranks count the same rounds, unless `counts_own_rounds`.
        """
        self._clip_norm = options.get("clip_norm")
        self._accumulate = options.get("accumulate", 1)
        self._scheduler = options.get("scheduler")
        self._scaler = options.get("scaler")
        self._buffers = options.get("buffers", "broadcast")
        self._elastic = options.get("elastic", False)
        self._is_scaled = self._scaler is not None and self._scaler.is_enabled()
        self._check_options()
        self._flat = replicas.flattened(model, optimizer)
        self._calls = 0  # of `step`, since the last gradient was complete
        self._weight = 0.0  # of these calls
        self._sum: Tensor | None = None  # of their gradients, times their weights; with `accumulate`
        self._is_weighted: bool | None = None  # the first call decides
        self._metrics = StepMetrics("give `metrics` in the first step at all ranks, {} where there are none")
        self._is_loaded = False
        self._schedule = ScheduledRounds(self._scheduler)
        self._loses_nothing = False  # if the step under way is cancelled now
        self._state = "new"
        self._number = comm._core.member.endpoint.elastic_trainings  # of this one among the elastic ones
        if self._elastic:
            comm._core.member.endpoint.elastic_trainings += 1
        self._made = 0  # calls of `step`
        self._is_finishing = False
        self._first_round = 0  # at the start
        self._epochs = [TrainingEpoch.first(comm)]  # in which it has trained, in order
        self._next = comm, self._epochs[0]
        self._kept: Tensor | None = None  # a copy of the gradient of the step under way; with `elastic`
        self._training = Training(type(self).__name__, comm._core.member)

    # -- the verbs of the program's loop ----------------------------------------------------------

    async def start(self) -> None:
        """Give all ranks rank 0's parameters, buffers and optimizer, to the bit; or check a checkpoint that was loaded.

        Collective, before the first `backward()`. Without it the first `step()` does the same. Ranks must then have
        built equal models: a gradient of another model is of no use, and is a UsageError.

        Raises UsageError at a rank whose model or optimizer has another structure than rank 0's, or whose checkpoint is
        of another round than the others'. A failure, and a cancellation, end the communicator.
        """
        if self._state != "new":
            return
        self._flat.collect_gradients()  # `zero_grad()` may have put them elsewhere
        before = self._copy() if self._elastic else None
        while self._state == "new":
            try:
                await self._begin()
                self._first_round = self.round
                if self._elastic:
                    await self.comm.barrier()  # no rank begins to train before all have a whole model
                self._state = "training"
            except asyncoll.PeerLostError:
                if before is None:
                    raise
                if not await self._go_on():
                    self._put_back(before)  # the rank that gave its own may be lost

    async def step(self, *, weight: float | None = None, metrics: Mapping[str, object] | None = None) -> Step | None:
        """Reduce the gradient that `backward()` has made, and step the optimizer. Clears the gradients.

        Args:
            weight: the number of samples, or tokens, that the loss is the mean over. Gradients are then averaged by
                weight: batches of different lengths give the gradient of all of them together. Give it in all calls at
                all ranks, or in none.
            metrics: numbers of this step by name, such as {"loss": loss}: Python numbers, or tensors without
                dimensions, which are read now and kept as float64. They ride along with the gradient, for which no
                rank waits, and `Step.metrics` has the mean of each over the contributions of the round that hold it;
                each step of a late rank, and each call that accumulates, counts as one. Keys may differ between ranks
                and steps. Whether a training has metrics is fixed by the first step, at all ranks: give {} there if a
                rank, or that step, has none.

        Returns:
            The round that the model is at now. `Step.round` is `Trainer.round`. None if nothing was reduced: this
            call has only accumulated, or the algorithm has taken a local step.

        Raises:
            UsageError: the model has changed since it was flattened; weights are mixed; the training has ended;
                metrics are given, and the first step had none; more than 64 keys, also in all contributions of a round;
                a metric that is no number; or the algorithm has no rounds of all ranks (`DPSGD`, `SGP`, `ADPSGD` and
                the parameter servers), and takes no metrics.
            NonFiniteError: this rank's gradient holds NaN or infinity. Nothing was sent, and the model is that of the
                step before. Without a `scaler` no round can go on, so end the program: the other ranks get AbortedError
                with the step and the rank. `OverlappedSGD` and `OkTopkSGD` find it in the exchange, and raise
                NonFiniteError at every rank.
            MismatchError, PeerLostError, AbortedError, DeadlineError: as from the collectives of the communicator.

        Cancellation ends the communicator, as for a collective. `EagerSGD`, `WagmaSGD` and `ADPSGD` go on if
        they are cancelled while they wait for a round or an average of two: the gradient is not lost, and the next step
        reports the round.
        """
        if self._state == "finished":
            raise asyncoll.UsageError("the training has ended: make a new trainer to train the model further")
        self._flat.collect_gradients()
        if self._state == "new":
            await self._start_late()
        self._note(metrics)
        if not self._take(weight):
            return None
        self._loses_nothing = False
        try:
            await self._prepare(weight)
            return await self._advance(None if weight is None else self._weight)
        except asyncio.CancelledError:
            # Also if all its collectives are over, but not the update.
            if not self._loses_nothing:
                self.comm.abort(f"a step of {type(self).__name__} was cancelled")
            raise
        finally:
            self._flat.zero_gradients()
            self._calls, self._weight = 0, 0.0
            if self._sum is not None:
                self._sum.zero_()
            self._training.note(self.round, self._differs())

    async def finish(self) -> None:
        """End the training: all ranks leave with one model, to the bit. Collective; every rank calls it once.

        Gradients that were only accumulated are dropped. Ranks may come after different numbers of steps where the
        algorithm's rounds do not wait for all ranks; otherwise all ranks have made the same number.

        A second call has no effect if the first has succeeded. If the first has failed, models may differ, and a second
        call fails, too, unless the cause is gone.

        Needed after steps that have left the ranks with different models: a rank that leaves its world without it, or
        without `discard()`, raises UsageError, and aborts the world. With an exception of the program nothing is added.
        A program that never leaves its world is warned on stderr as it ends.

        Raises UsageError if the model has changed since it was flattened. Other errors, and cancellation, are those of
        the communicator's collectives.
        """
        if self._state == "finished":
            return
        self._is_finishing = True
        await self.start()
        self._flat.collect_gradients()  # `zero_grad()` may have put them elsewhere
        self._flat.zero_gradients()
        while True:
            try:
                await self._finish()
                if self._elastic:
                    await self.comm.barrier()  # a rank that lacks something of the end finds all others still here
                break
            except asyncoll.PeerLostError:
                if not self._elastic:
                    raise
                await self._go_on()
        self._state = "finished"
        self._training.end()

    def discard(self) -> None:
        """End the training of this rank without `finish()`: its result is not wanted. Local: sends nothing.

        For measurements, and after a checkpoint from which a later run goes on. The model stays that of the last step,
        another one at each rank. Rounds of the others may wait for this rank, so every rank calls it, after the same
        step. A `step()` after it is a UsageError, and a `finish()` has no effect.
        """
        if self._state != "finished":
            self._release()
        self._state = "finished"
        self._training.end()

    # -- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state of the algorithm at this rank, for `torch.save`. It holds neither the model nor the optimizer.

        Call it after a step that has returned a `Reduction`, and before the next `backward()`; `LocalSGD` allows it
        after any step. An accumulated part of a gradient is not in it. Save it together with `model.state_dict()`,
        `optimizer.state_dict()` and the scheduler's and scaler's. Where `has_local_state` is true, each rank saves its
        own.
        """
        return {
            "algorithm": type(self).__name__,
            "ranks": self.comm.size,
            "rank": self.comm.rank,
            "round": self.round,
            "model": self._description(),
            "own": self._own_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was saved. Before `start`; load the model and the optimizer, too. Sends nothing.

        Raises UsageError if `state` is of another algorithm, model or number of ranks, or of another rank where ranks
        differ; and if it is damaged: a value is missing or cannot be, such as a round that is negative. With `elastic`,
        and where ranks do not differ, a state is for any number of ranks.
        """
        if self._state != "new":
            raise asyncoll.UsageError("load a checkpoint before the first step, and before start()")
        expected: dict[str, Any] = {"algorithm": type(self).__name__, "model": self._description()}
        if self.has_local_state or not self._elastic:
            expected["ranks"] = self.comm.size
        if self.has_local_state:
            expected["rank"] = self.comm.rank
        for what, here in expected.items():
            there = saved.origin(state, what)
            if there != here:
                shown = "other parameters" if what == "model" else f"{what} {there!r}, and not {here!r}"
                raise asyncoll.UsageError(
                    f"the checkpoint of the trainer has {shown}: load the one that this rank of this job has saved, or "
                    "begin a new training from its model and optimizer alone"
                )
        round_, own = saved.count(state, "round"), saved.table(state, "own")
        self._load_own_state(own)
        self.round = round_
        self._is_loaded = True

    # -- what an algorithm defines ----------------------------------------------------------------

    @abstractmethod
    async def _update(self, weight: float | None) -> Step | None:
        """One step, with this rank's mean gradient in the model. `weight` is that of the gradient; None: unweighted."""

    @abstractmethod
    async def _finish(self) -> None:
        """Make all models equal. No gradient is there any more."""

    def _own_state(self) -> dict[str, Any]:
        return {}

    def _load_own_state(self, own: dict[str, Any]) -> None:
        del own

    def _differs(self) -> str:
        """What differs between the ranks if the training ends now, without `finish()`; empty: nothing."""
        return MODELS_MAY_DIFFER if self.round else ""

    def _release(self) -> None:  # noqa: B027 (most algorithms have nothing to do)
        """The training ends: release what others hold of it."""

    async def _resume(self) -> None:  # noqa: B027 (most algorithms have nothing to do)
        """The training starts, or goes on: all models and optimizers are in place."""

    # -- after a death ----------------------------------------------------------------------------

    async def _advance(self, weight: float | None) -> Step | None:
        """The step, again in the next epoch as often as a rank is lost in it, and it has not taken place."""
        if not self._elastic:
            return await self._with_metrics(await self._update(weight))
        before = self.round
        self._keep()
        while True:
            try:
                return await self._with_metrics(await self._update(weight))
            except asyncoll.PeerLostError:
                self._loses_nothing = False
                await self._go_on()
            if self._is_over(before):
                return self._complete_after_death()
            weight = self._restore(weight)

    async def _go_on(self) -> bool:
        """Enter the next epoch, in which all survivors have settled what the death has left.

        Returns whether the training has begun. If it has not, at any rank, it begins anew.

        No rank trains on before all have settled. A rank at which the last collective of this fails cannot know
        whether others have got through it, and have trained on: it learns that in the epoch after.
        """
        while True:
            await self._shrink()
            own = torch.tensor([self._state == "training", self._epochs[-1].epoch, self._number])
            try:
                begun, epochs, numbers = (await self.comm.allgather(own)).T.tolist()
                if len(set(numbers)) > 1:
                    raise asyncoll.UsageError(
                        "a rank has died while the others were in different trainings: elastic ones go on if there is "
                        "one at a time"
                    )
                if not any(begun):
                    self._epochs = [TrainingEpoch.first(self.comm)]
                    return False
                self._state = "training"  # all had a whole model: this rank has only not been told
                if max(epochs) > self._epochs[-1].epoch:
                    self._train_on()
                await self._settle()
                await self._meet()
                await self.comm.barrier()
                self._train_on()
                return True
            except asyncoll.PeerLostError:
                continue  # lost amid this: the others go on without that one, too

    async def _shrink(self) -> None:
        """Enter the next epoch. If this is cancelled, the others may be there all the same: an abort tells them."""

        def abort(entering: asyncio.Future[asyncoll.Communicator]) -> None:
            if not entering.cancelled() and entering.exception() is None:
                entering.result().abort(f"{type(self).__name__} was cancelled as it went on after a death")

        entering = asyncio.ensure_future(self.comm.shrink())
        try:
            self.comm = await asyncio.shield(entering)
        except asyncio.CancelledError:
            entering.add_done_callback(abort)
            raise
        self._training.member = self.comm._core.member

    async def _meet(self) -> None:
        """All has been settled: tell the others of this rank, and learn the membership that comes next. Collective."""
        parts = await self.comm.allgather(torch.tensor(self._own_part()))
        members = members_of(self.comm)
        own = {member: RankPart(*part) for member, part in zip(members, parts.tolist(), strict=True)}
        lost = {member: self._steps_of_lost(member) for member in self._epochs[-1].members}
        steps = lost | {member: part.steps for member, part in own.items()}
        self._next = self.comm, TrainingEpoch(self.comm.epoch, members, steps, own)

    def _train_on(self) -> None:
        """All ranks have settled: train on with the membership that comes next."""
        self._epochs.append(self._next[1])

    def _own_part(self) -> RankPart:
        return RankPart(self._made, has_ended=self._is_finishing)

    def _steps_of_lost(self, member: int) -> int:
        """How many calls of `step` of a lost member are in the model, once all is settled; the same at every rank."""
        del member  # all ranks have made as many
        return (self.round - self._first_round) * self._accumulate

    async def _settle(self) -> None:
        """Give all survivors the newest state. Collective; may fail at any moment, and is then done again."""
        await self._take_newest()
        await self._settle_buffers()

    async def _take_newest(self) -> None:
        """Give ranks that are behind the state of the rank that is furthest. Collective.

        It is taken as a whole: if the rank that gives it dies meanwhile, a rank has all of it, or none.
        """
        own = [self.round, -self._lost_results()]
        states = (await self.comm.allgather(torch.tensor(own))).tolist()
        if states.count(own) == len(states):
            return
        source = states.index(max(states))
        state = await replicas.sent(self.comm, self._copy() if self.comm.rank == source else {}, source)
        if own != max(states):
            self._put_back(state)

    def _copy(self) -> dict[str, Any]:
        """A copy of this rank's round, model and optimizer, and of its buffers unless each rank has its own."""
        keeps_buffers = self._buffers == "local"
        replica = replicas.copied(self.model, (self._flat.parameters,), self.optimizer, buffers=not keeps_buffers)
        return {"round": self.round, **replica}

    def _put_back(self, state: dict[str, Any]) -> None:
        """Take what `_copy` has returned here, or at another rank, with the scheduler's steps."""
        self._skip_to(state["round"])
        replicas.put_back(state, self.model, (self._flat.parameters,), self.optimizer)

    def _complete_after_death(self) -> Step:
        """The record of a step that has taken place, but this rank was not told: with its own metrics only."""
        return step_of(self._complete(), metrics=means(self._metrics.taken()))

    def _lost_results(self) -> int:
        """How many results are not in this rank's model, although it has passed their rounds."""
        return 0

    # What is different if contributions outlive the call that makes them:

    def _keep(self) -> None:
        """The step begins: keep a copy of the gradient, because the reduction overwrites it."""
        if self._kept is None:
            self._kept = torch.empty_like(self._flat.gradients)
        self._kept.copy_(self._flat.gradients)

    def _is_over(self, before: int) -> bool:
        """Whether the step has taken place that has begun after round `before`."""
        return self.round > before

    def _restore(self, weight: float | None) -> float | None:
        """The step is made again: the gradient in the model is the one that `_keep` has seen. Returns its weight."""
        assert self._kept is not None
        self._flat.gradients.copy_(self._kept)
        return weight

    # -- what algorithms use ----------------------------------------------------------------------

    def _apply(self) -> None:
        """Take one step of the optimizer; it ends the next round."""
        self._step_optimizer()
        self._pass_round()

    def _step_optimizer(self) -> None:
        """Take one step of the optimizer with the gradients in the model, clipped."""
        if self._has_overflowed(self._flat.gradients):
            return
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
        self.optimizer.step()

    def _has_overflowed(self, gradients: Tensor) -> bool:
        """Whether `gradients` are those of an overflow, with a scaler: all 0. The optimizer then takes no step."""
        return self._is_scaled and not gradients.any()

    def _pass_round(self) -> None:
        self.round += 1
        self._schedule.step(self.round)

    def _skip_to(self, round_: int) -> None:
        """Pass rounds whose results this rank does not have."""
        while self.round < round_:
            self._pass_round()

    async def _without_loss(self, call: Awaitable[T]) -> T:
        """Await a call that takes place also if it is cancelled: the next call of its name reports the result."""
        self._loses_nothing = True
        result = await call
        self._loses_nothing = False
        return result

    async def _average_gradients(self, weight: float | None) -> None:
        """Replace the gradients by their mean over all ranks; with weights, by the weighted mean. Collective."""
        gradients = self._flat.gradients
        if weight is None:
            await self.comm.allreduce(gradients, op=asyncoll.AVG)
            return
        total = torch.tensor(weight, dtype=torch.float64)
        await self.comm.allreduce(total)
        # The share is at most 1, so the product does not overflow.
        share = weight / float(total) if total else 0.0
        await self.comm.allreduce(gradients.mul_(share))

    def _refuse_weight(self, weight: float | None, reason: str = "it averages models, and not gradients") -> None:
        """Raise UsageError for a weight, in an algorithm that cannot average gradients by weight."""
        if weight is not None:
            raise asyncoll.UsageError(f"{type(self).__name__} takes no weight: {reason}")

    def _check_stepped(self, has_stepped: bool) -> None:
        """Raise UsageError at a rank that ends without a step: rounds of the others may wait for its first one."""
        if not has_stepped and not self._is_loaded and self.comm.size > 1:
            raise asyncoll.UsageError(
                f"rank {self.comm.rank} ends the training without a step, and the rounds of the other ranks may wait "
                "for it: give every rank at least one batch"
            )

    async def _settle_buffers(self) -> None:
        """Treat the buffers as the option says, in a round that has made all models equal. Collective."""
        if self._buffers != "local":
            await self._unite_buffers()

    async def _unite_buffers(self) -> None:
        if self._buffers == "average":
            await replicas.average_buffers(self.comm, self.model)
        await replicas.share_buffers(self.comm, self.model)  # after an average: those that have none

    async def _average_weights(self) -> None:
        """Give all ranks the mean of their parameters. Frozen ones are equal already. Collective."""
        await self.comm.allreduce(self._flat.trainable, op=asyncoll.AVG)

    async def _average_models(self) -> None:
        """Give all ranks one model at the end: the mean of their parameters, and one set of buffers. Collective."""
        await self._average_weights()
        await self._unite_buffers()

    def _complete(self) -> Step:
        """The record of a round in which every rank took part."""
        return step_of_ranks(self.round, tuple(range(self.comm.size)), synchronous=True, epoch=self.comm.epoch)

    def _exchanged(self, others: tuple[int, ...], skipped: int = 0) -> Step:
        """The record of a step whose model is an average of this rank's and those of `others`."""
        return step_of_ranks(
            self.round,
            tuple(sorted((self.comm.rank, *others))),
            synchronous=False,
            skipped=skipped,
            epoch=self.comm.epoch,
        )

    def _at_own_round(self, reduction: asyncoll.Reduction, **changes: Any) -> Step:
        """`reduction` with the round of this training, and without its result, which is in the model.

        A checkpoint may have moved the training's round ahead of the operation's.
        """
        return step_of(reduction, round=self.round, result=None, epoch=self.comm.epoch, **changes)

    # -- the start --------------------------------------------------------------------------------

    async def _begin(self) -> None:
        """All ranks get one model and one optimizer, unless each has loaded a state of its own."""
        own = torch.tensor([self.round, self._is_loaded, self._schedule_offset()])
        rounds, loaded, offsets = (await self.comm.allgather(own)).T.tolist()
        root = self._source(rounds)
        newest = rounds[root]
        if len(set(offsets)) > 1:
            steps = map(sum, zip(offsets, rounds, strict=True))
            raise asyncoll.UsageError(
                f"the learning-rate schedulers are at different steps ({_by_rank(steps)}), and the trainers at rounds "
                f"({_by_rank(rounds)}): load the scheduler's state wherever the trainer's is loaded, and nowhere else"
            )
        if self.has_local_state and any(loaded):
            if not all(loaded) or (min(rounds) != newest and not self.counts_own_rounds):
                raise asyncoll.UsageError(
                    f"the ranks have loaded different rounds ({_by_rank(rounds)}): {type(self).__name__} needs the "
                    "checkpoint of one round at every rank, such as the newest that all have (`Checkpoints.newest`)"
                )
            await replicas.check_same(self.comm, self.model, self.optimizer)
        else:
            self._skip_to(newest)  # with the scheduler; the optimizer's rates are those of the root in any case
            self.round = newest
            await replicas.share(self.comm, self.model, self.optimizer, self._flat, root=root)
        await self._resume()

    def _source(self, rounds: list[int]) -> int:
        """The rank whose model and optimizer all get. `rounds` has the round that each rank has loaded."""
        return rounds.index(max(rounds))

    def _schedule_offset(self) -> int:
        """The steps of the scheduler that were not rounds of this training: the same number at all ranks."""
        return getattr(self._scheduler, "last_epoch", self.round) - self.round

    async def _start_late(self) -> None:
        """Start, although the first gradient is there already: it must be one of the model that all ranks share."""
        parameters, gradients = self._flat.parameters.clone(), self._flat.gradients.clone()
        await self.start()
        if not torch.equal(parameters, self._flat.parameters):
            raise asyncoll.UsageError(
                f"the model of rank {self.comm.rank} was not the one that all ranks start with when its first gradient "
                "was computed: await start() before the first backward(), or build the models from one seed"
            )
        self._flat.gradients.copy_(gradients)

    # -- this rank's gradient ---------------------------------------------------------------------

    def _note(self, metrics: Mapping[str, object] | None) -> None:
        """The step has these metrics."""
        if metrics is not None and not self._has_rounds_of_all:
            raise asyncoll.UsageError(
                f"{type(self).__name__} takes no metrics: no round has contributions of all its ranks"
            )
        if metrics is not None:
            self._metrics.note(metrics)
        self._metrics.begin()

    async def _with_metrics(self, step: Step | None) -> Step | None:
        """`step` with the metrics of all ranks, where they did not ride along. Collective, if metrics are used."""
        if step is None or self._carries_metrics or (metrics := self._metrics.taken()) is None:
            return step
        try:
            return step_of(step, metrics=await means_of_all(self.comm, metrics))
        except asyncoll.PeerLostError:
            if not self._elastic:
                raise
            return step_of(step, metrics=metrics.means())  # the step has taken place: the next one goes on

    def _take(self, weight: float | None) -> bool:
        """Count this call. Returns whether its gradient is the last one of a step; otherwise it is added to the sum."""
        if self._is_weighted is None:
            self._is_weighted = weight is not None
        if self._is_weighted is not (weight is not None):
            raise asyncoll.UsageError("give a weight in every step at every rank, or in none")
        if weight is not None and not 0 <= weight < math.inf:
            raise asyncoll.UsageError(f"a weight is a number of samples, at least 0, not {weight}")
        own_weight = 1.0 if weight is None else weight
        self._calls += 1
        self._made += 1
        self._weight += own_weight
        if self._calls == self._accumulate:
            return True
        if self._sum is None:
            like = self._flat.gradients
            self._sum = torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))
        # Not in the model, where a program that calls `zero_grad()` in each iteration would clear it.
        self._sum.add_(self._flat.gradients, alpha=own_weight)
        self._flat.zero_gradients()
        return False

    async def _prepare(self, weight: float | None) -> None:
        """Make the gradients in the model the mean of those of the step, of which the last has this `weight`."""
        if self._sum is not None:
            self._sum.add_(self._flat.gradients, alpha=1.0 if weight is None else weight)
            if self._weight:
                self._sum.div_(self._weight)
            self._flat.gradients.copy_(self._sum)
        await self._examine()

    async def _examine(self) -> None:
        """Unscale the gradients in the model. Those that have overflowed become 0, or are an error without a scaler."""
        if self._scaler is not None and self._is_scaled:
            self._scaler.unscale_(self.optimizer)
            self._scaler.update()
            if not await wait_for_flag(finite(self._flat.gradients)):
                self._flat.zero_gradients()
        else:
            await self._check_gradient()

    async def _check_gradient(self) -> None:
        """Raise NonFiniteError if this rank's gradient is not finite."""
        if not await wait_for_flag(finite(self._flat.gradients)):
            raise non_finite_gradient(self.comm.rank, self.round + 1)

    def _check_options(self) -> None:
        closure = inspect.signature(type(self.optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise asyncoll.UsageError(
                f"{type(self.optimizer).__name__} evaluates the loss several times in a step, and its gradients would "
                "not be reduced: take an optimizer whose step() needs no closure"
            )
        if self._clip_norm is not None and not self._clip_norm > 0:
            raise asyncoll.UsageError(f"clip_norm is a norm above 0, or None, not {self._clip_norm}")
        if self._accumulate < 1:
            raise asyncoll.UsageError(f"accumulate is a number of backward passes, at least 1, not {self._accumulate}")
        if self._elastic and not self._is_elastic:
            raise asyncoll.UsageError(
                f"{type(self).__name__} cannot go on after a death: elastic is for AllreduceSGD, EagerSGD, LocalSGD, "
                "OverlappedSGD and WagmaSGD"
            )
        if self._elastic and self.comm.size > 1:
            self.comm._core.member.succession("elastic")
        if self._buffers not in get_args(Buffers):
            raise asyncoll.UsageError(f"buffers is one of {', '.join(get_args(Buffers))}, not {self._buffers!r}")
        if isinstance(self._scheduler, ReduceLROnPlateau):
            raise asyncoll.UsageError(
                "ReduceLROnPlateau needs a metric: step it in the program, with one that is equal at all ranks"
            )
        if self._scheduler is not None and self._scheduler.optimizer is not self.optimizer:
            raise asyncoll.UsageError("the scheduler belongs to another optimizer")

    def _description(self) -> str:
        """A digest of the names, shapes and dtypes of the parameters."""
        lines = [
            f"{name} {parameter.dtype} {list(parameter.shape)}" for name, parameter in self.model.named_parameters()
        ]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _by_rank(values: Iterable[int]) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))


def non_finite_gradient(rank: int, round_: int) -> asyncoll.NonFiniteError:
    """The error of `rank`, whose gradient is not finite."""
    return asyncoll.NonFiniteError(
        (rank,),
        f"the gradient of rank {rank} for round {round_} holds NaN or infinity: look at the loss of this step; nothing "
        "was sent",
    )


def finite(x: Tensor) -> Tensor:
    """Whether no element of `x` is NaN or infinite: one element, on the device of `x`, for which no one waits here."""
    if not x.is_cpu:
        return torch.isfinite(torch.linalg.vector_norm(x, math.inf) if x.numel() else x.sum())
    # One pass over `x` in the usual case: a finite sum has finite summands. The sum of large finite ones may overflow.
    # The largest magnitude, which tells it in any case, takes the host up to twenty times as long.
    is_sum_finite = torch.isfinite(x.sum(dtype=torch.promote_types(x.dtype, torch.float32)))
    return is_sum_finite if is_sum_finite else torch.isfinite(x).all()


def is_finite(x: Tensor) -> bool:
    """The value of `finite(x)`: this thread waits until a GPU has computed it."""
    return bool(finite(x))


async def wait_for_flag(flag: Tensor) -> bool:
    """The value of `flag`, which has one element. The loop goes on while a GPU still computes it."""
    if not flag.is_cpu:
        await asyncoll.offload(computed(flag.device))
    return bool(flag)


def computed(device: torch.device) -> Callable[[], None]:
    """A function that returns once the work of now is done that the current stream of `device` has."""
    end = torch.cuda.Event(blocking=True)
    end.record(torch.cuda.current_stream(device))

    def wait() -> None:
        # Otherwise CUDA would take memory of the first device for this thread.
        with torch.cuda.device(device):
            end.synchronize()

    return wait
