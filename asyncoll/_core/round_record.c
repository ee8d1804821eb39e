/* The steps of a critical section of wait-avoiding rounds: blocks, the rules, and the results that a call is given.
 *
 * The counterpart of `RoundRecord`, `BlockTable` and asyncoll/algorithms/rounds/rules.py. A round that is open is carried
 * out in running_rounds.c.
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

/* `RoundRecord._is_free` */
static bool is_free(const Rounds *self)
{
    return !self->head[HEAD_RUNNING] && !self->head[HEAD_CLOSED];
}

bool rounds_may_open(const Rounds *self, int64_t number)
{
    if (!is_free(self))
        return false;
    bool synchronous = waits_for_all(self, number);
    int64_t needed = ranks_needed(self->ranks, self->size, synchronous);
    if (needed > 1 && count_arrived(self, number, true) < needed)
        return false;
    return !needs_drawn(self->drawn, synchronous) || has_drawn_rank(self, number);
}

bool rounds_late_call_opens(const Rounds *self, int64_t number)
{
    return is_free(self) && needs_drawn(self->drawn, waits_for_all(self, number)) &&
           self->is_drawn[self->rank] && are_enough(count_arrived(self, number, false), self->size);
}

/* -- results ---------------------------------------------------------------------------------- */

/* Note the rounds from `first` to `last` that history still has, and keep their results for this rank. */
static void keep_results(Rounds *self, Call *call, int64_t first, int64_t last)
{
    /* Older results are overwritten, so their blocks may have another content. */
    call->first_missed = larger(first, oldest_whole(self->head[HEAD_LATEST], self->history));
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

int rounds_come(Rounds *self, Call *call, int64_t aim)
{
    int64_t *row = row_of(self, self->rank);
    if (call->number) {
        row[RANK_CELLS_HERE] = row[RANK_CELLS_WAITS_FOR] = call->number;
        pass_point(ROUND_ARRIVED);
        if (self->head[HEAD_LATEST] < call->number && rounds_may_open(self, call->number) &&
            free_count(self) >= self->group_count && rounds_start(self, call->number, call->now_ns) < 0)
            return -1;
        if (self->head[HEAD_LATEST] < call->number)
            return 0;
        leave_round(self, call);
    }
    if (!call->kept[KEPT_NUMBER]) { /* the call is late, or its round was over before it came */
        /* The call is given the newest result, so it misses others than those that it has kept so far. */
        drop_results(self, call);
        int64_t newest = self->head[HEAD_LATEST], *kept = results_of(self, newest) + self->rank * KEPT_CELLS;
        keep_results(self, call, first_missed(aim, newest - 1, self->history), newest - 1);
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
