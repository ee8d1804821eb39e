"""What torch asks of a process group, and this backend does not have.

The methods of torch's base class would ask a backend of C++ instead, which this group has not: "Could not find the
default backend". That is a RuntimeError, so even `getattr(group, "supports_window", False)` would raise it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

from asyncoll.errors import UsageError
from asyncoll.torch.errors import of_torch
from asyncoll.torch.name import NAME

_MEMBERS = "destroy the default process group at all ranks, and initialize it again"
_ERRORS = "every call that a failure ends raises an error, which names it"


def _missing(what: str, instead: str) -> Callable[..., NoReturn]:
    """A method that raises UsageError."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise of_torch(UsageError(f"the backend {NAME} has no {what}: {instead}"))

    refuse.__doc__ = f"Raises UsageError: there is no {what}."
    return refuse


class Unsupported:
    """Answers of a process group to questions of torch."""

    supports_abort_hooks = False
    supports_coalescing = False
    supports_completion_hooks = False
    supports_reconfigure = False
    supports_shrinking = False
    supports_splitting = False
    supports_time_estimate = False
    supports_window = False

    get_reconfigure_handle = reconfigure = _missing("reconfiguration of a group", _MEMBERS)
    shrink = _missing("shrinking of a group", _MEMBERS)
    merge_remote_group = _missing("merging of groups", _MEMBERS)
    new_window = _missing("windows", "use send and recv, or asyncoll.init and its comm.rpc")
    register_abort_hook = unregister_abort_hook = _missing("hooks for aborts", _ERRORS)
    _register_on_completion_hook = _missing("hooks for completed calls", "use the future of a Work, or a post hook")
    _enable_collectives_timing = _missing("timing of calls", "use torch.profiler, or asyncoll bench")

    use_pg_for_symm_mem_rendezvous = property(
        lambda _: False, _missing("symmetric memory", "large calls use memory that the ranks of a host share")
    )

    def _has_hooks(self) -> bool:
        """Whether there are hooks for completed calls."""
        return False

    def _wait_for_pending_works(self) -> None:
        """Nothing: torch waits here for completion hooks, and there are none."""

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """Without effect, as torch asks of a backend whose timeout cannot be extended for one call."""
