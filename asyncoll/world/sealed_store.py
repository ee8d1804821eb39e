"""The store in which the ranks of a world publish their addresses.

Under torchrun the agent serves it, otherwise rank 0. Any process that reaches the store may write to it, so each entry
is sealed with the job's key for one run: each rank contributes a nonce to the session, and no entry of another run is
accepted.

The store of an agent outlives the processes of the ranks. So an entry proves nothing about a living process: rank 0
publishes the nonces of all ranks, and a rank is in its world only if its own nonce is among them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import time
from collections.abc import Sequence
from importlib.metadata import version
from types import TracebackType

from asyncoll.errors import AsyncollError, DeadlineError, PeerLostError, UsageError
from asyncoll.transport.joining import Joining, process_space
from asyncoll.transport.keys import KEY_FILE, Key
from asyncoll.world.environment import Environment
from asyncoll.world.network import is_loopback
from asyncoll.world.numbered_worlds import NumberedWorlds
from asyncoll.world.sealed_entries import SealedEntries, Store
from asyncoll.world.store import is_of_agent, open_store
from asyncoll.world.told_failure import ToldFailure


class _NewerWorldError(Exception):
    """Rank 0 has begun another world."""


class SealedStore:
    """Short texts that the ranks of a world publish, each by topic and rank."""

    def __init__(
        self, store: Store, prefix: str, rank: int, size: int, key: Key, joining: Joining, serves: bool
    ) -> None:
        """`prefix` begins the names of all entries. `serves` says that rank 0 serves the store, which ends with it."""
        self._entries = SealedEntries(store, rank, size, key, joining, serves=serves)
        self.host = self._entries.host  # where this rank has reached the store; empty if it has no address
        self._worlds = NumberedWorlds(self._entries, prefix)
        self.world = prefix  # begins the names of the entries of the world that this rank has entered
        self._failure = ToldFailure(self._entries, prefix)
        self._rank = rank
        self._size = size
        self._size_of_rank_0 = str(size)  # that of its world, as it has said
        self._key = key
        self._joining = joining

    def begin_turn(self) -> None:
        """Enter the next world of this store. See `NumberedWorlds.enter`."""
        self.world = self._worlds.enter()
        self._failure = ToldFailure(self._entries, self.world)
        self._joining.listen(self._hear)

    def begin_session(self) -> Key:
        """Exchange nonces. Returns the key of this run, which seals all later entries.

        If the world that this rank has entered turns out to be one of earlier processes, it enters the next.

        Raises UsageError if a rank has another version of asyncoll, or expects another number of ranks.
        """
        try:
            said = self._exchange_nonces()
            while said is None:
                self.begin_turn()
                said = self._exchange_nonces()
        except PeerLostError as error:
            # The end of an agent's store is no PeerLostError: a world of another size may be of earlier processes.
            if self._entries.is_gone and self._size_of_rank_0 != str(self._size):
                raise self._different_sizes(0, self._size_of_rank_0) from error
            raise
        self.know_machines([host for _, host, *_ in said])  # until more is known
        space = process_space()
        for peer, (_, _, _, its_space, pid, _) in enumerate(said):
            if space and its_space == space and peer != self._rank and pid.isdecimal():
                self._joining.watch(peer, int(pid))
        self._key = Key(self._key.derive("session", self.world, *(nonce for _, _, nonce, *_ in said)))
        return self._key

    def of_agent(self) -> Store | None:
        """The store itself, if torchrun's agent serves it, so that it outlives the ranks; None otherwise."""
        return None if self._entries.serves else self._entries.raw()

    def post(self, topic: str, *texts: str) -> None:
        """Publish `texts` under `topic`."""
        self._entries.put(self._name(topic, self._rank), texts, self._key)

    def look(self, topic: str, rank: int, count: int | None = None) -> list[str]:
        """Wait until `rank` has posted `topic`, and return its texts: `count`, or any number.

        Raises UsageError if they are not sealed with the key of this run.
        """
        self._await(topic, [rank])
        texts = self._entries.read(self._name(topic, rank), self._key)
        if texts is None or (count is not None and len(texts) != count):
            raise self._unsealed(topic, rank)
        return texts

    def exchange(self, topic: str, *texts: str) -> list[list[str]]:
        """Post `texts`, and return the texts of every rank, by rank."""
        self.post(topic, *texts)
        self._await(topic, range(self._size))
        return [self.look(topic, peer, len(texts)) for peer in range(self._size)]

    # -- how it ends ------------------------------------------------------------------------------

    def know_machines(self, machines: Sequence[object]) -> None:
        """Take the machine of each rank, by rank: the ranks of one machine may be lost together."""
        self._failure.machines = machines

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
        """Tell the other ranks why joining has failed. See `ToldFailure.tell`."""
        return self._failure.tell(error)

    def close(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave the store.

        If rank 0 serves it, the store ends with this; rank 0 waits until the others have read its failure.
        """
        if self._entries.serves and self._rank == 0:
            self._failure.await_readers(error)
        self._entries.close()

    # -- the begin --------------------------------------------------------------------------------

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
            # This raises the error for different keys, also at the rank with the odd one.
            self._size_of_rank_0 = self.look("nonce", 0, len(own))[-1]
            self._await("nonce", range(self._size), until=self._name("session", 0))
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
                raise self._different_sizes(peer, size)

    def _different_sizes(self, peer: int, size: str) -> UsageError:
        return UsageError(
            f"the ranks have different settings of WORLD_SIZE: {self._size} (rank {self._rank}), {size:.100} (rank "
            f"{peer}); give all the same"
        )

    def _check_version(self, peer: int, release: str, host: str) -> None:
        if release != _version():
            raise UsageError(
                f"the ranks have different versions of asyncoll: {_version()} (rank {self._rank}, host "
                f"{socket.gethostname()}), {release:.100} (rank {peer}, host {host:.100}); install the same on "
                "all hosts"
            )

    def _unsealed(self, topic: str, rank: int) -> UsageError:
        """The error for an entry of `rank` that the key of this run has not sealed."""
        name, where, keyless = self._name(topic, rank), "", ""
        if topic == "nonce" and len(claimed := self._entries.read_unsealed(name)) > 1:
            self._check_version(rank, *claimed[:2])
            where = f" (host {claimed[1]!r:.100})"
        if self._key.is_empty:
            keyless = f" (rank {self._rank}, host {socket.gethostname()}, has none)"
        elif self._entries.read(name, Key(b"")) is not None:
            keyless = f" (rank {rank} has none)"
        return UsageError(
            f"in the store, the {topic} of rank {rank}{where} is not sealed with the key of this job{keyless}: give "
            f"all ranks the same key, in {KEY_FILE} or ~/.asyncoll.key, and each process a RANK of its own; otherwise "
            "another program writes to this store"
        )

    # -- waiting ----------------------------------------------------------------------------------

    def _await(self, topic: str, ranks: Sequence[int], until: str = "") -> None:
        """Wait until all of `ranks` have posted `topic`; with `until`, for that entry, which is posted after theirs."""
        names = [self._name(topic, rank) for rank in ranks]
        what = f"in the store without its {topic}"
        if topic == "nonce":
            what = f"not in the store{self._where()} yet"

        def missing() -> list[int]:
            absent = [rank for rank, name in zip(ranks, names, strict=True) if not self._entries.has(name)]
            self._entries.check_backends(absent)
            if topic == "nonce" and self._rank == 0:  # one that expects fewer ranks is not kept waiting for the others
                self._check_sizes([rank for rank in ranks if rank not in absent])
            return absent

        while not self._entries.has(*([until] if until else names)):
            self._joining.check(missing, what)
            time.sleep(self._joining.pause_s)  # noqa: TID251 (no loop runs yet)

    def _where(self) -> str:
        """The part of a message of rank 0 that says where other ranks reach its store; empty if it has no address."""
        host, port = self._entries.host, self._entries.port
        if self._rank or not self._entries.serves or not host:
            return ""
        if is_loopback(host):
            return (
                f" at {host}:{port}, which only this host reaches (for ranks on other hosts set MASTER_ADDR to an "
                "address that they reach, or for rank 0 ASYNCOLL_INTERFACE),"
            )
        return f" at {host}:{port}, which their hosts must reach (MASTER_ADDR, MASTER_PORT),"

    def _hear_of_newer_world(self) -> None:
        """Raise the failure that another rank has published, if there is one.

        Raises _NewerWorldError if rank 0 has begun a world after the one of this rank.
        """
        if not self._entries.is_asking and self._worlds.is_over():
            raise _NewerWorldError
        self._hear()

    def _hear(self) -> None:
        """Raise the failure that another rank has published, if there is one, and count this look, a sign of life.

        While the store answers: nothing.
        """
        if not self._entries.is_asking:
            self._entries.add(self._name("alive", self._rank), 1)
            self._failure.hear()

    def _name(self, topic: str, rank: int) -> str:
        return f"{self.world}/{topic}/{rank}"


def _version() -> str:
    return version("asyncoll")


def enter_store(environment: Environment, joining: Joining, key: Key) -> SealedStore:
    """Enter the next world of the store, which is served by torchrun's agent or by rank 0, or given by the program.

    A fast rank may still reach the store of the previous world, as long as rank 0 has not closed that. It then tries
    again.
    """

    def sealed(store: Store) -> SealedStore:
        prefix, rank, size = f"asyncoll/{environment.run}", environment.rank, environment.size
        return SealedStore(store, prefix, rank, size, key, joining, serves=not is_of_agent())

    if environment.store is not None:
        given = sealed(environment.store)
        given.begin_turn()
        return given
    while True:
        opened = sealed(open_store(environment, joining))
        with contextlib.suppress(PeerLostError):
            opened.begin_turn()
            return opened
        del opened
        time.sleep(joining.pause_s)  # noqa: TID251 (no loop runs yet)
