"""A record of the messages of a simulated world: a line of JSON for each, written as the message departs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncoll.algorithms.rounds.announced import announced_operation
from asyncoll.errors import UsageError
from asyncoll.runtime.endpoint import Endpoint
from asyncoll.runtime.port import context_of
from asyncoll.transport import Buffer, wire

FORMAT = 1  # of the file
KINDS = {
    wire.DATA: "data",
    wire.GRANT: "grant",
    wire.CREDIT: "credit",
    wire.SIGNAL: "signal",
    wire.OFFER: "offer",
    wire.CHECK: "check",
}


class Record:
    """The file of a record. `close` it at the end of the world, also of one that fails."""

    def __init__(self, path: Path, size: int, seed: int, endpoints: Mapping[int, Endpoint]) -> None:
        """`endpoints` are those of the ranks, once they have begun. Raises UsageError if the file cannot be written."""
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"record: cannot write {str(path)!r}: {error.strerror}") from None
        self.close = self._file.close
        self._endpoints = endpoints
        self._operations: dict[int, str] = {}  # wait-avoiding ones, by the context of their messages
        self._write({"asyncoll": "simulate", "format": FORMAT, "ranks": size, "seed": seed})

    def departs(
        self, source: int, dest: int, frames: Sequence[Buffer], payload: int, departs_s: float, arrives_s: float
    ) -> None:
        """A message departs, and arrives at `arrives_s`; infinity: never."""
        header = wire.decode(list(frames))
        kind, call, number = KINDS.get(header.kind, ""), "", 0
        if header.kind == wire.CONTROL:
            control = wire.decode_control(frames[1])
            kind = type(control).__name__.lower()
            if isinstance(control, wire.Announce):
                operation = announced_operation(control, header.epoch)
                call = f"{operation.verb} {operation.name!r}"
                self._operations[context_of(control.communicator, operation.name)] = call
        elif header.context in self._operations:
            call, number = self._operations[header.context], header.number
        elif header.kind != wire.CREDIT:
            call = self._endpoints[source].executions.described_call(header.context, header.number)
        arrival = None if math.isinf(arrives_s) else arrives_s
        times = {"departs_s": departs_s, "arrives_s": arrival}
        self._write({"kind": kind, "call": call, "round": number, "from": source, "to": dest, "bytes": payload} | times)

    def _write(self, line: Mapping[str, object]) -> None:
        self._file.write(json.dumps(line) + "\n")
