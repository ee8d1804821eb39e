"""The options of the calls of a process group.

torch passes an object of options; programs that call the methods of a group themselves may pass the reduction, the root
and the timeout instead, as those of torch's own groups allow.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

_NAMES = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
_REDUCTIONS = (dist.ReduceOp, dist.ReduceOp.RedOpType)


class TorchOptions(NamedTuple):
    """What torch's objects of options have, with the same names and defaults."""

    reduceOp: Any = dist.ReduceOp.SUM  # noqa: N815
    rootRank: int = 0  # noqa: N815
    timeout: timedelta | None = None


_DEFAULT = TorchOptions()


def read(given: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """The options that follow the tensors of a call: an object of torch, or an `TorchOptions`."""
    if not named:
        if not given:
            return _DEFAULT
        if len(given) == 1 and hasattr(given[0], "asyncOp"):
            return given[0]
    found: dict[str, Any] = {}
    for value in given:
        if isinstance(value, _REDUCTIONS):
            found["reduceOp"] = value
        elif isinstance(value, timedelta):
            found["timeout"] = value
        elif isinstance(value, int):
            found["rootRank"] = value
        elif value is not None:
            raise TypeError(f"{value!r} is no option of a call: pass a reduction, the rank of the root, or a timeout")
    for name, value in named.items():
        if name == "opts":
            return value
        if name not in _NAMES:
            raise TypeError(f"{name} is no option of a call: use one of {', '.join(_NAMES)}")
        found[_NAMES[name]] = value
    return TorchOptions(**found)
