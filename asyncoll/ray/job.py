"""`run`: reserve room for the ranks, start an actor for each, let them form a world, and end them in any case."""

from __future__ import annotations

import contextlib
import inspect
import math
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import ray

from asyncoll.errors import DeadlineError, PeerLostError, UsageError
from asyncoll.ray.actor import ActorPlace, Rank
from asyncoll.ray.bundles import Placement, check_resources, placed
from asyncoll.ray.rank_watch import RankWatch
from asyncoll.runtime.deadlines import remaining_s
from asyncoll.transport import START_TIMEOUT_S
from asyncoll.transport.keys import KEY_BYTES

T = TypeVar("T")
# The processes of actors have this time to end by themselves.
_END_S = 5.0
_ONE_CPU = {"CPU": 1.0}


def run(
    main: Callable[..., Coroutine[Any, Any, T]],
    *args: Any,
    ranks: int,
    resources_per_rank: Mapping[str, float] = _ONE_CPU,
    placement: Placement = "pack",
) -> list[T]:
    """Run `await main(comm, *args)` at `ranks` ranks, each an actor of Ray, and return their results.

    Ray is initialized as for any first call of Ray, unless it is already. Ranks of one node share memory; ranks of
    different nodes exchange messages, with a key that is made for this call. Ray shows each line that a rank prints,
    with its rank in front. The call blocks, also in a notebook; in a coroutine use `asyncio.to_thread`.

    Inside a placement group whose children run in it (a trial of Ray Tune), the ranks run in its bundles, and
    `placement` has no effect.

    If a rank fails, all others are cancelled, and killed if they go on for 5 s. Ctrl-C does the same. When `run`
    returns, or raises, all its actors have been ended; Ray may need a moment until their processes are gone.

    Args:
        main: an `async def`; its first argument is the `Communicator` of all ranks. Ray serializes it, its arguments
            and its results by cloudpickle.
        args: its other arguments, the same for each rank.
        ranks: the number of ranks, from 1 on.
        resources_per_rank: what Ray reserves for each rank, as {"CPU": 1, "GPU": 1}; own resources, too.
        placement: "pack" (on few nodes), "spread" (over many), "strict_pack" (on one), "strict_spread" (on one each).

    Returns:
        The results of `main`, by rank.

    Raises:
        UsageError: an argument is not as above; or `main` or `args` cannot be serialized.
        DeadlineError: the ranks have found no room, or have not started, within 300 s, or the `asyncoll.deadline` that
            holds here. The message says what is missing.
        RemoteError: `main` has raised an exception; the one of the rank that failed by itself. Notes name the others.
        PeerLostError: the process of a rank has died.
    """
    needed = _check(main, ranks, resources_per_rank, placement)
    left_s = remaining_s()
    ends_s = time.monotonic() + min(START_TIMEOUT_S, math.inf if left_s is None else left_s)
    program = [_put(main, args)]
    secret = secrets.token_bytes(KEY_BYTES)
    with placed(ranks, needed, placement, ends_s - time.monotonic()) as options, _started(options) as actors:
        places = _places(actors, ends_s)
        # A call goes from the driver to the actor; the arguments of a constructor are kept by Ray's control store.
        address = "127.0.0.1" if len({place.node for place in places}) == 1 else places[0].address
        calls = [actor.run.remote(actors[0], address, secret, program) for actor in actors]
        return RankWatch(actors, places, calls).results()


def _check(main: Any, ranks: Any, resources: Any, placement: Any) -> dict[str, float]:
    if not inspect.iscoroutinefunction(main):
        raise UsageError(f"asyncoll.ray.run needs an `async def main(comm, ...)`, got {main!r}")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise UsageError(f"ranks={ranks!r}: give a whole number from 1 on")
    if not isinstance(resources, Mapping):
        raise UsageError(f"resources_per_rank={resources!r}: give a mapping, as {{'CPU': 1}}")
    return check_resources(resources, placement)


def _put(main: Any, args: tuple[Any, ...]) -> Any:
    try:
        return ray.put((main, args))
    except TypeError as error:
        raise UsageError(
            f"main, what it refers to, or its arguments cannot be sent to the ranks: {error}; make such things in "
            "`main`, as locks, files and connections"
        ) from error


@contextlib.contextmanager
def _started(options: Sequence[Mapping[str, Any]]) -> Iterator[list[Any]]:
    """An actor for each rank. In the end their processes end: by themselves, or they are killed."""
    actors: list[Any] = []
    try:
        for rank, its in enumerate(options):
            actors.append(ray.remote(Rank).options(**its, max_restarts=0).remote(rank, len(options)))
        yield actors
    finally:
        try:
            ray.wait([actor.__ray_terminate__.remote() for actor in actors], num_returns=len(actors), timeout=_END_S)
        finally:
            for actor in actors:
                ray.kill(actor)


def _places(actors: Sequence[Any], ends_s: float) -> list[ActorPlace]:
    """Where the ranks are, once all actors have started."""
    calls = [actor.place.remote() for actor in actors]
    _, late = ray.wait(calls, num_returns=len(calls), timeout=max(ends_s - time.monotonic(), 0.0))
    if late:
        missing = tuple(rank for rank, call in enumerate(calls) if call in late)
        which = ", ".join(map(str, missing))
        raise DeadlineError(f"the actors of these ranks have not started in time: {which}", missing=missing)
    return [_place(rank, call) for rank, call in enumerate(calls)]


def _place(rank: int, call: Any) -> ActorPlace:
    try:
        place: ActorPlace = ray.get(call)
    except ray.exceptions.RayError as error:
        raise PeerLostError(rank, f"its actor has not started: {' '.join(str(error).split())}") from error
    return place
