"""Faults that strike the whole host of a rank."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass

from asyncoll.errors import UsageError
from asyncoll.runtime.endpoint import Endpoint
from asyncoll.testing.faults.host_networks import cut_cable, set_interface_down
from asyncoll.testing.faults.injectors import FaultPlace, Kill, OfProcess
from asyncoll.transport.messages.simulated import SimulatedTransport


@dataclass(frozen=True, slots=True)
class KillHost(Kill):
    """Kill all processes of the rank's host (SIGKILL). In a simulated world all of its ranks crash."""

    def strike(self, place: FaultPlace) -> None:
        endpoint = place.comm._core.member.endpoint
        if isinstance(endpoint.transport, SimulatedTransport):
            for rank in (*_others(endpoint), endpoint.rank):
                endpoint.transport.peer(rank).crash()
            return
        for pid in _pids(endpoint):
            os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class StopHost(OfProcess):
    """Stop all processes of the rank's host (SIGSTOP)."""

    def strike(self, place: FaultPlace) -> None:
        for pid in _pids(place.comm._core.member.endpoint):
            os.kill(pid, signal.SIGSTOP)
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


@dataclass(frozen=True, slots=True)
class DownHost(OfProcess):
    """Set the network interface of the rank's host down. The host is a namespace of `host_networks`."""

    def strike(self, place: FaultPlace) -> None:
        set_interface_down()


@dataclass(frozen=True, slots=True)
class CutHost(OfProcess):
    """Cut the cable of the rank's host. The host is a namespace of `host_networks`."""

    def strike(self, place: FaultPlace) -> None:
        cut_cable()


def _pids(endpoint: Endpoint) -> list[int]:
    """The processes of the other ranks of this rank's host."""
    pids = [endpoint.membership.process(rank).pid for rank in _others(endpoint)]
    if not all(pids):  # 0 would mean the process group of this rank
        raise UsageError(
            "not all ranks of this host have told their process ids yet: let the fault strike a later call"
        )
    return pids


def _others(endpoint: Endpoint) -> list[int]:
    """The other ranks of this rank's host."""
    own = endpoint.host_of[endpoint.rank]
    return [rank for rank, host in enumerate(endpoint.host_of) if host == own and rank != endpoint.rank]
