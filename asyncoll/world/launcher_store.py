"""The store of epochs in the launcher of several hosts: ranks ask at a socket of their host, whose agent passes it on.

A question is one packet: the name of an entry, a zero byte, and the entry to write, or nothing. So is the answer: a `+`
and the entry, or a `-` if there is none. An empty answer, or the end of the connection, is a refusal.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final

from asyncoll.errors import UsageError
from asyncoll.world.write_once import ENTRY_BYTES, MemoryStore, check, lost

_ANSWER_S = 10.0  # to connect, and to get an answer
_THERE, _MISSING = b"+", b"-"
_ANSWER_BYTES: Final = len(_THERE) + ENTRY_BYTES


class AnsweringStore:
    """The store at the launcher."""

    def __init__(self) -> None:
        self._store = MemoryStore()

    def answer(self, question: bytes) -> bytes:
        """The answer to the question of a rank."""
        name, _, entry = question.partition(b"\0")
        try:
            text = name.decode(errors="replace")
            held = self._store.compare_and_set(text, entry) if entry else self._store.read(text)
        except UsageError:
            return b""
        return _MISSING if held is None else _THERE + held


class LauncherStore:
    """The entries of one world in it. `space` begins their names."""

    def __init__(self, path: Path, space: str) -> None:
        """`path` is that of the agent's socket."""
        self._path, self._space = path, space

    def compare_and_set(self, name: str, entry: bytes) -> bytes:
        check(name, entry)
        held = self._ask(name, entry)
        if held is None:
            raise lost("of the launcher", f"the entry {name} is gone")
        return held

    def read(self, name: str) -> bytes | None:
        check(name)
        return self._ask(name, b"")

    def _ask(self, name: str, entry: bytes) -> bytes | None:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
                asking.settimeout(_ANSWER_S)
                asking.connect(str(self._path))
                asking.send(f"{self._space}-{name}\0".encode() + entry)
                answer = asking.recv(_ANSWER_BYTES)
        except OSError as error:
            raise lost("of the launcher", error) from error
        if answer[:1] not in (_THERE, _MISSING):
            raise lost("of the launcher", "it has refused the question, or has ended")
        return answer[1:] if answer[:1] == _THERE else None
