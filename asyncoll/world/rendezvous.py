"""How the ranks of a job find each other: what the environment says, and who listens where.

The environment contract is torchrun's. Under `asyncoll launch` all ranks are on one host and their addresses follow
from the job's folder. Otherwise they meet in the store at MASTER_ADDR:MASTER_PORT (torch's TCPStore: under torchrun
that is the agent's, elsewhere rank 0 serves it): ranks that share a host talk over ipc, others over tcp.

Anybody who reaches the store may write in it. So whatever ranks tell each other there is sealed with the job's key,
for one run: each rank has its part in the session, so nothing that was said in another run is taken for this one's.

A process may join several worlds, one after another. Its n-th is the n-th of every rank, and has names of its own in
the job's folder and in the store.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import logging
import math
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

import msgpack

from asyncoll.errors import AsyncollError, DeadlineError, PeerLostError, ProtocolError, ServiceLostError, UsageError
from asyncoll.transport import Transport
from asyncoll.transport.joining import Joining, process_space
from asyncoll.transport.keys import KEY_FILE, Key, check_folder, read_key
from asyncoll.transport.memory.arena import HostArena
from asyncoll.transport.memory.fd_passing import GIVEN_UP, ArenaUnavailable, join
from asyncoll.transport.messages.monitor import FREEZE_S
from asyncoll.transport.messages.split import SplitTransport
from asyncoll.transport.messages.zeromq import ZeroMQTransport, ipc_address
from asyncoll.transport.processes import allow_files

TRANSPORTS = ("shm", "zmq")  # memory between the ranks of a host, and messages for the rest; or messages alone
ENCRYPT = ("control", "all")  # between hosts: all but long payloads, which would be four times slower; or all
_PROBE_S = 1.0  # for the host of the store to take a connection
_REASON_CHARACTERS = 200
_TELLING_S = 2.0  # to tell in the store why this rank gives up
_FAREWELL_S = 10.0  # for the other ranks to read in the store of rank 0 why it ends; they may wait for a processor
_FILES, _FILES_PER_RANK, _FILES_PER_HOST = 60, 11, 17  # open in a rank: at least, for each rank, if hosts have a key
_DEADLINE_S = 1800.0
_FREEZE_MIN_S, _FREEZE_MAX_S = 0.02, 86_400  # what ZeroMQ counts in whole ms, and in 32 bits
_LAUNCHERS = {  # what starts processes, and what it calls the rank and the number of those that it has started
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # SLURM_NTASKS is also set where there is no srun, by salloc
    "mpirun (Open MPI)": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpiexec (PMI)": ("PMI_RANK", "PMI_SIZE"),
    "mpirun (MVAPICH)": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    "a launcher with PMIx": ("PMIX_RANK", ""),
}
T = TypeVar("T")
_turns = itertools.count(1)  # of the worlds that this process joins
logger = logging.getLogger("asyncoll")


@dataclass(frozen=True, slots=True)
class Environment:
    """The world that the environment describes, as seen by this process."""

    rank: int
    size: int
    folder: str  # of the job's sockets; empty unless `asyncoll launch` made one
    master_addr: str
    master_port: int
    shares_memory: bool  # with the ranks of its host, if that is possible
    run: str  # tells the runs of an elastic job apart
    freeze_s: float = FREEZE_S  # a rank without a sign of life for so long counts as frozen; 0: never
    deadline_s: float = _DEADLINE_S  # how long a call may take; infinity: for ever
    key_file: str = ""  # with the job's key; empty for none
    encrypt: str = ENCRYPT[0]

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Environment | None:
        """None when no world is described. Raises UsageError for half a description or an impossible one."""
        if "RANK" not in environ and "WORLD_SIZE" not in environ:
            check_alone(environ)
            return None
        rank, size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
        if not 0 <= rank < size:
            raise UsageError(f"RANK={rank} is not between 0 and WORLD_SIZE-1={size - 1}")
        folder = environ.get("ASYNCOLL_FOLDER", "")
        meets_in_store = size > 1 and not folder
        return cls(
            rank,
            size,
            folder,
            master_addr=environ.get("MASTER_ADDR", "") if not meets_in_store else _text(environ, "MASTER_ADDR"),
            master_port=_integer(environ, "MASTER_PORT") if meets_in_store else 0,
            shares_memory=_choice(environ, "ASYNCOLL_TRANSPORT", TRANSPORTS) == "shm",
            run="/".join(environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")),
            freeze_s=freeze_s(environ),
            deadline_s=_seconds(environ, "ASYNCOLL_DEADLINE_S", _DEADLINE_S) or math.inf,
            key_file=environ.get(KEY_FILE, ""),
            encrypt=_choice(environ, "ASYNCOLL_ENCRYPT", ENCRYPT),
        )


def check_alone(environ: Mapping[str, str]) -> None:
    """Raises UsageError if several processes were started that asyncoll would take for a world of one each."""
    for launcher, (rank_name, size_name) in _LAUNCHERS.items():
        for name, least in ((rank_name, 0), (size_name, 1)):
            count = environ.get(name, "")
            if not count.isdecimal() or int(count) <= least:
                continue
            raise UsageError(
                f"this is one of several processes that {launcher} has started ({name}={count}), but RANK and "
                "WORLD_SIZE are not set: have it start one `torchrun` on each host, or on one host `asyncoll launch`; "
                "set RANK=0 and WORLD_SIZE=1 if each process is to be alone"
            )


def _choice(environ: Mapping[str, str], name: str, choices: Sequence[str]) -> str:
    """Of `choices`, the first unless the environment says otherwise."""
    chosen = environ.get(name) or choices[0]
    if chosen not in choices:
        raise UsageError(f"{name}={chosen!r} in the environment: use one of {', '.join(choices)}")
    return chosen


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise UsageError(f"the environment describes a world but {name} is not set: start with `asyncoll launch`")
    return environ[name]


def _integer(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name}={text!r} in the environment is not a number") from None


def freeze_s(environ: Mapping[str, str]) -> float:
    """How long a process without a sign of life counts as living; 0 if for ever."""
    seconds = _seconds(environ, "ASYNCOLL_FREEZE_S", FREEZE_S)
    if seconds and not _FREEZE_MIN_S <= seconds <= _FREEZE_MAX_S:
        raise UsageError(
            f"ASYNCOLL_FREEZE_S={seconds:g}: give {_FREEZE_MIN_S} to {_FREEZE_MAX_S} seconds, or 0 for never"
        )
    return seconds


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise UsageError(f"{name}={text!r} in the environment: give a number of seconds, or 0 for no limit")
    return seconds


@dataclass(frozen=True, slots=True)
class Meeting:
    """A transport that knows its peers, and where each rank runs."""

    transport: Transport
    arena: HostArena | None  # of this host's ranks
    hosts: tuple[str, ...]
    until_joined: contextlib.ExitStack  # to be closed once all ranks are connected, or with what kept them from it


def meet(environment: Environment, joining: Joining) -> Meeting:
    """Open this rank's sockets and learn everybody's addresses. Blocks until every rank has published its own.

    Raises PeerLostError and DeadlineError as `joining` does.
    """
    turn = next(_turns)
    _check_files(environment)
    if environment.folder:
        return _meet_in_folder(environment, joining, turn)
    return _meet_in_store(environment, joining, turn)


def files_for(size: int, *, has_key: bool) -> int:
    """How many files a rank of a world has open at most, beside those of its program. Measured, and rounded up."""
    return _FILES + size * (_FILES_PER_HOST if has_key else _FILES_PER_RANK)


def _check_files(environment: Environment) -> None:
    """ZeroMQ aborts the process when it cannot open a file."""
    needed = files_for(environment.size, has_key=bool(environment.key_file))
    if (limit := allow_files(needed)) is not None:
        raise UsageError(
            f"a rank of a world of {environment.size} opens up to {needed} files, and this process may not: its limit "
            f"is {limit}; raise it (ulimit -n)"
        )


def _meet_in_folder(environment: Environment, joining: Joining, turn: int) -> Meeting:
    rank, size = environment.rank, environment.size
    job = Path(environment.folder)
    try:
        check_folder(job)
        key = read_key(job / "job")
    except UsageError as error:
        raise UsageError(f"ASYNCOLL_FOLDER={job} is not the folder of a running job: {error}") from error
    folder = job / str(turn)
    folder.mkdir(0o700, exist_ok=True)
    transport = ZeroMQTransport(
        rank, size, key.derive("messages", turn), freeze_s=environment.freeze_s, joining=joining
    )
    transport.peers = [ipc_address(folder, peer) for peer in range(size)]
    transport.bind(transport.peers[rank])
    arena = _share_memory(environment, folder, tuple(range(size)), joining)
    return Meeting(transport, arena, (socket.gethostname(),) * size, contextlib.ExitStack())


def _share_memory(environment: Environment, folder: Path, ranks: tuple[int, ...], joining: Joining) -> HostArena | None:
    """The arena of the ranks of this host; none if they are not to have one, or cannot."""
    if not environment.shares_memory or len(ranks) == 1:
        return None
    try:
        arena = join(folder, environment.rank, ranks, joining)
    except ArenaUnavailable as error:
        if environment.rank == ranks[0]:
            logger.warning("the ranks of this host share no memory and go on by messages: %s", error)
        return None
    arena.patience.seconds = environment.freeze_s or math.inf
    return arena


class _Store(Protocol):
    """What is used of a torch.distributed store."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


def _meet_in_store(environment: Environment, joining: Joining, turn: int) -> Meeting:
    rank, size = environment.rank, environment.size
    key = read_key(Path(environment.key_file)) if environment.key_file else None
    with contextlib.ExitStack() as undo:
        board = _enter_store(environment, joining, key or Key(b""), turn)
        undo.push(board.close)
        folders = undo.enter_context(contextlib.ExitStack())
        undo.push(board.warn)  # first: a rank that finds no folder any more finds in the store why
        session = board.begin_session()
        hosts = board.exchange("host", _machine(), socket.gethostname(), environment.encrypt)
        if len(modes := {mode for _, _, mode in hosts}) > 1:
            raise UsageError(f"the ranks have different settings of ASYNCOLL_ENCRYPT: {' and '.join(sorted(modes))}")
        neighbours = tuple(peer for peer in range(size) if hosts[peer][0] == hosts[rank][0])
        tcp = f"tcp://{_own_address(environment)}:0" if len(neighbours) < size else ""
        messages = ZeroMQTransport(
            rank,
            size,
            session.derive("messages"),
            encrypted=key is not None,
            freeze_s=environment.freeze_s,
            joining=joining,
        )
        beside = None  # whose connections have no pulse of their own
        if _has_two_streams(environment, tcp):
            beside = ZeroMQTransport(rank, size, session.derive("payloads"), freeze_s=0, joining=joining)
        if rank == neighbours[0]:
            made = tempfile.mkdtemp(prefix="asyncoll-")  # with mode 0700
            folders.callback(shutil.rmtree, made, ignore_errors=True)
            board.post("folder", made)
        folder = Path(*board.look("folder", neighbours[0], 1))
        with _blames_owner(folder, neighbours[0], joining):
            check_folder(folder)
            messages.bind(ipc_address(folder, rank))
        arena = _share_memory(environment, folder, neighbours, joining)
        with contextlib.ExitStack() as undo_arena:
            if arena is not None:
                undo_arena.callback(arena.close)
            own = [stream.bind(tcp) if tcp and stream else "" for stream in (messages, beside)]
            # Last: nobody comes to a door before somebody answers there soon.
            addresses = board.exchange("address", *own)
            undo_arena.pop_all()
        messages.peers = [
            ipc_address(folder, peer) if peer in neighbours else addresses[peer][0] for peer in range(size)
        ]
        messages.are_bound = True
        transport: Transport = messages
        if beside is not None:
            beside.peers = ["" if peer in neighbours else addresses[peer][1] for peer in range(size)]
            beside.are_bound = True
            transport = SplitTransport(messages, beside, set(range(size)).difference(neighbours))
        names = tuple(name for _, name, _ in hosts)
        return Meeting(transport, arena, names, undo.pop_all())


@contextlib.contextmanager
def _blames_owner(folder: Path, owner: int, joining: Joining) -> Iterator[None]:
    """Raises PeerLostError where an error has come because `owner` has given up and removed the folder."""
    try:
        yield
    except (UsageError, OSError) as error:
        if folder.exists():
            raise
        joining.check(lambda: [owner], "whose folder of sockets is gone")
        raise PeerLostError(owner, GIVEN_UP) from error


def _has_two_streams(environment: Environment, tcp: str) -> bool:
    return bool(tcp and environment.key_file) and environment.encrypt == "control"


class _Board:
    """Short texts that ranks publish for each other in the store, each sealed for its place there."""

    def __init__(
        self, store: _Store, prefix: str, rank: int, size: int, key: Key, joining: Joining, serves: bool
    ) -> None:
        """`serves` says that the store is that of rank 0, and ends with it."""
        self._store = store
        self._prefix = prefix
        self._rank = rank
        self._size = size
        self._key = self._first_key = key
        self._joining = joining
        self._serves = serves
        self._is_gone = False
        self._has_told = False

    def await_rank_0(self) -> None:
        """Until rank 0 has begun to join this very world. Raises PeerLostError if the store ends before."""
        self._await("nonce", [0])

    def begin_session(self) -> Key:
        """What seals all that follows, and whatever else belongs to this run alone."""
        own = process_space()
        said = self.exchange("nonce", secrets.token_hex(16), own, str(os.getpid()))
        for peer, (_, space, pid) in enumerate(said):
            if own and space == own and peer != self._rank and pid.isdecimal():
                self._joining.watch(peer, int(pid))
        self._key = Key(self._key.derive("session", self._prefix, *(nonce for nonce, _, _ in said)))
        return self._key

    def post(self, topic: str, *texts: str) -> None:
        place = self._place(topic, self._rank)
        sealed = self._key.seal(_pack(texts), place)
        self._ask(lambda: self._store.set(place, sealed))

    def look(self, topic: str, rank: int, count: int) -> list[str]:
        """The `count` texts that `rank` has posted, or will."""
        self._await(topic, [rank])
        texts = self._read(self._place(topic, rank), self._key)
        if texts is None or len(texts) != count:
            raise UsageError(
                f"what stands in the store as the {topic} of rank {rank} is not sealed with the key of this job: give "
                f"all ranks the same file in {KEY_FILE}, and each process a RANK of its own; otherwise somebody else "
                "writes in this store"
            )
        return texts

    def exchange(self, topic: str, *texts: str) -> list[list[str]]:
        """What every rank says, by rank."""
        self.post(topic, *texts)
        self._await(topic, range(self._size))
        return [self.look(topic, peer, len(texts)) for peer in range(self._size)]

    def warn(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """If `error` says which ranks are missing, tell the other ranks.

        Raises what another rank has said before instead: its death, say, has been noticed because it has given up.
        """
        told: list[AsyncollError] = []
        if isinstance(error, PeerLostError | DeadlineError) and not self._is_gone:
            # In a thread that is left behind where it takes too long: the process of the store may be stopped.
            telling = threading.Thread(target=self._tell, args=(self._store, error, told), daemon=True)
            telling.start()
            telling.join(_TELLING_S)
        if told:
            raise told[0] from error

    def close(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave the store. That of rank 0 ends with it, so rank 0 waits until the others have read why it gives up."""
        if self._serves and self._rank == 0 and self._has_told:
            with contextlib.suppress(RuntimeError):
                self._await_told(getattr(error, "missing", None) or [getattr(error, "rank", 0)])
        del self._store

    # -- how it ends ------------------------------------------------------------------------------

    def _tell(self, store: _Store, error: PeerLostError | DeadlineError, told: list[AsyncollError]) -> None:
        """All others, or add to `told` what another rank has told before."""
        failed = f"{self._prefix}/failed"
        if isinstance(error, PeerLostError):
            words = ["lost", error.cause, str(error.rank)]
        else:
            words = ["late", str(error), ",".join(map(str, error.missing))]
        with contextlib.suppress(RuntimeError):  # the store has ended: then nobody can be told
            if not store.check([failed]):
                store.set(failed, self._first_key.seal(_pack(words), failed))
            first = _open(self._first_key, store.get(failed), failed)
            if first is not None and first != words:
                told.append(self._error_of(first))
            store.set(self._place("told", self._rank), b"")
            self._has_told = True

    def _await_told(self, lost: Sequence[int]) -> None:
        """Until all ranks in the store but the `lost` ones have read what has failed."""
        ends_s = time.monotonic() + _FAREWELL_S  # noqa: TID251 (no loop waits for it)
        others = set(range(1, self._size)).difference(lost)
        here = [rank for rank in others if self._store.check([self._place("nonce", rank)])]
        told = [self._place("told", rank) for rank in here]
        while told and time.monotonic() < ends_s and not self._store.check(told):  # noqa: TID251
            time.sleep(self._joining.pause_s)  # noqa: TID251

    def _check_told(self) -> None:
        """Raises what another rank has said of how joining ends."""
        place = f"{self._prefix}/failed"
        if not self._ask(lambda: self._store.check([place])):
            return
        if (words := self._read(place, self._first_key)) is not None:  # else somebody else writes in this store
            raise self._error_of(words)

    def _error_of(self, words: list[str]) -> AsyncollError:
        if len(words) != 3:
            raise UsageError("somebody else writes in the store of this job")
        kind, text, listed = words
        ranks = tuple(int(rank) for rank in listed.split(",") if rank.isdecimal())
        if kind == "lost" and ranks:
            return PeerLostError(ranks[0], text)
        return DeadlineError(text, tuple(rank for rank in range(self._size) if rank not in ranks), ranks)

    # -- the store --------------------------------------------------------------------------------

    def _await(self, topic: str, ranks: Sequence[int]) -> None:
        """Until all these have posted it."""
        places = [self._place(topic, rank) for rank in ranks]
        what = "not in the store yet" if topic == "nonce" else f"in the store without its {topic}"

        def missing() -> list[int]:
            return [
                rank
                for rank, place in zip(ranks, places, strict=True)
                if not self._ask(lambda place=place: self._store.check([place]))  # type: ignore[misc]
            ]

        while not self._ask(lambda: self._store.check(places)):
            self._check_told()
            self._joining.check(missing, what)
            time.sleep(self._joining.pause_s)  # noqa: TID251 (no loop runs yet)

    def _read(self, place: str, key: Key) -> list[str] | None:
        """None if no holder of the key has written it."""
        return _open(key, self._ask(lambda: self._store.get(place)), place)

    def _ask(self, operation: Callable[[], T]) -> T:
        """Of the store, whose process may be gone, or stopped."""
        try:
            return self._joining.call(operation, lambda: [0], "which serves the store" if self._serves else "the store")
        except RuntimeError as error:  # those of torch.distributed are
            self._is_gone = True
            if not self._serves:
                raise ServiceLostError(f"the store of this job is gone: {error}") from error
            raise PeerLostError(0, "the store that it serves has ended before all ranks had joined") from error

    def _place(self, topic: str, rank: int) -> str:
        return f"{self._prefix}/{topic}/{rank}"


def _pack(texts: Sequence[str]) -> bytes:
    """Paths may be no UTF-8."""
    packed: bytes = msgpack.packb(texts, unicode_errors="surrogateescape")
    return packed


def _open(key: Key, sealed: bytes, place: str) -> list[str] | None:
    try:
        texts = msgpack.unpackb(key.open(sealed, place), unicode_errors="surrogateescape")
    except (ProtocolError, ValueError):
        return None
    return texts if isinstance(texts, list) and all(isinstance(text, str) for text in texts) else None


def _enter_store(environment: Environment, joining: Joining, key: Key, turn: int) -> _Board:
    """The board of this world, in the store of torchrun's agent or of rank 0.

    A quick rank may still find the store in which the ranks met before, for as long as rank 0 has not closed it: then
    it tries again.
    """
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    while True:
        store = (
            _serve_store(environment) if environment.rank == 0 and not agents else _reach_store(environment, joining)
        )
        prefix = f"asyncoll/{environment.run}/{turn}"
        board = _Board(store, prefix, environment.rank, environment.size, key, joining, serves=not agents)
        if environment.rank == 0 or agents:
            return board
        try:
            board.await_rank_0()
        except PeerLostError:
            del board, store
            time.sleep(joining.pause_s)  # noqa: TID251 (no loop runs yet)
        else:
            return board


def _reach_store(environment: Environment, joining: Joining) -> Any:
    """A client of the store, as soon as it is served. TCPStore itself would wait without a word."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, port, size = environment.master_addr, environment.master_port, environment.size
    what = f"which serves the store at {address}:{port}"
    while True:
        timeout = timedelta(seconds=joining.remaining_s)
        try:
            socket.create_connection((address, port), timeout=joining.pause_s + _PROBE_S).close()
            return joining.call(
                lambda timeout=timeout: TCPStore(address, port, size, False, timeout, wait_for_workers=False),  # type: ignore[misc]
                lambda: [0],
                what,
            )
        except (OSError, RuntimeError) as error:  # it is not served yet, or no more
            joining.check(lambda: [0], f"{what}: {error}"[:_REASON_CHARACTERS])
            time.sleep(joining.pause_s)  # noqa: TID251 (no loop runs yet)


def _serve_store(environment: Environment) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        environment.master_addr,
        environment.master_port,
        environment.size,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=_listen(environment.master_addr, environment.master_port),
    )


def _listen(address: str, port: int) -> int:
    """A socket that listens on this address alone: left to itself, the store listens on all of them."""
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address, port), family=family).detach()
    except OSError as error:
        raise UsageError(
            f"rank 0 cannot listen on MASTER_ADDR={address}, MASTER_PORT={port}: {error}; they must be an address of "
            "this host and a free port"
        ) from error


def _machine() -> str:
    """Equal for two ranks that can reach each other's unix sockets: one kernel, and one folder for temporary files."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    where = os.stat(tempfile.gettempdir())
    return f"{boot}/{where.st_dev}/{where.st_ino}/{os.getuid()}"


def _own_address(environment: Environment) -> str:
    """Where this rank listens for those of other hosts. Raises UsageError where nobody may listen without a key."""
    address = os.environ.get("ASYNCOLL_ADDRESS") or _address_towards(environment.master_addr)
    with contextlib.suppress(ValueError):  # the name of an interface is none of the two
        known = ipaddress.ip_address(address)
        if known.is_unspecified:
            raise UsageError(f"ASYNCOLL_ADDRESS={address} is every address of this host: choose the one to listen on")
        if known.is_loopback and not environment.key_file and environment.encrypt != "all":
            return address
    if not environment.key_file:
        raise UsageError(
            f"ranks that talk over tcp ({address}) need a key, or anybody on the network could join them: make one "
            f"with `asyncoll key FILE`, copy the file to every host and set {KEY_FILE}=FILE for all ranks"
        )
    return address


def _address_towards(master: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, 1))  # a datagram socket sends nothing when it connects
        except OSError as error:
            raise UsageError(f"no route to MASTER_ADDR={master}: {error}; set ASYNCOLL_ADDRESS") from error
        return str(probe.getsockname()[0])
