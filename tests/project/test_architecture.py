"""The layers of the package: which package may import which, and constructs that are forbidden."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import asyncoll
from tests.support.places import ROOT, SCRIPTS

PACKAGE = ROOT / "asyncoll"

# Every package, and the modules at the top level, lowest layer first. A row imports only rows above it in this table.
PACKAGES: dict[str, set[str]] = {
    # the lowest layer
    "errors": set(),
    "_core": {"errors"},
    "arguments": {"errors"},
    "statistics": set(),
    "forks": {"errors"},
    "tensors": {"_core", "arguments", "errors", "forks"},
    # what moves bytes
    "transport": {"_core", "errors", "tensors"},
    "transport.memory": {"_core", "errors", "forks", "tensors", "transport"},
    "transport.staging": {"errors", "forks", "tensors", "transport"},
    "transport.messages": {"arguments", "errors", "forks", "statistics", "transport"},
    # what runs a rank
    "runtime": {"arguments", "errors", "forks", "statistics", "tensors", "transport"},
    # what ranks do together
    "rpc": {
        "arguments",
        "errors",
        "forks",
        "runtime",
        "tensors",
        "transport",
        "transport.memory",
        "transport.messages",
        "transport.staging",
    },
    "algorithms.seam": {"errors", "rpc", "runtime", "statistics", "tensors"},
    "algorithms.dense": {
        "_core",
        "algorithms.seam",
        "arguments",
        "errors",
        "rpc",
        "runtime",
        "statistics",
        "tensors",
        "transport",
        "transport.staging",
    },
    "algorithms.rounds": {
        "_core",
        "algorithms.dense",
        "algorithms.seam",
        "arguments",
        "errors",
        "runtime",
        "statistics",
        "tensors",
        "transport",
    },
    "algorithms.sparse": {
        "_core",
        "algorithms.dense",
        "algorithms.seam",
        "arguments",
        "errors",
        "tensors",
    },
    "algorithms": {
        "algorithms.dense",
        "algorithms.rounds",
        "algorithms.seam",
        "algorithms.sparse",
        "arguments",
        "errors",
        "rpc",
        "runtime",
        "statistics",
        "tensors",
        "transport",
        "transport.staging",
    },
    "algorithms.gossip": {
        "algorithms",
        "algorithms.seam",
        "arguments",
        "errors",
        "runtime",
        "tensors",
        "transport",
    },
    # what users hold
    "communicator": {
        "algorithms",
        "algorithms.dense",
        "algorithms.gossip",
        "algorithms.rounds",
        "algorithms.seam",
        "algorithms.sparse",
        "arguments",
        "errors",
        "rpc",
        "runtime",
        "tensors",
    },
    "world": {
        "algorithms",
        "algorithms.dense",
        "algorithms.seam",
        "arguments",
        "communicator",
        "errors",
        "forks",
        "rpc",
        "runtime",
        "transport",
        "transport.memory",
        "transport.messages",
    },
    "blocking": {
        "algorithms",
        "algorithms.gossip",
        "communicator",
        "errors",
        "runtime",
        "world",
    },
    "torch": {
        "algorithms.seam",
        "arguments",
        "blocking",
        "errors",
        "runtime",
        "tensors",
        "world",
    },
    "": {
        "algorithms",
        "algorithms.gossip",
        "algorithms.rounds",
        "algorithms.sparse",
        "blocking",
        "communicator",
        "errors",
        "rpc",
        "runtime",
        "tensors",
        "world",
    },
    "launch": {"", "_core", "errors", "transport", "world"},
    "ray": {"errors", "launch", "runtime", "transport", "world"},
    "extending": {"algorithms.rounds", "algorithms.seam", "algorithms.sparse"},
    "training": {"", "extending", "runtime"},
    "torch.hooks": {
        "algorithms.rounds",
        "algorithms.sparse",
        "blocking",
        "errors",
        "runtime",
        "tensors",
        "torch",
        "training",
    },
    # tools for tests and users, on top of all
    "kinds": set(),
    "cli_base": {"errors", "kinds", "transport"},
    "testing": {
        "_core",
        "algorithms.dense",
        "algorithms.gossip",
        "algorithms.rounds",
        "algorithms.seam",
        "algorithms.sparse",
        "blocking",
        "communicator",
        "errors",
        "forks",
        "kinds",
        "launch",
        "rpc",
        "runtime",
        "tensors",
        "torch.hooks",
        "training",
        "transport",
        "transport.memory",
        "transport.messages",
        "transport.staging",
        "world",
    },
    "doctor": {
        "",
        "_core",
        "algorithms",
        "algorithms.seam",
        "errors",
        "launch",
        "transport",
        "transport.staging",
        "world",
    },
    "bench": {
        "",
        "algorithms.dense",
        "algorithms.rounds",
        "cli_base",
        "communicator",
        "errors",
        "launch",
        "tensors",
        "testing",
        "training",
        "transport",
    },
    "notebook": {"arguments", "errors", "launch", "rpc", "runtime", "transport", "world"},
    "cli": {
        "",
        "algorithms",
        "bench",
        "cli_base",
        "doctor",
        "errors",
        "kinds",
        "launch",
        "testing",
        "transport",
        "world",
    },
    "__main__": {"cli"},
}
SUBPACKAGES = {name for name in PACKAGES if "." in name}
MODULES_MAX, PACKAGES_MAX = 13, 13  # at the top of asyncoll/; `kinds` spares the test kit an import of the commands
FILE_NAMES_MAX, CLASS_NAMES_MAX = 6, 6  # names that are used more than once; `_Name` counts as `Name`
SANS_IO = (
    "transport.wire",
    "runtime.epochs",
    "runtime.matching",
    "runtime.schedule",
    "algorithms.gossip.graphs",
    *(f"algorithms.rounds.{name}" for name in ("engine", "rules", "activation", "grouping", "operation")),
)
SANS_IO_FORBIDDEN = {"asyncio", "zmq", "time", "random", "threading", "socket", "select", "selectors", "os", "uvloop"}
TORCH = {"bench", "tensors", "testing", "torch", "torch.hooks", "training", "transport.staging"} | {
    "doctor",
    "launch",
    "world",
}
ZMQ = {"transport.messages", "doctor"}
DOORS = (
    "asyncoll.extending",
    "asyncoll.notebook",
    "asyncoll.ray",
    "asyncoll.rpc",
    "asyncoll.testing",
    "asyncoll.torch",
    "asyncoll.training",
)  # the other modules with public names
TESTS = ROOT / "tests"
SETTERS = ("setattr", "delattr", "setitem", "delitem")
# Globals of the package that tests replace, with the reason why no argument, setting or peer reaches the state.
_FAULT = "a fault between two steps of the library, which no input or peer causes"
_FAR = "reaching the limit would take gigabytes, thousands of ranks or minutes"
_POLL = "whether a wait polls or sleeps depends on the speed of the machine"
_SPY = "it counts or records internal steps, whose results are the same"
_LAW = "a broken collective, which the checker must notice"
REPLACED = {
    "conftest.py": {"service_protocol.FREEZE_S": "a service outside of a world has no setting for it"},
    "transport/memory/test_arena.py": {
        "arena_module._POLLS": _POLL,
        "arena_module._POLLS_OVERSUBSCRIBED": _POLL,
        "fd_passing.HostArena": _FAULT,
        "fd_passing._BATCH": _FAR,
        "fd_passing._Link.receive": _FAULT,
        "fd_passing._Link.send": _FAULT,
        "fd_passing._greet": "the clock of the test moves there",
        "fd_passing._hand_over": _FAULT,
        "fd_passing._introduce": "a rank of another version, kernel or memory size",
        "fd_passing.make_segment": _FAULT,
        "fd_passing.user_of": "only root could become another user",
        "joining._now_s": "a clock, so that the test does not wait for the time limit",
        "pages._left": "the free memory of the host",
    },
    "bench/test_bench.py": {"algorithms.allreduce": _LAW, "tune.rows_of": "the real times take minutes"},
    "bench/test_claims.py": {
        "suite.measure": "cells with which a claim holds, or does not",
        "between_processes.name": "shorter arrays",
        "between_processes.rows_of": "fewer launches of several hosts: each loads torch",
    },
    "algorithms/test_cancellation.py": {"rank_links.meet": "the moment at which the ranks have met"},
    "algorithms/dense/test_collectives.py": {
        "by_size.allreduce": "the size of the array chooses the algorithm; each runs at all sizes"
    },
    "runtime/test_standstill.py": {
        "SharedLoop.is_stuck": "ranks on one loop never know it; the test does",
        "standstill.STILL_S": "so that ranks of drawn worlds stand still",
        "standstill.Standstill._still": "counted, to see that they do",
        "standstill._TICK_S": "the same as STILL_S",
    },
    "algorithms/sparse/test_selection.py": {"_core.native": "the same without the compiled core"},
    "transport/staging/test_cuda.py": {
        "cuda._PATIENCE_S": "so that the test does not wait for it",
        "cuda.relaxed": _FAULT,
        "DeviceStager._settled": "the rank is cancelled at this moment",
        "CudaDevice.share": "memory that processes share, without CUDA",
        "probe._pattern": "a tensor of CUDA, without CUDA",
    },
    "algorithms/dense/test_device_pairs.py": {
        "Windows.answer": "the communicator fails at this moment",
        "executions.SEGMENT_BYTES": _FAR,
        "pair_memory.PairMemory.place": "a sender that lies about its block",
        "pair_memory.SEGMENT_BYTES": _FAR,
        "shared_block._PATIENCE_S": "so that the test does not wait for it",
    },
    "rpc/test_device_memory.py": {"pair_memory.PairMemory.place": "a sender that lies about its block"},
    "project/test_docs.py": {
        "asyncoll.run": "programs of the documentation, which call it, run at ranks of this process"
    },
    "runtime/test_failures.py": {
        "Executions.arrived": _FAULT,
        "SimulatedWorld.announce_loss": _FAULT,
        "WaitAvoiding._publish": _SPY,
        "zeromq._HIGH_WATER_MARK": _FAR,
    },
    "test_forks.py": {"segment.check_room": "the free memory of the host"},
    "algorithms/rounds/test_groups.py": {"asyncoll.algorithms.rounds.wait_avoiding.EARLY_MAX": _FAR},
    "runtime/test_interruption.py": {"mutex._try_lock": _FAULT, "progress._Crossing._settle": _FAULT},
    "transport/staging/test_ipc.py": {
        "cuda.loaded_runtime": "there is no library of CUDA to load",
        "ipc.loaded_runtime": "this machine has no library of CUDA",
        "ipc.reduce_on_device": "emulated devices have no operations of torch",
    },
    "testing/laws/conftest.py": {
        "sweep.answers": "worlds are checked in this process, whose collectives may be broken",
        "case_runs._run_job": "ranks are forked, and no launcher loads the package",
    },
    "testing/laws/test_laws.py": {
        "Communicator.method": _LAW,
        "Gossip.method": _LAW,
        "asyncoll.algorithms.rounds.engine.Engine.end": _LAW,
        "asyncoll.testing.laws.draw": _LAW,
        "case_runs._run_job": "the record of a process is forged before it is read",
        "case_runs._TIMEOUT_S": "every process takes too long",
    },
    "world/test_meeting_again.py": {
        "join._joining": "the moment at which a rank has met",
        "meeting.ZeroMQTransport": _SPY,
        "meeting._share_memory": _FAULT,
    },
    "algorithms/dense/test_device_collectives.py": {
        "shared_block._PATIENCE_S": "so that the test does not wait for it"
    },
    "algorithms/rounds/test_rounds_between_hosts.py": {
        "Agent.received": "the order in which a process that was stopped reads from its connections",
        "HostRecord._publish": "a process that is stopped between two steps",
        "HostRecord.conclude": "a process that is stopped between two steps",
        "OperationRegistry.enter": "the free memory of one host of several",
        "operation_registry.MAX_OPERATIONS": "the operations up to the real limit take seconds",
    },
    "rpc/test_in_memory.py": {
        "arena_module._SLICE_S": _POLL,
        "arena_module._YIELDING_POLL_S": _POLL,
        "arena_module._YIELDING_POLL_S_OVERSUBSCRIBED": _POLL,
        "memory_carrier.INLINE_BYTES": _FAR,
        "memory_carrier.Packing": "a sender that lies about lengths",
        "memory_carrier.WINDOW_BYTES": _FAR,
        "lending.KEPT_BYTES": _FAR,
        "packing._PIECE": _FAR,
    },
    "rpc/test_outside.py": {
        "SegmentStream._put": _FAULT,
        "addresses._LOCK_ATTEMPTS": "so that the test does not wait for it",
        "segment_stream.UNSENT_MAX": _FAR,
        "service_protocol.CLIENTS_MAX": _FAR,
        "service_protocol.FREEZE_S": "a service outside of a world has no setting for it",
        "service_protocol.HANDSHAKE_S": "the real limit is 5 seconds",
        "service_sockets.Heartbeat._handle_event": _FAULT,
        "service_sockets._UNSENT_MAX": _FAR,
        "service_streams._PAUSE_S": "so that the test does not wait for it",
        "service_streams._UNGREETED_MAX": _FAR,
        "service_streams.is_gone": _FAULT,
        "service_streams.process_of": _FAULT,
    },
    "transport/messages/test_silence.py": {"monitor.Monitor": "virtual time has no sockets", "monitor.threads": _FAULT},
    "transport/messages/test_security.py": {"connection_policy._HANDSHAKE_MS": "the real limit is 5 seconds"},
    "algorithms/test_shared_memory.py": {
        "BlockTable.provide": _SPY,
        "PythonControlBlock.ring_at_next_wake": _SPY,
        "OneSidedRounds._deliver": "other ranks end rounds at that moment of a call",
        "OneSidedRounds._pause": "other ranks end rounds at that moment of a call",
    },
    "transport/messages/test_slots.py": {
        "shared_payloads.SLOTS": "the layout of the control block; all ranks must have the same",
        "shared_payloads.THRESHOLD_BYTES": "the contract sends short payloads, and these must use slots, too",
    },
    "algorithms/sparse/test_sparse.py": {
        "selection.consensus": _SPY,
        "selection.index_dtype": _FAR,
        "selection.is_unbalanced": _SPY,
    },
    "runtime/test_sites.py": {
        "asyncoll.algorithms.dense.compiled.place_outside": _SPY,
        "asyncoll.algorithms.rounds.repeats.place_outside": _SPY,
        "asyncoll.runtime.signature.place_outside": _SPY,
    },
    "transport/staging/test_staging.py": {
        "Mirror.defer": "what it was asked is noted",
        "world._RETURN_S": "so that the test does not wait for it",
        "mirrors._PATIENCE_S": "so that the test does not wait for it",
    },
    "transport/messages/test_tcp_payloads.py": {"tcp_payloads._FLUSH_S": "so that a slow machine has the time"},
    "torch/test_versions.py": {"asyncoll.torch.refusal": "a torch that takes backends by another signature"},
    "transport/test_transport.py": {"split._LEAVING_S": "so that the test does not wait for it"},
    "algorithms/dense/test_two_levels.py": {"two_level._WINDOW_BYTES": "short arrays in many windows"},
}
POINTS = re.compile(
    r"\A(See|Is|That|Those) (of |in )?`|(\A|\n\n|\.\s)(As|Like) (of |in )?`|\b(is|are) (that|those) of\s+`"
)
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


def test_one_name_is_one_thing():
    """Names of files, but those of packages, and of classes, whatever class or function they are in."""
    files = Counter(path.name for path in modules.values() if path.stem != "__init__")
    nodes = (node for path in modules.values() for node in ast.walk(parse(path)))
    classes = Counter(node.name.lstrip("_") for node in nodes if isinstance(node, ast.ClassDef))
    assert len({name for name, count in files.items() if count > 1}) <= FILE_NAMES_MAX
    assert len({name for name, count in classes.items() if count > 1}) <= CLASS_NAMES_MAX


def test_docstrings_stand_alone():
    """None only points at another one. Where an implementation has nothing to add to its protocol, it has none."""
    for path in [*modules.values(), *PACKAGE.rglob("*.pyi"), *ROOT.glob("trainers/**/*.py")]:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                assert not POINTS.search(ast.get_docstring(node) or ""), f"{path}: {getattr(node, 'name', '')}"


def test_the_protocol_uses_no_loop_no_clock_and_no_socket():
    offenders = {module: packages_used(parse(modules[module])) & SANS_IO_FORBIDDEN for module in SANS_IO}
    assert not any(offenders.values()), offenders


def test_zmq_and_torch_stay_in_their_packages():
    used = {module: packages_used(parse(path)) for module, path in modules.items()}
    assert not {module for module in used if "zmq" in used[module] and package(module) not in ZMQ}
    assert not {module for module in used if "torch" in used[module] and package(module) not in TORCH}


def test_algorithms_see_lanes_ports_and_memory_and_not_the_runtime_behind_them():
    hidden = {f"runtime.{name}" for name in ("endpoint", "executions", "failures", "membership", "router")}
    algorithms = {module: path for module, path in modules.items() if module.startswith("algorithms")}
    assert not {module for module, path in algorithms.items() if modules_used(parse(path)) & hidden}
    deeper = {module: path for module, path in algorithms.items() if module.count(".") == 2}  # all but the backends
    for module, path in deeper.items():
        assert not [node for node in ast.walk(parse(path)) if getattr(node, "attr", "") == "endpoint"], module


def test_torch_is_imported_when_it_is_needed():
    """Not by `asyncoll.torch` itself either: `import torch` imports it. A tensor of CUDA imports `staging.cuda`."""
    users = {module for module in modules if package(module) in ("training", "torch", "torch.hooks")} - {"torch"}
    users |= {"transport.staging.cuda", "transport.staging.ipc", "transport.staging.probe", "bench.late_ranks"}
    others = {module: path for module, path in modules.items() if module not in users}
    assert not {module for module, path in others.items() if "torch" in imported_at_once(parse(path))}


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


def test_the_tests_mirror_the_package():
    """The tests of a package are in the folder of its name, those of a module at the top are in a file of its name.

    `project` has the tests of the whole project. Scripts are in folders as the tests that run them.
    """
    tests = {path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    packages = {path.parent.relative_to(PACKAGE) for path in modules.values()} | {Path("trainers"), Path("project")}
    at_the_top = {Path(name) for name in modules if "." not in name}
    assert {path.parent for path in tests} <= packages
    assert {Path(path.stem.removeprefix("test_")) for path in tests if path.parent == Path()} <= at_the_top
    assert {path.parent.relative_to(SCRIPTS) for path in SCRIPTS.rglob("*.py")} <= packages | at_the_top


def test_tests_take_hypothesis_with_the_settings_of_the_project():
    for path in TESTS.rglob("test_*.py"):
        used = {module for module, _ in imports(parse(path))}
        assert "hypothesis" not in used, f"{path}: import it from tests.support.properties"
        assert "tests.support.properties" in used or not any(name.startswith("hypothesis.") for name in used), path


def replaced(tree: ast.Module) -> Iterator[str]:
    """What the code assigns to, deletes or patches in modules and classes that it imports from the package."""
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.asname or "asyncoll" for alias in node.names if alias.name.partition(".")[0] == "asyncoll"]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "asyncoll":
            names = [alias.asname or alias.name for alias in node.names]
        else:
            names = []
        imported |= set(names)

    def is_of_the_package(node: ast.AST) -> bool:
        while isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        return isinstance(node, ast.Name) and node.id in imported

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            if is_of_the_package(node):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in SETTERS and node.args:
            owner, name = node.args[0], node.args[1] if len(node.args) > 1 else None
            if isinstance(owner, ast.Constant) and str(owner.value).startswith("asyncoll."):
                yield str(owner.value)
            elif is_of_the_package(owner) and name is not None:
                yield f"{ast.unparse(owner)}.{name.value if isinstance(name, ast.Constant) else ast.unparse(name)}"


def test_tests_replace_no_globals_of_the_package_but_those_with_a_reason():
    """Scripts of the tests are processes of their own, and are not looked at."""
    paths = [path for path in TESTS.rglob("*.py") if not path.is_relative_to(SCRIPTS)]
    found = {str(path.relative_to(TESTS)): set(replaced(parse(path))) for path in paths}
    assert {name: names for name, names in found.items() if names} == {name: set(REPLACED[name]) for name in REPLACED}


def test_replaced_globals_are_found():
    code = """
from asyncoll.transport import wire, keys as k
from asyncoll import Communicator
import asyncoll.errors
import os
wire.VERSION = 2
k.Key.derive = None
del asyncoll.errors.UsageError
wire.TABLE["x"] += 1
monkeypatch.setattr(Communicator, "split", None)
monkeypatch.setattr("asyncoll.world.join.run", None)
patch.setitem(wire.TABLE, "y", 1)
setattr(k, name, 1)
os.environ["X"] = comm.x = Communicator.size
monkeypatch.setattr(os, "fork", None)
"""
    assert sorted(replaced(ast.parse(code))) == [
        "Communicator.split",
        "asyncoll.errors.UsageError",
        "asyncoll.world.join.run",
        "k.Key.derive",
        "k.name",
        "wire.TABLE.y",
        "wire.TABLE['x']",
        "wire.VERSION",
    ]
