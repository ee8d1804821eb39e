"""Faults that strike ranks at named points, for tests of any program; and the matrix of faults, `asyncoll faults`."""

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

__all__ = ["Disconnect", "Exit", "Fault", "HoldGil", "Kill", "Orphan", "Raise", "Signal", "Slow", "Stop", "fault"]
