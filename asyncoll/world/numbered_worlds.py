"""The worlds that meet in one store, one after another: rank 0 numbers them, and the others enter the newest.

Entries of a world stay in the store, which torchrun's agent keeps for as long as the job runs. So the names of all
entries of a world begin with its number.
"""

from __future__ import annotations

import os
import socket
import time

from asyncoll.errors import UsageError
from asyncoll.world.sealed_entries import SealedEntries

_JOB = "asyncoll job"  # the entry with the name of the job that uses the store


class NumberedWorlds:
    """The worlds of one job in a store, for one rank."""

    def __init__(self, entries: SealedEntries, job: str) -> None:
        """`job` begins the names of all entries."""
        self._entries = entries
        self._job = job
        self._entered = 0  # the number of the world that this rank is in
        self._counts: dict[int, int] = {}  # by world: how often another process of this rank had looked there

    def enter(self) -> str:
        """Enter the next world: begin it at rank 0, and wait for it elsewhere. Returns what begins its entries' names.

        Raises PeerLostError if the store of rank 0 ends before: it was that of another world; and UsageError if another
        process is this rank, or another job meets here.
        """
        entries = self._entries
        entries.joining.listen(None)  # what has been told of an earlier world does not matter
        if entries.rank == 0:
            entries.put_plain(_JOB, self._job)
        number = self._newest(begins=entries.rank == 0)
        while entries.rank and not self._enters(number):
            entries.joining.check(self._missing, f"not in the store yet{self._namesake(number)}")
            time.sleep(entries.joining.pause_s)  # noqa: TID251 (no loop runs yet)
            number = self._newest()
        self._entered = number
        entries.put(self._turn(number), [_this_process()])
        return self._name(number)

    def is_over(self) -> bool:
        """Whether rank 0 has begun a world after the one that this rank has entered."""
        return self._newest() > self._entered

    def _newest(self, *, begins: bool = False) -> int:
        """The number of the newest world, 0 if there is none yet; with `begins`, of one that begins now."""
        return self._entries.add(f"{self._job}/turn", int(begins))

    def _enters(self, number: int) -> bool:
        """Enter a world as its rank, which one process can, unless the world has failed to begin.

        Raises UsageError if another process that lives has done so, and the world is still being formed.
        """
        entries, world = self._entries, self._name(number)
        if number == 0 or entries.has(f"{world}/failed"):
            return False
        if entries.add(f"{world}/claims/{entries.rank}", 1) == 1:
            return True
        # A process of an earlier world may have died there, and its last count may still be on the way. Clocks of hosts
        # do not agree, so only counts of processes that wait show that they live.
        counts = entries.add(f"{world}/alive/{entries.rank}", 0)
        if counts > self._counts.setdefault(number, counts) + 1 and (rival := self._rival(number)):
            raise UsageError(
                f"rank {entries.rank} of the world that meets at MASTER_ADDR and MASTER_PORT is {rival} already, and "
                f"not {_this_process()}: give each job a MASTER_PORT of its own, and each process of a job its own RANK"
            )
        return False

    def _rival(self, number: int) -> str:
        """The other process that is this rank in a world; empty if it is this one, or not known."""
        turn = self._turn(number)
        known = self._entries.read(turn) if self._entries.has(turn) else None
        return known[0] if known and known != [_this_process()] else ""

    def _namesake(self, number: int) -> str:
        """The end of a message, if another process is this rank in a world. It may have ended, or not."""
        if not (rival := self._rival(number)):
            return ""
        return (
            f"; in its newest world rank {self._entries.rank} is {rival}, so two jobs may use one MASTER_ADDR and "
            "MASTER_PORT, or two processes one RANK"
        )

    def _missing(self) -> list[int]:
        """The rank that has not begun a world. Raises UsageError if it uses another backend, or is of another job."""
        self._entries.check_backends([0])
        self._check_job()
        return [0]

    def _check_job(self) -> None:
        """Raise UsageError if rank 0 of another job has come to this store."""
        job = self._entries.read_plain(_JOB) if self._entries.has(_JOB) else self._job
        if job != self._job:
            raise UsageError(
                f"another job meets at MASTER_ADDR and MASTER_PORT, {job!r}, where rank {self._entries.rank} of "
                f"{self._job!r} waits: give each job a port of its own"
            )

    def _name(self, number: int) -> str:
        return f"{self._job}/{number}"

    def _turn(self, number: int) -> str:
        """The name of the entry with the process that is this rank in a world."""
        return f"{self._name(number)}/turn/{self._entries.rank}"


def _this_process() -> str:
    return f"process {os.getpid()} on host {socket.gethostname()}"
