"""Where the lock of a control block, and the flags of its doorbells, lie, and how an owner signs the lock.

The compiled core is generated from this module (`hatch_build.py`), which imports nothing but the standard library.
"""

from __future__ import annotations

# Of the mutex. The pthread_mutex_t has 40 bytes, or 48 on ARM. Behind it is the cell that its holder signs:
# `memory.mutex` says what else it may contain.
MUTEX_BYTES = 64
HOLDER_OFFSET = 56
UNSIGNED = 0  # in that cell: the lock is free, or its holder has just taken it or is about to release it


def signed_by(local_rank: int) -> int:
    """What that cell contains while `local_rank` holds the lock."""
    return local_rank + 1


# The first cells of a control block are its own: a count, then one flag for each doorbell of the host. The count makes
# `wake` cheap in the frequent case that no rank sleeps.
FLAGGED = 0  # the number of flags that are set
FLAGS = 1  # 1 if the doorbell must ring at the next `wake`
