"""Entries that are written once: the store in which the ranks decide on an epoch. It outlives every rank.

An entry is written by the first compare-and-set and never changes, nor is it deleted. So all ranks that read it agree,
whatever each takes for lost. It is sealed for its name with a key of the job, because others may reach the store.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any, Final, Protocol

from asyncoll.errors import ServiceLostError, UsageError
from asyncoll.runtime.epochs import Decision
from asyncoll.transport.keys import Key
from asyncoll.world.sealed_entries import seal, unseal

ENTRY_BYTES: Final = 1 << 16  # the longest entry
_MEMBERS_MAX: Final = 1 << 12  # of an epoch
_NUMBER_DIGITS: Final = 9  # of an epoch or a member number
_NAME_MAX: Final = 200  # characters
_NAMES: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-")


class WriteOnce(Protocol):
    """A store of entries by name. Calls may block. They raise ServiceLostError if the store does not answer."""

    def compare_and_set(self, name: str, entry: bytes) -> bytes:
        """Write the entry if there is none. Returns what it holds then. After an error it may have been written."""
        ...

    def read(self, name: str) -> bytes | None:
        """The entry; None if there is none."""
        ...


class FolderStore:
    """The entries as files of a folder that the processes of one user share, on a file system with hard links.

    An entry is written to a file of its own first, and then gets its name by a link, which fails if the name is taken.
    So an entry is there whole or not at all, also if its writer is killed. Files are readable for the user alone.
    """

    def __init__(self, folder: Path) -> None:
        """Makes the folder if there is none. Raises UsageError if it is not this user's, or open to others."""
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.stat()
        except OSError as error:
            raise UsageError(f"the store of epochs cannot be in {folder}: {error}") from error
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise UsageError(f"the store of epochs {folder} must be this user's, with no access for others (chmod 700)")
        self._folder = folder

    def compare_and_set(self, name: str, entry: bytes) -> bytes:
        check(name, entry)
        own = self._folder / f".{name}.{secrets.token_hex(8)}"
        try:
            descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with open(descriptor, "wb") as file:
                    file.write(entry)
                with contextlib.suppress(FileExistsError):
                    os.link(own, self._folder / name)
            finally:
                own.unlink()
        except OSError as error:
            raise lost(self._folder, error) from error
        held = self.read(name)
        if held is None:
            raise lost(self._folder, f"the entry {name} is gone")
        return held

    def read(self, name: str) -> bytes | None:
        check(name)
        try:
            with open(self._folder / name, "rb") as file:
                return file.read(ENTRY_BYTES + 1)
        except FileNotFoundError:
            if self._folder.is_dir():
                return None
            raise lost(self._folder, "the folder is gone") from None
        except OSError as error:
            raise lost(self._folder, error) from error


class TorchStore:
    """The entries in a store of torch.distributed, such as the TCPStore of torchrun's agent, below `prefix`.

    They are in base64, because `compare_set` takes text.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        """`store` has `compare_set`, `check` and `get`."""
        self._store = store
        self._prefix = prefix

    def compare_and_set(self, name: str, entry: bytes) -> bytes:
        check(name, entry)
        try:
            return _bytes(self._store.compare_set(self._prefix + name, "", b64encode(entry).decode()))
        except RuntimeError as error:  # those of torch.distributed are
            raise lost(self._prefix, error) from error

    def read(self, name: str) -> bytes | None:
        check(name)
        try:
            is_there = self._store.check([self._prefix + name])
            return _bytes(self._store.get(self._prefix + name)) if is_there else None
        except RuntimeError as error:
            raise lost(self._prefix, error) from error


class MemoryStore:
    """The entries in this process, for ranks that share it: in tests and in simulations."""

    def __init__(self) -> None:
        self._entries: dict[str, bytes] = {}

    def compare_and_set(self, name: str, entry: bytes) -> bytes:
        check(name, entry)
        return self._entries.setdefault(name, entry)

    def read(self, name: str) -> bytes | None:
        check(name)
        return self._entries.get(name)


def _bytes(text: bytes) -> bytes:
    """An entry of a store of torch; empty if others have written it."""
    try:
        return b64decode(text, validate=True)
    except ValueError:
        return b""


def lost(place: object, error: object) -> ServiceLostError:
    """The error for a store that does not answer."""
    return ServiceLostError(f"the store of epochs {place} does not answer: {error}")


def check(name: str, entry: bytes = b"-") -> None:
    """Raise UsageError for an impossible name, or an entry that is empty or too long."""
    if not 0 < len(name) <= _NAME_MAX or not set(name) <= _NAMES:
        raise UsageError(f"{name!r:.80} is no name of an entry: use up to {_NAME_MAX} small letters, digits and -")
    if not 0 < len(entry) <= ENTRY_BYTES:
        raise UsageError(f"the entry {name} has {len(entry)} bytes; it must have 1 to {ENTRY_BYTES}")


# -- epochs in it ---------------------------------------------------------------------------------


class SealedOnce:
    """Texts as entries of a store that are written once, sealed for their names."""

    def __init__(self, store: WriteOnce, key: Key) -> None:
        """`key` is one that all ranks of the job have, those that join later too, and nobody else."""
        self._store = store
        self._key = key

    def write(self, name: str, *texts: str) -> list[str]:
        """Write `texts` unless there is an entry. Returns what it holds.

        Raises ServiceLostError if the store does not answer, and UsageError if the entry is none of this job.
        """
        return self._opened(name, self._store.compare_and_set(name, seal(texts, name, self._key)))

    def read(self, name: str) -> list[str] | None:
        """The texts of the entry; None if there is none. Raises as `write` does."""
        entry = self._store.read(name)
        return None if entry is None else self._opened(name, entry)

    def _opened(self, name: str, entry: bytes) -> list[str]:
        texts = unseal(entry, name, self._key) if len(entry) <= ENTRY_BYTES else None
        if texts is None:
            raise _foreign(name)
        return texts


class Decisions:
    """The decisions on epochs as entries of a store, one for each epoch."""

    def __init__(self, store: WriteOnce, key: Key) -> None:
        """`key` is one that all ranks of the job have, those that join later too, and nobody else."""
        self.entries = SealedOnce(store, key)

    def decide(self, proposal: Decision) -> Decision:
        """Write `proposal` unless its epoch is decided. Returns the decision. Raises as `SealedOnce.write` does."""
        members = ",".join(map(str, proposal.members))
        return _decision(proposal.epoch, self.entries.write(_name(proposal.epoch), str(proposal.epoch), members))

    def read(self, epoch: int) -> Decision | None:
        """The decision on `epoch`; None if there is none yet. Raises as `decide` does."""
        texts = self.entries.read(_name(epoch))
        return None if texts is None else _decision(epoch, texts)


def _decision(epoch: int, texts: list[str]) -> Decision:
    members = members_of(texts[1]) if len(texts) == 2 and texts[0] == str(epoch) else None
    if members is None:
        raise _foreign(_name(epoch))
    return Decision(epoch, members)


def _foreign(name: str) -> UsageError:
    return UsageError(
        f"the entry {name} of the store is none of this job: two jobs may have one store and one name, or it was "
        "damaged"
    )


def _name(epoch: int) -> str:
    return f"epoch-{epoch}"


def members_of(text: str) -> tuple[int, ...] | None:
    """The member numbers that `text` lists in order; None if it does not."""
    numbers = text.split(",", _MEMBERS_MAX)
    if len(numbers) > _MEMBERS_MAX or not all(
        number.isascii() and number.isdecimal() and len(number) <= _NUMBER_DIGITS for number in numbers
    ):
        return None
    members = tuple(map(int, numbers))
    return members if list(members) == sorted(set(members)) else None
