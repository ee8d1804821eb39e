"""The hook `eager_sgd`: a step does not wait for slow ranks.

Li, Ben-Nun, Di Girolamo, Alistarh, Hoefler, "Taming unbalanced training workloads in deep learning with partial
collective operations", PPoPP 2020, section 5.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from asyncoll.algorithms.rounds.operation import Opening, Operation, check_operation
from asyncoll.algorithms.rounds.reduction import Reduction
from asyncoll.errors import UsageError
from asyncoll.runtime.handles import Handle
from asyncoll.tensors.reductions import ReduceOp, dtype_name
from asyncoll.torch.hooks import agreement, refusals
from asyncoll.torch.hooks.buckets import Buckets, Layout, trained
from asyncoll.torch.hooks.changes import ParameterChanges, check_gradients
from asyncoll.torch.hooks.completion import complete, complete_on
from asyncoll.torch.hooks.optimizer_steps import OptimizerSteps
from asyncoll.torch.hooks.option_schedule import OptionSchedule
from asyncoll.torch.hooks.state import HookState, Logged, checked
from asyncoll.training import replicas, saved
from asyncoll.training.due import Due
from asyncoll.training.eager_sgd import HISTORY, UNEQUAL, Partial, partial_allreduce
from asyncoll.training.recovery import Recovery, State
from asyncoll.training.step import Step, step_of, step_of_ranks
from asyncoll.training.step_metrics import beside, means, without
from asyncoll.training.trainer import is_finite, non_finite_gradient


class EagerSGDState(HookState):
    """The state of `eager_sgd`: average the gradients of the ranks that have arrived; late ones enter later rounds.

    All buckets of a step are in one round. A late rank makes fewer steps than there are rounds, so programs count
    `round`, never their own steps.

    A rank that is late by at most `history` rounds applies every result that it has missed: the step of the optimizer
    that the program makes takes one step for each of them first. So all replicas that have applied the same round are
    equal to the bit. A rank that is later takes the model with its buffers, the optimizer and the round of another
    rank, to the bit, in its step (`Step.recovered`). That rank gives a copy of them in its next `backward()`, or while
    it waits in one. Only the late rank waits for that. With `sync_every` a rank that is later loses results instead,
    until the next synchronous round makes all replicas equal again.

    The hook takes over what must happen for every result: clipping and the scheduler; the program does neither. The
    program may change options of the optimizer only after a round that is synchronous, at all ranks.

    Refused, because they would train wrongly or make ranks wait for each other: gradients that change between
    `backward()` and the step (clipping, a GradScaler); a backward pass without a step (accumulate in `no_sync()`); a
    scheduler that is not given here; parameters that a step does not use; buffers that are broadcast in each forward
    pass; `join()`; parameters that DDP ignores or that another optimizer trains; optimizers that send messages
    or step in `backward()`; closures; gradients with NaN or infinity, a NonFiniteError at this rank.

    The first steps, usually one, wait for all ranks, until DDP has made its final buckets.

    Ranks may end at different rounds: `finish()` gives all of them the newest one, and rank 0's buffers. Each has made
    three steps by then.

    Where models are equal, at the start and after a round that is synchronous, `state_dict()`, the model and the
    optimizer of one rank are those of all, and may be loaded by any number of ranks. `state_dict()` has the scheduler.
    At another moment it is a UsageError, because gradients are staged that are in no round yet. All ranks load the same
    round.

    The first `backward()` raises UsageError at all ranks unless they have the same options, the same round, and, to the
    bit, equal parameters, groups and state of the optimizer, and state of the scheduler.

    Args:
        ddp: the wrapped model. Register the hook on the same one.
        optimizer: trains all parameters of the model and no others.
        partial: a round starts with the first rank ("solo"), with any of `candidates` drawn ranks ("majority"), with
            the `quorum`-th rank ("quorum"), or by a policy: the name that `asyncoll.extending.register_policy` gave it.
        candidates: the number of ranks that are drawn for a round of "majority" or of a policy.
        quorum: the number of ranks for which a round of "quorum" waits; by default size // 2 + 1.
        history: the number of results that are kept for late ranks, at least 1.
        sync_every: every so many rounds, one waits for all ranks (0: none): the rounds whose `round` is a multiple,
            also after a checkpoint.
        op: `asyncoll.AVG` divides the sum of the gradients of a round by the number of all ranks,
            `asyncoll.AVG_ACTIVE` by that of the ranks in the round.
        seed: of the ranks that are drawn; the same at every rank.
        clip_norm: the greatest norm of the gradient of a step, as for `torch.nn.utils.clip_grad_norm_`; None: no
            clipping.
        scheduler: a scheduler of the learning rate, which the hook steps once for each round.
        name: of the rounds: a second training on the process group needs another one.

    Memory: the gradients, as one flat tensor; the rounds hold about three more of that size by message, and one for
    each result of the history.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        *,
        partial: Partial | str = "solo",
        candidates: int = 1,
        quorum: int | None = None,
        history: int = HISTORY,
        sync_every: int = 0,
        op: ReduceOp = ReduceOp.AVG,
        seed: int = 0,
        clip_norm: float | None = None,
        scheduler: LRScheduler | None = None,
        name: str = "eager-sgd",
    ) -> None:
        super().__init__(ddp)
        refusals.check_all_reduced(ddp)
        refusals.check_without_lockstep(ddp)
        refusals.check_optimizer(ddp, optimizer)
        _check_options(history, op, clip_norm)
        self._partial = partial
        if partial == "quorum" and quorum is None:
            quorum = self._comm.size // 2 + 1
        self._allreduce = partial_allreduce(self._comm, partial, candidates, quorum, seed)
        self._draw = self._allreduce.keywords  # what decides when a round starts
        self._rules: dict[str, Any] = {"name": name, "op": op, "sync_every": sync_every, "history": history}
        self._clip_norm = None if clip_norm is None else float(clip_norm)
        self._schedule = OptionSchedule(optimizer, scheduler)
        self._optimizer = optimizer
        self._buckets = Buckets(self._comm, Layout(trained(ddp)))
        self._check_operation()
        self._parameter_changes = ParameterChanges(self._buckets.layout.parameters)
        self._base = 0  # rounds before the first one that does not wait for all ranks
        self._is_eager = False
        self._reduction: Step | None = None  # of the last backward pass
        self._due = Due()
        self._claim(name)
        self._recovery = Recovery(self._comm, name, self._copy, history=history, sync_every=sync_every)
        self._steps = OptimizerSteps(eager_sgd.__name__, optimizer, self._before_step, self._after_step)

    def _check_operation(self) -> None:
        layout = ((dtype_name(self._buckets.layout.dtype), self._buckets.layout.count),)
        opening = Opening.POLICY if "policy" in self._draw else Opening(self._partial)
        operation = Operation(layout=layout, opening=opening, **self._draw, **self._rules)
        check_operation(operation, self._comm.size)

    @property
    def reduction(self) -> Step | None:
        """The round that the last `backward()` was given; None before the first one. Its results are in the model."""
        self._check_original()
        return self._reduction

    def _reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        refusals.check_join(self._model())
        self._accept(bucket)
        if bucket.index() == 0:
            self._steps.expect()
            # No rank has results to catch up with.
            if self._reduction is None or self._reduction.synchronous:
                self._schedule.note()
                self._parameter_changes.note()
        future = self._buckets.gather(bucket)
        # One call for all buckets: separate calls would be given different rounds.
        if bucket.is_last():
            with self._calls():
                self._check_gradient()
                self._reduction = self._exchange()
            self._buckets.scatter()
        return future

    def _check_gradient(self) -> None:
        if is_finite(self._buckets.flat):
            return
        self._fail()
        raise non_finite_gradient(self._comm.rank, self.round + 1)

    def _exchange(self) -> Step:
        """One round. Its number counts the rounds of this training, and those of a checkpoint."""
        # DDP's forward pass makes all ranks wait for each other once, to make the final buckets. A rank that waited for
        # a round meanwhile would wait for ranks that wait for it. So all steps before are in lockstep.
        if not self._model()._has_rebuilt_buckets:
            return self._together()
        if not self._is_eager:
            self._is_eager = True
            self._base = self._rules["sync_offset"] = self.round
        metrics = self._metrics.taken()
        with self._recovery.opened(self.round):
            call: Handle[Reduction] = self._allreduce(beside(self._buckets.flat, metrics), **self._rules)
            reduction = without(call.wait(), metrics)
        self.metrics = Logged(means(metrics))
        return step_of(reduction, round=self._base + reduction.round, metrics=self.metrics)

    def _begin(self, bucket: GradBucket) -> None:
        if self._recovery.is_used:
            with self._calls():
                complete(self._comm, self._serve())
        super()._begin(bucket)

    async def _serve(self) -> None:
        self._recovery.serve(self._comm._core.rpc)  # on the runtime's loop

    def _options(self) -> dict[str, Any]:
        return self._rules | {
            "partial": self._partial,
            **{option: self._draw.get(option) for option in ("candidates", "quorum", "seed")},
            "clip_norm": self._clip_norm,
            "scheduler": self._schedule.kind(),
            "options of the optimizer": self._schedule.values(),
        }

    def _contents(self) -> dict[str, Any]:
        ddp = self._model()
        return {
            **agreement.contents_of_model(ddp),
            **agreement.contents_of_optimizer(ddp, self._optimizer),
            "the state of the scheduler": self._schedule.state(),
        }

    def _together(self) -> Step:
        x, everyone = self._buckets.flat, tuple(range(self._comm.size))
        self._comm.allreduce(x, ReduceOp.AVG).wait()
        self._share_metrics()
        return step_of_ranks(self.round + 1, everyone, synchronous=True, result=x, metrics=self.metrics)

    # -- the step of the optimizer ----------------------------------------------------------------

    def _before_step(self) -> None:
        """Apply all results since this rank's last step but the newest, and leave that one in the gradients."""
        reduction = self._reduction
        assert reduction is not None
        check_gradients(self._optimizer, self._buckets.layout, self._buckets.flat)
        self._parameter_changes.check()
        self._schedule.check()
        self._due.hear(reduction, reduction.round)
        self._recover(reduction)
        results = self._results()
        for result in results[:-1]:
            self._apply(result)
        if not results:  # the round had no contributors: nothing to step with
            for parameter in self._buckets.layout.parameters:
                parameter.grad = None
        elif len(results) > 1 or reduction.result is None:
            self._buckets.layout.set_gradients(results[-1])
        self._clip()

    def _after_step(self) -> None:
        reduction = self._reduction
        assert reduction is not None
        self._skip_to(reduction.round)
        if reduction.synchronous:  # all ranks are here, after the same round
            with self._fails_if_interrupted(), self._calls():
                self._resynchronise()
        self._training.note(self.round, "" if reduction.synchronous else UNEQUAL)
        self._schedule.note()
        self._parameter_changes.note()

    def _recover(self, reduction: Reduction) -> None:
        """If results are lost, take the state of another rank that has applied them."""
        if not self._recovery.is_due(self.round, self._due.needed):
            return
        with self._fails_if_interrupted(), self._calls():
            with self._recovery.opened(self.round):  # as in `EagerSGD`, of use to a later rank
                state = complete(self._comm, self._recovery.take(self._due.needed))
            # With the scheduler, which is a function of the round.
            self._skip_to(state["round"])
            replicas.put_back(state, self._model().module, self._parameters(), self._optimizer)
        self._reduction = step_of(reduction, round=max(self.round, reduction.round), recovered=True)

    def _copy(self) -> State:
        if self._buckets.layout.device.type == "cuda":
            # The runtime's thread has a current stream of its own.
            torch.cuda.synchronize(self._buckets.layout.device)
        return {
            "round": self.round,
            **replicas.copied(self._model().module, self._parameters(), self._optimizer, buffers=True),
        }

    def _parameters(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self._model().module.parameters()]

    def _results(self) -> list[Tensor]:
        """The results since this rank's last round, oldest first; the rounds before them are passed."""
        self._due.count_lost(self.round)
        self._skip_to(self._due.needed)
        # The state that was taken may have some.
        return list(self._due.after(self.round))

    def _apply(self, result: Tensor) -> None:
        self._buckets.layout.set_gradients(result)
        self._clip()
        self._steps.make()
        self._skip_to(self.round + 1)

    def _clip(self) -> None:
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._buckets.layout.parameters, self._clip_norm)

    def _skip_to(self, round_: int) -> None:
        """Count rounds up to `round_`, with the scheduler."""
        while self.round < round_:
            self.round += 1
            self._schedule.step(self.round)

    def _own_state(self) -> dict[str, Any]:
        self._steps.check_done()
        if self._reduction is not None and not self._reduction.synchronous and not self._has_ended:
            raise UsageError(
                "a checkpoint of this round would lack gradients that are staged: save after a round for which "
                "state.reduction.synchronous is true, such as every sync_every-th one, or after finish()"
            )
        return {"scheduler": self._schedule.state()}

    def _load_own_state(self, own: dict[str, Any]) -> None:
        self._schedule.load(
            saved.entry(own, "scheduler", lambda value: value is None or isinstance(value, dict), "a dict")
        )

    # -- the end ----------------------------------------------------------------------------------

    def _resynchronise(self) -> None:
        work = replicas.resynchronise(self._comm, self._parameters(), self._optimizer, self._due.lost)
        complete_on(self._buckets.layout.device, self._comm, work)
        self._due.lost = 0

    def _finish(self) -> None:
        self._steps.check_done()
        if not self._is_eager:
            raise UsageError(
                f"rank {self._comm.rank} ends the training in its first steps, and the rounds of the other ranks may "
                "wait for it: make at least three steps at every rank"
            )
        assert self._reduction is not None
        if not self._reduction.synchronous:
            self._parameter_changes.check()
        # No round waits for this rank any more.
        metrics = self._metrics.taken()
        with self._recovery.opened(self.round):
            reduction = self._comm.join(self._rules["name"], beside(self._buckets.flat, metrics)).wait()
        complete(self._comm, self._schedule.end(self._comm, self.round))
        if reduction is not None:
            reduction = dataclasses.replace(without(reduction, metrics), round=self._base + reduction.round)
            self._due.hear(reduction, reduction.round)
            for result in self._results():
                self._apply(result)
            self._skip_to(reduction.round)
        self._resynchronise()
        self._share_buffers()
        self._release()

    def _release(self) -> None:
        self._recovery.end()
        self._steps.remove()


def eager_sgd(state: EagerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients of the ranks that have arrived."""
    return checked(state, EagerSGDState)._reduce(bucket)


def _check_options(history: int, op: ReduceOp, clip_norm: float | None) -> None:
    if history < 1:
        raise UsageError(f"a rank applies the results that history has kept: it is a number above 0, not {history}")
    if op not in (ReduceOp.AVG, ReduceOp.AVG_ACTIVE):
        raise UsageError(f"op is asyncoll.AVG or asyncoll.AVG_ACTIVE, not {op}: a step takes a mean of gradients")
    if clip_norm is not None and not clip_norm > 0:
        raise UsageError(f"clip_norm is a norm above 0, or None, not {clip_norm}")
