/* The reduction of arrays that are not registered, piece by piece through slots of two halves.
 *
 * The counterpart of `_python_performer` (asyncoll/algorithms/dense/pieces.py), which describes the steps. This one
 * performs as many steps as it can without sleeping.
 */
#include "native.h"

#include <sched.h>
#include <string.h>

enum { STRIP = 1 << 15 }; /* bytes that are reduced and then copied to the array while they are in the cache */

typedef struct {
    PyObject_HEAD
    ControlBlock *block;
    int64_t first;  /* the cell of the steps of rank 0 */
    int64_t stride; /* cells from one rank's to the next's */
    int size, rank;
    Py_buffer array;
    Py_buffer *slots; /* by rank */
    void **operands;  /* by rank, during a reduction */
    int64_t piece;    /* bytes */
    Kernel kernel;
    int64_t element; /* bytes */
    int64_t divisor;
    int64_t polls;
    int is_wanted;
    int held; /* slots whose buffers are held */
} Pieces;

typedef struct {
    int64_t first, bytes;
} Range;

/* -- one step --------------------------------------------------------------------------------- */

static Range piece_at(const Pieces *self, int64_t index)
{
    int64_t first = index * self->piece;
    return (Range){first, first < self->array.len ? least(self->piece, self->array.len - first) : 0};
}

/* The share of `rank`, relative to the piece. */
static Range share_of(const Pieces *self, int rank, Range piece)
{
    int64_t first = share_at(rank, self->size, piece.bytes);
    return (Range){first, share_at(rank + 1, self->size, piece.bytes) - first};
}

/* The half of the slot of `rank` for a piece. `create` has checked that the piece fits. */
static char *half_of(const Pieces *self, int rank, int64_t index)
{
    return (char *)self->slots[rank].buf + half_at(index, self->piece);
}

static char *own_piece(const Pieces *self, Range piece)
{
    return (char *)self->array.buf + piece.first;
}

static void copy_in(const Pieces *self, int64_t index)
{
    Range piece = piece_at(self, index);
    if (!piece.bytes)
        return;
    Range share = share_of(self, self->rank, piece);
    int64_t last = share.first + share.bytes;
    char *half = half_of(self, self->rank, index), *own = own_piece(self, piece);
    /* All but the own share, which this rank reduces out of its array: the others never read it. */
    memcpy(half, own, share.first);
    memcpy(half + last, own + last, piece.bytes - last);
}

static void reduce_share(const Pieces *self, int64_t index)
{
    Range piece = piece_at(self, index), share = share_of(self, self->rank, piece);
    int64_t last = share.first + share.bytes;
    char *half = half_of(self, self->rank, index), *own = own_piece(self, piece);
    /* The result goes to two places, so a strip is copied to the second one while it is in the cache. */
    for (int64_t at = share.first; at < last; at += STRIP) {
        int64_t bytes = least(STRIP, last - at);
        for (int rank = 0; rank < self->size; rank++)
            self->operands[rank] = (rank == self->rank ? own : half_of(self, rank, index)) + at;
        self->kernel(half + at, self->operands, self->size, bytes / self->element, self->divisor);
        if (self->is_wanted)
            memcpy(own + at, half + at, bytes);
        pass_point(PIECE_REDUCED);
    }
}

static void copy_out(const Pieces *self, int64_t index)
{
    if (!self->is_wanted)
        return;
    Range piece = piece_at(self, index);
    char *own = own_piece(self, piece);
    for (int i = 1; i < self->size; i++) {
        int rank = (self->rank + i) % self->size; /* each rank begins with another one's */
        Range share = share_of(self, rank, piece);
        memcpy(own + share.first, half_of(self, rank, index) + share.first, share.bytes);
    }
}

static void perform_step(const Pieces *self, int64_t step)
{
    int64_t index = step / STEPS;
    if (step % STEPS == COPY_IN) {
        copy_in(self, index + 1);
        pass_point(PIECE_COPIED_IN);
    } else if (step % STEPS == REDUCE_SHARE) {
        reduce_share(self, index);
    } else {
        copy_out(self, index);
        pass_point(PIECE_COPIED_OUT);
    }
}

/* -- steps of all ranks ----------------------------------------------------------------------- */

/* Whether all ranks but this one have done so many steps. Without the lock: a hint. */
static bool others_have_done(const Pieces *self, int64_t steps)
{
    for (int rank = 0; rank < self->size; rank++) {
        const int64_t *cell = &self->block->cells[self->first + rank * self->stride];
        if (rank != self->rank && __atomic_load_n(cell, __ATOMIC_RELAXED) < steps)
            return false;
    }
    return true;
}

static bool poll_others(const Pieces *self, int64_t steps)
{
    for (int64_t poll = 0; poll < self->polls; poll++) {
        if (others_have_done(self, steps))
            return true;
        sched_yield();
    }
    return others_have_done(self, steps);
}

/* Note that this rank has done `steps` steps. Sleepers wake if it is the last one to have done so many: they wait for
 * all ranks. Returns 1 if all have done what the next step needs, 0 if not, and -1 with an exception. The lock orders
 * the memory of the slots. */
static int publish(const Pieces *self, int64_t steps)
{
    if (control_block_lock(self->block) < 0)
        return -1;
    /* Under the lock, although only this rank writes the cell: a reader that has acquired the lock since sees what
     * this rank has written into its slot before. */
    self->block->cells[self->first + self->rank * self->stride] = steps;
    pass_point(PIECE_COUNTED);
    if (others_have_done(self, steps))
        control_block_wake(self->block, INT64_MAX);
    bool is_met = others_have_done(self, needed(steps));
    control_block_unlock(self->block);
    return is_met;
}

/* Wait for a short time for the condition of `step`. Returns as `publish`. */
static int await_condition(const Pieces *self, int64_t step)
{
    /* The other ranks of this process may need the GIL for the step that this one waits for. */
    PyThreadState *state = PyEval_SaveThread();
    bool is_met = poll_others(self, needed(step));
    PyEval_RestoreThread(state);
    if (!is_met)
        return 0;
    pass_point(PIECE_AWAITED);
    if (control_block_lock(self->block) < 0)
        return -1;
    is_met = others_have_done(self, needed(step));
    control_block_unlock(self->block);
    return is_met;
}

/* `perform(step, stop)` -> the number of the next step, which is at most `stop` */
static PyObject *perform(PyObject *object, PyObject *arguments)
{
    Pieces *self = (Pieces *)object;
    long long first, stop;
    if (!PyArg_ParseTuple(arguments, "LL:perform", &first, &stop))
        return NULL;
    int64_t step = first, end = least(stop, steps_of(self->array.len, self->piece));
    int is_met = step >= 0;
    while (is_met > 0 && step < end) {
        PyThreadState *state = PyEval_SaveThread();
        perform_step(self, step);
        PyEval_RestoreThread(state);
        /* Each step is told at once: the others wait for this rank with their next one. */
        is_met = publish(self, ++step);
        if (is_met == 0 && step < end)
            is_met = await_condition(self, step);
    }
    return is_met < 0 ? NULL : PyLong_FromLongLong(step);
}

/* -- the type --------------------------------------------------------------------------------- */

/* Hold the slots. Returns 0, or -1 with an exception set. */
static int hold_slots(Pieces *self, PyObject *slots)
{
    self->slots = PyMem_Calloc(self->size, sizeof(Py_buffer));
    self->operands = PyMem_Calloc(self->size, sizeof(void *));
    if (!self->slots || !self->operands) {
        PyErr_NoMemory();
        return -1;
    }
    while (self->held < self->size) {
        PyObject *slot = PySequence_GetItem(slots, self->held);
        int failed = slot ? PyObject_GetBuffer(slot, &self->slots[self->held], PyBUF_WRITABLE) : -1;
        Py_XDECREF(slot);
        if (failed)
            return -1;
        self->held++;
        if (self->slots[self->held - 1].len < least(self->array.len, 2 * self->piece)) {
            PyErr_SetString(PyExc_ValueError, "a slot is too small");
            return -1;
        }
    }
    return 0;
}

static bool is_consistent(const Pieces *self)
{
    int64_t cells = self->block->cell_count;
    return self->size >= 1 && self->rank >= 0 && self->rank < self->size && self->piece > 0 &&
           self->piece <= INT64_MAX / 4 && self->piece % ALIGNED == 0 && self->first >= 0 && self->stride >= 1 &&
           self->first < cells && self->stride <= (cells - 1 - self->first) / (self->size > 1 ? self->size - 1 : 1) &&
           self->kernel && self->array.len % self->element == 0 && self->divisor >= 1;
}

/* `Pieces(control_block, first, stride, rank, slots, array, piece, kernel, divisor, is_wanted, polls)` */
static PyObject *create(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    PyObject *block, *slots, *array;
    long long first, stride, piece, divisor, polls;
    int rank, kernel, is_wanted;
    if (keywords && PyDict_Size(keywords)) {
        PyErr_SetString(PyExc_TypeError, "Pieces takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(arguments, "OLLiOOLiLpL:Pieces", &block, &first, &stride, &rank, &slots, &array, &piece,
                          &kernel, &divisor, &is_wanted, &polls))
        return NULL;
    Py_ssize_t size = PySequence_Size(slots);
    if (size < 0)
        return NULL;
    if (!is_control_block(block) || size > INT16_MAX) {
        PyErr_SetString(PyExc_ValueError, "there is no control block, or there are too many ranks");
        return NULL;
    }
    allocfunc allocate = PyType_GetSlot(type, Py_tp_alloc); /* sets all to zero */
    Pieces *self = (Pieces *)allocate(type, 0);
    if (!self)
        return NULL;
    self->block = (ControlBlock *)Py_NewRef(block);
    self->first = first;
    self->stride = stride;
    self->size = (int)size;
    self->rank = rank;
    self->piece = piece;
    self->kernel = kernel_at(kernel);
    self->element = (int64_t)kernel_element_size(kernel);
    self->divisor = divisor;
    self->polls = polls;
    self->is_wanted = is_wanted;
    if (PyObject_GetBuffer(array, &self->array, is_wanted ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
        goto failed;
    if (!is_consistent(self)) {
        PyErr_SetString(PyExc_ValueError, "these are no pieces");
        goto failed;
    }
    if (hold_slots(self, slots) == 0)
        return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static int traverse(PyObject *object, visitproc visit, void *arg)
{
    Pieces *self = (Pieces *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->block);
    Py_VISIT(self->array.obj);
    return 0;
}

static void destroy(PyObject *object)
{
    Pieces *self = (Pieces *)object;
    PyObject_GC_UnTrack(object);
    while (self->held)
        PyBuffer_Release(&self->slots[--self->held]);
    if (self->array.obj)
        PyBuffer_Release(&self->array);
    PyMem_Free(self->slots);
    PyMem_Free(self->operands);
    Py_XDECREF((PyObject *)self->block);
    free_object(object);
}

static PyMethodDef methods[] = {
    {"perform", perform, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_new, create}, {Py_tp_dealloc, destroy}, {Py_tp_traverse, traverse}, {Py_tp_methods, methods}, {0, NULL},
};

PyType_Spec pieces_spec = {
    .name = "asyncoll._core.native.Pieces",
    .basicsize = sizeof(Pieces),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = type_slots,
};
