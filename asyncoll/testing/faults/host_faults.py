"""Faults that strike the whole host of a rank."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from typing import ClassVar

from asyncoll.runtime.endpoint import Endpoint
from asyncoll.testing.faults.host_networks import cut_cable, set_interface_down
from asyncoll.testing.faults.injectors import Kill, Place
from asyncoll.transport.messages.simulated import SimulatedTransport


@dataclass(frozen=True, slots=True)
class KillHost(Kill):
    """Kill all processes of the rank's host (SIGKILL). In a simulated world all of its ranks crash."""

    def strike(self, place: Place) -> None:
        endpoint = place.comm._core.member.endpoint
        if isinstance(endpoint.transport, SimulatedTransport):
            for rank in (*_others(endpoint), endpoint.rank):
                endpoint.transport.peer(rank).crash()
            return
        for rank in _others(endpoint):
            os.kill(endpoint.membership.process(rank).pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class StopHost:
    """Stop all processes of the rank's host (SIGSTOP)."""

    of_process: ClassVar[bool] = True

    def strike(self, place: Place) -> None:
        endpoint = place.comm._core.member.endpoint
        for rank in _others(endpoint):
            os.kill(endpoint.membership.process(rank).pid, signal.SIGSTOP)
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


@dataclass(frozen=True, slots=True)
class DownHost:
    """Set the network interface of the rank's host down. The host is a namespace of `host_networks`."""

    of_process: ClassVar[bool] = True

    def strike(self, place: Place) -> None:
        set_interface_down()


@dataclass(frozen=True, slots=True)
class CutHost:
    """Cut the cable of the rank's host. The host is a namespace of `host_networks`."""

    of_process: ClassVar[bool] = True

    def strike(self, place: Place) -> None:
        cut_cable()


def _others(endpoint: Endpoint) -> list[int]:
    """The other ranks of this rank's host."""
    own = endpoint.host_of[endpoint.rank]
    return [rank for rank, host in enumerate(endpoint.host_of) if host == own and rank != endpoint.rank]
