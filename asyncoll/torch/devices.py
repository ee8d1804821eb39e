"""The devices of a group, and the other backends of one as in init_process_group("cpu:asyncoll,cuda:nccl").

torch makes no backend for the devices after the first one whose process group is written in Python. So the group makes
them here, when it first gets a tensor of such a device. The calls of the tensor go there.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d

from asyncoll.errors import UsageError
from asyncoll.torch.name import DEVICES, NAME

_c10d: Any = dist.distributed_c10d  # its types do not show all that it has


def own(group: Any) -> list[str]:
    """The devices whose tensors `group` takes itself: the CPU, and CUDA unless the user has named another backend.

    Empty before init_process_group, or new_group, has returned: torch does not know yet what the user has named.
    """
    named = _named(group)
    return [device for device in DEVICES if named and (device == "cpu" or named.get(device) == NAME)]


def add_backend(group: Any, others: Any, device: str, store: Any, ranks: Sequence[int], timeout: timedelta) -> None:
    """Register the backend that the user has named for `device` with `group`, and with its group `others`.

    All ranks call this.

    Raises UsageError if there is none.
    """
    name = _named(group).get(device)
    if name is None or name == NAME:
        raise UsageError(
            f"the backend {NAME} takes tensors of {' and '.join(own(group))} here, and this one is on {device}: name a "
            f'backend for it, as in init_process_group("cpu:{NAME},cuda:{NAME}"), or pass x.cpu()'
        )
    type_ = dist.Backend.backend_type_map.get(name, dist.ProcessGroup.BackendType.CUSTOM)
    store = _c10d.PrefixStore(f"{device}/", store)
    backend = _make(name, group, store, list(ranks), timeout)
    for each in (group, others):
        each._register_backend(torch.device(device), type_, backend)


def _named(group: Any) -> dict[str, str]:
    """The name of the backend of each device."""
    config: str = _c10d._world.pg_backend_config.get(group, "")
    pairs = (entry.partition(":") for entry in config.split(",") if entry)
    return {device: name for device, _, name in pairs}


def _make(name: str, group: Any, store: Any, ranks: list[int], timeout: timedelta) -> Any:
    rank, size = group.rank(), group.size()
    if name == dist.Backend.GLOO:
        backend: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        backend._set_sequence_number_for_group()
        return backend
    if name == dist.Backend.NCCL:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.global_ranks_in_group, options.group_name = ranks, group.group_name
        backend = dist.ProcessGroupNCCL(store, rank, size, options)
        backend._set_sequence_number_for_group()
        return backend
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None:
        raise UsageError(f"the backend {name} cannot be used beside {NAME}: use nccl, gloo or a registered one")
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    more = _c10d._DistributedBackendOptions()
    more.store, more.group_rank, more.group_size, more.timeout = store, rank, size, timeout
    more.group_id, more.global_ranks_in_group = group.group_name, ranks
    return plugin.creator_fn(more, None)
