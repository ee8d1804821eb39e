"""Versions of torch, and `import torch`, which registers the backend."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

import asyncoll.torch
from asyncoll.errors import UsageError

# What `import torch` loads of asyncoll and of its dependencies, before and after the backend is registered.
IMPORTS = """
import sys, torch
assert hasattr(torch.distributed.Backend, "ASYNCOLL")
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("asyncoll", "zmq", "uvloop", "msgpack")))
"""


@pytest.mark.parametrize("version", ["2.3.1", "2.6.0+cpu"])
def test_an_old_torch_is_refused_with_what_to_install(version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    with pytest.raises(UsageError, match=r"needs torch 2\.7 or newer.* pip install 'torch>=2\.7'") as caught:
        dist.init_process_group("asyncoll", store=dist.HashStore(), rank=0, world_size=1)
    assert f"this is torch {version}" in str(caught.value)
    assert isinstance(caught.value, dist.DistBackendError)
    assert not dist.is_initialized()


@pytest.mark.parametrize("version", ["2.7.0", "2.13.0+cpu", "2.14.1+cu130", "3.0.0a0"])
def test_newer_ones_are_not(version):
    assert TorchVersion(version) >= asyncoll.torch._OLDEST


def test_a_torch_that_takes_no_backend_can_still_be_imported(monkeypatch):
    def refuse(*_, **__):
        raise TypeError("another signature")

    monkeypatch.delattr(dist.Backend, "ASYNCOLL")
    monkeypatch.setattr(dist.Backend, "register_backend", refuse)
    with pytest.warns(RuntimeWarning, match="torch has not taken the backend asyncoll.*another signature"):
        asyncoll.torch.register()


@pytest.mark.slow
def test_importing_torch_loads_no_more_of_asyncoll_than_registers_it():
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == "['asyncoll', 'asyncoll.torch', 'asyncoll.torch.name']\n"
