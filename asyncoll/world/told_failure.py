"""What the ranks of a world that could not be formed tell each other: the first failure, as texts."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence

from asyncoll.errors import AsyncollError, ClosedError, DeadlineError, PeerLostError, UsageError, describe
from asyncoll.transport.joining import TELLING_S
from asyncoll.world.sealed_entries import SealedEntries, Store, seal, store_ended, unseal

_FAREWELL_S = 10.0  # time for the other ranks to read why the store of rank 0 ends; they may wait for a processor
# In place of that limit, for ranks whose host may be gone.
_BESIDE_LOST_S = 1.0


def words_of(error: BaseException, rank: int) -> list[str]:
    """The texts by which `rank` tells the others of the `error` that has ended its joining."""
    if isinstance(error, PeerLostError):
        return ["lost", error.cause, ",".join(map(str, error.ranks)), error.host]
    if isinstance(error, DeadlineError):
        return ["late", str(error), ",".join(map(str, error.missing)), ""]
    if isinstance(error, ClosedError | asyncio.CancelledError):
        return ["lost", "it was interrupted before all ranks had joined", str(rank), ""]
    return ["lost", f"it could not join: {describe(error)}", str(rank), ""]


def error_of(words: list[str], size: int) -> AsyncollError:
    """The error that another rank of a world of `size` has told in these `words`."""
    if len(words) != 4:
        raise UsageError("another program writes to the store of this job")
    kind, text, listed, host = words
    ranks = tuple(int(rank) for rank in listed.split(",") if rank.isdecimal())
    if kind == "lost" and ranks:
        return PeerLostError(ranks[0], text, host, ranks=ranks)
    return DeadlineError(text, tuple(rank for rank in range(size) if rank not in ranks), ranks)


class ToldFailure:
    """The failure of one world in the store: the first rank that fails publishes it, and the others read it."""

    def __init__(self, entries: SealedEntries, world: str) -> None:
        """`world` begins the names of its entries."""
        self.machines: Sequence[object] = ()  # that of each rank, once they are known
        self._entries = entries
        self._world = world
        self._name = f"{world}/failed"
        self._told: list[AsyncollError] | None = None  # what another rank had told before this one; None: not yet asked
        self._has_told = False

    def hear(self) -> None:
        """Raise the failure that another rank has published, if there is one."""
        entries = self._entries
        # Otherwise another program writes to this store.
        if entries.has(self._name) and (words := entries.read(self._name)) is not None:
            raise error_of(words, entries.size)

    def tell(self, error: BaseException) -> AsyncollError | None:
        """Tell the other ranks why joining has failed. Returns what another rank has told before.

        If the store of rank 0 has ended without that, returns the loss of rank 0: it would have waited for this rank to
        read a failure. What this rank has noticed of another one, which has given up, is a consequence.

        The first call does it, in any thread, and blocks for up to two seconds; but not if the host of rank 0 is lost,
        which serves the store. Afterwards the store may be gone.
        """
        if self._told is None:
            self._told = []
            lost = error.ranks if isinstance(error, PeerLostError) else ()
            is_gone = self._entries.is_gone or (self._entries.serves and len(lost) > 1 and 0 in lost)
            if isinstance(error, Exception | asyncio.CancelledError) and not is_gone:
                # In a thread, which is abandoned after `TELLING_S`: the process that serves the store may be stopped.
                work = self._entries.raw(), error, self._told
                telling = threading.Thread(target=self._publish, args=work, daemon=True)
                telling.start()
                telling.join(TELLING_S)
        return self._told[0] if self._told else None

    def await_readers(self, error: BaseException | None) -> None:
        """At rank 0, whose store ends with it: wait until the others have read a failure that this rank has told."""
        if self._has_told:
            with contextlib.suppress(RuntimeError):
                self._await_readers(_missed(error))

    def _publish(self, store: Store, error: BaseException, told: list[AsyncollError]) -> None:
        """Publish `error`, unless another rank has published a failure before; then add that one to `told`."""
        name, key, rank = self._name, self._entries.key, self._entries.rank
        words = words_of(error, rank)
        try:
            if not store.check([name]):
                store.set(name, seal(words, name, key))
            first = unseal(store.get(name), name, key)
            if first is not None and first != words:
                told.append(error_of(first, self._entries.size))
            store.set(self._has_read(rank), b"")
            self._has_told = True
        except RuntimeError:  # the store has ended, so no rank can be told
            if self._entries.serves and 0 not in _missed(error):
                told.append(store_ended())

    def _await_readers(self, lost: Sequence[int]) -> None:
        """Wait until all ranks that have come to the store, except the `lost` ones, have read the failure.

        Waits less long for ranks of the hosts of `lost`, which may be gone with them.
        """
        store, joining = self._entries.raw(), self._entries.joining
        others = set(range(1, self._entries.size)).difference(lost)
        here = [rank for rank in others if store.check([f"{self._world}/nonce/{rank}"])]
        machines = {self.machines[rank] for rank in lost if self.machines}
        beside = {rank for rank in here if self.machines and self.machines[rank] in machines}
        for ranks, limit_s in ((set(here) - beside, _FAREWELL_S), (beside, _BESIDE_LOST_S)):
            ends_s = time.monotonic() + limit_s  # noqa: TID251 (no loop waits for it)
            while waits := [self._has_read(rank) for rank in ranks if not joining.has_ended(rank)]:
                if store.check(waits) or time.monotonic() >= ends_s:  # noqa: TID251
                    break
                time.sleep(joining.pause_s)  # noqa: TID251

    def _has_read(self, rank: int) -> str:
        """The name of the entry which says that `rank` has told its failure, or read that of another one."""
        return f"{self._world}/told/{rank}"


def _missed(error: BaseException | None) -> tuple[int, ...]:
    """The ranks that `error` blames."""
    if isinstance(error, DeadlineError):
        return error.missing
    return error.ranks if isinstance(error, PeerLostError) else ()
