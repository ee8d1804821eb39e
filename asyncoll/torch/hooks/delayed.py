"""The hook `dc_s3gd`: the models of the last step are averaged while the next gradient is computed.

Rigazzi, "DC-S3GD: delay-compensated stale-synchronous SGD for large-scale decentralized neural network training", DLS
2019, algorithm 1.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from asyncoll.errors import UsageError
from asyncoll.runtime.handles import Handle
from asyncoll.tensors.reductions import ReduceOp
from asyncoll.torch.futures import future_of
from asyncoll.torch.hooks import agreement, refusals
from asyncoll.torch.hooks.buckets import Layout, trained
from asyncoll.torch.hooks.changes import ParameterChanges
from asyncoll.torch.hooks.optimizer_steps import OptimizerSteps
from asyncoll.torch.hooks.state import HookState, checked
from asyncoll.training.dc_s3gd import compensate
from asyncoll.training.trainer import MODELS_MAY_DIFFER


class DCS3GDState(HookState):
    """The state of `dc_s3gd`: the hook leaves each rank its own gradient, and the steps of `optimizer` do the rest.

    A step goes to the average of the models after the step before, corrects the gradient for the way there, steps, and
    starts the next average. So between steps each rank has its own model, one step away from an average that all share.

    All ranks make the same number of steps, one after each `backward()`. A program may clip or unscale gradients
    between `backward()` and the step; a GradScaler that leaves out a step is a UsageError in the next `backward()`.
    Buffers are each rank's own, unless DDP broadcasts them in each forward pass, which makes every rank wait for rank
    0.

    The first `backward()` raises UsageError at all ranks unless they have the same `lambda0` and round, equal frozen
    parameters, and at round 0 equal parameters.

    Besides the features that no hook supports, `join()`, complex parameters and those that DDP ignores, optimizers that
    step in `backward()` or send messages, and closures are refused. Gradients may be accumulated in `no_sync()`.

    A checkpoint is each rank's own: save and load the model of each rank after it was wrapped, because DDP gives all
    ranks rank 0's model when it wraps it. `finish()` takes the last average, and rank 0's buffers.

    Args:
        ddp: the wrapped model. Register the hook on the same one.
        optimizer: trains all parameters of the model and no others.
        lambda0: the share of the gradient by which it is corrected, at least 0 (0: no correction).

    Memory: three flat tensors of the size of the gradients.
    """

    _is_saved_by_each_rank = True

    def __init__(self, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, *, lambda0: float = 0.2) -> None:
        if not 0 <= lambda0 < math.inf:
            raise UsageError(f"lambda0 is a share of the gradient, at least 0, not {lambda0}")
        super().__init__(ddp)
        refusals.check_all_reduced(ddp)
        refusals.check_optimizer(ddp, optimizer)
        self._lambda0 = float(lambda0)
        self._layout = Layout(trained(ddp))
        count, dtype, device = self._layout.count, self._layout.dtype, self._layout.device
        self._mean: Tensor = self._comm.empty(count, dtype, device=device)
        self._gradient = torch.empty(count, dtype=dtype, device=device)
        self._distance = torch.empty_like(self._gradient)
        self._averaged: Handle[Tensor] | None = None
        self._changes = ParameterChanges(self._layout.parameters)
        self._is_resumed = False
        self._steps = OptimizerSteps(dc_s3gd.__name__, optimizer, self._before_step, self._after_step)

    def _leave(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        refusals.check_join(self._model())
        self._accept(bucket)
        if bucket.index() == 0:
            self._steps.expect()
            self._resume()
        if bucket.is_last():
            self._share_metrics()
        future = future_of([bucket.buffer()])
        future.set_result(bucket.buffer())
        return future

    def _options(self) -> dict[str, Any]:
        return {"lambda0": self._lambda0}

    def _contents(self) -> dict[str, Any]:
        own = self._layout.parameters if self.round else []
        return agreement.contents_of_model(self._model(), without=own)

    @torch.no_grad()
    def _before_step(self) -> None:
        if not self._take_average():  # w_i = w̄, and D_i
            return
        self._layout.read_gradients(self._gradient)
        compensate(self._gradient, self._distance, self._lambda0)  # g̃_i (equation 10)
        self._layout.write_gradients(self._gradient)

    @torch.no_grad()
    def _after_step(self) -> None:
        self.round += 1
        self._changes.note()
        # The model is free for the next gradient.
        self._start_average()
        self._training.note(self.round, MODELS_MAY_DIFFER)

    def _take_average(self) -> bool:
        """Wait for the average that is under way, and go to it: w_i + D_i of equation 12. False: there is none."""
        if self._averaged is None:
            return False
        self._changes.check()
        with self._calls():
            self._averaged.wait()
        # Not before: a wait that Ctrl-C has ended can be made again.
        self._averaged = None
        self._distance.copy_(self._mean)
        parameters = self._layout.parameters
        torch._foreach_sub_(self._layout.parts(self._distance), list(parameters))  # D_i = mean - w_i (equation 9)
        torch._foreach_copy_(list(parameters), self._layout.parts(self._mean))
        return True

    def _start_average(self) -> None:
        torch._foreach_copy_(self._layout.parts(self._mean), [p.detach() for p in self._layout.parameters])
        with self._calls():
            self._averaged = self._comm.allreduce(self._mean, ReduceOp.AVG)
            # The runtime goes on with it at once.
            self._averaged.when_done(_ignore)

    def _resume(self) -> None:
        # The model is one step away from the average that was under way.
        if self._is_resumed and self.round:
            self._is_resumed = False
            self._start_average()

    def _own_state(self) -> dict[str, Any]:
        self._steps.check_done()
        return {}

    def _load_own_state(self, own: dict[str, Any]) -> None:
        self._is_resumed = True

    @torch.no_grad()
    def _finish(self) -> None:
        self._steps.check_done()
        self._resume()
        self._take_average()
        self._share_buffers()
        self._release()

    def _release(self) -> None:
        self._steps.remove()


def dc_s3gd(state: DCS3GDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Leave this rank its own gradient: the models are averaged, in the steps of the optimizer."""
    return checked(state, DCS3GDState)._leave(bucket)


def _ignore() -> None:
    pass
