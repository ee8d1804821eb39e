"""Which store of epochs a world has, by the way in which its job was started."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from asyncoll.transport.keys import Key
from asyncoll.world.environment import Environment
from asyncoll.world.write_once import Decisions, FolderStore

HOW_TO_GET_ONE: Final = "start the job with `asyncoll launch -n RANKS`"


def decisions_of(environment: Environment, world: str, key: Key) -> Decisions | None:
    """The decisions on the epochs of one world of this job; None if the job has no store that outlives its ranks.

    `world` names it within the job, and `key` is the job's. So worlds of one job that come one after another have no
    entry in common. May block.
    """
    if not environment.folder:
        return None
    store = FolderStore(Path(environment.folder, world, "epochs"))
    return Decisions(store, Key(key.derive("epochs", world)))
