"""What the states of all hooks have in common."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from asyncoll.blocking import BlockingCommunicator
from asyncoll.errors import AsyncollError, UsageError
from asyncoll.runtime.deadlines import deadline
from asyncoll.runtime.unfinished import Training
from asyncoll.torch.entry import serve_until_all_leave
from asyncoll.torch.errors import of_torch
from asyncoll.torch.hooks import agreement, refusals
from asyncoll.torch.hooks.buckets import trained
from asyncoll.torch.hooks.completion import complete, complete_on
from asyncoll.torch.process_group import ProcessGroup
from asyncoll.torch.sites import reported_at_user
from asyncoll.training import replicas, saved
from asyncoll.training.step_metrics import StepMetrics, means_of_all

S = TypeVar("S", bound="HookState")

_names: weakref.WeakKeyDictionary[BlockingCommunicator, set[str]] = weakref.WeakKeyDictionary()  # of operations


class Logged(dict[str, float]):
    """The means of the values that were given to `log`, by key."""

    def __missing__(self, key: str) -> float:
        raise UsageError(
            f"no step of this round has logged {key!r}: call state.log({key}=...) before each backward(), or ask with "
            f"state.metrics.get({key!r})"
        )


class HookState(ABC):
    """The state of one hook of one model at one rank: it goes to `register_comm_hook` with the hook.

    Raises UsageError if the process group is of another backend, or the model uses a feature of
    DistributedDataParallel with which the hook would train wrongly.
    """

    _is_copy = False
    _is_saved_by_each_rank = False  # False: what one rank has saved is what all ranks have, however many there are

    def __init__(self, ddp: DistributedDataParallel) -> None:
        refusals.check_wrapped(ddp)
        group = ddp.process_group
        if not isinstance(group, ProcessGroup):
            raise UsageError(
                "the hooks need a process group of the backend asyncoll: initialize it with "
                'init_process_group("asyncoll"), and give no process_group of another backend to the model'
            )
        refusals.check_always(ddp)
        self.round = 0
        """The newest round whose result is in the model: the clock of schedules. All ranks count the same rounds."""
        self._ddp = weakref.ref(ddp)  # the model holds its hooks
        self._group = group
        self._comm = group._comm
        self._has_ended = False
        self._has_failed = False
        self._has_begun = False  # with the first bucket, at all ranks
        self._training = Training(type(self).__name__, self._comm._core.member)
        self._gathered = 0  # parameters in the buckets of this step
        self._metrics = StepMetrics(
            "call `log` before the first backward() at all ranks, without values if there are none"
        )
        self.metrics: dict[str, float] = Logged()
        """The means of the logged values in the round of the last `backward()`, by key: over the steps that have it."""

    def log(self, **values: object) -> None:
        """Give the next `backward()` these numbers of this rank, such as `log(loss=loss)`. Local: sends nothing.

        They are Python numbers, or tensors without dimensions, which are read now and kept as float64. They ride along
        with the gradients, and `metrics` has the mean of each over all ranks that have logged it; with `eager_sgd` over
        the contributions of the round, each added-up step of a late rank counting one. Keys may differ between ranks
        and steps. Whether a training has metrics is fixed by its first `backward()`, at all ranks: call `log()` before
        it if a rank, or that step, has none.

        Raises UsageError for more than 64 keys, for a value that is no number, and if the training has begun without.
        """
        self._check_original()
        self._metrics.note(values)

    def __getstate__(self) -> dict[str, Any]:
        """For copies of the model, which torch makes without its hook. So the copy of a state belongs to no model."""
        return {"_is_copy": True, "_has_ended": False, "round": self.round, "metrics": dict(self.metrics)}

    def state_dict(self) -> dict[str, Any]:
        """The state of the hook at this rank, for `torch.save`. It holds neither the model nor the optimizer.

        Call it after a step of the optimizer, and before the next `backward()`. `eager_sgd` and `dc_s3gd` raise
        UsageError elsewhere, and `eager_sgd` after a round that is not synchronous. So do all hooks after a step that
        an error has ended, or Ctrl-C, if the state lacks what it held before the step.
        """
        self._check_whole()
        return {**self._origin(), "round": self.round, "own": self._own_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was saved, before the first `backward()`. Load the model and the optimizer, too.

        What any rank has saved of `allreduce` and `eager_sgd` may be loaded at every rank, of any number of ranks. With
        `oktopk` and `dc_s3gd` each rank loads its own, and their number stays the same.

        Local: sends nothing. Raises UsageError if `state` is of another hook, or of another rank or number of ranks
        where each rank loads its own, if it is damaged (a value is missing or cannot be, such as a round that is
        negative), or if the training has begun. The first `backward()` raises UsageError at all ranks if they have
        loaded different rounds.
        """
        self._check_original()
        if self._has_begun or self._has_ended:
            raise UsageError("load the state of a hook before the first backward()")
        for what, here in self._origin().items():
            if (there := saved.origin(state, what)) != here:
                raise UsageError(
                    f"the state that was saved has {what} {there!r}, and not {here!r}: load the one that this rank of "
                    "this job has saved, or begin a new training from the model and the optimizer alone"
                )
        round_, own = saved.count(state, "round"), saved.table(state, "own")
        self._load_own_state(own)
        self.round = round_

    def finish(self) -> None:
        """End the training: all ranks leave with one model, to the bit. Collective; every rank calls it once.

        A second call has no effect. A `backward()` after it is a UsageError, and so is this call after a
        NonFiniteError, or after Ctrl-C in the call of `oktopk` or in this one: go back to a checkpoint.

        Needed after steps of `eager_sgd` and `dc_s3gd` that have left the ranks with different models: without it, or
        `discard()`, `destroy_process_group()` raises UsageError, and aborts the world. While an exception is handled it
        adds nothing. A program that never destroys its process group is warned on stderr as it ends.
        """
        if self._has_ended:
            return
        self._check_whole()
        with self._fails_if_interrupted(), self._calls():
            self._finish()
        self._has_ended = True
        self._training.end()

    def discard(self) -> None:
        """End the training of this rank without `finish()`: its result is not wanted. Local: sends nothing.

        For measurements, and after a checkpoint from which a later run goes on. The model stays that of the last step,
        another one at each rank. Rounds of the others may wait for this rank: every rank calls it, after the same step,
        and `destroy_process_group()` then waits for the slowest one, for the timeout of the group at most. Afterwards
        `finish()` has no effect, and `backward()` and `state_dict()` are a UsageError.
        """
        self._check_original()
        if not self._has_ended:
            self._release()
            self._fail()
            serve_until_all_leave(self._comm, self._group.get_timeout().total_seconds())
        self._has_ended = True

    @abstractmethod
    def _finish(self) -> None:
        """Make all models equal, and release what the state holds."""

    def _release(self) -> None:  # noqa: B027 (some hooks hold nothing)
        """The training ends: release what it holds."""

    def _fail(self) -> None:
        """The training has no state any more to save, or to end with."""
        self._has_failed = True
        self._training.end()

    def _options(self) -> dict[str, Any]:
        """The options that all ranks must have in common, by name."""
        return {}

    def _contents(self) -> dict[str, Any]:
        """What else all ranks must have in common, by name: tensors and plain values, in dicts and lists."""
        return {}

    def _origin(self) -> dict[str, Any]:
        """Where a checkpoint must come from that this rank loads."""
        hook = {"hook": type(self).__name__}
        place = {"ranks": self._comm.size, "rank": self._comm.rank} if self._is_saved_by_each_rank else {}
        return hook | place

    def _own_state(self) -> dict[str, Any]:
        return {}

    def _load_own_state(self, own: dict[str, Any]) -> None:
        del own

    def _share_buffers(self) -> None:
        """Give all ranks rank 0's buffers. Collective."""
        model = self._model()
        complete_on(trained(model)[0].device, self._comm, replicas.share_buffers(self._comm, model.module))

    def _share_metrics(self) -> None:
        """Average the logged values over all ranks. Collective, if any were logged before the first step."""
        if (metrics := self._metrics.taken()) is not None:
            with self._calls():
                self.metrics = Logged(complete(self._comm, means_of_all(self._comm, metrics)))

    def _model(self) -> DistributedDataParallel:
        self._check_original()
        ddp = self._ddp()
        if ddp is None:
            raise UsageError("the model of this hook is gone")
        return ddp

    @contextmanager
    def _calls(self) -> Iterator[None]:
        """For calls: the timeout of the process group is their deadline, and errors are torch's, too.

        The errors name the line of the user's code that leads here.
        """
        try:
            with deadline(self._group.get_timeout().total_seconds()), reported_at_user():
                yield
        except AsyncollError as error:
            raise of_torch(error) from None

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """For work that leaves the state without a meaning if an exception ends it."""
        self._has_failed = True
        yield
        self._has_failed = False

    @contextmanager
    def _fails_if_interrupted(self) -> Iterator[None]:
        """For work of several calls: Ctrl-C leaves some of them unmade, and the other ranks wait for these."""
        try:
            yield
        except AsyncollError:
            raise
        except BaseException:
            self._fail()
            raise

    def _check_original(self) -> None:
        if self._is_copy:
            raise UsageError(
                "this is the copy of a state, and the copy of a wrapped model has no hook: make a state for the copy, "
                "load the state_dict() of the first one, and register the hook"
            )

    def _check_whole(self) -> None:
        self._check_original()
        if self._has_failed:
            raise UsageError(
                "the training of this hook has failed, or was discarded, so it has no state to save or to end with: go "
                "back to a checkpoint"
            )

    def _accept(self, bucket: GradBucket) -> None:
        """Each bucket passes here first. Raises UsageError unless it belongs to this training.

        At the first one the ranks compare what they have. A difference is a UsageError at all of them.
        """
        if self._has_ended or self._has_failed:
            raise UsageError("the training of this hook has ended: wrap the model again, and register a new hook")
        if bucket.buffer().layout is not torch.strided:
            raise UsageError("a sparse gradient has no bucket: use Embedding(sparse=False)")
        if not self._has_begun:
            self._begin(bucket)
        self._count(bucket)

    def _begin(self, bucket: GradBucket) -> None:
        ddp, first = self._model(), bucket.parameters()[0]
        if not ddp._comm_hooks or not any(first is parameter for parameter in trained(ddp)):
            raise UsageError(
                "the state of this hook was made for another model, or another DistributedDataParallel around it: make "
                "the state, and register the hook, for one"
            )
        with self._calls():
            options = {**self._options(), "log": self._metrics.begin()}
            agreement.check_same(self._comm, self.round, options, self._contents())
        self._has_begun = True

    def _count(self, bucket: GradBucket) -> None:
        """Raise UsageError if the buckets of a step lack parameters."""
        self._gathered = len(bucket.parameters()) + (0 if bucket.index() == 0 else self._gathered)
        if bucket.is_last() and self._gathered < len(trained(self._model())):
            raise refusals.changed_parameters()

    def _claim(self, name: str) -> None:
        """Raise UsageError if another state of this process group has the name, or had it."""
        names = _names.setdefault(self._comm, set())
        if name in names:
            raise UsageError(
                f"a training named {name!r} has used this process group, and its rounds, thresholds and regions belong "
                "to the name: give another name to the state"
            )
        names.add(name)


def checked(state: object, kind: type[S]) -> S:
    """`state`, if it is of the class that belongs to the hook; else UsageError."""
    if not isinstance(state, kind):
        raise UsageError(f"this hook has a state of the class {kind.__name__}, and not of {type(state).__name__}")
    return state
