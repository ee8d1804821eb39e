"""What the ranks of one host ask the launcher's store (`asyncoll/world/launcher_store.py`), and its answers."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from asyncoll.launch.host import READ_BYTES, News, Sources

SOCKET = "store"  # in the folder of the job on this host, which is open to this user alone
_QUESTION_BYTES_MAX = 2 * READ_BYTES  # more than any has


class StoreRelay:
    """A socket at which each connection asks once. Neither questions nor answers are looked at."""

    def __init__(self, folder: Path, sources: Sources, tell: Callable[[News], None]) -> None:
        self._sources, self._tell = sources, tell
        self._numbers = itertools.count()
        self._asking: dict[int, socket.socket] = {}  # by the number of the question, as long as it has no answer
        self._silent: set[socket.socket] = set()  # connections that have asked nothing yet
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(folder / SOCKET))
        self._listener.listen(socket.SOMAXCONN)
        self._listener.setblocking(False)
        sources.watch(self._listener, self._accept)

    def answer(self, number: int, answer: bytes) -> None:
        """Pass on the answer to a question."""
        # The rank that has asked may be gone.
        with self._asking.pop(number) as connection, suppress(OSError):
            connection.send(answer)

    def close(self) -> None:
        for source in (self._listener, *self._silent):
            self._sources.unwatch(source)
        for opened in (self._listener, *self._silent, *self._asking.values()):
            opened.close()

    def _accept(self) -> None:
        # The rank is gone, or this process has no descriptor left.
        with suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._silent.add(connection)
            self._sources.watch(connection, partial(self._hear, connection))

    def _hear(self, connection: socket.socket) -> None:
        self._sources.unwatch(connection)
        self._silent.discard(connection)
        question = b""
        with suppress(OSError):
            question = connection.recv(_QUESTION_BYTES_MAX)
        if not question:
            connection.close()
            return
        number = next(self._numbers)
        self._asking[number] = connection
        self._tell({"asked": number, "question": question})
