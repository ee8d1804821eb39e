"""The injection points of the record of rounds in Python: every step of the interpreter that changes it."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from asyncoll.algorithms.rounds import block_table, round_record
from asyncoll.testing.faults.injection_points import CountedPoints

RECORD = "record"  # the name of all of them
_FILES = {round_record.__file__, block_table.__file__}


class RecordPoint(CountedPoints):
    """Counts the steps in the thread that enters the block, which is that of all calls but very long ones."""

    def _watch(self) -> None:
        self._undo.callback(sys.settrace, sys.gettrace())
        sys._getframe().f_trace_opcodes = True  # Python 3.12 tells of opcodes only if a frame has asked before
        sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in _FILES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self._pass()
        return self._trace
