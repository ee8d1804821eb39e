"""The store of epochs as a process of its own: `asyncoll store` keeps the entries of any number of jobs.

It is a service of RPC with a key: who has not the key cannot connect, and the sizes of all that comes in are checked
before memory is made for it. A client connects for each question, so it needs no loop of its own between two of them.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from asyncoll.errors import DeadlineError, ProtocolError, RemoteError, ServiceLostError, UsageError
from asyncoll.rpc import connect, serve
from asyncoll.runtime.deadlines import deadline
from asyncoll.world.network import url_host
from asyncoll.world.write_once import MemoryStore, check, lost

ENTRIES_MAX: Final = 1 << 16  # of all jobs
BYTES_MAX: Final = 1 << 28  # of all entries together
_ANSWER_S = 10.0  # to connect, and to get an answer


class BoundedStore:
    """The functions of the service. Entries never vanish, so a store that is full takes no more.

    The names of entries begin with that of the store. So one that is started anew, and knows nothing of what was
    decided before, refuses the jobs of the earlier one.
    """

    def __init__(self, entries: int = ENTRIES_MAX, nbytes: int = BYTES_MAX) -> None:
        self._store = MemoryStore()
        self._entries, self._bytes = entries, nbytes  # that there is room for
        self._name = secrets.token_hex(8)

    def name(self) -> str:
        return self._name

    def compare_and_set(self, name: str, entry: bytes) -> bytes:
        if (held := self.read(name)) is not None:
            return held
        if not self._entries or len(entry) > self._bytes:
            raise UsageError("it is full: start another one, and give its address to the jobs that start from now on")
        held = self._store.compare_and_set(name, entry)
        self._entries, self._bytes = self._entries - 1, self._bytes - len(entry)
        return held

    def read(self, name: str) -> bytes | None:
        if not name.startswith(self._name):
            raise UsageError("it has been started anew since this job has begun, and does not know its entries")
        return self._store.read(name)


async def serve_store(address: str, port: int, key_file: Path, tell: Callable[[str], object]) -> None:
    """Serve a new store at an IP address of this host until this is cancelled. `tell` gets where it listens.

    Raises UsageError if it cannot listen there, or the key cannot be used.
    """
    url = f"tcp://{url_host(address)}:{port}"
    async with serve(BoundedStore(), url, key_file=key_file, inline=True) as bound:
        tell(bound.removeprefix("tcp://"))
        await asyncio.Event().wait()


class RemoteStore:
    """The entries of one world in the store that a process serves at `host` and `port`. `space` begins their names."""

    def __init__(self, host: str, port: int, key_file: Path, space: str) -> None:
        """Asks the store. Raises ServiceLostError if it does not answer, and UsageError if the key cannot be used."""
        self._host, self._port, self._key_file = host, port, key_file
        self._prefix = f"{self._ask('name')}-{space}-"

    def compare_and_set(self, name: str, entry: bytes) -> bytes:
        check(name, entry)
        held = self._ask("compare_and_set", self._prefix + name, entry)
        if not isinstance(held, bytes):
            raise lost(self._place, f"it has answered with {type(held).__name__}")
        return held

    def read(self, name: str) -> bytes | None:
        check(name)
        held = self._ask("read", self._prefix + name)
        if held is not None and not isinstance(held, bytes):
            raise lost(self._place, f"it has answered with {type(held).__name__}")
        return held

    @property
    def _place(self) -> str:
        return f"at {url_host(self._host)}:{self._port}"

    def _ask(self, question: str, *args: Any) -> Any:
        """The answer of the service. The thread has no running loop."""

        async def ask() -> Any:
            with deadline(_ANSWER_S):
                # Each time: the service may have been started again at another address of that name.
                found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
                url = f"tcp://{url_host(str(found[0][4][0]))}:{self._port}"
                async with connect(url, key_file=self._key_file) as service:
                    return await service.call(question, *args)

        try:
            return asyncio.run(ask())
        except (ServiceLostError, DeadlineError, OSError) as error:
            raise lost(self._place, f"{error}; it must run, with the key in {self._key_file}") from error
        except (ProtocolError, RemoteError) as error:
            raise lost(self._place, error) from error
