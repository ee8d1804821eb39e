"""The devices of CUDA, on an emulation. `benchmarks/gpu.py` checks them on a GPU."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import mmap
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import uvloop
from click.testing import CliRunner

from asyncoll import doctor
from asyncoll.cli import main
from asyncoll.doctor import Findings, examine
from asyncoll.errors import AbortedError, DeviceError, UsageError
from asyncoll.testing import check_device, run_ranks
from asyncoll.testing.devices.fake_exchange import FakeExchange
from asyncoll.training.trainer import computed
from asyncoll.transport.staging import cuda, probe
from asyncoll.transport.staging.cuda import CudaDevice
from asyncoll.transport.staging.landing import Landing
from asyncoll.transport.staging.mirrors import DeviceStager
from asyncoll.transport.staging.pool import Pool
from tests.support.emulated_cuda import emulated_cuda
from tests.support.places import SCRIPTS
from tests.support.processes import WHOLE_END

SCRIPT = SCRIPTS / "transport/staging/killed_during_copies.py"
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


class Program:
    """A `DeviceProgram` of an emulated device."""

    def __init__(self, gpu):
        self.device = CudaDevice(0)
        self.tensor, self.values, self.hold = gpu.tensor, gpu.values, gpu.hold
        self._gpu = gpu

    def add(self, x, value):
        self._gpu.compute(lambda array: np.add(array, value, out=array), x)

    def stream(self):
        return self._gpu.stream("side")


@contextlib.contextmanager
def opened(seed=0):
    with emulated_cuda(seed) as gpu:
        program = Program(gpu)
        try:
            yield program
        finally:
            program.device.close()


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_the_contract(loop):
    check_device(opened, loop)


def test_a_thread_waits_for_the_work_of_a_stream():
    with emulated_cuda(turned_by="program") as gpu:
        x = gpu.tensor(torch.zeros(3))
        with gpu.stream("side"):
            gpu.compute(lambda array: array.__iadd__(1), x)
            waiting = threading.Thread(target=computed(torch.device("cuda", 0)))
        waiting.start()
        turns = 0
        while waiting.is_alive():
            turns += gpu.turn()
        assert turns >= 2  # the work, and the event after it


# -- what only a device with real memory has ----------------------------------------------------------


def pages(nbytes):
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def turned(gpu, transfer):
    """Let the device go on until the transfer is over, and the host has seen it."""
    over = threading.Event()
    transfer.when_moved(transfer.nbytes, over.set)
    while not over.is_set():
        gpu.turn()


@pytest.fixture
def gpu():
    """Nothing moves before the test lets it."""
    with emulated_cuda(0, "program") as each:
        yield each


@pytest.fixture
def device(gpu):
    each = CudaDevice(0)
    yield each
    gpu.run()
    each.close()


@pytest.mark.parametrize("is_packed", [False, True])
def test_tensors_live_until_their_copies_are_over(gpu, device, is_packed):
    """The program has let go of them. `gpu` finds memory that is freed in use."""
    for start in ("fetch", "put"):
        whole = gpu.tensor(torch.arange(600, dtype=torch.int32).reshape(20, 30))
        mark = device.mark(whole.t() if is_packed else whole)
        transfer = mark.fetch(0, pages(2400)) if start == "fetch" else mark.put(pages(2400), 0)
        del whole, mark
        gc.collect()
        turned(gpu, transfer)


def test_a_rank_that_is_cancelled_as_it_leaves_unpins_its_memory(monkeypatch):
    settled = DeviceStager._settled

    async def cancelled(stager):
        assert stager._under_way
        leaving[0].cancel()
        asyncio.get_running_loop().call_soon(release[0])
        return await settled(stager)

    monkeypatch.setattr(DeviceStager, "_settled", cancelled)
    leaving, release = [], []

    async def main(comm):
        with gpu.stream("side"):
            x = gpu.tensor(torch.ones(3000))
            release.append(gpu.hold())
            work = comm.allreduce(x)
        comm.abort("enough")
        with pytest.raises(AbortedError):
            await work
        leaving.append(asyncio.current_task())
        raise RuntimeError("the program fails")

    with emulated_cuda() as gpu:
        with pytest.raises(asyncio.CancelledError):  # in the place of the error
            run_ranks(1, main, "shm")
        assert release
        assert not gpu.registered
        assert not threads_of_devices()


def test_what_a_failed_copy_has_queued_comes_before_the_program_goes_on(gpu, device):
    x, block = gpu.tensor(torch.zeros(8)), gpu.tensor(torch.ones(32, dtype=torch.uint8))
    mark = device.mark(x)

    def work():
        mark.content.copy_(block, non_blocking=True)
        raise RuntimeError("the next part cannot be queued")

    transfer = device.queue_shared(32, work, mark)
    mark.join()
    gpu.compute(lambda array: array.fill(2), x)  # a hazard if it may come before the copy
    assert transfer.error is None  # what has been queued still uses the memory
    turned(gpu, transfer)
    gpu.run()
    assert (transfer.moved, str(transfer.error)) == (0, "the next part cannot be queued")


def test_new_tensors_are_memory_of_the_stream_of_the_mark(gpu, device):
    with gpu.stream("side"):
        mark = device.mark(gpu.tensor(torch.zeros(5)))
    x, its_mark = mark.like("int32", (5,))
    its_mark.put(np.zeros(20, np.uint8), 0)
    with gpu.stream("side"):
        its_mark.join()
        increment(gpu, x)
    del x, its_mark
    gc.collect()


def test_large_copies_land_in_parts(gpu, device):
    x = gpu.tensor(torch.arange(3_000_000, dtype=torch.int32))
    into = pages(12_000_000)
    transfer = device.mark(x).fetch(0, into)
    landed = []
    transfer.when_moved(1, lambda: landed.append(transfer.moved // 4))  # in the thread that lands the parts
    while not landed:
        gpu.turn()
    (count,) = landed
    assert 0 < count < 3_000_000
    assert (into.view(np.int32)[:count] == np.arange(count)).all()


def test_memory_that_is_pinned_in_pieces(gpu, device):
    block = pages(5 * 4096)
    blocks = block[:4096], block[4096 : 3 * 4096], block[4 * 4096 :]
    assert all(device.pin(each) for each in blocks)
    x = gpu.tensor(torch.arange(5 * 1024 - 6, dtype=torch.int32))
    mark, into = device.mark(x), block[8 : 5 * 4096 - 16]
    turned(gpu, mark.fetch(0, into))
    assert (into.view(np.int32) == np.arange(5 * 1024 - 6)).all()
    turned(gpu, mark.put(into, 0))
    for each in blocks:
        device.unpin(each)


@pytest.mark.parametrize("after", [0, 1])
def test_a_driver_that_refuses_to_pin(gpu, device, after, caplog):
    gpu.refuses_after = after
    block = pages((1 << 26) + 4096)  # is pinned in two pieces
    assert not device.pin(block)
    assert not device.pin(block)
    assert not gpu.registered
    assert len(caplog.records) == 1
    assert "cuda:0 does not pin memory of ours, so copies use that of torch, if any: invalid argument" in caplog.text
    gpu.tensor(torch.ones(3))
    device.mark(gpu.tensor(torch.ones(3)))


def test_a_device_that_does_not_end_its_work_is_left(gpu, monkeypatch, caplog):
    """Its memory stays pinned. The thread ends when the device goes on."""
    monkeypatch.setattr(cuda, "_PATIENCE_S", 0.0)
    device = CudaDevice(0)
    stager = DeviceStager(device, pages, owns=True)
    block = stager.pool.empty(100)
    with gpu.stream("side"):
        release = gpu.hold()
        transfer = device.mark(gpu.tensor(torch.ones(25))).fetch(0, block)  # which the stager does not know of
    asyncio.run(stager.close())
    assert "cuda:0 has not ended its work" in caplog.text
    assert gpu.registered
    release()
    turned(gpu, transfer)
    stager.pool.close()
    monkeypatch.undo()
    assert device.close()
    assert not threads_of_devices()


def test_a_broken_device(gpu, device):
    x = gpu.tensor(torch.ones(1000))
    mark = device.mark(x)
    copies = [mark.fetch(0, pages(4096)[:4000]) for _ in range(3)]
    gpu.fail("an illegal memory access")
    copies += [mark.fetch(0, pages(4096)[:4000]), mark.put(pages(4096)[:4000], 0)]
    for transfer in copies:
        turned(gpu, transfer)
        assert "CUDA error: an illegal memory access" in str(transfer.error)
        assert transfer.moved == 0
    with pytest.raises(RuntimeError, match="illegal"):
        device.mark(x)


def test_nothing_lands_behind_what_is_missing():
    transfer = Landing(10)
    transfer.advance(4)
    transfer.fail(OSError("gone"))
    transfer.fail(OSError("another"))
    transfer.advance(10)
    assert (transfer.moved, str(transfer.error)) == (4, "gone")


def test_a_captured_stream(gpu, device):
    x = gpu.tensor(torch.ones(5))
    mark = device.mark(x)
    gpu.captured.add("side")
    device.check()
    with gpu.stream("side"):
        with pytest.raises(UsageError, match="current stream of cuda:0 is captured by a CUDA graph"):
            device.check()
        with pytest.raises(UsageError, match="await it, outside of the capture"):
            mark.join()


def test_calls_go_on_while_another_thread_captures():
    """Their threads wait for events, and pin memory, which a capture forbids unless they have said otherwise."""

    async def main(comm):
        gpu.captured.add("of another thread")
        await reduced(comm, gpu)

    with emulated_cuda() as gpu:
        run_ranks(2, main, "shm")
        assert gpu.captured


def test_a_capture_begins_before_a_call_is_awaited():
    async def main(comm):
        call = comm.allreduce(gpu.tensor(torch.ones(10)))
        gpu.captured.add("side")
        with pytest.raises(AbortedError, match="the current stream of cuda:0 is captured by a CUDA graph"):
            await awaited(call, comm)

    async def awaited(call, comm):
        with gpu.stream("side"):
            await call
        while True:
            await comm.barrier()
            await asyncio.sleep(0)

    with emulated_cuda() as gpu, pytest.raises(DeviceError, match="is captured by a CUDA graph"):  # as it leaves
        alone(main)


def test_tensors_of_inference_mode(gpu, device):
    """torch writes to them in that mode only, which is one of the thread."""
    with torch.inference_mode():
        whole = gpu.tensor(torch.zeros(600, dtype=torch.int32).reshape(20, 30))
        for x in (whole, whole.t()):
            mark = device.mark(x)
            with ThreadPoolExecutor(1) as thread:
                transfer = thread.submit(mark.put, np.ones(2400, np.uint8), 0).result()
            turned(gpu, transfer)
    mark.join()
    assert (gpu.values(whole) == 0x01010101).all()


def increment(gpu, x):
    gpu.compute(lambda array: np.add(array, 1, out=array), x)


# -- opening, and errors of calls ---------------------------------------------------------------------


def threads_of_devices():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("asyncoll-cuda")]


async def reduced(comm, gpu):
    x = gpu.tensor(torch.full((5000,), float(comm.rank)))
    await comm.allreduce(x)
    assert (gpu.values(x) == comm.size * (comm.size - 1) / 2).all()


@pytest.mark.parametrize("transport", ["inproc", "shm", "zmq"])
def test_a_rank_opens_the_device_and_closes_it_with_the_world(transport):
    async def main(comm):
        await reduced(comm, gpu)
        assert "asyncoll-cuda:0" in threads_of_devices()

    for _ in range(2):
        with emulated_cuda(1) as gpu:
            run_ranks(2, main, transport)
            assert not gpu.registered
            assert not threads_of_devices()


@pytest.mark.parametrize("transport", ["inproc", "shm", "zmq"])
def test_a_device_closes_when_the_world_has_failed(transport):
    async def main(comm):
        await reduced(comm, gpu)
        if comm.rank == 1:
            raise ZeroDivisionError
        calls = [comm.allreduce(gpu.tensor(torch.ones(200_000))) for _ in range(3)]
        assert {*map(type, await asyncio.gather(*calls, return_exceptions=True))} == {AbortedError}

    with emulated_cuda(1) as gpu:
        with pytest.raises(ZeroDivisionError):
            run_ranks(3, main, transport)
        assert not gpu.registered
        assert not threads_of_devices()


def alone(main):
    run_ranks(1, main, "inproc")


def test_a_driver_that_refuses_to_pin_for_calls(caplog):
    with emulated_cuda() as gpu:
        gpu.refuses_after = 0

        async def main(comm):
            for _ in range(3):
                await reduced(comm, gpu)

        run_ranks(2, main, "shm")
        assert len(gpu._allocated) == 2  # one block of each rank, which all its calls use
    assert len([record for record in caplog.records if "does not pin" in record.message]) == 2  # ranks
    assert "does not unpin" not in caplog.text


def test_all_copies_are_of_pinned_memory_of_ours():
    async def main(comm):
        comm.rpc.register(make_ones)
        xs = [gpu.tensor(torch.full((1000 * comm.size,), float(comm.rank))) for _ in range(8)]
        results = [
            await comm.allgather(xs[0]),
            await comm.reduce_scatter(xs[1]),
            await comm.alltoall(xs[2]),
            *await comm.allgatherv(xs[3]),
            *await comm.alltoallv(xs[:2]),
            await comm.rpc.to("cuda:0").call(1 - comm.rank, "make_ones"),
        ]
        await comm.solo_allreduce(xs[4])
        assert [len(result) for result in results] == [2, 1000, 2000, 2000, 2000, 2000, 2000, 5]
        await comm.barrier()

    with emulated_cuda() as gpu:
        run_ranks(2, main, "shm")
        assert not gpu._allocated


def make_ones():
    return torch.ones(5)


def test_a_driver_without_pinned_memory(monkeypatch, caplog):
    """Copies take the detour, but for that they need memory of torch's as well: it has some again later."""

    def fail(nbytes):
        raise RuntimeError("out of memory")

    with emulated_cuda(0, "program") as gpu:
        gpu.refuses_after, device = 0, CudaDevice(0)
        with monkeypatch.context() as patch:
            patch.setattr(gpu, "host_memory", fail)
            pool = Pool(device, pages)
            block = pool.empty(4000)
        assert "cuda:0 has no pinned memory, so copies take a detour: RuntimeError: out of memory" in caplog.text
        assert not pool.is_pinned
        mark = device.mark(gpu.tensor(torch.arange(1000, dtype=torch.int32)))
        turned(gpu, mark.fetch(0, block))
        assert (block.view(np.int32) == np.arange(1000)).all()
        pool.close()
        device.close()


def test_calls_without_any_pinned_memory(monkeypatch):
    def fail(nbytes):
        raise RuntimeError("out of memory")

    async def main(comm):
        text = r"cuda:0 has no pinned memory, .* \(invalid argument\) .* \(RuntimeError: out of memory\): free memory"
        with pytest.raises((DeviceError, AbortedError), match=text):
            await reduced(comm, gpu)

    with emulated_cuda() as gpu:
        gpu.refuses_after = 0
        monkeypatch.setattr(gpu, "host_memory", fail)
        run_ranks(2, main, "shm")


def test_a_thread_that_does_not_get_to_its_device(monkeypatch):
    """Nothing waits for ever: what it was to see has failed. The memory of a copy stays until that is over."""

    @contextlib.contextmanager
    def relaxed():
        if threading.current_thread().name == "asyncoll-cuda:0":
            raise RuntimeError("no device")
        yield

    async def main(comm):
        with pytest.raises((DeviceError, AbortedError), match="cuda:0 has failed: RuntimeError: no device"):
            await reduced(comm, gpu)

    monkeypatch.setattr(cuda, "relaxed", relaxed)
    with emulated_cuda() as gpu:
        run_ranks(2, main, "shm")
        assert not gpu.registered
        assert not threads_of_devices()


def test_a_call_on_a_captured_stream_has_not_begun():
    async def main(comm):
        gpu.captured.add("side")
        with gpu.stream("side"):
            for call in (comm.allreduce, comm.solo_allreduce, comm.allgather):
                with pytest.raises(UsageError, match=f"^rank {comm.rank}: the current stream of cuda:0 is"):
                    call(gpu.tensor(torch.ones(10)))
        await reduced(comm, gpu)

    with emulated_cuda() as gpu:
        run_ranks(2, main, "shm")


def test_tensors_of_several_devices_in_one_call():
    async def main(comm):
        x, y, z = gpu.tensor(torch.ones(4)), gpu.tensor(torch.ones(4), index=1), torch.ones(4)
        with pytest.raises(UsageError, match=f"^rank {comm.rank}: one call got tensors on cuda:0, cuda:1"):
            comm.solo_allreduce([x, y])
        with pytest.raises(UsageError, match="tensors on cuda:1, the host"):
            comm.solo_allreduce([z, y])
        with pytest.raises(UsageError, match="tensors on cuda:0, the host"):
            comm.alltoallv([x, z])
        results = await comm.alltoallv([y, y])
        assert [each.device.index for each in results] == [1, 1]
        await reduced(comm, gpu)

    with emulated_cuda() as gpu:
        run_ranks(2, main, "inproc")


def test_too_little_memory_on_the_device():
    async def call_twice(comm, x):
        await comm.allgather(x)
        await comm.barrier()  # the ranks at the host may have got their results before

    async def main(comm):
        x = torch.ones(1000)
        x = x if comm.rank else gpu.tensor(x)
        await comm.barrier()
        gpu.free_bytes = 2000
        with pytest.raises(AbortedError if comm.rank else DeviceError, match="cuda:0 has failed: OutOfMemoryError"):
            await call_twice(comm, x)

    with emulated_cuda() as gpu:
        run_ranks(3, main, "shm")


def test_an_error_from_before_the_call():
    async def main(comm):
        x = torch.ones(1000) if comm.rank else gpu.tensor(torch.ones(1000))
        gpu.fail("an illegal memory access")
        text = "cuda:0 has failed: RuntimeError: CUDA error: an illegal memory access"
        with pytest.raises(AbortedError if comm.rank else DeviceError, match=text):
            await comm.allreduce(x)

    with emulated_cuda() as gpu:
        run_ranks(3, main, "shm")


def test_the_device_fails_before_the_tensor_has_arrived():
    async def main(comm):
        x = torch.ones(1000)
        if not comm.rank:
            x = gpu.tensor(x)
            gpu.compute(lambda array: gpu.fail("an illegal memory access"), x)
        text = "cuda:0 has failed: RuntimeError: CUDA error: an illegal memory access"
        with pytest.raises(AbortedError if comm.rank else DeviceError, match=text):
            await comm.allreduce(x)

    with emulated_cuda() as gpu:
        run_ranks(3, main, "shm")


def test_devices_that_cannot_be_used(monkeypatch):
    async def main(comm):
        with pytest.raises(UsageError, match=why):
            comm.allreduce(gpu.tensor(torch.ones(3)))

    with emulated_cuda() as gpu:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: False)
            why = "a tensor on cuda:0, but torch .* finds no device of CUDA"
            alone(main)
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
            why = "was forked from one that had used CUDA"
            alone(main)

    async def others(comm):
        with pytest.raises(UsageError, match="rank 0: tensors on meta are not supported: use those of the CPU"):
            comm.allreduce(torch.ones(3, device="meta"))
        with pytest.raises(UsageError, match="rank 0: tensors on meta are not supported: use those of the CPU"):
            comm.empty(3, torch.float32, device="meta")
        with pytest.raises(UsageError, match="rank 0: a tensor on cuda:3, but this process sees 2 devices of CUDA"):
            comm.allreduce(gpu.tensor(torch.ones(3), 3))
        x = gpu.tensor(torch.ones(3))
        with ThreadPoolExecutor(1) as thread, pytest.raises(UsageError, match="this thread does not know the world"):
            thread.submit(comm.allreduce, x).result()
        await comm.allreduce(x)
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 1)
            with pytest.raises(UsageError, match="is a forked child"):
                comm.allreduce(x)

    with emulated_cuda() as gpu:
        alone(others)


# -- asyncoll doctor --gpu ----------------------------------------------------------------------------


def test_the_doctor_without_a_device():
    result = CliRunner().invoke(main, ["doctor", "--gpu"], catch_exceptions=False)
    (line,) = [line.split(None, 1) for line in result.output.splitlines() if line.startswith("  cuda")]
    assert (line, result.exit_code) == (["cuda", f"no: torch {torch.__version__} finds no device"], 0)


@pytest.mark.parametrize("refuses", [False, True])
def test_the_doctor_names_the_devices_and_the_routes(monkeypatch, refuses):
    def properties(index):
        return SimpleNamespace(name="H0", uuid=f"{index:032}", total_memory=5 << 30)

    with emulated_cuda() as gpu:
        gpu.refuses_after = 0 if refuses else 1 << 60
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        found = examine(Findings(), with_gpu=True).sections["gpu"]
        assert list(found) == ["cuda:0", "cuda:0 between ranks", "cuda:1", "cuda:1 between ranks"]
        route = "memory of torch's, because the driver does not pin shared memory: invalid argument"
        route = route if refuses else "which is pinned"
        assert found["cuda:1"].startswith(f"H0, {1:032}, 5.0 GiB; copies go through")
        assert found["cuda:1"].endswith(route)
        # The reason is another one with a torch for CUDA, which has a library.
        assert found["cuda:1 between ranks"].startswith("no, through memory of the host: ")
        assert not threads_of_devices()


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        (
            "raise SystemExit",
            f"read in place by ranks in {os.readlink('/proc/self/ns/pid')} on cuda:1, cuda:0; the other",
        ),
        ("raise SystemExit('no such handle')", "no, through memory of the host: no such handle"),
        ("import os; os._exit(7)", "no, through memory of the host: another process has ended with 7"),
    ],
)
def test_the_doctor_tries_memory_between_processes(monkeypatch, tmp_path, code, shown):
    """The other process runs `code`. The third GPU has no access to the second."""
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\n{code}\n")
    program.chmod(0o700)

    def properties(index):
        return SimpleNamespace(name="H0", uuid=f"GPU-{index}", total_memory=5 << 30)

    with emulated_cuda() as gpu:
        exchange = FakeExchange(gpu, 1 << 12)
        monkeypatch.setattr(CudaDevice, "share", lambda device, nbytes: exchange)
        monkeypatch.setattr(exchange, "write", lambda mark, parts: Landing(0))
        monkeypatch.setattr(probe, "_pattern", lambda index: gpu.tensor(torch.zeros(1 << 12, dtype=torch.uint8)))
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one == 0)
        monkeypatch.setattr(sys, "executable", str(program))
        assert doctor._gpu(1)["cuda:1 between ranks"].startswith(shown)


# -- in a world of real processes ---------------------------------------------------------------------


@pytest.mark.slow
def test_the_ranks_close_their_devices_when_a_peer_is_killed(forked_world):
    environment = os.environ | {"ASYNCOLL_FREEZE_S": "20", "ASYNCOLL_TRANSPORT": "shm"} | WHOLE_END
    ends = [each.end()[:2] for each in forked_world(environment, 3, SCRIPT)]  # one warns that memory is not shared here
    closed = (0, "closed\n")
    assert ends == [closed, (-signal.SIGKILL, ""), closed]
