"""Which store of epochs a world has, by the way in which its job was started."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from asyncoll.errors import UsageError
from asyncoll.transport.keys import KEY_FILE, Key
from asyncoll.world.environment import Environment
from asyncoll.world.launcher_store import LauncherStore
from asyncoll.world.sealed_entries import Store
from asyncoll.world.write_once import Decisions, FolderStore, TorchStore, WriteOnce

HOW_TO_GET_ONE: Final = (
    "start the job with `asyncoll launch`; or start `asyncoll store --listen HOST:PORT` beside it, and set "
    "ASYNCOLL_STORE=HOST:PORT for its ranks"
)


def decisions_of(environment: Environment, world: str, key: Key, agent: Store | None = None) -> Decisions | None:
    """The decisions on the epochs of one world of this job; None if the job has no store that outlives its ranks.

    `key` is one that all ranks of the world have: the job's, if `world` names it within the job, or that of its
    session. So no two worlds have an entry in common. `agent` is the store of torchrun's agent, if the ranks have met
    there.

    May block. Raises UsageError if the store of ASYNCOLL_STORE cannot be used, and ServiceLostError if it does not
    answer.
    """
    store = _store_of(environment, key.derive("entries", world).hex(), agent)
    return None if store is None else Decisions(store, Key(key.derive("epochs", world)))


def _store_of(environment: Environment, space: str, agent: Store | None) -> WriteOnce | None:
    """`space` names the entries of this world."""
    if environment.launch_folder:
        return FolderStore(Path(environment.launch_folder, f"epochs-{space}"))
    if environment.launcher:
        return LauncherStore(Path(environment.launcher), space)
    if environment.epoch_store is not None:
        if not environment.key_file:
            raise UsageError(f"ASYNCOLL_STORE needs the key of that store: copy it to this host, and set {KEY_FILE}")
        from asyncoll.world.remote_store import RemoteStore  # a part of the start otherwise

        return RemoteStore(*environment.epoch_store, Path(environment.key_file), space)
    return None if agent is None else TorchStore(agent, f"asyncoll/epochs/{space}/")
