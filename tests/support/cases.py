"""Many cases in one test, and the sizes of worlds."""

from __future__ import annotations

import contextlib
import functools
import inspect

import pytest

SIZES = [*range(1, 10), 13, 17]  # numbers of ranks: bugs hide behind powers of two


@contextlib.contextmanager
def case(**values):
    """Names the values in the report of a failure inside the block. The block is one case of a test with many."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {', '.join(f'{name}={value!r}' for name, value in values.items())}")
        raise


def looped(names, values):
    """As `pytest.mark.parametrize`, but one item runs all values one after another; the report names the failing one.

    The leak check and the fixtures cost more than a short test. A fixture has one value for all cases of an item;
    only `monkeypatch` is a new one, undone, for each.
    """
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    values = list(values)

    def decorate(test):
        @functools.wraps(test)
        def run_all(**arguments):
            for value in values:
                chosen = dict(zip(names, value if len(names) > 1 else [value], strict=True))
                with case(**chosen), pytest.MonkeyPatch.context() as patch:
                    own = {"monkeypatch": patch} if "monkeypatch" in arguments else {}
                    test(**{**arguments, **chosen, **own})

        signature = inspect.signature(test)
        left = [each for name, each in signature.parameters.items() if name not in names]
        assert len(left) == len(signature.parameters) - len(names), f"{names} are not all parameters of {test}"
        run_all.__signature__ = signature.replace(parameters=left)
        return run_all

    return decorate
