"""Keeps torch.compile out of the code of process groups.

torch.compile looks at each Python function that is called below a compiled one, also at those that C++ code calls. It
would compile the methods of a process group, in part and again for each tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

F = TypeVar("F", bound=Callable[..., Any])

_dynamo: Any = eval_frame  # its types do not show all that it has


def uncompiled(function: F) -> F:
    """`function`, which torch.compile runs as it is, with all that it calls."""
    code: Any = function
    skip = _dynamo._FrameAction.SKIP
    _dynamo.set_code_exec_strategy(code.__code__, _dynamo._FrameExecStrategy(skip, skip))
    return function
