"""What only a GPU can show to be right: the checks of `gpu.py`. Each runs at every rank of a new world."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import asyncoll
from asyncoll.bench.places import gpu_of
from asyncoll.errors import AsyncollError
from asyncoll.training import OverlappedSGD
from trainers.algorithms import ALGORITHMS
from trainers.demo import COMPUTE_S, LATE, RUNS
from trainers.experiment import experiment
from trainers.settings import Settings

Tell = Callable[[object], object]

COUNT = 1_000_003  # elements of the larger tensors: odd, and of several windows
SMALL = 4096
SANITIZER = "TORCH_CUDA_SANITIZER"  # the variable that turns on torch's sanitizer of streams
SLEEP_CYCLES = 200_000_000  # of the GPU's clock: about 0.1 s
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64,
)  # fmt: skip
LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x,
    lambda x: x[1:],
    lambda x: x[:4000].view(50, 80)[::2],
    lambda x: x[:4000].view(50, 80).t(),
    lambda x: x[3],
    lambda x: x[:1],
    lambda x: x[:0],
)


class NotHereError(Exception):
    """This machine cannot show it; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check: `body` raises at a rank if it fails there. The ranks `lost` do not survive it, and give no answer."""

    name: str
    what: str
    body: Callable[[asyncoll.Communicator], Awaitable[None]]
    ranks: tuple[int, ...] = ()  # empty: those of the command line
    lost: tuple[int, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)  # of the environment

    def environment(self) -> Mapping[str, str]:
        return self.variables

    def run(self, tell: Tell) -> None:
        has_ended = False

        async def whole(comm: asyncoll.Communicator) -> None:
            nonlocal has_ended
            await self.body(comm)
            has_ended = True

        try:
            asyncoll.run(whole)
        except AsyncollError:  # without the ranks that are lost, this one cannot leave in peace
            if not self.lost or not has_ended:
                raise
        tell("pass")

    def judge(self, values: object) -> str:
        del values
        return "pass"


CHECKS: list[Check] = []


def check(what: str, **more: Any) -> Callable[[Callable[[asyncoll.Communicator], Awaitable[None]]], Any]:
    """Add a function to the checks, under its name."""

    def add(body: Callable[[asyncoll.Communicator], Awaitable[None]]) -> Any:
        CHECKS.append(Check(body.__name__.replace("_", "-"), what, body, **more))
        return body

    return add


def own(comm: asyncoll.Communicator) -> torch.device:
    """The GPU of this rank."""
    device: torch.device = gpu_of(comm.local_rank)
    return device


def is_stand_in() -> bool:
    """Whether there is no GPU, and tests/stand_in takes its place."""
    return torch.cuda.is_available() and torch.cuda.get_device_name() == "stand-in"


def needs_hardware() -> None:
    if is_stand_in():
        raise NotHereError("a stand-in for a GPU cannot show it")


def values(dtype: torch.dtype, seed: int, count: int = SMALL) -> Tensor:
    """Elements on the host. Sums of floats are not exact, so that another order of additions shows."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 8, (count,), generator=generator).to(dtype)


def made(dtype: torch.dtype, layout: Callable[[Tensor], Tensor], device: torch.device, seed: int) -> Tensor:
    return layout(values(dtype, seed).to(device))


def same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have equal bits, wherever they are."""
    pair = [each.detach().cpu().contiguous().view(-1) for each in (x, y)]
    return x.shape == y.shape and x.dtype == y.dtype and bytes(_raw(pair[0])) == bytes(_raw(pair[1]))


def _raw(x: Tensor) -> Any:
    return x.view(torch.uint8).numpy() if x.numel() else b""


async def dense(comm: asyncoll.Communicator, make: Callable[[int], Tensor]) -> list[Tensor]:
    """The results of the dense calls and of messages."""
    rank, size = comm.rank, comm.size
    results: list[Any] = [
        await comm.allreduce(make(rank)),
        await comm.broadcast(make(rank), root=size - 1),
        await comm.reduce(make(rank), root=0),
        *await comm.allgatherv(make(rank)),
        await comm.allgather(make(rank)),
        await comm.gather(make(rank), root=0),
        *await comm.alltoallv([make(rank * size + dest) for dest in range(size)]),
    ]
    if make(0).dim():
        results.append(await comm.reduce_scatter(make(rank)))
    if size > 1:
        sent = comm.send(make(rank), dest=(rank + 1) % size)
        results.append(await comm.recv(make(0), source=(rank - 1) % size))
        await sent
    return [result for result in results if result is not None]


ROUTES = {  # of an allreduce of a long tensor: the sizes that choose it
    "direct": "",
    "windows": f"device={2**40}",
    "whole": f"device={2**40},staged={2**40}",
}


async def by_route(comm: asyncoll.Communicator, route: str) -> asyncoll.Communicator:
    """A communicator of all ranks whose long tensors take that route."""
    os.environ["ASYNCOLL_SIZES"] = ROUTES[route]
    made = await comm.split(0)
    # Ranks of one process share the environment: none sets it again before all have read it.
    await comm.barrier()
    os.environ.pop("ASYNCOLL_SIZES", None)
    await comm.barrier()
    assert made is not None
    return made


# -- values ---------------------------------------------------------------------------------------


@check("every dense call gives the bits of the host: dtypes, layouts, odd sizes, AVG at 3 ranks", ranks=(1, 2, 3, 5))
async def bits(comm: asyncoll.Communicator) -> None:
    device = own(comm)
    host = torch.device("cpu")
    for dtype, layout in [*((torch.float32, each) for each in LAYOUTS), *zip(DTYPES, cycle(LAYOUTS), strict=False)]:
        expected = await dense(comm, partial(made, dtype, layout, host))
        found = await dense(comm, partial(made, dtype, layout, device))
        for one, other in zip(expected, found, strict=True):
            assert other.device == device, f"a result is on {other.device}"
            assert same(one, other), f"other bits: {dtype}, shape {tuple(one.shape)}"
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = values(dtype, comm.rank, COUNT)
        y = x.to(device)
        await comm.allreduce(x, asyncoll.AVG)
        await comm.allreduce(y, asyncoll.AVG)
        assert same(x, y), f"another average of {dtype}"


def warnings_of_asyncoll() -> list[str]:
    """Those from here on."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("asyncoll").addHandler(handler)
    return said


@check("long dense calls pass through memory of the GPU, with the bits of the host")
async def direct(comm: asyncoll.Communicator) -> None:
    said = warnings_of_asyncoll()
    x = values(torch.float32, comm.rank, COUNT // comm.size * comm.size)
    y = x.to(own(comm))
    for call in (
        comm.allreduce,
        comm.broadcast,
        comm.allgather,
        comm.reduce_scatter,
    ):
        expected, found = await call(x.clone()), await call(y.clone())
        assert same(expected, found), f"other bits of {call.__name__}"
    for text in said:  # at the one rank that says why all of them go through the host
        if "through memory of the host" in text:
            assert torch.cuda.device_count() > 1, text
            raise NotHereError(text)
    await comm.barrier()


async def whole_order(comm: asyncoll.Communicator) -> None:
    """Work before and after calls on the same stream, on side streams, and of tasks that take turns."""
    device, size = own(comm), comm.size
    side = torch.cuda.Stream(device)
    for turn in range(6):
        x = torch.zeros(COUNT, device=device)
        torch.cuda._sleep(SLEEP_CYCLES)
        x.add_(comm.rank + 1)
        await comm.allreduce(x)
        x.mul_(2)
        with torch.cuda.stream(side):
            y = torch.zeros(COUNT, device=device)
            torch.cuda._sleep(SLEEP_CYCLES)
            y.add_(comm.rank + turn)
            under_way = comm.allreduce(y)
            z = torch.full((COUNT,), float(comm.rank), device=device)
            others = [comm.allreduce(z.clone(), asyncoll.MAX), under_way]
        for done in await asyncio.gather(*others):
            done.add_(1)
        torch.cuda.synchronize(device)
        assert bool((x == size * (size + 1)).all()), "work on the current stream was overtaken"
        assert bool((y == size * (size - 1) / 2 + turn * size + 1).all()), "work on a side stream was overtaken"


@check("work that is queued before and after a call is in order, on all streams and in all tasks")
async def order(comm: asyncoll.Communicator) -> None:
    for route in ROUTES:
        await whole_order(await by_route(comm, route))


@check("the same under torch's sanitizer of streams", ranks=(2,), variables={SANITIZER: "1"})
async def sanitizer(comm: asyncoll.Communicator) -> None:
    for route in ROUTES:
        await whole_order(await by_route(comm, route))


def sanitize_threads() -> None:
    """Before any thread starts: torch's sanitizer sees what they do, too. It looks at the main thread only."""
    from torch.cuda._sanitizer import CUDASanitizerDispatchMode, cuda_sanitizer

    known, run, lock = cuda_sanitizer.dispatch, threading.Thread.run, threading.RLock()

    class OfThread(CUDASanitizerDispatchMode):
        def __init__(self) -> None:
            TorchDispatchMode.__init__(self)
            self.event_handler = known.event_handler

        def __torch_dispatch__(self, *given: Any, **named: Any) -> Any:
            with lock:
                return super().__torch_dispatch__(*given, **named)

    def sanitized(thread: threading.Thread) -> None:
        with OfThread():
            run(thread)

    threading.Thread.run = sanitized  # type: ignore[method-assign]


@check("work on one stream holds up no call that is made on another one")
async def streams(comm: asyncoll.Communicator) -> None:
    needs_hardware()  # a stream that works while the host goes on
    device, is_over = own(comm), torch.cuda.Event()
    y = torch.ones(COUNT, device=device)
    await comm.allreduce(y, asyncoll.MAX)  # memory is pinned now
    with torch.cuda.stream(torch.cuda.Stream(device)):
        torch.cuda._sleep(20 * SLEEP_CYCLES)
        is_over.record()
        x = torch.ones(COUNT, device=device)
        held = comm.allreduce(x)
    for turn in range(5):
        await comm.allreduce(y, asyncoll.MAX)
        assert not is_over.query(), f"allreduce {turn} has waited for the other stream"
    torch.cuda.current_stream(device).synchronize()
    assert not is_over.query(), "the results of the allreduces have waited for the other stream"
    gathered = await comm.allgather(y)
    assert bool((gathered == 1).all())  # the host waits for the current stream
    assert not is_over.query(), "the allgather has waited for the other stream"
    await held
    assert bool((x == comm.size).all())


@check("a tensor may be dropped, and its memory filled anew, while its call is under way")
async def lifetime(comm: asyncoll.Communicator) -> None:
    device = own(comm)
    for turn in range(20):
        x = torch.full((COUNT,), float(turn), device=device)
        under_way = comm.allreduce(x)
        del x
        torch.full((COUNT,), -1.0, device=device)  # gets the same memory, unless the call still holds it
        total = await under_way
        assert bool((total == turn * comm.size).all()), "the memory was reused too early"


@check("all ranks pin and copy at once, and no error of CUDA stays pending")
async def pins(comm: asyncoll.Communicator) -> None:
    device = own(comm)
    for count in (COUNT, 16 * COUNT, 3):
        x = torch.ones(count, device=device)
        await comm.allreduce(x)
        torch.cuda.synchronize(device)
        assert bool((x == comm.size).all())
        x.add_(1)  # raises an error that a failed registration has left pending
        torch.cuda.synchronize(device)


@check(
    "the bits, with expandable segments", ranks=(2,), variables={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
)
async def segments(comm: asyncoll.Communicator) -> None:
    await bits(comm)


@check("ranks that see the GPUs in another order", ranks=(2,))
async def visible(comm: asyncoll.Communicator) -> None:
    if torch.cuda.device_count() < 2:
        raise NotHereError("needs two GPUs")
    x = torch.full((COUNT,), 1.0, device=torch.device("cuda", 1 - comm.rank % 2))
    await comm.allreduce(x)
    assert bool((x == comm.size).all())


@check("ranks with tensors of the GPU and ranks with tensors of the host in one call")
async def mixed(comm: asyncoll.Communicator) -> None:
    place = own(comm) if comm.rank % 2 else torch.device("cpu")
    x = torch.arange(COUNT, dtype=torch.float32, device=place)
    await comm.allreduce(x)
    assert same(x, torch.arange(COUNT, dtype=torch.float32) * comm.size)


@check("long messages in both directions, while the GPU computes, to receivers on the GPU and at the host")
async def messages(comm: asyncoll.Communicator) -> None:
    device, after, before = own(comm), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for tag in range(4):
        torch.cuda._sleep(SLEEP_CYCLES)
        both = [torch.arange(2 * COUNT, dtype=torch.float32, device=device)[::2] + 100 * comm.rank + k for k in (1, 2)]
        into = [torch.zeros(2 * COUNT, device=device)[1::2], torch.zeros(COUNT, device=device if tag % 2 else "cpu")]
        sends = [comm.send(both[0], after, tag), comm.send(both[1], before, tag)]
        receives = [comm.recv(into[0], before, tag), comm.recv(into[1], after, tag)]
        await asyncio.gather(*receives, *sends)
        for x, source, k in ((into[0], before, 1), (into[1], after, 2)):
            assert same(x, torch.arange(0, 2 * COUNT, 2, dtype=torch.float32) + 100 * source + k)


@check("long results of functions come from the GPU of another rank to that of the caller, in both directions")
async def rpc_direct(comm: asyncoll.Communicator) -> None:
    device, said = own(comm), warnings_of_asyncoll()

    def made(seed: int) -> list[Tensor]:
        torch.cuda._sleep(SLEEP_CYCLES)
        tensors = [values(torch.float32, seed + k, COUNT).to(device) for k in range(2)]
        return [*tensors, values(torch.bfloat16, seed, 2 * COUNT).to(device)[::2]]

    async def changes(seed: int) -> Tensor:
        x = values(torch.float32, seed, COUNT).to(device)
        asyncio.get_running_loop().call_soon(x.zero_)
        return x

    for function in (made, changes):
        comm.rpc.register(function)
    await comm.barrier()
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    calls = [comm.rpc.to(device).call(rank, "made", rank + seed) for rank in others for seed in (1, 9)]
    found = await asyncio.gather(*calls)
    for tensors, seed in zip(found, (rank + seed for rank in others for seed in (1, 9)), strict=True):
        expected = [values(torch.float32, seed + k, COUNT) for k in range(2)]
        for x, y in zip(tensors, [*expected, values(torch.bfloat16, seed, 2 * COUNT)[::2]], strict=True):
            assert x.device == device
            assert same(x, y), f"other bits of seed {seed}"
    for rank in others:
        assert same(await comm.rpc.to(device).call(rank, "changes", 5), values(torch.float32, 5, COUNT))
        assert same(await comm.rpc.call(rank, "changes", 5), values(torch.float32, 5, COUNT))
    for text in said:
        if "through memory of the host" in text:
            raise NotHereError(text)
    await comm.barrier()


# -- rounds ---------------------------------------------------------------------------------------


@check("rounds lose no contribution and count none twice: solo, majority and quorum, with late ranks")
async def rounds(comm: asyncoll.Communicator) -> None:
    device, generator = own(comm), np.random.default_rng(comm.rank)
    kinds: dict[str, Callable[..., Awaitable[asyncoll.Reduction]]] = {
        "solo": comm.solo_allreduce,
        "majority": comm.majority_allreduce,
        "quorum": partial(comm.quorum_allreduce, quorum=max(1, comm.size - 1)),
    }
    for name, call in kinds.items():
        given = taken = 0.0
        for _ in range(30):
            if generator.random() < 0.3:
                torch.cuda._sleep(int(SLEEP_CYCLES * generator.random()))
            value = float(generator.integers(1, 100))
            given += value
            reduction = await call(torch.full((SMALL,), value, device=device), name=name, history=1000)
            taken += sum(whole(result) for result in reduction.results())
        last = await comm.join(name, torch.zeros(SMALL, device=device))
        taken += sum(whole(result) for result in last.results()) if last is not None else 0.0
        everyones = await comm.allgather(torch.tensor([given, taken], dtype=torch.float64))
        total = float(everyones[:, 0].sum())
        assert everyones[:, 1].tolist() == [total] * comm.size, f"{name}: {total} was given, and {everyones} taken"


def whole(result: Tensor) -> float:
    """The value that all elements of a round's result have."""
    assert bool((result == result[0]).all()), "a round is torn"
    return float(result[0])


@check("a contribution is used although its rank is stopped", ranks=(3,))
async def stopped(comm: asyncoll.Communicator) -> None:
    device, size = own(comm), comm.size
    call = partial(comm.quorum_allreduce, name="stopped", quorum=size)
    await call(torch.zeros(SMALL, device=device))  # all know the operation
    pid = torch.tensor(os.getpid())
    under_way = None
    if comm.rank != 0:
        under_way = call(torch.full((SMALL,), float(comm.rank), device=device))
        await asyncio.sleep(0.2)  # its copy has arrived at the host
    if comm.rank == 1:
        await comm.send(pid, dest=0)
    elif comm.rank == 0:
        await comm.recv(pid, source=1)
        os.kill(int(pid), signal.SIGSTOP)
    try:
        reduction = await (under_way or call(torch.zeros(SMALL, device=device)))
        assert whole(reduction.result) == size * (size - 1) / 2, "the contribution of a stopped rank was not used"
    finally:
        if comm.rank == 0:
            os.kill(int(pid), signal.SIGCONT)
    await comm.barrier()


# -- faults ---------------------------------------------------------------------------------------


@check("a cancelled call leaves the next one right: while its copy waits, and while it waits for others")
async def cancelled(comm: asyncoll.Communicator) -> None:
    device = own(comm)
    for state in ("queued", "arrived"):
        x = torch.ones(COUNT, device=device)
        if state == "queued":
            torch.cuda._sleep(SLEEP_CYCLES)
        task = asyncio.ensure_future(comm.solo_allreduce(x, name=state))
        await asyncio.sleep(0 if state == "queued" else 0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        y = torch.full((COUNT,), 2.0, device=device)
        await comm.allreduce(y)
        assert bool((y == 2 * comm.size).all())


@contextmanager
def named(rank: int) -> Iterator[None]:
    """The block must raise an error that names rank `rank`."""
    text = "no error"
    try:
        yield
    except AsyncollError as error:
        text = str(error)
    assert f"rank {rank}" in text, f"rank {rank} is lost, and the error does not name it: {text}"


def killed_while(delay_s: float, sleep_cycles: int) -> Callable[[asyncoll.Communicator], Awaitable[None]]:
    """Rank 1 is killed `delay_s` after its call has begun, whose copy waits for `sleep_cycles` of the GPU."""

    async def body(comm: asyncoll.Communicator) -> None:
        device = own(comm)
        await comm.allreduce(torch.ones(COUNT, device=device))
        await comm.barrier()
        if comm.rank == 1:
            torch.cuda._sleep(max(1, sleep_cycles))
            under_way = asyncio.ensure_future(comm.allreduce(torch.ones(COUNT, device=device)))
            await asyncio.sleep(delay_s)
            os.kill(os.getpid(), signal.SIGKILL)
            await under_way
        with named(1):
            while True:
                await comm.allreduce(torch.ones(COUNT, device=device))

    return body


CHECKS += [
    Check("killed", "kill -9 while a copy waits: every survivor names the rank",
          killed_while(0.0, 5 * SLEEP_CYCLES), (2, 4), lost=(1,)),
    Check("killed-later", "kill -9 while copies are under way: every survivor names the rank",
          killed_while(0.002, 0), (2, 4), lost=(1,)),
]  # fmt: skip


@check("an illegal access at one rank is an error that names it, and the world ends", ranks=(2, 3), lost=(1,))
async def illegal(comm: asyncoll.Communicator) -> None:
    device = own(comm)
    await comm.allreduce(torch.ones(SMALL, device=device))
    x = torch.ones(SMALL, device=device)
    if comm.rank == 1:
        x[torch.tensor([10**9], device=device)] = 1  # a failed assertion in a kernel, which ends the context
    with named(1) if comm.rank != 1 else nullcontext():  # rank 1 ends with the first error, of torch or of the call
        while True:
            await comm.allreduce(x)


@check("a device out of memory is an error that names it at every rank", ranks=(2,))
async def memory(comm: asyncoll.Communicator) -> None:
    device = own(comm)
    x = torch.ones(SMALL, device=device)
    await comm.allgather(x)
    await asyncio.sleep(0.2)  # the result of the call is free
    hoard = fill(device) if comm.rank == 1 else []
    with named(1):
        for _ in range(100):
            await comm.allgather(x)
    hoard.clear()


def fill(device: torch.device) -> list[Tensor]:
    """Tensors that leave no room for another one."""
    hoard, count = [], 2**30
    while count >= SMALL:
        try:
            hoard.append(torch.ones(count, device=device))
        except torch.OutOfMemoryError:
            count //= 2
    return hoard


@check("a call inside of a capture is refused, and the next one is right", ranks=(2,))
async def capture(comm: asyncoll.Communicator) -> None:
    device = own(comm)
    x = torch.ones(SMALL, device=device)
    await comm.allreduce(x)
    graph, refused = torch.cuda.CUDAGraph(), ""
    with torch.cuda.graph(graph):
        try:
            comm.allreduce(x)
        except asyncoll.UsageError as error:
            refused = str(error)
    assert "captur" in refused, f"the call was not refused: {refused!r}"
    y = torch.ones(SMALL, device=device)
    await comm.allreduce(y)
    assert bool((y == comm.size).all())


# -- training -------------------------------------------------------------------------------------


@check("all trainers learn with models on the GPU", ranks=(4,))
async def trainers(comm: asyncoll.Communicator) -> None:
    for algorithm in ALGORITHMS:
        settings = Settings.of(algorithm, device="cuda", rounds=120, **OPTIONS.get(algorithm, {}))
        report = await experiment(comm, algorithm, settings)
        assert report is None or report.final_score > 0.9, f"{algorithm}: {report.final_score:.1%}"


OPTIONS: dict[str, dict[str, Any]] = {
    "eager_sgd": {"partial": "majority"},
    "wagma_sgd": {"group_size": 2},
    "oktopk_sgd": {"density": 0.05, "clip_norm": 1.0},
}


@check("the demo: eager-SGD is faster than synchronous SGD where one rank of four is late", ranks=(4,))
async def demo(comm: asyncoll.Communicator) -> None:
    speeds = {}
    for rule, (algorithm, *flags) in RUNS.items():
        options = dict(batched(flags))
        settings = Settings.of(algorithm, device="cuda", compute_s=COMPUTE_S, imbalance=LATE, **options)
        part = await comm.split(0)  # the same ranks: a second training on `comm` would need another name
        assert part is not None
        async with part:
            report = await experiment(part, algorithm, settings)
        if report is not None:
            assert report.final_score > 0.96, f"{rule}: {report.final_score:.1%}"
            speeds[rule] = report.steps_per_s
    assert not speeds or min(speeds["solo"], speeds["majority"]) > speeds["synchronous"], f"rounds a second: {speeds}"


def batched(flags: list[str]) -> Iterator[tuple[str, str]]:
    """The names and values of flags of the command line."""
    for flag, value in zip(flags[::2], flags[1::2], strict=True):
        yield flag.removeprefix("--"), value


@check("a ResNet-50 of 25.6 M parameters trains with eager-SGD", ranks=(4,))
async def resnet(comm: asyncoll.Communicator) -> None:
    needs_hardware()
    settings = Settings.of("eager_sgd", workload="imagenet", full=True, device="cuda", rounds=20, batch=16)
    report = await experiment(comm, "eager_sgd", settings)
    assert report is None or math.isfinite(report.final_score)


@check("the exchange of gradients and backward() overlap in a trace of the GPU", ranks=(2,))
async def overlap(comm: asyncoll.Communicator) -> None:
    needs_hardware()
    share = await hidden_share(comm)
    assert share > 0, "the exchange begins when backward() is over"


async def hidden_share(comm: asyncoll.Communicator) -> float:
    """The share of the work of the calls on the GPU that goes on beside kernels of the program, in a step of it."""
    device = own(comm)
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(6))).to(device)
    trainer = OverlappedSGD(comm, model, torch.optim.SGD(model.parameters(), lr=1e-3))
    await trainer.start()
    x = torch.ones(2048, 4096, device=device)
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:  # the last one counts
            model(x).mean().backward()
            await trainer.step()
            torch.cuda.synchronize(device)
    await trainer.finish()
    return hidden(spans_by_stream(trace.events()))


Span = tuple[float, float]  # start and end, in us


def spans_by_stream(events: Iterable[Any]) -> dict[int, list[Span]]:
    """When each stream of a profile had work."""
    streams: dict[int, list[Span]] = defaultdict(list)
    for event in events:
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            streams[event.device_resource_id].append((event.time_range.start, event.time_range.end))
    return streams


def hidden(streams: Mapping[int, list[Span]]) -> float:
    """The share of the work of all streams but the busiest, which is the program's, that goes on beside its work."""
    assert streams, "the trace has no work of the GPU"
    program = max(streams, key=lambda stream: sum(end - start for start, end in streams[stream]))
    others = [span for stream, spans in streams.items() if stream != program for span in spans]
    assert others, "the trace has no work of the calls"
    both = sum(
        max(0.0, min(end, busy_end) - max(start, busy_start))
        for start, end in others
        for busy_start, busy_end in streams[program]  # one after the other
    )
    return both / sum(end - start for start, end in others)
