"""Collectives as coroutines, wait-avoiding allreduces among them, for training ranks that do not run in step.

`run` starts a program as a rank of a world, or `connect` inside a running event loop. Both give a `Communicator`, whose
methods are the collectives. Each method's docstring has its whole contract.

    import asyncoll
    import torch

    async def main(comm):
        x = torch.full((3,), float(comm.rank))
        await comm.allreduce(x)

    asyncoll.run(main)  # asyncoll launch -n 4 PROGRAM.py
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from asyncoll import rpc as rpc
    from asyncoll.algorithms.gossip.pairwise import Gossip as Gossip
    from asyncoll.algorithms.rounds.reduction import Reduction as Reduction
    from asyncoll.algorithms.sparse.selection import Feedback as Feedback
    from asyncoll.algorithms.sparse.sparse_operations import SparseReduction as SparseReduction
    from asyncoll.algorithms.totals import Statistics as Statistics
    from asyncoll.blocking import BlockingCommunicator as BlockingCommunicator
    from asyncoll.blocking import init as init
    from asyncoll.communicator import Communicator as Communicator
    from asyncoll.errors import AbortedError as AbortedError
    from asyncoll.errors import AsyncollError as AsyncollError
    from asyncoll.errors import ClosedError as ClosedError
    from asyncoll.errors import DeadlineError as DeadlineError
    from asyncoll.errors import DeadlockError as DeadlockError
    from asyncoll.errors import DeviceError as DeviceError
    from asyncoll.errors import EvictedError as EvictedError
    from asyncoll.errors import MismatchError as MismatchError
    from asyncoll.errors import NonFiniteError as NonFiniteError
    from asyncoll.errors import PeerLostError as PeerLostError
    from asyncoll.errors import ProtocolError as ProtocolError
    from asyncoll.errors import RemoteError as RemoteError
    from asyncoll.errors import ServiceLostError as ServiceLostError
    from asyncoll.errors import UsageError as UsageError
    from asyncoll.runtime.deadlines import deadline as deadline
    from asyncoll.runtime.handles import Handle as Handle
    from asyncoll.runtime.progress import offload as offload
    from asyncoll.tensors.flat import Flat as Flat
    from asyncoll.tensors.flat import flatten as flatten
    from asyncoll.tensors.metrics import Metrics as Metrics
    from asyncoll.tensors.reductions import ReduceOp as ReduceOp
    from asyncoll.world.join import connect as connect
    from asyncoll.world.join import run as run

    SUM, AVG, AVG_ACTIVE, PROD = ReduceOp.SUM, ReduceOp.AVG, ReduceOp.AVG_ACTIVE, ReduceOp.PROD
    MIN, MAX = ReduceOp.MIN, ReduceOp.MAX
    BAND, BOR, BXOR = ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR

_HOMES = {
    "algorithms.gossip.pairwise": "Gossip",
    "algorithms.rounds.reduction": "Reduction",
    "algorithms.sparse.selection": "Feedback",
    "algorithms.sparse.sparse_operations": "SparseReduction",
    "algorithms.totals": "Statistics",
    "blocking": "BlockingCommunicator init",
    "communicator": "Communicator",
    "errors": "AbortedError AsyncollError ClosedError DeadlineError DeadlockError DeviceError EvictedError "
    "MismatchError NonFiniteError PeerLostError ProtocolError RemoteError ServiceLostError UsageError",
    "runtime.deadlines": "deadline",
    "runtime.handles": "Handle",
    "runtime.progress": "offload",
    "tensors.flat": "Flat flatten",
    "tensors.metrics": "Metrics",
    "tensors.reductions": "ReduceOp",
    "world.join": "connect run",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
_REDUCTIONS = ("SUM", "AVG", "AVG_ACTIVE", "PROD", "MIN", "MAX", "BAND", "BOR", "BXOR")

__all__ = sorted([*_HOME_OF, *_REDUCTIONS, "__version__"])


def __getattr__(name: str) -> Any:
    """Load a public name at its first use, so that the launcher starts without numpy, ZeroMQ or torch."""
    home = "rpc" if name == "rpc" else _HOME_OF.get(name)
    if home is None and name not in _REDUCTIONS:
        raise AttributeError(f"module 'asyncoll' has no attribute {name!r}")
    _check()
    if name in _REDUCTIONS:
        return getattr(importlib.import_module("asyncoll.tensors.reductions").ReduceOp, name)
    module = importlib.import_module(f"asyncoll.{home}")
    return module if name == "rpc" else getattr(module, name)


@functools.cache
def _check() -> None:
    """Raise UsageError if a package is too old, and warn if torch has not taken the backend.

    Not when this module is imported, because `import torch` imports it, and must not fail or print by it.
    """
    importlib.import_module("asyncoll.world.versions").check()
    backend = sys.modules.get("asyncoll.torch")
    if backend is not None and backend.refusal:
        warnings.warn(backend.refusal, RuntimeWarning, stacklevel=3)
