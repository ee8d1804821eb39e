"""Worlds whose ranks are actors of Ray: `run` starts them. It needs Ray, the extra `ray` of asyncoll."""

try:
    import ray as _ray  # noqa: F401
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(
        f"asyncoll.ray needs Ray: pip install '.[ray]' in a checkout of asyncoll ({_error})"
    ) from _error

from asyncoll.ray.job import run

__all__ = ["run"]
