"""A rank of a process group of torch whose tensors are on devices without hardware: runs the cases of its arguments.

`values` are the checks of calls_of_groups.py: the tensors of each call are moved to a device, and back when it is over.
`some` are one of 19 of them.
"""

import sys
import threading
from datetime import timedelta
from unittest import mock

import calls_of_groups
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import asyncoll
from asyncoll.testing import fake_device
from asyncoll.torch.process_group import ProcessGroup
from tests.support.emulated_cuda import Event, Stream, emulated_cuda
from tests.support.raising import caught

SECONDS = timedelta(seconds=60)
CALLS = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "gather", "scatter", "alltoall", "all_to_all_single"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("allgather", "allgather_coalesced", "all_gather_single", "all_gather_single_coalesced"),
    *("send", "recv", "recv_anysource"),
)
LEFT_OUT = ("conjugated", "sparse")  # are refused
SIZES = (0, 1000, 30_000)


def ranks():
    return range(dist.get_world_size())


def increment(device, x):
    device.compute(lambda array: np.add(array, 1, out=array), x)


# -- every value ------------------------------------------------------------------------------------


def moved(device, x, storages):
    """A tensor of the device with the elements and the layout of `x`. Those of one storage stay in one."""
    storage = x.untyped_storage()
    if storage.data_ptr() not in storages:
        whole = torch.empty(0, dtype=torch.uint8).set_(storage.clone())
        storages[storage.data_ptr()] = device.tensor(whole).untyped_storage()
    whole = storages[storage.data_ptr()]
    return torch.empty(0, dtype=x.dtype).set_(whole, x.storage_offset(), tuple(x.shape), x.stride())


class Returning:
    """A Work, or its future, of a call whose tensors were moved: they come back when it is over."""

    def __init__(self, device, over, pairs):
        self._device, self._over, self._pairs = device, over, pairs

    def __getattr__(self, name):
        return getattr(self._over, name)

    def wait(self):
        self._over.wait()
        self._return()

    def is_completed(self):
        if not self._over.is_completed():
            return False
        self._return()
        return True

    def get_future(self):
        return Returning(self._device, self._over.get_future(), self._pairs)

    def _return(self):
        for here, there in self._pairs:
            if there.numel():
                is_byte = there.itemsize == 1 and there.is_floating_point()  # numpy has no such dtype
                found = self._device.values(there.view(torch.uint8) if is_byte else there)
                here.detach().copy_(torch.from_numpy(np.ascontiguousarray(found)).view(there.dtype).view(here.shape))


class Moving:
    """Moves the tensors of the calls of process groups."""

    def __init__(self, device):
        self._device = device
        self._together = []

    def call(self, method):
        def moving(group, *given, **named):
            pairs, storages = [], {}

            def move(x):
                if isinstance(x, (list, tuple)):
                    return [move(each) for each in x]
                if not isinstance(x, torch.Tensor):
                    return x
                pairs.append((x, moved(self._device, x, storages)))
                return pairs[-1][1]

            work = method(group, *map(move, given), **named)
            self._together += pairs
            return Returning(self._device, work, pairs)

        return moving

    def end(self, method):
        def end(group, device):
            pairs, self._together = self._together, []
            return Returning(self._device, method(group, device), pairs)

        return end


def some():
    """As `values`, in the time of a test."""
    values(step=19)


def values(step=1):
    """Every call gives the values that it must, of tensors of every layout and dtype."""
    with fake_device(dist.get_rank()) as device:
        moving = Moving(device)
        calls = {name: moving.call(getattr(ProcessGroup, name)) for name in CALLS}
        with mock.patch.multiple(ProcessGroup, **calls, _end_coalescing=moving.end(ProcessGroup._end_coalescing)):
            for name, act in list(calls_of_groups.checks.items())[::step]:
                is_strided_byte = "float8" in name and "plain" not in name  # numpy has no such dtype
                if not is_strided_byte and not any(each in name for each in LEFT_OUT):
                    try:
                        act()
                    except Exception as error:
                        error.add_note(name)
                        raise


# -- the order of streams -----------------------------------------------------------------------------


def made(device, number, count):
    """A tensor with work that is queued on the current stream."""
    x = device.tensor(torch.full((count,), float(number)))
    increment(device, x)
    return x


def ended(form, work):
    """This thread goes on after `work`."""
    if form == "polled":
        while not work.is_completed():
            pass
    elif form == "success":
        while not work.is_success():
            pass
    else:
        work.wait()


def in_order(device):
    """Work before and after calls, on all streams, and a second wait."""
    me, size = dist.get_rank(), dist.get_world_size()
    for turn, form in enumerate(["waited", "polled", "success"]):
        for count in SIZES[1:]:
            x, pulled = made(device, me, count), made(device, me, count)
            with device.stream("side"):
                y, parts = made(device, me, count), [made(device, 0, count) for _ in ranks()]
                works = [dist.all_reduce(y, async_op=True)]
                works.append(dist.all_gather(parts, made(device, me, count), async_op=True))
            whole, shard = made(device, me, count * size), made(device, 0, count)
            works.append(dist.reduce_scatter_single(shard, whole, async_op=True))
            dist.all_reduce(x, dist.ReduceOp.AVG)
            increment(device, x)
            dist.broadcast(pulled, size - 1)
            increment(device, pulled)
            with device.stream("side" if turn % 2 else "other"):
                for work in works:
                    ended(form, work)
                for each in (y, shard, *parts):
                    increment(device, each)
            works[0].wait()
            total = size * (size + 1) / 2
            assert (device.values(x) == total / size + 1).all()
            assert (device.values(pulled) == size + 1).all()
            assert (device.values(y) == total + 1).all()
            assert (device.values(shard) == total + 1).all()


def streams():
    """The order on a device that torch takes for the CPU."""
    with fake_device(dist.get_rank()) as device:
        in_order(device)


def mixed():
    """Ranks with tensors of a device, and ranks with tensors of the host, in one call."""
    me = dist.get_rank()
    with fake_device(me) as device:
        for count in SIZES:
            x = torch.full((count,), me + 1.0)
            y = x.clone()
            dist.all_reduce(x)
            dist.all_reduce(device.tensor(y) if me % 2 else y)
            found = device.values(y) if me % 2 else y.numpy()
            assert found.tobytes() == x.numpy().tobytes()


def refused():
    """What a device does not take is an error at all ranks, and the group goes on."""
    pg, x = dist.group.WORLD, torch.ones(3)
    with fake_device() as device:
        y = device.tensor(torch.ones(3))
        pg.barrier().wait()
        for act, text in (
            (lambda: pg.allgather([[x.clone() for _ in ranks()]], [y]), "fake:0, the host: pass tensors of one"),
            (lambda: pg.allreduce([device.tensor(torch.ones(3, dtype=torch.complex64)).conj()]), "resolve_conj"),
            (lambda: pg.allreduce([device.tensor(torch.ones(1)).expand(3)]), "expanded"),
            (lambda: pg.allgather([[y] * dist.get_world_size()], [y]), "memory in common"),
            (lambda: pg.allreduce([device.tensor(torch.ones(3, dtype=torch.int32))], halved()), "does not fit"),
        ):
            assert text in str(caught(asyncoll.UsageError, act))
        pg.allreduce([y]).wait()
        assert (device.values(y) == dist.get_world_size()).all()


def halved():
    return dist._make_nccl_premul_sum(0.5)


def failed():
    """A device that fails ends the group at all ranks, in a call and before it."""
    for what in ("copy", "stage"):
        pg = dist.new_group()
        with fake_device() as device:
            y = device.tensor(torch.ones(1000))
            if dist.get_rank() == 1 and what == "copy":
                device.fail_copy(0, OSError("no such bus"))
            elif dist.get_rank() == 1:
                device.check = mock.Mock(side_effect=OSError("no such bus"))
            kind = asyncoll.DeviceError if dist.get_rank() == 1 else asyncoll.AbortedError
            error = caught(kind, lambda pg=pg, y=y: pg.allreduce([y]).wait())
            assert "fake:0 has failed: OSError: no such bus" in str(error)
            assert isinstance(error, dist.DistBackendError)
        dist.barrier()


# -- tensors that say that they are of CUDA -------------------------------------------------------------


class Future:
    """torch.futures.Future(devices=...): the current stream is noted where it is completed, and callbacks have others.

    torch makes one for real devices only.
    """

    gpu = None
    made = 0

    def __init__(self, *, devices=None):
        self.devices = devices or []
        self._callbacks, self._events = [], []
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        Future.made += bool(devices)

    def set_result(self, value):
        for _ in self.devices:
            event = Event()
            event.record(self._current())
            self._events.append(event)
        with self._lock:
            self._value = value
            self._is_over.set()
        for callback in self._callbacks:
            callback()

    def then(self, callback):
        child = Future()
        child.devices = self.devices

        def run():
            with self.gpu.stream(Stream().name):
                self._synchronize()
                child.set_result(callback(self))

        with self._lock:
            if not self._is_over.is_set():
                self._callbacks.append(run)
                return child
        run()
        return child

    def wait(self):
        self._is_over.wait()
        self._synchronize()
        return self._value

    def value(self):
        return self._value

    def done(self):
        return self._is_over.is_set()

    def _current(self):
        return Stream(name=self.gpu._stream)

    def _synchronize(self):
        for event in self._events:
            event.wait(self._current())


def emulated():
    """Calls of tensors of "cuda:0", and futures, whose callbacks come after the results on their streams."""
    me, size = dist.get_rank(), dist.get_world_size()
    total = size * (size + 1) / 2
    no_subclass = mock.patch.object(c10d, "has_torch_function", return_value=False)  # torch would leave the call to it
    with emulated_cuda(me) as gpu, mock.patch.object(torch.futures, "Future", Future), no_subclass:
        Future.gpu = gpu
        in_order(gpu)
        for count in SIZES[1:]:
            for is_slow in (False, True):
                y = made(gpu, me, count)
                with gpu.stream("side"):
                    x = made(gpu, me, count)
                    work = dist.all_reduce(x, async_op=True)
                if is_slow:
                    work.wait()
                future = work.get_future().then(lambda future: (increment(gpu, future.value()[0]), future.value())[1])
                dist.all_reduce(y)  # overlaps
                (found,) = future.wait()
                assert found is x
                increment(gpu, x)
                assert (gpu.values(x) == total + 2).all()
            after, before = (me + 1) % size, (me - 1) % size
            into = [made(gpu, 0, count) for _ in range(2)]
            ops = [dist.P2POp(dist.isend, y, after), dist.P2POp(dist.irecv, into[0], before)]
            for each in dist.batch_isend_irecv(ops):
                each.wait()
            with dist._coalescing_manager(device=torch.device("cuda", 0), async_ops=True) as manager:
                dist.isend(y, after)
                dist.irecv(into[1], before)
            manager.wait()
            for each in into:
                increment(gpu, each)
                assert (gpu.values(each) == total + 1).all()
            objects = [None] * size
            dist.all_gather_object(objects, me)
            assert objects == list(ranks())
        assert Future.made
        dist.barrier(device_ids=[0])
        gpu.captured.add("captured")
        with gpu.stream("captured"):
            x = gpu.tensor(torch.ones(3))
            assert "captured by a CUDA graph" in str(caught(asyncoll.UsageError, lambda: dist.all_reduce(x)))
        del x
        dist.barrier()
        pg = dist.new_group([0, 1])
        if me < 2:
            half = pg.split_group([0, 1])
            x = made(gpu, me, 3)
            half.allreduce([x]).wait()
            increment(gpu, x)
            assert (gpu.values(x) == 4).all()
        dist.destroy_process_group()  # while the devices are there


def main():
    dist.init_process_group("asyncoll", timeout=SECONDS)
    for case in sys.argv[1:]:
        globals()[case]()
    if dist.is_initialized():
        dist.destroy_process_group()
    print("passed", flush=True)


if __name__ == "__main__":
    main()
