"""The parts of pages that are made from the source: texts of errors, helps of commands, examples, how to cite.

A line `<!-- generated: NAME ARGUMENT -->` of a page is replaced by what the function NAME of `GENERATORS` returns.
"""

import ast
import inspect
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click

from asyncoll import errors
from asyncoll.cli import EXIT_CODES, main

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "asyncoll"
MARK = re.compile(r"^<!-- generated: (?P<name>\w+)(?: (?P<argument>\w+))? -->$", re.MULTILINE)
VALUE = "…"  # stands for what differs from error to error
ERRORS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, BaseException)}
# Where the text stands among the arguments, and what the class says before it.
TEXTS = {
    "PeerLostError": (1, "rank … is gone: "),
    "AbortedError": (1, "rank … aborted: "),
    "RemoteError": (1, ""),
    "NonFiniteError": (1, ""),
}
CAUSES = PACKAGE / "transport/messages/service_protocol.py"  # its texts say why a service is gone
GROUPED_FROM = 50  # texts of a class
LETTERS = 10  # a text with fewer says nothing without its values
ROOMS = {  # by folder
    "": "Communicator, command line, notebooks",
    "_core": "The compiled core",
    "algorithms": "Collectives, rounds, messages",
    "bench": "asyncoll bench",
    "launch": "asyncoll launch",
    "ray": "Ray",
    "rpc": "RPC",
    "runtime": "Calls under way",
    "tensors": "Tensors and dtypes",
    "testing": "Simulated worlds, laws, fault tests",
    "torch": "torch.distributed, and hooks for DDP",
    "training": "Training",
    "transport": "Connections and memory",
    "world": "Joining a world",
}


def filled(markdown: str) -> str:
    """`markdown` with its generated parts."""
    return MARK.sub(lambda found: GENERATORS[found["name"]](*filter(None, [found["argument"]])), markdown)


def error(name: str) -> str:
    """What an error class means, and all texts that the source raises with it."""
    meaning = (inspect.getdoc(getattr(errors, name)) or "").partition("\n\nAttributes:")[0]
    by_room = texts_raised()[name]
    groups = {f"### {name}: {ROOMS[room]}\n\n": texts for room, texts in sorted(by_room.items()) if texts}
    if sum(map(len, groups.values())) <= GROUPED_FROM:
        groups = {"": set().union(*groups.values())}
    lists = (
        title + "\n".join(f"- {_code(text)}" for text in sorted(texts, key=str.casefold))
        for title, texts in groups.items()
    )
    return "\n\n".join((meaning, f"Texts, with {VALUE} for values:", *lists)) if any(groups.values()) else meaning


@cache
def texts_raised() -> dict[str, dict[str, set[str]]]:
    """By error class and folder of the package: the texts of errors that are made there."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path, tree in _trees().items():
        folders = path.relative_to(PACKAGE).parts[:-1]
        constants = _constants(tree)
        for scope in ast.walk(tree):
            if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
                continue
            for call in _own_calls(scope):
                name, *arguments = _name(call.func), *call.args
                if name == "partial" and arguments:  # it is made when it is raised
                    name = _name(arguments.pop(0))
                position, before = TEXTS.get(name, (0, ""))
                if name in ERRORS and len(arguments) > position:
                    texts = _texts(arguments[position], {**constants, **_local(scope)})
                    found[name]["".join(folders[:1])] |= {
                        before + text for text in texts if sum(map(str.isalpha, text)) >= LETTERS
                    }
    causes = [*itertools.chain(*_constants(_trees()[CAUSES]).values()), *_known()["silence_cause"]]
    texts = {text for cause in causes for text in _texts(cause, {})} - {VALUE}
    found["ServiceLostError"]["rpc"] |= {f"the service at {VALUE} is gone: {text}" for text in texts}
    return found


@cache
def _trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def _known() -> dict[str, list[ast.expr]]:
    """The constants of all modules, and what functions return, by name."""
    known: dict[str, list[ast.expr]] = defaultdict(list)
    for tree in _trees().values():
        for name, values in _constants(tree).items():
            known[name] += values
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                returned = [each.value for each in ast.walk(node) if isinstance(each, ast.Return)]
                known[node.name] += [each for each in returned if isinstance(each, ast.JoinedStr)]
    return known


def _constants(tree: ast.Module) -> dict[str, list[ast.expr]]:
    """The texts among the constants of a module, by name."""
    found: dict[str, list[ast.expr]] = defaultdict(list)
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant | ast.JoinedStr):
            found[_name(node.targets[0] if isinstance(node, ast.Assign) else node.target)].append(node.value)
    return found


def _local(scope: ast.AST) -> dict[str, list[ast.expr]]:
    """What is assigned to the variables of a function."""
    assigned: dict[str, list[ast.expr]] = defaultdict(list)
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign) and not isinstance(scope, ast.Module):
            assigned[_name(node.targets[0])].append(node.value)
    return assigned


def _own_calls(scope: ast.AST) -> Iterator[ast.Call]:
    """The calls in a function or a module, without those of the functions in it."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.Call):
            yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _own_calls(node)


def _name(node: ast.AST) -> str:
    return getattr(node, "id", getattr(node, "attr", ""))


def _texts(node: ast.expr, local: dict[str, list[ast.expr]], depth: int = 0) -> list[str]:
    """The texts that an expression may be."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(map(_one, [_texts(part, local, depth) for part in parts]))]
        case ast.FormattedValue(value=value):
            return _texts(value, local, depth) if _name(value).lstrip("_").isupper() else [VALUE]
        case ast.IfExp(body=one, orelse=other):
            return _texts(one, local, depth) + _texts(other, local, depth)
        case ast.BoolOp(values=values):
            return [text for value in values for text in _texts(value, local, depth)]
        case ast.BinOp(left=left, right=right, op=ast.Add()):
            pairs = itertools.product(_texts(left, local, depth), _texts(right, local, depth))
            return ["".join(pair) for pair in pairs]
        case ast.Name() | ast.Attribute() | ast.Call() if depth < 2:
            name = _name(node.func if isinstance(node, ast.Call) else node)
            is_known = isinstance(node, ast.Call) or name.lstrip("_").isupper()
            sources = local.get(name) or (_known().get(name, []) if is_known else [])
            return [text for source in sources for text in _texts(source, {}, depth + 1)] or [VALUE]
    return [VALUE]


def _one(texts: list[str]) -> str:
    return texts[0] if len(texts) == 1 else VALUE


def _code(text: str) -> str:
    flat = " ".join(text.split())
    return f"`` {flat} ``" if "`" in flat else f"`{flat}`"


def bibtex() -> str:
    """How to cite the software, and the papers of its algorithms."""
    return f"```bibtex\n{(ROOT / 'docs/papers.bib').read_text()}```"


def commands() -> str:
    """The helps of all commands."""
    return "\n\n".join(
        f"## asyncoll {name}\n\n```text\n{command.get_help(context)}\n```" for name, command, context in all_commands()
    )


def exit_codes() -> str:
    """A table of the exit codes of all commands."""
    return "\n".join(
        ["| code | meaning |", "|---|---|", *(f"| {code} | {text} |" for code, text in EXIT_CODES.items())]
    )


def all_commands() -> Iterator[tuple[str, click.Command, click.Context]]:
    """All commands that are no groups, with their names behind `asyncoll`."""

    def below(group: click.Group, context: click.Context) -> Iterator[tuple[str, click.Command, click.Context]]:
        for name, command in group.commands.items():
            inner = click.Context(command, info_name=name, parent=context, terminal_width=100, max_content_width=100)
            if isinstance(command, click.Group):
                yield from below(command, inner)
            else:
                yield inner.command_path.removeprefix("asyncoll "), command, inner

    return below(main, click.Context(main, info_name="asyncoll", **main.context_settings))


def examples() -> str:
    """A table of the programs among the examples: what each shows, and the command that starts it."""
    rows = ["| program | shows | start |", "|---|---|---|"]
    for path in sorted((ROOT / "examples").glob("*.py")):
        said = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
        start = re.search(r"Run (?P<command>`[^`]+`)", said)
        if start:  # others are modules that they import
            rows.append(f"| `{path.name}` | {said[: start.start()].strip()} | {start['command']} |")
    return "\n".join(rows)


GENERATORS = {
    "bibtex": bibtex,
    "commands": commands,
    "error": error,
    "examples": examples,
    "exit_codes": exit_codes,
}
