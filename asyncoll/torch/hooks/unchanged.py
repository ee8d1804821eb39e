"""Whether the program changes parameters between the steps of the optimizer."""

from __future__ import annotations

from torch import nn

from asyncoll.errors import UsageError


class Unchanged:
    """Finds out whether parameters have changed since `note`. A change through `.data` counts no version."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._versions: list[int] | None = None

    def note(self) -> None:
        """The parameters have the right values now."""
        self._versions = self._count()

    def check(self) -> None:
        """Raise UsageError if parameters have changed since the last `note`, if there was one."""
        if self._versions is not None and self._versions != self._count():
            raise UsageError(
                "the program has changed parameters after the step of the optimizer, by clamp_() or load_state_dict() "
                "for example: other ranks would not, or the hook would overwrite it. Change the loss instead; with "
                "eager_sgd change parameters after a round that is synchronous, at all ranks"
            )

    def _count(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]
