"""The two forms of a collective call, which have the same methods: by message, or in shared memory."""

from __future__ import annotations

from asyncoll.algorithms.dense.by_message import MessageCall
from asyncoll.algorithms.dense.in_memory import SharedCall

Form = MessageCall | SharedCall
