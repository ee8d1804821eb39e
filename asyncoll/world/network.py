"""The addresses of this host: at which of them a rank listens for ranks of other hosts, and which one it tells them."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from asyncoll.errors import UsageError

_SIOCGIFADDR = 0x8915  # of Linux; Python does not export it
_IF_INET6 = Path("/proc/net/if_inet6")
_LINK_LOCAL = 0x20  # the scope in that file


class Place(NamedTuple):
    """Where a rank is for ranks of other hosts."""

    listens: str  # an address of this host
    told: str  # the address that others connect to: the same, or that of a NAT in front of this host


def place(master: str, address: str, interface: str) -> Place:
    """The place that follows from MASTER_ADDR, ASYNCOLL_ADDRESS and ASYNCOLL_INTERFACE, each empty if it is not set.

    The rank listens at the interface; without one at the address; without both at the interface towards `master`.

    Raises UsageError, which says what to set, if none of them leads to an address of this host.
    """
    if address:
        check_address(address, interface)
    if interface:
        listens = address_of(interface, is_ipv6=":" in (address or master))
        return Place(listens, address or listens)
    if address:
        return Place(address, address)
    if master:
        listens = towards(master)
        return Place(listens, listens)
    raise UsageError(
        "the ranks are on several hosts, and their store has no address that shows which network connects them: "
        "set MASTER_ADDR to a host that all reach, ASYNCOLL_INTERFACE to the name of the network interface to use, or "
        "ASYNCOLL_ADDRESS for each rank to an address of its host"
    )


def check_address(address: str, interface: str) -> None:
    """Raise UsageError if ASYNCOLL_ADDRESS and ASYNCOLL_INTERFACE, empty if it is not set, do not fit this host."""
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        raise UsageError(
            f"ASYNCOLL_ADDRESS={address} is no IP address; to choose a network interface by its name set "
            f"ASYNCOLL_INTERFACE (this host has {shown()})"
        ) from None
    if known.is_unspecified:
        raise UsageError(f"ASYNCOLL_ADDRESS={address} is every address of this host: choose the one to listen on")
    if not interface and not is_own(address):
        raise UsageError(
            f"ASYNCOLL_ADDRESS={address} is no address of this host ({socket.gethostname()} has {shown()}); if it is "
            "that of a NAT or a load balancer in front of this host, set ASYNCOLL_INTERFACE, too, to the interface to "
            "listen on"
        )


def address_of(interfaces: str, *, is_ipv6: bool = False) -> str:
    """The address of the first of `interfaces`, names separated by commas, that this host has.

    An interface with addresses of both families gives the IPv4 one, or with `is_ipv6` the other one.
    """
    of_host = dict(addresses())
    for name in interfaces.split(","):
        if found := of_host.get(name.strip()):
            return next((one for one in found if (":" in one) == is_ipv6), found[0])
    raise UsageError(
        f"ASYNCOLL_INTERFACE={interfaces}: this host ({socket.gethostname()}) has no such interface with an address; "
        f"it has {shown()}"
    )


def addresses() -> Iterator[tuple[str, list[str]]]:
    """The interfaces of this host by name, each with its addresses: IPv4, IPv6, and last IPv6 of its link alone."""
    for _, name in socket.if_nameindex():
        yield name, [*_ipv4(name), *_ipv6(name)]


def _ipv4(name: str) -> list[str]:
    # This host may have no such address.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        return [socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24])]
    return []


def _ipv6(name: str) -> list[str]:
    with contextlib.suppress(OSError):  # a kernel without IPv6
        lines = [line.split() for line in _IF_INET6.read_text().splitlines()]
        found = [
            (int(scope, 16), str(ipaddress.IPv6Address(int(bits, 16))))
            for bits, _, _, scope, _, its in lines
            if its == name
        ]
        return [
            f"{one}%{name}" if scope == _LINK_LOCAL else one
            for scope, one in sorted(found, key=lambda each: each[0] == _LINK_LOCAL)
        ]
    return []


def shown() -> str:
    """The interfaces and their addresses, for messages."""
    return ", ".join(f"{name} ({', '.join(found)})" for name, found in addresses() if found) or "no address"


def towards(master: str) -> str:
    """The address of this host on the way to `master`. Connecting a datagram socket sends nothing.

    Of a name with several addresses it takes the first to which there is a route. Raises UsageError without a route.
    """
    reason: OSError | None = None
    try:
        for family, kind, _, _, target in socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM):
            try:
                with socket.socket(family, kind) as probe:
                    probe.connect(target)
                    return str(probe.getsockname()[0])
            except OSError as error:
                reason = reason or error
    except OSError as error:
        reason = error
    raise UsageError(
        f"no route to MASTER_ADDR={master}: {reason}; set ASYNCOLL_INTERFACE to the network interface to use (this "
        f"host has {shown()})"
    )


def is_own(address: str) -> bool:
    """Whether a socket of this host can have `address`."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(target)
    except OSError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Whether `address` is an IP address of loopback."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


def url_host(address: str) -> str:
    """`address` as it stands in a URL."""
    return f"[{address}]" if ":" in address else address


def on_own_link(url: str, listens: str) -> str:
    """`url` of another rank, for a rank at `listens`: an IPv6 address of one link names the interface of *this* host.

    Both are on one link, so it is the interface at which this rank listens.
    """
    inner, mark, rest = url.partition("%")
    zone = listens.partition("%")[2]
    return f"{inner}%{zone}]{rest.partition(']')[2]}" if mark and zone else url


def listen(master: str, port: int, address: str, interface: str) -> socket.socket:
    """A socket that listens for the store of rank 0, at one address.

    It is MASTER_ADDR if that is an address of this host, and otherwise, as behind a NAT or where the own name means
    loopback, that of ASYNCOLL_INTERFACE.
    """
    own: list[str] = []
    reason: OSError | str = ""
    try:
        found = [str(target[0]) for *_, target in socket.getaddrinfo(master, port, type=socket.SOCK_STREAM)]
        own = [one for one in dict.fromkeys(found) if is_own(one)]
        reason = f"{', '.join(dict.fromkeys(found))} is no address of this host"
    except OSError as error:
        reason = error
    if interface and all(map(is_loopback, own)):
        own = [place(master, address, interface).listens]
    for one in own:
        family, *_, target = socket.getaddrinfo(one, port, type=socket.SOCK_STREAM)[0]
        try:
            return socket.create_server(target, family=family)
        except OSError as error:
            reason = error
    raise UsageError(
        f"rank 0 cannot listen on MASTER_ADDR={master}, MASTER_PORT={port}: {reason}; they must be an address of this "
        f"host ({socket.gethostname()} has {shown()}) and a free port, which another job does not use; behind a NAT "
        "set ASYNCOLL_INTERFACE to the interface to listen on"
    )
