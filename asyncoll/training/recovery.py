"""How a rank that is later than `history` goes on: with the state of a rank that is not.

A late rank asks all others for their round, and takes the state of the first one that answers: the model, the optimizer
and the round, as they are at the end of a round. A rank answers where its model is that of a round's end, also while
it is late itself: the rank that asks says which round it needs, and has the results after that one. Otherwise ranks
that are late at the same time would wait for each other.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import asyncoll

State = dict[str, Any]  # of a replica, as values that calls of functions carry


class _Question(NamedTuple):
    """A question of another rank that waits for its answer."""

    needed: int  # the oldest round whose end is of use
    read: Callable[[], Any]
    answer: concurrent.futures.Future[Any]

    def give(self) -> None:
        """Answer it, unless the rank that asks has cancelled the call. An error is one of that rank."""
        if self.answer.set_running_or_notify_cancel():
            try:
                self.answer.set_result(self.read())
            except Exception as error:
                self.answer.set_exception(error)


class Recovery:
    """One rank's part in the recoveries of a training: it gives its state, and takes that of another rank.

    The other ranks call `offer` and `give`, and `take` calls those of the others: on the loop of `serve`. `open`,
    `close` and `end` may be called in another thread, which is the one that changes the state.
    """

    def __init__(
        self, comm: asyncoll.Communicator, name: str, read: Callable[[], State], *, history: int, sync_every: int
    ) -> None:
        """`read` returns a copy of this rank's state. `name`, `history` and `sync_every` are those of the training."""
        # With synchronous rounds the next one makes all replicas equal. Without history replicas drift apart anyway.
        self.is_used = bool(history) and not sync_every and comm.size > 1
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._name = "recovery_" + hashlib.sha256(name.encode()).hexdigest()[:16]  # an identifier, whatever the name
        self._read: Callable[[], State] | None = read
        self._lock = threading.Lock()
        self._round: int | None = None  # at whose end the state is; None: it must not be read
        self._questions: list[_Question] = []
        self._is_served = False

    def serve(self, calls: asyncoll.rpc.Rpc) -> None:
        """Let the other ranks ask this one. All do it before the first round that a rank can miss.

        Idempotent: a training whose beginning was interrupted begins again.
        """
        if self._is_served:
            return
        self._calls = calls
        self._is_served = True
        for function in (self.offer, self.give):
            calls.register(function, name=f"{self._name}.{function.__name__}")

    @contextlib.contextmanager
    def opened(self, round_: int) -> Iterator[None]:
        """For a wait, in which this rank's state stays that of the end of round `round_`: it is given to late ranks.

        Not between steps: a program may await something while other weights are in the model, as in a validation.
        """
        if not self.is_used:
            yield
            return
        self.open(round_)
        try:
            yield
        finally:
            self.close()

    def open(self, round_: int) -> None:
        """The state is that of the end of round `round_`, until `close`. Answers the questions that wait for it."""
        with self._lock:
            self._round = round_
            due = [question for question in self._questions if question.needed <= round_]
            for question in due:
                self._questions.remove(question)
                question.give()

    def close(self) -> None:
        """The state changes from now on, or lacks results. Waits for a copy that another thread makes of it."""
        with self._lock:
            self._round = None

    def end(self) -> None:
        """Release the state: no rank is late any more, or this one has discarded the training. Refuses questions."""
        with self._lock:
            self._round = self._read = None
            for question in self._questions:
                question.give()
            self._questions.clear()

    # -- called by other ranks --------------------------------------------------------------------

    async def offer(self, needed: int) -> int:
        """The round of this rank's state, once that is at least `needed`."""
        return int(await self._asked(needed, lambda _: self._round))

    async def give(self, needed: int) -> State:
        """This rank's state, once its round is at least `needed`."""
        state: State = await self._asked(needed, lambda copied: copied())
        return state

    async def _asked(self, needed: int, read: Callable[[Callable[[], State]], Any]) -> Any:
        def answer() -> Any:
            if self._read is None:
                raise asyncoll.UsageError("the training has ended at this rank, which gives its state to no late one")
            return read(self._read)

        with self._lock:
            if self._read is None or (self._round is not None and self._round >= needed):
                return answer()
            question = _Question(needed, answer, concurrent.futures.Future())
            self._questions.append(question)
        try:
            return await asyncio.wrap_future(question.answer)
        finally:
            # The question was answered meanwhile.
            with self._lock, contextlib.suppress(ValueError):
                self._questions.remove(question)

    # -- this rank is late ------------------------------------------------------------------------

    def is_due(self, round_: int, needed: int) -> bool:
        """Whether this rank has lost results: its state is of `round_`, and those that it has continue `needed`."""
        return self.is_used and round_ < needed

    async def take(self, needed: int) -> State:
        """The state of another rank, at the end of round `needed` or a later one.

        Cancellation leaves this rank as it is. Raises the error of a call if no rank answers.
        """
        # In the order of ranks, which a set of tasks would not keep: a simulated world is the same in each run.
        asked = {asyncio.ensure_future(self._ask(rank, "offer", needed)): rank for rank in self._others}
        waiting = list(asked)
        answered: list[asyncio.Task[Any]] = []
        try:
            while waiting and not answered:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                answered = [call for call in asked if call.done() and not call.exception()]
                waiting = [call for call in asked if not call.done()]
        finally:
            for call in waiting:
                call.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        call = (answered or list(asked))[0]
        call.result()  # raises the error if no rank has answered
        state: State = await self._ask(asked[call], "give", needed)
        return state

    async def _ask(self, rank: int, function: str, needed: int) -> Any:
        return await self._calls.call(rank, f"{self._name}.{function}", needed)
