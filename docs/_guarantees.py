"""Puts the docstrings that `asyncoll.algorithms.guarantees` completes into the site, which is made from the source."""

from importlib import import_module
from operator import attrgetter

import griffe


class Guarantees(griffe.Extension):
    def on_function(self, *, func: griffe.Function, **kwargs) -> None:
        if any("guarantees" in str(decorator.value) for decorator in func.decorators):
            complete = attrgetter(func.path.removeprefix(f"{func.module.path}."))(import_module(func.module.path))
            func.docstring.value = complete.__doc__
