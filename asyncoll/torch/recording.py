"""Calls in the records of torch's profilers: from the beginning of a call to its end, with the shapes of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_PREFIX = "asyncoll:"
_torch: Any = torch.autograd  # its types do not show these functions
_is_on = _torch._profiler_enabled


def begin(operation: str, inputs: Sequence[Tensor]) -> Any:
    """The record of a call that begins now, as `asyncoll:all_reduce`; None if no profiler runs in this thread."""
    if not _is_on():
        return None
    return _torch._record_function_with_args_enter(_PREFIX + operation, *inputs)


def end_with(record: Any, future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
    """End `record` when `future` is completed. Returns a future that is completed afterwards."""
    ended: torch.futures.Future[Any] = torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(record, future)
    return ended


def end(record: Any) -> None:
    """End the record of a call that could not begin."""
    if record is not None:
        _torch._record_function_with_args_exit(record)
