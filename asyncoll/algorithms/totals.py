"""What one rank has sent and received, and the totals of one communicator."""

from __future__ import annotations

from dataclasses import dataclass

from asyncoll.algorithms.rounds.tally import OperationStatistics
from asyncoll.statistics import CallStatistics


@dataclass(frozen=True, slots=True)
class Statistics:
    """What one rank has sent and received since it joined the world, and the totals of one communicator.

    Messages and bytes are totals over all communicators of the rank: those of all messages, plus those of calls in
    shared memory that have ended. So they are at least the sums over the `calls` of the rank's communicators.

    In shared memory, bytes received are those read from other ranks' memory. Bytes sent are those made readable for
    others, counted once however many ranks read them. Wait-avoiding rounds and calls of functions are not counted if
    they go through shared memory.
    """

    rank: int
    """This rank's number in the communicator."""

    messages_sent: int
    """Messages of this rank, in all of its communicators."""

    messages_received: int
    """Messages to this rank, in all of its communicators."""

    bytes_sent: int
    """Bytes of payload sent, by message and in shared memory."""

    bytes_received: int
    """Bytes of payload received, by message and in shared memory."""

    operations: dict[str, OperationStatistics]
    """The wait-avoiding operations of this communicator, by `name`."""

    calls: dict[str, CallStatistics]
    """The other calls on this communicator that have ended, by method: number, messages and bytes.

    Point-to-point calls are counted together, as `send/recv`.
    """
