"""The hook `oktopk`: only the largest elements are sent; the others stay with their rank.

Li, Hoefler, "Near-optimal sparse allreduce for distributed deep learning", PPoPP 2022, algorithm 2, with residuals of
gradients, as in the authors' code.
"""

from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from asyncoll.algorithms.sparse.oktopk import Rules
from asyncoll.algorithms.sparse.selection import Feedback
from asyncoll.algorithms.sparse.sparse_operations import Specification
from asyncoll.errors import UsageError
from asyncoll.tensors.reductions import dtype_name
from asyncoll.torch.hooks import agreement, refusals
from asyncoll.torch.hooks.buckets import Buckets, Layout, trained
from asyncoll.torch.hooks.state import HookState, checked
from asyncoll.training import saved
from asyncoll.training.oktopk_sgd import Algorithm


class OkTopkState(HookState):
    """The state of `oktopk`: acc = ε + G; the sum of the largest elements of all ranks, divided by their number, is the
    gradient of the step; ε = acc without what was sent.

    All ranks make the same number of steps, with any optimizer, and have the same gradients after `backward()`, to the
    bit. Clipping may follow. Residuals hold gradients of several steps, so a GradScaler, whose scale changes, is not
    possible: train in float32 or bfloat16. A gradient with NaN or infinity at any rank is a NonFiniteError at every
    rank.

    Besides the features that no hook supports, `join()`, parameters that DDP ignores, optimizers that step in
    `backward()`, and `find_unused_parameters` without `static_graph` are refused. Gradients may be accumulated in
    `no_sync()`.

    The first `backward()` raises UsageError at all ranks unless they have the same options, the same round, and, to the
    bit, equal parameters.

    `state_dict()` has the residual, which is each rank's own, and thresholds and regions. A state with another `name`
    loads it, too: so the process group goes back to a checkpoint after an error. `finish()` gives all ranks rank 0's
    buffers.

    Args:
        ddp: the wrapped model. Register the hook on the same one.
        algorithm: of `Communicator.sparse_allreduce`, as the next four.
        density: the share of the elements that is sent, above 0.
        thresholds_every: rounds between two new thresholds.
        regions_every: rounds between two new regions.
        feedback: how the threshold follows the number of selected elements; None: it does not.
        warm_up: the number of first rounds that are "dense", and leave no residual.
        name: of the sparse allreduces: a second training on the process group needs another one.

    Memory: two flat tensors of the size of the gradients, and in a step about one and a half more, to select elements.
    """

    _is_saved_by_each_rank = True

    def __init__(
        self,
        ddp: DistributedDataParallel,
        *,
        algorithm: Algorithm | str = "oktopk",
        density: float = 0.01,
        thresholds_every: int = 1,
        regions_every: int = 64,
        feedback: Feedback | None = None,
        warm_up: int = 0,
        name: str = "oktopk",
    ) -> None:
        super().__init__(ddp)
        refusals.check_all_reduced(ddp)
        refusals.check_all_used(ddp)
        if warm_up < 0:
            raise UsageError(f"warm_up is a number of rounds, not {warm_up}")
        self._algorithm = algorithm
        self._warm_up = warm_up
        self._name = name
        rules = Rules(thresholds_every, regions_every, feedback)
        self._rules: dict[str, Any] = {"density": density, **rules._asdict()}
        self._buckets = Buckets(self._comm, Layout(trained(ddp)))
        dtype = dtype_name(self._buckets.layout.dtype)
        Specification(algorithm, density, dtype, (self._buckets.layout.count,), rules).check()
        layout = self._buckets.layout
        self._residual: Tensor = self._comm.empty(layout.count, layout.dtype, device=layout.device).zero_()  # ε = 0
        self._claim(name)

    def _reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        refusals.check_join(self._model())
        self._accept(bucket)
        future = self._buckets.gather(bucket)
        if bucket.is_last():
            # The residual holds the gradient until the call has ended.
            with self._all_or_nothing(), self._calls():
                self._exchange()
                self._share_metrics()
                self._buckets.scatter()
                self.round += 1
        return future

    def _exchange(self) -> None:
        """Replace the gradient in the buckets by the mean of what all ranks send."""
        gradient = self._buckets.flat
        method = self._algorithm if self.round >= self._warm_up else "dense"
        accumulator = self._residual.add_(gradient)  # acc = ε + G
        total = self._comm.sparse_allreduce(
            accumulator, algorithm=method, name=self._name_of(method), **self._rules
        ).wait()  # u and idx; ε = acc, but 0 at idx
        mean = (total.values / self._comm.size).to(gradient.dtype)  # u / P
        gradient.zero_().index_add_(0, total.indices, mean)

    def _options(self) -> dict[str, Any]:
        return {"algorithm": self._algorithm, "warm_up": self._warm_up, "name": self._name, **self._rules}

    def _contents(self) -> dict[str, Any]:
        rounds = {method: state and state["round"] for method, state in self._operations().items()}
        return {**agreement.contents_of_model(self._model()), "the rounds of the sparse allreduce": rounds}

    def _operations(self) -> dict[str, Any]:
        """The states of the sparse allreduces that the training makes, by method."""
        methods = sorted({"dense", self._algorithm})
        return {method: self._comm.sparse_state(self._name_of(method)) for method in methods}

    def _name_of(self, method: str) -> str:
        return f"{self._name}, {method}"

    def _own_state(self) -> dict[str, Any]:
        return {"algorithm": self._algorithm, "residual": self._residual.clone(), "operations": self._operations()}

    def _load_own_state(self, own: dict[str, Any]) -> None:
        algorithm = saved.entry(own, "algorithm", lambda value: isinstance(value, str), "a text")
        if algorithm != self._algorithm:
            raise UsageError(
                f"the state that was saved is of the algorithm {algorithm!r}, and not of {self._algorithm!r}: make the "
                "same state and model"
            )
        for method, state in saved.sparse(own, self._residual, self._operations()).items():
            self._comm.load_sparse_state(self._name_of(method), state)

    def _finish(self) -> None:
        self._share_buffers()


def oktopk(state: OkTopkState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the largest elements of residual and gradient of all ranks."""
    return checked(state, OkTopkState)._reduce(bucket)
