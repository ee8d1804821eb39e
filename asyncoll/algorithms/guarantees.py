"""The guarantees that many calls share, written once: a decorator completes the docstrings of the calls with them.

The source of a call says what is special about it; `help` and the site print all. Shared paragraphs come before the
arguments. Arguments and errors are merged by name. An entry of the source takes the place of `{}` in the shared entry,
or replaces one that has none. It replaces it, too, if it says when the error is raised. Without an entry of the source,
the names of the arguments say what may be wrong with them, and what may differ between ranks (`_FAULTS`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_POSITION = (
    "Collective: every rank of the communicator makes this call, at the same position among its collective calls."
)
_START = (
    "The call starts at once; the coroutine only waits for its end, so several calls may be under way, and may be "
    "awaited in any order."
)
COLLECTIVE_IF_AWAITED = f"{_POSITION} {_START}"
COLLECTIVE = f"{COLLECTIVE_IF_AWAITED} A call that is never awaited runs to its end all the same."
COLLECTIVE_IN_GRAPH = (
    f"{_POSITION} But a rank waits for its sources only. If `x` is longer than 1 MiB (2 MiB in shared memory), it "
    "waits for its destinations, too. In shared memory a rank is at most 4 calls ahead of the slowest rank. " + _START
)
LEAVE_ALONE = "Leave `x` alone from the call until the coroutine has ended."
READS = "`x` is only read, but must not change from the call until the coroutine has ended."
CANCELLATION = (
    "Cancellation of a call under way aborts the communicator, because the other ranks wait for this rank: their "
    "pending and later calls raise AbortedError."
)
CANCELLATION_IN_PLACE = (
    f"{CANCELLATION} `x` is no longer in use when CancelledError is raised; its content is undefined."
)
_AIM = "the round that it aims at (the one after the newest that this rank was given) is over already"
_TURNS = (
    "So a caller must count rounds (`Reduction.round`), never its own calls. Calls of one rank under one name take "
    "turns."
)
_STAYS = "Cancellation does not abort the communicator. The contribution stays in,"
_IN_USE = "the cancellation waits for its end. Afterwards `x` is no longer in use; its content is undefined."
ROUNDS = (
    "Not collective: ranks may make different numbers of calls. Each round includes every rank: with the contribution "
    "of its caller, with one that is staged there from before, or with none. The call starts at once; one that is "
    f"never awaited contributes all the same. If {_AIM}, the call stages its contribution and returns the newest "
    f"result at once. {_TURNS}",
    "Every contribution enters exactly one round: one that comes too late is added to the rank's next contribution and "
    "enters a later round, none is lost and none is counted twice. Contributions that are still staged when the world "
    "ends are dropped.",
    "`x` is reduced in place: it comes back as the result of round `Reduction.round`, with the same bits at every rank "
    "that is given that round. AVG divides by `size`, whatever the number of contributors, as in the paper.",
    LEAVE_ALONE,
    f"{_STAYS} the round goes on, and the next call reports it as missed or skipped. If a round has begun that uses "
    "the memory of `x` (by message, a long `x` without `history`; in shared memory, a registered `x`), " + _IN_USE,
    "A rank that has left its program no longer keeps any round waiting: it counts as arrived, with no new "
    "contribution. A rank that still runs its program, but no longer calls this name, does keep a synchronous round or "
    "a quorum waiting, unless it has called `join`.",
)
ROUNDS_IN_GROUPS = (
    f"Not collective: ranks may make different numbers of calls. The call starts at once. If {_AIM}, it returns the "
    f"newest result at once. {_TURNS} {LEAVE_ALONE}",
    f"{_STAYS} and the round goes on. If a round has begun that uses the memory of `x`, {_IN_USE}",
    "A rank that has left its program keeps no round waiting.",
)

_ARGUMENTS = {
    "op": "the reduction, as for `allreduce`.",
    "root": "the rank that gets the result; the same at every rank.",
}
_ROUND_ARGUMENTS = {
    "x": "this rank's contribution: a numpy array or torch tensor of any layout, writable; or a list of them, of any "
    "dtypes, which share one round, and of one `Metrics` at most.",
    "name": "at most 200 characters. `name` tells operations apart. Each has its own rounds, and its dtypes, numbers "
    "of elements, `op` and options are fixed by the first call at any rank. Shared memory has room for 1,024 names.",
    "op": "the reduction, as for `allreduce`, or AVG_ACTIVE: the sum divided by the number of contributors.",
    "seed": "of the draws; a 64-bit integer.",
    "sync_every": "each round whose number is a multiple of it waits for all ranks; 0: no round does.",
    "sync_offset": "the rounds that a program counts before the first one of `name`, as after a checkpoint. Rounds are "
    "synchronous where that count is a multiple of `sync_every`.",
    "history": "number of results before the newest that are kept for `Reduction.missed`.",
    "weight": "with AVG: the number of samples or tokens that `x` is a mean over. The result is then the mean over all "
    "of them, sum(weight * x) / sum(weight) over the contributions in the round. A weight of 0 contributes nothing, "
    "and a round in which all are 0 gives zeros. Whether calls of `name` have weights is fixed by the first one.",
}
_ERRORS = {
    "UsageError": "when called: {}; or this thread runs no event loop. Nothing has been sent, and this rank may call "
    "again.",
    "ClosedError": "when called, if this rank has left the world; when awaited, if it leaves meanwhile.",
    "MismatchError": "when awaited: another rank has made a different call at this position: {}.",
    "PeerLostError": "when awaited: a rank of the world is gone or frozen.",
    "AbortedError": "when awaited: a rank has aborted the communicator, has cancelled a collective call, or has left "
    "the world with an exception.",
    "DeadlineError": "when awaited: the call has taken longer than `asyncoll.deadline` or ASYNCOLL_DEADLINE_S allows.",
}
_ROUND_ERRORS = _ERRORS | {
    "UsageError": "when called: `x` or an option is not as described; or this thread runs no event loop. Nothing has "
    "been sent, and this rank may call again. When awaited, if there is no room for another name on this host, of "
    "which no other rank is told then, or no shared memory for the contribution.",
    "MismatchError": "when awaited: `name` stands for an operation with other dtypes, numbers of elements, `op` or "
    "options.",
    "AbortedError": "when awaited: a rank has aborted the communicator, has cancelled a collective call, or has left "
    "the world with an exception; or another host has no room for the name, which the error names.",
}
_ROUND_RESULT = "A `Reduction`: which round `x` holds, and whether this contribution is in it."
# By argument: what may be wrong with it, and what may differ between the ranks.
_FAULTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "x": ("`x` is not such a tensor", ("dtype", "number of elements")),
    "xs": ("`xs` is not such a sequence", ("dtype",)),
    "op": ("`op` is not defined for its dtype", ("`op`",)),
    "root": ("`root` is no rank", ("root",)),
    "dest": ("`dest` is no other rank", ()),
    "source": ("`source` is no other rank", ()),
    "tag": ("`tag` is no 64-bit integer", ()),
    "graph": ("there is no such graph", ("graph",)),
    "iteration": ("`iteration` is negative", ("iteration",)),
    "peers": ("`peers` is below 1, or not 1 for a ring", ("peers",)),
    "seed": ("`seed` is no 64-bit integer", ("seed",)),
}
_LASTING = (
    "MismatchError, PeerLostError, AbortedError and DeadlineError end the communicator: every pending and later call "
    "at every rank raises such an error: the same one, unless several ranks fail at the same time."
)

_SECTION = re.compile(r"\n\n(?=(?:Args|Returns|Raises|Source|Example):)")
_ENTRY = re.compile(r"^ {4}(\w+): ", re.M)
_WIDTH = 112  # as that of a docstring in a class, without its indentation


def guarantees(*paragraphs: str) -> Callable[[F], F]:
    """Complete the docstring of a call that is awaited: with these paragraphs, and with the errors that all raise."""
    return lambda call: _complete(call, paragraphs, _ARGUMENTS, _ERRORS)


def round_guarantees(*paragraphs: str) -> Callable[[F], F]:
    """The same for a call that takes part in wait-avoiding rounds, whose arguments and results are shared, too."""
    return lambda call: _complete(call, paragraphs, _ROUND_ARGUMENTS, _ROUND_ERRORS, _ROUND_RESULT)


def _complete(
    call: F, paragraphs: Iterable[str], arguments: Mapping[str, str], errors: Mapping[str, str], result: str = ""
) -> F:
    """`call` itself: no call passes through a function of this module."""
    if call.__doc__ is None:  # python -OO
        return call
    summary, *sections = _SECTION.split(inspect.cleandoc(call.__doc__))
    named = {section.partition(":")[0]: section for section in sections}
    parameters = [name for name in inspect.signature(call).parameters if name != "self"]
    if parameters:
        shared = {name: arguments.get(name, "") for name in parameters}
        named["Args"] = _merged("Args", named.get("Args", ""), shared, {})
    if result:
        named.setdefault("Returns", f"Returns:\n    {result}")
    raises = _merged("Raises", named.get("Raises", ""), errors, _faults(parameters))
    named["Raises"] = f"{raises}\n\n{_wrapped(_LASTING)}"
    order = ("Args", "Returns", "Raises", "Source", "Example")
    parts = summary, *map(_wrapped, paragraphs), *(named[name] for name in order if name in named)
    call.__doc__ = "\n\n".join(parts)
    return call


def _faults(parameters: Iterable[str]) -> dict[str, str]:
    """What a call with these parameters raises UsageError and MismatchError for."""
    faults = [fault for name, fault in _FAULTS.items() if name in parameters]
    wrong, different = [wrong for wrong, _ in faults], [each for _, different in faults for each in different]
    return {
        "UsageError": _listed(wrong, ", or "),
        "MismatchError": f"other {_listed(['operation', *different], ' or ')}",
    }


def _listed(parts: list[str], before_last: str) -> str:
    return before_last.join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))


def _merged(title: str, section: str, shared: Mapping[str, str], usual: Mapping[str, str]) -> str:
    """A section of the entries of `section` and of `shared`, in the order of the latter.

    `usual` has what takes the place of `{}` in an entry of `shared` that has none in `section`.
    """
    _, *parts = _ENTRY.split(section)
    own = {name: " ".join(text.split()) for name, text in zip(parts[::2], parts[1::2], strict=True)}
    entries = {name: _entry(text, own.get(name, ""), usual.get(name, "")) for name, text in shared.items()} | {
        name: text for name, text in own.items() if name not in shared
    }
    return f"{title}:\n" + "\n".join("    " + _wrapped(f"{name}: {text}", 8) for name, text in entries.items())


def _entry(shared: str, own: str, usual: str) -> str:
    if own.startswith("when ") or "{}" not in shared:
        return own or shared
    return shared.format(own.removesuffix(".") or usual)


def _wrapped(text: str, indent: int = 0) -> str:
    lines = re.findall(rf"(.{{1,{_WIDTH - indent}}})(?:\s|$)", text)
    return ("\n" + " " * indent).join(lines)
