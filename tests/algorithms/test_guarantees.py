"""`help` of every call of a communicator tells the guarantees that it shares with others."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from asyncoll import BlockingCommunicator, Communicator
from asyncoll.algorithms.guarantees import COLLECTIVE, guarantees, round_guarantees

CALLS = [
    name
    for name, method in inspect.getmembers(Communicator, inspect.isfunction)
    if not name.startswith("_") and inspect.signature(method).return_annotation.startswith("Coroutine")
]
ERRORS = ("UsageError", "ClosedError", "MismatchError", "PeerLostError", "AbortedError", "DeadlineError")
ROUNDS = [
    name for name in CALLS if {"weight", "sync_every"} <= {*inspect.signature(getattr(Communicator, name)).parameters}
]


def help_of(name: str, cls: type = Communicator) -> str:
    """What `help` prints below the signature, on one line."""
    return " ".join((inspect.getdoc(getattr(cls, name)) or "").split())


def test_the_calls_are_found():
    assert {"allreduce", "barrier", "send", "join", "sparse_allreduce", "gossip", "split"} <= set(CALLS)
    assert [f"{kind}_allreduce" for kind in ("group", "majority", "policy", "quorum", "solo")] == ROUNDS


@pytest.mark.parametrize("name", CALLS)
def test_help_tells_who_calls_what_a_cancellation_does_and_all_errors(name):
    told = help_of(name)
    assert any(told.count(f"{who}: ") == 1 for who in ("Collective", "Not collective", "Point to point")) or (
        name == "join" and "Every rank calls it once" in told
    )
    assert "Cancellation" in told
    positions = [told.index(f" {error}: when ") for error in ERRORS]
    assert positions == sorted(positions)
    assert told.count("DeadlineError end the communicator: every pending and later call at every rank raises") == 1
    assert not any(gap in told for gap in ("{}", ": .", ": ;", ".;"))


@pytest.mark.parametrize("name", ROUNDS)
def test_help_tells_all_arguments_of_a_round(name):
    told = help_of(name)
    parameters = [each for each in inspect.signature(getattr(Communicator, name)).parameters if each != "self"]
    positions = [told.index(f" {parameter}: ", told.index("Args:")) for parameter in parameters]
    assert positions == sorted(positions)


def test_calls_that_return_handles_have_the_same_help():
    own = {"recv_any", "gossip", "split"}
    assert all(help_of(name, BlockingCommunicator) == help_of(name) for name in CALLS if name not in own)


def test_entries_of_the_source_complete_or_replace_the_shared_ones():
    def call(self, x: object, *, sync_every: int) -> int:
        """Do it.

        Args:
            sync_every: every so many
                rounds.

        Returns:
            A number.

        Raises:
            ClosedError: when called: always.
            NonFiniteError: when awaited: never.

        Example:

            call(1)
        """
        return 0

    before = inspect.signature(call)
    assert round_guarantees(COLLECTIVE)(call) is call, "no function is put around a call"
    assert inspect.signature(call) == before
    told = help_of_function(call)
    assert told.startswith("Do it. Collective: every rank")
    assert "Args: x: this rank's contribution" in told
    assert "sync_every: every so many rounds. Returns: A number. Raises: UsageError: when called: `x`" in told
    assert "ClosedError: when called: always. MismatchError" in told
    assert "NonFiniteError: when awaited: never. MismatchError, PeerLostError, AbortedError" in told
    assert told.endswith("Example: call(1)")


def test_an_entry_of_the_source_enters_a_shared_sentence():
    def call(self) -> None:
        """Do it.

        Raises:
            UsageError: it is done.
            MismatchError: other operation.
        """

    told = help_of_function(guarantees()(call))
    assert "UsageError: when called: it is done; or this thread runs no event loop." in told
    assert "made a different call at this position: other operation. PeerLostError" in told


def test_arguments_say_what_may_be_wrong_and_what_may_differ():
    def reduce(self, x: object, root: int, op: int) -> None:
        """Do it."""

    def send(self, dest: int) -> None:
        """Do it.

        Raises:
            MismatchError: other things.
        """

    def stop(self) -> None:
        """Do it.

        Raises:
            UsageError: it is done.
        """

    told = help_of_function(guarantees()(reduce))
    assert "called: `x` is not such a tensor, `op` is not defined for its dtype, or `root` is no rank; or this" in told
    assert "at this position: other operation, dtype, number of elements, `op` or root. PeerLostError" in told
    told = help_of_function(guarantees()(send))
    assert "called: `dest` is no other rank; or this thread" in told
    assert "at this position: other things. PeerLostError" in told
    told = help_of_function(guarantees()(stop))
    assert "called: it is done; or this thread" in told
    assert "at this position: other operation. PeerLostError" in told


def test_a_result_of_rounds_is_told_unless_the_source_tells_another():
    def one(self) -> None:
        """Do it."""

    def other(self) -> None:
        """Do it.

        Returns:
            A number.
        """

    assert "Returns: A `Reduction`: which round" in help_of_function(round_guarantees()(one))
    assert "Returns: A number. Raises:" in help_of_function(round_guarantees()(other))


def help_of_function(call) -> str:
    return " ".join((inspect.getdoc(call) or "").split())


def test_without_docstrings_the_package_works():
    code = "from asyncoll import Communicator; assert Communicator.allreduce.__doc__ is None"
    subprocess.run([sys.executable, "-OO", "-c", code], check=True, timeout=60)
