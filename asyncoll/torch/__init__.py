"""`torch.distributed.init_process_group("asyncoll")`: process groups of torch whose collectives are asyncoll's.

`import torch` imports this package, by the entry point `torch.backends`, and calls `register`. So a program need not
import it. It does if TORCH_DEVICE_BACKEND_AUTOLOAD is 0.
"""

from __future__ import annotations

from typing import Any

from asyncoll.torch.name import DEVICES, NAME

refusal = ""
"""Why torch has not taken the backend."""


def register() -> None:
    """Register the backend with torch.distributed, for tensors of the CPU and of CUDA. Without effect the second time.

    Raises and prints nothing, because `import torch` would: what is wrong is told by init_process_group, or by the
    first use of asyncoll.
    """
    global refusal
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, NAME.upper()):
        return
    try:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=DEVICES)
        # From 2.15 on torch attaches a recorder to the groups of all other backends. Groups in Python cannot have it.
        without: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
        without.add(NAME)
    except Exception as error:
        refusal = f"torch has not taken the backend {NAME}, so that init_process_group will not know it: {error!r}"


def _create(options: Any, _: Any) -> Any:
    from asyncoll.errors import UsageError
    from asyncoll.torch.errors import of_torch
    from asyncoll.world import versions

    try:
        versions.check()
    except UsageError as error:
        raise of_torch(error) from None
    from asyncoll.torch.process_group import make_group

    return make_group(options)


register()
