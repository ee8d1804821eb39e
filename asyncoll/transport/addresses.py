"""The addresses at which a service may listen and clients may connect, and who is at the other end of a socket.

A service may listen on unix sockets that only its user can open, on loopback, and on other interfaces with a key only.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import stat
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from asyncoll.errors import UsageError

_SO_PEERPIDFD = 77  # of Linux 6.5; Python does not export it
_MAX_PATH = 107  # bytes of the path of a unix socket
_LOCK_ATTEMPTS = 200
# The time until the next attempt. Other processes hold the lock for less than that.
_LOCK_RETRY_S = 0.02
# The time for another host to refuse a connection. A host that does not answer has not refused it.
_PROBE_S = 0.2


@contextlib.contextmanager
def prepare(url: str, *, has_key: bool, listens: bool = True) -> Iterator[int | None]:
    """Check `url`, and make it safe, for a bind (`listens`) or a connect inside this context.

    Yields the id of the user who must be at the other end: this user for a unix socket, and None over tcp, where the
    kernel does not know. The supported forms are ipc:///path and tcp://ip:port.

    Raises UsageError for an address that cannot be used or is not safe.
    """
    scheme, _, rest = url.partition("://") if isinstance(url, str) else ("", "", "")
    # At the beginning of a path, a zero byte would name an abstract socket, which has no mode that protects it.
    if "\0" in rest:
        raise UsageError(f"{url!r:.100} contains a NUL, which no path or address may")
    if scheme == "ipc" and rest and not rest.startswith("@"):
        if not listens:
            _check_owner(url, Path(rest))
        with _private_socket(Path(rest)) if listens else contextlib.nullcontext():
            yield os.geteuid()
    elif scheme == "tcp" and ":" in rest:
        _check_host(url, rest.rpartition(":")[0].strip("[]"), has_key=has_key)
        yield None
    else:
        raise UsageError(
            f"{url!r:.100} is no address of a service: use ipc:///path/of/a/socket or tcp://127.0.0.1:port"
        )


def check_path(path: Path) -> None:
    """Raise UsageError if `path` is too long for a unix socket."""
    if len(bytes(path)) > _MAX_PATH:
        raise UsageError(f"the socket path {path} is longer than {_MAX_PATH} bytes: set TMPDIR to a shorter folder")


def refuses_connections(address: str) -> bool:
    """Whether `address` (`ipc://path` or `tcp://ip:port`) refuses connections, or its path is gone: no process listens.

    False if a process listens, and also if nothing is known: no answer, or no route to the host.
    """
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
    """The id of the user at the other end of a unix socket, from the kernel."""
    return _credentials(connection)[1]


def process_of(connection: socket.socket) -> int:
    """The number of the process at the other end of a unix socket, from the kernel; 0 in another pid namespace.

    For a connection that was accepted, that is the process that has connected; else the one that listens.
    """
    return _credentials(connection)[0]


def user_behind(descriptor: int) -> int | None:
    """The same for the descriptor of a socket that ZeroMQ owns; None if the connection is gone."""
    try:
        with _borrowed(descriptor) as connection:
            return user_of(connection)
    except OSError:
        return None


def process_behind(descriptor: int, url: str) -> tuple[int, int | None]:
    """Return the number of the process that listens at `url`, and a pidfd of it. The caller closes that.

    `descriptor` is that of a socket that ZeroMQ has just connected to `url`. The number is 0 if the process is this
    one, and if it is unknown: the connection is gone, it is not a unix socket, or the process is in another pid
    namespace. There is no pidfd of it then, and none if the kernel, or a sandbox, gives none.
    """
    pid = 0
    with contextlib.suppress(OSError, AttributeError), _borrowed(descriptor) as connection:
        if connection.family != socket.AF_UNIX or f"ipc://{connection.getpeername()}" != url:
            # ZeroMQ has closed it, and the number has been used again.
            return 0, None
        pid = _credentials(connection)[0]
        if pid in (0, os.getpid()):
            return 0, None
        with contextlib.suppress(OSError):
            return pid, connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        # An older kernel gives only the pid. Another process may get that pid after this one has ended, but not in
        # the instant since it has answered the handshake.
        return pid, os.pidfd_open(pid)
    return pid, None


def unacknowledged(descriptor: int, port: int) -> int:
    """The bytes sent on a connection to `port` of another host that the kernel there has not acknowledged.

    `descriptor` is that of a socket that ZeroMQ owns. 0 if the connection is gone.
    """
    with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
        # The number of the descriptor may have been used again, for a connection to another port.
        if connection.getpeername()[1] == port:
            return int.from_bytes(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    return 0


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    """The process, user and group at the other end of a unix socket, from the kernel."""
    process, user, group = struct.unpack("=iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return process, user, group


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """The socket with this descriptor, which remains ZeroMQ's. Raises OSError if it is none."""
    connection = socket.socket(fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()


def removal(url: str) -> Callable[[], None]:
    """Return what removes the file of the socket that was just bound to `url`; for tcp, that does nothing.

    It leaves the file of another socket that has been bound there since, so call it before the socket is closed: until
    then no other process considers the file as stale, and its inode number is not used again.
    """
    if not url.startswith("ipc://"):
        return lambda: None
    path = Path(url.removeprefix("ipc://")).absolute()  # the program may change its folder
    bound = _identity(path)

    def remove() -> None:
        # The file may be gone already, or its folder.
        with contextlib.suppress(OSError):
            if _identity(path) == bound:
                path.unlink()

    return remove


def _identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino


def _check_owner(url: str, path: Path) -> None:
    """Raise UsageError if the socket at `path` belongs to another user.

    This gives the better error. It is no protection: a user with write access to the folder may replace the socket
    later. So `user_behind` checks the connection itself.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return  # the connect reports it
    except OSError as error:
        raise UsageError(f"cannot connect to {url}: {error}") from error
    if not stat.S_ISSOCK(status.st_mode):
        raise UsageError(f"cannot connect to {url}: it is not a socket")
    if status.st_uid != os.geteuid():
        raise UsageError(f"cannot connect to {url}: it belongs to another user, {status.st_uid}")


@contextlib.contextmanager
def _private_socket(path: Path) -> Iterator[None]:
    """A socket that is created inside has mode 0600. A stale socket at `path`, without a listener, is removed first."""
    with contextlib.ExitStack() as undo:
        try:
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise UsageError(f"cannot listen in {path.parent}: {error.strerror}") from error
        undo.callback(os.close, folder)
        # Of two processes that begin to listen here, the second one finds the first.
        _lock(folder, path)
        if path.is_socket() and not _is_served(path):
            # Its process may have removed it just now.
            path.unlink(missing_ok=True)
        elif path.exists():
            raise UsageError(f"cannot listen on ipc://{path}: it is there already, and in use")
        undo.callback(os.umask, os.umask(0o177))
        yield


def _lock(folder: int, path: Path) -> None:
    """Lock a folder. Raises UsageError if another process keeps the lock: any that may read the folder can."""
    for _ in range(_LOCK_ATTEMPTS):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_LOCK_RETRY_S)  # noqa: TID251 (another process has the lock, whatever the clock of this loop)
    raise UsageError(f"cannot listen on ipc://{path}: another process keeps a lock on the folder {path.parent}")


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        # A connect to a stopped process with a full backlog would block.
        probe.setblocking(False)
        try:
            probe.connect(bytes(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
        return True


def _check_host(url: str, host: str, *, has_key: bool) -> None:
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise UsageError(f"{url}: give the host as localhost, or as the IP address of one of its interfaces") from None
    if address.is_unspecified:
        raise UsageError(f"{url} means every interface of this host: name the address of the one to use")
    if not address.is_loopback and not has_key:
        raise UsageError(
            f"{url} can be reached from other hosts: pass `key_file`, a file with a key that both ends have"
        )
