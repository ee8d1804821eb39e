"""The floors of the house: who may import whom, and what stays outside."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import asyncoll

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "asyncoll"

# Every room and the rooms it may use, from the ground up: a room uses only what stands above it in this table.
# The launcher, the test kit and the benchmarks are one room each.
ROOMS: dict[str, set[str]] = {
    # ground and protocol
    "errors": set(),
    "arguments": {"errors"},
    "keys": {"errors"},
    "processes": set(),
    "tensors": {"errors"},
    "forks": {"errors", "tensors"},
    "wire": {"errors"},
    "traffic": set(),
    "matching": {"errors", "tensors", "wire"},
    "numbering": {"tensors"},
    "shapes": {"errors", "tensors"},
    "schedule": set(),
    "interruption": set(),
    "transport.board": {"errors"},
    "transport": {"errors", "tensors", "wire", "transport.board"},
    "transport.addresses": {"errors"},
    "transport.inproc": {"transport"},
    "transport.heap": set(),
    "transport.mutex": {"errors", "forks", "processes"},
    "transport.bells": {"transport.board"},
    "transport.inproc_arena": {"errors", "tensors", "transport.bells", "transport.board"},
    "transport.pages": {"errors"},
    "transport.part": {"errors", "forks", "tensors", "transport.board", "transport.pages"},
    "transport.arena": {
        "errors",
        "forks",
        "tensors",
        "transport.bells",
        "transport.board",
        "transport.heap",
        "transport.mutex",
        "transport.pages",
        "transport.part",
    },
    "transport.joining": {"errors", "processes", "transport"},
    "transport.handover": {
        "errors",
        "transport.addresses",
        "transport.arena",
        "transport.joining",
        "transport.part",
    },
    "transport.slots": {"errors", "wire", "transport"},
    "transport.inbox": {"errors", "transport"},
    "transport.loans": {"errors", "forks", "tensors", "transport"},
    "transport.gate": set(),
    "transport.monitor": {"transport.addresses"},
    "transport.door": {"keys", "transport.gate", "transport.monitor"},
    "transport.zeromq": {
        "errors",
        "forks",
        "keys",
        "transport",
        "transport.door",
        "transport.gate",
        "transport.joining",
        "transport.monitor",
        "transport.addresses",
    },
    "transport.split": {"transport", "transport.zeromq"},
    "transport.curve": {"keys", "transport.gate"},
    "transport.sockets": {
        "errors",
        "forks",
        "keys",
        "wire",
        "transport.addresses",
        "transport.curve",
        "transport.gate",
        "transport.monitor",
    },
    "transport.virtual_time": {"errors"},
    "transport.simulated": {"errors", "traffic", "transport", "transport.virtual_time"},
    # runtime
    "membership": {"processes", "wire"},
    "switchboard": {"errors", "traffic", "wire", "transport"},
    "failures": {"errors", "wire", "switchboard"},
    "executions": {"errors", "tensors", "wire", "matching", "transport", "failures", "switchboard"},
    "endpoint": {
        "errors",
        "forks",
        "traffic",
        "wire",
        "transport",
        "executions",
        "failures",
        "membership",
        "switchboard",
    },
    "group": {"executions", "matching", "tensors", "traffic"},
    "deadlines": {"errors", "transport.virtual_time"},
    "attendance": {"wire", "deadlines", "endpoint", "group"},
    "timer": set(),
    "driver": {"transport"},
    "progress": {"forks", "driver", "interruption", "timer", "transport.virtual_time"},
    # algorithms
    "algorithms": set(),
    "algorithms.dense": {"group", "matching", "tensors"},
    "algorithms.by_message": {"tensors", "group", "algorithms.dense"},
    "algorithms.sizes": {"errors"},
    "algorithms.meeting": {"errors", "tensors", "transport", "transport.board", "algorithms.sizes"},
    "algorithms.shared": {"tensors", "traffic", "transport.board", "algorithms.meeting"},
    "algorithms.selection": {"arguments", "errors", "tensors"},
    "algorithms.forms": {"algorithms.by_message", "algorithms.shared"},
    "algorithms.sparse": {"errors", "tensors", "algorithms.forms", "algorithms.selection"},
    "algorithms.oktopk": {"tensors", "algorithms.forms", "algorithms.selection", "algorithms.sparse"},
    "algorithms.sparse_rivals": {
        "tensors",
        "algorithms.dense",
        "algorithms.forms",
        "algorithms.selection",
        "algorithms.sparse",
    },
    "algorithms.activation": {"schedule"},
    "algorithms.grouping": set(),
    "algorithms.operation": {"tensors", "wire", "algorithms.grouping"},
    "algorithms.tally": {"tensors"},
    "algorithms.accounting": set(),
    "algorithms.wait_avoiding": {
        "errors",
        "tensors",
        "wire",
        "endpoint",
        "group",
        "algorithms.accounting",
        "algorithms.operation",
        "algorithms.tally",
    },
    "algorithms.activated": {
        "errors",
        "tensors",
        "wire",
        "schedule",
        "endpoint",
        "group",
        "algorithms.dense",
        "algorithms.activation",
        "algorithms.operation",
        "algorithms.wait_avoiding",
    },
    "algorithms.coordinated": {
        "errors",
        "tensors",
        "wire",
        "endpoint",
        "group",
        "algorithms.dense",
        "algorithms.operation",
        "algorithms.tally",
        "algorithms.wait_avoiding",
    },
    "algorithms.blocks": {"transport"},
    "algorithms.roster": {"errors", "wire", "transport", "transport.board", "algorithms.meeting"},
    "algorithms.round_board": {
        "tensors",
        "wire",
        "transport",
        "algorithms.blocks",
        "algorithms.operation",
        "algorithms.roster",
    },
    "algorithms.one_sided": {
        "errors",
        "tensors",
        "transport",
        "transport.board",
        "group",
        "algorithms.accounting",
        "algorithms.blocks",
        "algorithms.operation",
        "algorithms.roster",
        "algorithms.round_board",
        "algorithms.tally",
        "algorithms.wait_avoiding",
    },
    # facade
    "registered": {"arguments", "errors", "forks", "tensors", "transport"},
    "flat": {"errors", "tensors", "registered"},
    "calls": {
        "errors",
        "numbering",
        "traffic",
        "wire",
        "transport.board",
        "endpoint",
        "group",
        "driver",
        "progress",
        "algorithms.by_message",
        "algorithms.forms",
        "algorithms.meeting",
        "algorithms.operation",
        "algorithms.shared",
        "algorithms.sizes",
        "attendance",
    },
    "sparse": {
        "errors",
        "tensors",
        "algorithms.forms",
        "algorithms.oktopk",
        "algorithms.selection",
        "algorithms.sparse",
        "algorithms.sparse_rivals",
    },
    "bundle": {"errors", "tensors", "wire"},
    "persistent": {
        "errors",
        "tensors",
        "wire",
        "endpoint",
        "group",
        "algorithms.activated",
        "algorithms.activation",
        "algorithms.coordinated",
        "algorithms.meeting",
        "algorithms.one_sided",
        "algorithms.operation",
        "algorithms.roster",
        "algorithms.tally",
        "algorithms.wait_avoiding",
        "bundle",
    },
    "rpc.carrier": {"tensors"},
    "rpc.packing": {"errors", "tensors", "wire"},
    "rpc.in_memory": {
        "errors",
        "tensors",
        "wire",
        "transport",
        "transport.inbox",
        "transport.loans",
        "rpc.carrier",
        "rpc.packing",
    },
    "rpc.segments": {"errors", "tensors", "wire", "rpc.carrier"},
    "rpc.by_message": {"errors", "tensors", "wire", "group", "switchboard", "rpc.carrier", "rpc.segments"},
    "rpc.codec": {"errors", "tensors", "rpc.carrier"},
    "rpc.hints": {"errors", "rpc.codec"},
    "rpc.service": {"arguments", "errors", "rpc.hints", "rpc.codec"},
    "rpc.failure": {"errors", "rpc.codec"},
    "rpc.protocol": {"errors", "tensors", "rpc.carrier"},
    "rpc.slots": {"rpc.protocol"},
    "rpc.server": {
        "errors",
        "tensors",
        "deadlines",
        "progress",
        "rpc.codec",
        "rpc.failure",
        "rpc.protocol",
        "rpc.service",
    },
    "rpc.client": {
        "arguments",
        "errors",
        "tensors",
        "deadlines",
        "rpc.carrier",
        "rpc.codec",
        "rpc.failure",
        "rpc.protocol",
        "rpc.server",
        "rpc.service",
        "rpc.slots",
    },
    "rpc.exchange": {
        "errors",
        "tensors",
        "rpc.carrier",
        "rpc.client",
        "rpc.protocol",
        "rpc.server",
        "rpc.service",
    },
    "rpc.stub": {"arguments", "errors", "rpc.hints", "rpc.client", "rpc.service"},
    "rpc.ranks": {
        "arguments",
        "errors",
        "wire",
        "endpoint",
        "failures",
        "group",
        "progress",
        "rpc.by_message",
        "rpc.carrier",
        "rpc.client",
        "rpc.exchange",
        "rpc.in_memory",
        "rpc.service",
        "rpc.stub",
    },
    "rpc.by_socket": {"errors", "tensors", "wire", "rpc.carrier", "rpc.segments"},
    "rpc.outside": {
        "deadlines",
        "errors",
        "keys",
        "transport.sockets",
        "rpc.by_socket",
        "rpc.codec",
        "rpc.exchange",
        "rpc.service",
        "rpc.stub",
    },
    "rpc": {"rpc.outside", "rpc.ranks", "rpc.service", "rpc.stub"},
    "communicator": {
        "arguments",
        "errors",
        "shapes",
        "tensors",
        "wire",
        "endpoint",
        "group",
        "progress",
        "traffic",
        "algorithms.dense",
        "algorithms.forms",
        "algorithms.oktopk",
        "algorithms.operation",
        "algorithms.selection",
        "algorithms.tally",
        "bundle",
        "calls",
        "persistent",
        "registered",
        "rpc.ranks",
        "sparse",
    },
    "rendezvous": {
        "errors",
        "keys",
        "processes",
        "transport",
        "transport.arena",
        "transport.handover",
        "transport.joining",
        "transport.monitor",
        "transport.split",
        "transport.zeromq",
    },
    "world": {
        "errors",
        "forks",
        "wire",
        "transport",
        "transport.inproc",
        "transport.joining",
        "deadlines",
        "transport.slots",
        "endpoint",
        "failures",
        "group",
        "progress",
        "algorithms.dense",
        "communicator",
        "rendezvous",
    },
    "launch": {"errors", "keys", "processes"},
    "": {  # asyncoll/__init__.py
        "algorithms.selection",
        "communicator",
        "deadlines",
        "errors",
        "flat",
        "persistent",
        "progress",
        "rpc",
        "sparse",
        "tensors",
        "world",
    },
    # roof
    "testing": {
        "errors",
        "keys",
        "shapes",
        "tensors",
        "wire",
        "transport",
        "transport.board",
        "transport.inproc",
        "transport.inproc_arena",
        "transport.arena",
        "transport.slots",
        "transport.split",
        "transport.zeromq",
        "transport.virtual_time",
        "transport.simulated",
        "endpoint",
        "progress",
        "algorithms.coordinated",
        "algorithms.dense",
        "algorithms.grouping",
        "algorithms.operation",
        "persistent",
        "communicator",
        "world",
        "launch",
        "rpc.protocol",
        "rpc.hints",
        "rpc.codec",
        "rpc.packing",
        "rpc.segments",
        "rpc.failure",
    },
    "doctor": {"errors", "launch", "rendezvous", ""},
    "bench": {"errors", "tensors", "algorithms.sizes", "communicator", "persistent", "launch", "testing", ""},
    "cli": {"errors", "keys", "launch", "testing", "doctor", "bench"},
}
SANS_IO = ("wire", "matching", "schedule")
SANS_IO_FORBIDDEN = {"asyncio", "zmq", "time", "random", "threading", "socket", "select", "selectors", "os", "uvloop"}
TORCH = {"tensors", "flat", "doctor", "launch", "rendezvous"}
ZMQ = {f"transport.{name}" for name in ("gate", "curve", "door", "monitor", "sockets", "zeromq")} | {"doctor"}
DOORS = ("asyncoll.rpc", "asyncoll.testing")  # the other modules whose names are public
FORBIDDEN_NAMES = {"pickle", "cPickle", "dill", "cloudpickle", "recv_pyobj", "send_pyobj", "marshal", "shelve"}

modules = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
modules = {name.removesuffix("__init__").removesuffix("."): path for name, path in modules.items()}
every_module = pytest.mark.parametrize("module", sorted(modules), ids=lambda module: module or "asyncoll")
outsiders = sorted([*ROOT.glob("trainers/**/*.py"), *ROOT.glob("examples/**/*.py")])


def room(module: str) -> str:
    top = module.partition(".")[0]
    return top if top in ("launch", "testing", "bench") else module


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of everything imported below `tree`; the name is empty for `import module`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from ((node.module or "", alias.name) for alias in node.names)


def imported_at_once(tree: ast.Module) -> Iterator[str]:
    """The packages that importing this module imports: not those in functions or under TYPE_CHECKING."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (module.partition(".")[0] for module, _ in imports(node))
        pending += ast.iter_child_nodes(node)


def rooms_used(tree: ast.AST) -> set[str]:
    used = set()
    for module, name in imports(tree):
        if module.partition(".")[0] == "asyncoll":
            inside = module.removeprefix("asyncoll").removeprefix(".")
            deeper = f"{inside}.{name}".strip(".")
            used.add(room(deeper if deeper in modules else inside))
    return used


def packages_used(tree: ast.AST) -> set[str]:
    return {module.partition(".")[0] for module, _ in imports(tree)}


@every_module
def test_every_arrow_is_in_the_table(module):
    used = rooms_used(parse(modules[module])) - {room(module)}
    assert used <= ROOMS[room(module)], "draw it in ROOMS, if it goes down"


@pytest.mark.parametrize("name", ROOMS, ids=lambda name: name or "asyncoll")
def test_arrows_only_go_down(name):
    below = list(ROOMS)[: list(ROOMS).index(name)]
    assert ROOMS[name] <= set(below)


def test_the_table_has_no_room_or_arrow_that_is_gone():
    assert set(map(room, modules)) == set(ROOMS)
    drawn = {(name, used) for name in ROOMS for used in ROOMS[name]}
    real = {(room(module), used) for module, path in modules.items() for used in rooms_used(parse(path))}
    assert drawn <= real


@pytest.mark.parametrize("module", SANS_IO)
def test_the_protocol_has_no_loop_no_clock_and_no_socket(module):
    assert not packages_used(parse(modules[module])) & SANS_IO_FORBIDDEN


@every_module
def test_zmq_and_torch_stay_in_their_rooms(module):
    used = packages_used(parse(modules[module]))
    assert "zmq" not in used or room(module) in ZMQ
    assert "torch" not in used or room(module) in TORCH


@every_module
def test_torch_is_imported_when_it_is_needed(module):
    assert "torch" not in set(imported_at_once(parse(modules[module])))


@every_module
def test_nothing_in_the_package_unpickles_evaluates_or_listens_to_the_world(module):
    for node in ast.walk(parse(modules[module])):
        names = {getattr(node, "id", ""), getattr(node, "attr", "")}
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {part for pair in imports(node) for dotted in pair for part in dotted.split(".")}
        assert not names & FORBIDDEN_NAMES
        assert not (isinstance(node, ast.Call) and ast.unparse(node.func) == "eval")
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert "tcp://*" not in node.value
            assert "tcp://0.0.0.0" not in node.value


@pytest.mark.parametrize("path", outsiders, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_trainers_and_examples_use_public_names_only(path):
    tree = parse(path)
    for module, name in imports(tree):
        if module.partition(".")[0] == "asyncoll":
            assert module in ("asyncoll", *DOORS)
            assert not name or name in asyncoll.__all__ or module in DOORS or f"asyncoll.{name}" in DOORS
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "asyncoll":
            assert node.attr in asyncoll.__all__ or f"asyncoll.{node.attr}" in DOORS


@pytest.mark.parametrize("name", asyncoll.__all__)
def test_every_public_name_is_there_and_documented(name):
    value = getattr(asyncoll, name)
    assert not inspect.ismodule(value)
    if inspect.isclass(value) or inspect.isroutine(value):
        assert inspect.getdoc(value)
        assert value.__doc__, "a docstring of its own, not an inherited one"


PUBLIC_CLASSES = [name for name in asyncoll.__all__ if inspect.isclass(getattr(asyncoll, name))]


@pytest.mark.parametrize("name", PUBLIC_CLASSES)
def test_every_public_method_is_documented(name):
    for attribute, value in vars(getattr(asyncoll, name)).items():
        if not attribute.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
            assert value.__doc__, attribute


def test_what_is_not_public_is_not_an_attribute():
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = asyncoll.no_such_name
