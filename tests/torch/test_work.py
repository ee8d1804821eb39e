"""Futures of calls that are over, what monitored barriers say, and the memory of calls. Without ranks."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from asyncoll.torch.memory import reducible
from asyncoll.torch.monitored import MonitoredBarriers
from asyncoll.torch.work import Work


class Over:
    """A handle of a call that is over."""

    def done(self):
        return True

    def wait(self, timeout=None):
        pass

    def resume(self):
        pass

    def when_done(self, callback):
        callback()


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_the_future_of_what_is_over_has_its_value_at_once(calls):
    """DDP waits for a Work, and then reads the value of its future without a wait."""
    for _ in range(100):
        outputs = [torch.ones(1)]
        future = Work([Over()] * calls, outputs).get_future()
        assert future.done()
        assert future.value() == outputs


@pytest.mark.parametrize(
    ("size", "wait_all_ranks", "said"), [(2, False, "Rank 1 "), (2, True, "Ranks 1 "), (3, True, "Ranks 1, 2 ")]
)
def test_a_monitored_barrier_names_ranks_as_gloo_does(size, wait_all_ranks, said):
    barrier = MonitoredBarriers(dist.HashStore(), 0, size, "barrier", lambda: None)
    with pytest.raises(dist.DistBackendError, match=f"^{said}failed to pass monitoredBarrier in 1 ms$"):
        barrier(timedelta(milliseconds=1), wait_all_ranks=wait_all_ranks)


def test_a_call_keeps_its_memory_when_the_tensor_gets_another_storage():
    x = torch.ones(1000)
    block = reducible(x)
    x.data = torch.zeros(1)
    others = [torch.full((1000,), 7.0) for _ in range(100)]
    assert (block.flat == 1).all()
    assert len(others) == 100
