"""The number of rounds after which an update has reached every rank of WAGMA-SGD: by rule, measured, and log_S P.

The formula is of section V-B of Li et al., "Breaking (global) barriers in parallel stochastic optimization with
wait-avoiding group averaging", TPDS 2021.

    python benchmarks/group_propagation.py [--worlds 4:2,8:2,...,1024:32]

A world is RANKS:GROUP_SIZE. `by rule` follows `algorithms.grouping.partition` from each of the first rounds on, and
gives the fewest and the most rounds it takes. `measured` runs `comm.group_allreduce` in virtual time: every rank begins
with a model of its own (a unit vector), and all average in their groups; an update has arrived where its element is not
zero. `apart` is how far the models then are from the global average, relative to it, after the formula's rounds: 0 says
that two rounds among sqrt(P) ranks were as good as an allreduce. With fixed groups an update never leaves its group.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from common import Record, parser

from asyncoll import AVG, Communicator
from asyncoll.algorithms.rounds.grouping import partition
from asyncoll.testing import simulate

WORLDS = (
    "4:2,8:2,8:4,16:4,32:4,64:8,128:8,256:16,512:8,1024:2,1024:4,1024:32,"  # powers of two: sqrt(P), and others
    "6:2,6:3,9:3,12:3,12:4,13:4,17:4,25:5,100:10,100:8,125:5,243:3,500:22,1000:10,1000:32"
)
PERIOD_S = 1.0  # of a round, in virtual time: all ranks call at the same moment, so that no model is stale
STARTS = range(1, 13)  # rounds from which propagation is followed


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--worlds", type=worlds, default=worlds(WORLDS))
    record = Record(options, "group_propagation")
    rows = [world(ranks, group_size) for ranks, group_size in record.arguments.worlds]
    record.table("rounds until an update has reached every rank (paper: log_S P, section V-B)", table(rows))
    plot(record, rows)
    record.write(rows)


def worlds(text: str) -> list[tuple[int, int]]:
    """`64:8,256:16`: worlds of 64 ranks in groups of 8, and so on."""
    pairs = (part.split(":") for part in text.split(","))
    return [(int(ranks), int(group_size)) for ranks, group_size in pairs]


def propagation(size: int, group_size: int, first: int = 1) -> int:
    """The number of rounds, from round `first` on, until the contribution of each rank has reached all ranks.

    `group_size` must be at least 2, unless `size` is 1: with groups of one rank this does not return.
    """
    all_ranks = (1 << size) - 1
    reached = [1 << rank for rank in range(size)]  # by rank: a bit for each rank whose contribution has reached it
    rounds = 0
    while any(mask != all_ranks for mask in reached):
        for group in partition(size, group_size, first + rounds):
            union = 0
            for rank in group:
                union |= reached[rank]
            for rank in group:
                reached[rank] = union
        rounds += 1
    return rounds


def world(ranks: int, group_size: int) -> dict[str, Any]:
    formula = rounds_by_formula(ranks, group_size)
    by_rule = [propagation(ranks, group_size, first) for first in STARTS]
    limit = max(by_rule)
    dynamic = averaged(ranks, group_size, limit, fixed=False)
    fixed = averaged(ranks, group_size, limit, fixed=True)
    return {
        "ranks": ranks,
        "group_size": group_size,
        "formula": formula,
        "by_rule": by_rule,
        "measured": next((t for t, reached in enumerate(dynamic["reached"], 1) if reached == ranks), None),
        "dynamic": dynamic,
        "fixed": fixed,
    }


def rounds_by_formula(ranks: int, group_size: int) -> int:
    """ceil(log_S P), in whole numbers."""
    rounds = 0
    while group_size**rounds < ranks:
        rounds += 1
    return rounds


def averaged(ranks: int, group_size: int, rounds: int, *, fixed: bool) -> dict[str, list[float]]:
    """After each round: the number of ranks that the least spread update has reached, and the distance of the models
    from their average."""

    async def rank(comm: Communicator) -> list[tuple[np.ndarray[Any, Any], float]]:
        loop, model, found = asyncio.get_running_loop(), np.zeros(ranks), []
        model[comm.rank] = 1.0
        for number in range(1, rounds + 1):
            await asyncio.sleep(number * PERIOD_S - loop.time())
            done = await comm.group_allreduce(model, group_size=group_size, op=AVG, fixed=fixed)
            groups = partition(ranks, group_size, 1 if fixed else number)
            assert done.included
            assert done.round == number
            assert done.active == len(done.group)
            assert done.group in groups
            found.append((model > 0, float(np.abs(ranks * model - 1).max())))
        return found

    everyones = simulate(ranks, rank).results
    reached = [int(sum(found[t][0].astype(int) for found in everyones).min()) for t in range(rounds)]
    return {"reached": reached, "apart": [max(found[t][1] for found in everyones) for t in range(rounds)]}


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    lines = [["ranks", "groups of", "log_S P, up", "by rule, from any round", "measured", "apart"]]
    lines[0] += ["fixed: reached", "fixed: apart"]
    for row in rows:
        least, most = min(row["by_rule"]), max(row["by_rule"])
        by_rule = str(least) if least == most else f"{least} to {most}"
        at = min(row["formula"], len(row["dynamic"]["apart"])) - 1
        dynamic = [by_rule, str(row["measured"]), f"{row['dynamic']['apart'][at]:.2g}"]
        fixed = [f"{row['fixed']['reached'][-1]} of {row['ranks']}", f"{row['fixed']['apart'][at]:.2g}"]
        lines.append([str(row["ranks"]), str(row["group_size"]), str(row["formula"]), *dynamic, *fixed])
    return lines


def plot(record: Record, rows: list[dict[str, Any]]) -> None:
    """The largest world of each kind: the share of ranks that an update has reached, by round."""
    largest = max(row["ranks"] for row in rows)
    with record.figure() as (axes,):
        for colour, row in enumerate(row for row in rows if row["ranks"] == largest):
            for kind, style in (("dynamic", "-"), ("fixed", "--")):
                reached = [1 / largest, *(count / largest for count in row[kind]["reached"])]
                label = f"{kind} groups of {row['group_size']}"
                axes.plot(range(len(reached)), reached, style, color=f"C{colour}", marker="o", label=label)
        axes.set(yscale="log", xlabel="round", ylabel="ranks that an update has reached, share")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_title(f"{largest} ranks (virtual time)")
        axes.legend()


if __name__ == "__main__":
    main()
