"""The last part of joining: the ranks of one membership are connected to each other, and know it."""

from __future__ import annotations

import asyncio
import os

from asyncoll.algorithms.dense import on_lane
from asyncoll.arguments import digest
from asyncoll.errors import DeadlineError, PeerLostError
from asyncoll.runtime.endpoint import Endpoint
from asyncoll.runtime.failures import WORLD
from asyncoll.runtime.group import Group, Lane
from asyncoll.runtime.membership import JOINING
from asyncoll.transport import Loss
from asyncoll.transport.joining import Joining
from asyncoll.transport.wire import Overdue


def group_of(endpoint: Endpoint) -> Group:
    """All ranks of the epoch: their communicator, and so all contexts, follow from its number and its members."""
    membership = endpoint.membership
    context = digest("epoch", membership.epoch, *membership.numbers)
    return Group(membership.members, endpoint.rank, context, epoch=membership.epoch)


async def connect_all(endpoint: Endpoint, joining: Joining | None = None, host: str = "") -> None:
    """Connect `endpoint` to all ranks of its epoch, on the runtime's loop. Afterwards each is connected to each.

    `joining` bounds how long the others may take; None if they are in this process. `host` is the name of this rank's;
    empty if ranks are no processes.

    If this raises, the others have been told why, and `endpoint` is closed, but not its arena.
    """
    try:
        await _start(endpoint, joining)
        if endpoint.arena is not None:
            endpoint.arena.runtime_loop = asyncio.get_running_loop()
        if host:
            endpoint.introduce(host, os.getpid())
        await _meet(endpoint, joining)
    except BaseException as error:
        try:
            _tell_of(endpoint, error)
            if joining is not None:
                await joining.fail(error)
        finally:
            await endpoint.close(flush=endpoint.failures.has_failed(WORLD))
        raise


async def barrier(endpoint: Endpoint, why: str) -> None:
    """A barrier of all ranks of the epoch, which is no call of the program."""
    group = group_of(endpoint)
    with Lane(endpoint.executions, group, digest(group.communicator, why), 1, 1, lambda: why) as lane:
        await on_lane.barrier(lane)


async def _start(endpoint: Endpoint, joining: Joining | None) -> None:
    """Start the endpoint. Ends early if another rank reports that joining has failed, or is lost."""
    if joining is None:
        return await endpoint.start()
    starting = asyncio.ensure_future(endpoint.start())
    try:
        with endpoint.failures.watch(WORLD, "all ranks to be connected") as failed:
            await asyncio.wait([starting, failed], return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                await failed
            try:
                await starting
            except PeerLostError as error:  # perhaps its whole host is gone
                endpoint.lost(Loss(error.rank, error.cause, error.last_seen_s))
                await failed
    finally:
        starting.cancel()
        await asyncio.wait([starting])


async def _meet(endpoint: Endpoint, joining: Joining | None) -> None:
    def unheard() -> list[int]:
        return [rank for rank in endpoint.membership.members if not endpoint.membership.knows(rank)]

    meeting = barrier(endpoint, JOINING)
    if joining is None:
        await meeting
    else:
        # A rank that cannot connect knows why, and tells the others.
        await joining.over(meeting, unheard, "not connected to all others yet", is_told=True)


def _tell_of(endpoint: Endpoint, error: BaseException) -> None:
    """Tell the other ranks why joining has failed, so that they do not report this rank, which leaves now."""
    if isinstance(error, PeerLostError):
        endpoint.report(Loss(error.rank, error.cause, error.last_seen_s))
    elif isinstance(error, DeadlineError):
        lists = (",".join(map(str, ranks)) for ranks in (error.arrived, error.missing))
        endpoint.failures.give_up(Overdue(WORLD, str(error), *lists), WORLD, endpoint.membership.members)
