"""Where a service may listen: unix sockets that are this user's alone, loopback, and elsewhere only with a key."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from asyncoll.errors import UsageError

_CREDENTIALS = struct.Struct("=iII")  # process, user, group
_PEER_PIDFD = 77  # SO_PEERPIDFD, which Python has no name for; Linux since 6.5
_MAX_PATH = 107  # of a unix socket, in bytes
_PROBE_S = 0.2  # for another host to refuse a connection; who gives no answer has not refused it


@contextlib.contextmanager
def prepare(url: str, *, has_key: bool, listens: bool = True) -> Iterator[int | None]:
    """Around a bind or a connect to `url`; yields the user who must be at the other end, if that can be known.

    Raises UsageError for an address that cannot be used, or that is not safe.
    """
    scheme, _, rest = url.partition("://") if isinstance(url, str) else ("", "", "")
    if scheme == "ipc" and rest and not rest.startswith("@"):
        if not listens:
            _check_owner(url, Path(rest))
        with _private(Path(rest)) if listens else contextlib.nullcontext():
            yield os.geteuid()
    elif scheme == "tcp" and ":" in rest:
        _check_host(url, rest.rpartition(":")[0].strip("[]"), has_key=has_key)
        yield None
    else:
        raise UsageError(
            f"{url!r:.100} is no address of a service: use ipc:///path/of/a/socket or tcp://127.0.0.1:port"
        )


def check_path(path: Path) -> None:
    """Raises UsageError if no unix socket can have it."""
    if len(bytes(path)) > _MAX_PATH:
        raise UsageError(f"the socket path {path} is longer than {_MAX_PATH} bytes: set TMPDIR to a shorter folder")


def refuses(address: str) -> bool:
    """Whether nobody listens at `ipc://path` or `tcp://ip:port`, although it can be reached."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    try:
        if scheme == "ipc":
            return not _is_served(Path(rest))
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def user_of(connection: socket.socket) -> int:
    """Whose process is at the other end of a unix socket, as the kernel knows it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def user_behind(descriptor: int) -> int | None:
    """The same of a socket of ZeroMQ's; None if the connection is gone."""
    try:
        end = socket.socket(fileno=descriptor)
    except OSError:
        return None
    try:
        return user_of(end)
    except OSError:
        return None
    finally:
        end.detach()


def process_behind(descriptor: int, url: str) -> int | None:
    """A pidfd of the process that listens at `url`, from a socket of ZeroMQ's that has just been connected to it.

    None if it is this very process, or if nothing can be known: the connection is gone, it is not a unix socket, the
    kernel has no pidfds, or the process is in another pid namespace.
    """
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family != socket.AF_UNIX or f"ipc://{connection.getpeername()}" != url:
                return None  # the number has been used again since
            pid = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            if pid in (0, os.getpid()):
                return None
            with contextlib.suppress(OSError):
                return connection.getsockopt(socket.SOL_SOCKET, _PEER_PIDFD)
            # On an older kernel another process could have been given the number, but not in the instant since it has
            # answered the handshake.
            return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def forget(url: str) -> None:
    """Nobody listens at `url` any more."""
    if url.startswith("ipc://"):
        Path(url.removeprefix("ipc://")).unlink(missing_ok=True)


def _check_owner(url: str, path: Path) -> None:
    """Who may write to the folder may put another one there later: the connection itself is checked, too."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return  # connecting tells
    except OSError as error:
        raise UsageError(f"cannot connect to {url}: {error}") from error
    if not stat.S_ISSOCK(status.st_mode):
        raise UsageError(f"cannot connect to {url}: it is not a socket")
    if status.st_uid != os.geteuid():
        raise UsageError(f"cannot connect to {url}: it belongs to another user, {status.st_uid}")


@contextlib.contextmanager
def _private(path: Path) -> Iterator[None]:
    """A socket that is made inside has mode 0600. One that nobody listens on any more makes room."""
    with _alone_in(path.parent):
        if path.is_socket() and not _is_served(path):
            path.unlink()
        elif path.exists():
            raise UsageError(f"cannot listen on ipc://{path}: it is there already, and in use")
        mask = os.umask(0o177)
        try:
            yield
        finally:
            os.umask(mask)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Of two that begin to listen at one path at once, one must find the other."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UsageError(f"cannot listen in {folder}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # it may be stopped, with as many who wait as there may be
        try:
            probe.connect(bytes(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
        return True


def _check_host(url: str, host: str, *, has_key: bool) -> None:
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise UsageError(f"{url}: give the host as an IP address, of one of its interfaces") from None
    if address.is_unspecified:
        raise UsageError(f"{url} means every interface of this host: name the address of the one to use")
    if not address.is_loopback and not has_key:
        raise UsageError(
            f"{url} can be reached from other hosts: pass `key_file`, a file with a key that both ends have"
        )
