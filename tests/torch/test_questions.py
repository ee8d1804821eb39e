"""Every question that the installed torch may ask a process group has an answer, in a world of one rank."""

from __future__ import annotations

import contextlib
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from asyncoll.errors import AsyncollError, DeadlineError, UsageError
from asyncoll.torch.errors import of_torch
from asyncoll.torch.process_group import ProcessGroup
from asyncoll.torch.reduce_ops import reduction

CPU = torch.device("cpu")
MINUTE = timedelta(minutes=1)


def ones():
    return torch.ones(2)


def row():
    return [ones()]


# The arguments of each method of torch's ProcessGroup. What a later torch adds is missing, and the test names it.
CALLS = {
    "_add_ephemeral_timeout": lambda: (MINUTE,),
    "_backend_id": lambda: (dist.ProcessGroup.BackendType.CUSTOM,),
    "_end_coalescing": lambda: (CPU,),
    "_get_backend": lambda: (CPU,),
    "_register_on_completion_hook": lambda: (print,),
    "_set_group_desc": lambda: ("of a test",),
    "_set_group_name": lambda: ("another",),
    "_start_coalescing": lambda: (CPU,),
    "all_to_all_single": lambda: (ones(), ones(), [], []),
    "allgather": lambda: ([row()], row()),
    "allgather_coalesced": lambda: ([row()], row()),
    "allreduce": lambda: (row(),),
    "allreduce_coalesced": lambda: (row(),),
    "alltoall": lambda: (row(), row()),
    "broadcast": lambda: (row(),),
    "gather": lambda: ([row()], row()),
    "get_backend": lambda: (CPU,),
    "merge_remote_group": lambda: (dist.HashStore(), 2),
    "monitored_barrier": lambda: (MINUTE,),
    "recv": lambda: (row(), 0, 0),
    "recv_anysource": lambda: (row(), 0),
    "reconfigure": lambda: (None,),
    "reduce": lambda: (row(),),
    "reduce_scatter": lambda: (row(), [row()]),
    "register_abort_hook": lambda: (1, print),
    "register_post_hook": lambda: (1, print),
    "register_pre_hook": lambda: (1, print),
    "scatter": lambda: (row(), [row()]),
    "send": lambda: (row(), 0, 0),
    "set_timeout": lambda: (MINUTE,),
    "split_group": lambda: ([0],),
    "unregister_abort_hook": lambda: (1,),
    "unregister_post_hook": lambda: (1,),
    "unregister_pre_hook": lambda: (1,),
    "alltoall_base": lambda: (ones(), ones(), [], []),
    **dict.fromkeys(
        ["_allgather_base", "_reduce_scatter_base", "all_gather_single", "reduce_scatter_single"],
        lambda: (ones(), ones()),
    ),
    **dict.fromkeys(["gather_single", "gather_into_tensor"], lambda: (ones(), ones())),
    **dict.fromkeys(
        [
            "all_gather_single_coalesced",
            "allgather_into_tensor_coalesced",
            "reduce_scatter_single_coalesced",
            "reduce_scatter_tensor_coalesced",
        ],
        lambda: (row(), row()),
    ),
    **dict.fromkeys(
        [
            "_enable_collectives_timing",
            "_get_backend_name",
            "_get_sequence_number_for_group",
            "_has_hooks",
            "_id",
            "_set_sequence_number_for_group",
            "_wait_for_pending_works",
            "abort",
            "barrier",
            "boxed",
            "get_error",
            "get_group_store",
            "get_reconfigure_handle",
            "name",
            "new_window",
            "rank",
            "shutdown",
            "size",
        ],
        tuple,
    ),
}
ATTRIBUTES = {
    "_device_types",
    "bound_device_id",
    "group_desc",
    "group_name",
    "supports_abort_hooks",
    "supports_completion_hooks",
    "supports_reconfigure",
    "supports_window",
    "use_pg_for_symm_mem_rendezvous",
}
NO_QUESTIONS = {
    "BackendType",
    *dist.ProcessGroup.BackendType.__members__,
    "_pybind11_conduit_v1_",
    "_register_backend",  # for the base class
    "_set_default_backend",  # the same
    "unbox",  # a function of the class
}
FLAGS = {name for name in dir(torch._C._distributed_c10d.Backend) if name.startswith("supports_")}
FLAGS -= {"supports_tensor_alloc"}  # a method


@pytest.fixture
def whole():
    dist.init_process_group("asyncoll", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def asked(group, name):
    """What is wrong with the answer of a group; None for nothing."""
    try:
        answer = getattr(group, name)
    except Exception as error:
        return f"{name} cannot be read: {error!r}"
    if name in ATTRIBUTES:
        return None
    try:
        answer(*CALLS[name]())
    except Exception as error:
        is_told = isinstance(error, AsyncollError) and isinstance(error, dist.DistBackendError)
        return None if is_told else f"{name} raises {error!r}"
    return None


def test_each_call_of_torch_has_an_answer(whole):
    names = {name for name in dir(dist.ProcessGroup) if not name.startswith("__")} - NO_QUESTIONS
    assert not names - CALLS.keys() - ATTRIBUTES, "torch has new calls: answer them"
    wrong = [asked(dist.new_group([0]), name) for name in sorted(names | {"get_error"})]
    assert not [each for each in wrong if each]


def test_each_call_runs_the_hooks_and_is_checked_for_nan(whole, monkeypatch):
    """All that begin a call: also those that another change adds."""
    monkeypatch.setattr(sys.modules[__name__], "ones", lambda: torch.full((2,), torch.nan))
    monkeypatch.setenv("TORCH_DIST_NAN_CHECK", "1")
    calls = [name for name in CALLS if hasattr(getattr(ProcessGroup, name, None), "__wrapped__")]
    assert len(calls) > 20
    for name in calls:
        group, seen = dist.new_group([0]), []
        group.register_pre_hook(1, seen.append)
        if name in ("barrier", "recv", "recv_anysource"):  # give nothing
            with contextlib.suppress(UsageError):
                getattr(group, name)(*CALLS[name]())
            assert len(seen) == 1, name
        else:
            with pytest.raises(UsageError, match="NaN found in input tensor"):
                getattr(group, name)(*CALLS[name]())


def test_no_feature_is_claimed_that_is_missing(whole):
    assert {name: getattr(whole, name) for name in FLAGS} == dict.fromkeys(FLAGS, False)
    whole.use_pg_for_symm_mem_rendezvous  # noqa: B018
    with pytest.raises(dist.DistBackendError, match="the backend asyncoll has no symmetric memory"):
        whole.use_pg_for_symm_mem_rendezvous = True


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("get_reconfigure_handle", "has no reconfiguration of a group: destroy the default"),
        ("new_window", "has no windows: use send and recv"),
        ("register_abort_hook", "has no hooks for aborts: every call that a failure ends"),
        ("_register_on_completion_hook", "has no hooks for completed calls: use the future of a Work"),
    ],
)
def test_what_is_missing_is_told(name, said, whole):
    with pytest.raises(dist.DistBackendError, match=said):
        getattr(whole, name)(*CALLS[name]())


def test_the_error_of_a_group_is_told(whole):
    kinds = torch._C._distributed_c10d.ErrorType
    part = dist.new_group([0])
    assert part.get_error() == whole.get_error() == kinds.SUCCESS
    part.abort()
    assert part.get_error() == kinds.COMM_ERROR
    assert whole.get_error() == kinds.SUCCESS


def test_what_is_overdue_has_timed_out():
    error = of_torch(DeadlineError("allreduce 3 is not over after 2 s", (0,), (1,)))
    assert str(error) == "the process group timed out: allreduce 3 is not over after 2 s"
    assert isinstance(error, TimeoutError)


def test_a_message_to_oneself_is_refused_with_what_to_do(whole):
    with pytest.raises(dist.DistBackendError, match=r"a message from rank 0 .* to itself.*batch_isend_irecv.*copy the"):
        dist.batch_isend_irecv([dist.P2POp(dist.isend, ones(), 0), dist.P2POp(dist.irecv, ones(), 0)])
    with pytest.raises(dist.DistBackendError, match="the rank 7 is not one of the ranks 0 to 0 of the group"):
        whole.send([ones()], 7, 0)


def test_a_reduction_whose_factor_torch_does_not_tell_is_refused():
    """As before torch 2.13."""
    hidden = SimpleNamespace(op=dist.ReduceOp.RedOpType.PREMUL_SUM)
    with pytest.raises(UsageError, match=r"PREMUL_SUM needs torch 2\.13 or newer.*multiply the tensor, and use SUM"):
        reduction(hidden)
