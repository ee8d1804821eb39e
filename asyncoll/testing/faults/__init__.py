"""Faults that strike ranks at named points, for anybody's tests; and the matrix of all of them, as a command."""

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
