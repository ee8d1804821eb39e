/* Wait-avoiding rounds of short contributions: all of a call up to its first wait, as one critical section.
 *
 * The counterpart of `OneSidedRounds.begin` (asyncoll/algorithms/rounds/in_memory.py), on the cells that `RoundRecord`
 * (asyncoll/algorithms/rounds/round_record.py) and `BlockTable` (asyncoll/algorithms/rounds/block_table.py) declare. The
 * rank that opens a round reduces and publishes it before it releases the lock. So no rank ever sees a running round.
 *
 * Other ranks write the cells. Numbers of blocks from there are checked before they are used as indices.
 */
#include "native.h"

#include <string.h>
#include <time.h>

/* round_record.py: Head, Row and Kept, in this order, and _BEGINNINGS. */
enum { LATEST, RUNNING, CLAIMED, DONE, CHUNKS, HEAD_CELLS };
enum {
    STAGED,
    STAGED_AT,
    TICKET,
    WEIGHT,
    SOURCE,
    SOURCE_AT,
    ROUND,
    BLOCK,
    ACTIVE,
    ABSENT,
    TAKEN,
    HERE,
    WAITS_FOR,
    GRANTED,
    GRANTED_BLOCK,
    GRANTED_ACTIVE,
    GRANTED_ABSENT,
    GRANTED_TAKEN,
    WAITED_NS,
    LATE_NS,
    ROW_CELLS
};
enum { KEPT_NUMBER, KEPT_BLOCK, KEPT_ACTIVE, KEPT_ABSENT, KEPT_TAKEN, KEPT_CELLS };
enum { BEGINNINGS = 64 };

static const int64_t ROUNDS_MAX = INT64_C(1) << 62; /* no operation comes so far */

/* block_table.py: _FREE, _MADE and _HEAD, _BITS, NONE. */
enum { FREE, MADE, TABLE_HEAD };
enum { BITS = 63 };
enum { NONE = 0 };

/* operation.py: Opening, in this order. */
enum { SOLO, MAJORITY, QUORUM };

typedef struct {
    int64_t offset, length, elements;
    Kernel kernel;
} Part; /* of a contribution: one flat array */

typedef struct {
    PyObject_HEAD
    ControlBlock *block;
    Py_buffer *segments; /* the memory of each rank of the host, by local rank, all of one size: `HostArena.segments` */
    int64_t segment_count;
    int64_t size, rank, history, limit, nbytes, opening, quorum, sync_every;
    bool keeps;      /* contributions stay, and replace each other */
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
    /* for `at_once`; NULL until `attach`: */
    PyObject *answer;     /* the type of answers.c */
    PyObject *reduction;  /* the class `Reduction` (asyncoll/algorithms/rounds/reduction.py) */
    PyObject *fields;     /* its slots, in the order of its fields, as a tuple */
    PyObject *everyone;   /* all ranks, as a tuple */
    PyObject *turns[4];   /* `CallOrder` (asyncoll/algorithms/rounds/call_order.py): numbers, now, over, waiting */
    PyObject *end_turn;   /* its method */
    PyObject *owed;       /* `Engine.owed` (asyncoll/algorithms/rounds/engine.py) */
    Py_buffer engine;     /* `Engine.cells` */
    int64_t divisor;      /* of a result; 0: by the number of contributors */
    int64_t calls_in_row; /* that were over at once, since the caller's loop has turned */
} Rounds;

typedef struct {
    int64_t number; /* the round that the call waits for; 0 if it is late, and waits for none */
    int64_t came_ns;
    int64_t ticket;
    int64_t now_ns;
    int64_t first_missed, last_missed; /* rounds whose results are kept for the call; none if first > last */
    int64_t kept[KEPT_CELLS];          /* the result of the call; of number 0 as long as there is none */
} Call;

static int64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Sum and difference of cells. They wrap around, because a peer may have written any numbers. */
static int64_t plus(int64_t a, int64_t b)
{
    return (int64_t)((uint64_t)a + (uint64_t)b);
}

static int64_t minus(int64_t a, int64_t b)
{
    return (int64_t)((uint64_t)a - (uint64_t)b);
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int64_t *row_of(const Rounds *self, int64_t rank)
{
    return self->rows + rank * ROW_CELLS;
}

static bool is_gone(const Rounds *self, int64_t rank)
{
    return self->block->cells[rank] > 0;
}

/* -- blocks ----------------------------------------------------------------------------------- */

static int corrupt(const char *what, int64_t value)
{
    PyErr_Format(PyExc_ValueError, "the cells of an operation are corrupt: %s %lld", what, (long long)value);
    return -1;
}

static bool is_block(const Rounds *self, int64_t block)
{
    return block > NONE && block <= self->limit;
}

static int64_t free_count(const Rounds *self)
{
    return self->table[FREE];
}

/* A free block, with the caller as its one keeper; -1 with an exception if the cells are corrupt. There is one. */
static int64_t take_block(Rounds *self)
{
    int64_t count = free_count(self);
    if (count < 1 || count > self->limit)
        return corrupt("free blocks", count);
    int64_t block = self->stack[count - 1];
    if (!is_block(self, block))
        return corrupt("block", block);
    self->table[FREE] = count - 1;
    self->keepers[block] = 1;
    return block;
}

static void keep_block(Rounds *self, int64_t block)
{
    if (is_block(self, block))
        self->keepers[block] = plus(self->keepers[block], 1);
}

static void drop_block(Rounds *self, int64_t block)
{
    if (!is_block(self, block))
        return;
    self->keepers[block] = minus(self->keepers[block], 1);
    if (self->keepers[block])
        return;
    int64_t count = free_count(self);
    if (count >= 0 && count < self->limit) {
        self->stack[count] = block;
        self->table[FREE] = count + 1;
    }
}

/* The memory of `block`; NULL if it has none. */
static char *find_memory(const Rounds *self, int64_t block)
{
    if (!is_block(self, block) || self->addresses[block] < 0)
        return NULL;
    int64_t capacity = self->segments[0].len, address = self->addresses[block], offset = address % capacity;
    if (address / capacity >= self->segment_count || offset > capacity - self->nbytes)
        return NULL;
    return (char *)self->segments[address / capacity].buf + offset;
}

/* As `find_memory`, with an exception if there is none. */
static char *memory_of(Rounds *self, int64_t block)
{
    char *memory = find_memory(self, block);
    if (!memory)
        corrupt("block", block);
    return memory;
}

static double weight_at(const int64_t *cell)
{
    double weight;
    memcpy(&weight, cell, sizeof weight);
    return weight;
}

/* `block` is a result of these contributions: `BlockTable.sign`. */
static void sign_block(Rounds *self, int64_t block, int64_t group, double weight)
{
    memcpy(&self->weights[block], &weight, sizeof weight);
    int64_t *bitmap = self->bitmaps + block * self->words;
    memset(bitmap, 0, (size_t)self->words * sizeof *bitmap);
    for (int64_t rank = 0; rank < self->size; rank++) {
        if (self->group_of[rank] == group && row_of(self, rank)[STAGED] != NONE)
            bitmap[rank / BITS] |= INT64_C(1) << rank % BITS;
    }
}

/* -- the rules: asyncoll/algorithms/rounds/rules.py ------------------------------------------- */

static bool is_synchronous(const Rounds *self, int64_t number)
{
    return self->sync_every > 0 && number % self->sync_every == 0;
}

static bool has_arrived(const Rounds *self, int64_t rank, int64_t number)
{
    return row_of(self, rank)[HERE] == number;
}

static int64_t count_arrived(const Rounds *self, int64_t number, bool with_gone)
{
    int64_t count = 0;
    for (int64_t rank = 0; rank < self->size; rank++)
        count += has_arrived(self, rank, number) || (with_gone && is_gone(self, rank));
    return count;
}

static bool may_open(const Rounds *self, int64_t number)
{
    if (self->head[RUNNING])
        return false;
    if (is_synchronous(self, number))
        return count_arrived(self, number, true) == self->size;
    if (self->opening == SOLO)
        return true;
    if (self->opening == QUORUM)
        return count_arrived(self, number, true) >= self->quorum;
    for (int64_t rank = 0; rank < self->size; rank++) {
        if (self->is_drawn[rank] && (has_arrived(self, rank, number) || is_gone(self, rank)))
            return true;
    }
    return false;
}

static bool late_call_opens(const Rounds *self, int64_t number)
{
    return self->opening == MAJORITY && !self->head[RUNNING] && !is_synchronous(self, number) &&
           self->is_drawn[self->rank] && 2 * count_arrived(self, number, false) >= self->size;
}

/* -- results ---------------------------------------------------------------------------------- */

static int64_t *results_of(const Rounds *self, int64_t number)
{
    return self->results + (int64_t)((uint64_t)number % (uint64_t)(self->history + 1)) * self->size * KEPT_CELLS;
}

/* When round `number` has begun, in nanoseconds. */
static int64_t *beginning_of(const Rounds *self, int64_t number)
{
    return self->begun + (uint64_t)number % BEGINNINGS;
}

/* Note the rounds from `first` to `last` that history still has, and keep their results for this rank. */
static void keep_results(Rounds *self, Call *call, int64_t first, int64_t last)
{
    call->first_missed = larger(larger(first, self->head[LATEST] - self->history), 1);
    call->last_missed = last;
    for (int64_t number = call->first_missed; number <= last; number++)
        keep_block(self, results_of(self, number)[self->rank * KEPT_CELLS + KEPT_BLOCK]);
}

static void drop_results(Rounds *self, Call *call)
{
    for (int64_t number = call->first_missed; number <= call->last_missed; number++)
        drop_block(self, results_of(self, number)[self->rank * KEPT_CELLS + KEPT_BLOCK]);
    call->last_missed = call->first_missed - 1;
}

/* Each distinct result of an older round is kept no longer. */
static void forget_results(Rounds *self, const int64_t *results)
{
    for (int64_t rank = 0; rank < self->size; rank++) {
        int64_t block = results[rank * KEPT_CELLS + KEPT_BLOCK], before = 0;
        while (before < rank && results[before * KEPT_CELLS + KEPT_BLOCK] != block)
            before++;
        if (before == rank)
            drop_block(self, block);
    }
}

/* -- opening a round -------------------------------------------------------------------------- */

/* Reduce the staged contributions of `group` into a block, which has one keeper. Returns NONE if there are none, and -1
 * with an exception set. `contributors` is their number. */
static int64_t reduce_group(Rounds *self, int64_t group, int *contributors)
{
    int64_t dest = NONE;
    double weight = 0.0;
    *contributors = 0;
    for (int64_t rank = 0; rank < self->size; rank++) {
        const int64_t *row = row_of(self, rank);
        const int64_t staged = row[STAGED];
        if (self->group_of[rank] != group || staged == NONE)
            continue;
        if (!(self->sources[(*contributors)++] = memory_of(self, staged)))
            return -1;
        weight += weight_at(&row[WEIGHT]);
        dest = staged;
    }
    if (*contributors == 1) /* it is the result: nothing to reduce */
        keep_block(self, dest);
    else if (*contributors) {
        dest = take_block(self);
        char *into = dest < 0 ? NULL : memory_of(self, dest);
        if (!into)
            return -1;
        for (Py_ssize_t i = 0; i < self->part_count; i++) {
            const Part *part = &self->parts[i];
            for (int source = 0; source < *contributors; source++)
                self->sources[source] = (char *)self->sources[source] + (part->offset - (i ? part[-1].offset : 0));
            part->kernel(into + part->offset, self->sources, *contributors, (size_t)part->elements, 1);
        }
    }
    if (dest != NONE)
        sign_block(self, dest, group, weight);
    return dest;
}

/* Take the staged contributions of `group`: each is in one round, except where contributions stay. */
static void take_group(Rounds *self, int64_t group)
{
    for (int64_t rank = 0; rank < self->size; rank++) {
        int64_t *row = row_of(self, rank);
        if (self->group_of[rank] != group || row[STAGED] == NONE)
            continue;
        row[TAKEN] = row[TICKET];
        if (!self->keeps) {
            drop_block(self, row[STAGED]);
            row[STAGED] = row[STAGED_AT] = NONE;
        }
    }
}

/* Record the result of `group`, and grant it to the callers that wait for the round. */
static void publish_group(Rounds *self, int64_t group, int64_t number, int64_t dest, int contributors, int64_t absent)
{
    int64_t *results = results_of(self, number);
    self->counts[contributors] = plus(self->counts[contributors], 1);
    for (int64_t rank = 0; rank < self->size; rank++) {
        if (self->group_of[rank] != group)
            continue;
        int64_t *row = row_of(self, rank), *kept = results + rank * KEPT_CELLS;
        kept[KEPT_NUMBER] = number;
        kept[KEPT_BLOCK] = dest;
        kept[KEPT_ACTIVE] = contributors;
        kept[KEPT_ABSENT] = absent;
        kept[KEPT_TAKEN] = row[TAKEN];
        if (row[WAITS_FOR] == number) {
            memcpy(&row[GRANTED], kept, KEPT_CELLS * sizeof *kept);
            keep_block(self, dest);
        }
    }
}

/* Open the next round, reduce all staged contributions, publish the results, and wake the sleepers. There are enough
 * free blocks. Returns 0, or -1 with an exception set. */
static int open_round(Rounds *self, int64_t number, int64_t now_ns)
{
    int64_t absent = 0;
    for (int64_t rank = 0; rank < self->size; rank++)
        absent += is_gone(self, rank);
    *beginning_of(self, number) = now_ns;
    forget_results(self, results_of(self, number));
    for (int64_t group = 0; group < self->group_count; group++) {
        int contributors;
        int64_t dest = reduce_group(self, group, &contributors);
        if (dest < 0)
            return -1;
        take_group(self, group);
        publish_group(self, group, number, dest, contributors, absent);
    }
    self->head[LATEST] = number;
    control_block_wake(self->block, INT64_MAX);
    return 0;
}

/* -- a call ----------------------------------------------------------------------------------- */

/* `RoundRecord.count_late` */
static void count_late(Rounds *self, int64_t aim, int64_t now_ns)
{
    int64_t newest = self->head[LATEST];
    if (newest >= aim) {
        int64_t begun = *beginning_of(self, larger(aim, minus(newest, BEGINNINGS - 1)));
        int64_t *late_ns = &row_of(self, self->rank)[LATE_NS];
        *late_ns = plus(*late_ns, larger(0, minus(now_ns, begun)));
    }
}

/* `OneSidedRounds._fill` and `RoundRecord.put`. Returns 0, or -1 with an exception set. */
static int stage(Rounds *self, Call *call, const Py_buffer *flats, double weight)
{
    int64_t *row = row_of(self, self->rank), block = take_block(self);
    char *memory = block < 0 ? NULL : memory_of(self, block);
    bool adds = row[STAGED] != NONE && !self->keeps;
    char *staged = memory && adds ? memory_of(self, row[STAGED]) : NULL;
    if (!memory || (adds && !staged))
        return -1;
    for (Py_ssize_t i = 0; i < self->part_count; i++) {
        const Part *part = &self->parts[i];
        memcpy(memory + part->offset, flats[i].buf, (size_t)part->length);
        if (adds) {
            void *both[] = {memory + part->offset, staged + part->offset};
            part->kernel(both[0], both, 2, (size_t)part->elements, 1);
        }
    }
    if (adds)
        weight += weight_at(&row[WEIGHT]);
    drop_block(self, row[STAGED]);
    row[STAGED] = block;
    row[STAGED_AT] = self->addresses[block];
    memcpy(&row[WEIGHT], &weight, sizeof weight);
    call->ticket = row[TICKET] = plus(row[TICKET], 1);
    return 0;
}

/* `RoundRecord.leave`: the caller waits no longer. */
static void leave_round(Rounds *self, Call *call)
{
    int64_t *row = row_of(self, self->rank);
    int64_t waited_ns = minus(*beginning_of(self, call->number), call->came_ns);
    row[WAITED_NS] = plus(row[WAITED_NS], larger(0, waited_ns));
    if (row[GRANTED] == call->number)
        memcpy(call->kept, &row[GRANTED], sizeof call->kept);
    row[WAITS_FOR] = row[GRANTED] = 0;
}

/* `OneSidedRounds._come`: open the round of the call if this rank may, and note its result if there is one. Returns 0,
 * or -1 with an exception set. */
static int come(Rounds *self, Call *call, int64_t aim)
{
    int64_t *row = row_of(self, self->rank);
    if (call->number) {
        row[HERE] = row[WAITS_FOR] = call->number;
        if (self->head[LATEST] < call->number && may_open(self, call->number) &&
            open_round(self, call->number, call->now_ns) < 0)
            return -1;
        if (self->head[LATEST] < call->number)
            return 0;
        leave_round(self, call);
    }
    if (!call->kept[KEPT_NUMBER]) { /* the call is late, or its round was over before it came */
        drop_results(self, call);
        int64_t newest = self->head[LATEST], *kept = results_of(self, newest) + self->rank * KEPT_CELLS;
        keep_results(self, call, larger(aim, newest - self->history), newest - 1);
        memcpy(call->kept, kept, sizeof call->kept);
        keep_block(self, call->kept[KEPT_BLOCK]);
    }
    return 0;
}

/* Copy the result of the call into the caller's arrays, and drop it. */
static int copy_result(Rounds *self, const Call *call, const Py_buffer *flats)
{
    int64_t block = call->kept[KEPT_BLOCK];
    if (block == NONE)
        return 0;
    const char *memory = memory_of(self, block);
    if (!memory)
        return -1;
    for (Py_ssize_t i = 0; i < self->part_count; i++)
        memcpy(flats[i].buf, memory + self->parts[i].offset, (size_t)self->parts[i].length);
    return 0;
}

/* -- in Python -------------------------------------------------------------------------------- */

/* The ranks whose contributions are in `block`, in order. */
static PyObject *contributors_of(const Rounds *self, int64_t block, int64_t active)
{
    bool has_some = is_block(self, block) && active > 0 && active <= self->size;
    PyObject *ranks = PyTuple_New(has_some ? (Py_ssize_t)active : 0);
    Py_ssize_t count = 0;
    for (int64_t rank = 0; ranks && has_some && rank < self->size && count < active; rank++) {
        if (self->bitmaps[block * self->words + rank / BITS] >> rank % BITS & 1)
            PyTuple_SetItem(ranks, count++, PyLong_FromLongLong(rank));
    }
    if (ranks && has_some && count < active) {
        Py_DECREF(ranks);
        corrupt("contributors", active);
        return NULL;
    }
    return ranks;
}

/* The results that the call has missed, as tuples of the cells of a `Kept`; None without any. */
static PyObject *missed_results(const Rounds *self, const Call *call)
{
    if (call->first_missed > call->last_missed)
        return Py_NewRef(Py_None);
    PyObject *missed = PyList_New(0);
    for (int64_t number = call->first_missed; missed && number <= call->last_missed; number++) {
        const int64_t *kept = results_of(self, number) + self->rank * KEPT_CELLS;
        PyObject *record =
            Py_BuildValue("(LLLLL)", (long long)kept[KEPT_NUMBER], (long long)kept[KEPT_BLOCK],
                          (long long)kept[KEPT_ACTIVE], (long long)kept[KEPT_ABSENT], (long long)kept[KEPT_TAKEN]);
        if (!record || PyList_Append(missed, record) < 0)
            Py_CLEAR(missed);
        Py_XDECREF(record);
    }
    return missed;
}

/* Under the lock: what `begin` and `resume` return. */
static PyObject *answer_of(Rounds *self, Call *call, const Py_buffer *flats)
{
    int64_t block = call->kept[KEPT_BLOCK];
    bool is_over = call->kept[KEPT_NUMBER] > 0;
    if (is_over && copy_result(self, call, flats) < 0)
        return NULL;
    PyObject *missed = missed_results(self, call);
    PyObject *ranks = missed ? contributors_of(self, is_over ? block : NONE, call->kept[KEPT_ACTIVE]) : NULL;
    double weight = is_over && is_block(self, block) ? weight_at(&self->weights[block]) : 0.0;
    if (!ranks) {
        Py_XDECREF(missed);
        return NULL;
    }
    if (is_over)
        drop_block(self, block);
    return Py_BuildValue("(LLLNLNLLd)", (long long)call->number, (long long)call->came_ns, (long long)call->ticket,
                         missed, (long long)call->kept[KEPT_NUMBER], ranks, (long long)call->kept[KEPT_ABSENT],
                         (long long)call->kept[KEPT_TAKEN], weight);
}

static void release_arrays(Py_buffer *flats, Py_ssize_t count)
{
    while (count)
        PyBuffer_Release(&flats[--count]);
    PyMem_Free(flats);
}

/* The buffers of `arrays`, which must have the sizes of the parts; NULL with an exception set. */
static Py_buffer *hold_arrays(const Rounds *self, PyObject *arrays)
{
    if (PySequence_Size(arrays) != self->part_count) {
        PyErr_SetString(PyExc_ValueError, "a contribution has an array for each part");
        return NULL;
    }
    Py_buffer *flats = PyMem_Calloc((size_t)self->part_count, sizeof *flats);
    if (!flats) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < self->part_count; i++) {
        PyObject *array = PySequence_GetItem(arrays, i);
        int failed = array ? PyObject_GetBuffer(array, &flats[i], PyBUF_WRITABLE) : -1;
        Py_XDECREF(array);
        if (failed || flats[i].len != self->parts[i].length) {
            if (!failed)
                PyErr_SetString(PyExc_ValueError, "an array has another size than its part");
            release_arrays(flats, failed ? i : i + 1);
            return NULL;
        }
    }
    return flats;
}

/* The number of blocks that a call needs, its own and those of the results; 0 if there are so many free ones. */
static int64_t missing_blocks(const Rounds *self, int64_t own)
{
    int64_t needed = own + self->group_count;
    return free_count(self) < needed ? needed : 0;
}

/* Under the lock. Returns a tuple, or a number: of the round that `plan` must be called for, or negative, of the blocks
 * that must be provided. After a number the call has changed nothing. */
static PyObject *begin_locked(Rounds *self, const Py_buffer *flats, double weight, int64_t aim, int64_t came_ns)
{
    int64_t latest = self->head[LATEST], missing;
    if (latest < 0 || latest >= ROUNDS_MAX || self->head[RUNNING])
        return corrupt("round", latest), NULL;
    if (self->has_plans && self->planned != latest + 1)
        return PyLong_FromLongLong(latest + 1);
    if ((missing = missing_blocks(self, 1)))
        return PyLong_FromLongLong(-missing);
    Call call = {.came_ns = came_ns, .now_ns = clock_ns(), .first_missed = 1};
    call.number = latest < aim || late_call_opens(self, latest + 1) ? latest + 1 : 0; /* Engine.begin */
    count_late(self, aim, came_ns);
    if (call.number > aim)
        keep_results(self, &call, larger(aim, latest + 1 - self->history), latest);
    if (stage(self, &call, flats, weight) < 0 || come(self, &call, aim) < 0)
        return NULL;
    return answer_of(self, &call, flats);
}

/* Release the lock. Without an answer there is an exception, which may have left a round half open. */
static void leave_lock(Rounds *self, PyObject *answer)
{
    if (answer)
        control_block_unlock(self->block);
    else
        control_block_abandon(self->block);
}

/* `begin(arrays, weight, aim, unused)`: one call up to its first wait. Drops the blocks `unused` first. */
static PyObject *begin(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    Rounds *self = (Rounds *)object;
    int64_t came_ns = clock_ns();
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "begin(arrays, weight, aim, unused)");
        return NULL;
    }
    double weight = PyFloat_AsDouble(arguments[1]);
    int64_t aim = PyLong_AsLongLong(arguments[2]);
    Py_ssize_t unused = PySequence_Size(arguments[3]);
    if (PyErr_Occurred() || unused < 0)
        return NULL;
    if (aim < 1) {
        PyErr_SetString(PyExc_ValueError, "rounds count from 1");
        return NULL;
    }
    Py_buffer *flats = hold_arrays(self, arguments[0]);
    if (!flats)
        return NULL;
    PyObject *answer = NULL;
    if (control_block_lock(self->block) == 0) {
        for (Py_ssize_t i = 0; i < unused; i++) {
            PyObject *block = PySequence_GetItem(arguments[3], i);
            drop_block(self, block ? PyLong_AsLongLong(block) : NONE);
            Py_XDECREF(block);
        }
        if (!PyErr_Occurred())
            answer = begin_locked(self, flats, weight, aim, came_ns);
        leave_lock(self, answer);
    }
    release_arrays(flats, self->part_count);
    return answer;
}

/* `resume(arrays, aim, number, came_ns, ticket)`: a call that waits for round `number` looks again, as `begin` does. Its
 * missed results stay where `begin` has noted them. */
static PyObject *resume(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    Rounds *self = (Rounds *)object;
    long long values[4];
    for (Py_ssize_t i = 0; i < 4 && count == 5; i++)
        values[i] = PyLong_AsLongLong(arguments[i + 1]);
    if (PyErr_Occurred())
        return NULL;
    if (count != 5 || values[0] < 1 || values[1] < 1 || values[1] > ROUNDS_MAX) {
        PyErr_SetString(PyExc_ValueError, "resume(arrays, aim, number, came_ns, ticket)");
        return NULL;
    }
    Py_buffer *flats = hold_arrays(self, arguments[0]);
    if (!flats)
        return NULL;
    Call call = {.number = values[1], .came_ns = values[2], .ticket = values[3], .first_missed = 1};
    PyObject *answer = NULL;
    if (control_block_lock(self->block) == 0) {
        int64_t missing = missing_blocks(self, 0);
        call.now_ns = clock_ns();
        if (self->has_plans && self->planned != call.number)
            answer = PyLong_FromLongLong(call.number);
        else if (missing)
            answer = PyLong_FromLongLong(-missing);
        else if (come(self, &call, values[0]) == 0)
            answer = answer_of(self, &call, flats);
        leave_lock(self, answer);
    }
    release_arrays(flats, self->part_count);
    return answer;
}

/* `is_needed(number)`: whether a call that waits for round `number` has to look again. Without the lock: a hint. */
static PyObject *is_needed(PyObject *object, PyObject *argument)
{
    Rounds *self = (Rounds *)object;
    int64_t number = PyLong_AsLongLong(argument);
    if (number == -1 && PyErr_Occurred())
        return NULL;
    int64_t latest = __atomic_load_n(&self->head[LATEST], __ATOMIC_RELAXED);
    return PyBool_FromLong(latest >= number || may_open(self, number));
}

/* `plan(number, drawn, groups)`: the ranks that are drawn for round `number`, and its groups, as sequences of ranks. */
static PyObject *plan(PyObject *object, PyObject *arguments)
{
    Rounds *self = (Rounds *)object;
    long long number;
    PyObject *drawn, *groups;
    if (!PyArg_ParseTuple(arguments, "LO!O!:plan", &number, &PyTuple_Type, &drawn, &PyTuple_Type, &groups))
        return NULL;
    self->planned = 0; /* until all is well */
    memset(self->is_drawn, 0, (size_t)self->size);
    for (Py_ssize_t i = 0; i < PyTuple_Size(drawn); i++) {
        long long rank = PyLong_AsLongLong(PyTuple_GetItem(drawn, i));
        if (rank < 0 || rank >= self->size)
            return PyErr_Format(PyExc_ValueError, "there is no rank %lld", rank);
        self->is_drawn[rank] = 1;
    }
    if (PyTuple_Size(groups) > self->size)
        return PyErr_Format(PyExc_ValueError, "there are more groups than ranks");
    for (Py_ssize_t group = 0; group < PyTuple_Size(groups); group++) {
        PyObject *ranks = PyTuple_GetItem(groups, group);
        for (Py_ssize_t i = 0; i < PySequence_Size(ranks); i++) {
            PyObject *item = PySequence_GetItem(ranks, i);
            long long rank = item ? PyLong_AsLongLong(item) : -1;
            Py_XDECREF(item);
            if (rank < 0 || rank >= self->size)
                return PyErr_Format(PyExc_ValueError, "there is no rank %lld", rank);
            self->group_of[rank] = group;
        }
    }
    if (PyErr_Occurred())
        return NULL;
    self->group_count = PyTuple_Size(groups);
    self->planned = number;
    Py_RETURN_NONE;
}

/* -- a whole call ----------------------------------------------------------------------------- */

/* engine.py: _AIM, _STALE, _LAGS, and the number of cells. */
enum { AIM, STALE, LAGS, ENGINE_CELLS = 64 };

/* call_order.py: the attributes of a CallOrder. */
enum { NUMBERS, NOW, OVER, WAITING };

/* progress.py: CALLS_PER_TURN. */
enum { CALLS_PER_TURN = 64 };

/* The turn of a call that begins now; NULL, without an exception, if an earlier call of this rank is under way. */
static PyObject *take_turn(Rounds *self)
{
    PyObject *turn = PyIter_Next(self->turns[NUMBERS]);
    if (!turn || PyObject_RichCompareBool(turn, PyList_GetItem(self->turns[NOW], 0), Py_EQ) == 1)
        return turn;
    PyObject *done = PyObject_CallFunctionObjArgs(self->end_turn, turn, NULL);
    Py_DECREF(turn);
    Py_XDECREF(done);
    return NULL;
}

/* `CallOrder.end` of a call that had its turn. Returns 0, or -1 with an exception set. */
static int end_turn(Rounds *self, PyObject *turn)
{
    PyObject *done = NULL;
    if (PySet_Size(self->turns[OVER]) || PyDict_Size(self->turns[WAITING]))
        done = PyObject_CallFunctionObjArgs(self->end_turn, turn, NULL);
    else {
        PyObject *next = PyLong_FromLongLong(PyLong_AsLongLong(turn) + 1);
        done = next && PyList_SetItem(self->turns[NOW], 0, next) == 0 ? Py_NewRef(Py_None) : NULL;
    }
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* Whether `block` has memory, or stands for none. */
static bool is_sound(const Rounds *self, int64_t block)
{
    return block == NONE || find_memory(self, block);
}

/* Whether the blocks that a call uses have memory: those that it takes, the staged ones, and the newest result. */
static bool has_sound_blocks(const Rounds *self)
{
    int64_t count = free_count(self), latest = self->head[LATEST];
    if (count < 2 || count > self->limit || !is_sound(self, self->stack[count - 1]) ||
        !is_sound(self, self->stack[count - 2]) ||
        !is_sound(self, results_of(self, latest)[self->rank * KEPT_CELLS + KEPT_BLOCK]))
        return false;
    for (int64_t rank = 0; rank < self->size; rank++) {
        if (!is_sound(self, row_of(self, rank)[STAGED]))
            return false;
    }
    return true;
}

/* Whether a call that aims at round `aim` is over without a wait, and needs nothing of Python. It opens that round, or is
 * late and given the newest one. Under the lock; changes nothing. */
static bool ends_at_once(Rounds *self, int64_t aim)
{
    int64_t latest = self->head[LATEST], *here = &row_of(self, self->rank)[HERE];
    bool needs_drawn = self->opening == MAJORITY && !is_synchronous(self, latest + 1);
    if (latest < 0 || latest >= ROUNDS_MAX || latest < aim - 1 || latest - aim >= ENGINE_CELLS - LAGS ||
        self->head[RUNNING] || (needs_drawn && self->planned != latest + 1) || !has_sound_blocks(self))
        return false;
    if (latest >= aim)
        return !late_call_opens(self, latest + 1);
    int64_t before = *here;
    *here = aim; /* as if the caller had arrived */
    bool opens = may_open(self, aim);
    *here = before;
    return opens;
}

/* Divide the result in `flat` of `active` contributions by what the reduction demands. */
static void divide_result(const Rounds *self, const Py_buffer *flat, int64_t active)
{
    int64_t divisor = self->divisor ? self->divisor : active;
    void *array = flat->buf;
    if (divisor != 1)
        self->parts[0].kernel(array, &array, 1, (size_t)self->parts[0].elements, divisor);
}

/* Under the lock: carry out a call that `ends_at_once`. Returns the ranks in its result; NULL with an exception set. */
static PyObject *carry_out(Rounds *self, Call *call, const Py_buffer *flat, int64_t aim)
{
    call->number = self->head[LATEST] < aim ? aim : 0;
    count_late(self, aim, call->came_ns);
    if (stage(self, call, flat, 1.0) < 0 || come(self, call, aim) < 0 || copy_result(self, call, flat) < 0)
        return NULL;
    int64_t block = call->kept[KEPT_BLOCK], lag = minus(call->kept[KEPT_NUMBER], aim);
    if (lag < 0 || lag >= ENGINE_CELLS - LAGS)
        return corrupt("lag", lag), NULL;
    PyObject *ranks = contributors_of(self, block, call->kept[KEPT_ACTIVE]);
    if (ranks)
        drop_block(self, block);
    return ranks;
}

/* `Engine.deliver` without history. Returns the lag: all rounds since the aim are skipped. */
static int64_t deliver(Rounds *self, const Call *call, bool *included)
{
    int64_t *cells = self->engine.buf, lag = call->kept[KEPT_NUMBER] - cells[AIM];
    *included = call->ticket <= call->kept[KEPT_TAKEN];
    cells[AIM] = call->kept[KEPT_NUMBER] + 1;
    cells[LAGS + lag] += 1;
    cells[STALE] += !*included;
    return lag;
}

/* The `Reduction` of a call of `array`; NULL with an exception set. Its class is written in Python, and its `__init__`
 * would be bytecode: see answers.c. */
static PyObject *reduction_of(Rounds *self, const Call *call, PyObject *ranks, bool included, int64_t lag,
                              PyObject *array)
{
    int64_t number = call->kept[KEPT_NUMBER];
    bool synchronous = is_synchronous(self, number) && !call->kept[KEPT_ABSENT];
    allocfunc allocate = PyType_GetSlot((PyTypeObject *)self->reduction, Py_tp_alloc);
    PyObject *made = allocate((PyTypeObject *)self->reduction, 0);
    PyObject *values =
        Py_BuildValue("(LnOLO()OOLdO)", (long long)number, PyTuple_Size(ranks), included ? Py_True : Py_False,
                      (long long)lag, synchronous ? Py_True : Py_False, self->everyone, ranks, (long long)lag,
                      1e-9 * (double)(clock_ns() - call->came_ns), PyTuple_Size(ranks) ? array : Py_None);
    for (Py_ssize_t i = 0; made && values && i < PyTuple_Size(values); i++) {
        PyObject *field = PyTuple_GetItem(self->fields, i);
        descrsetfunc set = PyType_GetSlot(Py_TYPE(field), Py_tp_descr_set);
        if (set(field, made, PyTuple_GetItem(values, i)) < 0)
            Py_CLEAR(made);
    }
    if (!values)
        Py_CLEAR(made);
    Py_XDECREF(values);
    return made;
}

/* With the turn: the awaitable of the call, or None if that has to wait, or needs Python: then nothing has changed. */
static PyObject *answer_at_once(Rounds *self, PyObject *array, const Py_buffer *flat)
{
    Call call = {.came_ns = clock_ns(), .first_missed = 1};
    int64_t aim = ((int64_t *)self->engine.buf)[AIM];
    int outcome = control_block_lock_soon(self->block);
    if (outcome < 0)
        return NULL;
    call.now_ns = clock_ns();
    bool ends = outcome == 0 && ends_at_once(self, aim);
    PyObject *ranks = ends ? carry_out(self, &call, flat, aim) : NULL;
    if (ends)
        leave_lock(self, ranks);
    else if (outcome == 0)
        control_block_unlock(self->block);
    if (!ranks)
        return ends ? NULL : Py_NewRef(Py_None);
    if (PyTuple_Size(ranks)) /* otherwise there is no result, and the array has the contribution still */
        divide_result(self, flat, PyTuple_Size(ranks));
    bool included, turns = ++self->calls_in_row == CALLS_PER_TURN;
    int64_t lag = deliver(self, &call, &included);
    if (turns)
        self->calls_in_row = 0;
    PyObject *reduction = reduction_of(self, &call, ranks, included, lag, array);
    PyObject *answer =
        reduction ? make_answer(self->answer, reduction, self->owed, lag + 1, call.kept[KEPT_NUMBER], turns) : NULL;
    Py_XDECREF(reduction);
    Py_DECREF(ranks);
    return answer;
}

/* `at_once(array)`: a whole call, if it is over without a wait. */
static PyObject *at_once(PyObject *object, PyObject *array)
{
    Rounds *self = (Rounds *)object;
    Py_buffer flat;
    if (!self->answer || PyObject_Size(self->owed))
        Py_RETURN_NONE;
    if (PyObject_GetBuffer(array, &flat, PyBUF_WRITABLE) < 0) {
        PyErr_Clear(); /* not contiguous, or not writable: left to Python */
        Py_RETURN_NONE;
    }
    bool suits = flat.len == self->parts[0].length && (uintptr_t)flat.buf % (uintptr_t)flat.itemsize == 0;
    PyObject *turn = suits ? take_turn(self) : NULL;
    PyObject *answer = NULL;
    if (turn)
        answer = answer_at_once(self, array, &flat);
    else if (!PyErr_Occurred())
        answer = Py_NewRef(Py_None);
    PyBuffer_Release(&flat);
    if (turn && end_turn(self, turn) < 0)
        Py_CLEAR(answer);
    Py_XDECREF(turn);
    return answer;
}

/* `attach(answer, reduction, fields, turns, end_turn, owed, engine, divisor)`: what `at_once` needs. */
static PyObject *attach(PyObject *object, PyObject *arguments)
{
    Rounds *self = (Rounds *)object;
    PyObject *answer, *reduction, *fields, *turns[4], *end, *owed, *engine;
    long long divisor;
    if (!PyArg_ParseTuple(arguments, "OO!O!(OO!O!O!)OOOL:attach", &answer, &PyType_Type, &reduction, &PyTuple_Type,
                          &fields, &turns[NUMBERS], &PyList_Type, &turns[NOW], &PySet_Type, &turns[OVER], &PyDict_Type,
                          &turns[WAITING], &end, &owed, &engine, &divisor))
        return NULL;
    if (self->answer || !is_answer_type(answer) || PyTuple_Size(fields) < 11 || !PyIter_Check(turns[NUMBERS]) ||
        PyList_Size(turns[NOW]) != 1 || self->part_count != 1 || self->keeps || self->history || divisor < 0)
        return PyErr_Format(PyExc_ValueError, "these calls cannot be over at once");
    if (PyObject_GetBuffer(engine, &self->engine, PyBUF_WRITABLE) < 0)
        return NULL;
    self->everyone = PyTuple_New((Py_ssize_t)self->size);
    for (Py_ssize_t rank = 0; self->everyone && rank < self->size; rank++)
        PyTuple_SetItem(self->everyone, rank, PyLong_FromSsize_t(rank));
    if (self->engine.len != ENGINE_CELLS * (Py_ssize_t)sizeof(int64_t))
        return PyErr_Format(PyExc_ValueError, "an engine has %d cells", ENGINE_CELLS);
    if (!self->everyone)
        return NULL;
    for (size_t i = 0; i < sizeof turns / sizeof *turns; i++)
        self->turns[i] = Py_NewRef(turns[i]);
    self->reduction = Py_NewRef(reduction);
    self->fields = Py_NewRef(fields);
    self->end_turn = Py_NewRef(end);
    self->owed = Py_NewRef(owed);
    self->divisor = divisor;
    self->answer = Py_NewRef(answer); /* last: now `at_once` may be called */
    Py_RETURN_NONE;
}

/* -- the type --------------------------------------------------------------------------------- */

/* Where everything lies among the cells: `RoundRecord.__init__` and `BlockTable.__init__`. */
static int lay_out(Rounds *self)
{
    int64_t *cells = self->block->cells;
    self->words = (self->size + BITS - 1) / BITS;
    self->head = cells + self->size;
    self->rows = self->head + HEAD_CELLS;
    self->results = self->rows + self->size * ROW_CELLS;
    self->begun = self->results + (self->history + 1) * self->size * KEPT_CELLS;
    self->counts = self->begun + BEGINNINGS;
    self->table = self->counts + self->size + 1;
    self->stack = self->table + TABLE_HEAD;
    self->addresses = self->stack + self->limit - 1; /* less 1, as blocks count from 1 */
    self->keepers = self->addresses + self->limit;
    self->weights = self->keepers + self->limit;
    self->bitmaps = self->weights + self->limit + 1 - self->words;
    if (self->table + TABLE_HEAD + (4 + self->words) * self->limit == cells + self->block->cell_count)
        return 0;
    PyErr_SetString(PyExc_ValueError, "the control block has another number of cells");
    return -1;
}

/* `parts`: tuples of (offset, length, number of the kernel). */
static int read_parts(Rounds *self, PyObject *parts)
{
    self->part_count = PyTuple_Size(parts);
    self->parts = PyMem_Calloc((size_t)self->part_count + 1, sizeof *self->parts);
    if (!self->parts) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < self->part_count; i++) {
        long long offset, length;
        int kernel;
        PyObject *part = PyTuple_GetItem(parts, i);
        if (!PyTuple_Check(part) || !PyArg_ParseTuple(part, "LLi", &offset, &length, &kernel))
            return -1;
        if (!kernel_at(kernel) || offset < 0 || length < 0 || offset > self->nbytes || length > self->nbytes - offset) {
            PyErr_SetString(PyExc_ValueError, "a part lies in a block, and has a kernel");
            return -1;
        }
        self->parts[i] = (Part){offset, length, length / (int64_t)kernel_element_size(kernel), kernel_at(kernel)};
    }
    return 0;
}

/* `segments`: arrays of bytes, all of one size. */
static int hold_segments(Rounds *self, PyObject *segments)
{
    Py_ssize_t count = PyTuple_Size(segments);
    self->segments = PyMem_Calloc((size_t)count + 1, sizeof *self->segments);
    if (!self->segments) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (PyObject_GetBuffer(PyTuple_GetItem(segments, i), &self->segments[i], PyBUF_WRITABLE) < 0)
            return -1;
        self->segment_count++;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (self->segments[i].len == self->segments[0].len)
            continue;
        PyErr_SetString(PyExc_ValueError, "the segments have different sizes");
        return -1;
    }
    if (count && self->nbytes <= self->segments[0].len)
        return 0;
    PyErr_SetString(PyExc_ValueError, "no segment has room for a block");
    return -1;
}

/* `Rounds(control_block, segments, size, rank, history, limit, nbytes, opening, quorum, sync_every, keeps, parts)` */
static PyObject *create(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    PyObject *block, *segments, *parts;
    long long size, rank, history, limit, nbytes, opening, quorum, sync_every;
    int keeps;
    static char *names[] = {"control_block", "segments", "size",       "rank",  "history", "limit", "nbytes",
                            "opening",       "quorum",   "sync_every", "keeps", "parts",   NULL};
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO!LLLLLLLLpO!:Rounds", names, &block, &PyTuple_Type,
                                     &segments, &size, &rank, &history, &limit, &nbytes, &opening, &quorum, &sync_every,
                                     &keeps, &PyTuple_Type, &parts))
        return NULL;
    const long long many = 1LL << 31; /* so that no sum or product of these overflows */
    if (!is_control_block(block) || size < 1 || size > 1 << 16 || rank < 0 || rank >= size || history < 0 ||
        history >= many || limit < 1 || limit >= many || nbytes < 1 || sync_every < 0) {
        PyErr_SetString(PyExc_ValueError, "these are no rounds");
        return NULL;
    }
    allocfunc allocate = PyType_GetSlot(type, Py_tp_alloc); /* sets all to zero */
    Rounds *self = (Rounds *)allocate(type, 0);
    if (!self)
        return NULL;
    self->block = (ControlBlock *)Py_NewRef(block);
    self->size = size;
    self->rank = rank;
    self->history = history;
    self->limit = limit;
    self->nbytes = nbytes;
    self->opening = opening;
    self->quorum = quorum;
    self->sync_every = sync_every;
    self->keeps = keeps != 0;
    self->has_plans = self->keeps || opening == MAJORITY;
    self->group_count = 1;
    if (lay_out(self) < 0 || read_parts(self, parts) < 0 || hold_segments(self, segments) < 0)
        goto failed;
    self->group_of = PyMem_Calloc((size_t)size, sizeof *self->group_of);
    self->is_drawn = PyMem_Calloc((size_t)size, 1);
    self->sources = PyMem_Calloc((size_t)size, sizeof *self->sources);
    if (self->group_of && self->is_drawn && self->sources)
        return (PyObject *)self;
    PyErr_NoMemory();
failed:
    Py_DECREF(self);
    return NULL;
}

static int traverse(PyObject *object, visitproc visit, void *arg)
{
    Rounds *self = (Rounds *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->block);
    PyObject *attached[] = {self->answer,         self->reduction,  self->fields,
                            self->turns[NUMBERS], self->turns[NOW], self->turns[OVER],
                            self->turns[WAITING], self->end_turn,   self->owed};
    for (size_t i = 0; i < sizeof attached / sizeof *attached; i++)
        Py_VISIT(attached[i]);
    return 0;
}

static void detach(Rounds *self)
{
    Py_XDECREF(self->answer);
    Py_XDECREF(self->reduction);
    Py_XDECREF(self->fields);
    Py_XDECREF(self->everyone);
    for (int i = 0; i < 4; i++)
        Py_XDECREF(self->turns[i]);
    Py_XDECREF(self->end_turn);
    Py_XDECREF(self->owed);
    if (self->engine.obj)
        PyBuffer_Release(&self->engine);
}

static void destroy(PyObject *object)
{
    Rounds *self = (Rounds *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    for (int64_t i = 0; i < self->segment_count; i++)
        PyBuffer_Release(&self->segments[i]);
    PyMem_Free(self->segments);
    PyMem_Free(self->group_of);
    PyMem_Free(self->is_drawn);
    PyMem_Free(self->sources);
    PyMem_Free(self->parts);
    detach(self);
    Py_XDECREF((PyObject *)self->block);
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"begin", (PyCFunction)(void (*)(void))begin, METH_FASTCALL, NULL},
    {"resume", (PyCFunction)(void (*)(void))resume, METH_FASTCALL, NULL},
    {"is_needed", is_needed, METH_O, NULL},
    {"plan", plan, METH_VARARGS, NULL},
    {"attach", attach, METH_VARARGS, NULL},
    {"at_once", at_once, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, create}, {Py_tp_dealloc, destroy}, {Py_tp_traverse, traverse}, {Py_tp_methods, methods}, {0, NULL},
};

PyType_Spec rounds_spec = {
    .name = "asyncoll._core.native.Rounds",
    .basicsize = sizeof(Rounds),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};
