"""The functions that peers can call, by name: checks of their arguments, and their descriptions."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from asyncoll.arguments import text
from asyncoll.errors import UsageError
from asyncoll.rpc import hints
from asyncoll.rpc.codec import Types
from asyncoll.rpc.device_place import DevicePlace

MAX_NAME = 200
METHODS = "asyncoll.methods"  # a function that every registry has: it describes all others
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a function, as its caller sees it. `kind` is the name of the kind in `inspect.Parameter`."""

    name: str
    kind: str
    annotation: str
    has_default: bool


@dataclass(frozen=True, slots=True)
class Method:
    """A function that can be called, as its caller sees it; from `Rpc.methods` and `Connection.methods`.

    `returns` is the return annotation, empty if there is none; of a stream it is the annotation of an item.
    `str(method)` is readable as a signature.
    """

    name: str
    parameters: tuple[Parameter, ...]
    returns: str
    streams: bool
    doc: str

    def __str__(self) -> str:
        shown = ", ".join(_shown(parameter) for parameter in self.parameters)
        returned = f"stream of {self.returns or 'Any'}" if self.streams else self.returns
        return f"{self.name}({shown})" + (f" -> {returned}" if returned else "")


def _shown(parameter: Parameter) -> str:
    stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind, "")
    annotated = f": {parameter.annotation}" if parameter.annotation else ""
    return f"{stars}{parameter.name}{annotated}{' = ...' if parameter.has_default else ''}"


class Function:
    """A registered function, or a method of the class that describes a remote service."""

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        *,
        is_unbound: bool = False,
        inline: bool = False,
        place: DevicePlace | None = None,
    ) -> None:
        """`is_unbound`: `fn` is a method of a class, whose first parameter is not an argument.

        `inline`: `fn` is a plain function that runs on the loop. `place`: where the tensors of its arguments belong.

        Raises UsageError if `fn` cannot be called remotely, or not inline.
        """
        if not callable(fn):
            raise UsageError(f"{name} must be a function, got {fn!r:.60}")
        if inspect.isgeneratorfunction(fn):
            raise UsageError(f"{name} is a generator: make it `async def`, so that it can wait for its reader")
        self.name = name
        self.result = f"the result of {name}"  # in errors
        self.fn = fn
        self.is_coroutine = inspect.iscoroutinefunction(fn)
        try:
            signature = inspect.signature(fn)
        except ValueError as error:
            raise UsageError(f"{name} has no signature: wrap it in a function of your own ({error})") from None
        self._signature = signature.replace(parameters=[*signature.parameters.values()][is_unbound:])
        self._annotations = hints.resolved(fn, name)
        result = self._annotations.get("return", inspect.Parameter.empty)
        self.is_inline = inline
        self.place = place
        self.streams = not self.is_coroutine and (inspect.isasyncgenfunction(fn) or hints.is_stream(result))
        if inline and (self.is_coroutine or self.streams):
            raise UsageError(f"{name} is `async`, so it runs on the loop anyway: `inline` is for plain functions")
        self.returns = hints.items(result) if self.streams else result
        self.types: Types = hints.dataclasses_in(self._annotations.values())
        parameters = self._signature.parameters.values()
        self._checks = {p.name: hints.checker(self._annotations.get(p.name, p.empty)) for p in parameters}
        self._check_returned = hints.checker(self.returns)
        self._is_plain = all(p.kind in _POSITIONAL for p in parameters)
        # Where a plain call has something to check: the place of the argument, the check, and the name for errors.
        self._in_order = [
            (index, check, f"{name}: {argument}")
            for index, (argument, check) in enumerate(self._checks.items())
            if check is not hints.anything
        ]

    def check(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Raise UsageError if the arguments do not match the signature and the annotations."""
        if self._is_plain and not kwargs and len(args) == len(self._checks):
            for index, check, what in self._in_order:
                check(args[index], what)
            return
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise UsageError(f"{self.describe()}: {error}") from None
        for name, value in bound.arguments.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                values = value.values()
            else:
                values = value if kind is inspect.Parameter.VAR_POSITIONAL else [value]
            for each in values:
                self._checks[name](each, f"{self.name}: {name}")

    def check_result(self, result: Any) -> None:
        """Raise UsageError if a result, or an item of a stream, does not match the return annotation."""
        self._check_returned(result, self.result)

    def describe(self) -> Method:
        """The description of the function for callers."""
        parameters = tuple(
            Parameter(p.name, p.kind.name, hints.text(self._annotations.get(p.name, p.empty)), p.default is not p.empty)
            for p in self._signature.parameters.values()
        )
        doc = inspect.getdoc(self.fn) or ""
        return Method(self.name, parameters, hints.text(self.returns), self.streams, doc)


class FunctionRegistry:
    """The functions of one rank in one communicator, or of one service."""

    def __init__(self, before: FunctionRegistry | None = None) -> None:
        """`before` is that of the epoch before, whose functions stay until others get their names."""
        known = {} if before is None else before._functions
        self._functions: dict[str, Function] = {name: each for name, each in known.items() if name != METHODS}
        self._of_before = set(self._functions)

    def add(
        self, what: Any, name: str | None = None, *, inline: bool = False, place: DevicePlace | None = None
    ) -> None:
        """Add a function, or the public methods of an object, as `method` or `name.method`.

        With `inline`, all of them are plain functions that run on the loop. `place` is where the tensors of their
        arguments belong; None: on the CPU.

        Raises UsageError if a name is taken; then nothing is added.
        """
        name = None if name is None else text(name, "name")
        if inspect.isroutine(what):
            new = [Function(_checked(name or what.__name__), what, inline=inline, place=place)]
        elif isinstance(what, type):
            raise UsageError(f"{what.__qualname__} is a class: register an object of it")
        else:
            prefix = f"{name}." if name else ""
            new = [
                Function(_checked(prefix + own), method, inline=inline, place=place)
                for own, method in public_methods(what)
            ]
        for function in new:
            is_taken = function.name in self._functions and function.name not in self._of_before
            if is_taken or function.name == METHODS:
                raise UsageError(f"{function.name} is registered already: give this one another `name`")
        self._functions |= {function.name: function for function in new}
        self._of_before.difference_update(function.name for function in new)

    def find(self, name: str) -> Function:
        """The function of that name. Raises UsageError, which suggests similar names, if there is none."""
        function = self._functions.get(name)
        if function is None and name == METHODS:  # made at its first call: to read its annotations takes 0.5 ms
            function = self._functions[METHODS] = Function(METHODS, self.methods)
        if function is None:
            known = sorted(set(self._functions) - {METHODS})
            near = difflib.get_close_matches(name, known, n=3) or known[:5]
            advice = f"there is {', '.join(near)}" if near else "nothing is registered there"
            raise UsageError(f"no function {name[:MAX_NAME]!r}: {advice}")
        return function

    def types_of(self, name: object) -> Types:
        """The dataclasses in the annotations of the function of that name; empty if there is none here."""
        function = self._functions.get(name) if isinstance(name, str) else None
        return function.types if function is not None else {}

    def place_of(self, name: str) -> DevicePlace | None:
        """Where the tensors of arguments of that function belong. None: on the CPU, or there is no such function."""
        function = self._functions.get(name)
        return None if function is None else function.place

    async def methods(self) -> list[Method]:
        """The descriptions of all functions."""
        return [function.describe() for name, function in self._functions.items() if name != METHODS]


def public_methods(thing: Any) -> list[tuple[str, Callable[..., Any]]]:
    """The public methods of an object or a class. Raises UsageError if it has none."""
    cls = thing if isinstance(thing, type) else type(thing)
    names = [name for name in dir(cls) if not name.startswith("_") and inspect.isroutine(getattr(cls, name))]
    if not names:
        raise UsageError(
            f"{thing!r:.60} is not a function and has no public methods: register an object with public methods"
        )
    return [(name, getattr(thing, name)) for name in names]


@lru_cache(1024)  # callers ask about the same few names
def is_name(name: str) -> bool:
    """Whether a function may have this name: identifiers that are separated by dots."""
    return len(name) <= MAX_NAME and all(map(str.isidentifier, name.split(".")))


def _checked(name: str) -> str:
    if not is_name(name):
        raise UsageError(
            f"a name is an identifier of at most {MAX_NAME} characters, got {str(name)[:50]!r}: give `name`"
        )
    return name
