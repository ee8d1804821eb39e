/* Short meetings of all ranks of a communicator: one rendezvous at which each rank shows a short array.
 *
 * The counterpart of `PythonMeetings` (asyncoll/algorithms/dense/meetings.py), on the cells that
 * asyncoll/algorithms/dense/staging.py declares. A meeting has three steps, each a method here: a rank arrives, the last
 * one publishes the result of all, and the others complete with it.
 *
 * A rank shows a copy of its array, in its memory for short arrays. From `shown_min` bytes on it writes the address of
 * what it shows into its part of the record: a registered array is then shown where it is. The rank that reduces writes
 * the result to all that is shown.
 */
#include "native.h"

#include <linux/futex.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* asyncoll/algorithms/dense/staging.py: the cells of a record, and how many a record has. */
enum { TAG, ARRIVED, DIRECT, CLAIMED, DONE, LEFT, FINGERPRINT, FIRST, WITHDRAWN, SLEEPERS, HEAD };
enum { PART = 4, PART_ADDRESS = 0, PART_BYTES, PART_BUSY };

/* A copy of so many bytes takes less time than to release the lock and to acquire it again. */
enum { COPIED_UNDER_LOCK = 4096 };

struct Meetings {
    PyObject_HEAD
    ControlBlock *block;
    PyObject *view;    /* view(address, nbytes): the memory of any rank */
    PyObject *differs; /* the class of the error for a rank that has made another call */
    Py_buffer *areas;  /* by rank: its short arrays, once they have been asked for */
    void **arrays;     /* by rank, while this rank reduces; the GIL guards it */
    int64_t size, rank, calls, short_bytes, shown_min;
    int64_t stride;     /* cells of a record */
    int64_t addresses;  /* first of `size` cells: the address of each rank's short arrays */
    int64_t begun;      /* first of `size` cells: each rank's newest call */
    int64_t known_free; /* the tag of a meeting whose record is known to be free */
};

typedef struct {
    int64_t *cells; /* of the record */
    int64_t tag;
    int64_t turn;
} Record;

static Record record_of(const Meetings *self, int64_t number)
{
    const int64_t numbers = 1 << 30; /* _NUMBERS, and _tag: asyncoll/algorithms/dense/staging.py */
    int64_t turn = 2 * (number % self->calls);
    return (Record){self->block->cells + turn * self->stride, (number % numbers + 1) << 32, turn};
}

static bool is_free(const Meetings *self, Record record)
{
    int64_t tag = record.cells[TAG];
    return tag == 0 || tag == record.tag || record.cells[LEFT] == self->size;
}

/* Note whether the record of call `number` is free. The caller holds the lock. `is_clear` says that no earlier call is
 * under way at this rank: one may come back to the record. */
static void look_ahead(Meetings *self, int64_t number, bool is_clear)
{
    Record record = record_of(self, number);
    if (is_clear && is_free(self, record))
        self->known_free = record.tag;
}

/* The memory of `rank` for short arrays at record `turn`; NULL with an exception if there is none. The address is in
 * the cells since `rank` first arrived with a short array. */
static char *short_array(Meetings *self, int64_t rank, int64_t turn)
{
    Py_buffer *area = &self->areas[rank];
    int64_t bytes = 2 * self->calls * self->short_bytes;
    if (!area->buf) {
        PyObject *memory = PyObject_CallFunction(
            self->view, "LL", (long long)self->block->cells[self->addresses + rank], (long long)bytes);
        int failed = memory ? PyObject_GetBuffer(memory, area, PyBUF_WRITABLE) : -1;
        Py_XDECREF(memory);
        if (failed)
            return NULL;
        if (area->len != bytes) {
            PyBuffer_Release(area);
            PyErr_Format(PyExc_ValueError, "rank %lld has no memory for short arrays", (long long)rank);
            return NULL;
        }
    }
    return (char *)area->buf + turn * self->short_bytes;
}

/* The part of `rank` in a record. */
static int64_t *part_of(Record record, int64_t rank)
{
    return record.cells + HEAD + PART * rank;
}

/* Enter the meeting. The first rank opens it: it clears the cells. The caller holds the lock. Returns false if another
 * rank has made another call with the same number. */
static bool open_or_join(const Meetings *self, Record record, int64_t fingerprint)
{
    if (record.cells[TAG] == record.tag)
        return record.cells[FINGERPRINT] == fingerprint;
    memset(record.cells, 0, HEAD * sizeof(int64_t));
    for (int64_t rank = 0; rank < self->size; rank++) /* an earlier rendezvous may have counted something there */
        part_of(record, rank)[PART_BUSY] = 0;
    record.cells[TAG] = record.tag;
    record.cells[FINGERPRINT] = fingerprint;
    record.cells[FIRST] = self->rank;
    return true;
}

/* `array`, or no bytes for None, as a contiguous buffer. */
static int get_bytes(PyObject *array, Py_buffer *bytes, int flags)
{
    if (array == Py_None) {
        memset(bytes, 0, sizeof *bytes);
        return 0;
    }
    return PyObject_GetBuffer(array, bytes, flags);
}

static void free_bytes(Py_buffer *bytes)
{
    if (bytes->obj)
        PyBuffer_Release(bytes);
}

static bool check_length(const Meetings *self, const Py_buffer *bytes)
{
    if (bytes->len <= self->short_bytes)
        return true;
    PyErr_Format(PyExc_ValueError, "%zd bytes are not short", bytes->len);
    return false;
}

static int64_t short_address(const Meetings *self, int64_t turn)
{
    return self->block->cells[self->addresses + self->rank] + turn * self->short_bytes;
}

/* Show `len` bytes: at `address`, which is the caller's own memory, or in the memory for short arrays if it is 0. The
 * caller holds the lock. */
static void show(Meetings *self, Record record, int64_t address, Py_ssize_t len)
{
    int64_t *part = part_of(record, self->rank);
    part[PART_ADDRESS] = address ? -address : short_address(self, record.turn);
    part[PART_BYTES] = len;
    part[PART_BUSY] = 0;
    record.cells[DIRECT] += address != 0;
}

/* Count this rank. The caller holds the lock. Returns LAST or WAITING, or -1 if the ranks have made different calls. */
static int count_arrival(Meetings *self, Record record, int64_t number, int64_t fingerprint, int64_t address,
                         Py_ssize_t len)
{
    if (!open_or_join(self, record, fingerprint))
        return -1;
    self->block->cells[self->begun + self->rank] = number;
    if (len && len >= self->shown_min)
        show(self, record, address, len);
    if (++record.cells[ARRIVED] < self->size)
        return WAITING;
    if (record.cells[WITHDRAWN])
        return WAITING; /* for the failure of the communicator: a rank has taken its memory back */
    part_of(record, self->rank)[PART_BUSY] = 1; /* a rank that withdraws its memory waits for this one */
    return LAST;
}

int meetings_is_free(Meetings *self, int64_t number)
{
    Record record = record_of(self, number);
    if (self->known_free == record.tag)
        return 1;
    if (control_block_lock(self->block) < 0)
        return -1;
    bool free = is_free(self, record);
    control_block_unlock(self->block);
    return free;
}

/* Arrive at a meeting whose record is free. */
static int arrive_with(Meetings *self, int64_t number, int64_t fingerprint, int64_t address, const Py_buffer *bytes)
{
    Record record = record_of(self, number);
    if (bytes->len && !address) {
        char *mine = short_array(self, self->rank, record.turn);
        if (!mine)
            return -1;
        memcpy(mine, bytes->buf, bytes->len);
    }
    if (control_block_lock(self->block) < 0)
        return -1;
    int state = count_arrival(self, record, number, fingerprint, address, bytes->len);
    int64_t first = record.cells[FIRST];
    control_block_unlock(self->block);
    if (state < 0) {
        PyObject *error = PyObject_CallFunction(self->differs, "L", (long long)first);
        if (error)
            PyErr_SetObject(self->differs, error);
        Py_XDECREF(error);
    }
    return state;
}

static int publish_result(Meetings *self, int64_t number, int64_t done, bool is_clear)
{
    Record record = record_of(self, number);
    if (control_block_lock(self->block) < 0)
        return -1;
    record.cells[LEFT]++;
    record.cells[DONE] = done;
    part_of(record, self->rank)[PART_BUSY] = 0;
    bool is_futex_wanted = record.cells[SLEEPERS] > 0;
    control_block_wake(self->block, INT64_MAX);
    look_ahead(self, number + 1, is_clear);
    control_block_unlock(self->block);
    if (is_futex_wanted)
        control_block_wake_futex(&record.cells[DONE]);
    return 0;
}

/* Reduce the short arrays of all ranks into that of rank 0, in their order, and copy the result into `bytes`. */
static int reduce_copies(Meetings *self, Record record, int kernel, int64_t divisor, const Py_buffer *bytes)
{
    for (int64_t rank = 0; rank < self->size; rank++) /* may call Python, and other threads may run meanwhile */
        if (!short_array(self, rank, record.turn))
            return -1;
    for (int64_t rank = 0; rank < self->size; rank++)
        self->arrays[rank] = short_array(self, rank, record.turn);
    size_t elements = (size_t)bytes->len / kernel_element_size(kernel);
    kernel_at(kernel)(self->arrays[0], self->arrays, (int)self->size, elements, divisor);
    memcpy(bytes->buf, self->arrays[0], bytes->len);
    return 0;
}

/* What the ranks show at a meeting, held during the reduction. */
typedef struct {
    Py_buffer *views;
    void **arrays;
} Shown;

static void release(const Meetings *self, Shown *shown)
{
    for (int64_t rank = 0; shown->views && rank < self->size; rank++)
        free_bytes(&shown->views[rank]);
    PyMem_Free(shown->views);
    PyMem_Free(shown->arrays);
}

/* Hold what `rank` shows, which must be `len` bytes. Returns 0, or -1 with an exception. */
static int hold(const Meetings *self, Record record, Shown *shown, int64_t rank, Py_ssize_t len)
{
    const int64_t *part = part_of(record, rank);
    if (part[PART_ADDRESS] == INT64_MIN || part[PART_ADDRESS] == 0) {
        PyErr_Format(PyExc_ValueError, "rank %lld shows no memory", (long long)rank);
        return -1;
    }
    int64_t address = part[PART_ADDRESS] < 0 ? -part[PART_ADDRESS] : part[PART_ADDRESS];
    PyObject *memory = PyObject_CallFunction(self->view, "LL", (long long)address, (long long)len);
    int failed = memory ? PyObject_GetBuffer(memory, &shown->views[rank], PyBUF_WRITABLE) : -1;
    Py_XDECREF(memory);
    if (failed)
        return -1;
    shown->arrays[rank] = shown->views[rank].buf;
    if (shown->views[rank].len == len && part[PART_BYTES] == len)
        return 0;
    PyErr_Format(PyExc_ValueError, "rank %lld shows memory that does not exist", (long long)rank);
    return -1;
}

/* Reduce what all ranks show into what rank 0 shows, and write the result to all of it. Without the GIL. */
static int reduce_shown(Meetings *self, Record record, int kernel, int64_t divisor, const Py_buffer *bytes)
{
    Shown shown = {PyMem_Calloc((size_t)self->size, sizeof(Py_buffer)),
                   PyMem_Calloc((size_t)self->size, sizeof(void *))};
    int failed = shown.views && shown.arrays ? 0 : -1;
    if (failed)
        PyErr_NoMemory();
    for (int64_t rank = 0; !failed && rank < self->size; rank++)
        failed = hold(self, record, &shown, rank, bytes->len);
    if (!failed) {
        PyThreadState *state = PyEval_SaveThread();
        size_t elements = (size_t)bytes->len / kernel_element_size(kernel);
        kernel_at(kernel)(shown.arrays[0], shown.arrays, (int)self->size, elements, divisor);
        for (int64_t rank = 1; rank < self->size; rank++)
            memcpy(shown.arrays[rank], shown.arrays[0], bytes->len);
        if (part_of(record, self->rank)[PART_ADDRESS] > 0)
            memcpy(bytes->buf, shown.arrays[0], bytes->len);
        PyEval_RestoreThread(state);
    }
    release(self, &shown);
    return failed;
}

/* After an exception: a rank that withdraws its memory must not wait for this one. */
static void stop_reducing(Meetings *self, Record record)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (control_block_lock(self->block) == 0) {
        part_of(record, self->rank)[PART_BUSY] = 0;
        control_block_wake(self->block, INT64_MAX);
        control_block_unlock(self->block);
    } else {
        PyErr_Clear(); /* the lock is lost, and so is the communicator: the first error says why */
    }
    PyErr_Restore(type, value, trace);
}

/* What the last rank does. It returns LAST if the reduction is left to Python, -1 with an exception, and else OVER. */
static int end_as_last(Meetings *self, int64_t number, int kernel, int64_t divisor, bool is_clear,
                       const Py_buffer *bytes)
{
    Record record = record_of(self, number);
    if (bytes->len) {
        if (!kernel_at(kernel))
            return LAST;
        int failed = bytes->len >= self->shown_min ? reduce_shown(self, record, kernel, divisor, bytes)
                                                   : reduce_copies(self, record, kernel, divisor, bytes);
        if (failed) {
            stop_reducing(self, record);
            return -1;
        }
    }
    return publish_result(self, number, bytes->len ? bytes->len : 1, is_clear) < 0 ? -1 : OVER;
}

int meetings_arrive(Meetings *self, int64_t number, const Meeting *meeting, int64_t address, const Py_buffer *bytes,
                    bool is_clear)
{
    if (!check_length(self, bytes))
        return -1;
    int state = arrive_with(self, number, meeting->fingerprint, bytes->len < self->shown_min ? 0 : address, bytes);
    if (state == LAST)
        state = end_as_last(self, number, meeting->kernel, meeting->divisor, is_clear, bytes);
    return state;
}

/* `arrive(number, fingerprint, array, address, kernel, divisor, is_clear)` -> WAITING, LAST, NOT_FREE or OVER */
static PyObject *arrive(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    Meetings *self = (Meetings *)object;
    Py_buffer bytes;
    if (count != 7) {
        PyErr_SetString(PyExc_TypeError, "arrive(number, fingerprint, array, address, kernel, divisor, is_clear)");
        return NULL;
    }
    int64_t number = PyLong_AsLongLong(arguments[0]), address = PyLong_AsLongLong(arguments[3]);
    Meeting meeting = {.fingerprint = PyLong_AsLongLong(arguments[1]),
                       .kernel = (int)PyLong_AsLong(arguments[4]),
                       .divisor = PyLong_AsLongLong(arguments[5])};
    if (PyErr_Occurred() || get_bytes(arguments[2], &bytes, PyBUF_WRITABLE) < 0)
        return NULL;
    int state = meetings_is_free(self, number);
    if (state == 0)
        state = NOT_FREE;
    else if (state > 0)
        state = meetings_arrive(self, number, &meeting, address, &bytes, arguments[6] == Py_True);
    free_bytes(&bytes);
    return state < 0 ? NULL : PyLong_FromLong(state);
}

/* `publish(number, done, is_clear)`: the last rank has put the result of all into the memory of rank 0. It reports
 * `done`, which the others wait for, and leaves. */
static PyObject *publish(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    Meetings *self = (Meetings *)object;
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "publish(number, done, is_clear)");
        return NULL;
    }
    int64_t number = PyLong_AsLongLong(arguments[0]), done = PyLong_AsLongLong(arguments[1]);
    if (PyErr_Occurred())
        return NULL;
    if (publish_result(self, number, done, arguments[2] == Py_True) < 0)
        return NULL;
    Py_RETURN_NONE;
}

int meetings_complete(Meetings *self, int64_t number, int64_t done, const Py_buffer *bytes, bool is_clear)
{
    Record record = record_of(self, number);
    char *result = NULL;
    if (!check_length(self, bytes) || control_block_lock(self->block) < 0)
        return -1;
    if (record.cells[DONE] != done) {
        control_block_unlock(self->block);
        return 0;
    }
    bool is_shown = bytes->len && bytes->len >= self->shown_min;
    bool is_in_place = is_shown && part_of(record, self->rank)[PART_ADDRESS] < 0;
    /* The result of copies is in the memory of rank 0. Elsewhere it is where this rank has shown its array. */
    if (bytes->len && !is_in_place && !(result = short_array(self, is_shown ? self->rank : 0, record.turn))) {
        control_block_unlock(self->block);
        return -1;
    }
    if (result && bytes->len > COPIED_UNDER_LOCK) {
        control_block_unlock(self->block);
        memcpy(bytes->buf, result, bytes->len);
        if (control_block_lock(self->block) < 0)
            return -1;
    } else if (result) {
        memcpy(bytes->buf, result, bytes->len);
    }
    if (++record.cells[LEFT] == self->size)
        control_block_wake(self->block, INT64_MAX);
    look_ahead(self, number + 1, is_clear);
    control_block_unlock(self->block);
    return 1;
}

/* `complete(number, done, array, is_clear)`: copy the result into `array`, and leave. Returns False if it is not there. */
static PyObject *complete(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    Meetings *self = (Meetings *)object;
    Py_buffer bytes;
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "complete(number, done, array, is_clear)");
        return NULL;
    }
    int64_t number = PyLong_AsLongLong(arguments[0]), done = PyLong_AsLongLong(arguments[1]);
    if (PyErr_Occurred() || get_bytes(arguments[2], &bytes, PyBUF_WRITABLE) < 0)
        return NULL;
    int is_over = meetings_complete(self, number, done, &bytes, arguments[3] == Py_True);
    free_bytes(&bytes);
    return is_over < 0 ? NULL : PyBool_FromLong(is_over);
}

/* -- waiting ---------------------------------------------------------------------------------- */

/* A cell without the lock: a hint only. */
static int64_t peek(const int64_t *cell)
{
    return __atomic_load_n(cell, __ATOMIC_RELAXED);
}

static bool poll_cell(const int64_t *cell, int64_t wanted, int64_t polls)
{
    for (int64_t poll = 0; poll < polls; poll++) {
        if (peek(cell) == wanted)
            return true;
        sched_yield();
    }
    return peek(cell) == wanted;
}

int meetings_look(Meetings *self, int64_t number, int64_t done, int64_t polls, int64_t sleep_ns)
{
    int64_t *cell = record_of(self, number).cells + DONE;
    if (peek(cell) == done)
        return 1;
    PyThreadState *state = PyEval_SaveThread();
    bool is_there = poll_cell(cell, done, polls);
    PyEval_RestoreThread(state);
    if (is_there || sleep_ns <= 0)
        return is_there;
    if (control_block_lock(self->block) < 0)
        return -1;
    uint32_t before = (uint32_t)*cell;
    is_there = *cell == done;
    /* Under the lock, so that the rank that publishes either finds this sleeper, or has published before. */
    record_of(self, number).cells[SLEEPERS] += !is_there;
    control_block_unlock(self->block);
    if (is_there)
        return 1;
    const struct timespec time = {sleep_ns / 1000000000, sleep_ns % 1000000000};
    state = PyEval_SaveThread();
    syscall(SYS_futex, (const uint32_t *)cell, FUTEX_WAIT, before, &time, NULL, 0); /* a signal ends it, too */
    PyEval_RestoreThread(state);
    return peek(cell) == done;
}

/* `look(number, done, polls, sleep_ns)`: block for a short time until the result is there. Returns whether it seems to
 * be: `complete` knows. */
static PyObject *look(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "look(number, done, polls, sleep_ns)");
        return NULL;
    }
    int64_t number = PyLong_AsLongLong(arguments[0]), done = PyLong_AsLongLong(arguments[1]);
    int64_t polls = PyLong_AsLongLong(arguments[2]), sleep_ns = PyLong_AsLongLong(arguments[3]);
    if (PyErr_Occurred())
        return NULL;
    int is_there = meetings_look((Meetings *)object, number, done, polls, sleep_ns);
    return is_there < 0 ? NULL : PyBool_FromLong(is_there);
}

/* -- the type --------------------------------------------------------------------------------- */

/* `Meetings(control_block, view, differs, size, rank, calls, short_bytes, shown_min)` */
static PyObject *create(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    PyObject *block, *view, *differs;
    long long size, rank, calls, short_bytes, shown_min;
    static char *names[] = {"control_block", "view",        "differs",   "size", "rank",
                            "calls",         "short_bytes", "shown_min", NULL};
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OOOLLLLL:Meetings", names, &block, &view, &differs, &size,
                                     &rank, &calls, &short_bytes, &shown_min))
        return NULL;
    if (!is_control_block(block) || size < 1 || rank < 0 || rank >= size || calls < 1 || short_bytes < 0) {
        PyErr_SetString(PyExc_ValueError, "these are no meetings");
        return NULL;
    }
    int64_t stride = HEAD + PART * size, addresses = 2 * calls * stride;
    if (addresses + 2 * size > ((ControlBlock *)block)->cell_count) {
        PyErr_SetString(PyExc_ValueError, "the control block has too few cells");
        return NULL;
    }
    allocfunc allocate = PyType_GetSlot(type, Py_tp_alloc); /* sets all to zero */
    Meetings *self = (Meetings *)allocate(type, 0);
    if (!self)
        return NULL;
    self->block = (ControlBlock *)Py_NewRef(block);
    self->view = Py_NewRef(view);
    self->differs = Py_NewRef(differs);
    self->size = size;
    self->rank = rank;
    self->calls = calls;
    self->short_bytes = short_bytes;
    self->shown_min = shown_min;
    self->stride = stride;
    self->addresses = addresses;
    self->begun = addresses + size;
    self->areas = PyMem_Calloc((size_t)size, sizeof(Py_buffer));
    self->arrays = PyMem_Calloc((size_t)size, sizeof(void *));
    if (!self->areas || !self->arrays) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static int traverse(PyObject *object, visitproc visit, void *arg)
{
    Meetings *self = (Meetings *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->block);
    Py_VISIT(self->view);
    Py_VISIT(self->differs);
    return 0;
}

/* The control block stays until the end: a method that runs in a finalizer would use it. */
static int clear(PyObject *object)
{
    Meetings *self = (Meetings *)object;
    Py_CLEAR(self->view);
    Py_CLEAR(self->differs);
    return 0;
}

static void destroy(PyObject *object)
{
    Meetings *self = (Meetings *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    clear(object);
    for (int64_t rank = 0; self->areas && rank < self->size; rank++)
        free_bytes(&self->areas[rank]);
    PyMem_Free(self->areas);
    PyMem_Free(self->arrays);
    Py_XDECREF((PyObject *)self->block);
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"arrive", (PyCFunction)(void (*)(void))arrive, METH_FASTCALL, NULL},
    {"publish", (PyCFunction)(void (*)(void))publish, METH_FASTCALL, NULL},
    {"complete", (PyCFunction)(void (*)(void))complete, METH_FASTCALL, NULL},
    {"look", (PyCFunction)(void (*)(void))look, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, create},  {Py_tp_dealloc, destroy}, {Py_tp_traverse, traverse},
    {Py_tp_clear, clear}, {Py_tp_methods, methods}, {0, NULL},
};

PyType_Spec meetings_spec = {
    .name = "asyncoll._core.native.Meetings",
    .basicsize = sizeof(Meetings),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

bool is_meetings(PyObject *object)
{
    return PyType_GetSlot(Py_TYPE(object), Py_tp_new) == create;
}

int64_t meetings_calls(const Meetings *self)
{
    return self->calls;
}

int64_t meetings_shown_min(const Meetings *self)
{
    return self->shown_min;
}

bool meetings_has_short_arrays(const Meetings *self)
{
    return self->block->cells[self->addresses + self->rank] != 0;
}
