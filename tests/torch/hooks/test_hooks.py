"""Communication hooks of DistributedDataParallel, in worlds of real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace

import pytest
import torch

from asyncoll import UsageError, deadline
from asyncoll.runtime.deadlines import remaining_s
from asyncoll.runtime.handles import HandleRunner
from asyncoll.torch.hooks import refusals
from asyncoll.torch.hooks.buckets import Layout
from asyncoll.torch.hooks.completion import complete, complete_on
from tests.support.places import SCRIPTS
from tests.support.processes import WHOLE_END

SCRIPT = SCRIPTS / "torch/hooks/trains_with_hooks.py"
TRAINING = (
    "allreduce",
    "eager",
    "eager_goes_on",
    "eager_loses",
    "eager_recovers",
    "logs",
    "sabotage",
    "sparse",
    "delayed",
    "checkpoints",
    "copies",
)
REFUSALS = ("agreement", "refused_when_made", "refused_buckets", "refused_steps", "refused_parameters")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "cases", "more"),
    [
        (3, (*TRAINING, *REFUSALS), {}),
        (
            1,
            (
                "sparse",
                "checkpoints",
                "damaged_checkpoints",
            ),
            {},
        ),
        (2, ("allreduce", "eager", "agreement"), WHOLE_END),
        (5, ("delayed", "checkpoints"), {}),
        (2, ("eager", "sparse", "delayed"), {"ASYNCOLL_TRANSPORT": "zmq"}),
    ],
    ids=["all", "one rank", "two ranks", "five ranks", "by message"],
)
def test_hooks(forked_world, size, cases, more):
    ranks = forked_world(os.environ | {"ASYNCOLL_FREEZE_S": "20"} | more, size, SCRIPT, *cases)
    ended = [each.end() for each in ranks]
    assert [(code, out) for code, out, _ in ended] == [(0, "passed\n")] * size, "\n".join(err for _, _, err in ended)


@pytest.mark.slow
def test_a_death_in_backward_is_named_by_all_others(forked_world):
    ranks = forked_world(os.environ | {"ASYNCOLL_FREEZE_S": "20"}, 3, SCRIPT, "dies")
    ends = [each.end() for each in ranks]
    named = "eager_sgd lost 1\noktopk lost 1\ndc_s3gd lost 1\n"
    assert [end[:2] for end in ends] == [(0, named), (-signal.SIGKILL, ""), (0, named)], ends


@pytest.fixture
def comm():
    """What `complete` needs of a communicator."""
    runner = HandleRunner()
    yield SimpleNamespace(_core=SimpleNamespace(member=SimpleNamespace(runner=runner)))
    runner.stop()


def test_collectives_of_several_calls_obey_the_deadline_of_the_group(comm):
    async def left_s():
        return remaining_s()

    with deadline(60.0):
        assert 0 < complete(comm, left_s()) <= 60.0


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_collectives_of_several_calls_are_in_the_order_of_the_device(comm, device, monkeypatch):
    """The runtime's thread carries them out, and its current stream is another one."""
    done = []
    monkeypatch.setattr(torch.cuda, "synchronize", done.append)

    async def calls():
        done.append("calls")

    complete_on(torch.device(device), comm, calls())
    waits = [torch.device(device)] if device != "cpu" else []
    assert done == [*waits, "calls", *waits]


def test_parameters_on_several_devices_are_refused():
    with pytest.raises(UsageError, match="on cpu, meta, and one operation has one device"):
        Layout([torch.nn.Parameter(torch.zeros(2, device=device)) for device in ("cpu", "meta")])


def test_an_interrupt_ends_the_wait_for_several_calls_at_once(comm):
    async def waits_for_another_rank():
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        complete(comm, waits_for_another_rank())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_change_of_any_element_of_a_gradient_is_noticed(dtype):
    shapes = [
        torch.zeros(3, 4).t(),
        torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.zeros(5, 6)[:, ::2],
    ]
    parameters = [torch.nn.Parameter(x.to(dtype)) for x in (*shapes, torch.zeros(()), torch.zeros(0, 3))]
    layout = Layout(parameters)
    flat = torch.arange(1, layout.count + 1).to(dtype)
    flat[2] = torch.nan  # the sum of finite gradients that overflows
    layout.set_gradients(flat)
    assert layout.are_gradients(flat)
    for index in range(layout.count):
        changed = flat.clone()
        changed[index] = 0
        assert not layout.are_gradients(changed), index
    parameters[-1].grad = None
    assert not layout.are_gradients(flat)


def test_buffers_that_torch_before_2_13_broadcasts_are_refused():
    old = SimpleNamespace(broadcast_buffers=True, modules_buffers=[torch.zeros(1)], find_unused_parameters=False)
    with pytest.raises(UsageError, match="with broadcast_buffers=False"):
        refusals.check_without_lockstep(old)
    old.broadcast_buffers = False
    refusals.check_without_lockstep(old)
