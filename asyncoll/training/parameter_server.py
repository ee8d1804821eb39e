"""Asynchronous SGD with a parameter server: each gradient is applied as it arrives, to the newest model.

Dean et al., "Large scale distributed deep networks", NeurIPS 2012, section 4.1 (Downpour SGD), with one server and one
gradient for each exchange. The bound on staleness is that of Ho et al., "More effective distributed ML via a stale
synchronous parallel parameter server", NeurIPS 2013, section 2.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

import asyncoll
from asyncoll.training import saved
from asyncoll.training.step import Step
from asyncoll.training.trainer import Options, Trainer, is_finite


class ParameterServerSGD(Trainer):
    """Send each gradient to the server at rank 0, which takes a step with it at once, and go on from its new model.

    Every rank is a worker; rank 0 is also the server. No worker waits for another one, so a gradient belongs to a model
    that other workers have changed since. `step()` returns how many updates by others that are as `Reduction.skipped`
    (about P - 1 if all ranks are equally fast); `active` is 1, because each update has one gradient.

    With `staleness` (s, at least 0) a worker that has made more than s steps more than the slowest one waits for it, so
    `skipped` is at most (P - 1) (2 s + 1). With s = 0 no rank begins a step before all have ended the one before. A
    rank that has called `finish()` does not count any more. A rank that waits for the others in a collective call of
    the program does count: with `staleness`, make such calls only where all ranks have made as many steps.

    **Clock.** P updates are a round. `round` is the number of complete rounds in this rank's model; at rank 0, in the
    server's. So ranks make different numbers of steps in a loop such as `while sgd.round < rounds`, which ends at every
    rank, because each step adds an update. The optimizer, `clip_norm` and the scheduler of rank 0 are those that count;
    this scheduler is stepped by the server's clock. Other ranks' optimizers take no step.

    **Where the server runs.** Its functions are calls of `comm.rpc`. They run on the loop of rank 0's program, one at a
    time. Workers wait while that loop is blocked. So rank 0 should compute in a thread, from which the server's model
    is separate: `await asyncoll.offload(compute)`, where `compute` calls `backward()`.

    **End.** `finish()` waits for all ranks, which may come after different numbers of steps. All leave with the
    server's model, to the bit. Buffers are each rank's own until then.

    **Checkpoint.** That of rank 0 is the one of the training: its model, optimizer and trainer, saved after `step()`
    without an `await` in between, are the server's at one moment. Rank 0 loads it. All ranks then go on from it,
    whatever the others have loaded. Gradients that were under way are lost, and with P > 1 the order of updates is
    another one in each run. With P = 1 all of it is plain training, to the bit.

    **Errors.** A worker whose step fails, or is cancelled, ends the communicator, because the server may have applied
    its gradient or not. The error of a server that cannot take a step is a RemoteError at the worker, and an
    AbortedError with its text at the others.

    Args:
        staleness: s: the number of steps that a worker may be ahead of the slowest one; None: any.
        name: of the functions of the server, an identifier: a second training on one communicator needs another one.

    See `Trainer` for the other arguments; a `weight` is refused.

    Memory: the gradients, as one flat tensor. At rank 0 also the server's parameters and gradients, and a copy of the
    parameters for each answer under way.
    """

    _has_rounds_of_all: ClassVar[bool] = False

    def __init__(
        self,
        comm: asyncoll.Communicator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        staleness: int | None = None,
        name: str = "parameter_server",
        **options: Unpack[Options],
    ) -> None:
        if staleness is not None and staleness < 0:
            raise asyncoll.UsageError(f"staleness is a number of steps, at least 0, or None, not {staleness}")
        if not name.isidentifier():
            raise asyncoll.UsageError(f"name is an identifier, not {name!r}: functions are registered under it")
        super().__init__(comm, model, optimizer, **options)
        self._staleness = staleness
        self._name = name
        self._server = self._make_server() if comm.rank == 0 else None

    def _make_server(self) -> ModelServer:
        return ModelServer(self, self._staleness)

    async def _update(self, weight: float | None) -> Step:
        self._refuse_weight(weight, "it applies each gradient alone, and not a mean over ranks")
        # worker m: G_m = mean gradient of b local samples at w_m
        skipped, updates, model = await self._call("push", self._flat.gradients)  # send G_m, and receive w
        if self._server is not None:
            # From here to the caller nothing is awaited, so model, optimizer and round are of one moment.
            updates, model = self._server.updates, self._server.hand_out(self.comm.rank)
        self._flat.trainable.copy_(model)  # w_m = w
        self._skip_to(updates // self.comm.size)
        return self._exchanged((), skipped)

    async def _finish(self) -> None:
        await self._call("leave")
        await self.comm.barrier()  # all workers have had their last answers
        updates = torch.tensor(0 if self._server is None else self._server.updates)
        if self._server is not None:
            self._flat.trainable.copy_(self._server.parameters)
            self._server.close()
        await self.comm.broadcast(self._flat.trainable)
        self._skip_to(int(await self.comm.broadcast(updates)) // self.comm.size)
        await self._unite_buffers()

    async def _call(self, function: str, *arguments: Any) -> Any:
        """Call a function of the server. Rank 0 calls it as the others do, so that a failure ends the wait there."""
        try:
            return await self.comm.rpc.call(0, f"{self._name}.{function}", self.comm.rank, *arguments)
        except BaseException as error:
            # The text goes without the traceback of the server.
            cause = str(error).partition("\n")[0] or type(error).__name__
            self.comm.abort(f"a call of the parameter server failed: {cause}")
            raise

    async def _resume(self) -> None:
        if self._server is not None:
            self._server.begin()
            for function in (self._server.push, self._server.leave):
                self.comm.rpc.register(function, name=f"{self._name}.{function.__name__}")
        # After it the functions are registered.
        await self.comm.barrier()

    def _own_state(self) -> dict[str, Any]:
        return {} if self._server is None else self._server.state()

    def _load_own_state(self, own: dict[str, Any]) -> None:
        if self._server is None:
            return
        if not own:
            raise asyncoll.UsageError("the checkpoint is that of another rank: load the one that rank 0 has saved")
        self._server.load_state(own)

    def _source(self, rounds: list[int]) -> int:
        """Rank 0, which has the server, also if another rank has loaded a newer round."""
        return 0


class ModelServer:
    """The model w and its updates, at rank 0. `push` and `leave` are called by the workers.

    All of it runs on the loop of the program, and no update awaits anything: so there is one at a time, in the order of
    arrival, and what the program sees between two awaits is of one moment.
    """

    def __init__(self, trainer: ParameterServerSGD, staleness: int | None) -> None:
        self._trainer = trainer
        self._staleness = staleness
        size = trainer.comm.size
        self.updates = 0
        """How many gradients have been applied, also before a checkpoint."""
        self.parameters = torch.empty_like(trainer._flat.trainable)
        """w, one-dimensional: the trainable parameters in the order of the flat model."""
        self.gradients = torch.zeros_like(self.parameters)
        self._twins = twins(trainer.model, self.parameters, self.gradients)
        self._handed_out = [0] * size  # the number of updates in the model that a worker has
        self._steps = [0] * size  # of each worker
        self._workers = set(range(size))  # those that have not left
        self._has_moved = asyncio.Event()  # a worker has made a step, or has left

    async def push(self, worker: int, gradients: Tensor) -> tuple[int, int, Tensor | None]:
        """Take a step with the gradient of `worker`. Returns its staleness, the number of updates, and the model.

        Rank 0 takes the model from this object.
        """
        skipped = self.updates - self._handed_out[worker]
        self._apply(worker, gradients, skipped)
        self._steps[worker] += 1
        self._has_moved.set()
        while self._is_ahead(worker):
            self._has_moved.clear()
            await self._has_moved.wait()
        return skipped, self.updates, self.hand_out(worker) if worker else None

    async def leave(self, worker: int) -> None:
        """The training ends at `worker`: no other one waits for it any more."""
        self._workers.remove(worker)
        self._has_moved.set()

    def hand_out(self, worker: int) -> Tensor:
        """A copy of w for `worker`, whose next gradient belongs to it."""
        self._handed_out[worker] = self.updates
        return self.parameters.clone()

    def correct(self, worker: int, skipped: int) -> None:
        """Change the gradient of `worker` for the `skipped` updates since its model. Here: nothing."""

    def begin(self) -> None:
        """The training starts, or goes on, with all workers at the model of rank 0."""
        self.parameters.copy_(self._trainer._flat.trainable)
        for worker in self._workers:
            self.hand_out(worker)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the server besides the model and the optimizer."""
        return {"updates": self.updates}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.updates = saved.count(state, "updates")

    def close(self) -> None:
        """Free the memory: the registry of the communicator keeps this object."""
        del self.parameters, self.gradients, self._twins, self._trainer

    def _apply(self, worker: int, gradients: Tensor, skipped: int) -> None:
        self.gradients.copy_(gradients)
        self.correct(worker, skipped)
        if not is_finite(self.gradients):
            raise asyncoll.NonFiniteError(
                (worker,),
                f"update {self.updates + 1}, with the gradient of rank {worker}, holds NaN or infinity: nothing was "
                "changed",
            )
        if not self._trainer._has_overflowed(self.gradients):
            self._step_optimizer()  # w = w + U(G_m, w, t)
        self.updates += 1
        if self.updates % self._trainer.comm.size == 0:
            self._trainer._pass_round()

    def _step_optimizer(self) -> None:
        """Take a step of rank 0's optimizer, clipped, with the server's parameters in place of the model's."""
        optimizer, clip_norm = self._trainer.optimizer, self._trainer._clip_norm
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(self._twins.values(), clip_norm)
        replace(optimizer, self._twins)
        try:
            optimizer.step()
        finally:
            replace(optimizer, {twin: parameter for parameter, twin in self._twins.items()})

    def _is_ahead(self, worker: int) -> bool:
        if self._staleness is None:
            return False
        return self._steps[worker] - min(self._steps[other] for other in self._workers) > self._staleness


def twins(model: nn.Module, parameters: Tensor, gradients: Tensor) -> dict[nn.Parameter, nn.Parameter]:
    """Another parameter for each trainable one of the model. Their data and gradients are views of the flat tensors."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sizes = [parameter.numel() for parameter in trained]
    made = {}
    for parameter, data, gradient in zip(trained, parameters.split(sizes), gradients.split(sizes), strict=True):
        made[parameter] = nn.Parameter(data.view(parameter.shape))
        made[parameter].grad = gradient.view(parameter.shape)
    return made


def replace(optimizer: torch.optim.Optimizer, by: dict[nn.Parameter, nn.Parameter]) -> None:
    """Let the optimizer step the parameters `by[p]` in place of `p`, with the state that it has for `p`."""
    for group in optimizer.param_groups:
        group["params"] = [by.get(parameter, parameter) for parameter in group["params"]]
    for old, new in by.items():
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)
