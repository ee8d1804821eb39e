"""`ProcessGroup`: the collectives of torch.distributed on a communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from asyncoll.blocking import BlockingCommunicator
from asyncoll.errors import UsageError
from asyncoll.runtime.deadlines import deadline
from asyncoll.runtime.handles import Handle
from asyncoll.tensors.reductions import ReduceOp
from asyncoll.torch import membership, recording, sparse
from asyncoll.torch.calls import Calls
from asyncoll.torch.devices import NAME, add_backend
from asyncoll.torch.errors import of_torch
from asyncoll.torch.memory import Block, Row, check_writable, copyable, cut, outputs_of, reducible, row_of, writable
from asyncoll.torch.monitored import MonitoredBarriers
from asyncoll.torch.options import as_list, check_timeout, first, read
from asyncoll.torch.reducers import keep_works
from asyncoll.torch.reductions import contribution, reduction
from asyncoll.torch.registered_pool import RegisteredPool
from asyncoll.torch.uncompiled import uncompiled
from asyncoll.torch.work import Work

Begin = Callable[[], Handle[Any]]
_Base: Any = dist.ProcessGroup


def make_group(options: Any) -> ProcessGroup:
    """The process group for torch's `options`: the world if they name no ranks, else a group of some of its ranks."""
    rank, size, store, timeout = options.group_rank, options.group_size, options.store, options.timeout
    ranks = options.global_ranks_in_group
    check_timeout(timeout)
    keep_works()
    try:
        comm = membership.subgroup(options.group_id, ranks) if ranks else membership.enter(store, rank, size, timeout)
    except Exception as error:
        raise of_torch(error) from None
    return ProcessGroup(store, comm, timeout)


class ProcessGroup(_Base):  # type: ignore[misc]  # the methods of the base class are overloaded
    """A process group of CPU tensors; those of other devices go to the backends that the user has named for them.

    Every call has begun when its method returns, and its `Work` tells its end. The methods are those that torch calls;
    their docstrings say where they do more, or less, than those of torch's own groups. Tensors may be of any layout in
    memory, also not contiguous, and results go into the tensors that are passed.

    All ranks of the group make the same collective calls in the same order. If they do not, or if their dtypes or
    sizes differ, all of them raise a MismatchError, which names both calls. Errors are of `asyncoll.torch.errors`.
    """

    def __init__(self, store: Any, comm: BlockingCommunicator, timeout: timedelta) -> None:
        super().__init__(comm.rank, comm.size)  # with a store, C++ would not call this class
        self._comm = comm
        self._calls = Calls(comm)
        self._waiting = self._calls.waiting
        self._store = store
        self.set_timeout(timeout)
        self._together: list[Work] | None = None  # the calls since `_start_coalescing`
        self._memory = RegisteredPool(comm)
        self._devices = ["cpu"]
        self._name = self._description = ""
        member = comm._core.member
        name = f"{membership.number_of_world()}/{member.communicator}"  # worlds one after the other may share the store
        self._monitored_barrier = MonitoredBarriers(store, comm.rank, comm.size, name, member.check)

    # -- reductions -------------------------------------------------------------------------------

    @uncompiled
    def allreduce(self, tensors: Any, *given: Any, **named: Any) -> Any:
        """Reduce the tensor over all ranks, in place: by any reduction of torch, also AVG and PREMUL_SUM.

        A sparse tensor (COO) is summed or averaged. The average of integers is rounded towards 0, as NCCL's.
        """
        tensors, opts = as_list(tensors), read(given, named)
        x = first(tensors, only=True)
        if not x.is_cpu:
            self._serve(x)
            return super().allreduce(tensors, opts)

        def begin() -> Handle[Any]:
            op, factor = reduction(opts.reduceOp)
            if x.layout is not torch.strided:
                return sparse.allreduce(self._calls, x if factor is None else x.mul_(factor), op)
            if op is ReduceOp.AVG and not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool):
                return self._calls.average_integers(_in_place(reducible(x)))
            return self._calls.allreduce(_in_place(contribution(x, op, factor)), op)

        return self._work("all_reduce", begin, opts, tensors, tensors)

    @uncompiled
    def allreduce_coalesced(self, tensors: Any, *given: Any, **named: Any) -> Any:
        """As `allreduce`, for several tensors, of any dtypes, in one call."""
        tensors, opts = as_list(tensors), read(given, named)
        x = first(tensors)
        if not x.is_cpu:
            self._serve(x)
            return super().allreduce_coalesced(tensors, opts)

        def begin() -> Handle[Any]:
            op, factor = reduction(opts.reduceOp)
            return self._calls.allreduce_together([_in_place(contribution(x, op, factor)) for x in tensors], op)

        return self._work("all_reduce", begin, opts, tensors, tensors)

    @uncompiled
    def reduce(self, tensors: Any, *given: Any, **named: Any) -> Any:
        """Reduce into the root's tensor; the other ranks' tensors keep their values."""
        tensors, opts = as_list(tensors), read(given, named)
        x = first(tensors, only=True)
        if not x.is_cpu:
            self._serve(x)
            return super().reduce(tensors, opts)

        def begin() -> Handle[Any]:
            op, factor = reduction(opts.reduceOp)
            is_root = self._calls.rank == opts.rootRank
            block = contribution(x, op, factor, fresh=not is_root)
            return self._calls.reduce(_in_place(block) if is_root else block, self._root(opts), op)

        return self._work("reduce", begin, opts, tensors, tensors)

    @uncompiled
    def reduce_scatter(self, outputs: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        """Reduce the inputs with the index of each rank into the output of that rank. Their sizes may differ."""
        outputs, opts = as_list(outputs), read(given, named)
        output = first(outputs, only=True)
        parts = inputs if inputs and isinstance(inputs[0], Tensor) else first(inputs, only=True)
        if not output.is_cpu:
            self._serve(output)
            return super().reduce_scatter(outputs, [parts], opts)
        return self._reduce_scatter([(output, parts)], opts)

    @uncompiled
    def reduce_scatter_single(self, output: Tensor, x: Tensor, *given: Any, **named: Any) -> Any:
        """Reduce the input, cut into equal parts by rank, into the output of each rank."""
        opts = read(given, named)
        if not output.is_cpu:
            self._serve(output)
            return super().reduce_scatter_single(output, x, opts)
        return self._reduce_scatter([(output, x)], opts)

    _reduce_scatter_base = reduce_scatter_single

    @uncompiled
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        """As `reduce_scatter_single`, for several tensors in one call."""
        opts = read(given, named)
        x = first(outputs)
        if not x.is_cpu:
            self._serve(x)
            return super().reduce_scatter_single_coalesced(outputs, inputs, opts)
        return self._reduce_scatter(list(zip(outputs, inputs, strict=True)), opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, pairs: Sequence[tuple[Tensor, Sequence[Tensor] | Tensor]], opts: Any) -> Work:
        """For each pair, an output, and an input for each rank or one for all."""

        def begin() -> Handle[Any]:
            op, factor = reduction(opts.reduceOp)
            return self._calls.reduce_scatter([self._scattered(*pair, op, factor) for pair in pairs], op)

        is_single = isinstance(pairs[0][1], Tensor)
        outputs = [output for output, _ in pairs]
        return self._work("_reduce_scatter_base" if is_single else "reduce_scatter", begin, opts, outputs, outputs)

    def _scattered(
        self, output: Tensor, given: Sequence[Tensor] | Tensor, op: ReduceOp, factor: Any
    ) -> tuple[Row, Block]:
        into = _in_place(reducible(output))
        if not isinstance(given, Tensor):
            self._expect(len(given), "inputs")
            for x in given:
                self._same(x, output)
            mine = given[self._calls.rank]
            self._fit("reduce_scatter", (f"input {self._calls.rank}", mine.numel()), ("the output", output.numel()))
            return row_of([contribution(x, op, factor, fresh=True) for x in given]), into
        self._same(given, output)
        parts = (f"{self._calls.size} outputs", self._calls.size * output.numel())
        self._fit("reduce_scatter", ("the input", given.numel()), parts)
        return cut(contribution(given, op, factor, fresh=True), [into.flat.size] * self._calls.size), into

    # -- copies -----------------------------------------------------------------------------------

    @uncompiled
    def broadcast(self, tensors: Any, *given: Any, **named: Any) -> Any:
        """Copy the root's tensor, of any dtype, into those of all ranks."""
        tensors, opts = as_list(tensors), read(given, named)
        x = first(tensors, only=True)
        if not x.is_cpu:
            self._serve(x)
            return super().broadcast(tensors, opts)

        def begin() -> Handle[Any]:
            is_root = self._calls.rank == opts.rootRank
            return self._calls.broadcast(copyable(x) if is_root else writable(x), self._root(opts))

        return self._work("broadcast", begin, opts, tensors, tensors)

    @uncompiled
    def allgather(self, outputs: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        """Copy each rank's tensor into the outputs with its index. Ranks may have different sizes, known to all."""
        inputs, opts = as_list(inputs), read(given, named)
        row = outputs[0] if outputs and isinstance(outputs[0], (list, tuple)) else outputs
        x = first(inputs, only=True)
        if not x.is_cpu:
            self._serve(x)
            return super().allgather([row], inputs, opts)
        return self._allgather("all_gather", [(x, row)], list(row), opts)

    @uncompiled
    def all_gather_single(self, output: Tensor, x: Tensor, *given: Any, **named: Any) -> Any:
        """Copy each rank's tensor into the part of the output with its index."""
        opts = read(given, named)
        if not x.is_cpu:
            self._serve(x)
            return super().all_gather_single(output, x, opts)
        return self._allgather("_allgather_base", [(x, output)], [output], opts)

    _allgather_base = all_gather_single

    @uncompiled
    def allgather_coalesced(self, outputs: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        """As `allgather`, for several tensors in one call. The outputs are lists by rank."""
        opts = read(given, named)
        x = first(inputs)
        if not x.is_cpu:
            self._serve(x)
            return super().allgather_coalesced(outputs, inputs, opts)
        pairs = list(zip(inputs, zip(*outputs, strict=True), strict=True))
        return self._allgather("all_gather", pairs, [x for row in outputs for x in row], opts)

    @uncompiled
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        """As `all_gather_single`, for several tensors in one call."""
        opts = read(given, named)
        x = first(inputs)
        if not x.is_cpu:
            self._serve(x)
            return super().all_gather_single_coalesced(outputs, inputs, opts)
        return self._allgather("_allgather_base", list(zip(inputs, outputs, strict=True)), list(outputs), opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _allgather(
        self, title: str, pairs: Sequence[tuple[Tensor, Sequence[Tensor] | Tensor]], outputs: list[Tensor], opts: Any
    ) -> Work:
        """For each pair, an input, and an output for each rank or one for all."""

        def begin() -> Handle[Any]:
            return self._calls.allgather([self._gathered(x, into) for x, into in pairs])

        return self._work(title, begin, opts, outputs, [x for x, _ in pairs])

    def _gathered(self, x: Tensor, into: Sequence[Tensor] | Tensor) -> tuple[Block, Row]:
        if not isinstance(into, Tensor):
            self._expect(len(into), "outputs")
            for output in into:
                self._same(x, output)
            mine = into[self._calls.rank]
            self._fit("all_gather", (f"output {self._calls.rank}", mine.numel()), ("the input of this rank", x.numel()))
            return copyable(x), outputs_of(into)
        self._same(x, into)
        parts = (f"{self._calls.size} inputs", self._calls.size * x.numel())
        self._fit("all_gather", ("the output", into.numel()), parts)
        given = copyable(x)
        return given, cut(writable(into), [given.flat.size] * self._calls.size)

    @uncompiled
    def gather(self, outputs: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        """Copy each rank's tensor into the root's output with its index. Ranks may have different sizes."""
        inputs, opts = as_list(inputs), read(given, named)
        row = outputs[0] if outputs and isinstance(outputs[0], (list, tuple)) else outputs
        x = first(inputs, only=True)
        if not x.is_cpu:
            self._serve(x)
            return super().gather([row] if row else [], inputs, opts)

        def begin() -> Handle[Any]:
            root = self._root(opts)
            if self._calls.rank != root:
                return self._calls.gather(copyable(x), row_of([]), root)
            self._expect(len(row), "outputs")
            for output in row:
                self._same(x, output)
            return self._calls.gather(copyable(x), outputs_of(row), root)

        return self._work("gather", begin, opts, list(row), inputs)

    @uncompiled
    def scatter(self, outputs: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        """Copy the root's inputs to the ranks with their indexes. They may differ in size."""
        outputs, opts = as_list(outputs), read(given, named)
        parts = inputs[0] if inputs and isinstance(inputs[0], (list, tuple)) else inputs
        output = first(outputs, only=True)
        if not output.is_cpu:
            self._serve(output)
            return super().scatter(outputs, [parts] if parts else [], opts)

        def begin() -> Handle[Any]:
            root = self._root(opts)
            if self._calls.rank != root:
                return self._calls.scatter(row_of([]), writable(output), root)
            self._expect(len(parts), "inputs")
            for x in parts:
                self._same(x, output)
            return self._calls.scatter(row_of([copyable(x) for x in parts]), writable(output), root)

        return self._work("scatter", begin, opts, outputs, list(parts))

    @uncompiled
    def alltoall(self, outputs: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        """Copy each input to the rank with its index. All sizes may differ."""
        opts = read(given, named)
        x = first(inputs)
        if not x.is_cpu:
            self._serve(x)
            return super().alltoall(outputs, inputs, opts)

        def begin() -> Handle[Any]:
            self._expect(len(inputs), "inputs")
            self._expect(len(outputs), "outputs")
            for x in (*inputs, *outputs):
                self._same(inputs[0], x)
            return self._calls.alltoall(row_of([copyable(x) for x in inputs]), outputs_of(outputs))

        return self._work("all_to_all", begin, opts, list(outputs), list(inputs))

    @uncompiled
    def all_to_all_single(
        self, output: Tensor, x: Tensor, output_sizes: Any, input_sizes: Any, *given: Any, **named: Any
    ) -> Any:
        """Copy each part of the input to the rank with its index. The sizes count rows; none given: equal parts."""
        opts = read(given, named)
        if not x.is_cpu:
            self._serve(x)
            return super().all_to_all_single(output, x, output_sizes, input_sizes, opts)

        def begin() -> Handle[Any]:
            self._same(x, output)
            parts, places = self._bytes(x, input_sizes), self._bytes(output, output_sizes)
            return self._calls.alltoall(cut(copyable(x), parts), cut(writable(output), places))

        return self._work("all_to_all", begin, opts, [output], [x])

    alltoall_base = all_to_all_single

    # -- messages ---------------------------------------------------------------------------------

    @uncompiled
    def send(self, tensors: Any, dest: int, tag: int = 0) -> Any:
        """Send the tensor to another rank; the call ends when the tensor may be reused."""
        x = first(tensors, only=True)
        if not x.is_cpu:
            self._serve(x)
            return super().send(tensors, dest, tag)
        peer = self._peer(dest)
        return self._work("send", lambda: self._calls.send(copyable(x), peer, tag), None, list(tensors), tensors)

    @uncompiled
    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        """Receive a tensor of the same dtype and number of elements from another rank."""
        x = first(tensors, only=True)
        if not x.is_cpu:
            self._serve(x)
            return super().recv(tensors, source, tag)
        peer = self._peer(source)
        work = self._work("recv", lambda: self._calls.recv(writable(x), peer, tag), None, list(tensors), tensors)
        work.set_source(lambda: peer)
        return work

    @uncompiled
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """As `recv`, from the rank whose message comes first. `Work._source_rank` tells which one it was."""
        x = first(tensors, only=True)
        if not x.is_cpu:
            self._serve(x)
            return super().recv_anysource(tensors, tag)

        def begin() -> Handle[Any]:
            if self._calls.size == 1:
                raise UsageError("a group of one rank has no rank to receive from")
            return self._calls.recv_any(writable(x), tag)

        work = self._work("recvAnySource", begin, None, list(tensors), tensors)
        work.set_source(lambda: int(work.handles[0].wait()))
        return work

    # -- several calls as one ---------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type != "cpu":
            self._serve(device)
            super()._start_coalescing(device)
            return
        if self._together is not None:
            raise of_torch(UsageError("a block of coalesced calls is open already: end it first"))
        self._together = []

    @uncompiled
    def _end_coalescing(self, device: torch.device) -> Any:
        """The work of all calls since `_start_coalescing`. They have begun already, in their order."""
        if device.type != "cpu":
            return super()._end_coalescing(device)
        if self._together is None:
            raise of_torch(UsageError("no block of coalesced calls is open"))
        works, self._together = self._together, None
        return Work([handle for work in works for handle in work.handles], [x for work in works for x in work.result()])

    # -- the group itself -------------------------------------------------------------------------

    @uncompiled
    def barrier(self, *given: Any, **named: Any) -> Work:
        """End once all ranks have called it."""
        opts = read(given, named)
        return self._work("barrier", self._calls.barrier, opts, [], [])

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
        membership.leave(self._comm)

    def abort(self) -> None:
        """End the group at all ranks: pending and later calls raise AbortedError. May be called in any thread."""
        membership.abort(self._comm)

    def split_group(
        self, new_ranks: Sequence[int], timeout: timedelta | None = None, opts: Any = None, *names: Any, **named: Any
    ) -> ProcessGroup | None:
        """The group of the ranks `new_ranks` of this one; None if this rank is not among them. Nobody communicates."""
        del opts
        ranks = self._comm._core.member.group.ranks
        chosen = [ranks[rank] for rank in new_ranks]
        name = str(named.get("group_name") or (names[0] if names else "") or f"{self._name}:{chosen}")
        if ranks[self._calls.rank] not in chosen:
            return None
        store = c10d.PrefixStore(f"{name}/", self._store)
        group = ProcessGroup(store, membership.subgroup(name, chosen), timeout or self._timeout)
        group.setGroupName(name)
        return group

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time after which a call that is not over raises DeadlineError. Raises UsageError for 0 and below."""
        check_timeout(timeout)
        self._timeout = timeout

    _set_default_timeout = set_timeout

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
        return [torch.device(device) for device in self._devices]

    def _get_backend(self, device: torch.device) -> Any:
        """What carries out calls with tensors of `device`: this group, for the CPU."""
        if device.type == "cpu":
            return self
        self._serve(device)
        return super()._get_backend(device)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether `allocate_tensor` has memory for tensors of `device`. FSDP2 asks for it."""
        return device.type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of `size` elements in memory that the ranks of this host share. Its content is undefined."""
        del device
        return self._memory.allocate(size, dtype)

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def _set_sequence_number_for_group(self) -> None:
        """Without effect: calls are numbered from the first one."""

    def _get_sequence_number_for_group(self) -> int:
        """The number of collective calls so far."""
        return self._calls.last()

    # -- inside -----------------------------------------------------------------------------------

    def _work(self, title: str, begin: Begin, opts: Any, outputs: list[Any], inputs: Sequence[Tensor]) -> Work:
        """Begin a call with the timeout of its options, or of the group."""
        record = recording.begin(title, inputs)
        limit = getattr(opts, "timeout", None)
        seconds = limit.total_seconds() if limit is not None else 0.0
        waiting = self._waiting
        waiting.now = not getattr(opts, "asyncOp", True)
        try:
            with deadline(seconds if seconds > 0 else self._timeout.total_seconds()):
                work = Work((begin(),), outputs, record)
        except BaseException as error:
            recording.end(record)
            raise of_torch(error) from None
        finally:
            waiting.now = False
        if self._together is not None:
            self._together.append(work)
        return work

    def _serve(self, what: Any) -> None:
        """Make sure that there is a backend for the device of a tensor. Raises UsageError if none was named."""
        device = what.type if isinstance(what, torch.device) else what.device.type
        if device not in self._devices:
            try:
                add_backend(self, device, self._store, self._comm._core.member.group.ranks, self._timeout)
            except UsageError as error:
                raise of_torch(error) from None
            self._devices.append(device)

    def _root(self, opts: Any) -> int:
        root = int(opts.rootRank)
        if not 0 <= root < self._calls.size:
            raise UsageError(f"the root {root} is not one of the ranks 0 to {self._calls.size - 1} of the group")
        return root

    def _peer(self, rank: int) -> int:
        if not 0 <= rank < self._calls.size or rank == self._calls.rank:
            text = f"rank {rank} is no other rank of the group of {self._calls.size} at rank {self._calls.rank}"
            raise of_torch(UsageError(text))
        return rank

    def _expect(self, count: int, what: str) -> None:
        if count != self._calls.size:
            raise UsageError(f"{count} {what} for {self._calls.size} ranks: pass one for each")

    def _same(self, x: Tensor, output: Tensor) -> None:
        if x.dtype is not output.dtype:
            raise UsageError(f"an input of {x.dtype} and an output of {output.dtype}: pass tensors of one dtype")

    def _fit(self, call: str, *sides: tuple[str, int]) -> None:
        """Raise UsageError unless both sides, which are named, have the same number of elements."""
        (one, count), (other, room) = sides
        if count != room:
            raise UsageError(f"{call}: {one} must have as many elements as {other}: {count} is not {room}")

    def _bytes(self, x: Tensor, rows: Sequence[int]) -> list[int]:
        """The sizes of the parts of `x` by rank: so many rows each, or equal parts if there are no `rows`."""
        if not x.dim():
            raise UsageError("a tensor of 0 dimensions has no rows to exchange: pass x.reshape(1)")
        total = x.shape[0]
        if rows:
            self._expect(len(rows), "sizes")
        if sum(rows) != total if rows else total % self._calls.size:
            raise UsageError(f"{total} rows cannot be split into {list(rows) or f'{self._calls.size} equal parts'}")
        each = x.nbytes // total if total else 0
        return [count * each for count in rows or [total // self._calls.size] * self._calls.size]


def _in_place(block: Block) -> Block:
    """`block`, if a result can be put into its tensor. Raises UsageError otherwise."""
    if block.copied:
        check_writable(block.tensor)
    return block
