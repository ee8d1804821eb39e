"""The layers of the package: which package may import which, and constructs that are forbidden."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import asyncoll

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "asyncoll"

# Every package, and the modules at the top level, lowest layer first. A row imports only rows above it in this table.
PACKAGES: dict[str, set[str]] = {
    # the lowest layer
    "errors": set(),
    "arguments": {"errors"},
    "statistics": set(),
    "forks": {"errors"},
    "tensors": {"arguments", "errors", "forks"},
    # what moves bytes
    "transport": {"errors", "tensors"},
    "transport.memory": {"errors", "forks", "tensors", "transport"},
    "transport.messages": {"arguments", "errors", "forks", "statistics", "transport"},
    # what runs a rank
    "runtime": {"arguments", "errors", "forks", "statistics", "tensors", "transport"},
    # what ranks do together
    "rpc": {"arguments", "errors", "runtime", "tensors", "transport", "transport.memory", "transport.messages"},
    "algorithms": {"arguments", "errors", "rpc", "runtime", "statistics", "tensors", "transport"},
    # what users hold
    "communicator": {
        "algorithms",
        "arguments",
        "errors",
        "rpc",
        "runtime",
        "statistics",
        "tensors",
    },
    "world": {
        "algorithms",
        "arguments",
        "communicator",
        "errors",
        "forks",
        "runtime",
        "transport",
        "transport.memory",
        "transport.messages",
    },
    "launch": {"arguments", "errors", "transport"},
    "": {  # asyncoll/__init__.py
        "algorithms",
        "communicator",
        "errors",
        "rpc",
        "runtime",
        "tensors",
        "world",
    },
    # tools for tests and users, on top of all
    "testing": {
        "algorithms",
        "communicator",
        "errors",
        "forks",
        "launch",
        "rpc",
        "runtime",
        "tensors",
        "transport",
        "transport.memory",
        "transport.messages",
        "world",
    },
    "doctor": {"", "errors", "launch", "world"},
    "bench": {
        "",
        "algorithms",
        "communicator",
        "errors",
        "launch",
        "tensors",
        "testing",
    },
    "cli": {"bench", "doctor", "errors", "launch", "testing", "transport"},
}
SUBPACKAGES = ("transport.memory", "transport.messages")
MODULES_MAX, PACKAGES_MAX = 8, 9  # at the top of asyncoll/
SANS_IO = ("transport.wire", "runtime.matching", "runtime.schedule")
SANS_IO_FORBIDDEN = {"asyncio", "zmq", "time", "random", "threading", "socket", "select", "selectors", "os", "uvloop"}
TORCH = {"tensors", "doctor", "launch", "world"}
ZMQ = {"transport.messages", "doctor"}
DOORS = ("asyncoll.rpc", "asyncoll.testing")  # the other modules with public names
FORBIDDEN_NAMES = {"pickle", "cPickle", "dill", "cloudpickle", "recv_pyobj", "send_pyobj", "marshal", "shelve"}

modules = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
modules = {name.removesuffix("__init__").removesuffix("."): path for name, path in modules.items()}
outsiders = sorted([*ROOT.glob("trainers/**/*.py"), *ROOT.glob("examples/**/*.py")])


def package(module: str) -> str:
    """The row of the table that `module` belongs to."""
    top = ".".join(module.split(".")[:2])
    return top if top in SUBPACKAGES else module.partition(".")[0]


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of every import below `tree`; the name is empty for `import module`."""
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


def modules_used(tree: ast.AST) -> set[str]:
    used = set()
    for module, name in imports(tree):
        if module.partition(".")[0] == "asyncoll":
            inside = module.removeprefix("asyncoll").removeprefix(".")
            deeper = f"{inside}.{name}".strip(".")
            used.add(deeper if deeper in modules else inside)
    return used


def packages_used(tree: ast.AST) -> set[str]:
    """The top-level packages that `tree` imports, of this project and others."""
    return {module.partition(".")[0] for module, _ in imports(tree)}


def test_the_table_shows_every_import_between_packages_and_no_other():
    drawn = {(name, used) for name in PACKAGES for used in PACKAGES[name]}
    real = {(package(module), package(used)) for module, path in modules.items() for used in modules_used(parse(path))}
    assert {(one, other) for one, other in real if one != other} == drawn
    assert set(map(package, modules)) == set(PACKAGES)


def test_packages_import_only_packages_above_them_in_the_table():
    order = list(PACKAGES)
    assert not [(name, used) for name in order for used in PACKAGES[name] if order.index(used) >= order.index(name)]


def test_modules_do_not_import_each_other_in_circles():
    """Imports for types only count, too, because they are dependencies of the reader."""
    TopologicalSorter({module: modules_used(parse(path)) - {module} for module, path in modules.items()}).prepare()


def test_the_top_of_the_package_is_small():
    names = {module.partition(".")[0] for module in modules if not module.endswith("__main__")}
    packages = {name for name in names if (PACKAGE / name).is_dir() and name}
    assert len(names - packages) <= MODULES_MAX
    assert len(packages) <= PACKAGES_MAX


def test_the_protocol_uses_no_loop_no_clock_and_no_socket():
    offenders = {module: packages_used(parse(modules[module])) & SANS_IO_FORBIDDEN for module in SANS_IO}
    assert not any(offenders.values()), offenders


def test_zmq_and_torch_stay_in_their_packages():
    used = {module: packages_used(parse(path)) for module, path in modules.items()}
    assert not {module for module in used if "zmq" in used[module] and package(module) not in ZMQ}
    assert not {module for module in used if "torch" in used[module] and package(module) not in TORCH}


def test_algorithms_see_lanes_ports_and_memory_and_not_the_runtime_behind_them():
    hidden = {f"runtime.{name}" for name in ("endpoint", "executions", "failures", "membership", "router")}
    algorithms = {module: path for module, path in modules.items() if package(module) == "algorithms"}
    assert not {module for module, path in algorithms.items() if modules_used(parse(path)) & hidden}


def test_torch_is_imported_when_it_is_needed():
    assert not {module for module, path in modules.items() if "torch" in imported_at_once(parse(path))}


def test_the_package_neither_unpickles_nor_evaluates_nor_listens_on_all_addresses():
    assert not {module: found for module, path in modules.items() if (found := list(forbidden(parse(path))))}


def forbidden(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        names = {getattr(node, "id", ""), getattr(node, "attr", "")}
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {part for pair in imports(node) for dotted in pair for part in dotted.split(".")}
        yield from names & FORBIDDEN_NAMES
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "eval":
            yield "eval"
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (address for address in ("tcp://*", "tcp://0.0.0.0") if address in node.value)


def test_forbidden_constructs_are_found():
    assert set(forbidden(ast.parse("import pickle; eval('1'); bind('tcp://*:1')"))) == {"pickle", "eval", "tcp://*"}


def test_trainers_and_examples_use_public_names_only():
    for path in outsiders:
        check_names(parse(path))


def check_names(tree: ast.Module) -> None:
    for module, name in imports(tree):
        if module.partition(".")[0] == "asyncoll":
            assert module in ("asyncoll", *DOORS)
            assert not name or name in asyncoll.__all__ or module in DOORS or f"asyncoll.{name}" in DOORS
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "asyncoll":
            assert node.attr in asyncoll.__all__ or f"asyncoll.{node.attr}" in DOORS


def test_every_public_name_exists_and_is_documented():
    for name in asyncoll.__all__:
        value = getattr(asyncoll, name)
        assert not inspect.ismodule(value)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert value.__doc__, f"{name} needs a docstring of its own, not an inherited one"
        for attribute, method in vars(value).items() if inspect.isclass(value) else ():
            if not attribute.startswith("_") and (inspect.isfunction(method) or isinstance(method, property)):
                assert method.__doc__, f"{name}.{attribute}"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = asyncoll.no_such_name
