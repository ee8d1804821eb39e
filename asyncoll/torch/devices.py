"""The other backends of a group of several devices, as in init_process_group("cpu:asyncoll,cuda:nccl").

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
from asyncoll.torch.errors import of_torch
from asyncoll.torch.name import NAME

_c10d: Any = dist.distributed_c10d  # its types do not show all that it has


def check_devices(config: Any) -> None:
    """Raise UsageError if torch's BackendConfig has this backend for another device than the CPU."""
    named: dict[str, str] = getattr(config, "device_backend_map", {})
    if others := [device for device, name in named.items() if name == NAME and device != "cpu"]:
        text = f"the backend {NAME} takes tensors of the CPU: name another one for {others[0]}"
        raise of_torch(UsageError(f"{text}, {_example(others[0])}"))


def _example(device: str) -> str:
    return f'as in init_process_group("cpu:{NAME},{device}:nccl")'


def add_backend(group: Any, others: Any, device: str, store: Any, ranks: Sequence[int], timeout: timedelta) -> None:
    """Register the backend that the user has named for `device` with `group`, and with its group `others`.

    All ranks call this.

    Raises UsageError if there is none.
    """
    name = _named(group).get(device)
    if name is None or name == NAME:
        raise UsageError(
            f"the backend {NAME} takes tensors of the CPU, and this one is on {device}: "
            f"name a backend for it, {_example(device)}, or pass x.cpu()"
        )
    type_ = dist.Backend.backend_type_map.get(name, dist.ProcessGroup.BackendType.CUSTOM)
    store = _c10d.PrefixStore(f"{device}/", store)
    backend = _make(name, group, store, list(ranks), timeout)
    for each in (group, others):
        each._register_backend(torch.device(device), type_, backend)


def _named(group: Any) -> dict[str, str]:
    """The name of the backend of each device."""
    config: str = _c10d._world.pg_backend_config.get(group, "")
    pairs = (entry.partition(":") for entry in config.split(","))
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
