"""The errors of process groups: each is an error of this library and of torch.

`except torch.distributed.DistBackendError` catches all of them, and `except asyncoll.PeerLostError` those that tell of
a lost rank, with its attributes. What is overdue is a TimeoutError, too. An error that passes through C++ code of
torch, such as a backward pass, is a RuntimeError there, with the same text.
"""

from __future__ import annotations

from torch.distributed import DistBackendError

from asyncoll import errors
from asyncoll.errors import AsyncollError, DeadlineError

_classes: dict[type[BaseException], type[BaseException]] = {}


class WaitTimeoutError(TimeoutError, DistBackendError):
    """`Work.wait(timeout)` has waited as long as it may. The call goes on."""


def of_torch(error: BaseException) -> BaseException:
    """`error`, if it is none of this library; otherwise one of the same text and attributes that is torch's, too."""
    if not isinstance(error, AsyncollError) or isinstance(error, DistBackendError):
        return error
    kind = _class_of(type(error))
    text = str(error)
    if isinstance(error, DeadlineError):
        text = f"the process group timed out: {text}"
    made = kind.__new__(kind, text)
    made.args = (text,)
    made.__dict__.update(vars(error))
    return made.with_traceback(error.__traceback__)


def _class_of(kind: type[BaseException]) -> type[BaseException]:
    if kind not in _classes:
        bases = (kind, TimeoutError, DistBackendError) if kind is DeadlineError else (kind, DistBackendError)
        _classes[kind] = type(kind.__name__, bases, {"__module__": __name__, "__doc__": kind.__doc__})
    return _classes[kind]


for _kind in vars(errors).values():
    if isinstance(_kind, type) and issubclass(_kind, AsyncollError):
        _class_of(_kind)
