"""The file in which a rank under torchrun says why it has failed, as `record` of torch.distributed.elastic writes it.

torchrun shows what is there. The failure with the earliest time is the root cause to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback

from asyncoll.errors import describe, reported_failure

_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_NOTICE_S = 2  # torchrun notices within a second that a process was killed, and counts whole seconds
_path = ""


def write(error: Exception) -> None:
    """Write why this rank has failed, if torchrun has named a file for it.

    A failure that another rank has caused gets a later time than the one of that rank, and no traceback: the message
    names the rank, which may have been on another host, of which torchrun knows nothing here.

    From now on the variable that names the file is not set. A `record` around this would write that any failure is the
    first.
    """
    global _path
    _path = os.environ.pop(_VARIABLE, _path)
    if not _path:
        return
    now_s = int(time.time())  # noqa: TID251 (torchrun compares wall clocks)
    cause = reported_failure(error)
    if cause is None or str(cause.rank) == os.environ.get("RANK"):
        shown = {"timestamp": str(now_s), "py_callstack": "".join(traceback.format_exception(error))}
    else:
        shown = {"timestamp": str(now_s + _NOTICE_S)}
    with contextlib.suppress(OSError), open(_path, "w") as file:
        json.dump({"message": {"message": describe(cause or error), "extraInfo": shown}}, file)
