"""How the ranks of a world find each other, and open their connections and shared memory.

Under `asyncoll launch -n` all ranks are on one host, and their addresses follow from the job's folder. Otherwise they
exchange addresses in a store (`world.sealed_store`). Ranks of one host communicate over ipc, ranks of different hosts
over tcp.

A process may join several worlds, one after another. Rank 0 counts the attempts to form one, in the job's folder as in
the store. Each attempt has names of its own, and fails at all ranks if it fails at one, or is interrupted there.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from asyncoll.errors import PeerLostError, UsageError
from asyncoll.transport import Transport
from asyncoll.transport.joining import Joining, process_space
from asyncoll.transport.keys import KEY_FILE, Key, check_folder, read_key
from asyncoll.transport.meeting_folder import meeting_folder, temporary_folder
from asyncoll.transport.memory.arena import HostArena
from asyncoll.transport.memory.fd_passing import GIVEN_UP, ArenaUnavailable, join
from asyncoll.transport.messages.split import SplitTransport
from asyncoll.transport.messages.tcp_payloads import TcpPayloads
from asyncoll.transport.messages.zeromq import ZeroMQTransport, ipc_address
from asyncoll.transport.processes import allow_files
from asyncoll.world.environment import Environment
from asyncoll.world.epoch_stores import decisions_of
from asyncoll.world.host_attempt import HostAttempt
from asyncoll.world.network import Place, check_address, is_loopback, on_own_link, place, url_host
from asyncoll.world.sealed_store import SealedStore, enter_store
from asyncoll.world.write_once import Decisions

# Files that a rank opens: in any world, and more for each rank of it, without a key and with one.
_FILES, _FILES_PER_RANK, _FILES_PER_RANK_WITH_KEY = 60, 11, 17
# Of users, by whose numbers unix sockets let peers in, and of time, with a monotonic clock of its own; since Linux 5.6.
_NAMESPACES = Path("/proc/self/ns/user"), Path("/proc/self/ns/time")
logger = logging.getLogger("asyncoll")


class PeerLinks(NamedTuple):
    """The connections of one rank: a transport that knows its peers, the arena, and the host of each rank."""

    transport: Transport
    arena: HostArena | None  # of the ranks of this host
    hosts: tuple[str, ...]
    machines: tuple[object, ...]  # equal for two ranks that reach each other's unix sockets
    all_have_arenas: bool
    decisions: Decisions | None  # on epochs; None if no store outlives the ranks
    until_joined: contextlib.ExitStack  # closed once all ranks are connected, or with the error that prevents it


def meet(environment: Environment, joining: Joining) -> PeerLinks:
    """Open this rank's sockets and get the addresses of all ranks. Blocks until every rank has published its own.

    Raises PeerLostError and DeadlineError as `Joining.check` does, and UsageError if this process may not open enough
    files, or has no /proc.
    """
    needed = files_for(environment.size, has_key=bool(environment.key_file))
    # ZeroMQ would abort the process.
    if (limit := allow_files(needed)) is not None:
        raise UsageError(
            f"a rank of a world of {environment.size} opens up to {needed} files, and this process may not: its limit "
            f"is {limit}; raise it (ulimit -n)"
        )
    if environment.folder:
        return _meet_in_folder(environment, joining)
    return _meet_in_store(environment, joining)


def files_for(size: int, *, has_key: bool) -> int:
    """The number of files that a rank of a world opens at most, beside those of its program.

    Measured, and rounded up.
    """
    return _FILES + size * (_FILES_PER_RANK_WITH_KEY if has_key else _FILES_PER_RANK)


def _meet_in_folder(environment: Environment, joining: Joining) -> PeerLinks:
    rank, size = environment.rank, environment.size
    job = Path(environment.folder)
    try:
        check_folder(job)
        key = read_key(job / "job")
    except UsageError as error:
        raise UsageError(f"ASYNCOLL_FOLDER={job} is not the folder of a running job: {error}") from error
    with contextlib.ExitStack() as undo:
        links = undo.enter_context(contextlib.ExitStack())  # closed after the attempt: the others hear the cause first
        attempt = undo.enter_context(HostAttempt(job, rank, size, joining))
        transport = ZeroMQTransport(
            rank, size, key.derive("messages", attempt.folder.name), freeze_s=environment.freeze_s, joining=joining
        )
        links.callback(transport.discard)
        transport.peers = [ipc_address(attempt.folder, peer) for peer in range(size)]
        transport.bind(transport.peers[rank])
        arena = _share_memory(environment, attempt.folder, tuple(range(size)), joining, all_alone=size == 1)
        if arena is None:
            _await_listeners(attempt.folder, size, joining)
        decisions = decisions_of(environment, attempt.folder.name, key)
        links.pop_all()
        hosts = (socket.gethostname(),) * size
        return PeerLinks(transport, arena, hosts, (0,) * size, arena is not None, decisions, undo.pop_all())


def _await_listeners(folder: Path, size: int, joining: Joining) -> None:
    """Wait until all ranks listen in the folder of their sockets; ranks that have shared memory do.

    ZeroMQ tries a connection to a rank that does not listen a hundred times a second. Where many ranks share a core,
    the attempts of those that have come would take the time that the others need to come.
    """

    def missing() -> list[int]:
        listening = set(os.listdir(folder))
        return [rank for rank in range(size) if str(rank) not in listening]

    while missing():
        joining.check(missing, "not listening yet")
        time.sleep(joining.pause_s)  # noqa: TID251 (no loop runs yet)


def _share_memory(
    environment: Environment, folder: Path, ranks: tuple[int, ...], joining: Joining, *, all_alone: bool
) -> HostArena | None:
    """The arena of the ranks of this host.

    None if it is switched off, each rank is alone on its host, or the host has no room.
    """
    if not environment.shares_memory or all_alone:
        return None
    try:
        arena = join(folder, environment.rank, ranks, joining)
    except ArenaUnavailable as error:
        if environment.rank == ranks[0]:
            logger.warning("the ranks of this host share no memory and go on by messages: %s", error)
        return None
    arena.locks.patience_s = environment.freeze_s or math.inf
    return arena


class _ToldHosts(NamedTuple):
    """What the ranks have said of their hosts, by rank."""

    names: tuple[str, ...]
    machines: tuple[str, ...]
    neighbours: tuple[int, ...]  # the ranks of this host


class _RankSockets(NamedTuple):
    """The sockets of this rank."""

    messages: ZeroMQTransport
    payloads: TcpPayloads | None  # long ones to other hosts, if they have a stream of their own


class _Addresses(NamedTuple):
    """Where the ranks listen for other hosts, by rank: empty where one does not."""

    messages: list[str]
    payloads: list[str]
    all_have_arenas: bool


def _meet_in_store(environment: Environment, joining: Joining) -> PeerLinks:
    key = read_key(Path(environment.key_file)) if environment.key_file else None
    # Before rank 0 waits for the others. They tell their addresses in its store.
    if environment.address and environment.rank == 0:
        check_address(environment.address, environment.interface)
    with contextlib.ExitStack() as undo:
        store = enter_store(environment, joining, key or Key(b""))
        undo.push(store.close)
        folders = undo.enter_context(contextlib.ExitStack())
        links = undo.enter_context(contextlib.ExitStack())
        # This runs before the folder is removed, and the links: a rank that misses them finds the cause in the store.
        undo.push(store.warn)
        session = store.begin_session()
        hosts = _exchange_hosts(environment, store)
        own_place = _place(environment, store.host) if len(hosts.neighbours) < environment.size else None
        streams = _open_streams(environment, session, own_place, joining, links)
        folder = _enter_folder(store, hosts, streams.messages, joining, folders)
        all_alone = len(set(hosts.machines)) == environment.size
        arena = _share_memory(environment, folder, hosts.neighbours, joining, all_alone=all_alone)
        if arena is not None:
            links.callback(arena.close)
        # Last, because peers connect as soon as they know the address, and this rank must then answer soon.
        addresses = _exchange_addresses(environment, store, streams, own_place, has_arena=arena is not None)
        _check_reachable(addresses.messages, hosts.names)
        transport = _transport(streams, addresses, hosts.neighbours, folder)
        joining.fails_by(store.tell)
        decisions = decisions_of(environment, store.world, session, store.of_agent())
        # From now on a connection tells of a failure, and the store would block the loop.
        joining.listen(None)
        links.pop_all()
        has_arenas = addresses.all_have_arenas
        return PeerLinks(transport, arena, hosts.names, hosts.machines, has_arenas, decisions, undo.pop_all())


def _exchange_hosts(environment: Environment, store: SealedStore) -> _ToldHosts:
    """Raises UsageError if the ranks have different settings."""
    carrier = "shm" if environment.shares_memory else "zmq"
    said = store.exchange("host", _machine(), socket.gethostname(), environment.encrypt, carrier)
    machines, names, ciphers, carriers = (tuple(each) for each in zip(*said, strict=True))
    _check_agreed("ASYNCOLL_ENCRYPT", ciphers)
    _check_agreed("ASYNCOLL_TRANSPORT", carriers)
    store.know_machines(machines)
    own = machines[environment.rank]
    return _ToldHosts(names, machines, tuple(rank for rank, machine in enumerate(machines) if machine == own))


def _open_streams(
    environment: Environment, session: Key, own: Place | None, joining: Joining, links: contextlib.ExitStack
) -> _RankSockets:
    """The sockets of this rank, which do not listen yet; `links` closes them. `own` is None if there is one host."""
    rank, size, has_key = environment.rank, environment.size, bool(environment.key_file)
    messages = ZeroMQTransport(
        rank, size, session.derive("messages"), encrypted=has_key, freeze_s=environment.freeze_s, joining=joining
    )
    links.callback(messages.discard)
    if own is None or not has_key or environment.encrypt != "control":
        return _RankSockets(messages, None)
    payloads = TcpPayloads(rank, size, session.derive("payloads"), joining=joining)  # without heartbeats of their own
    links.callback(payloads.discard)
    return _RankSockets(messages, payloads)


def _enter_folder(
    store: SealedStore, hosts: _ToldHosts, messages: ZeroMQTransport, joining: Joining, folders: contextlib.ExitStack
) -> Path:
    """The folder of sockets of this host, in which this rank listens now. The first rank makes it."""
    owner = hosts.neighbours[0]
    if messages.rank == owner:
        store.post("folder", str(folders.enter_context(meeting_folder())))
    folder = Path(*store.look("folder", owner, 1))
    with _blames_owner(folder, owner, joining):
        check_folder(folder)
        messages.bind(ipc_address(folder, messages.rank))
    return folder


def _exchange_addresses(
    environment: Environment, store: SealedStore, streams: _RankSockets, own: Place | None, *, has_arena: bool
) -> _Addresses:
    """Listen for ranks of other hosts, if there are any, and learn where all others do."""
    listens = [_listen(stream, own, environment) if own and stream else "" for stream in streams]
    told = store.exchange("address", *listens, "arena" if has_arena else "")
    messages, payloads, arenas = zip(*told, strict=True)
    link = own.listens if own else ""
    return _Addresses(
        [on_own_link(url, link) for url in messages], [on_own_link(url, link) for url in payloads], all(arenas)
    )


def _transport(streams: _RankSockets, addresses: _Addresses, neighbours: tuple[int, ...], folder: Path) -> Transport:
    """A transport that knows its peers: over ipc to the `neighbours`, and over tcp to the others."""
    messages, payloads = streams
    ranks = range(messages.size)
    messages.peers = [ipc_address(folder, rank) if rank in neighbours else addresses.messages[rank] for rank in ranks]
    messages.are_bound = True
    if payloads is None:
        return messages
    payloads.peers = ["" if rank in neighbours else addresses.payloads[rank] for rank in ranks]
    return SplitTransport(messages, payloads, set(ranks).difference(neighbours))


def _check_agreed(variable: str, values: Sequence[str]) -> None:
    """Raise UsageError if the ranks have different `values`, which are by rank."""
    if len(different := sorted(set(values))) > 1:
        ranks = [", ".join(str(rank) for rank, its in enumerate(values) if its == value) for value in different]
        settings = "; ".join(f"{value!r} (rank {where})" for value, where in zip(different, ranks, strict=True))
        raise UsageError(f"the ranks have different settings of {variable}: {settings}; give all the same")


def _check_reachable(addresses: Sequence[str], names: Sequence[str]) -> None:
    """Raise UsageError if a rank listens at a loopback address, as its host's name often means there, and others not.

    If all do, the hosts are containers that share the network of one.
    """
    hosts = [address.removeprefix("tcp://").rpartition(":")[0].strip("[]") for address in addresses]
    inner = {rank: is_loopback(host) for rank, host in enumerate(hosts) if host}
    if len(set(inner.values())) > 1:
        rank = next(rank for rank in inner if inner[rank])
        raise UsageError(
            f"rank {rank} (host {names[rank]}) listens at {addresses[rank]}, which other hosts do not reach: "
            "MASTER_ADDR is a name that means this address there; give the address that other hosts reach as "
            "MASTER_ADDR, or set it there as ASYNCOLL_ADDRESS, or its network interface as ASYNCOLL_INTERFACE"
        )


def _listen(stream: ZeroMQTransport | TcpPayloads, own: Place, environment: Environment) -> str:
    """Listen on a free port of this rank's address; returns the address that other ranks are told."""
    bound = stream.bind(f"tcp://{url_host(own.listens)}", environment.ports)
    return f"tcp://{url_host(own.told)}:{bound.rpartition(':')[2]}"


@contextlib.contextmanager
def _blames_owner(folder: Path, owner: int, joining: Joining) -> Iterator[None]:
    """Raise PeerLostError in place of an error that a missing folder causes: its `owner` has given up."""
    try:
        yield
    except (UsageError, OSError) as error:
        if folder.exists():
            raise
        joining.check(lambda: [owner], "whose folder of sockets is gone")
        raise PeerLostError(owner, GIVEN_UP) from error


def _machine() -> str:
    """A text that is equal at two ranks if they can share an arena.

    They have one kernel, one folder for temporary files, one user, and one clock: times are in shared memory, too. They
    see each other's processes and threads by the same numbers: locks hold the numbers of their owners, and whether an
    owner lives is asked in `/proc`. A rank that sees no processes shares memory with no other one.
    """
    space = process_space() or f"{socket.gethostname()}/{secrets.token_hex(16)}"
    where = temporary_folder().stat()
    spaces = "/".join(str(each.stat().st_ino) if each.exists() else "" for each in _NAMESPACES)
    return f"{space}/{where.st_dev}/{where.st_ino}/{spaces}"


def _place(environment: Environment, store: str) -> Place:
    """Where this rank listens for ranks of other hosts, and what it tells them.

    `store` is the address at which it has reached the store; MASTER_ADDR may be a name of several, not all alive.

    Raises UsageError for an address that other hosts reach if there is no key: any process of the network could join.
    """
    found = place(store or environment.master_addr, environment.address, environment.interface)
    is_private = is_loopback(found.listens) and environment.encrypt != "all"
    if not environment.key_file and not is_private:
        raise UsageError(
            f"ranks that talk over tcp ({found.listens}) need a key, or any program on the network could join them: "
            "make one with `asyncoll key ~/.asyncoll.key`, and copy the file to your home folder on every host; or "
            f"copy it elsewhere and set {KEY_FILE} to its path for all ranks"
        )
    return found
