"""The job's key, and what follows from it. Whoever has the key belongs to the job.

`asyncoll launch` makes one for each job. Between hosts it is in a file that is copied to each of them, which
ASYNCOLL_KEY_FILE names; it may serve many jobs, because each run derives a session of its own from it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import Final

from asyncoll.errors import ProtocolError, UsageError

KEY_BYTES: Final = 32
KEY_FILE: Final = "ASYNCOLL_KEY_FILE"
_FOR_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class Key:
    """A secret that the ranks share. Nothing prints it."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        """At most 64 bytes; an empty one is no secret at all, and proves nothing."""
        self._secret = secret

    def derive(self, *what: str | int | bytes) -> bytes:
        """32 bytes that only who has the key can know; others for every other `what`."""
        parts = (part if isinstance(part, bytes) else str(part).encode() for part in what)
        told = b"".join(b"%d:%b" % (len(part), part) for part in parts)
        return hashlib.blake2b(told, key=self._secret, digest_size=KEY_BYTES, person=b"asyncoll").digest()

    def seal(self, message: bytes, *what: str | int | bytes) -> bytes:
        """`message`, and the proof that a holder of the key says it of `what`."""
        return self.derive("seal", message, *what) + message

    def open(self, sealed: bytes, *what: str | int | bytes) -> bytes:
        """The message. Raises ProtocolError if it is not what a holder of this key has sealed for `what`."""
        proof, message = sealed[:KEY_BYTES], sealed[KEY_BYTES:]
        if not hmac.compare_digest(proof, self.derive("seal", message, *what)):
            raise ProtocolError("it is not sealed with this job's key")
        return message


def write_key(path: Path) -> None:
    """Make a key, in a new file that only this user can read. Raises UsageError if that cannot be done."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise UsageError(f"cannot write a key to {path}: {error.strerror}") from error
    with open(descriptor, "wb") as file:
        file.write(secrets.token_bytes(KEY_BYTES))


def read_key(path: Path) -> Key:
    """The key in a file. Raises UsageError unless it is this user's own, nobody else's to read, and whole."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            status, secret = os.fstat(file.fileno()), file.read(KEY_BYTES + 1) or b""
    except OSError as error:
        raise UsageError(f"cannot read the key {path}: {error.strerror}") from error
    _check_private(path, status)
    if len(secret) != KEY_BYTES:
        raise UsageError(f"{path} is no key: it must have {KEY_BYTES} bytes; make one with `asyncoll key FILE`")
    return Key(secret)


def _without_waiting(path: str, flags: int) -> int:
    """Opens it even if it is a pipe that nobody writes into."""
    return os.open(path, flags | os.O_NONBLOCK)


def check_folder(folder: Path) -> None:
    """Raises UsageError unless it is really a folder, this user's own, that nobody else can enter."""
    try:
        status = os.lstat(folder)
    except OSError as error:
        raise UsageError(f"cannot use the folder of sockets {folder}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise UsageError(f"{folder} is not a folder but something else, perhaps a link to one: it is not used")
    _check_private(folder, status)


def _check_private(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise UsageError(f"{path} belongs to user {status.st_uid} and not to this one, {os.geteuid()}: it is not used")
    if status.st_mode & _FOR_OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        raise UsageError(f"others than its owner have rights to {path} (mode {mode:04o}): take them away (chmod go= …)")
