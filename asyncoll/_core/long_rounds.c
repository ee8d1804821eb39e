/* Rounds of long contributions: blocks are filled, and chunks of them reduced, without the lock and without the GIL.
 *
 * The counterpart of `OneSidedRounds._put`, `_lend` and `_help` (asyncoll/algorithms/rounds/one_sided.py), and of a
 * running round in `RoundRecord`. Any rank may run in Python: each step is one that Python takes, too.
 */
#include "rounds.h"

/* -- a running round -------------------------------------------------------------------------- */

static int64_t chunks_of(int64_t length)
{
    return (length + CHUNK_BYTES - 1) / CHUNK_BYTES;
}

static int64_t chunks_of_block(const Rounds *self)
{
    int64_t chunks = 0;
    for (Py_ssize_t i = 0; i < self->part_count; i++)
        chunks += chunks_of(self->parts[i].length);
    return chunks;
}

/* Under the lock: take the staged contributions of `group`. Returns the number of chunks to reduce; -1 with an exception
 * set. */
static int64_t take_group(Rounds *self, int64_t group, int64_t number, int64_t absent)
{
    int64_t taken = 0, dest = NONE;
    double weight = 0.0;
    for (int64_t rank = 0; rank < self->size; rank++) {
        int64_t *row = row_of(self, rank);
        if (self->group_of[rank] != group)
            continue;
        row[RANK_CELLS_SOURCE] = row[RANK_CELLS_STAGED];
        row[RANK_CELLS_SOURCE_AT] = row[RANK_CELLS_STAGED_AT];
        if (row[RANK_CELLS_SOURCE] == NONE)
            continue;
        dest = row[RANK_CELLS_SOURCE];
        taken++;
        weight += weight_at(&row[RANK_CELLS_WEIGHT]);
        commit(&row[RANK_CELLS_TAKEN], row[RANK_CELLS_TICKET]);
        if (self->keeps) /* it stays staged for later rounds, too, so the block has another keeper */
            rounds_keep_block(self, dest);
        else
            row[RANK_CELLS_STAGED] = row[RANK_CELLS_STAGED_AT] = NONE;
    }
    bool is_result = taken == 1 && dest != LENT; /* nothing to reduce */
    if (is_result)
        rounds_keep_block(self, dest);
    else if (taken && (dest = rounds_take_block(self)) < 0)
        return -1;
    rounds_sign_block(self, dest, group, weight, RANK_CELLS_SOURCE);
    for (int64_t rank = 0; rank < self->size; rank++) {
        int64_t *row = row_of(self, rank);
        if (self->group_of[rank] != group)
            continue;
        row[RANK_CELLS_ROUND] = number;
        row[RANK_CELLS_BLOCK] = dest;
        row[RANK_CELLS_ACTIVE] = taken;
        row[RANK_CELLS_ABSENT] = absent;
    }
    pass_point(ROUND_TAKEN);
    return taken && !is_result ? chunks_of_block(self) : 0;
}

/* The first rank of `group`; -1 if it is empty. */
static int64_t first_of(const Rounds *self, int64_t group)
{
    for (int64_t rank = 0; rank < self->size; rank++) {
        if (self->group_of[rank] == group)
            return rank;
    }
    return -1;
}

/* `RoundRecord._publish`, under the lock. */
static void publish(Rounds *self)
{
    int64_t number = self->head[HEAD_RUNNING], *results = results_of(self, number);
    for (int64_t rank = 0; rank < self->size; rank++) {
        int64_t *row = row_of(self, rank), *kept = results + rank * KEPT_CELLS;
        memcpy(kept, &row[RANK_CELLS_ROUND], KEPT_CELLS * sizeof *kept);
        if (row[RANK_CELLS_WAITS_FOR] == number) {
            memcpy(&row[RANK_CELLS_GRANTED], kept, KEPT_CELLS * sizeof *kept);
            rounds_keep_block(self, row[RANK_CELLS_BLOCK]);
        }
    }
    /* The cells of a row say how many have contributed to its group; a broken peer may have written any number
     * there. */
    for (int64_t group = 0; group < self->group_count; group++) {
        int64_t rank = first_of(self, group), active = rank < 0 ? -1 : row_of(self, rank)[RANK_CELLS_ACTIVE];
        if (active >= 0 && active <= self->size)
            self->counts[active] = plus(self->counts[active], 1);
    }
    pass_point(ROUND_GRANTED);
    commit(&self->head[HEAD_LATEST], number);
    pass_point(ROUND_PUBLISHED);
    self->head[HEAD_RUNNING] = 0;
    for (int64_t rank = 0; rank < self->size; rank++)
        rounds_drop_block(self, row_of(self, rank)[RANK_CELLS_SOURCE]);
    rounds_forget_results(self, number);
    control_block_wake(self->block, INT64_MAX);
}

int rounds_start(Rounds *self, int64_t number, int64_t now_ns)
{
    int64_t chunks = 0, absent = rounds_count_gone(self);
    /* Before contributions are taken: `unpublished` tells by it whether RANK_CELLS_TAKEN is of a round that runs, or of an
     * older one. */
    self->head[HEAD_RUNNING] = number;
    self->head[HEAD_CLAIMED] = self->head[HEAD_DONE] = 0;
    *beginning_of(self, number) = now_ns;
    if (self->trace.append)
        rounds_tell_opened(self, number);
    pass_point(ROUND_OPENED);
    for (int64_t group = 0; group < self->group_count; group++) {
        int64_t more = take_group(self, group, number, absent);
        if (more < 0)
            return -1;
        chunks += more;
    }
    self->head[HEAD_CHUNKS] = chunks;
    if (!chunks) /* there will be no last chunk whose end publishes the round */
        publish(self);
    /* A rank that wakes takes longer to come than this one needs for a few chunks. */
    else if (chunks > HELPED)
        control_block_wake(self->block, (chunks < self->cores ? chunks : self->cores) - 1);
    return 0;
}

/* -- reducing it ------------------------------------------------------------------------------ */

typedef struct {
    char *into;
    void **sources; /* in order of ranks */
    int count;      /* of sources */
    int64_t elements;
    Kernel kernel;
} Chunk;

/* Under the lock: the contributions to `group` in the running round, as `sources`, from `first` to `last` byte of each.
 * Returns their number; 0 if there is nothing to reduce; -1 with an exception set. */
static int find_sources(Rounds *self, int64_t group, int64_t first, int64_t last, void **sources)
{
    int count = 0;
    for (int64_t rank = 0; rank < self->size; rank++) {
        const int64_t *row = row_of(self, rank);
        if (self->group_of[rank] != group || row[RANK_CELLS_SOURCE] == NONE)
            continue;
        if (row[RANK_CELLS_SOURCE] == row[RANK_CELLS_BLOCK]) /* it is the result */
            return 0;
        char *source = rounds_memory_at(self, row[RANK_CELLS_SOURCE_AT], last);
        if (!source)
            return rounds_corrupt("address", row[RANK_CELLS_SOURCE_AT]);
        sources[count++] = source + first;
    }
    return count;
}

/* Under the lock: chunk `index` of the running round, in the order of `RoundRecord.work`. Returns 0, or -1 with an
 * exception set. */
static int find_chunk(Rounds *self, int64_t index, Chunk *chunk)
{
    int64_t in_block = chunks_of_block(self), skipped = in_block ? index / in_block : 0, part = 0;
    int64_t at = in_block ? index % in_block : index;
    while (part < self->part_count && at >= chunks_of(self->parts[part].length))
        at -= chunks_of(self->parts[part++].length);
    if (index < 0 || part == self->part_count)
        return rounds_corrupt("chunk", index);
    const Part *of = &self->parts[part];
    int64_t rest = of->length - at * CHUNK_BYTES, bytes = rest < CHUNK_BYTES ? rest : CHUNK_BYTES;
    int64_t first = of->offset + at * CHUNK_BYTES, dest = NONE;
    for (int64_t group = 0; group < self->group_count; group++) {
        chunk->count = find_sources(self, group, first, first + bytes, chunk->sources);
        if (chunk->count < 0)
            return -1;
        if (!chunk->count || skipped--)
            continue;
        dest = row_of(self, first_of(self, group))[RANK_CELLS_BLOCK]; /* it has a rank, which has contributed */
        break;
    }
    char *into = rounds_find_memory(self, dest);
    if (!into)
        return rounds_corrupt("block", dest);
    chunk->into = into + first;
    chunk->elements = bytes * of->elements / of->length;
    chunk->kernel = of->kernel;
    return 0;
}

/* With the lock, which is released while a chunk is reduced: reduce chunks of the running round, as long as there are any,
 * and publish the round with the last one. Returns 0; or -1 with an exception set, and without the lock. */
static int help(Rounds *self)
{
    int64_t number = self->head[HEAD_RUNNING];
    Chunk chunk = {.sources = PyMem_Calloc((size_t)self->size, sizeof *chunk.sources)};
    if (!chunk.sources)
        PyErr_NoMemory();
    while (chunk.sources && self->head[HEAD_RUNNING] == number && self->head[HEAD_CLAIMED] < self->head[HEAD_CHUNKS]) {
        if (find_chunk(self, self->head[HEAD_CLAIMED], &chunk) < 0)
            break;
        /* Claimed after it is found: a chunk that makes no sense is left, and the error ends the communicator. */
        self->head[HEAD_CLAIMED]++;
        pass_point(ROUND_CLAIMED);
        control_block_unlock(self->block);
        /* The claim gives this rank the chunk's part of the result, and the sources do not change. */
        PyThreadState *state = PyEval_SaveThread();
        chunk.kernel(chunk.into, chunk.sources, chunk.count, (size_t)chunk.elements, 1);
        pass_point(ROUND_HELPED);
        PyEval_RestoreThread(state);
        if (control_block_lock(self->block) < 0) {
            PyMem_Free(chunk.sources);
            return -1;
        }
        self->head[HEAD_DONE] = plus(self->head[HEAD_DONE], 1);
        pass_point(ROUND_COUNTED);
        if (self->head[HEAD_DONE] == self->head[HEAD_CHUNKS])
            publish(self);
    }
    PyMem_Free(chunk.sources);
    if (!PyErr_Occurred())
        return 0;
    control_block_abandon(self->block);
    return -1;
}

bool rounds_wants_help(const Rounds *self)
{
    const int64_t *head = self->head;
    return __atomic_load_n(&head[HEAD_RUNNING], __ATOMIC_RELAXED) > 0 &&
           __atomic_load_n(&head[HEAD_CLAIMED], __ATOMIC_RELAXED) <
               __atomic_load_n(&head[HEAD_CHUNKS], __ATOMIC_RELAXED);
}

/* -- contributing ----------------------------------------------------------------------------- */

/* With the lock, which is released meanwhile: fill a new block with the sum of `flats` and the staged contribution; in
 * groups, with `flats` alone. Returns the block; or -1 with an exception set, and without the lock. */
static int64_t fill_block(Rounds *self, const Py_buffer *flats)
{
    const int64_t *row = row_of(self, self->rank);
    int64_t block = rounds_take_block(self);
    char *memory = block < 0 ? NULL : rounds_find_memory(self, block), *before;
    while (memory) {
        int64_t staged = row[RANK_CELLS_STAGED], ticket = row[RANK_CELLS_TICKET];
        bool adds = staged != NONE && !self->keeps;
        before = adds ? rounds_memory_at(self, row[RANK_CELLS_STAGED_AT], self->nbytes) : NULL;
        if (adds && !before)
            break;
        control_block_unlock(self->block);
        PyThreadState *state = self->nbytes > LONG_BYTES ? PyEval_SaveThread() : NULL;
        rounds_fill(self, memory, flats, before);
        pass_point(ROUND_FILLED);
        if (state)
            PyEval_RestoreThread(state);
        if (control_block_lock(self->block) < 0)
            return -1;
        /* Otherwise a round may have taken the staged contribution meanwhile, and the sum would contribute it twice. */
        if (self->keeps || (row[RANK_CELLS_STAGED] == staged && row[RANK_CELLS_TICKET] == ticket))
            return block;
    }
    if (block >= 0)
        rounds_corrupt("block", block);
    control_block_abandon(self->block);
    return -1;
}

/* Under the lock: whether a call that waits for the next round may stage the caller's own memory. After the call the
 * program may change that, and older staged contributions have to be added up, in a block. */
static bool may_lend(const Rounds *self, int64_t aim)
{
    int64_t latest = self->head[HEAD_LATEST];
    return !self->head[HEAD_RUNNING] && row_of(self, self->rank)[RANK_CELLS_STAGED] == NONE &&
           (latest < aim || rounds_late_call_opens(self, latest + 1));
}

/* -- a call ----------------------------------------------------------------------------------- */

/* With the lock, which is released: help as long as the call waits for the running round. Returns what `begin` does, and
 * `missed` is the list of the call's missed results, a new reference; NULL with an exception set. */
static PyObject *settle(Rounds *self, Call *call, const Py_buffer *flats, int64_t aim, PyObject *missed)
{
    if (missed && call->number && !call->kept[KEPT_NUMBER] && self->head[HEAD_RUNNING] == call->number) {
        if (help(self) < 0) {
            Py_DECREF(missed);
            return NULL;
        }
        if (self->head[HEAD_LATEST] >= call->number && rounds_come(self, call, aim) < 0)
            Py_CLEAR(missed);
    }
    int64_t block = call->kept[KEPT_BLOCK];
    const char *memory = rounds_find_memory(self, block);
    if (missed && block != NONE && !memory) {
        rounds_corrupt("block", block);
        Py_CLEAR(missed);
    }
    PyObject *answer = missed ? rounds_answer(self, call, missed) : NULL;
    leave_lock(self, answer);
    if (!answer || !memory) /* the call waits, or its round has no contributors */
        return answer;
    PyThreadState *state = self->nbytes > LONG_BYTES ? PyEval_SaveThread() : NULL;
    rounds_copy_out(self, memory, flats);
    if (state)
        PyEval_RestoreThread(state);
    if (control_block_lock(self->block) < 0) {
        Py_DECREF(answer);
        return NULL;
    }
    rounds_drop_block(self, block);
    control_block_unlock(self->block);
    return answer;
}

PyObject *rounds_begin_long(Rounds *self, const Py_buffer *flats, double weight, int64_t aim, int64_t came_ns,
                            int64_t lent)
{
    bool lends = lent >= 0 && may_lend(self, aim);
    int64_t block = lends ? LENT : fill_block(self, flats), wanted;
    if (!lends && block < 0)
        return NULL;
    if ((wanted = rounds_wanted(self, 0)) > 0) { /* another round than before the block was filled */
        rounds_drop_block(self, block);
        control_block_unlock(self->block);
        return PyLong_FromLongLong(wanted);
    }
    Call call = {.came_ns = came_ns, .now_ns = clock_ns(), .first_missed = 1};
    rounds_begin_call(self, &call, aim);
    rounds_put(self, &call, block, lends ? lent : self->addresses[block], weight);
    PyObject *missed = rounds_come(self, &call, aim) < 0 ? NULL : rounds_missed(self, &call);
    return settle(self, &call, flats, aim, missed);
}

PyObject *rounds_resume_long(Rounds *self, Call *call, const Py_buffer *flats, int64_t aim)
{
    PyObject *missed = rounds_come(self, call, aim) < 0 ? NULL : rounds_missed(self, call);
    return settle(self, call, flats, aim, missed);
}
