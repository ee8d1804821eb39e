"""Objects of one rank in one process, which have no copy."""

from __future__ import annotations

from typing import NoReturn, Self, SupportsIndex

from asyncoll.errors import UsageError


class Uncopied:
    """A base of public objects that hold connections, locks or calls under way.

    Copying one deeply, or pickling it, is a UsageError. `copy.copy` gives the object itself.
    """

    __slots__ = ()

    def __copy__(self) -> Self:
        return self

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> NoReturn:
        """Refuse: `copy.deepcopy` and `pickle` ask here."""
        raise UsageError(
            f"{self._title()} cannot be copied or pickled: it belongs to one rank in one process. Keep it out of "
            "what is copied or saved: pass it to the methods of a Module as an argument, or leave it out in the "
            "`__getstate__` of the class that holds it; save a model or a training by its `state_dict()`"
        )

    def _title(self) -> str:
        """The object in errors, by what its user knows of it."""
        return type(self).__name__

    def _alias(self) -> Self:
        """Another object with the attributes of this one, for a method that hands out a variant."""
        alias = object.__new__(type(self))
        alias.__dict__.update(self.__dict__)
        return alias
