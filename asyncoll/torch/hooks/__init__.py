"""Communication hooks for torch's DistributedDataParallel: registered buckets, and algorithms that do not wait.

    ddp = DistributedDataParallel(model)
    state = hooks.EagerSGDState(ddp, optimizer, partial="majority", clip_norm=1.0)
    ddp.register_comm_hook(state, hooks.eager_sgd)
    while state.round < 1000:  # rounds, which all ranks share: a late rank skips some
        loss(ddp, batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    state.finish()  # all ranks have one model

| hook | state | what a step waits for |
|---|---|---|
| `allreduce` | `AllreduceState` | all ranks, as without a hook; the buckets are in memory that the ranks share |
| `eager_sgd` | `EagerSGDState` | the first rank, candidates that are drawn, or a quorum |
| `oktopk` | `OkTopkState` | all ranks; only the largest elements are sent |
| `dc_s3gd` | `DCS3GDState` | all ranks, one step later |

The process group is one of the backend asyncoll. Every rank makes the state, and registers the hook, with the same
options. Errors of a hook leave `backward()`, the step of the optimizer, or `finish()`. Those of its calls are errors of
torch, too (`torch.distributed.DistBackendError`).
"""

from __future__ import annotations

from asyncoll.torch.hooks.delayed import DCS3GDState, dc_s3gd
from asyncoll.torch.hooks.eager import EagerSGDState, eager_sgd
from asyncoll.torch.hooks.oktopk_hook import OkTopkState, oktopk
from asyncoll.torch.hooks.registered_buckets import AllreduceState, allreduce

__all__ = [
    "AllreduceState",
    "DCS3GDState",
    "EagerSGDState",
    "OkTopkState",
    "allreduce",
    "dc_s3gd",
    "eager_sgd",
    "oktopk",
]
