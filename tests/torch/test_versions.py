"""Versions of the packages that asyncoll stands on, and `import torch`, which registers the backend."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import warnings

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import asyncoll.torch
from asyncoll.cli import main
from asyncoll.errors import UsageError
from asyncoll.world import versions
from tests.support.places import ROOT

PYPROJECT = ROOT / "pyproject.toml"

# What `import torch` loads of asyncoll and of its dependencies, before and after the backend is registered.
IMPORTS = """
import sys, torch
assert hasattr(torch.distributed.Backend, "ASYNCOLL")
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("asyncoll", "zmq", "uvloop", "msgpack")))
"""
FIRST_USE = """
import torch
print("torch", flush=True)
from asyncoll import run
"""


def install(folder, name, version):
    """Make a package look as if this version of it was installed, where `folder` is in the path of modules."""
    information = folder / f"{name}-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize("version", ["2.3.1", "2.7.1+cpu"])
def test_an_old_torch_is_refused_with_what_to_install(version, monkeypatch, tmp_path):
    install(tmp_path, "torch", version)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"needs torch 2\.8 or newer, and .* pip install 'torch>=2\.8'") as caught:
        dist.init_process_group("asyncoll", store=dist.HashStore(), rank=0, world_size=1)
    assert f"{version} is installed" in str(caught.value)
    assert isinstance(caught.value, dist.DistBackendError)
    assert not dist.is_initialized()


@pytest.mark.parametrize("version", ["2.8.0", "2.8", "2.8.0a0+git1", "2.13.0+cpu", "2.14.1+cu130", "3.0.0a0"])
def test_newer_ones_are_not(version, monkeypatch, tmp_path):
    install(tmp_path, "torch", version)
    monkeypatch.syspath_prepend(tmp_path)
    versions.check()


def test_the_bounds_are_those_that_pip_keeps():
    required = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    assert sorted(f"{name}>={bound}" for name, bound in versions._bounds()) == sorted(required)


@pytest.mark.parametrize("package", ["click", "msgpack", "numpy", "pyzmq", "rich", "torch", "typeguard", "uvloop"])
def test_doctor_warns_of_each_package_that_is_too_old(package, monkeypatch, tmp_path):
    install(tmp_path, package, "0.9")
    monkeypatch.syspath_prepend(tmp_path)
    told = CliRunner().invoke(main, ["doctor"], catch_exceptions=False).output
    assert f"warning: asyncoll needs {package} " in told
    assert f"and 0.9 is installed: pip install '{package}>=" in told


@pytest.mark.slow
def test_an_old_package_is_told_at_the_first_use_of_asyncoll_and_not_by_import_torch(tmp_path):
    install(tmp_path, "msgpack", "1.0.8")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-W", "error", "-c", FIRST_USE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert (done.returncode, done.stdout) == (1, "torch\n")
    said = "asyncoll needs msgpack 1.1 or newer, and 1.0.8 is installed: pip install 'msgpack>=1.1'"
    assert done.stderr.endswith(f"asyncoll.errors.UsageError: {said}\ndocs: troubleshooting#usageerror\n")


def test_a_torch_that_takes_no_backend_can_still_be_imported(monkeypatch):
    def refuse(*_, **__):
        raise TypeError("another signature")

    monkeypatch.delattr(dist.Backend, "ASYNCOLL")
    monkeypatch.setattr(dist.Backend, "register_backend", refuse)
    monkeypatch.setattr(asyncoll.torch, "refusal", "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncoll.torch.register()
    asyncoll._check.cache_clear()
    with pytest.warns(RuntimeWarning, match="torch has not taken the backend asyncoll.*another signature"):
        asyncoll.run  # noqa: B018


def test_torch_attaches_no_recorder_to_a_group(monkeypatch):
    """From 2.15 on it does to each group with devices whose backend it does not know, and fails if it is in Python."""
    known = set()
    monkeypatch.setattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", known, raising=False)
    monkeypatch.delattr(dist.Backend, "ASYNCOLL")
    asyncoll.torch.register()
    assert known == {"asyncoll"}
    devices, make = [], dist.Backend._plugins["ASYNCOLL"].creator_fn

    def create(*options):
        group = make(*options)
        devices.append(group._device_types)
        return group

    monkeypatch.setitem(dist.Backend._plugins, "ASYNCOLL", dist.Backend._BackendPlugin(create, True))
    dist.init_process_group("asyncoll", store=dist.HashStore(), rank=0, world_size=1)
    try:
        devices.append(dist.group.WORLD._device_types)
    finally:
        dist.destroy_process_group()
    assert devices == [[], [torch.device("cpu"), torch.device("cuda")]]


@pytest.mark.slow
def test_importing_torch_loads_no_more_of_asyncoll_than_registers_it():
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == "['asyncoll', 'asyncoll.torch', 'asyncoll.torch.name']\n"
