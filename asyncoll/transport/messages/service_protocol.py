"""What a service and its clients agree on, whichever sockets they use: segments, greetings, limits.

Both ends send segments: a kind, a number and a payload. A client begins with a hello, and the service answers with its
own. The owners of the sockets limit the segments in flight. The sockets limit the size of a segment, and drop a peer
that ignores the owners' rules and does not read.
"""

from __future__ import annotations

from typing import Final, Protocol

from asyncoll.transport.messages import peer_reports
from asyncoll.transport.wire import Buffer

VERSION: Final = 1
HELLO: Final = 255  # the first segment of both ends; its number is the version
BYE: Final = 254  # the last segment of the service to a client; its payload is the reason
REASON_BYTES: Final = 1024
CLIENTS_MAX = 4096
BACKLOG: Final = 512  # connections that wait to be accepted
HANDSHAKE_S = 5.0  # from the connection to the end of the handshake
FREEZE_S: float = peer_reports.FREEZE_S  # a service without a sign of life for this time is lost
REFUSED: Final = "it refused the connection: is the key the same at both ends?"
SILENT: Final = "it does not answer as it should: is it stopped, or has only one end a key?"
UNREAD: Final = "it does not read what it is sent"
CLOSED: Final = "its connection closed"
FOREIGN_USER: Final = "it is another user's"


class SocketOwner(Protocol):
    """The callbacks of a socket, which are called on the loop."""

    def received(self, peer: int, kind: int, number: int, payload: Buffer) -> None:
        """Handle a segment from a peer. The payload may change once this has returned."""

    def room(self, peer: int, kind: int, number: int, nbytes: int) -> memoryview | None:
        """The memory for the payload of a segment, which is received as a whole then; None if there is none yet."""

    def lost(self, peer: int, cause: str) -> None:
        """Handle the loss of a peer. Called at most once for each peer."""


class ServiceEnd(Protocol):
    """The sockets of a service. Peers are the clients, numbered in the order of their arrival."""

    url: str  # where it listens

    def has(self, peer: int) -> bool:
        """Whether client `peer` is connected."""

    def send(self, peer: int, kind: int, number: int, payload: Buffer) -> None:
        """Send a segment to a client, now or later. It is dropped if the client is lost.

        The payload must not change before `flush` returns.
        """

    async def flush(self, peer: int) -> None:
        """Wait until the payloads that were sent to a client may be changed: a short time, whatever the client does."""

    def drop(self, peer: int, reason: str) -> None:
        """Disconnect a client: it loses the service for that reason, and its segments are ignored."""

    def close(self) -> None:
        """Close the sockets at once; segments that are queued are dropped. Idempotent."""


class ClientEnd(Protocol):
    """The socket of a client. Its only peer is the service, with number 0. It does not connect again after a loss."""

    def has(self, peer: int) -> bool:
        """Whether the service is not lost."""

    def send(self, peer: int, kind: int, number: int, payload: Buffer) -> None:
        """Send a segment to the service, now or later. It is dropped if the service is lost.

        The payload must not change before `flush` returns.
        """

    async def flush(self, peer: int) -> None:
        """Wait until the payloads that were sent may be changed."""

    def close(self) -> None:
        """Close the socket at once; segments that are queued are dropped. Idempotent."""


def forked(parent: int) -> str:
    """The cause of the loss in a forked child of process `parent`."""
    return f"this is a forked child of process {parent}, whose connection it is: connect here, too"


def too_many() -> str:
    """The reason for which a service refuses one more client."""
    return f"it has {CLIENTS_MAX} clients already"
