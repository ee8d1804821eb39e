"""The key of a job, and the secrets that are derived from it. Every process with the key belongs to the job.

`asyncoll launch` creates a key for each job. For other jobs on several hosts, the user copies a file with the key to
each host. One file may serve many jobs, because each run derives a session key of its own.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from asyncoll.errors import ProtocolError, UsageError

KEY_BYTES: Final = 32
KEY_FILE: Final = "ASYNCOLL_KEY_FILE"
_USUAL = ".asyncoll.key"  # in the home folder
_RIGHTS_OF_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class Key:
    """A secret that the ranks share. Its repr does not contain it."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        """`secret` has at most 64 bytes. With an empty one, seals prove nothing; it serves worlds without a key."""
        self._secret = secret

    @property
    def is_empty(self) -> bool:
        """Whether its secret is, so that it proves nothing."""
        return not self._secret

    def derive(self, *purpose: str | int | bytes) -> bytes:
        """Derive a secret of 32 bytes for one purpose: keyed BLAKE2b over the parts, each with its length."""
        parts = (part if isinstance(part, bytes) else str(part).encode() for part in purpose)
        encoded = b"".join(b"%d:%b" % (len(part), part) for part in parts)
        return hashlib.blake2b(encoded, key=self._secret, digest_size=KEY_BYTES, person=b"asyncoll").digest()

    def seal(self, message: bytes, *purpose: str | int | bytes) -> bytes:
        """Return `message` with a proof in front that a holder of the key has sealed it for this purpose."""
        return self.derive("seal", message, *purpose) + message

    def open(self, sealed: bytes, *purpose: str | int | bytes) -> bytes:
        """Return the message of `seal`. Raises ProtocolError unless it was sealed with this key for this purpose."""
        proof, message = sealed[:KEY_BYTES], sealed[KEY_BYTES:]
        if not hmac.compare_digest(proof, self.derive("seal", message, *purpose)):
            raise ProtocolError("it is not sealed with this job's key")
        return message


def new_key() -> bytes:
    """The bytes of a new key."""
    return secrets.token_bytes(KEY_BYTES)


def write_key(path: Path, key: bytes | None = None) -> None:
    """Write `key`, or a new one, to a new file that only this user can read.

    Raises UsageError if that fails, or `path` exists.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        if path.is_dir():
            raise UsageError(f"{path} is a folder: give a file in it") from error
        raise UsageError(f"{path} exists: if it is a key of yours, use that one; else give another file") from error
    except OSError as error:
        missing = error.errno == errno.ENOENT and not path.parent.exists()
        cause = f"make the folder {path.parent} first" if missing else error.strerror
        raise UsageError(f"cannot write a key to {path}: {cause}") from error
    try:
        with open(descriptor, "wb") as file:
            file.write(new_key() if key is None else key)
    except OSError as error:
        os.unlink(path)
        raise UsageError(f"cannot write a key to {path}: {error.strerror}") from error


def find_key(environ: Mapping[str, str]) -> str:
    """The path of the key: that of ASYNCOLL_KEY_FILE, or ~/.asyncoll.key if there is such a file; empty otherwise."""
    home = environ.get("HOME")
    usual = os.path.join(home, _USUAL) if home else ""
    return environ.get(KEY_FILE) or (usual if os.path.lexists(usual) else "")


def read_key(path: Path) -> Key:
    """Read the key in a file. Raises UsageError unless only this user has rights to the file, and it can be a key."""
    try:
        # An open that does not block on a pipe without a writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status, secret = os.fstat(file.fileno()), file.read(KEY_BYTES + 1) or b""
    except OSError as error:
        remedy = f"; make one with `asyncoll key {path}`" if error.errno == errno.ENOENT else ""
        raise UsageError(f"cannot read the key {path}: {error.strerror}{remedy}") from error
    _check_private(path, status)
    if len(secret) != KEY_BYTES:
        raise UsageError(f"{path} is no key: it must have {KEY_BYTES} bytes; make one with `asyncoll key FILE`")
    if len({*secret}) == 1:
        raise UsageError(f"{path} is no key: all its bytes are the same; make one with `asyncoll key FILE`")
    return Key(secret)


def check_folder(folder: Path) -> None:
    """Raise UsageError unless `folder` is a folder, not a link, that belongs to this user and is closed to others."""
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
    if status.st_mode & _RIGHTS_OF_OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        raise UsageError(f"others than its owner have rights to {path} (mode {mode:04o}): use `chmod go= {path}`")
