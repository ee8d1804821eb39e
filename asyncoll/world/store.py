"""The store at MASTER_ADDR:MASTER_PORT, in which the ranks of a world publish their addresses.

It is torch's TCPStore. Under torchrun the agent serves it, otherwise rank 0. Any process that reaches the store may
write to it, so each entry is sealed with the job's key for one run: each rank contributes a nonce to the session, and
no entry of another run is accepted.

The store of an agent outlives the processes of the ranks. So an entry proves nothing about a living process: rank 0
publishes the nonces of all ranks, and a rank is in its world only if its own nonce is among them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib.metadata import version
from types import TracebackType
from typing import Any, Protocol, TypeVar

import msgpack

from asyncoll.errors import (
    AsyncollError,
    ClosedError,
    DeadlineError,
    PeerLostError,
    ProtocolError,
    ServiceLostError,
    UsageError,
    describe,
)
from asyncoll.transport.joining import Joining, process_space
from asyncoll.transport.keys import KEY_BYTES, KEY_FILE, Key
from asyncoll.world.environment import Environment, place_of
from asyncoll.world.network import is_loopback, listen

_JOB = "asyncoll job"  # the entry with the name of the job that uses the store
_PROBE_S = 1.0  # time for the host of the store to accept a connection
_REASON_CHARACTERS = 200  # of the system's error in a message of this rank
_TELLING_S = 2.0  # time to publish the failure of this rank in the store
_BESIDE_LOST_S = 1.0  # in place of the next, for ranks whose host may be gone
_NAME_S = 60.0  # until rank 0 knows its own name; services of names may keep for 30 s that there is none
_FAREWELL_S = 10.0  # time for the other ranks to read why the store of rank 0 ends; they may wait for a processor
T = TypeVar("T")


class Store(Protocol):
    """The methods of a torch.distributed store that are used here."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, amount: int) -> int: ...


class _NewerWorldError(Exception):
    """Rank 0 has begun another world."""


class SealedStore:
    """Short texts that the ranks publish in the store. Each is sealed for its own entry."""

    def __init__(
        self, store: Store, prefix: str, rank: int, size: int, key: Key, joining: Joining, serves: bool
    ) -> None:
        """`prefix` begins the names of all entries. `serves` says that rank 0 serves the store, which ends with it."""
        self._where = _reached_at(store) if serves and rank == 0 else ""
        self.host = place_of(store)[0]  # where this rank has reached the store; empty if it has no address
        self._store = store
        self._job = self._prefix = prefix
        self._turn = 0
        self._counts: dict[int, int] = {}  # by world: how often another process of this rank had looked there
        self._rank = rank
        self._size = size
        self._key = self._first_key = key
        self._joining = joining
        self._serves = serves
        self.machines: Sequence[object] = ()  # that of each rank, once they are known
        self._is_gone = False
        self._told: list[AsyncollError] | None = None  # the failure that another rank has told before this one has
        self._has_told = False
        self._is_asking = False  # the store

    def begin_turn(self) -> None:
        """Enter the next world of this store: rank 0 counts the worlds, and the others wait for it.

        Entries of a world stay in the store, which torchrun's agent keeps for as long as the job runs. So every world
        has its own names.

        Raises PeerLostError if the store of rank 0 ends before: it was that of another world; and UsageError if another
        process is this rank, or another job meets here.
        """

        def rank_0() -> list[int]:
            self._check_backends([0])
            self._check_job()
            return [0]

        self._joining.listen(None)  # what has been told of an earlier world does not matter
        if self._rank == 0:
            self._ask(self._store.set, _JOB, self._job.encode())
        turn = self._newest_turn(begins=not self._rank)
        while self._rank and not self._enters(turn):
            self._joining.check(rank_0, f"not in the store yet{self._namesake(turn)}")
            time.sleep(self._joining.pause_s)  # noqa: TID251 (no loop runs yet)
            turn = self._newest_turn()
        self._turn, self._prefix = turn, f"{self._job}/{turn}"
        self._joining.listen(self._hear)
        self.post("turn", _this_process())

    def _enters(self, turn: int) -> bool:
        """Enter world `turn` as its rank, which one process can, unless the world has failed to begin.

        Raises UsageError if another process that lives has done so, and the world is still being formed.
        """
        world = f"{self._job}/{turn}"
        if turn == 0 or self._ask(self._store.check, [f"{world}/failed"]):
            return False
        if self._ask(self._store.add, f"{world}/claims/{self._rank}", 1) == 1:
            return True
        # A process of an earlier world may have died there, and its last count may still be on the way. Clocks of hosts
        # do not agree, so only counts of processes that wait show that they live.
        counts = self._ask(self._store.add, f"{world}/alive/{self._rank}", 0)
        if counts > self._counts.setdefault(turn, counts) + 1 and (rival := self._rival(turn)):
            raise UsageError(
                f"rank {self._rank} of the world that meets at MASTER_ADDR and MASTER_PORT is {rival} already, and not "
                f"{_this_process()}: give each job a MASTER_PORT of its own, and each process of a job its own RANK"
            )
        return False

    def _rival(self, turn: int) -> str:
        """The other process that is this rank in world `turn`; empty if it is this one, or not known."""
        entry = f"{self._job}/{turn}/turn/{self._rank}"
        known = self._read(entry, self._first_key) if self._ask(self._store.check, [entry]) else None
        return known[0] if known and known != [_this_process()] else ""

    def _namesake(self, turn: int) -> str:
        """The end of a message, if another process is this rank in world `turn`. It may have ended, or not."""
        if not (rival := self._rival(turn)):
            return ""
        return (
            f"; in its newest world rank {self._rank} is {rival}, so two jobs may use one MASTER_ADDR and MASTER_PORT, "
            "or two processes one RANK"
        )

    def _check_job(self) -> None:
        """Raise UsageError if rank 0 of another job has come to this store."""
        job = self._ask(self._store.get, _JOB).decode() if self._ask(self._store.check, [_JOB]) else self._job
        if job != self._job:
            raise UsageError(
                f"another job meets at MASTER_ADDR and MASTER_PORT, {job!r}, where rank {self._rank} of {self._job!r} "
                "waits: give each job a port of its own"
            )

    def _newest_turn(self, *, begins: bool = False) -> int:
        """The number of the newest world; with `begins`, of one that begins now."""
        return self._ask(self._store.add, f"{self._job}/turn", int(begins))

    def begin_session(self) -> Key:
        """Exchange nonces. Returns the key of this run, which seals all later entries.

        If the world that this rank has entered turns out to be one of earlier processes, it enters the next.

        Raises UsageError if a rank has another version of asyncoll, or expects another number of ranks.
        """
        said = self._exchange_nonces()
        while said is None:
            self.begin_turn()
            said = self._exchange_nonces()
        space = process_space()
        for peer, (_, _, _, its_space, pid, _) in enumerate(said):
            if space and its_space == space and peer != self._rank and pid.isdecimal():
                self._joining.watch(peer, int(pid))
        self._key = Key(self._key.derive("session", self._prefix, *(nonce for _, _, nonce, *_ in said)))
        return self._key

    def _exchange_nonces(self) -> list[list[str]] | None:
        """What each rank says of itself; None if this is a world of earlier processes.

        Those have left a session without the nonce of this process, or no session, and rank 0 begins another world.
        """
        host, nonce = socket.gethostname(), secrets.token_hex(16)
        own = [_version(), host, nonce, process_space(), str(os.getpid()), str(self._size)]
        self.post("nonce", *own)
        if self._rank == 0:
            self._await("nonce", range(self._size))
            said = [self.look("nonce", peer, len(own)) for peer in range(self._size)]
            for peer, (release, host, *_) in enumerate(said):
                self._check_version(peer, release, host)
            self._check_sizes(range(self._size))
            self.post("session", *itertools.chain(*said))
            return said
        try:
            self._joining.listen(self._hear_of_newer_world)
            self.look("nonce", 0, len(own))  # raises the error for different keys, also at the rank with the odd one
            self._await("nonce", range(self._size), until=self._entry("session", 0))
        except _NewerWorldError:
            return None
        self._joining.listen(self._hear)
        texts = self.look("session", 0)
        said = [texts[first : first + len(own)] for first in range(0, len(texts), len(own))]
        return said if own in said else None

    def _check_sizes(self, ranks: Sequence[int]) -> None:
        """Raise UsageError if one of `ranks`, which have posted their nonces, expects another number of ranks."""
        for peer in ranks:
            if (size := self.look("nonce", peer)[-1]) != str(self._size):
                raise UsageError(
                    f"the ranks have different settings of WORLD_SIZE: {self._size} (rank {self._rank}), {size} (rank "
                    f"{peer}); give all the same"
                )

    def _check_version(self, peer: int, release: str, host: str) -> None:
        if release != _version():
            raise UsageError(
                f"the ranks have different versions of asyncoll: {_version()} (rank {self._rank}, host "
                f"{socket.gethostname()}), {release:.100} (rank {peer}, host {host:.100}); install the same on "
                "all hosts"
            )

    def post(self, topic: str, *texts: str) -> None:
        """Publish `texts` under `topic`."""
        entry = self._entry(topic, self._rank)
        sealed = self._key.seal(_pack(texts), entry)
        self._ask(self._store.set, entry, sealed)

    def look(self, topic: str, rank: int, count: int | None = None) -> list[str]:
        """Wait until `rank` has posted `topic`, and return its texts: `count`, or any number.

        Raises UsageError if they are not sealed with the key of this run.
        """
        self._await(topic, [rank])
        texts = self._read(self._entry(topic, rank), self._key)
        if texts is None or (count is not None and len(texts) != count):
            where = ""
            if topic == "nonce" and (claimed := _claimed(self._ask(self._store.get, self._entry(topic, rank)))):
                self._check_version(rank, *claimed)
                where = f" (host {claimed[1]!r:.100})"
            raise UsageError(
                f"in the store, the {topic} of rank {rank}{where} is not sealed with the key of this job: give all "
                f"ranks the same key, in {KEY_FILE} or ~/.asyncoll.key, and each process a RANK of its own; otherwise "
                "another program writes to this store"
            )
        return texts

    def exchange(self, topic: str, *texts: str) -> list[list[str]]:
        """Post `texts`, and return the texts of every rank, by rank."""
        self.post(topic, *texts)
        self._await(topic, range(self._size))
        return [self.look(topic, peer, len(texts)) for peer in range(self._size)]

    def warn(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """At the end of joining: if that has failed, tell the other ranks why.

        If `error` names other ranks, and one has told a failure before, raises that one instead. This rank may have
        noticed only a consequence of it: that the other rank has given up and ended.
        """
        if error is None:
            return
        told = self.tell(error)
        if told is not None and isinstance(error, PeerLostError | DeadlineError):
            raise told from error

    def tell(self, error: BaseException) -> AsyncollError | None:
        """Tell the other ranks why joining has failed. Returns what another rank has told before.

        The first call does it, in any thread, and blocks for up to two seconds; but not if the host of rank 0 is lost,
        which serves the store. Afterwards the store may be gone.
        """
        if self._told is None:
            self._told = []
            lost = error.ranks if isinstance(error, PeerLostError) else ()
            is_gone = self._is_gone or (self._serves and len(lost) > 1 and 0 in lost)
            if isinstance(error, Exception | asyncio.CancelledError) and not is_gone:
                # In a thread, which is abandoned after `_TELLING_S`: the process that serves the store may be stopped.
                telling = threading.Thread(target=self._tell, args=(self._store, error, self._told), daemon=True)
                telling.start()
                telling.join(_TELLING_S)
        return self._told[0] if self._told else None

    def close(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave the store.

        If rank 0 serves it, the store ends with this; rank 0 waits until the others have read its failure.
        """
        if self._serves and self._rank == 0 and self._has_told:
            with contextlib.suppress(RuntimeError):
                self._await_told(_missed(error))
        del self._store

    # -- how it ends ------------------------------------------------------------------------------

    def _tell(self, store: Store, error: BaseException, told: list[AsyncollError]) -> None:
        """Publish `error`, unless another rank has published a failure before; then add that one to `told`."""
        failed = f"{self._prefix}/failed"
        words = words_of(error, self._rank)
        with contextlib.suppress(RuntimeError):  # the store has ended, so no rank can be told
            if not store.check([failed]):
                store.set(failed, self._first_key.seal(_pack(words), failed))
            first = _open(self._first_key, store.get(failed), failed)
            if first is not None and first != words:
                told.append(error_of(first, self._size))
            store.set(self._entry("told", self._rank), b"")
            self._has_told = True

    def _await_told(self, lost: Sequence[int]) -> None:
        """Wait until all ranks that have come to the store, except the `lost` ones, have read the failure.

        Waits less long for ranks of the hosts of `lost`, which may be gone with them.
        """
        others = set(range(1, self._size)).difference(lost)
        here = [rank for rank in others if self._store.check([self._entry("nonce", rank)])]
        machines = {self.machines[rank] for rank in lost if self.machines}
        beside = {rank for rank in here if self.machines and self.machines[rank] in machines}
        for ranks, limit_s in ((set(here) - beside, _FAREWELL_S), (beside, _BESIDE_LOST_S)):
            told = [self._entry("told", rank) for rank in ranks]
            ends_s = time.monotonic() + limit_s  # noqa: TID251 (no loop waits for it)
            while told and time.monotonic() < ends_s and not self._store.check(told):  # noqa: TID251
                time.sleep(self._joining.pause_s)  # noqa: TID251

    def _hear_of_newer_world(self) -> None:
        """As `_hear`, but also raises _NewerWorldError if rank 0 has begun a world after the one of this rank."""
        if not self._is_asking and self._newest_turn() > self._turn:
            raise _NewerWorldError
        self._hear()

    def _hear(self) -> None:
        """Raise the failure that another rank has published, if there is one, and count this look, a sign of life.

        While the store answers: nothing.
        """
        if self._is_asking:
            return
        self._ask(self._store.add, self._entry("alive", self._rank), 1)
        entry = f"{self._prefix}/failed"
        if not self._ask(self._store.check, [entry]):
            return
        if (words := self._read(entry, self._first_key)) is not None:  # otherwise another program writes to this store
            raise error_of(words, self._size)

    # -- the store --------------------------------------------------------------------------------

    def _await(self, topic: str, ranks: Sequence[int], until: str = "") -> None:
        """Wait until all of `ranks` have posted `topic`; with `until`, for that entry, which is posted after theirs."""
        entries = [self._entry(topic, rank) for rank in ranks]
        what = f"in the store without its {topic}"
        if topic == "nonce":
            what = f"not in the store{self._where} yet"

        def missing() -> list[int]:
            come = [self._ask(self._store.check, [entry]) for entry in entries]
            absent = [rank for rank, is_here in zip(ranks, come, strict=True) if not is_here]
            self._check_backends(absent)
            if topic == "nonce" and self._rank == 0:  # one that expects fewer ranks is not kept waiting for the others
                self._check_sizes([rank for rank in ranks if rank not in absent])
            return absent

        while not self._ask(self._store.check, [until] if until else entries):
            self._joining.check(missing, what)
            time.sleep(self._joining.pause_s)  # noqa: TID251 (no loop runs yet)

    def _check_backends(self, ranks: Sequence[int]) -> None:
        """Raise UsageError if one of `ranks` uses Gloo, which publishes its address in the store that torch hands over.

        Such a rank waits for addresses of Gloo, up to its own time limit.
        """
        others = [rank for rank in ranks if self._ask(self._store.check, [f"0/{rank}"])]
        if others:
            raise UsageError(
                f"rank {others[0]} has initialized this process group with the backend gloo, and rank {self._rank} "
                "with asyncoll: give all ranks the same backend"
            )

    def _read(self, entry: str, key: Key) -> list[str] | None:
        """The texts at `entry`; None if they are not sealed with `key`."""
        return _open(key, self._ask(self._store.get, entry), entry)

    def _ask(self, method: Callable[..., T], *args: Any) -> T:
        """Call a method of the store. The process that serves the store may be gone, or stopped."""
        what = "which serves the store" if self._serves else "the store"
        is_asking, self._is_asking = self._is_asking, True
        try:
            return self._joining.call(lambda: method(*args), lambda: [0], what)
        except RuntimeError as error:  # those of torch.distributed are
            self._is_gone = True
            if not self._serves:
                raise ServiceLostError(f"the store of this job is gone: {error}") from error
            raise PeerLostError(0, "the store that it serves has ended before all ranks had joined") from error
        finally:
            self._is_asking = is_asking

    def _entry(self, topic: str, rank: int) -> str:
        return f"{self._prefix}/{topic}/{rank}"


def _missed(error: BaseException | None) -> tuple[int, ...]:
    """The ranks that `error` blames."""
    if isinstance(error, DeadlineError):
        return error.missing
    return error.ranks if isinstance(error, PeerLostError) else ()


def words_of(error: BaseException, rank: int) -> list[str]:
    """The texts by which `rank` tells the others of the `error` that has ended its joining."""
    if isinstance(error, PeerLostError):
        return ["lost", error.cause, ",".join(map(str, error.ranks)), error.host]
    if isinstance(error, DeadlineError):
        return ["late", str(error), ",".join(map(str, error.missing)), ""]
    if isinstance(error, ClosedError | asyncio.CancelledError):
        return ["lost", "it was interrupted before all ranks had joined", str(rank), ""]
    return ["lost", f"it could not join: {describe(error)}", str(rank), ""]


def error_of(words: list[str], size: int) -> AsyncollError:
    """The error that another rank of a world of `size` has told in these `words`."""
    if len(words) != 4:
        raise UsageError("another program writes to the store of this job")
    kind, text, listed, host = words
    ranks = tuple(int(rank) for rank in listed.split(",") if rank.isdecimal())
    if kind == "lost" and ranks:
        return PeerLostError(ranks[0], text, host, ranks=ranks)
    return DeadlineError(text, tuple(rank for rank in range(size) if rank not in ranks), ranks)


def _reached_at(store: Store) -> str:
    """The part of a message that says where other ranks reach the store of this rank; empty if it has no address."""
    host, port = getattr(store, "host", ""), getattr(store, "port", 0)
    if not host:
        return ""
    if is_loopback(host):
        return (
            f" at {host}:{port}, which only this host reaches (for ranks on other hosts set MASTER_ADDR to an address "
            "that they reach, or for rank 0 ASYNCOLL_INTERFACE),"
        )
    return f" at {host}:{port}, which their hosts must reach (MASTER_ADDR, MASTER_PORT),"


def _this_process() -> str:
    return f"process {os.getpid()} on host {socket.gethostname()}"


def _pack(texts: Sequence[str]) -> bytes:
    """`texts` as bytes. Paths may contain bytes that are not UTF-8."""
    packed: bytes = msgpack.packb(texts, unicode_errors="surrogateescape")
    return packed


def _version() -> str:
    return version("asyncoll")


def _claimed(sealed: bytes) -> tuple[str, str] | None:
    """The version and the host in an entry that another key, or none, has sealed: for an error only."""
    with contextlib.suppress(ValueError):
        texts = msgpack.unpackb(sealed[KEY_BYTES:], unicode_errors="surrogateescape")
        if isinstance(texts, list) and len(texts) > 1 and all(isinstance(text, str) for text in texts):
            return texts[0], texts[1]
    return None


def _open(key: Key, sealed: bytes, entry: str) -> list[str] | None:
    try:
        texts = msgpack.unpackb(key.open(sealed, entry), unicode_errors="surrogateescape")
    except (ProtocolError, ValueError):
        return None
    return texts if isinstance(texts, list) and all(isinstance(text, str) for text in texts) else None


def enter_store(environment: Environment, joining: Joining, key: Key) -> SealedStore:
    """The store of this world, served by torchrun's agent or by rank 0, or given by the program.

    A fast rank may still reach the store of the previous world, as long as rank 0 has not closed that. It then tries
    again.
    """
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    rank, size, prefix = environment.rank, environment.size, f"asyncoll/{environment.run}"
    if environment.store is not None:
        sealed = SealedStore(environment.store, prefix, rank, size, key, joining, serves=not agents)
        sealed.begin_turn()
        return sealed
    while True:
        is_served = rank or agents or _serves_already(environment)
        store = _reach_store(environment, joining) if is_served else _serve_store(environment, joining)
        sealed = SealedStore(store, prefix, rank, size, key, joining, serves=not agents)
        with contextlib.suppress(PeerLostError):
            sealed.begin_turn()
            return sealed
        del sealed, store
        time.sleep(joining.pause_s)  # noqa: TID251 (no loop runs yet)


def _serves_already(environment: Environment) -> bool:
    """Whether this process serves a store at MASTER_ADDR: that of its process group of torch, as in Ray Train."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return False
    place = place_of(distributed.distributed_c10d._get_default_store())
    return place == (environment.master_addr, environment.master_port)


def _reach_store(environment: Environment, joining: Joining) -> Any:
    """A client of the store, as soon as the store is served. TCPStore itself would wait without logging anything."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, port, size = environment.master_addr, environment.master_port, environment.size
    what = f"which serves the store at {address}:{port}"
    while True:
        timeout = timedelta(seconds=joining.remaining_s)
        try:
            with socket.create_connection((address, port), timeout=joining.pause_s + _PROBE_S) as probe:
                answers = probe.getpeername()[0]  # of several that the name means
            return joining.call(
                lambda timeout=timeout, answers=answers: TCPStore(
                    answers, port, size, False, timeout, wait_for_workers=False
                ),  # type: ignore[misc]
                lambda: [0],
                what,
            )
        except (OSError, RuntimeError) as error:  # it is not served yet, or no more
            said = f"{what}: {error}"[:_REASON_CHARACTERS]
            joining.check(
                lambda: [0],
                f"{said}; MASTER_ADDR must be an address of rank 0's host that this host reaches, and MASTER_PORT "
                "open there",
            )
            time.sleep(joining.pause_s)  # noqa: TID251 (no loop runs yet)


def _serve_store(environment: Environment, joining: Joining) -> Any:
    """The store, served at one address alone. By itself, TCPStore listens on all addresses of the host."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if not environment.interface:
        _await_name(environment.master_addr, joining)
    listener = listen(environment.master_addr, environment.master_port, environment.address, environment.interface)
    address, port = listener.getsockname()[:2]
    return TCPStore(
        address, port, environment.size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _await_name(name: str, joining: Joining) -> None:
    """Wait until `name` is known: that of a pod of Kubernetes is so seconds after its start.

    Raises UsageError if it is not known after a minute.
    """
    ends_s = joining.remaining_s - _NAME_S
    while True:
        try:
            socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            said = f"MASTER_ADDR={name} is not the name of a host: {error}"[:_REASON_CHARACTERS]
            if joining.remaining_s < ends_s:
                raise UsageError(f"{said}; for rank 0 it must be a name or an address of this host") from None
            joining.check(lambda: [0], said)
            time.sleep(joining.pause_s)  # noqa: TID251 (no loop runs yet)
        else:
            return
