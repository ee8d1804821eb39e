"""Completes the docstrings of the reference, which griffe reads in the source."""

from importlib import import_module
from operator import attrgetter

import griffe


class Docstrings(griffe.Extension):
    def on_function(self, *, func: griffe.Function, **kwargs) -> None:
        if any("guarantees" in str(decorator.value) for decorator in func.decorators):
            complete = attrgetter(func.path.removeprefix(f"{func.module.path}."))(import_module(func.module.path))
            func.docstring.value = complete.__doc__
        if func.name == "__init__" and func.docstring and not func.docstring.value:
            func.docstring = None  # a second table of parameters, by unpack_typeddict, without their descriptions
