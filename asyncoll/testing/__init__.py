"""The test kit: worlds inside one process, real or simulated; the contract that every transport keeps; the laws of
wait-avoiding collectives."""

from asyncoll.testing.contract import check_arena, check_transport
from asyncoll.testing.laws import LawBroken, Lawful, check_laws
from asyncoll.testing.worlds import SimReport, run_ranks, simulate
from asyncoll.transport.simulated import Crash, Cut, Network, Pause

__all__ = [
    "Crash",
    "Cut",
    "LawBroken",
    "Lawful",
    "Network",
    "Pause",
    "SimReport",
    "check_arena",
    "check_laws",
    "check_transport",
    "run_ranks",
    "simulate",
]
