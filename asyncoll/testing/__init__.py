"""The test kit: worlds of ranks in one process, real or simulated; contract suites for transports and arenas; the laws
of wait-avoiding collectives; faults that strike real ranks."""

from asyncoll.testing.contract import check_arena, check_transport
from asyncoll.testing.faults.injectors import (
    Disconnect,
    Exit,
    Fault,
    HoldGil,
    Kill,
    Orphan,
    Raise,
    Signal,
    Slow,
    Stop,
    fault,
)
from asyncoll.testing.laws import LawBroken, Lawful, check_laws
from asyncoll.testing.worlds import SimReport, run_ranks, simulate
from asyncoll.transport.messages.simulated import Crash, Cut, Network, Pause

__all__ = [
    "Crash",
    "Cut",
    "Disconnect",
    "Exit",
    "Fault",
    "HoldGil",
    "Kill",
    "LawBroken",
    "Lawful",
    "Network",
    "Orphan",
    "Pause",
    "Raise",
    "Signal",
    "SimReport",
    "Slow",
    "Stop",
    "check_arena",
    "check_laws",
    "check_transport",
    "fault",
    "run_ranks",
    "simulate",
]
