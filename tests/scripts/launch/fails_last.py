"""Rank 2 fails, but only after every other rank has failed because of it."""

import asyncio
import os
import time
from pathlib import Path

from asyncoll.errors import AbortedError, PeerLostError

here = Path(os.environ["ASYNCOLL_FOLDER"])
rank = int(os.environ["RANK"])


async def main() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(suffer())


async def suffer() -> None:
    (here / f"failed-{rank}").touch()
    try:
        raise PeerLostError(2, "its sockets closed")
    except PeerLostError as error:
        raise RuntimeError("cannot go on") from error


# The launcher waits for a rank that is blamed, but not while others are still loading.
(here / f"loaded-{rank}").touch()
while len(list(here.glob("loaded-*"))) < 3:
    time.sleep(0.01)
if rank == 2:
    while len(list(here.glob("failed-*"))) < 2:
        time.sleep(0.01)
    raise KeyError("the root of it all")
if rank == 0:
    asyncio.run(main())
(here / f"failed-{rank}").touch()
raise AbortedError(2, "a rank gave up")
