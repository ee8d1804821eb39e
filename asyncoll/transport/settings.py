"""Settings in environment variables. It imports little, because the launcher starts with it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from asyncoll.errors import UsageError


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
