"""Settings in environment variables. It imports little, because the launcher starts with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from asyncoll.errors import UsageError

PREFIX = "ASYNCOLL_"
PORT_MAX = 65_535
TRANSPORTS = ("shm", "zmq")  # shared memory within a host and messages for the rest; or messages alone
NAMES = (  # docs/reference/variables.md says what they mean
    *("ASYNCOLL_TRANSPORT", "ASYNCOLL_DEADLINE_S", "ASYNCOLL_FREEZE_S", "ASYNCOLL_STOPPED_S", "ASYNCOLL_PRELOAD"),
    *("ASYNCOLL_KEY_FILE", "ASYNCOLL_ENCRYPT", "ASYNCOLL_INTERFACE", "ASYNCOLL_ADDRESS", "ASYNCOLL_PORTS"),
    *("ASYNCOLL_CORE", "ASYNCOLL_BUILD_CORE", "ASYNCOLL_SIZES", "ASYNCOLL_STORE", "ASYNCOLL_JOIN"),
    *("ASYNCOLL_FOLDER", "ASYNCOLL_LAUNCHER", "ASYNCOLL_RANK_OF", "ASYNCOLL_FAULTS_CABLE"),  # set by asyncoll itself
)
OF_TESTS = "ASYNCOLL_TEST_"  # begins the names of those that tests read
_OF_A_SERVICE = "_SERVICE_HOST"  # ends the name of one of those that Kubernetes sets for a service


def check(environ: Mapping[str, str]) -> None:
    """Raise UsageError for a variable ASYNCOLL_* that asyncoll does not read, and for an unknown transport in one."""
    check_names(environ)
    choice(environ, "ASYNCOLL_TRANSPORT", TRANSPORTS)


def check_transport(transport: str | None) -> None:
    """Raise UsageError for an unknown transport that a program has given. None: it has left that to its environment."""
    if transport is not None and transport not in TRANSPORTS:
        raise UsageError(f"unknown transport {transport!r}: use one of {', '.join(TRANSPORTS)}")


def check_names(environ: Mapping[str, str]) -> None:
    """Raise UsageError if `environ` has a variable ASYNCOLL_* that asyncoll does not read. An empty one is not set."""
    services = [name.removesuffix(_OF_A_SERVICE) for name in environ if name.endswith(_OF_A_SERVICE)]
    of_services = tuple(f"{service}_{part}" for service in services for part in ("SERVICE_", "PORT"))
    for name, value in environ.items():
        known = name in NAMES or name.startswith((OF_TESTS, *of_services))
        if name.startswith(PREFIX) and value and not known:
            import difflib  # a part of the launcher's start otherwise

            similar = difflib.get_close_matches(name, NAMES, 1, cutoff=0.8)
            meant = f"did you mean {similar[0]}?" if similar else f"its variables are {', '.join(NAMES)}"
            raise UsageError(f"{name} in the environment is not a variable of asyncoll: {meant}")


def choice(environ: Mapping[str, str], name: str, choices: Sequence[str]) -> str:
    """The value of the environment variable `name`, one of `choices`; the first of them if it is not set."""
    chosen = environ.get(name) or choices[0]
    if chosen not in choices:
        raise UsageError(f"{name}={chosen!r} in the environment: use one of {', '.join(choices)}")
    return chosen


def host_and_port(text: str, name: str, least: int = 1) -> tuple[str, int]:
    """The host and the port in `text`, as "a:29600"; an address of IPv6 is in brackets.

    Raises UsageError, which begins with `name`, if they are not there, or the port is less than `least`.
    """
    host, _, port = text.rpartition(":")
    number = int(port) if port.isascii() and port.isdecimal() and len(port) <= len(str(PORT_MAX)) else -1
    if not host.strip("[]") or (":" in host) != host.startswith("[") or not least <= number <= PORT_MAX:
        raise UsageError(f"{name}{text!r:.100}: give HOST:PORT, as in 10.0.0.1:29600 or [fd00::1]:29600")
    return host.strip("[]"), number


def seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    """The seconds in the environment variable `name`, or `default`. Raises UsageError if it has something else."""
    text = environ.get(name)
    try:
        number = float(text) if text else default
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise UsageError(f"{name}={text!r} in the environment: give a number of seconds, or 0 for no limit")
    return number
