"""Type annotations: checks of values against them, and the dataclasses that they name."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections import abc
from collections.abc import Callable
from typing import Any

from asyncoll.errors import UsageError
from asyncoll.rpc.codec import Expected

Check = Callable[[Any, str], None]  # takes a value and its name; raises UsageError
_ANY = (Any, object, inspect.Parameter.empty)
_STREAMS = (abc.AsyncIterator, abc.AsyncIterable, abc.AsyncGenerator)
_WIDER: dict[type, tuple[type, ...]] = {float: (float, int), complex: (complex, float, int)}  # PEP 484: numeric tower


def resolved(thing: Any, name: str) -> dict[str, Any]:
    """The annotations of a function or class, as types. Raises UsageError if a name in them cannot be found."""
    try:
        return typing.get_type_hints(thing)
    except Exception as error:
        raise UsageError(
            f"the annotations of {name} cannot be resolved ({error}): what they name must be in its module at runtime"
        ) from None


def anything(value: Any, what: str) -> None:
    """The check of an annotation that allows every value."""


def checker(annotation: Any) -> Check:
    """A function that checks a value against `annotation`."""
    if annotation in _ANY:
        return anything
    # The common case, much faster than typeguard. A class with a metaclass (ABC, Enum, Protocol) goes the general way,
    # because `isinstance` may have another meaning there.
    if type(annotation) is type and annotation is not type(None):
        allowed = _WIDER.get(annotation, (annotation,))

        def check(value: Any, what: str) -> None:
            if type(value) is not annotation and not isinstance(value, allowed):
                raise UsageError(f"{what} must be {text(annotation)}, got {type(value).__name__}")
    else:
        # It is imported at its first use: to load it takes a fifth of the time that the rest of the package takes.
        import typeguard

        def check(value: Any, what: str) -> None:
            try:
                typeguard.check_type(
                    value, annotation, collection_check_strategy=typeguard.CollectionCheckStrategy.ALL_ITEMS
                )
            except typeguard.TypeCheckError as error:
                raise UsageError(f"{what} must be {text(annotation)}: {error}") from None

    return check


def dataclasses_in(annotations: typing.Iterable[Any]) -> dict[str, Expected]:
    """The dataclasses that these annotations name, also in the fields of other dataclasses; by qualified name.

    Raises UsageError if two of them have the same qualified name, because messages carry only that.
    """
    found: dict[str, Expected] = {}
    # A TypedDict may name itself, and it has no entry in `found` that would end the search.
    opened: list[Any] = []
    pending = list(annotations)
    while pending:
        annotation = pending.pop()
        pending += typing.get_args(annotation)
        if isinstance(annotation, typing.NewType):
            pending.append(annotation.__supertype__)
        elif typing.is_typeddict(annotation) and annotation not in opened:
            opened.append(annotation)
            pending += resolved(annotation, annotation.__qualname__).values()
        # A Box[int] is sent as a Box: messages carry the names of classes, and no arguments of them.
        annotation = typing.get_origin(annotation) or annotation
        if not (isinstance(annotation, type) and dataclasses.is_dataclass(annotation)):
            continue
        name = annotation.__qualname__
        if name not in found:
            fields = resolved(annotation, name)
            checks = {field.name: checker(fields[field.name]) for field in dataclasses.fields(annotation)}
            found[name] = Expected(annotation, checks)
            pending += fields.values()
        elif found[name].type is not annotation:
            raise UsageError(f"two dataclasses called {name} in one signature: one of them needs another name")
    return found


def text(annotation: Any) -> str:
    """The annotation as text without module names, which may differ between a service and its stub."""
    if annotation is inspect.Parameter.empty:
        return ""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    # Two ways to write the same type are one text: Optional[int] is int | None, and List[int] is list[int] below.
    if origin in (typing.Union, types.UnionType):
        return " | ".join("None" if arg is type(None) else text(arg) for arg in args)
    if isinstance(origin, type) and args and all(isinstance(arg, type) or typing.get_origin(arg) for arg in args):
        return f"{origin.__qualname__}[{', '.join(map(text, args))}]"
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", inspect.formatannotation(annotation))


def is_stream(annotation: Any) -> bool:
    """Whether a function with this return annotation is an async generator, or declares one in a Protocol."""
    return typing.get_origin(annotation) in _STREAMS


def items(annotation: Any) -> Any:
    """The annotation of the items of an async generator with this return annotation."""
    return next(iter(typing.get_args(annotation)), inspect.Parameter.empty)
