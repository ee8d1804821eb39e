"""The line of the user's program that makes a call, for errors: outside of this package and of torch's."""

from __future__ import annotations

import contextlib
import os
import sys
from contextlib import AbstractContextManager
from typing import Any

import torch
import typing_extensions

from asyncoll.runtime.signature import Site, place_outside, reported_at

_deprecated: Any = typing_extensions.deprecated
LIBRARIES = (  # what the names of files begin with that are not the user's
    *(os.path.dirname(file) + "/" for file in (__file__, str(torch.__file__))),
    _deprecated.__call__.__code__.co_filename,  # of the wrappers around functions that torch has renamed
    contextlib.__file__,  # of torch's context managers, and of those here
)


def site_of_user() -> Site:
    """The line of the user's code that makes this call."""
    return Site(*place_outside(sys._getframe(1), LIBRARIES))


def reported_at_user() -> AbstractContextManager[None]:
    """Calls of the communicator in the `with` block are reported at the line of the user's code that leads here."""
    return reported_at(place_outside(sys._getframe(1), LIBRARIES))
