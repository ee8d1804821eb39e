"""Keeps works alive for DDP.

With `Join`, the reducer of DDP keeps the C++ part of a `Work` until the backward pass, and nothing keeps its Python
part. Without that the C++ part has no `wait` that ever returns.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

_kept = WeakKeyDictionary[Any, Any]()  # the work of each reducer
_Reducer: Any = dist.Reducer  # type: ignore[attr-defined]  # the types do not show it
_set_work = _Reducer._set_forward_pass_work_handle


def keep_works() -> None:
    """From now on, a reducer keeps the whole of the work that it is given. Without effect the second time."""
    _Reducer._set_forward_pass_work_handle = _keep_work


def _keep_work(reducer: Any, work: Any, *more: Any) -> None:
    _kept[reducer] = work
    _set_work(reducer, work, *more)
