/* A round that is open: its contributions are taken, reduced, and published.
 *
 * The counterpart of `OneSidedRounds._put` and `_help` (asyncoll/algorithms/rounds/one_sided.py), and of a running round in
 * `RoundRecord`. The rank that opens a round of short contributions reduces and publishes it before it releases the lock, so
 * no rank ever sees such a round running. Long contributions are copied to blocks, and chunks of them reduced, without the
 * lock and without the GIL. Any rank may run in Python: each step is one that Python takes, too.
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

/* `block` is a result of the contributions of `group` that the round has taken: `BlockTable.sign`. */
static void sign_block(Rounds *self, int64_t block, int64_t group, double weight)
{
    if (!is_block(self, block))
        return;
    memcpy(&self->weights[block], &weight, sizeof weight);
    int64_t *bitmap = self->bitmaps + block * self->words;
    /* The bits of an earlier result are still there: a block is passed on as it is. */
    memset(bitmap, 0, (size_t)self->words * sizeof *bitmap);
    for (int64_t rank = 0; rank < self->size; rank++) {
        if (self->group_of[rank] == group && row_of(self, rank)[RANK_CELLS_SOURCE] != NONE)
            bitmap[rank / BITMAP_BITS] |= INT64_C(1) << rank % BITMAP_BITS;
    }
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
    sign_block(self, dest, group, weight);
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

/* Round `number` is published: drop the results of the round that history keeps no longer, each distinct block once. */
static void forget_results(Rounds *self, int64_t number)
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
    forget_results(self, number);
    control_block_wake(self->block, INT64_MAX);
}

/* -- reducing it ------------------------------------------------------------------------------ */

typedef struct {
    char *into;
    void **sources; /* in order of ranks */
    int count;      /* of sources */
    int64_t elements;
    Kernel kernel;
} Chunk;

/* Under the lock: what is to be reduced for `group` in the running round, of `bytes` bytes of `part` from byte `first` on.
 * Returns whether there is anything; -1 with an exception set. */
static int find_work(Rounds *self, int64_t group, const Part *part, int64_t first, int64_t bytes, Chunk *chunk)
{
    int64_t dest = NONE, offset = part->offset + first;
    chunk->count = 0;
    for (int64_t rank = 0; rank < self->size; rank++) {
        const int64_t *row = row_of(self, rank);
        if (self->group_of[rank] != group || row[RANK_CELLS_SOURCE] == NONE)
            continue;
        dest = row[RANK_CELLS_BLOCK];
        if (row[RANK_CELLS_SOURCE] == dest) /* it is the result */
            return 0;
        char *source = rounds_memory_at(self, row[RANK_CELLS_SOURCE_AT], offset + bytes);
        if (!source)
            return rounds_corrupt("address", row[RANK_CELLS_SOURCE_AT]);
        chunk->sources[chunk->count++] = source + offset;
    }
    if (!chunk->count)
        return 0;
    char *into = rounds_find_memory(self, dest);
    if (!into)
        return rounds_corrupt("block", dest);
    chunk->into = into + offset;
    chunk->elements = bytes * part->elements / part->length;
    chunk->kernel = part->kernel;
    return 1;
}

/* Under the lock: reduce the short contributions to `group`. Returns 0, or -1 with an exception set. */
static int reduce_group(Rounds *self, int64_t group)
{
    Chunk chunk = {.sources = self->sources};
    for (Py_ssize_t i = 0; i < self->part_count; i++) {
        const Part *part = &self->parts[i];
        int found = part->length ? find_work(self, group, part, 0, part->length, &chunk) : 0;
        if (found < 0)
            return -1;
        if (found)
            chunk.kernel(chunk.into, chunk.sources, chunk.count, (size_t)chunk.elements, 1);
    }
    pass_point(ROUND_REDUCED);
    return 0;
}

/* Under the lock: chunk `index` of the running round, in the order of `RoundRecord.work`. Returns 0, or -1 with an
 * exception set. */
static int find_chunk(Rounds *self, int64_t index, Chunk *chunk)
{
    int64_t in_block = chunks_of_block(self), skipped = in_block ? index / in_block : 0, part = 0;
    int64_t at = in_block ? index % in_block : index;
    while (part < self->part_count && at >= chunks_of(self->parts[part].length))
        at -= chunks_of(self->parts[part++].length);
    int64_t first = at * CHUNK_BYTES;
    for (int64_t group = 0; index >= 0 && part < self->part_count && group < self->group_count; group++) {
        const Part *of = &self->parts[part];
        int found = find_work(self, group, of, first, least(of->length - first, CHUNK_BYTES), chunk);
        if (found < 0 || (found && !skipped--))
            return found < 0 ? -1 : 0;
    }
    return rounds_corrupt("chunk", index);
}

static void tell_opened(const Rounds *self, int64_t number)
{
    PyObject *about = PyLong_FromLongLong(number);
    if (about)
        trace_event(&self->trace, WHAT_OPEN, 1e-9 * (double)clock_ns(), about);
    Py_XDECREF(about);
}

int rounds_start(Rounds *self, int64_t number, int64_t now_ns)
{
    int64_t chunks = 0, absent = 0;
    for (int64_t rank = 0; rank < self->size; rank++)
        absent += is_gone(self, rank);
    /* Before contributions are taken: `unpublished` tells by it whether RANK_CELLS_TAKEN is of a round that runs, or of an
     * older one. */
    self->head[HEAD_RUNNING] = number;
    self->head[HEAD_CLAIMED] = self->head[HEAD_DONE] = 0;
    *beginning_of(self, number) = now_ns;
    if (self->trace.append)
        tell_opened(self, number);
    pass_point(ROUND_OPENED);
    for (int64_t group = 0; group < self->group_count; group++) {
        int64_t more = take_group(self, group, number, absent);
        if (more < 0 || (!self->is_long && reduce_group(self, group) < 0))
            return -1;
        chunks += self->is_long ? more : 0;
    }
    self->head[HEAD_CHUNKS] = chunks;
    if (!chunks) /* there will be no last chunk whose end publishes the round */
        publish(self);
    /* A rank that wakes takes longer to come than this one needs for a few chunks. */
    else if (chunks > HELPED)
        control_block_wake(self->block, least(chunks, self->cores) - 1);
    return 0;
}

int rounds_help(Rounds *self)
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

/* Put the arrays `flats` into a block at `memory`, added to those at `before` unless that is NULL. Needs no lock. */
static void fill(const Rounds *self, char *memory, const Py_buffer *flats, char *before)
{
    for (Py_ssize_t i = 0; i < self->part_count; i++) {
        const Part *part = &self->parts[i];
        memcpy(memory + part->offset, flats[i].buf, (size_t)part->length);
        if (before) {
            void *both[] = {memory + part->offset, before + part->offset};
            part->kernel(both[0], both, 2, (size_t)part->elements, 1);
        }
    }
    pass_point(ROUND_FILLED);
}

int64_t rounds_fill_block(Rounds *self, const Py_buffer *flats)
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
        if (self->is_long)
            control_block_unlock(self->block);
        PyThreadState *state = self->nbytes > LONG_BYTES ? PyEval_SaveThread() : NULL;
        fill(self, memory, flats, before);
        if (state)
            PyEval_RestoreThread(state);
        if (self->is_long && control_block_lock(self->block) < 0)
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
