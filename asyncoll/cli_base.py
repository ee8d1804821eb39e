"""What all commands share: how they end, and the options that mean the same in each."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import click

from asyncoll import kinds
from asyncoll.errors import UsageError

INTERRUPTED = 130  # by Ctrl-C
RANKS_MAX = 1024
# Former spellings, and those of other launchers, with the option that each means in a command that has it.
MEANT = {
    "--ranks": "--sizes",
    **dict.fromkeys(("--rank", "--np", "--nproc", "--nprocs", "--nproc-per-node", "--nproc_per_node"), "--ranks"),
    **dict.fromkeys(("--key", "--keyfile"), "--key-file"),
    **dict.fromkeys(("--report", "--output"), "--json"),
    **dict.fromkeys(("--repeat", "--repeats"), "--seeds"),
    **dict.fromkeys(("--backend", "--via"), "--transport"),
}


class _Formatter(click.HelpFormatter):
    """Helps with bold headings, on a terminal."""

    def write_heading(self, heading: str) -> None:
        super().write_heading(click.style(heading, bold=True))


class _Context(click.Context):
    formatter_class = _Formatter


class Command(click.Command):
    """Checks the environment, and reports a UsageError of the library as click reports its own.

    Ctrl-C ends it with 130, without a traceback.
    """

    context_class = _Context
    checks_environment = True

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            meant = MEANT.get(error.option_name, "")
            if not _has(self, meant):
                raise
            told = f"No such option {error.option_name!r}. Did you mean {meant!r}?"
            raise click.NoSuchOption(error.option_name, told, ctx=ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            if ctx.obj is not None:
                ctx.obj()  # from here on Ctrl-C is KeyboardInterrupt
            if self.checks_environment:
                from asyncoll.transport import settings  # raises UsageError for a wrong ASYNCOLL_CORE

                settings.check(os.environ)
            return super().invoke(ctx)
        except UsageError as error:
            raise click.UsageError(str(error), ctx) from error
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)


class CommandGroup(click.Group):
    """A group of such commands. Without arguments it prints its help, which is no error."""

    command_class = Command
    context_class = _Context

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args or ["--help"])
        except click.NoSuchOption as error:
            owners = [name for name, command in self.commands.items() if _has(command, error.option_name)]
            if not owners:
                raise
            told = f"No such option {error.option_name!r} here: it belongs after {' or '.join(owners)}."
            raise click.NoSuchOption(error.option_name, told, ctx=ctx) from None


def _has(command: click.Command, option: str) -> bool:
    return any(option in parameter.opts for parameter in command.params)


class Count(click.IntRange):
    """A range of whole numbers."""

    name = "whole number"


def ranks_option(least: int = 1, most: int | None = RANKS_MAX, **settings: Any) -> Callable[[Any], Any]:
    """-n, --ranks: the number of ranks."""
    settings = {"default": 2, "show_default": True, "help": "Number of ranks.", **settings}
    return click.option("-n", "--ranks", "ranks", metavar="N", type=Count(least, most), **settings)


class Seeds(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """FROM:TO without TO, or a count N, which is 0:N."""

    name = "FROM:TO"
    _MOST = 1_000_000

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> range:
        if isinstance(value, range):
            return value
        found = re.fullmatch("(?:([0-9]{1,18}):)?([0-9]{1,18})", value)
        seeds = range(int(found[1] or 0), int(found[2])) if found else range(0)
        if not 0 < len(seeds) <= self._MOST:
            remedy = f"use FROM:TO, such as 0:200, or a count; at most {self._MOST} seeds, of at most 18 digits"
            self.fail(f"{value!r:.80} are no seeds: {remedy}", param, ctx)
        return seeds


def seeds_option(default: str, meaning: str) -> Callable[[Any], Any]:
    """--seeds FROM:TO, and --seed for one of them: `chosen_seeds` of both."""
    one = click.option("--seed", metavar="N", type=Count(0, 10**18 - 1), help="The same with this seed alone.")
    several = click.option("--seeds", type=Seeds(), default=default, show_default=True, help=meaning)
    return lambda command: several(one(command))


class RankCounts(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """Numbers of ranks: 1-3,7 is 1, 2, 3 and 7."""

    name = "RANKS,..."
    _PART = re.compile("([0-9]{1,18})(?:-([0-9]{1,18}))?")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        sizes: list[int] = []
        for part in value.split(","):
            found = self._PART.fullmatch(part)
            numbers = range(int(found[1]), int(found[2] or found[1]) + 1) if found else range(0)
            if not numbers or numbers[0] < 1 or numbers[-1] > RANKS_MAX:
                remedy = f"use a list such as 1-9,12,13, up to {RANKS_MAX}"
                self.fail(f"{part!r:.80} is no number of ranks: {remedy}", param, ctx)
            sizes += numbers
        return sizes


class Kinds(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """Kinds of worlds, which may name a method after a colon."""

    name = "KIND,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        if isinstance(value, list):
            return value
        chosen = list(kinds.ALL) if value == "all" else value.split(",")
        for kind in chosen:
            if kind.partition(":")[0] not in kinds.ALL:
                self.fail(f"unknown kind {kind!r:.80}: use all, or some of {', '.join(kinds.ALL)}", param, ctx)
        return list(dict.fromkeys(chosen))


def chosen_seeds(seed: int | None, seeds: range) -> range:
    """The seeds that the options of the command say."""
    if seed is None:
        return seeds
    if click.get_current_context().get_parameter_source("seeds") is not click.core.ParameterSource.DEFAULT:
        raise click.UsageError("give --seed or --seeds, not both")
    return range(seed, seed + 1)


def json_option(meaning: str) -> Callable[[Any], Any]:
    """--json: the output is for programs."""
    return click.option("--json", "as_json", is_flag=True, help=meaning)
