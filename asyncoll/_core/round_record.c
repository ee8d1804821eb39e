/* The steps of a critical section of wait-avoiding rounds: blocks, the rules, opening a round, and its results.
 *
 * The counterpart of `RoundRecord`, `BlockTable` and asyncoll/algorithms/rounds/rules.py. The rank that opens a round
 * of short contributions reduces and publishes it before it releases the lock. So no rank ever sees such a round running.
 */
#include "rounds.h"

/* -- blocks ----------------------------------------------------------------------------------- */

int rounds_corrupt(const char *what, int64_t value)
{
    PyErr_Format(PyExc_ValueError, "the cells of an operation are corrupt: %s %lld", what, (long long)value);
    return -1;
}

int64_t rounds_take_block(Rounds *self)
{
    int64_t count = free_count(self);
    if (count < 1 || count > self->limit)
        return rounds_corrupt("free blocks", count);
    int64_t block = self->stack[count - 1];
    if (!is_block(self, block))
        return rounds_corrupt("block", block);
    self->table[FREE] = count - 1;
    self->keepers[block] = 1;
    return block;
}

void rounds_keep_block(Rounds *self, int64_t block)
{
    if (is_block(self, block))
        /* Other numbers are NONE or LENT, which have no keepers, or come from a broken peer. */
        self->keepers[block] = plus(self->keepers[block], 1);
}

void rounds_drop_block(Rounds *self, int64_t block)
{
    if (!is_block(self, block))
        return;
    self->keepers[block] = minus(self->keepers[block], 1);
    if (self->keepers[block])
        return;
    int64_t count = free_count(self);
    /* More free blocks than there are can only be written by a broken peer. The block is lost then, and nothing
     * else. */
    if (count >= 0 && count < self->limit) {
        self->stack[count] = block;
        self->table[FREE] = count + 1;
    }
}

char *rounds_memory_at(const Rounds *self, int64_t address, int64_t bytes)
{
    int64_t capacity = self->segments[0].len, offset = address % capacity;
    if (address < 0 || address / capacity >= self->segment_count || offset > capacity - bytes)
        return NULL;
    return (char *)self->segments[address / capacity].buf + offset;
}

char *rounds_find_memory(const Rounds *self, int64_t block)
{
    if (!is_block(self, block))
        return NULL;
    /* Read once: a broken peer may change it meanwhile. */
    return rounds_memory_at(self, __atomic_load_n(&self->addresses[block], __ATOMIC_RELAXED), self->nbytes);
}

/* As `find_memory`, with an exception if there is none. */
static char *memory_of(Rounds *self, int64_t block)
{
    char *memory = rounds_find_memory(self, block);
    if (!memory)
        rounds_corrupt("block", block);
    return memory;
}

void rounds_sign_block(Rounds *self, int64_t block, int64_t group, double weight, int column)
{
    if (!is_block(self, block))
        return;
    memcpy(&self->weights[block], &weight, sizeof weight);
    int64_t *bitmap = self->bitmaps + block * self->words;
    /* The bits of an earlier result are still there: a block is passed on as it is. */
    memset(bitmap, 0, (size_t)self->words * sizeof *bitmap);
    for (int64_t rank = 0; rank < self->size; rank++) {
        if (self->group_of[rank] == group && row_of(self, rank)[column] != NONE)
            bitmap[rank / BITMAP_BITS] |= INT64_C(1) << rank % BITMAP_BITS;
    }
}

/* -- the rules: asyncoll/algorithms/rounds/rules.py ------------------------------------------- */

static bool has_arrived(const Rounds *self, int64_t rank, int64_t number)
{
    return row_of(self, rank)[RANK_CELLS_HERE] == number;
}

static int64_t count_arrived(const Rounds *self, int64_t number, bool with_gone)
{
    int64_t count = 0;
    for (int64_t rank = 0; rank < self->size; rank++)
        count += has_arrived(self, rank, number) || (with_gone && is_gone(self, rank));
    return count;
}

/* Whether a rank that is drawn for the round has arrived, or is gone. */
static bool has_drawn_rank(const Rounds *self, int64_t number)
{
    for (int64_t rank = 0; rank < self->size; rank++)
        if (self->is_drawn[rank] && (has_arrived(self, rank, number) || is_gone(self, rank)))
            return true;
    return false;
}

int64_t rounds_count_gone(const Rounds *self)
{
    int64_t count = 0;
    for (int64_t rank = 0; rank < self->size; rank++)
        count += is_gone(self, rank);
    return count;
}

bool rounds_may_open(const Rounds *self, int64_t number)
{
    if (self->head[HEAD_RUNNING])
        return false;
    bool synchronous = waits_for_all(self, number);
    int64_t needed = ranks_needed(self->ranks, self->size, synchronous);
    if (needed > 1 && count_arrived(self, number, true) < needed)
        return false;
    return !needs_drawn(self->drawn, synchronous) || has_drawn_rank(self, number);
}

bool rounds_late_call_opens(const Rounds *self, int64_t number)
{
    return !self->head[HEAD_RUNNING] && needs_drawn(self->drawn, waits_for_all(self, number)) &&
           self->is_drawn[self->rank] && are_enough(count_arrived(self, number, false), self->size);
}

/* -- results ---------------------------------------------------------------------------------- */

/* Note the rounds from `first` to `last` that history still has, and keep their results for this rank. */
static void keep_results(Rounds *self, Call *call, int64_t first, int64_t last)
{
    /* Older results are overwritten, so their blocks may have another content. */
    call->first_missed = larger(larger(first, self->head[HEAD_LATEST] - self->history), 1);
    call->last_missed = last;
    for (int64_t number = call->first_missed; number <= last; number++)
        rounds_keep_block(self, results_of(self, number)[self->rank * KEPT_CELLS + KEPT_BLOCK]);
}

static void drop_results(Rounds *self, Call *call)
{
    for (int64_t number = call->first_missed; number <= call->last_missed; number++)
        rounds_drop_block(self, results_of(self, number)[self->rank * KEPT_CELLS + KEPT_BLOCK]);
    call->last_missed = call->first_missed - 1;
}

/* Each distinct block of them is dropped once. */
void rounds_forget_results(Rounds *self, int64_t number)
{
    const int64_t *results = results_of(self, number + 1); /* where the next round writes its own */
    for (int64_t rank = 0; rank < self->size; rank++) {
        int64_t block = results[rank * KEPT_CELLS + KEPT_BLOCK], before = 0;
        /* The ranks of a group share a block, which has one keeper for all of them here. */
        while (before < rank && results[before * KEPT_CELLS + KEPT_BLOCK] != block)
            before++;
        if (before == rank)
            rounds_drop_block(self, block);
    }
}

void rounds_tell_opened(const Rounds *self, int64_t number)
{
    PyObject *about = PyLong_FromLongLong(number);
    if (about)
        trace_event(&self->trace, WHAT_OPEN, 1e-9 * (double)clock_ns(), about);
    Py_XDECREF(about);
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
        const int64_t staged = row[RANK_CELLS_STAGED];
        if (self->group_of[rank] != group || staged == NONE)
            continue;
        if (!(self->sources[(*contributors)++] = memory_of(self, staged)))
            return -1;
        /* In the order of ranks, as in Python: the sum has the same bits. */
        weight += weight_at(&row[RANK_CELLS_WEIGHT]);
        dest = staged;
    }
    if (*contributors == 1) /* it is the result: nothing to reduce */
        rounds_keep_block(self, dest);
    else if (*contributors) {
        dest = rounds_take_block(self);
        char *into = dest < 0 ? NULL : memory_of(self, dest);
        if (!into)
            return -1;
        for (Py_ssize_t i = 0; i < self->part_count; i++) {
            const Part *part = &self->parts[i];
            /* The addresses move on from the part before, in place: nothing is allocated under the lock. */
            for (int source = 0; source < *contributors; source++)
                self->sources[source] = (char *)self->sources[source] + (part->offset - (i ? part[-1].offset : 0));
            part->kernel(into + part->offset, self->sources, *contributors, (size_t)part->elements, 1);
        }
    }
    rounds_sign_block(self, dest, group, weight, RANK_CELLS_STAGED);
    return dest;
}

/* Take the staged contributions of `group`. They stay staged until the round is published. */
static void take_group(Rounds *self, int64_t group)
{
    for (int64_t rank = 0; rank < self->size; rank++) {
        int64_t *row = row_of(self, rank);
        if (self->group_of[rank] == group && row[RANK_CELLS_STAGED] != NONE)
            row[RANK_CELLS_TAKEN] = row[RANK_CELLS_TICKET];
    }
}

/* The round that has taken all staged contributions is published: each is in one round, except where they stay. */
static void clear_staged(Rounds *self)
{
    for (int64_t rank = 0; rank < self->size && !self->keeps; rank++) {
        int64_t *row = row_of(self, rank);
        rounds_drop_block(self, row[RANK_CELLS_STAGED]);
        row[RANK_CELLS_STAGED] = row[RANK_CELLS_STAGED_AT] = NONE;
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
        kept[KEPT_TAKEN] = row[RANK_CELLS_TAKEN];
        if (row[RANK_CELLS_WAITS_FOR] == number) {
            memcpy(&row[RANK_CELLS_GRANTED], kept, KEPT_CELLS * sizeof *kept);
            rounds_keep_block(self, dest);
        }
    }
}

/* Open the next round, of short contributions: reduce all that are staged, publish the results, and wake the sleepers.
 * There are enough free blocks. Returns 0, or -1 with an exception set. */
static int open_round(Rounds *self, int64_t number, int64_t now_ns)
{
    int64_t absent = rounds_count_gone(self);
    *beginning_of(self, number) = now_ns;
    if (self->trace.append)
        rounds_tell_opened(self, number);
    pass_point(ROUND_OPENED);
    for (int64_t group = 0; group < self->group_count; group++) {
        int contributors;
        int64_t dest = reduce_group(self, group, &contributors);
        if (dest < 0)
            return -1;
        pass_point(ROUND_REDUCED);
        take_group(self, group);
        pass_point(ROUND_TAKEN);
        publish_group(self, group, number, dest, contributors, absent);
        pass_point(ROUND_GRANTED);
    }
    /* This store publishes the round. Before it the contributions are staged, and after it they are in the results:
     * a rank that dies at any store in between loses none (unpublished.py). */
    commit(&self->head[HEAD_LATEST], number);
    pass_point(ROUND_PUBLISHED);
    clear_staged(self);
    rounds_forget_results(self, number);
    control_block_wake(self->block, INT64_MAX);
    return 0;
}

/* -- a call ----------------------------------------------------------------------------------- */

/* `RoundRecord.count_late` */
void rounds_count_late(Rounds *self, int64_t aim, int64_t now_ns)
{
    int64_t newest = larger(self->head[HEAD_LATEST], self->head[HEAD_RUNNING]);
    /* Of rounds that are older than BEGINNINGS no time is kept: the oldest one that is known counts instead. */
    if (newest >= aim) {
        int64_t begun = *beginning_of(self, larger(aim, minus(newest, BEGINNINGS - 1)));
        int64_t *late_ns = &row_of(self, self->rank)[RANK_CELLS_LATE_NS];
        *late_ns = plus(*late_ns, larger(0, minus(now_ns, begun)));
    }
}

void rounds_begin_call(Rounds *self, Call *call, int64_t aim)
{
    int64_t latest = self->head[HEAD_LATEST];
    call->number = latest < aim || rounds_late_call_opens(self, latest + 1) ? latest + 1 : 0; /* Engine.begin */
    rounds_count_late(self, aim, call->came_ns);
    if (call->number > aim)
        keep_results(self, call, first_missed(aim, latest, self->history), latest);
}

void rounds_fill(const Rounds *self, char *memory, const Py_buffer *flats, char *before)
{
    for (Py_ssize_t i = 0; i < self->part_count; i++) {
        const Part *part = &self->parts[i];
        memcpy(memory + part->offset, flats[i].buf, (size_t)part->length);
        if (before) {
            void *both[] = {memory + part->offset, before + part->offset};
            part->kernel(both[0], both, 2, (size_t)part->elements, 1);
        }
    }
}

void rounds_put(Rounds *self, Call *call, int64_t block, int64_t address, double weight)
{
    int64_t *row = row_of(self, self->rank);
    if (row[RANK_CELLS_STAGED] != NONE && !self->keeps)
        weight += weight_at(&row[RANK_CELLS_WEIGHT]);
    /* The block before has been added up into this one, or is replaced by it. */
    rounds_drop_block(self, row[RANK_CELLS_STAGED]);
    row[RANK_CELLS_STAGED] = block;
    row[RANK_CELLS_STAGED_AT] = address;
    memcpy(&row[RANK_CELLS_WEIGHT], &weight, sizeof weight);
    call->ticket = row[RANK_CELLS_TICKET] = plus(row[RANK_CELLS_TICKET], 1);
    pass_point(ROUND_STAGED);
}

/* `OneSidedRounds._fill` and `RoundRecord.put`, of a short contribution. Returns 0, or -1 with an exception set. */
int rounds_stage(Rounds *self, Call *call, const Py_buffer *flats, double weight)
{
    int64_t *row = row_of(self, self->rank), block = rounds_take_block(self);
    char *memory = block < 0 ? NULL : memory_of(self, block);
    bool adds = row[RANK_CELLS_STAGED] != NONE && !self->keeps;
    char *staged = memory && adds ? memory_of(self, row[RANK_CELLS_STAGED]) : NULL;
    if (!memory || (adds && !staged))
        return -1;
    rounds_fill(self, memory, flats, staged);
    pass_point(ROUND_FILLED);
    rounds_put(self, call, block, self->addresses[block], weight);
    return 0;
}

/* `RoundRecord.leave`: the caller waits no longer. */
static void leave_round(Rounds *self, Call *call)
{
    int64_t *row = row_of(self, self->rank);
    int64_t waited_ns = minus(*beginning_of(self, call->number), call->came_ns);
    row[RANK_CELLS_WAITED_NS] = plus(row[RANK_CELLS_WAITED_NS], larger(0, waited_ns));
    if (row[RANK_CELLS_GRANTED] == call->number)
        memcpy(call->kept, &row[RANK_CELLS_GRANTED], sizeof call->kept);
    /* RANK_CELLS_HERE stays: the rank has arrived at the round, also if its caller was cancelled. */
    row[RANK_CELLS_WAITS_FOR] = row[RANK_CELLS_GRANTED] = 0;
    pass_point(ROUND_LEFT);
}

/* `OneSidedRounds._come`: open the round of the call if this rank may, and note its result if there is one. Returns 0,
 * or -1 with an exception set. */
int rounds_come(Rounds *self, Call *call, int64_t aim)
{
    int64_t *row = row_of(self, self->rank);
    if (call->number) {
        row[RANK_CELLS_HERE] = row[RANK_CELLS_WAITS_FOR] = call->number;
        pass_point(ROUND_ARRIVED);
        if (self->head[HEAD_LATEST] < call->number && rounds_may_open(self, call->number) &&
            free_count(self) >= self->group_count) {
            int failed = self->is_long ? rounds_start(self, call->number, call->now_ns)
                                       : open_round(self, call->number, call->now_ns);
            if (failed)
                return -1;
        }
        if (self->head[HEAD_LATEST] < call->number)
            return 0;
        leave_round(self, call);
    }
    if (!call->kept[KEPT_NUMBER]) { /* the call is late, or its round was over before it came */
        /* The call is given the newest result, so it misses others than those that it has kept so far. */
        drop_results(self, call);
        int64_t newest = self->head[HEAD_LATEST], *kept = results_of(self, newest) + self->rank * KEPT_CELLS;
        keep_results(self, call, larger(aim, newest - self->history), newest - 1);
        memcpy(call->kept, kept, sizeof call->kept);
        rounds_keep_block(self, call->kept[KEPT_BLOCK]);
    }
    return 0;
}

void rounds_copy_out(const Rounds *self, const char *memory, const Py_buffer *flats)
{
    for (Py_ssize_t i = 0; i < self->part_count; i++)
        memcpy(flats[i].buf, memory + self->parts[i].offset, (size_t)self->parts[i].length);
    pass_point(ROUND_COPIED);
}

/* Copy the result of the call into the caller's arrays. */
int rounds_copy_result(Rounds *self, const Call *call, const Py_buffer *flats)
{
    int64_t block = call->kept[KEPT_BLOCK];
    if (block == NONE)
        return 0;
    const char *memory = memory_of(self, block);
    if (!memory)
        return -1;
    rounds_copy_out(self, memory, flats);
    return 0;
}

/* The ranks whose contributions are in `block`, in order. */
PyObject *rounds_contributors_of(const Rounds *self, int64_t block, int64_t active)
{
    bool has_some = is_block(self, block) && active > 0 && active <= self->size;
    PyObject *ranks = PyTuple_New(has_some ? (Py_ssize_t)active : 0);
    Py_ssize_t count = 0;
    for (int64_t rank = 0; ranks && has_some && rank < self->size && count < active; rank++) {
        /* The bitmap may have more bits than `active` says, if a peer is broken: the tuple has room for so many
         * only. */
        if (self->bitmaps[block * self->words + rank / BITMAP_BITS] >> rank % BITMAP_BITS & 1)
            PyTuple_SetItem(ranks, count++, PyLong_FromLongLong(rank));
    }
    if (ranks && has_some && count < active) {
        Py_DECREF(ranks);
        rounds_corrupt("contributors", active);
        return NULL;
    }
    return ranks;
}
