"""`torch.distributed.init_process_group("asyncoll")`: process groups of torch whose collectives are asyncoll's.

`import torch` imports this package, by the entry point `torch.backends`, and calls `register`. So a program need not
import it. It does if TORCH_DEVICE_BACKEND_AUTOLOAD is 0.
"""

from __future__ import annotations

import warnings
from typing import Any

from asyncoll.torch.name import DEVICES, NAME

_OLDEST = (2, 7)  # before it, C++ code loses the Python part of the works that it gets, and waits for them forever


def register() -> None:
    """Register the backend with torch.distributed, for tensors of the CPU and of CUDA. Without effect the second time.

    Raises nothing, because `import torch` would fail with it: init_process_group refuses a torch that is too old.
    """
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, NAME.upper()):
        return
    try:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=DEVICES)
    except Exception as error:
        text = f"torch has not taken the backend {NAME}, so that init_process_group will not know it: {error!r}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def _create(options: Any, _: Any) -> Any:
    import torch

    from asyncoll.errors import UsageError
    from asyncoll.torch.errors import of_torch

    version: Any = torch.__version__  # compares with tuples
    if version < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        text = f"the backend {NAME} needs torch {oldest} or newer, and this is torch {version}"
        raise of_torch(UsageError(f"{text}: pip install 'torch>={oldest}'"))
    from asyncoll.torch.group import make_group

    return make_group(options)


register()
