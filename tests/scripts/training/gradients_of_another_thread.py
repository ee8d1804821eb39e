"""`OverlappedSGD` with a model on a device whose gradients torch computes in a thread of its own, as those of a GPU.

The device is one of torch's backends written in Python. Its tensors wrap tensors of the CPU. Prints for each rank
whether hooks ran in the thread of `backward()`, before, in three steps of, and after the training; whether buckets
started while `backward()` went on, in each step; and whether the model is that of a training on the CPU, to the bit.
In the end, whether tensors of the device are finite.
"""

import contextlib
import math
import threading
from unittest import mock

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from asyncoll.testing import run_ranks
from asyncoll.training import AllreduceSGD, OverlappedSGD, replicas
from asyncoll.training.trainer import finite

DEVICE = "toy"
SIZES = [(4, 5), (4,), (3, 4), (3,)]  # of the parameters


class Wrapped(torch.Tensor):
    """A tensor of the device."""

    @staticmethod
    def __new__(cls, inner):
        device, strides = f"{DEVICE}:0", inner.stride()
        x = torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=strides, dtype=inner.dtype, device=device)
        x.inner = inner
        return x

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        place = kwargs.pop("device", None)
        found = func(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs))
        if func._schema.is_mutable:
            return args[0]
        is_of_host = place is not None and place.type == "cpu"
        return found if is_of_host else tree_map(lambda x: Wrapped(x) if isinstance(x, torch.Tensor) else x, found)


def unwrapped(x):
    return x.inner if isinstance(x, Wrapped) else x


class Flat:
    """What `asyncoll.flatten` gives, for tensors that it refuses."""

    def __init__(self, model):
        sizes = [parameter.numel() for parameter in model.parameters()]
        self.parameters = self.trainable = Wrapped(torch.cat([p.inner.flatten() for p in model.parameters()]))
        self.gradients = Wrapped(torch.zeros(sum(sizes)))
        pieces = zip(self.parameters.inner.split(sizes), self.gradients.inner.split(sizes), strict=True)
        for parameter, (data, gradient) in zip(model.parameters(), pieces, strict=True):
            parameter.inner = data.view(parameter.shape)
            parameter.grad = Wrapped(gradient.view(parameter.shape))

    def collect_gradients(self):
        """They are never elsewhere."""

    def collect_gradient(self, parameter):
        pass

    def zero_gradients(self):
        self.gradients.zero_()


class Unwrapping:
    """A communicator whose collectives take tensors of the device."""

    def __init__(self, comm):
        self._comm = comm
        self.started = 0

    def __getattr__(self, name):
        return getattr(self._comm, name)

    async def broadcast(self, x, root):
        return await self._comm.broadcast(unwrapped(x), root=root)

    def allreduce(self, x, op):
        self.started += 1
        return self._comm.allreduce(unwrapped(x), op=op)


class Model(torch.nn.Module):
    def __init__(self, make):
        super().__init__()
        self.all = torch.nn.ParameterList([torch.nn.Parameter(make(start(size))) for size in SIZES])

    def forward(self, x):
        first, bias, second, other = self.all
        self.hidden = torch.tanh(x @ first.t() + bias)
        return (self.hidden @ second.t() + other).square().sum()


def start(size):
    return torch.linspace(-1, 1, torch.Size(size).numel()).view(size)


class Stream:
    """The only one."""

    def wait_stream(self, other):
        raise AssertionError("it waits for itself")


async def trained(comm, algorithm, make):
    model = Model(make)
    sgd = algorithm(comm, model, torch.optim.SGD(model.parameters(), lr=0.125), **RULES.get(algorithm, {}))
    threads, started = [], []
    model.all[0].register_post_accumulate_grad_hook(lambda _: threads.append(threading.current_thread()))

    def backward(number):
        loss = model(make(torch.full((2, 5), 0.25 * (1 + number + comm.rank))))
        model.hidden.register_hook(lambda _: started.append(getattr(comm, "started", 0)))
        loss.backward()

    backward(0)  # before the training
    sgd._flat.zero_gradients()
    await sgd.start()
    for number in range(3):
        backward(number)
        await sgd.step()
    await sgd.finish()
    await comm.barrier()  # the ranks share a thread: the training has ended for both
    backward(0)
    here = [thread is threading.current_thread() for thread in threads]
    overlapped = [0 < each - 4 * number < 4 for number, each in enumerate(started[1:4])]
    return here, overlapped, [unwrapped(parameter.detach()).clone() for parameter in model.parameters()]


RULES = {OverlappedSGD: {"bucket_bytes": 1}}


async def main(comm):
    _, _, expected = await trained(comm, AllreduceSGD, lambda x: x)
    with contextlib.ExitStack() as patched:
        patched.enter_context(mock.patch.object(replicas, "flattened", lambda model, optimizer: Flat(model)))
        patched.enter_context(mock.patch.object(torch.cuda, "current_stream", return_value=STREAM))
        patched.enter_context(mock.patch.object(torch.cuda, "Event", mock.Mock()))
        patched.enter_context(mock.patch.object(torch.cuda, "device", return_value=contextlib.nullcontext()))
        here, overlapped, found = await trained(Unwrapping(comm), OverlappedSGD, Wrapped)
    return here, overlapped, all(map(torch.equal, expected, found))


STREAM = Stream()
_setup_privateuseone_for_python_backend(DEVICE)
for here, overlapped, is_equal in run_ranks(2, main):
    print(here, overlapped, is_equal)
values = ([1.0, 3e38, 3e38], [1.0, math.nan], [-math.inf, 1.0], [])
print([bool(finite(Wrapped(torch.tensor(each)))) for each in values])
