"""The test kit: worlds inside one process, real or simulated, and the contract that every transport keeps."""

from asyncoll.testing.contract import check_transport
from asyncoll.testing.worlds import SimReport, run_ranks, simulate
from asyncoll.transport.simulated import Crash, Cut, Network, Pause

__all__ = ["Crash", "Cut", "Network", "Pause", "SimReport", "check_transport", "run_ranks", "simulate"]
