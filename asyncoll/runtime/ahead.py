"""Messages of later epochs: a peer may be told of a new epoch before this rank is, and begin calls there at once."""

from __future__ import annotations

from asyncoll.errors import ProtocolError
from asyncoll.runtime.executions import WINDOW_BYTES, cost_of
from asyncoll.runtime.router import EARLY_MAX
from asyncoll.transport import Buffer, wire


class Ahead:
    """The messages of later epochs that have come to one rank, in the order in which they came.

    They are bounded as early messages of this epoch are: DATA of each peer by the window, all others by their number.
    """

    def __init__(self) -> None:
        self._kept: dict[int, list[tuple[int, list[Buffer]]]] = {}  # source and frames, by epoch
        self._data_bytes: dict[tuple[int, int], int] = {}  # by epoch and source
        self._others = 0

    def keep(self, source: int, header: wire.Header, frames: list[Buffer]) -> None:
        """Keep a message. Raises ProtocolError if there are too many, which a peer that keeps the rules cannot send."""
        if header.kind == wire.DATA:
            key = header.epoch, source
            nbytes = self._data_bytes[key] = self._data_bytes.get(key, 0) + cost_of(frames[1])
            if nbytes > WINDOW_BYTES:
                raise ProtocolError(f"{nbytes} bytes of a later epoch; the window allows {WINDOW_BYTES}")
        else:
            self._others += 1
            if self._others > EARLY_MAX:
                raise ProtocolError(f"more than {EARLY_MAX} messages of later epochs")
        self._kept.setdefault(header.epoch, []).append((source, frames))

    def take(self, epoch: int) -> list[tuple[int, list[Buffer]]]:
        """The messages of `epoch`, which this rank enters. Those of epochs before it are forgotten, too."""
        taken = self._kept.get(epoch, [])
        self._kept = {later: messages for later, messages in self._kept.items() if later > epoch}
        self._data_bytes = {key: nbytes for key, nbytes in self._data_bytes.items() if key[0] > epoch}
        kept = (frames for messages in self._kept.values() for _, frames in messages)
        self._others = sum(wire.decode(frames).kind != wire.DATA for frames in kept)
        return taken
