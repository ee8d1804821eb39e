/* Wait-avoiding rounds: all of a call up to its first wait. With a short contribution it is one critical section.
 *
 * The counterpart of `CompiledRounds._begin_here` (asyncoll/algorithms/rounds/compiled_rounds.py).
 */
#include "rounds.h"

/* -- in Python -------------------------------------------------------------------------------- */

/* The results that the call has missed, as tuples of the cells of a `Kept`; None without any. */
static PyObject *missed_of(const Rounds *self, const Call *call)
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

/* What `begin` and `resume` return, with the new reference `missed`; NULL with an exception set. */
static PyObject *answer_of(const Rounds *self, const Call *call, PyObject *missed)
{
    int64_t block = call->kept[KEPT_NUMBER] > 0 ? call->kept[KEPT_BLOCK] : NONE;
    PyObject *ranks = rounds_contributors_of(self, block, call->kept[KEPT_ACTIVE]);
    if (!ranks) {
        Py_DECREF(missed);
        return NULL;
    }
    double weight = is_block(self, block) ? weight_at(&self->weights[block]) : 0.0;
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

/* What a call lacks that takes `own` blocks: as a number, which `begin` returns; 0 if nothing is missing. */
static int64_t wanted_by(const Rounds *self, int64_t own)
{
    int64_t next = self->head[HEAD_LATEST] + 1, needed = own + self->group_count;
    /* The plan comes first: it says how many groups there are, and so how many blocks are needed. */
    if (self->has_plans && self->planned != next)
        return next;
    return own && free_count(self) < needed ? -needed : 0;
}

/* Under the lock: whether a call that waits for the next round may stage the caller's own memory. After the call the
 * program may change that, and older staged contributions have to be added up, in a block. */
static bool may_lend(const Rounds *self, int64_t aim)
{
    int64_t latest = self->head[HEAD_LATEST];
    return self->is_long && !self->head[HEAD_RUNNING] && row_of(self, self->rank)[RANK_CELLS_STAGED] == NONE &&
           (latest < aim || rounds_late_call_opens(self, latest + 1));
}

/* With the lock, which is released: copy the result of a call that is over. Returns `answer`, or NULL with an exception
 * set. */
static PyObject *copy_result(Rounds *self, int64_t block, const char *memory, const Py_buffer *flats, PyObject *answer)
{
    if (self->is_long)
        control_block_unlock(self->block);
    PyThreadState *state = self->nbytes > LONG_BYTES ? PyEval_SaveThread() : NULL;
    rounds_copy_out(self, memory, flats);
    if (state)
        PyEval_RestoreThread(state);
    if (self->is_long && control_block_lock(self->block) < 0) {
        Py_DECREF(answer);
        return NULL;
    }
    rounds_drop_block(self, block);
    control_block_unlock(self->block);
    return answer;
}

/* With the lock, which is released: open the round of the call if this rank may, and help as long as the call waits for the
 * running one. Returns what `begin` does. */
static PyObject *go_on(Rounds *self, Call *call, const Py_buffer *flats, int64_t aim)
{
    PyObject *missed = rounds_come(self, call, aim) < 0 ? NULL : missed_of(self, call);
    if (missed && call->number && !call->kept[KEPT_NUMBER] && self->head[HEAD_RUNNING] == call->number) {
        if (rounds_help(self) < 0) {
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
    PyObject *answer = missed ? answer_of(self, call, missed) : NULL;
    if (answer && memory)
        return copy_result(self, block, memory, flats, answer);
    leave_lock(self, answer); /* the call waits, or its round has no contributors */
    return answer;
}

/* With the lock, which is released. Returns a tuple, or a number: of the round that `plan` must be called for, or negative,
 * of the blocks that must be provided. After a number the call has contributed nothing. */
static PyObject *begin_locked(Rounds *self, const Py_buffer *flats, double weight, int64_t aim, int64_t came_ns,
                              int64_t lent)
{
    int64_t latest = self->head[HEAD_LATEST], wanted = 0;
    /* Short rounds are opened and published in one critical section, so no rank ever sees one running. */
    if (latest < 0 || latest >= ROUNDS_MAX || (self->head[HEAD_RUNNING] && !self->is_long)) {
        rounds_corrupt("round", latest);
        control_block_abandon(self->block);
        return NULL;
    }
    if ((wanted = wanted_by(self, 1))) {
        control_block_unlock(self->block);
        return PyLong_FromLongLong(wanted);
    }
    bool lends = lent >= 0 && may_lend(self, aim);
    int64_t block = lends ? LENT : rounds_fill_block(self, flats);
    if (!lends && block < 0)
        return NULL;
    if ((wanted = wanted_by(self, 0)) > 0) { /* another round than before the block was filled */
        rounds_drop_block(self, block);
        control_block_unlock(self->block);
        return PyLong_FromLongLong(wanted);
    }
    Call call = {.came_ns = came_ns, .now_ns = clock_ns(), .first_missed = 1};
    rounds_begin_call(self, &call, aim);
    rounds_put(self, &call, block, lends ? lent : self->addresses[block], weight);
    return go_on(self, &call, flats, aim);
}

/* `begin(arrays, weight, aim, unused, lent)`: one call up to its first wait. Drops the blocks `unused` first. `lent` is the
 * address of the one array in the arena; -1 if it is not there. */
static PyObject *begin(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    Rounds *self = (Rounds *)object;
    int64_t came_ns = clock_ns();
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "begin(arrays, weight, aim, unused, lent)");
        return NULL;
    }
    double weight = PyFloat_AsDouble(arguments[1]);
    int64_t aim = PyLong_AsLongLong(arguments[2]);
    int64_t lent = PyLong_AsLongLong(arguments[4]);
    Py_ssize_t unused = PySequence_Size(arguments[3]);
    if (PyErr_Occurred() || unused < 0)
        return NULL;
    if (aim < 1) {
        PyErr_SetString(PyExc_ValueError, "rounds count from 1");
        return NULL;
    }
    if (lent >= 0 && (self->part_count != 1 || self->keeps || !rounds_memory_at(self, lent, self->parts[0].length))) {
        PyErr_SetString(PyExc_ValueError, "the array cannot be lent");
        return NULL;
    }
    /* Before the lock: this may call Python, and another thread may run meanwhile. */
    Py_buffer *flats = hold_arrays(self, arguments[0]);
    if (!flats)
        return NULL;
    PyObject *answer = NULL;
    if (control_block_lock(self->block) == 0) {
        for (Py_ssize_t i = 0; i < unused; i++) {
            PyObject *block = PySequence_GetItem(arguments[3], i);
            /* Blocks of answers that were given back since the last call: to drop them here saves an acquisition of
             * the lock for each. */
            rounds_drop_block(self, block ? PyLong_AsLongLong(block) : NONE);
            Py_XDECREF(block);
        }
        if (PyErr_Occurred())
            leave_lock(self, NULL);
        else
            answer = begin_locked(self, flats, weight, aim, came_ns, lent);
    }
    release_arrays(flats, self->part_count);
    return answer;
}

/* As `begin_locked`, of a call that waits. */
static PyObject *resume_locked(Rounds *self, Call *call, const Py_buffer *flats, int64_t aim)
{
    bool is_over = self->head[HEAD_LATEST] >= call->number;
    int64_t wanted = !is_over && self->has_plans && self->planned != call->number ? call->number : 0;
    call->now_ns = clock_ns();
    if (!wanted && !is_over && rounds_may_open(self, call->number) && free_count(self) < self->group_count)
        wanted = -self->group_count;
    if (!wanted)
        return go_on(self, call, flats, aim);
    control_block_unlock(self->block);
    return PyLong_FromLongLong(wanted);
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
    PyObject *answer = control_block_lock(self->block) == 0 ? resume_locked(self, &call, flats, values[0]) : NULL;
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
    /* A waiter asks this whenever it wakes. A change that the hint has missed wakes it again. */
    int64_t latest = __atomic_load_n(&self->head[HEAD_LATEST], __ATOMIC_RELAXED);
    return PyBool_FromLong(latest >= number || rounds_may_open(self, number) || rounds_wants_help(self));
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

/* `trace(append, make)` */
static PyObject *trace(PyObject *object, PyObject *arguments)
{
    return trace_switch(&((Rounds *)object)->trace, arguments);
}

/* -- the type --------------------------------------------------------------------------------- */

/* Where everything lies among the cells. */
static int lay_out(Rounds *self)
{
    int64_t *cells = self->block->cells, table = table_at(self->size, self->history, self->size);
    self->words = bitmap_words(self->size);
    self->head = cells + self->size;
    self->rows = cells + rows_at(self->size);
    self->results = cells + results_at(self->size);
    self->begun = cells + beginnings_at(self->size, self->history);
    self->counts = cells + counts_at(self->size, self->history);
    self->table = cells + table;
    self->stack = cells + stack_at(table);
    self->addresses = cells + block_addresses_at(table, self->limit);
    self->keepers = cells + keepers_at(table, self->limit);
    self->weights = cells + weights_at(table, self->limit);
    self->bitmaps = cells + bitmaps_at(table, self->limit, self->size);
    if (table + table_cells(self->limit, self->size) == self->block->cell_count)
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
        if (!kernel_at(kernel) || offset < 0 || length < 0 || offset > self->nbytes || length > self->nbytes - offset ||
            length % (long long)kernel_element_size(kernel)) {
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

/* `Rounds(control_block, segments, size, rank, history, limit, nbytes, ranks, drawn, sync_every, sync_offset, keeps, long,
 * cores, parts)` */
static PyObject *create(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"control_block", "segments", "size",  "rank",       "history",     "limit",
                            "nbytes",        "ranks",    "drawn", "sync_every", "sync_offset", "keeps",
                            "long",          "cores",    "parts", NULL};
    const int64_t many = INT64_C(1) << 31; /* so that no sum or product of these overflows */
    PyObject *block, *segments, *parts;
    allocfunc allocate = PyType_GetSlot(type, Py_tp_alloc); /* sets all to zero */
    Rounds *self = (Rounds *)allocate(type, 0);
    if (!self)
        return NULL;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO!llllllpllpplO!:Rounds", names, &block, &PyTuple_Type,
                                     &segments, &self->size, &self->rank, &self->history, &self->limit, &self->nbytes,
                                     &self->ranks, &self->drawn, &self->sync_every, &self->sync_offset, &self->keeps,
                                     &self->is_long, &self->cores, &PyTuple_Type, &parts))
        goto failed;
    if (!is_control_block(block) || self->size < 1 || self->size > 1 << 16 || self->rank < 0 ||
        self->rank >= self->size || self->history < 0 || self->history >= many || self->limit < 1 ||
        self->limit >= many || self->nbytes < 1 || self->ranks < 1 || self->ranks > self->size ||
        self->sync_every < 0 || self->sync_offset < 0 || self->sync_offset >= many || self->cores < 1) {
        PyErr_SetString(PyExc_ValueError, "these are no rounds");
        goto failed;
    }
    self->block = (ControlBlock *)Py_NewRef(block);
    /* Draws and groups are hashes that Python computes: to have them in C, too, would be a second copy of a rule. */
    self->has_plans = self->keeps || self->drawn;
    self->group_count = 1;
    if (lay_out(self) < 0 || read_parts(self, parts) < 0 || hold_segments(self, segments) < 0)
        goto failed;
    self->group_of = PyMem_Calloc((size_t)self->size, sizeof *self->group_of);
    self->is_drawn = PyMem_Calloc((size_t)self->size, 1);
    self->sources = PyMem_Calloc((size_t)self->size, sizeof *self->sources);
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
    Py_VISIT(self->trace.append);
    Py_VISIT(self->trace.make);
    for (int i = 0; i < ATTACHED; i++)
        Py_VISIT(self->attached[i]);
    return 0;
}

static void destroy(PyObject *object)
{
    Rounds *self = (Rounds *)object;
    PyObject_GC_UnTrack(object);
    for (int64_t i = 0; i < self->segment_count; i++)
        PyBuffer_Release(&self->segments[i]);
    PyMem_Free(self->segments);
    PyMem_Free(self->group_of);
    PyMem_Free(self->is_drawn);
    PyMem_Free(self->sources);
    PyMem_Free(self->parts);
    for (int i = 0; i < ATTACHED; i++)
        Py_XDECREF(self->attached[i]);
    if (self->engine.obj)
        PyBuffer_Release(&self->engine);
    trace_forget(&self->trace);
    Py_XDECREF((PyObject *)self->block);
    free_object(object);
}

static PyMethodDef methods[] = {
    {"begin", (PyCFunction)(void (*)(void))begin, METH_FASTCALL, NULL},
    {"resume", (PyCFunction)(void (*)(void))resume, METH_FASTCALL, NULL},
    {"is_needed", is_needed, METH_O, NULL},
    {"plan", plan, METH_VARARGS, NULL},
    {"attach", rounds_attach, METH_VARARGS, NULL},
    {"at_once", rounds_at_once, METH_O, NULL},
    {"trace", trace, METH_VARARGS, NULL},
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
