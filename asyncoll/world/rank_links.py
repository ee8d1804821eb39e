"""How one rank opens its connections beside a running loop, and the endpoint that has them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from asyncoll.algorithms.seam.arrival import to_its_end
from asyncoll.errors import AsyncollError
from asyncoll.runtime.endpoint import Endpoint
from asyncoll.runtime.membership import Membership
from asyncoll.transport import Transport
from asyncoll.transport.joining import Joining, in_daemon_thread
from asyncoll.transport.messages.shared_payloads import SlottedTransport
from asyncoll.world.environment import Environment
from asyncoll.world.meeting import PeerLinks, meet


async def meeting(environment: Environment, joining: Joining) -> PeerLinks:
    """Meet the other ranks, in a thread.

    When this is cancelled, it waits for the thread to end: nothing else would close what the thread has opened.
    """
    opening = asyncio.wrap_future(in_daemon_thread(lambda: meet(environment, joining)))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError as error:
        joining.cancel()
        await to_its_end(_give_up(opening, joining, error))
        raise


async def _give_up(opening: asyncio.Future[PeerLinks], joining: Joining, error: BaseException) -> None:
    """End joining with `error`, if the opening has not done so.

    The connections end once the others can read why, and before this rank waits for them to read it: as long as it
    listens, they wait for its answer.
    """
    with contextlib.suppress(AsyncollError):
        links = await opening
        await joining.fail(error)
        if links.arena is not None:
            links.arena.close()
        await links.transport.close()
        await end_joining(links, error)


async def end_joining(links: PeerLinks, error: BaseException | None) -> None:
    """Release what this rank has held until all had joined. `error` is what has prevented that.

    In a thread, because rank 0 may wait for ten seconds until the others have read it; and to its end, also if this is
    cancelled meanwhile. Raises what another rank has told before, if `error` may be a consequence of that.
    """
    kind = None if error is None else type(error)
    ending = in_daemon_thread(lambda: links.until_joined.__exit__(kind, error, None))
    await to_its_end(asyncio.wrap_future(ending))


def endpoint_of(
    links: PeerLinks, environment: Environment, epoch: int = 1, numbers: Sequence[int] | None = None
) -> Endpoint:
    """The endpoint of this rank in `epoch`, not started. `numbers` are the member numbers by rank; None: the ranks."""
    transport: Transport = links.transport
    if links.arena is not None:
        transport = SlottedTransport(transport, links.arena)
    return Endpoint(
        transport,
        links.arena,
        environment.deadline_s,
        links.machines,
        all_have_arenas=links.all_have_arenas,
        shares_memory=environment.shares_memory,
        membership=Membership(transport.size, links.hosts, epoch, numbers),
    )
