"""The manifest for Kubernetes: it fits the schema of Kubernetes, and its parts fit together."""

from __future__ import annotations

import socket
import subprocess

import kubernetes_validate
import pytest
import yaml
from torch.distributed.run import get_args_parser

from asyncoll.errors import DeadlineError, UsageError
from asyncoll.transport.joining import Joining
from asyncoll.transport.keys import read_key, write_key
from asyncoll.world.environment import Environment
from asyncoll.world.store import _serve_store
from tests.support.places import ROOT
from tests.support.processes import PATIENCE_S

MANIFEST = ROOT / "examples" / "kubernetes.yaml"
VERSIONS = ("1.27", "1.37")


@pytest.fixture
def parts():
    return {part["kind"]: part for part in yaml.safe_load_all(MANIFEST.read_text())}


@pytest.fixture
def pod(parts):
    return parts["Job"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifest_fits_the_schema(parts, version):
    assert list(parts) == ["Service", "Job"]
    for part in parts.values():
        kubernetes_validate.validate(part, version, strict=True)
    parts["Job"]["spec"]["completion"] = 2
    with pytest.raises(kubernetes_validate.ValidationError, match="completion"):
        kubernetes_validate.validate(parts["Job"], version, strict=True)


def test_torchrun_starts_a_rank_for_each_share_of_the_processors(parts, pod):
    (ranks,), job = pod["containers"], parts["Job"]["spec"]
    given = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in ranks["args"]]
    assert ranks["command"] == ["torchrun"]
    arguments = get_args_parser().parse_args(given)
    assert int(arguments.nnodes) == job["completions"] == job["parallelism"]
    assert arguments.node_rank == 1
    threads = {each["name"]: each["value"] for each in ranks["env"]}["OMP_NUM_THREADS"]
    assert int(arguments.nproc_per_node) * int(threads) == int(ranks["resources"]["requests"]["cpu"])


def test_the_pods_find_the_first_of_them_by_its_name_before_it_is_ready(parts, pod):
    service, job = parts["Service"], parts["Job"]["metadata"]["name"]
    name = service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job}  # Kubernetes sets this label
    assert service["spec"]["publishNotReadyAddresses"]
    assert pod["subdomain"] == name
    assert f"--master-addr={job}-0.{name}" in pod["containers"][0]["args"]


def test_the_ranks_have_a_key_that_belongs_to_their_user(pod, tmp_path):
    """Kubernetes gives files of a secret to root, and lets the group read them; such a key is refused."""
    (copy,), (ranks,) = pod["initContainers"], pod["containers"]
    install, option, mode, source, target = copy["command"]
    assert (install, option, mode) == ("install", "-m", "0400")
    folders = {mount["name"]: mount["mountPath"] for mount in copy["volumeMounts"]}
    assert [source, target] == [f"{folders['secret']}/key", f"{folders['key']}/key"]
    assert {"name": "ASYNCOLL_KEY_FILE", "value": target} in ranks["env"]
    assert {"name": "key", "mountPath": folders["key"], "readOnly": True} in ranks["volumeMounts"]
    (tmp_path / "secret").touch(0o440)
    write_key(tmp_path / "made")
    (tmp_path / "secret").write_bytes((tmp_path / "made").read_bytes())
    subprocess.run([install, option, mode, tmp_path / "secret", tmp_path / "key"], check=True, timeout=PATIENCE_S)
    assert read_key(tmp_path / "key").derive() == read_key(tmp_path / "made").derive()
    with pytest.raises(UsageError, match=r"others than its owner have rights .* \(mode 0440\)"):
        read_key(tmp_path / "secret")
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["secret"]["secret"]["defaultMode"] == 0o400
    assert volumes["key"]["emptyDir"]["medium"] == "Memory"
    assert set(volumes) == {mount["name"] for each in (copy, ranks) for mount in each["volumeMounts"]}


def test_rank_0_waits_until_its_name_is_known(monkeypatch):
    """The name of a pod becomes known after its start."""
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "train-0.train", "MASTER_PORT": "1"}
    asked = []

    def known_in_the_end(name, port, **_):
        asked.append(name)
        if len(asked) <= 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("192.0.2.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", known_in_the_end)
    with pytest.raises(DeadlineError, match=r"MASTER_ADDR=train-0\.train is not the name of a host: .*not known"):
        _serve_store(Environment.read(place), Joining(0, 2, 0.0))
    with pytest.raises(UsageError, match=r"rank 0 cannot listen on MASTER_ADDR=train-0\.train"):
        _serve_store(Environment.read(place), Joining(0, 2))
    assert asked[:4] == ["train-0.train"] * 4
