"""The test kit: worlds of ranks in one process, real or simulated; contract suites for transports, arenas
and devices; a device without hardware; the laws
of wait-avoiding collectives; faults that strike real ranks; the
time of a round in theory."""

from asyncoll.testing.contract import check_arena, check_transport
from asyncoll.testing.devices import DeviceProgram, FakeDevice, Hazard, check_device, fake_device
from asyncoll.testing.faults.host_faults import KillHost
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
from asyncoll.testing.time_model import Delays, StartRule, Waiting, expected_round_s, least_round_s
from asyncoll.testing.worlds import SimReport, run_ranks, simulate
from asyncoll.transport.messages.simulated import Crash, Cut, Network, Pause, Silence

__all__ = [
    "Crash",
    "Cut",
    "Delays",
    "DeviceProgram",
    "Disconnect",
    "Exit",
    "FakeDevice",
    "Fault",
    "Hazard",
    "HoldGil",
    "Kill",
    "KillHost",
    "LawBroken",
    "Lawful",
    "Network",
    "Orphan",
    "Pause",
    "Raise",
    "Signal",
    "Silence",
    "SimReport",
    "Slow",
    "StartRule",
    "Stop",
    "Waiting",
    "check_arena",
    "check_device",
    "check_laws",
    "check_transport",
    "expected_round_s",
    "fake_device",
    "fault",
    "least_round_s",
    "run_ranks",
    "simulate",
]
