"""Hosts that are network namespaces of this machine: each has one cable, `eth0`, to a switch.

This needs root, and the commands `ip` and `tc`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from asyncoll.errors import UsageError

CABLE = "ASYNCOLL_FAULTS_CABLE"  # in the environment of a rank: the namespace of the switch, and its end of the cable
_INTERFACE = "eth0"
_NEW_NET, _NEW_UTS = 0x40000000, 0x4000000  # flags of the system calls
_numbers = itertools.count()


class HostNetworks:
    """The networks of some hosts, by name."""

    def __init__(self, prefix: str, hosts: Sequence[str]) -> None:
        self._switch = f"{prefix}-switch"
        self._spaces = {host: f"{prefix}-{host}" for host in hosts}

    def address(self, host: str) -> str:
        """The address of `host`."""
        return f"10.77.0.{1 + list(self._spaces).index(host)}"

    def environment(self, host: str) -> dict[str, str]:
        """The variables by which a rank finds its cable: see `cut_cable`."""
        return {CABLE: f"{self._switch} {host}"}

    def enter(self, host: str) -> None:
        """Move this process, which has one thread, to `host`."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self._spaces[host]}") as space:
            if libc.setns(space.fileno(), _NEW_NET) or libc.unshare(_NEW_UTS):
                raise OSError(ctypes.get_errno(), "a namespace could not be entered")
        socket.sethostname(host)


@contextlib.contextmanager
def host_networks(hosts: Sequence[str]) -> Iterator[HostNetworks]:
    """New namespaces for these hosts, which are removed at the end. Raises UsageError if they cannot be made."""
    prefix = f"asyncoll-{os.getpid()}-{next(_numbers)}"
    networks = HostNetworks(prefix, hosts)
    switch, spaces = networks._switch, networks._spaces
    with contextlib.ExitStack() as undo:
        try:
            for space in (switch, *spaces.values()):
                _run("ip", "netns", "add", space)
                undo.callback(_run, "ip", "netns", "del", space)
            _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", switch, "link", "set", "bridge", "up")
            for host, space in spaces.items():
                cable = ["link", "add", _INTERFACE, "netns", space, "type", "veth", "peer", "name", host]
                _run("ip", *cable, "netns", switch)
                _run("ip", "-n", switch, "link", "set", "dev", host, "master", "bridge", "up")
                _run("ip", "-n", space, "addr", "add", f"{networks.address(host)}/24", "dev", _INTERFACE)
                _run("ip", "-n", space, "link", "set", _INTERFACE, "up")
                _run("ip", "-n", space, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", "") or error
            raise UsageError(f"hosts are network namespaces here, which need root, ip and tc: {reason}") from error
        yield networks


def remove_networks_of_the_dead() -> None:
    """Remove the namespaces of processes that were killed."""
    folder = Path("/run/netns")
    for space in folder.glob("asyncoll-*-*-*") if folder.is_dir() else ():
        if not Path("/proc", space.name.split("-")[1]).exists():
            _run("ip", "netns", "del", space.name)


def set_interface_down() -> None:
    """Switch the interface of this host off. Peers get no FIN and no RST."""
    _run("ip", "link", "set", _INTERFACE, "down")


def cut_cable() -> None:
    """Drop everything on the cable of this host, in both directions. The interface stays up."""
    switch, port = os.environ[CABLE].split()
    _run("tc", "-n", switch, "qdisc", "add", "dev", port, "root", "blackhole")
    _run("tc", "qdisc", "add", "dev", _INTERFACE, "root", "blackhole")


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
