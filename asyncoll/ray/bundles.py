"""Where the ranks of a world of Ray run: bundles of a placement group, which Ray reserves together."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncoll.errors import DeadlineError, UsageError

Placement = Literal["pack", "spread", "strict_pack", "strict_spread"]
_LOOK_S = 5.0  # the first warning; the time to each further one doubles
_UNITS = 10_000  # in which Ray counts one of a resource
logger = logging.getLogger("asyncoll")


def check_resources(resources: Mapping[str, float], placement: str) -> dict[str, float]:
    """The resources of a rank that are not 0. Raises UsageError for those, or a placement, that Ray does not know."""
    if placement not in get_args(Placement):
        raise UsageError(f"placement={placement!r}: give one of {', '.join(get_args(Placement))}")
    for name, amount in resources.items():
        is_number = isinstance(amount, int | float) and not isinstance(amount, bool)
        if not (isinstance(name, str) and name and is_number and 0 <= amount < math.inf):
            raise UsageError(f"resources_per_rank has {name!r}: {amount!r}; give numbers from 0 on, as {{'CPU': 1}}")
        if amount > 1 and name == "GPU" and amount % 1:
            raise UsageError(f"resources_per_rank has 'GPU': {amount!r}; give a whole number, or a part of one GPU")
    needed = {name: amount for name, amount in resources.items() if amount}
    if not needed:
        raise UsageError("resources_per_rank has nothing that Ray could reserve: give at least a part of a CPU")
    try:
        ray.remote(object).options(**_options(needed))
    except ValueError as error:  # less than a ten-thousandth, say
        raise UsageError(f"resources_per_rank={needed}: {error}") from error
    return needed


@contextlib.contextmanager
def placed(size: int, needed: dict[str, float], placement: str, limit_s: float) -> Iterator[list[dict[str, Any]]]:
    """Reserve room for the ranks: the options of each rank's actor, the ranks of a node one after another.

    Inside a placement group that its children share, as that of a trial of Ray Tune, the ranks run in its bundles.
    Otherwise they have a group of their own, whose end ends them. Raises DeadlineError if there is no room in time.
    """
    options = {"num_cpus": 0, **_options(needed)}
    if (around := _group_around()) is not None:
        _check_room(around, size, needed)
        strategy = PlacementGroupSchedulingStrategy(around)
        yield [{**options, "scheduling_strategy": strategy}] * size
        return
    group = placement_group([needed] * size, strategy=placement.upper())
    try:
        _await_room(group, size, needed, placement, limit_s)
        yield [
            {**options, "scheduling_strategy": PlacementGroupSchedulingStrategy(group, bundle)}
            for bundle in _by_node(group, size)
        ]
    finally:
        remove_placement_group(group)


def _options(needed: Mapping[str, float]) -> dict[str, Any]:
    names = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    own = {name: amount for name, amount in needed.items() if name not in names}
    return {names[name]: amount for name, amount in needed.items() if name in names} | {"resources": own}


def _group_around() -> PlacementGroup | None:
    """The placement group of this process, if those that it starts are to run there."""
    captures = ray.get_runtime_context().should_capture_child_tasks_in_placement_group
    return ray.util.get_current_placement_group() if captures else None


def _check_room(group: PlacementGroup, size: int, needed: Mapping[str, float]) -> None:
    """Raise UsageError if the bundles of a group that another program has made have no room for the ranks."""
    bundles = group.bundle_specs
    if _room(bundles, _held(), needed) < size:
        raise UsageError(
            f"{size} ranks of {needed} do not fit into the placement group around this program, which has {bundles}: "
            "give it a bundle for itself and one for each rank; for a trial of Ray Tune: "
            f"tune.with_resources(trial, tune.PlacementGroupFactory([{{'CPU': 1}}] + [{needed}] * {size}))"
        )


def _room(bundles: Sequence[Mapping[str, float]], held: Mapping[str, float], needed: Mapping[str, float]) -> int:
    """How many ranks have room in `bundles` beside this process, which keeps `held` of one of them.

    Ray does not tell of which one: that which costs least room.
    """
    costs = []
    for bundle in bundles:
        if _fit(bundle, held):
            rest = {name: amount - held.get(name, 0) for name, amount in bundle.items()}
            costs.append(_fit(bundle, needed) - _fit(rest, needed))
    return sum(_fit(bundle, needed) for bundle in bundles) - min(costs, default=0)


def _held() -> dict[str, float]:
    """The resources that this process keeps while it waits. A task gives its processors to those that it starts."""
    context = ray.get_runtime_context()
    held: dict[str, float] = context.get_assigned_resources()
    return {name: amount for name, amount in held.items() if amount and (name != "CPU" or context.get_actor_id())}


def _fit(available: Mapping[str, float], needed: Mapping[str, float]) -> int:
    """How many processes that need `needed` have room. By whole numbers, because 1 // 0.1 is 9."""
    return min((round(available.get(name, 0) * _UNITS) // round(needed[name] * _UNITS) for name in needed), default=1)


def _await_room(group: PlacementGroup, size: int, needed: dict[str, float], placement: str, limit_s: float) -> None:
    began_s = time.monotonic()
    pause_s = _LOOK_S
    # Ray waits for whole seconds, and rounds down: a wait for less than one would return at once, again and again.
    while not group.wait(math.ceil(min(pause_s, max(limit_s - (time.monotonic() - began_s), 0.1)))):
        waited_s = time.monotonic() - began_s
        shortage = _shortage(size, needed, placement)
        missing = f"{size} ranks of {needed} (placement={placement}) have no room yet: {shortage}"
        if waited_s >= limit_s:
            raise DeadlineError(f"{missing}; after {waited_s:.0f} s: start nodes, or ask for less")
        logger.warning("%s (%.0f s, of at most %g s)", missing, waited_s, round(limit_s, 1))
        pause_s *= 2


def _shortage(size: int, needed: Mapping[str, float], placement: str) -> str:
    """What the ranks need, beside what the nodes have; and whether there would be room if nothing else ran there."""
    total, free = ray.cluster_resources(), ray.available_resources()
    wanted = "; ".join(
        f"they need {size * amount:g} {name}, of {total.get(name, 0):g} in the cluster {free.get(name, 0):g} are free"
        for name, amount in needed.items()
    )
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fits = [_fit(node, needed) for node in nodes]
    most = {"strict_pack": max(fits, default=0), "strict_spread": sum(map(bool, fits))}.get(placement, sum(fits))
    never = f"; even when all is free, only {most} of these ranks fit" if most < size else ""
    return f"{wanted} ({len(nodes)} node{'s' * (len(nodes) != 1)}{never})"


def _by_node(group: PlacementGroup, size: int) -> list[int]:
    """The bundles in the order of the ranks: those of a node one after another."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return sorted(range(size), key=lambda bundle: (min(i for i in range(size) if nodes[i] == nodes[bundle]), bundle))
