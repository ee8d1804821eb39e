/* What the files of short meetings share:
 *
 *   meetings.c           the type, and meetings with arrays in shared memory
 *   private_meetings.c   meetings with arrays in the private memory of the ranks
 *
 * The cells are those that asyncoll/algorithms/dense/meeting_cells.py declares. Other ranks write them.
 */
#ifndef ASYNCOLL_MEETINGS_H
#define ASYNCOLL_MEETINGS_H

#include "native.h"

#include <time.h>

/* How long a rank sleeps without its loop while others reduce the last chunks: these take less time than a wake-up. */
enum { WORK_NS = 5000000 };

/* The memory that a rank showed last, which it often shows again. */
typedef struct {
    int64_t address, bytes;
    PyObject *memory; /* or NULL */
} Known;

/* What this rank knows of its own meeting with private arrays. Not in shared memory: it says where this rank writes. */
typedef struct {
    int64_t tag; /* of the meeting; 0: none */
    char *own;   /* the array, which the call holds until it is over */
    int64_t bytes;
    int64_t taken; /* a bit for each chunk that this rank has copied from the rank that has reduced it */
    bool has_left;
} PrivateCall;

struct Meetings {
    PyObject_HEAD
    ControlBlock *block;
    PyObject *view;             /* view(address, nbytes): the memory of any rank */
    PyObject *differs;          /* the class of the error for a rank that has made another call */
    Py_buffer *areas;           /* by rank: its short arrays, once they have been asked for */
    void **arrays;              /* by rank, while this rank reduces with the GIL; the GIL guards it */
    Known *known;               /* by rank */
    PrivateCall *private_calls; /* by record */
    char *scratch;              /* of `private_reduce`, while no thread uses it; or NULL */
    int64_t size, rank, calls, short_bytes, shown_min, chunk_max, cores;
    int64_t stride;     /* cells of a record */
    int64_t addresses;  /* first of `size` cells: the address of each rank's short arrays */
    int64_t newest;     /* first of `size` cells: each rank's newest call */
    int64_t peers;      /* first of PEER_CELLS cells for each rank */
    int64_t known_free; /* the tag of a meeting whose record is known to be free */
};

/* What a rank that has arrived finds at its meeting. */
typedef enum {
    NOTHING, /* other ranks are missing, or reduce, or read */
    REDUCE,  /* there are chunks to claim */
    TAKE,    /* of private arrays: other ranks have reduced chunks */
    LEAVE,   /* of private arrays: this rank has all chunks */
    RESULT,
    NO_USE, /* the arrays are reduced in another way: `SharedCall.finish_shortly` */
} Step;

typedef struct {
    int64_t *cells; /* of the record */
    int64_t tag;
    int64_t turn;
} Record;

/* The part of `rank` in a record. */
static inline int64_t *part_of(Record record, int64_t rank)
{
    return record.cells + RECORD_HEAD + PART_CELLS * rank;
}

/* A cell without the lock: a hint only. */
static inline int64_t peek(const int64_t *cell)
{
    return __atomic_load_n(cell, __ATOMIC_RELAXED);
}

/* Whether a chunk begins at byte `claimed` of `total`. A broken peer may have written anything there. */
static inline bool is_chunk_left(int64_t claimed, int64_t total)
{
    return claimed >= 0 && claimed < total && claimed % ALIGNED == 0;
}

static inline int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* -- meetings.c ----------------------------------------------------------------------------------- */

/* Release the lock. `is_over`: what others wait for has happened, so wake those that sleep, also in the futex at `cell`. */
void release_and_wake(Meetings *self, Record record, int cell, bool is_over);

/* -- private_meetings.c; the caller holds the GIL ------------------------------------------------- */

/* This rank has arrived with `bytes`, which are private. */
void private_begin(Meetings *self, Record record, const Py_buffer *bytes);

/* Whether this rank has arrived at this meeting with a private array. */
static inline bool is_private(const Meetings *self, Record record)
{
    return self->private_calls[record.turn].tag == record.tag;
}

/* Claim and reduce chunks until all are claimed, or until one cannot be read, which is left to Python. Returns 0, or -1
 * with an exception. */
int private_reduce(Meetings *self, Record record, int kernel, int64_t divisor);

/* What this rank can do, as a hint without the lock. After LEAVE, `private_complete` says whether the call is over. */
Step private_step(const Meetings *self, Record record, const PrivateCall *call);

/* Do it: REDUCE, TAKE or LEAVE. Returns 0, or -1 with an exception. */
int private_perform(Meetings *self, Record record, const Meeting *meeting, Step step);

/* Whether the array has the result and no rank reads it any more: then the call is over. */
int private_complete(Meetings *self, Record record);

#endif
