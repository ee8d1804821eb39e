"""`monitored_barrier`: a barrier that names the ranks that have not come.

It goes through the store of the group. So it also works while ranks are in other calls, which is what it is for, and
its failure leaves the group usable.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import DistBackendError

from asyncoll.runtime.deadlines import now_s

_LOOK_S = 0.005  # between two looks into the store: its own wait writes a warning for each timeout
_MORE_S = 1.0  # that the other ranks wait for the verdict of rank 0 after its time


class MonitoredBarriers:
    """The monitored barriers of one group at one rank."""

    def __init__(self, store: Any, rank: int, size: int, name: str, check: Callable[[], None]) -> None:
        """`check` raises if the group has failed, or takes no calls.

        No other group that shares `store`, now or later, has this `name`.
        """
        self._store = store
        self._name = name
        self._rank = rank
        self._size = size
        self._check = check
        self._barriers = 0
        self._never = threading.Event()

    def __call__(self, timeout: timedelta, *, wait_all_ranks: bool) -> None:
        """Return once all ranks have called this.

        Raises DistBackendError after `timeout`: at rank 0 it names the first rank that has not come, or all of them
        with `wait_all_ranks`.
        """
        self._check()
        self._barriers += 1
        key, seconds = self._key(), timeout.total_seconds()
        if self._rank == 0:
            self._watch(key, seconds, wait_all_ranks)
        elif not self._come(key, seconds + _MORE_S):
            raise DistBackendError(
                f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0: {self._verdict(key)}"
            )

    def _key(self, turn: int = 0) -> str:
        return f"monitored barrier/{self._name}/{self._barriers + turn}"

    def _come(self, key: str, seconds: float) -> bool:
        """Report this rank. Returns whether rank 0 has seen all ranks."""
        self._store.set(f"{key}/{self._rank}", "here")
        return self._wait(f"{key}/all", now_s() + seconds) and self._verdict(key) == "passed"

    def _verdict(self, key: str) -> str:
        if not self._store.check([f"{key}/all"]):
            return "it has not come"
        return bytes(self._store.get(f"{key}/all")).decode()

    def _watch(self, key: str, seconds: float, wait_all_ranks: bool) -> None:
        if not seconds > 0:
            raise DistBackendError(f"Rank 0 timed out in monitoredBarrier after {seconds * 1000:.0f} ms.")
        missing: list[int] = []
        ends_s = now_s() + seconds
        for rank in range(1, self._size):
            if self._wait(f"{key}/{rank}", ends_s):
                self._store.delete_key(f"{key}/{rank}")
                continue
            missing.append(rank)
            if not wait_all_ranks:
                break
        ranks = f"Rank{'s' * wait_all_ranks} {', '.join(map(str, missing))}"
        text = f"{ranks} failed to pass monitoredBarrier in {seconds * 1000:.0f} ms" if missing else "passed"
        self._store.set(f"{key}/all", text)
        if missing:
            raise DistBackendError(text)
        self._store.delete_key(f"{self._key(-1)}/all")  # all ranks have read it before they came

    def _wait(self, key: str, ends_s: float) -> bool:
        """Wait until `key` is in the store. Returns False after `ends_s`. Raises the error of the group."""
        while not self._store.check([key]):
            self._check()
            left_s = ends_s - now_s()
            if left_s <= 0:
                return False
            self._never.wait(min(_LOOK_S, left_s))
        return True
