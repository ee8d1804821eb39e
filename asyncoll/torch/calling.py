"""What all calls of a process group have in common: how they begin, and what becomes of those that are refused.

A rank whose arguments are wrong raises a UsageError. The other ranks, whose arguments are right, would wait for it. So
a refused collective takes its number, too, and a signature that says so: `calls.GroupCalls.refuse`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncoll.blocking import BlockingCommunicator
from asyncoll.errors import AsyncollError, DeviceError, UsageError, describe
from asyncoll.runtime.deadlines import deadline
from asyncoll.runtime.handles import Handle
from asyncoll.torch import recording
from asyncoll.torch.arguments import Arguments, check_timeout, only
from asyncoll.torch.call_hooks import CallHooks, PreHookArgs
from asyncoll.torch.calls import GroupCalls
from asyncoll.torch.devices import add_backend, own
from asyncoll.torch.errors import of_torch
from asyncoll.torch.name import DEVICES
from asyncoll.torch.options import read
from asyncoll.torch.uncompiled import uncompiled
from asyncoll.torch.work import Work

Begin = Callable[[], Handle[Any]]
_NAMES = {  # of calls in errors, where profilers have other ones
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "_allgather_base": "allgather",
    "_reduce_scatter_base": "reduce_scatter",
    "all_to_all": "alltoall",
}
_WITH_ROOT = {"broadcast", "reduce", "gather", "scatter"}
_Base: Any = dist.ProcessGroup


def collective(title: str) -> Callable[[Callable[..., Handle[Any]]], Callable[..., Any]]:
    """A method that torch calls, made of one that begins the call and returns its handle.

    Its arguments are those of torch, the last one being the options. The outputs are tensors, or lists of them, in the
    first argument, and the inputs in the second one, if there are two. `title` is the name for profilers.
    """

    def decorate(begin: Callable[..., Handle[Any]]) -> Callable[..., Any]:
        name, count = begin.__name__, begin.__code__.co_argcount - 2  # without `self` and the options
        called = _NAMES.get(title, title)

        @uncompiled
        @functools.wraps(begin)
        def call(self: CallingGroup, *given: Any, **named: Any) -> Any:
            arguments, opts = given[:count], read(given[count:], named)
            outputs = _tensors(arguments[0]) if arguments else []
            inputs = _tensors(arguments[1]) if len(arguments) > 1 else outputs
            hooked = self._run_hooks(called, arguments, opts) if self._hooks else None
            try:
                tensors = outputs or inputs
                if tensors and not tensors[0].is_cpu and (other := self._elsewhere(tensors[0].device)):
                    work = getattr(other, name)(*given, **named)
                else:
                    work = self._work(title, lambda: begin(self, *arguments, opts), opts, outputs, inputs)
            except UsageError as error:
                self._refuse(called, opts, str(error))
                raise of_torch(error) from None
            if hooked:
                self._hooks.end(hooked, work)
            return work

        return call

    return decorate


def message(title: str, peer: str = "") -> Callable[[Callable[..., Handle[Any]]], Callable[..., Any]]:
    """A method that torch calls for a send or a receive, made of one that begins it: one tensor, and no options.

    `peer` is the name of the argument that says which rank the other one is, if there is one.

    The other rank is not told of a refusal: the message has no number yet, and this rank may make the call again.
    """

    def decorate(begin: Callable[..., Handle[Any]]) -> Callable[..., Any]:
        name = begin.__name__

        @uncompiled
        @functools.wraps(begin)
        def call(self: CallingGroup, tensors: Any, *given: Any, **named: Any) -> Any:
            try:
                x = only(tensors)
                hooked = None
                if self._hooks:
                    other_rank = named.get(peer, given[0] if given else -1) if peer else -1
                    hooked = self._run_message_hooks(x, other_rank, is_sent=name == "send")
                if not x.is_cpu and (other := self._elsewhere(x.device)):
                    work = getattr(other, name)(tensors, *given, **named)
                else:
                    work = self._work(title, lambda: begin(self, x, *given, **named), None, [x], [x])
            except UsageError as error:
                raise of_torch(error) from None
            if hooked:
                self._hooks.end(hooked, work)
            return work

        return call

    return decorate


def _tensors(given: Any) -> list[Any]:
    """A tensor, the tensors of a list, or those of a list of lists."""
    if not isinstance(given, (list, tuple)):
        return [given]
    if given and isinstance(given[0], (list, tuple)):
        return [x for row in given for x in row]
    return list(given)


class CallingGroup(_Base):  # type: ignore[misc]  # the methods of the base class are overloaded
    """A process group that begins calls. The calls themselves are in the classes that derive from it."""

    def __init__(self, store: Any, comm: BlockingCommunicator, timeout: timedelta) -> None:
        # Without the store: with it, C++ would not call this class.
        super().__init__(comm.rank, comm.size)
        self._comm = comm
        self._calls = GroupCalls(comm)
        self._arguments = Arguments(comm.rank, comm.size)
        self._waiting = self._calls.waiting
        self._hooks = CallHooks(comm.rank)
        self._store = store
        self.set_timeout(timeout)
        self._together: list[Work] | None = None  # the calls since `_start_coalescing`
        self._own_devices: list[str] = []  # once torch knows them
        self._other_devices: list[str] = []
        self._others: Any = None  # their group

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time after which a call that is not over raises DeadlineError. Raises UsageError for 0 and below."""
        check_timeout(timeout)
        self._timeout = timeout

    def _work(self, title: str, begin: Begin, opts: Any, outputs: list[Any], inputs: Sequence[Tensor]) -> Work:
        """Begin a call with the timeout of its options, or of the group."""
        record = recording.begin(title, inputs)
        waiting = self._waiting
        waiting.now = not getattr(opts, "asyncOp", True)
        try:
            with deadline(self._limit_s(opts)):
                work = Work((begin(),), outputs, record)
        except BaseException as error:
            recording.end(record)
            self._together = None  # a block of coalesced calls ends with the first error
            if isinstance(error, DeviceError):
                self._abort(str(error))  # the other ranks wait for this call
            raise of_torch(error) from None
        finally:
            waiting.now = False
        if self._together is not None:
            self._together.append(work)
        return work

    def _limit_s(self, opts: Any) -> float:
        limit = getattr(opts, "timeout", None)
        seconds: float = limit.total_seconds() if limit is not None else 0.0
        return seconds if seconds > 0 else self._timeout.total_seconds()

    def _refuse(self, name: str, opts: Any, reason: str) -> None:
        """Tell the other ranks that this rank has refused a collective call, in the place of that call."""
        with contextlib.suppress(AsyncollError), deadline(self._limit_s(opts)):  # the group may have ended
            self._calls.refuse(name, reason)

    def _run_hooks(self, name: str, arguments: Sequence[Any], opts: Any) -> PreHookArgs:
        """Run the program's hooks before a collective call. If one of them raises, the call is a refused one."""
        *outputs, inputs = [_tensors(each) for each in arguments[:2]] or [[]]
        root = opts.rootRank if name in _WITH_ROOT else -1
        try:
            is_async = getattr(opts, "asyncOp", True)
            return self._hooks.begin(name.upper(), inputs, *outputs, root=root, is_async=is_async)
        except Exception as error:
            self._together = None
            self._refuse(name, opts, str(error) if isinstance(error, UsageError) else describe(error))
            raise of_torch(error) from None

    def _run_message_hooks(self, x: Tensor, peer: int, *, is_sent: bool) -> PreHookArgs:
        """Run the program's hooks before a call of two ranks."""
        if is_sent:
            return self._hooks.begin("SEND", [x], root=peer)
        return self._hooks.begin("RECV", [], [x], root=peer)

    def _abort(self, reason: str) -> None:
        """End the group at all ranks, unless it has ended."""
        with contextlib.suppress(AsyncollError):
            self._comm.abort(reason)

    def _own(self) -> list[str]:
        """The devices whose tensors this group takes itself. Kept, because torch forgets what it knows of a group.

        All before torch knows them: init_process_group asks for the backend of its `device_id` then.
        """
        self._own_devices = self._own_devices or own(self)
        return self._own_devices or DEVICES

    def _elsewhere(self, device: torch.device) -> Any:
        """The group that carries out the calls with tensors of `device`; None: this one.

        It is a group of its own, because C++ finds the methods of this class below those of its base class. Raises
        UsageError if no backend was named for the device.
        """
        if device.type in self._own():
            return None
        if device.type not in self._other_devices:
            if self._others is None:
                self._others = _Base(self._calls.rank, self._calls.size)
            ranks = self._comm._core.member.group.ranks
            try:
                add_backend(self, self._others, device.type, self._store, ranks, self._timeout)
            except UsageError as error:
                raise of_torch(error) from None
            self._other_devices.append(device.type)
        return self._others
