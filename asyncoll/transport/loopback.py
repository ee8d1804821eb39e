"""The address of this host that only this host reaches."""

from __future__ import annotations

import socket

_IPV4, _IPV6 = "127.0.0.1", "::1"


def loopback() -> str:
    """127.0.0.1; ::1 if this host has that alone."""
    return _IPV6 if _is_own(_IPV6, socket.AF_INET6) and not _is_own(_IPV4, socket.AF_INET) else _IPV4


def _is_own(address: str, family: socket.AddressFamily) -> bool:
    try:
        with socket.socket(family) as asking:
            asking.bind((address, 0))
    except OSError:
        return False
    return True
