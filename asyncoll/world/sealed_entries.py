"""The entries of a store: short texts, each sealed for its own name.

Any process that reaches the store may write to it, so an entry counts only if a key of this job has sealed it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgpack

from asyncoll.errors import PeerLostError, ProtocolError, ServiceLostError, UsageError
from asyncoll.transport.joining import Joining
from asyncoll.transport.keys import KEY_BYTES, Key
from asyncoll.world.environment import place_of

T = TypeVar("T")


class Store(Protocol):
    """The methods of a torch.distributed store that are used here."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, amount: int) -> int: ...


class SealedEntries:
    """The entries of `store` as one rank sees them. Every call raises if joining cannot succeed any more."""

    def __init__(self, store: Store, rank: int, size: int, key: Key, joining: Joining, *, serves: bool) -> None:
        """`key` is that of the job. `serves` says that rank 0 serves the store, which ends with it."""
        self.rank = rank
        self.size = size
        self.key = key
        self.joining = joining
        self.serves = serves
        self.host, self.port = place_of(store)  # where this rank has reached the store; empty if it has no address
        self.is_gone = False
        self.is_asking = False  # the store
        self._store = store

    def put(self, name: str, texts: Sequence[str], key: Key | None = None) -> None:
        """Publish `texts`, sealed with `key`, or that of the job."""
        self.ask(self._store.set, name, seal(texts, name, key or self.key))

    def read(self, name: str, key: Key | None = None) -> list[str] | None:
        """The texts of an entry that is there; None if they are not sealed with `key`, or that of the job."""
        return unseal(self.ask(self._store.get, name), name, key or self.key)

    def read_unsealed(self, name: str) -> list[str]:
        """The texts of an entry that another key, or none, has sealed: for an error only. Empty if it has none."""
        return _texts(self.ask(self._store.get, name)[KEY_BYTES:]) or []

    def put_plain(self, name: str, text: str) -> None:
        self.ask(self._store.set, name, text.encode())

    def read_plain(self, name: str) -> str:
        return self.ask(self._store.get, name).decode(errors="replace")

    def has(self, *names: str) -> bool:
        """Whether all of these entries are there."""
        return self.ask(self._store.check, [*names])

    def add(self, name: str, amount: int) -> int:
        """Add to a count, which begins at 0, and return it."""
        return self.ask(self._store.add, name, amount)

    def ask(self, method: Callable[..., T], *args: Any) -> T:
        """Call a method of the store. The process that serves the store may be gone, or stopped."""
        who = "which serves the store" if self.serves else "the store"
        what = (
            f"{who}, and it does not answer: its process is stopped, or the network between the hosts drops long "
            "packets: set the MTU of their interfaces to what the whole way carries"
        )
        is_asking, self.is_asking = self.is_asking, True
        try:
            return self.joining.call(lambda: method(*args), lambda: [0], what)
        # The errors of torch.distributed are RuntimeErrors.
        except RuntimeError as error:
            self.is_gone = True
            if not self.serves:
                raise ServiceLostError(f"the store of this job is gone: {error}") from error
            raise store_ended() from error
        finally:
            self.is_asking = is_asking

    def check_backends(self, ranks: Sequence[int]) -> None:
        """Raise UsageError if one of `ranks` uses Gloo, which publishes its address in the store that torch hands over.

        Such a rank waits for addresses of Gloo, up to its own time limit.
        """
        others = [rank for rank in ranks if self.has(f"0/{rank}")]
        if others:
            raise UsageError(
                f"rank {others[0]} has initialized this process group with the backend gloo, and rank {self.rank} "
                "with asyncoll: give all ranks the same backend"
            )

    def raw(self) -> Store:
        """The store itself, whose calls may block without limit."""
        return self._store

    def close(self) -> None:
        """Let go of the store. If this rank serves it, the store ends."""
        del self._store


def store_ended() -> PeerLostError:
    """The error for a store that rank 0 serves, and that has ended: unless rank 0 has told a failure, it has died."""
    return PeerLostError(0, "the store that it serves has ended before all ranks had joined")


def seal(texts: Sequence[str], name: str, key: Key) -> bytes:
    """The entry `name` with these texts. Paths may contain bytes that are not UTF-8."""
    packed: bytes = msgpack.packb(texts, unicode_errors="surrogateescape")
    return key.seal(packed, name)


def unseal(sealed: bytes, name: str, key: Key) -> list[str] | None:
    """The texts of the entry `name`; None if `key` has not sealed them."""
    try:
        return _texts(key.open(sealed, name))
    except ProtocolError:
        return None


def _texts(packed: bytes) -> list[str] | None:
    with contextlib.suppress(ValueError):
        texts = msgpack.unpackb(packed, unicode_errors="surrogateescape")
        if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
            return texts
    return None
