"""`ProcessGroup`: torch.distributed on a communicator. Its collectives are in `group_collectives`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from asyncoll.blocking import BlockingCommunicator
from asyncoll.errors import AsyncollError, DeadlineError, PeerLostError, UsageError
from asyncoll.runtime.handles import Handle
from asyncoll.runtime.uncopied import Uncopied
from asyncoll.torch import entry
from asyncoll.torch.arguments import check_timeout, integer
from asyncoll.torch.call_hooks import PostHookArgs, PreHookArgs
from asyncoll.torch.calling import message
from asyncoll.torch.devices import own
from asyncoll.torch.errors import of_torch
from asyncoll.torch.group_collectives import GroupCollectives
from asyncoll.torch.memory import copyable, writable
from asyncoll.torch.monitored import MonitoredBarriers
from asyncoll.torch.name import NAME
from asyncoll.torch.reducers import keep_works
from asyncoll.torch.registered_pool import RegisteredPool
from asyncoll.torch.uncompiled import uncompiled
from asyncoll.torch.unsupported import Unsupported
from asyncoll.torch.work import Work

_ErrorType: Any = torch._C._distributed_c10d.ErrorType


def make_group(options: Any) -> ProcessGroup:
    """The process group for torch's `options`: the world if they name no ranks, else a group of some of its ranks."""
    rank, size, store, timeout = options.group_rank, options.group_size, options.store, options.timeout
    ranks = options.global_ranks_in_group
    check_timeout(timeout)
    keep_works()
    try:
        comm = entry.subgroup(options.group_id, ranks) if ranks else entry.enter(store, rank, size, timeout)
    except Exception as error:
        raise of_torch(error) from None
    return ProcessGroup(store, comm, timeout)


class ProcessGroup(Uncopied, Unsupported, GroupCollectives):
    """A process group of tensors of the CPU and of CUDA.

    The tensors of a device for which the user has named another backend go there.

    Every call has begun when its method returns, and its `Work` tells its end. The methods are those that torch calls;
    their docstrings say where they do more, or less, than those of torch's own groups. Tensors may be of any layout in
    memory, also not contiguous, and results go into the tensors that are passed.

    All ranks of the group make the same collective calls in the same order. If they do not, or if their dtypes or
    sizes differ, all of them raise a MismatchError, which names both calls. Arguments that are wrong by themselves are
    a UsageError. If all ranks pass them, the group goes on; otherwise the other ranks raise a MismatchError with its
    text, in this call or, if they are done with it, soon after. Errors are of `asyncoll.torch.errors`.
    """

    def __init__(self, store: Any, comm: BlockingCommunicator, timeout: timedelta) -> None:
        super().__init__(store, comm, timeout)
        self._memory = RegisteredPool(comm)
        self._name = self._description = ""
        member = comm._core.member
        name = f"{entry.number_of_world()}/{member.communicator}"  # worlds one after the other may share the store

        def check() -> None:
            # This raises in a forked child, too.
            member.check_open()
            member.check()

        self._monitored_barrier = MonitoredBarriers(store, comm.rank, comm.size, name, check)

    # -- messages ---------------------------------------------------------------------------------

    @message("send", "dest")
    def send(self, x: Tensor, dest: int, tag: int = 0) -> Handle[Any]:
        """Send the tensor to another rank; the call ends when the tensor may be reused."""
        return self._calls.send(copyable(x), self._arguments.peer(dest), integer(tag, "a tag"))

    @message("recv", "source")
    def recv(self, x: Tensor, source: int, tag: int = 0) -> Handle[Any]:
        """Receive a tensor of the same dtype and number of elements from another rank."""
        return self._calls.recv(writable(x), self._arguments.peer(source), integer(tag, "a tag"))

    @message("recvAnySource")
    def recv_anysource(self, x: Tensor, tag: int = 0) -> Handle[Any]:
        """Receive from the rank whose message comes first. `Work._source_rank` tells which one it was."""
        if self._calls.size == 1:
            raise UsageError("a group of one rank has no rank to receive from")
        return self._calls.recv_any(writable(x), integer(tag, "a tag"))

    # -- several calls as one ---------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        if other := self._elsewhere(device):
            other._start_coalescing(device)
            return
        if self._together is not None:
            raise of_torch(UsageError("a block of coalesced calls is open already: end it first"))
        self._together = []

    @uncompiled
    def _end_coalescing(self, device: torch.device) -> Any:
        """The work of all calls since `_start_coalescing`. They have begun already, in their order."""
        if other := self._elsewhere(device):
            return other._end_coalescing(device)
        if self._together is None:
            raise of_torch(UsageError("no block of coalesced calls is open"))
        works, self._together = self._together, None
        return Work([handle for work in works for handle in work.handles], [x for work in works for x in work.result()])

    # -- the group itself -------------------------------------------------------------------------

    @uncompiled
    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier after whose timeout rank 0 raises an error that names the ranks that have not come.

        It leaves the group usable. `torch.distributed.monitored_barrier` refuses all backends but Gloo, so call this
        method.
        """
        try:
            self._monitored_barrier(self._timeout if timeout is None else timeout, wait_all_ranks=wait_all_ranks)
        except Exception as error:
            raise of_torch(error) from None

    def shutdown(self) -> None:
        """Leave the group, and with the group of all ranks the world. Not collective."""
        entry.leave(self._comm)

    def abort(self) -> None:
        """End the group at all ranks: pending and later calls raise AbortedError. May be called in any thread."""
        entry.abort(self._comm)

    def split_group(
        self, new_ranks: Sequence[int], timeout: timedelta | None = None, opts: Any = None, *names: Any, **named: Any
    ) -> ProcessGroup | None:
        """The group of the ranks `new_ranks` of this one; None if this rank is not among them. Nobody communicates."""
        del opts
        ranks = self._comm._core.member.group.ranks
        try:
            chosen = [ranks[rank] for rank in self._arguments.part(new_ranks)]
        except UsageError as error:
            raise of_torch(error) from None
        name = str(named.get("group_name") or (names[0] if names else "") or f"{self._name}:{chosen}")
        if ranks[self._calls.rank] not in chosen:
            return None
        store = c10d.PrefixStore(f"{name}/", self._store)
        group = ProcessGroup(store, entry.subgroup(name, chosen), timeout or self._timeout)
        group.setGroupName(name)
        group._own_devices = self._own()
        return group

    # -- hooks of the program ---------------------------------------------------------------------

    def register_pre_hook(self, hook_id: int, hook: Callable[[PreHookArgs], Any]) -> None:
        """Call `hook` before each call of this group at this rank, in the thread that makes the call.

        An error of the hook leaves the call, which is not made: the other ranks raise a MismatchError, which tells it.
        Register and remove hooks while no other thread makes calls.

        Args:
            hook_id: any number: another hook with the same one takes the place of this one.
            hook: gets `name` (torch's HookOpName), `async_op`, `input_tensors`, `output_tensors`, `root` (or the other
                rank of a message; -1 for none) and `op_id`, which is another one for each call.
        """
        self._hooks.before[hook_id] = hook

    def unregister_pre_hook(self, hook_id: int) -> None:
        """Remove the hook with this number, if there is one."""
        self._hooks.before.pop(hook_id, None)

    def register_post_hook(self, hook_id: int, hook: Callable[[PostHookArgs], Any]) -> None:
        """Have `hook` called once a call has begun. It gets `name`, `async_op`, `work` and `op_id`.

        A hook with the same `hook_id` takes the place of the one before. No other thread makes calls meanwhile.
        """
        self._hooks.after[hook_id] = hook

    def unregister_post_hook(self, hook_id: int) -> None:
        """Remove the hook with this number, if there is one."""
        self._hooks.after.pop(hook_id, None)

    # -- what torch asks of the group -------------------------------------------------------------

    def get_error(self) -> Any:
        """Why the group takes no more calls, as torch's ErrorType; SUCCESS if it does.

        TIMEOUT after an overdue call, REMOTE_ERROR after the loss of a rank, and COMM_ERROR after any other failure.
        """
        member = self._comm._core.member
        try:
            member.check_open()
            member.check()
        except DeadlineError:
            return _ErrorType.TIMEOUT
        except PeerLostError:
            return _ErrorType.REMOTE_ERROR
        except AsyncollError:
            return _ErrorType.COMM_ERROR
        return _ErrorType.SUCCESS

    _set_default_timeout = GroupCollectives.set_timeout

    def get_timeout(self) -> timedelta:
        """The time after which a call that is not over raises DeadlineError."""
        return self._timeout

    def get_group_store(self) -> Any:
        """The store of the group."""
        return self._store

    def name(self) -> str:
        """The name of the backend."""
        return NAME

    getBackendName = _get_backend_name = name  # noqa: N815

    def getGroupName(self) -> str:  # noqa: N802 (these four are the names that C++ calls)
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, text: str) -> None:  # noqa: N802
        self._description = text

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    @property
    def _device_types(self) -> list[torch.device]:
        """None before torch knows them: only to a group with devices does it attach the recorder of other backends."""
        return [torch.device(device) for device in (*(self._own_devices or own(self)), *self._other_devices)]

    def _get_backend(self, device: torch.device) -> Any:
        """What carries out calls with tensors of `device`: this group, unless another backend was named for it."""
        other = self._elsewhere(device)
        return self if other is None else other._get_backend(device)

    get_backend = _get_backend

    def _backend_id(self, backend_type: Any) -> int:
        """The number of this group in this process: there is no backend apart from it."""
        del backend_type
        return int(self._id())

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether `allocate_tensor` has memory for tensors of `device`: of the CPU alone. FSDP2 asks for it.

        Memory that ranks share on a device belongs to calls, and not to tensors.
        """
        return device.type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of `size` elements in memory that the ranks of this host share. Its content is undefined."""
        del device
        return self._memory.allocate(size, dtype)

    def _set_sequence_number_for_group(self) -> None:
        """Without effect: calls are numbered from the first one."""

    def _get_sequence_number_for_group(self) -> int:
        """The number of collective calls so far."""
        return self._calls.last()
