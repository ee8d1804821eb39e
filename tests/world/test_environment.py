"""The environment variables of a rank: accepted and refused values."""

from __future__ import annotations

import re

import pytest

from asyncoll.errors import UsageError
from asyncoll.world.environment import Environment

WORLD = {"RANK": "0", "WORLD_SIZE": "1"}


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
@pytest.mark.parametrize("text", ["²", "--1", "1.0", "-", "one"])
def test_the_error_names_the_variable_that_is_not_a_number(name, text):
    with pytest.raises(UsageError, match=f"{name}='{text}' in the environment is not a number"):
        Environment.read(WORLD | {name: text})


@pytest.mark.parametrize("text", ["0.001", "3e6"])
def test_a_freeze_time_that_zeromq_cannot_measure_is_refused(text):
    with pytest.raises(UsageError, match=r"ASYNCOLL_FREEZE_S=.*: give 0.02 to 86400 seconds, or 0 for never"):
        Environment.read(WORLD | {"ASYNCOLL_FREEZE_S": text})


@pytest.mark.parametrize("seconds", [0, 0.02, 86_400])
def test_the_bounds_of_the_freeze_time_are_accepted(seconds):
    assert Environment.read(WORLD | {"ASYNCOLL_FREEZE_S": str(seconds)}).freeze_s == seconds


@pytest.mark.parametrize("port", ["0", "-1", "65536", "99999"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_port_that_does_not_exist_is_refused(rank, port):
    with pytest.raises(UsageError, match=f"MASTER_PORT={port} in the environment: give 1 to 65535"):
        Environment.read({"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})


@pytest.mark.parametrize("text", ["30000", "30001-30000", "0-5", "65535-65536", "a-b", "30000:30001", "-"])
def test_a_range_of_ports_that_cannot_be_is_refused(text):
    with pytest.raises(
        UsageError, match=f"ASYNCOLL_PORTS='{text}' in the environment: give the first and the last port"
    ):
        Environment.read(WORLD | {"ASYNCOLL_PORTS": text})


@pytest.mark.parametrize("given", [{"WORLD_SIZE": "2"}, {"RANK": "1"}, {"RANK": "", "WORLD_SIZE": ""}])
def test_variables_that_are_empty_or_incomplete_do_not_hide_those_of_a_launcher(given):
    launched = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    with pytest.raises(UsageError, match=r"are not both set, .* set MASTER_ADDR and MASTER_PORT"):
        Environment.read(launched | given)
    world = Environment.read(launched | given | {"MASTER_ADDR": "head", "MASTER_PORT": "29500"})
    assert (world.rank, world.size) == (1, 2)
    assert Environment.read({"RANK": "", "WORLD_SIZE": ""}) is None


@pytest.mark.parametrize("world", [{}, WORLD], ids=["alone", "launched"])
@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        (
            {"ASYNCOLL_FREZE_S": "3"},
            "ASYNCOLL_FREZE_S in the environment is not a variable of asyncoll: did you mean ASYNCOLL_FREEZE_S?",
        ),
        (
            {"ASYNCOLL_X": "1"},
            "is not a variable of asyncoll: its variables are ASYNCOLL_TRANSPORT, ",
        ),
        ({"ASYNCOLL_PORT": "30000"}, "did you mean ASYNCOLL_PORTS?"),
        ({"ASYNCOLL_TRANSPORT": "foo"}, "ASYNCOLL_TRANSPORT='foo' in the environment: use one of shm, zmq"),
        ({"ASYNCOLL_ENCRYPT": "foo"}, "ASYNCOLL_ENCRYPT='foo' in the environment: use one of control, all"),
        ({"ASYNCOLL_FREEZE_S": "abc"}, "ASYNCOLL_FREEZE_S='abc' in the environment: give a number of seconds"),
        ({"ASYNCOLL_DEADLINE_S": "abc"}, "ASYNCOLL_DEADLINE_S='abc' in the environment: give a number of seconds"),
        ({"ASYNCOLL_PORTS": "abc"}, "ASYNCOLL_PORTS='abc' in the environment: give the first and the last port"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused_with_and_without_a_launcher(world, setting, complaint):
    with pytest.raises(UsageError, match=re.escape(complaint)):
        Environment.read(world | setting)


def test_a_service_of_kubernetes_that_is_named_asyncoll_is_no_setting():
    """Kubernetes sets these in each container of the namespace."""
    address = {"ASYNCOLL_SERVICE_HOST": "10.0.0.1", "ASYNCOLL_SERVICE_PORT": "80", "ASYNCOLL_PORT": "tcp://10.0.0.1:80"}
    other = {"ASYNCOLL_JOB_SERVICE_HOST": "10.0.0.1", "ASYNCOLL_JOB_PORT_80_TCP_ADDR": "10.0.0.1"}
    assert Environment.read(address | other) is None


def test_names_that_are_empty_or_of_tests_or_of_other_programs_are_no_settings():
    assert Environment.read({"ASYNCOLL_FREZE_S": "", "ASYNCOLL_TEST_SEED": "1", "MY_ASYNCOLL_X": "1"}) is None
