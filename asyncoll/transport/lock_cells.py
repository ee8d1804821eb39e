"""Where the lock of a control block, and the flags of its doorbells, lie.

The compiled core is generated from this module (`hatch_build.py`), which imports nothing but the standard library.
"""

from __future__ import annotations

# Of the mutex. The pthread_mutex_t has 40 bytes, or 48 on ARM. Behind it is a cell with the local rank of the last
# holder: `memory.mutex` says what else it may contain.
MUTEX_BYTES = 64
HOLDER_OFFSET = 56

# The first cells of a control block are its own: a count, then one flag for each doorbell of the host. The count makes
# `wake` cheap in the frequent case that no rank sleeps.
FLAGGED = 0  # the number of flags that are set
FLAGS = 1  # 1 if the doorbell must ring at the next `wake`
