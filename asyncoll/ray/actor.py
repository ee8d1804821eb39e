"""One rank of a world of Ray: what runs in its actor."""

from __future__ import annotations

import contextlib
import os
import socket
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import ray

from asyncoll.errors import UsageError, reported_failure, text_of
from asyncoll.launch import process_tree
from asyncoll.launch.rank import TRACEBACK_CHARACTERS_MAX, summary
from asyncoll.ray.actor_store import ActorStore, Table
from asyncoll.transport.keys import KEY_FILE
from asyncoll.transport.system_calls import anonymous_file
from asyncoll.world.environment import Environment
from asyncoll.world.join import connected


class ActorPlace(NamedTuple):
    """Where the process of a rank runs."""

    node: str  # Ray's id of it
    address: str
    host: str
    pid: int


class Raised(NamedTuple):
    """The exception with which a rank has ended, as text: its type need not be known at the driver."""

    type_name: str
    message: str
    traceback: str
    summary: str
    blames: int | None


class Rank:
    """The class of the actors. Its methods are coroutines, so that Ray can cancel `run`."""

    def __init__(self, rank: int, size: int) -> None:
        # It ends with the raylet: Ray itself leaves this process to init.
        process_tree.die_with_parent(os.getppid())
        self._rank = rank
        self._size = size
        self._table = Table()

    def __repr__(self) -> str:
        return f"rank {self._rank}"  # Ray puts it in front of each line of output

    async def place(self) -> ActorPlace:
        node = ray.get_runtime_context().get_node_id()
        return ActorPlace(node, ray.util.get_node_ip_address(), socket.gethostname(), os.getpid())

    async def serve(self, method: str, *args: Any) -> Any:
        """A call of the store, at rank 0."""
        return getattr(self._table, method)(*args)

    async def run(self, first: Any, address: str, secret: bytes, program: list[Any]) -> tuple[Any, Raised | None]:
        """Join, run the program, and leave: its result, or what it has raised.

        `first` is the actor of rank 0, `address` that of its host. `program` has one reference, so that an exception
        while it is unpacked here is reported as the others are.
        """
        try:
            main, args = await _unpacked(program)
            with _key_file(secret) as key_file:
                async with connected(lambda: self._environment(first, address, key_file)) as comm:
                    return await main(comm, *args), None
        except BaseException as error:
            text = "".join(traceback.format_exception(error))[-TRACEBACK_CHARACTERS_MAX:]
            cause = reported_failure(error)
            blames = None if cause is None else cause.rank
            return None, Raised(type(error).__name__, text_of(error), text, summary(error), blames)

    def _environment(self, first: Any, address: str, key_file: str) -> Environment:
        own = {"RANK": str(self._rank), "WORLD_SIZE": str(self._size), "ASYNCOLL_FOLDER": "", KEY_FILE: key_file}
        environment = Environment.read({**os.environ, **own}, (address, 0))
        assert environment is not None
        return replace(environment, run="", store=ActorStore(first))


async def _unpacked(program: list[Any]) -> Any:
    """The program and its arguments. Raises UsageError if this process lacks a module that they use."""
    try:
        return await program[0]
    except ray.exceptions.RaySystemError as error:
        said = str(error).partition("\n")[0]
        raise UsageError(
            f"main or its arguments cannot be loaded on host {socket.gethostname()}: {said}; their modules must be on "
            "all nodes: ray.init(runtime_env={'working_dir': '.'}) sends those of this folder"
        ) from error


@contextlib.contextmanager
def _key_file(secret: bytes) -> Iterator[str]:
    """A file without a name in any folder that holds the key: nothing is left of it, however the process ends."""
    descriptor = anonymous_file("asyncoll-key")
    try:
        os.fchmod(descriptor, 0o600)
        os.write(descriptor, secret)
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)
