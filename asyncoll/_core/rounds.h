/* What the files of wait-avoiding rounds share:
 *
 *   round_record.c   the steps of a critical section, on the cells of an operation
 *   running_rounds.c a round that is open: taking contributions, reducing, publishing
 *   rounds.c         the type: a call up to its first wait
 *   whole_calls.c    a whole call, if it is over at once
 *
 * The cells are those that asyncoll/algorithms/rounds/round_cells.py declares. Other ranks write them. Numbers of blocks and rounds from there are
 * checked before they are used as indices.
 */
#ifndef ASYNCOLL_ROUNDS_H
#define ASYNCOLL_ROUNDS_H

#include "native.h"

#include <string.h>
#include <time.h>

static const int64_t ROUNDS_MAX = INT64_C(1) << 62; /* no operation comes so far */

typedef struct {
    int64_t offset, length, elements;
    Kernel kernel;
} Part; /* of a contribution: one flat array */

/* What `at_once` needs of Python. */
enum {
    ANSWER,        /* the type of awaitables.c */
    REDUCTION,     /* the class `Reduction` (asyncoll/algorithms/rounds/reduction.py) */
    FIELDS,        /* its slots, in the order of its fields, as a tuple */
    EVERYONE,      /* all ranks, as a tuple */
    OWED,          /* `Engine.owed` (asyncoll/algorithms/rounds/engine.py) */
    ORDER_NUMBERS, /* the attributes of a `CallOrder` (asyncoll/algorithms/rounds/call_order.py) */
    ORDER_NOW,
    ORDER_OVER,
    ORDER_WAITING,
    ATTACHED,
};

typedef struct {
    PyObject_HEAD
    ControlBlock *block;
    Py_buffer *segments; /* the memory of each rank of the host, by local rank, all of one size: `HostArena.segments` */
    int64_t segment_count;
    int64_t size, rank, history, limit, nbytes, sync_every, sync_offset;
    int64_t ranks;   /* of the rule of an operation (operation.py): so many have to have arrived, or be gone, */
    int drawn;       /* and one that is drawn among them */
    int64_t cores;   /* for the ranks of the host, at most one each */
    int is_long;     /* chunks are reduced without the lock */
    int keeps;       /* contributions stay, and replace each other */
    bool has_plans;  /* a round needs `plan`, which Python computes */
    int64_t planned; /* the round of `is_drawn`, `group_of` and `group_count` */
    int64_t group_count;
    int64_t *group_of; /* by rank */
    char *is_drawn;    /* by rank */
    void **sources;    /* room for `size` addresses */
    Part *parts;
    Py_ssize_t part_count;
    /* first cells: */
    int64_t *head, *rows, *results, *begun, *counts, *table, *stack, *addresses, *keepers, *weights, *bitmaps;
    int64_t words; /* of a bitmap */
    Tracing trace;
    PyObject *attached[ATTACHED]; /* for `at_once`; NULL until `attach` */
    Py_buffer engine;             /* `Engine.cells` */
    int64_t divisor;              /* of a result; 0: by the number of contributors */
    int64_t calls_in_row;         /* that were over at once, since the caller's loop has turned */
    int64_t calls_per_turn;
} Rounds;

typedef struct {
    int64_t number; /* the round that the call waits for; 0 if it is late, and waits for none */
    int64_t came_ns;
    int64_t ticket;
    int64_t now_ns;
    int64_t first_missed, last_missed; /* rounds whose results are kept for the call; none if first > last */
    int64_t kept[KEPT_CELLS];          /* the result of the call; of number 0 as long as there is none */
} Call;

static inline int64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Sum and difference of cells. They wrap around, because a peer may have written any numbers. */
static inline int64_t plus(int64_t a, int64_t b)
{
    return (int64_t)((uint64_t)a + (uint64_t)b);
}

static inline int64_t minus(int64_t a, int64_t b)
{
    return (int64_t)((uint64_t)a - (uint64_t)b);
}

static inline int64_t *row_of(const Rounds *self, int64_t rank)
{
    return self->rows + rank * ROW_CELLS;
}

static inline bool is_gone(const Rounds *self, int64_t rank)
{
    return self->block->cells[rank] > 0;
}

static inline bool is_block(const Rounds *self, int64_t block)
{
    return block > NONE && block <= self->limit;
}

static inline int64_t free_count(const Rounds *self)
{
    return self->table[FREE];
}

static inline double weight_at(const int64_t *cell)
{
    double weight;
    memcpy(&weight, cell, sizeof weight);
    return weight;
}

static inline bool waits_for_all(const Rounds *self, int64_t number)
{
    return is_synchronous(number, self->sync_every, self->sync_offset);
}

static inline int64_t *results_of(const Rounds *self, int64_t number)
{
    return self->results + (int64_t)((uint64_t)number % (uint64_t)kept_rounds(self->history)) * self->size * KEPT_CELLS;
}

/* Store a cell that decides where contributions are (unpublished.py). The process may be killed just before or after it:
 * the compiler lets what precedes it here precede it in memory, and what follows it follow. */
static inline void commit(int64_t *cell, int64_t value)
{
    __atomic_store_n(cell, value, __ATOMIC_RELEASE);
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

/* When round `number` has begun, in nanoseconds. */
static inline int64_t *beginning_of(const Rounds *self, int64_t number)
{
    return self->begun + (uint64_t)number % BEGINNINGS;
}

/* Release the lock. Without an answer there is an exception, which may have left a round half open. */
static inline void leave_lock(Rounds *self, PyObject *answer)
{
    if (answer)
        control_block_unlock(self->block);
    else
        control_block_abandon(self->block);
}

/* -- round_record.c: under the lock ----------------------------------------------------------- */

/* Sets an exception, and returns -1. */
int rounds_corrupt(const char *what, int64_t value);

/* The memory of `block`, or the `bytes` bytes at an address of the arena; NULL if there is no such memory. */
char *rounds_find_memory(const Rounds *self, int64_t block);
char *rounds_memory_at(const Rounds *self, int64_t address, int64_t bytes);

/* A free block, with the caller as its one keeper; -1 with an exception if the cells are corrupt. There is one. */
int64_t rounds_take_block(Rounds *self);

void rounds_keep_block(Rounds *self, int64_t block);
void rounds_drop_block(Rounds *self, int64_t block);

bool rounds_may_open(const Rounds *self, int64_t number);
bool rounds_late_call_opens(const Rounds *self, int64_t number);
void rounds_count_late(Rounds *self, int64_t aim, int64_t now_ns);

/* Decide whether the call waits for a round, and keep the results that it has missed: `OneSidedRounds._begin`. */
void rounds_begin_call(Rounds *self, Call *call, int64_t aim);

/* Copy the block at `memory` into the arrays `flats`. Needs no lock. */
void rounds_copy_out(const Rounds *self, const char *memory, const Py_buffer *flats);

/* `RoundRecord.put`. Adds the weight of the staged contribution to `weight`, except where contributions stay. */
void rounds_put(Rounds *self, Call *call, int64_t block, int64_t address, double weight);

/* `OneSidedRounds._come`: open the round of the call if this rank may, and note its result if there is one. Returns 0, or -1
 * with an exception set. */
int rounds_come(Rounds *self, Call *call, int64_t aim);

/* The ranks whose contributions are in `block`, in order; NULL with an exception set. */
PyObject *rounds_contributors_of(const Rounds *self, int64_t block, int64_t active);

/* -- running_rounds.c -------------------------------------------------------------------------- */

/* Under the lock: open a round, for which there are enough free blocks; one of short contributions is published, too.
 * Returns 0, or -1 with an exception set. */
int rounds_start(Rounds *self, int64_t number, int64_t now_ns);

/* With the lock, which is released while a chunk is reduced: reduce chunks of the running round, as long as there are any,
 * and publish the round with the last one. Returns 0; or -1 with an exception set, and without the lock. */
int rounds_help(Rounds *self);

/* Whether the running round has a chunk that no rank has claimed. A hint without the lock. */
bool rounds_wants_help(const Rounds *self);

/* With the lock, which is released meanwhile if contributions are long: fill a new block with the sum of `flats` and the
 * staged contribution; in groups, with `flats` alone. Returns the block; or -1 with an exception set, and without the
 * lock. */
int64_t rounds_fill_block(Rounds *self, const Py_buffer *flats);

/* -- whole_calls.c ---------------------------------------------------------------------------- */

/* Methods of the type. */
PyObject *rounds_attach(PyObject *object, PyObject *arguments);
PyObject *rounds_at_once(PyObject *object, PyObject *array);

#endif
