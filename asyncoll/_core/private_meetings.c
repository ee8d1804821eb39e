/* Meetings with long arrays in the private memory of the ranks, which the kernel copies (peers.c).
 *
 * The counterpart of `SharedCall._reduce_privately` (asyncoll/algorithms/dense/shared_call.py), which goes on with a call
 * that has to sleep, or that fails here. The steps of a rank, once all have arrived: it claims chunks and reduces them
 * into its own array; it takes the other chunks from the ranks that have reduced them, as soon as they are there; it
 * leaves; if it has reduced chunks, it waits until all ranks have left, because they may read its array until then.
 *
 * What other ranks have written into the cells says what is read, and never where this rank writes.
 */
#include "meetings.h"

void private_begin(Meetings *self, Record record, const Py_buffer *bytes)
{
    self->private_calls[record.turn] = (PrivateCall){.tag = record.tag, .own = bytes->buf, .bytes = bytes->len};
}

static PrivateCall *call_of(Meetings *self, Record record)
{
    return &self->private_calls[record.turn];
}

/* Where byte `first` of the array of `rank` is. Any numbers: the kernel refuses to read what is not there. */
static Place place_of(const Meetings *self, Record record, int64_t rank, int64_t first)
{
    return (Place){self->block->cells[self->peers + PEER_CELLS * rank + PEER_PID],
                   part_of(record, rank)[PART_ADDRESS] + first};
}

/* Whether the ranks reduce their private arrays together. A hint without the lock. */
static bool is_together(const Meetings *self, Record record)
{
    return peek(&record.cells[ARRIVED]) == self->size && peek(&record.cells[PRIVATE]) == self->size &&
           !peek(&record.cells[WITHDRAWN]);
}

/* -- reducing ------------------------------------------------------------------------------------- */

/* As `Rendezvous.done` and then `Rendezvous.claim`, under one lock: `reduced` bytes from `*first` on are those of the
 * chunk before, 0 for the first. Returns the bytes of the new chunk, whose first byte is `*first`; 0 if all are claimed,
 * and -1 with an exception. */
static int64_t claim_next(Meetings *self, Record record, int64_t reduced, int64_t *first)
{
    if (control_block_lock(self->block) < 0)
        return -1;
    /* The length is that of this rank, from its own memory: what others have written must not say how much is
     * written here. */
    int64_t total = call_of(self, record)->bytes, chunk = 0;
    int64_t *cells = record.cells, *part = part_of(record, self->rank), claimed = cells[CLAIMED];
    if (reduced) {
        cells[DONE] += reduced;
        part[PART_BITS] |= INT64_C(1) << *first / private_chunk(total);
        pass_point(MEETING_COUNTED);
    }
    if (is_together(self, record) && is_chunk_left(claimed, total)) {
        chunk = private_chunk(total);
        cells[CLAIMED] = claimed + chunk;
        *first = claimed;
    }
    if (chunk || reduced)
        part[PART_BUSY] = chunk > 0;
    bool is_over = reduced && (cells[DONE] == total || cells[WITHDRAWN]); /* a withdrawal waits for busy ranks */
    release_and_wake(self, record, DONE, is_over);
    return chunk ? least(chunk, total - claimed) : 0;
}

/* Leave the call to Python, which finds out why. Returns 0, or -1 with an exception. */
static int give_up(Meetings *self, Record record)
{
    if (control_block_lock(self->block) < 0)
        return -1;
    /* A cell, and not a return value: Python goes on with the call, perhaps in another thread, and asks there. */
    part_of(record, self->rank)[PART_BUSY] = CANNOT_READ;
    if (record.cells[WITHDRAWN])
        control_block_wake(self->block, INT64_MAX);
    control_block_unlock(self->block);
    return 0;
}

/* Memory for the blocks of all other ranks; NULL with an exception. Another thread may reduce at the same time. */
static char *take_scratch(Meetings *self, size_t bytes)
{
    /* One block is kept: a new one would have page faults in each call. The GIL makes the exchange atomic. */
    char *scratch = self->scratch;
    self->scratch = NULL;
    if (!scratch && !(scratch = PyMem_Malloc(bytes)))
        PyErr_NoMemory();
    return scratch;
}

static void keep_scratch(Meetings *self, char *scratch)
{
    PyMem_Free(self->scratch);
    self->scratch = scratch;
}

/* Claim and reduce as `job`, which has its arrays, says. Returns 0, or -1 with an exception. */
static int reduce_chunks(Meetings *self, Record record, PeerJob *job)
{
    int64_t first = 0, chunk = claim_next(self, record, 0, &first);
    while (chunk > 0) {
        for (int64_t rank = 0; rank < self->size; rank++)
            job->places[rank] = place_of(self, record, rank, first);
        job->own = call_of(self, record)->own + first;
        job->bytes = (size_t)chunk;
        PyThreadState *state = PyEval_SaveThread();
        int error = reduce_peers(job);
        PyEval_RestoreThread(state);
        if (error)
            /* The chunk stays claimed and is not counted, so no rank takes the array for reduced. */
            return give_up(self, record);
        chunk = claim_next(self, record, chunk, &first);
    }
    return (int)chunk;
}

int private_reduce(Meetings *self, Record record, int kernel, int64_t divisor)
{
    /* One rank alone reads nothing; the sizes below must not be zero. */
    size_t others = self->size > 1 ? (size_t)self->size - 1 : 1;
    size_t room = others * PAGE > SCRATCH ? others * PAGE : SCRATCH;
    PeerJob job = {.kernel = kernel_at(kernel), .element = kernel_element_size(kernel), .divisor = divisor};
    job.size = (int)self->size;
    job.rank = (int)self->rank;
    job.block = room / others / PAGE * PAGE;
    job.places = PyMem_Calloc((size_t)self->size, sizeof(Place));
    job.operands = PyMem_Calloc((size_t)self->size, sizeof(void *));
    if (!job.places || !job.operands)
        PyErr_NoMemory();
    else
        job.scratch = take_scratch(self, room);
    int failed = job.scratch ? reduce_chunks(self, record, &job) : -1;
    if (job.scratch)
        keep_scratch(self, job.scratch);
    PyMem_Free(job.places);
    PyMem_Free(job.operands);
    return failed;
}

/* -- taking the result, and leaving ----------------------------------------------------------------- */

/* The chunks that `rank` has reduced, and that this rank has not taken. */
static int64_t new_chunks(const Record record, const PrivateCall *call, int64_t rank)
{
    return peek(&part_of(record, rank)[PART_BITS]) & ~call->taken;
}

/* Copy these chunks of `from`, which is the whole array. Needs no GIL. Returns 0 or an error number. */
static int copy_chunks(const PrivateCall *call, Place from, int64_t chunks)
{
    int64_t each = private_chunk(call->bytes);
    /* Bits of chunks that do not exist, which a broken peer may have set, are never reached. */
    for (int64_t first = 0, bit = 1; first < call->bytes; first += each, bit <<= 1) {
        if (!(chunks & bit))
            continue;
        const Place there = {from.pid, from.address + first};
        int error = copy_from_peer(there, call->own + first, (size_t)least(each, call->bytes - first));
        if (error)
            return error;
        pass_point(PEER_TAKEN);
    }
    return 0;
}

/* Take what others have reduced so far. Returns 0, or -1 with an exception. */
static int take_chunks(Meetings *self, Record record)
{
    PrivateCall *call = call_of(self, record);
    for (int64_t step = 1; step < self->size; step++) {
        int64_t rank = (self->rank + step) % self->size; /* each rank begins with another one's */
        if (control_block_lock(self->block) < 0) /* what `rank` has written before it set a bit is seen after this */
            return -1;
        int64_t chunks = new_chunks(record, call, rank);
        control_block_unlock(self->block);
        Place from = place_of(self, record, rank, 0);
        PyThreadState *state = PyEval_SaveThread();
        int error = copy_chunks(call, from, chunks);
        PyEval_RestoreThread(state);
        if (error)
            return give_up(self, record);
        /* Only after the copies: a chunk that could not be copied is not taken. */
        call->taken |= chunks;
    }
    return 0;
}

static bool has_taken_all(const Meetings *self, Record record, const PrivateCall *call)
{
    /* DONE alone does not tell: all may be reduced, and not yet copied by this rank. */
    for (int64_t rank = 0; rank < self->size; rank++)
        if (rank != self->rank && new_chunks(record, call, rank))
            return false;
    return peek(&record.cells[DONE]) == call->bytes;
}

/* Whether no rank reads this rank's array any more. This rank has left. */
static bool is_returned(const Meetings *self, Record record)
{
    const int64_t *cells = record.cells; /* with another tag, a later meeting uses them: all ranks have left */
    return peek(&cells[TAG]) != record.tag || peek(&cells[LEFT]) == self->size ||
           !peek(&part_of(record, self->rank)[PART_BITS]);
}

/* Leave, if nothing has happened since the hint. Returns 0, or -1 with an exception. */
static int leave(Meetings *self, Record record)
{
    PrivateCall *call = call_of(self, record);
    if (control_block_lock(self->block) < 0)
        return -1;
    bool is_last = false;
    /* Once more under the lock. A rank that has withdrawn may have changed its array while this one copied from it. */
    if (!record.cells[WITHDRAWN] && has_taken_all(self, record, call)) {
        is_last = ++record.cells[LEFT] == self->size;
        part_of(record, self->rank)[PART_BUSY] = HAS_LEFT;
        call->has_left = true;
        pass_point(MEETING_LEFT);
    }
    release_and_wake(self, record, LEFT, is_last);
    return 0;
}

int private_complete(Meetings *self, Record record)
{
    PrivateCall *call = call_of(self, record);
    if (!call->has_left)
        return 0;
    if (control_block_lock(self->block) < 0)
        return -1;
    bool is_over = is_returned(self, record);
    control_block_unlock(self->block);
    /* From now on the record is no private meeting of this rank, and `own` is never used again. */
    if (is_over)
        call->tag = 0;
    return is_over;
}

/* -- the steps ------------------------------------------------------------------------------------ */

Step private_step(const Meetings *self, Record record, const PrivateCall *call)
{
    /* A rank that has left must not look at the other cells: a later meeting may use them already. */
    if (call->has_left)
        return is_returned(self, record) ? RESULT : NOTHING;
    if (peek(&record.cells[ARRIVED]) != self->size)
        return NOTHING;
    if (!is_together(self, record) || peek(&part_of(record, self->rank)[PART_BUSY]) == CANNOT_READ)
        return NO_USE;
    if (is_chunk_left(peek(&record.cells[CLAIMED]), call->bytes))
        return REDUCE;
    for (int64_t rank = 0; rank < self->size; rank++)
        if (rank != self->rank && new_chunks(record, call, rank))
            return TAKE;
    return peek(&record.cells[DONE]) == call->bytes ? LEAVE : NOTHING;
}

int private_perform(Meetings *self, Record record, const Meeting *meeting, Step step)
{
    if (step == REDUCE)
        return private_reduce(self, record, meeting->kernel, meeting->divisor);
    return step == TAKE ? take_chunks(self, record) : leave(self, record);
}
