/* What the files of the compiled core share. Each primitive family has a file of its own:
 *
 *   control_block.c   the lock of a control block, and the doorbells of its sleepers
 *   meetings.c        short meetings of all ranks of a communicator
 *   pieces.c          reductions of long arrays, piece by piece
 *   rounds.c          wait-avoiding rounds; rounds.h says what round_record.c and whole_calls.c have
 *   answers.c         the awaitable of a call that is over
 *   reductions.c      elementwise reductions of several arrays
 *   native.c          the module
 *
 * The layout of shared memory is declared in Python. The comments here name the declaration that they follow.
 */
#ifndef ASYNCOLL_NATIVE_H
#define ASYNCOLL_NATIVE_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

/* -- control_block.c ------------------------------------------------------------------------- */

/* asyncoll/transport/memory/mutex.py: the mutex, and the cell of its holder behind it. */
enum { MUTEX_BYTES = 64, HOLDER_OFFSET = 56 };

/* asyncoll/transport/control_block.py: the first cells of a control block are its own. */
enum { FLAGGED_CELL = 0, FLAGS_CELL = 1 };

typedef struct {
    PyObject_HEAD
    Py_buffer memory; /* the mutex, the control block's own cells, the cells of its user */
    pthread_mutex_t *mutex;
    int64_t *holder; /* local rank of the last holder; negative if the lock is lost for ever */
    int64_t *flags;  /* FLAGGED_CELL, then a flag for each doorbell */
    int64_t *cells;  /* those of the user */
    Py_ssize_t cell_count;
    int64_t local_rank;
    int doorbell_count;
    int *eventfds; /* by number of the doorbell */
    int *ringing;  /* doorbells to ring at the release; only the holder of the lock uses it */
    int ringing_count;
    PyObject *mutex_in_python;  /* RobustMutex on the same memory: it waits, and reports losses */
    PyObject *consistent_error; /* after an exception of this class in a critical section the cells are consistent */
    PyObject *substitute;       /* in a forked child: a mutex that refuses; otherwise NULL */
    PyObject *passing;          /* called before and after each acquisition, for fault tests; otherwise None or NULL */
    PyObject *view;             /* `cells` as Python sees it */
    char created;
    char interleaved; /* always false: the ranks are processes */
} ControlBlock;

extern PyType_Spec control_block_spec;

/* Acquire the lock. Returns 0, or -1 with an exception set. The caller holds the GIL, also afterwards. */
int control_block_lock(ControlBlock *self);

/* As `control_block_lock`, but returns 1 if other ranks hold the lock for longer than it takes to sleep. So no bytecode
 * runs unless the lock is lost, or a fault test looks on. */
int control_block_lock_soon(ControlBlock *self);

/* Release the lock, and ring the doorbells that `control_block_wake` has chosen. */
void control_block_unlock(ControlBlock *self);

/* Release the lock after an exception that may have left the cells half changed: it is lost for ever. Keeps the
 * exception that is set. Without effect if this thread does not hold the lock. */
void control_block_abandon(ControlBlock *self);

/* Choose at most `at_most` sleepers to wake at the release. The caller holds the lock. */
void control_block_wake(ControlBlock *self, int64_t at_most);

/* Wake all threads that sleep in a futex at the low half of `cell`. */
void control_block_wake_futex(const int64_t *cell);

/* Whether `object` is a ControlBlock of this module. */
bool is_control_block(PyObject *object);

/* -- meetings.c ------------------------------------------------------------------------------ */

extern PyType_Spec meetings_spec;

/* -- rounds.c --------------------------------------------------------------------------------- */

extern PyType_Spec rounds_spec;

/* -- answers.c ------------------------------------------------------------------------------- */

extern PyType_Spec answer_spec;

bool is_answer_type(PyObject *type);

/* A coroutine, of `type`, that returns `result`, which tells of `rounds` rounds up to `number`. If it has no receiver, it
 * adds these to `owed`. If it `turns`, the loop turns once before. Returns NULL with an exception set. */
PyObject *make_answer(PyObject *type, PyObject *result, PyObject *owed, int64_t rounds, int64_t number, bool turns);

/* -- reductions.c ----------------------------------------------------------------------------- */

/* into = arrays[0] op arrays[1] op ... in this order, then divided by `divisor` (floats only; 1 unless `op` is an
 * average). There is at least one array. The first may be `into`; otherwise `into` overlaps none. Needs no GIL. */
typedef void (*Kernel)(void *into, void *const *arrays, int count, size_t elements, int64_t divisor);

/* The kernel of the value of a ReduceOp and the name of a dtype (asyncoll/tensors/reductions.py), or NULL: there is
 * none, and the reduction is left to Python. */
Kernel find_kernel(const char *op, const char *dtype);

/* The kernel that Python knows by this number, from `native.find_kernel`, or NULL; and the bytes of its elements. */
Kernel kernel_at(int number);
size_t kernel_element_size(int number);

/* `native.find_kernel` and `native.reduce`. */
PyObject *find_kernel_in_python(PyObject *module, PyObject *arguments);
PyObject *reduce_in_python(PyObject *module, PyObject *arguments);

/* -- pieces.c --------------------------------------------------------------------------------- */

extern PyType_Spec pieces_spec;

#endif
