/* What the files of the compiled core share. Each primitive family has a file of its own:
 *
 *   control_block.c   the lock of a control block, and the doorbells of its sleepers
 *   meetings.c        short meetings of all ranks of a communicator; private_meetings.c has those of private arrays
 *   peers.c           reductions of arrays in the memory of other processes
 *   short_calls.c     whole calls of one short meeting, as awaitables
 *   pieces.c          reductions of long arrays, piece by piece
 *   rounds.c          wait-avoiding rounds; rounds.h says what round_record.c, running_rounds.c and whole_calls.c have
 *   awaitables.c      what the callers of whole calls await
 *   reductions.c      elementwise reductions of several arrays
 *   sparse.c          passes of the sparse allreduces over long vectors
 *   trace.c           events of calls, for a record of them
 *   points.c          named moments inside all of them, for fault tests
 *   native.c          the module
 *
 * The cells in shared memory, and the arithmetic on them, are declared in Python. `hatch_build.py` writes declared.h from
 * them, in which a constant or a function has the same name as in Python.
 */
#ifndef ASYNCOLL_NATIVE_H
#define ASYNCOLL_NATIVE_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

static inline int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* The end of `tp_dealloc`: an instance of a heap type has a reference to it. */
static inline void free_object(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

#include <declared.h>

/* -- native.c --------------------------------------------------------------------------------- */

/* Call `callable`, which is written in Python, with `argument` unless that is NULL, until it has ended: a signal handler may
 * raise in it. Returns 0, or -1 with the newest exception of a handler. */
int call_to_its_end(PyObject *callable, PyObject *argument);

/* -- points.c --------------------------------------------------------------------------------- */

/* The injection points: the steps of all primitives, in the order in which one passes them. `points.c` has their names,
 * and asyncoll/testing/faults/core_points.py says which operation passes which. */
enum Point {
    LOCK_TAKEN,      /* the mutex is acquired, and the holder has not signed yet */
    LOCK_NOTED,      /* the critical section begins */
    LOCK_RELEASED,   /* before the chosen doorbells ring */
    DOORBELL_CHOSEN, /* under the lock: its flag is taken back */
    DOORBELL_RUNG,
    FUTEX_WOKEN,
    MEETING_COPIED,    /* the array is in the memory for short arrays */
    MEETING_OPENED,    /* under the lock, as all up to `meeting-arrived`: the signature is published, or compared */
    MEETING_ARRIVED,   /* the rank is counted */
    MEETING_CLAIMED,   /* all have arrived, and this rank will reduce */
    MEETING_REDUCED,   /* copies are reduced */
    MEETING_SHOWN,     /* a chunk of arrays that are shown where they are is reduced, into all of them */
    MEETING_COUNTED,   /* under the lock: the chunk is counted */
    MEETING_PUBLISHED, /* under the lock */
    MEETING_NOT_WOKEN, /* the lock is released, and sleepers in a futex are not woken yet */
    MEETING_ASLEEP,    /* counted as a sleeper, and not asleep yet */
    MEETING_RECEIVED,  /* the result is copied, and the rank has not left */
    MEETING_LEFT,      /* under the lock */
    PIECE_COPIED_IN,
    PIECE_REDUCED, /* a strip of it, which is in the slot, and in the array if the rank wants it */
    PIECE_COPIED_OUT,
    PIECE_COUNTED, /* under the lock: the step is counted */
    PIECE_AWAITED, /* the condition of the next step seems to be met */
    PEER_READ,     /* a block of another rank's private array is in the cache */
    PEERS_REDUCED, /* such a block is reduced, into this rank's array */
    PEER_TAKEN,    /* a chunk of the result is copied from the rank that has reduced it */
    ROUND_FILLED,  /* under the lock, as all of a short round: the contribution is in a new block */
    ROUND_STAGED,
    ROUND_ARRIVED,
    ROUND_OPENED,
    ROUND_TAKEN,   /* from the ranks of one group */
    ROUND_REDUCED, /* short contributions to that group */
    ROUND_GRANTED,
    ROUND_PUBLISHED,
    ROUND_LEFT,
    ROUND_COPIED,  /* the result is in the caller's arrays */
    ROUND_CLAIMED, /* under the lock: a chunk of a long round */
    ROUND_HELPED,  /* it is reduced */
    ROUND_COUNTED, /* under the lock */
    REDUCTION_DONE,
    POINTS
};

extern int points_are_watched;
void point_passed(enum Point point);

/* Tell the watcher, if there is one, that this thread passes `point`. With the GIL or without it. */
static inline void pass_point(enum Point point)
{
    if (__builtin_expect(__atomic_load_n(&points_are_watched, __ATOMIC_RELAXED), 0))
        point_passed(point);
}

/* `native.watch` and `native.points`. */
PyObject *watch_in_python(PyObject *module, PyObject *callable);
PyObject *points_in_python(void);

/* -- trace.c ---------------------------------------------------------------------------------- */

/* Where the events of an object's calls go. Both are NULL while nothing is traced. */
typedef struct {
    PyObject *append; /* of the sink */
    PyObject *make;   /* make(what, at_s, about): the event */
} Tracing;

/* Tell that `what` (declared.h) has happened at `at_s`, in seconds of CLOCK_MONOTONIC. The caller has found a sink, and
 * holds the GIL. A ring runs no bytecode: Python makes the event when it is taken out. */
void trace_event(const Tracing *trace, int what, double at_s, PyObject *about);

void trace_forget(Tracing *trace);

/* `trace(append, make)`, a method: from now on events go there; None: nowhere. */
PyObject *trace_switch(Tracing *trace, PyObject *arguments);

/* -- control_block.c ------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    Py_buffer memory; /* the mutex, the control block's own cells, the cells of its user */
    pthread_mutex_t *mutex;
    volatile int64_t *holder; /* signed by the holder, UNSIGNED without one; negative if the lock is lost for ever */
    int64_t *flags;           /* FLAGGED, then a flag for each doorbell */
    int64_t *cells;           /* those of the user */
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

/* What an arrival at a meeting has told: `Meetings.arrive` of native.pyi. LAST, which stays in meetings.c: all have
 * arrived, and this rank is to reduce. */
enum { WAITING, NOT_FREE, OVER, LAST };

/* The short meetings of one communicator at one rank. The caller of all functions holds the GIL. */
typedef struct Meetings Meetings;

/* What all meetings of one kind of call have in common. */
typedef struct {
    int64_t fingerprint;
    int64_t divisor;
    int64_t done; /* bytes of the result; 1 for a barrier */
    int kernel;   /* 0 for a barrier; no other meeting is without one */
} Meeting;

/* Whether `object` is a Meetings of this module. */
bool is_meetings(PyObject *object);

/* The number of calls that may be under way; call `number` uses the record of call `number - meetings_calls()`. */
int64_t meetings_calls(const Meetings *self);

/* An array of so many bytes is shown where it is, if it is registered. */
int64_t meetings_shown_min(const Meetings *self);

/* Longer arrays are not copied. */
int64_t meetings_short_bytes(const Meetings *self);

/* Whether all ranks have found that they can read the private memory of all others. */
bool meetings_can_read(const Meetings *self);

/* Whether this rank has allocated its memory for short arrays. */
bool meetings_has_short_arrays(const Meetings *self);

/* Whether the record of call `number` is free: 1, 0, or -1 with an exception. */
int meetings_is_free(Meetings *self, int64_t number);

/* Arrive at meeting `number`, whose record is free, with `bytes` (of length 0 for a barrier), which are shown at
 * `address` unless that is 0. Returns WAITING, LAST or OVER, or -1 with an exception. */
int meetings_arrive(Meetings *self, int64_t number, const Meeting *meeting, int64_t address, const Py_buffer *bytes,
                    bool is_clear);

/* Copy the result into `bytes`, and leave: 1. Without a result: 0. -1 with an exception. */
int meetings_complete(Meetings *self, int64_t number, int64_t done, const Py_buffer *bytes, bool is_clear);

/* Block for a short time until there seems to be a result, and reduce meanwhile what all ranks show: 1, 0, or -1 with an
 * exception. */
int meetings_look(Meetings *self, int64_t number, const Meeting *meeting, int64_t polls, int64_t sleep_ns);

/* -- short_calls.c --------------------------------------------------------------------------- */

extern PyType_Spec short_calls_spec;
extern PyType_Spec short_call_spec;

/* -- rounds.c --------------------------------------------------------------------------------- */

extern PyType_Spec rounds_spec;

/* -- awaitables.c ----------------------------------------------------------------------------- */

extern PyType_Spec awaitable_spec; /* the base of the other two */
extern PyType_Spec answer_spec;

/* The states of an awaitable. */
enum {
    BEGUN,   /* its caller, or the runtime, is to go on */
    ENDED,   /* its caller has not got the result yet */
    RESTING, /* its caller drives the coroutine `rest` */
    AWAITED, /* its caller has the result or an exception, or has closed it */
};

typedef struct Awaitable Awaitable;

/* What differs between the kinds. Functions return 0, or -1 with an exception set. */
typedef struct {
    int (*resume)(Awaitable *); /* the first step of a call that is BEGUN: it is ENDED then, or RESTING */
    int (*unused)(Awaitable *); /* the result has no receiver; or NULL */
    void (*left)(Awaitable *);  /* the call is over for its caller, which may use its array again; or NULL */
} AwaitableKind;

struct Awaitable {
    PyObject_HEAD
    const AwaitableKind *kind;
    PyObject *result; /* of a call; NULL once it is handed over */
    PyObject *rest;
    int state;
    bool turns; /* the caller's loop turns once before it has the result */
};

/* The slot Py_am_send of all kinds: Python 3.11 inherits the other slots, and not this one. Without it each result would be
 * the value of a StopIteration. */
PySendResult awaitable_send(PyObject *object, PyObject *value, PyObject **result);

/* A coroutine, of `type`, that returns `result`, which tells of `rounds` rounds up to `number`. If it has no receiver, it
 * adds these to `owed`. If it `turns`, the loop turns once before. Returns NULL with an exception set. */
PyObject *make_answer(PyObject *type, PyObject *result, PyObject *owed, int64_t rounds, int64_t number, bool turns);

/* -- reductions.c ----------------------------------------------------------------------------- */

/* into = arrays[0] op arrays[1] op ... in this order, then divided by `divisor` (floats only; 1 unless `op` is an
 * average). There is at least one array. The first may be `into`; otherwise `into` overlaps none. Needs no GIL. */
typedef void (*Kernel)(void *into, void *const *arrays, int count, size_t elements, int64_t divisor);

/* Reduce `count` arrays of `bytes` bytes, in their order, into all of them: a block of the result is copied to the other
 * arrays while it is in the L1 cache. `element` is the size of an element. Afterwards `arrays` point to the ends. */
void reduce_to_all(Kernel kernel, size_t element, void **arrays, int count, size_t bytes, int64_t divisor);

/* To read more bytes than this, the GIL is released: they take about ten microseconds. */
enum { LONG_BYTES = 1 << 16 };

/* The kernel that Python knows by this number, from `native.find_kernel`, or NULL; and the bytes of its elements. */
Kernel kernel_at(int number);
size_t kernel_element_size(int number);

/* `native.find_kernel`, `native.reduce` and `native.reduce_to_all`. */
PyObject *find_kernel_in_python(PyObject *module, PyObject *arguments);
PyObject *reduce_in_python(PyObject *module, PyObject *arguments);
PyObject *reduce_to_all_in_python(PyObject *module, PyObject *arguments);

/* -- peers.c ---------------------------------------------------------------------------------- */

/* `native.read_memory` and `native.reduce_from_peers`. */
PyObject *read_memory(PyObject *module, PyObject *arguments);

/* An array at one rank, and where in it a job begins. */
typedef struct {
    int64_t pid;
    int64_t address;
} Place;

/* The reduction of a part of all arrays, in the order of ranks, into that of one of them. */
typedef struct {
    Kernel kernel;
    size_t element;
    int64_t divisor;
    Place *places;   /* by rank; that of this rank is not used */
    void **operands; /* by rank */
    int size, rank;
    char *own;     /* the bytes to reduce, in this rank's array */
    size_t bytes;  /* of them */
    char *scratch; /* `block` bytes for each of the other ranks */
    size_t block;
} PeerJob;

/* Carry it out. Needs no GIL. Returns 0 or an error number: a rank has ended, or has returned its array. */
int reduce_peers(const PeerJob *job);

/* Copy `bytes` bytes of another process. Needs no GIL. Returns 0 or an error number. */
int copy_from_peer(Place from, char *into, size_t bytes);

PyObject *reduce_from_peers(PyObject *module, PyObject *arguments);

/* -- sparse.c --------------------------------------------------------------------------------- */

/* To look at more elements than this, the GIL is released. */
enum { LONG_ELEMENTS = 4096 };

/* Whether the elements are signed integers of 4 or 8 bytes, or floats of 4 or 8. An array of another dtype may have the
 * same width, and its bits would be taken for numbers that it does not have. */
bool has_integers(const Py_buffer *view);
bool has_floats(const Py_buffer *view);
size_t elements_of(const Py_buffer *view);

/* Get the buffers of `count` arrays, the first `readable` of them to read and the others to write. Returns whether all are
 * held; otherwise none is, and an exception is set. */
bool hold_views(PyObject **objects, Py_buffer *views, int count, int readable);
void release_views(Py_buffer *views, int count);

/* `native.sum_parts` and `native.common`. */
PyObject *sum_parts_in_python(PyObject *module, PyObject *arguments);
PyObject *common_in_python(PyObject *module, PyObject *arguments);

/* -- selection.c ------------------------------------------------------------------------------ */

/* `native.select`, `native.keep_largest` and `native.count_magnitudes`. */
PyObject *select_in_python(PyObject *module, PyObject *arguments);
PyObject *keep_largest_in_python(PyObject *module, PyObject *arguments);
PyObject *count_magnitudes_in_python(PyObject *module, PyObject *arguments);

/* -- pieces.c --------------------------------------------------------------------------------- */

extern PyType_Spec pieces_spec;

#endif
