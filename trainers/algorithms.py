"""The algorithms that the program trains with. A new one is an entry in `ALGORITHMS`, and nothing else.

The command line, the settings, `list`, `compare` and the tests of the program follow from the entries.
"""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click

import asyncoll
from asyncoll.extending import policies
from asyncoll.testing import Waiting
from asyncoll.training import (
    ADPSGD,
    DCASGD,
    DCS3GD,
    DPSGD,
    SGP,
    AllreduceSGD,
    EagerSGD,
    LocalSGD,
    OkTopkSGD,
    OverlappedSGD,
    ParameterServerSGD,
    Trainer,
    WagmaSGD,
)

POSITIVE = click.IntRange(min=1)
NATURAL = click.IntRange(min=0)
LEAST_ZERO = click.FloatRange(min=0.0)
SHARE = click.FloatRange(0.0, 1.0, min_open=True)
_OF_CLASS: Any = object()


class _Reduction(click.Choice[str]):
    """A reduction by its name."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if isinstance(value, asyncoll.ReduceOp) else asyncoll.ReduceOp(super().convert(value, param, ctx))


class _Start(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """When a round starts: a rule, or the policy NAME that the Python file FILE registers."""

    name = "solo|majority|quorum|FILE:NAME"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        file, _, name = value.rpartition(":")
        if not file and name not in ("solo", "majority", "quorum"):
            self.fail(f"{value!r:.80} is none of {self.name}", param, ctx)
        if file and not Path(file).is_file():
            self.fail(f"there is no file {file!r:.200}", param, ctx)
        if file:
            runpy.run_path(file)
            if name not in policies():
                self.fail(f"{file!r:.200} registers no policy {name!r:.80}, but {', '.join(policies())}", param, ctx)
        return name


class Option(NamedTuple):
    """A keyword argument of an algorithm's class, which is a flag of its command."""

    name: str
    kind: Any  # click's type; bool for a flag without a value
    help: str
    default: Any = _OF_CLASS  # that of the class, unless the program has a better one


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An algorithm: its class, its source, and how the program makes one.

    `waiting` tells, from the options and the number of ranks, which ranks a round waits for; None if there is no bound
    of its time. `is_seeded`: the class takes the `seed`. `is_observed`: the class calls `observe(round, own, mean)`
    with each average of all models. `is_weighted`: it averages gradients by the `weight` of a step. `is_served`: a rank
    answers others between its steps, so it computes in a thread.
    """

    trainer: type[Trainer]
    summary: str
    paper: str
    options: tuple[Option, ...] = ()
    waiting: Callable[[Mapping[str, Any], int], Waiting | None] = lambda options, ranks: None
    is_seeded: bool = False
    is_observed: bool = False
    is_weighted: bool = False
    is_served: bool = False

    def defaults(self) -> dict[str, Any]:
        """The values of the options that are not given."""
        parameters = inspect.signature(self.trainer).parameters
        return {
            option.name: parameters[option.name].default if option.default is _OF_CLASS else option.default
            for option in self.options
        }


def _eager(options: Mapping[str, Any], ranks: int) -> Waiting | None:
    if options["partial"] in policies():
        return None
    quorum = options["quorum"] or ranks // 2 + 1
    return Waiting(options["partial"], quorum, options["candidates"], options["sync_every"])


_EVERY_STEP = Waiting("synchronous", steps=0)  # each rank computes all steps, and a late one may catch up
_STALENESS = Option(
    "staleness", NATURAL, "Steps that a worker may be ahead of the slowest one (by default as many as it likes)."
)
_SYNC = Option("sync_every", NATURAL, "Wait for all ranks in every N-th round (0: never).")

ALGORITHMS: dict[str, Algorithm] = {
    "allreduce_sgd": Algorithm(
        AllreduceSGD,
        "Synchronous data-parallel SGD.",
        "the baseline of all papers; Li et al., PPoPP 2020, section 3",
        waiting=lambda options, ranks: Waiting("synchronous"),
        is_weighted=True,
    ),
    "overlapped_sgd": Algorithm(
        OverlappedSGD,
        "Synchronous SGD: buckets of gradients are averaged while backward() continues.",
        "DenseOvlp in Li and Hoefler, PPoPP 2022, section 5",
        (Option("bucket_bytes", POSITIVE, "Least bytes of a bucket of gradients."),),
        waiting=lambda options, ranks: Waiting("synchronous"),
    ),
    "eager_sgd": Algorithm(
        EagerSGD,
        "Eager-SGD: partial allreduces of gradients, which do not wait for slow ranks.",
        "Li et al., PPoPP 2020, section 5",
        (
            Option("partial", _Start(), "The rule by which a round starts, or the policy NAME that FILE registers."),
            Option("candidates", POSITIVE, "Ranks drawn for each round; the first of them to arrive starts it."),
            Option("quorum", POSITIVE, "Ranks that a round waits for (by default more than half)."),
            Option(
                "history",
                NATURAL,
                "Results kept for late ranks (by default 64; 0 with --average-every).",
            ),
            Option(
                "average_every", NATURAL, "Rounds between averages of the models, without history (0: one at the end)."
            ),
            _SYNC,
            Option(
                "op", _Reduction(["avg", "avg_active"]), "Divide by the number of all ranks, or of the active ones."
            ),
        ),
        waiting=_eager,
        is_seeded=True,
        is_weighted=True,
    ),
    "wagma_sgd": Algorithm(
        WagmaSGD,
        "WAGMA-SGD: changing groups average their models, and do not wait for slow ranks.",
        "Li et al., TPDS 2021, section IV",
        (
            Option("group_size", POSITIVE, "Ranks that average their models (by default the square root of all)."),
            _SYNC,
            Option(
                "order",
                click.Choice(["step-then-average", "average-then-step"]),
                "The paper's order, or that of its authors' code.",
            ),
            Option("fixed", bool, "The same groups in every round."),
        ),
        waiting=lambda options, ranks: Waiting("solo", sync_every=options["sync_every"]),
        is_observed=True,
    ),
    "dc_s3gd": Algorithm(
        DCS3GD,
        "DC-S3GD: synchronous, one step stale and compensated; communication overlaps computation.",
        "Rigazzi, DLS 2019, section III-C",
        (Option("lambda0", LEAST_ZERO, "Delay compensation, as a share of the gradient (0: none)."),),
        waiting=lambda options, ranks: _EVERY_STEP,  # a delay may be hidden by the step after it
    ),
    "oktopk_sgd": Algorithm(
        OkTopkSGD,
        "Ok-Topk SGD: sparse allreduces send the largest updates and keep the others; and its rivals.",
        "Li and Hoefler, PPoPP 2022, section 4",
        (
            Option(
                "algorithm",
                click.Choice(["oktopk", "topka", "topkdsa", "gtopk", "gaussiank", "dense"]),
                "The allreduce.",
            ),
            Option("density", SHARE, "The share of all elements that is sent.", 0.02),
            Option(
                "residual",
                click.Choice(["updates", "gradients"]),
                "What residuals hold: as in the paper (by default with plain SGD), or in its authors' code.",
            ),
            Option("thresholds_every", POSITIVE, "Number of rounds for which a threshold is used (τ')."),
            Option("regions_every", POSITIVE, "Number of rounds for which the regions are used (τ)."),
            Option("warm_up", NATURAL, "Dense rounds at the start."),
        ),
        waiting=lambda options, ranks: Waiting("synchronous"),
    ),
    "local_sgd": Algorithm(
        LocalSGD,
        "Local SGD: several local steps, then the mean of all models.",
        "Stich, ICLR 2019, algorithm 1; McMahan et al., AISTATS 2017",
        (Option("every", POSITIVE, "Local steps from one average to the next (H)."),),
        waiting=lambda options, ranks: Waiting("synchronous", steps=options["every"]),
    ),
    "dpsgd": Algorithm(
        DPSGD,
        "D-PSGD: each rank averages its model with those of its neighbours in a ring.",
        "Lian et al., NeurIPS 2017, algorithm 1",
        waiting=lambda options, ranks: _EVERY_STEP,
    ),
    "sgp": Algorithm(
        SGP,
        "SGP: push-sum averages over a directed graph that changes in each step.",
        "Assran et al., ICML 2019, algorithm 1",
        (
            Option("peers", POSITIVE, "Ranks that a rank pushes to in each step."),
            Option("overlap", bool, "The next step hides the exchange."),
        ),
        waiting=lambda options, ranks: _EVERY_STEP,
    ),
    "adpsgd": Algorithm(
        ADPSGD,
        "AD-PSGD: each rank averages its model with one other rank's at a time, asynchronously.",
        "Lian et al., ICML 2018, algorithm 1",
        (Option("graph", click.Choice(["ring", "exponential"]), "The neighbours among which a partner is drawn."),),
        waiting=lambda options, ranks: _EVERY_STEP,
        is_seeded=True,
    ),
    "parameter_server": Algorithm(
        ParameterServerSGD,
        "A parameter server at rank 0 applies each gradient as it arrives.",
        "Dean et al., NeurIPS 2012, section 4.1; Ho et al., NeurIPS 2013, section 2",
        (_STALENESS,),
        is_served=True,
    ),
    "dc_asgd": Algorithm(
        DCASGD,
        "DC-ASGD: a parameter server that compensates for the delay of gradients.",
        "Zheng et al., ICML 2017, section 3",
        (
            Option("lambda0", LEAST_ZERO, "Delay compensation (by default 0.04; adaptive: 2)."),
            Option("adaptive", bool, "Divide it by the root of the mean square of the gradients."),
            Option("decay", click.FloatRange(0.0, 1.0, max_open=True), "The share of that mean that an update keeps."),
            _STALENESS,
        ),
        is_served=True,
    ),
}
