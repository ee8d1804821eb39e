"""`torch.distributed.init_process_group("asyncoll")`: process groups of torch whose collectives are asyncoll's.

`import torch` imports this package, by the entry point `torch.backends`, and calls `register`. So a program need not
import it. It does if TORCH_DEVICE_BACKEND_AUTOLOAD is 0.
"""

from __future__ import annotations

from typing import Any

_NAME = "asyncoll"


def register() -> None:
    """Register the backend with torch.distributed, for CPU tensors. Without effect if it is registered already."""
    import torch.distributed as dist

    if dist.is_available() and _NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, _: Any) -> Any:
    from asyncoll.torch.group import make_group

    return make_group(options)


register()
