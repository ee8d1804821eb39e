"""The store in which the ranks of a world of Ray publish their addresses: a table at rank 0's actor.

It needs no port and no torch. Ray says who may call an actor; what the ranks publish is sealed with the job's key.
"""

from __future__ import annotations

from typing import Any

import ray


class Table:
    """The entries of `world.sealed_entries.Store`, at rank 0. Ray calls its methods on one thread."""

    def __init__(self) -> None:
        self._entries: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._entries[key] = value

    def get(self, key: str) -> bytes:
        return self._entries[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._entries for key in keys)

    def add(self, key: str, amount: int) -> int:
        total = int(self._entries.get(key, b"0")) + amount
        self._entries[key] = str(total).encode()
        return total


class ActorStore:
    """The store as any rank sees it. A call blocks, and raises RuntimeError once rank 0 is gone."""

    def __init__(self, server: Any) -> None:
        """`server` is the actor of rank 0."""
        self._server = server

    def set(self, key: str, value: bytes) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        found: bytes = self._ask("get", key)
        return found

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def _ask(self, method: str, *args: Any) -> Any:
        try:
            return self._server.serve.remote(method, *args).future().result()
        except ray.exceptions.RayError as error:
            raise RuntimeError(str(error)) from error
