/* The lock of a control block in shared memory, and the doorbells of the ranks that sleep until its cells change.
 *
 * The counterpart of `ControlBlock` (asyncoll/transport/control_block.py) over a `RobustMutex`
 * (asyncoll/transport/memory/mutex.py). Both work on the same memory at the same time. What is frequent is here; what is
 * rare (waiting long, a dead owner, an exception inside a critical section) is left to the mutex in Python.
 */
#include "native.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <structmember.h>
#include <sys/syscall.h>
#include <unistd.h>

/* A critical section takes less than a microsecond in C and a few in Python. So a waiter first looks for about one
 * microsecond with the GIL, and then yields its core a few times without it. After that it sleeps, in Python. */
enum { LOOKS = 40, YIELDS = 8 };

static inline void pause_briefly(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Try to lock, and sign. Returns the error. May be called without the GIL: a thread that waits for it may be ended there.
 * If the process dies before it has signed, `RobustMutex._dead_rank` finds the rank. */
static inline int try_lock(ControlBlock *self)
{
    int failure = pthread_mutex_trylock(self->mutex);
    if (failure != EBUSY)
        pass_point(LOCK_TAKEN);
    if (!failure && *self->holder >= 0)
        *self->holder = signed_by(self->local_rank);
    return failure;
}

/* Try to lock while another thread holds the lock. Returns the error of the last attempt. */
static int lock_soon(ControlBlock *self)
{
    int failure = EBUSY;
    for (int look = 0; look < LOOKS && failure == EBUSY; look++) {
        pause_briefly();
        failure = try_lock(self);
    }
    if (failure != EBUSY)
        return failure;
    /* The owner may be a thread of this process that waits for the GIL. */
    PyThreadState *state = PyEval_SaveThread();
    for (int yield = 0; yield < YIELDS && failure == EBUSY; yield++) {
        sched_yield();
        failure = try_lock(self);
    }
    PyEval_RestoreThread(state);
    return failure;
}

/* Call `method` of `object`. Returns 0, or -1 with an exception set. */
static int call(PyObject *object, const char *method)
{
    PyObject *result = PyObject_CallMethod(object, method, NULL);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* An injection point of the fault tests. */
static int pass(ControlBlock *self)
{
    if (!self->passing || self->passing == Py_None)
        return 0;
    PyObject *result = PyObject_CallNoArgs(self->passing);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

void control_block_abandon(ControlBlock *self)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    /* No doorbell rings: the cells may be half changed. The next rank that acquires the lock reports the loss. */
    self->ringing_count = 0;
    if (call(self->mutex_in_python, "abandon") < 0)
        PyErr_WriteUnraisable((PyObject *)self);
    PyErr_Restore(type, value, trace);
}

/* The end of an acquisition whose last attempt returned `failure`: waits in Python if the lock is still held. */
static int complete_lock(ControlBlock *self, int failure)
{
    if (failure || *self->holder < 0) {
        PyObject *result = PyObject_CallMethod(self->mutex_in_python, "resume", "i", failure);
        if (!result) { /* perhaps of a signal handler; no cell has changed */
            PyObject *type, *value, *trace;
            PyErr_Fetch(&type, &value, &trace);
            if (call(self->mutex_in_python, "give_back") < 0)
                PyErr_WriteUnraisable((PyObject *)self);
            PyErr_Restore(type, value, trace);
            return -1;
        }
        Py_DECREF(result);
        *self->holder = signed_by(self->local_rank);
    }
    pass_point(LOCK_NOTED);
    if (pass(self) < 0) {
        control_block_abandon(self);
        return -1;
    }
    return 0;
}

int control_block_lock_soon(ControlBlock *self)
{
    if (self->substitute)
        return call(self->substitute, "acquire");
    if (pass(self) < 0)
        return -1;
    int failure = try_lock(self);
    if (failure == EBUSY)
        failure = lock_soon(self);
    return failure == EBUSY ? 1 : complete_lock(self, failure);
}

int control_block_lock(ControlBlock *self)
{
    int outcome = control_block_lock_soon(self);
    return outcome == 1 ? complete_lock(self, EBUSY) : outcome;
}

void control_block_unlock(ControlBlock *self)
{
    static const uint64_t one = 1;
    if (self->substitute)
        return;
    /* Release first: a rank that wakes acquires the lock at once, and would have to sleep again. The GIL guards
     * `ringing`: no other thread of this process acquires the lock before this function returns. */
    if (*self->holder == signed_by(self->local_rank)) /* not after an exception: the lock is lost, and stays so */
        *self->holder = UNSIGNED;
    pthread_mutex_unlock(self->mutex);
    pass_point(LOCK_RELEASED);
    for (int i = 0; i < self->ringing_count; i++) {
        /* This fails only if the counter of the eventfd is full, and then the doorbell rings already. */
        ssize_t written = write(self->eventfds[self->ringing[i]], &one, sizeof one);
        (void)written;
        pass_point(DOORBELL_RUNG);
    }
    self->ringing_count = 0;
}

void control_block_wake(ControlBlock *self, int64_t at_most)
{
    /* In most critical sections no rank sleeps, and the flags of all ranks need not be read. */
    if (!self->flags[FLAGGED])
        return;
    int64_t *flags = self->flags + FLAGS;
    for (int doorbell = 0; doorbell < self->doorbell_count && at_most > 0; doorbell++) {
        /* The bound: a flag may be set again between two wakes of one critical section, or by a broken peer. */
        if (flags[doorbell] && self->ringing_count < self->doorbell_count) {
            flags[doorbell] = 0;
            self->flags[FLAGGED]--;
            at_most--;
            self->ringing[self->ringing_count++] = doorbell;
            pass_point(DOORBELL_CHOSEN);
        }
    }
}

void control_block_wake_futex(const int64_t *cell)
{
    /* The futex is the low half of the cell: the supported processors are little-endian. */
    syscall(SYS_futex, (const uint32_t *)cell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    pass_point(FUTEX_WOKEN);
}

/* -- the type --------------------------------------------------------------------------------- */

static PyObject *enter(PyObject *object, PyObject *unused)
{
    (void)unused;
    if (control_block_lock((ControlBlock *)object) < 0)
        return NULL;
    return Py_NewRef(object);
}

/* `__exit__(kind, error, trace)`. The package raises its own errors only while the cells are consistent. Any other
 * exception, for instance one of a signal handler, may leave them half changed. */
static PyObject *leave(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    ControlBlock *self = (ControlBlock *)object;
    if (count > 0 && arguments[0] != Py_None) {
        int is_consistent = PyObject_IsSubclass(arguments[0], self->consistent_error);
        if (is_consistent < 0)
            return NULL;
        if (!is_consistent) {
            control_block_abandon(self);
            Py_RETURN_NONE;
        }
    }
    control_block_unlock(self);
    Py_RETURN_NONE;
}

static PyObject *wake(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    int64_t at_most = INT64_MAX;
    if (count > 0) {
        at_most = PyLong_AsLongLong(arguments[0]);
        if (at_most == -1 && PyErr_Occurred())
            return NULL;
    }
    control_block_wake((ControlBlock *)object, at_most);
    Py_RETURN_NONE;
}

static PyObject *ring_at_next_wake(PyObject *object, PyObject *argument)
{
    ControlBlock *self = (ControlBlock *)object;
    long doorbell = PyLong_AsLong(argument);
    if (doorbell == -1 && PyErr_Occurred())
        return NULL;
    if (doorbell < 0 || doorbell >= self->doorbell_count) {
        PyErr_Format(PyExc_IndexError, "there is no doorbell %ld", doorbell);
        return NULL;
    }
    int64_t *flag = self->flags + FLAGS + doorbell;
    if (!*flag) {
        *flag = 1;
        self->flags[FLAGGED]++;
    }
    Py_RETURN_NONE;
}

static PyObject *wake_futex(PyObject *object, PyObject *argument)
{
    ControlBlock *self = (ControlBlock *)object;
    long long cell = PyLong_AsLongLong(argument);
    if (cell == -1 && PyErr_Occurred())
        return NULL;
    if (cell < 0 || cell >= self->cell_count) {
        PyErr_Format(PyExc_IndexError, "there is no cell %lld", cell);
        return NULL;
    }
    control_block_wake_futex(&self->cells[cell]);
    Py_RETURN_NONE;
}

static PyObject *replace_lock(PyObject *object, PyObject *substitute)
{
    ControlBlock *self = (ControlBlock *)object;
    PyObject *before = self->substitute;
    self->substitute = Py_NewRef(substitute);
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

/* Bytes `first` to `last` of `memory` as a memoryview of signed 64-bit integers. */
static PyObject *cells_of(PyObject *memory, Py_ssize_t first, Py_ssize_t last)
{
    PyObject *whole = PyMemoryView_FromObject(memory);
    PyObject *part = whole ? PySequence_GetSlice(whole, first, last) : NULL;
    PyObject *cells = part ? PyObject_CallMethod(part, "cast", "s", "q") : NULL;
    Py_XDECREF(part);
    Py_XDECREF(whole);
    return cells;
}

/* `ControlBlock(memory, doorbells, mutex, local_rank, error, created)`: `memory` begins with the mutex; `doorbells` are
 * eventfds by number; `mutex` is a RobustMutex on the same memory; `error` is the class of exceptions after which the
 * cells are consistent. */
static PyObject *create(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    PyObject *memory, *doorbells, *mutex, *error;
    long long local_rank;
    int created;
    static char *names[] = {"memory", "doorbells", "mutex", "local_rank", "error", "created", NULL};
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO!OLOp:ControlBlock", names, &memory, &PyTuple_Type,
                                     &doorbells, &mutex, &local_rank, &error, &created))
        return NULL;
    allocfunc allocate = PyType_GetSlot(type, Py_tp_alloc); /* sets all to zero */
    ControlBlock *self = (ControlBlock *)allocate(type, 0);
    if (!self)
        return NULL;
    self->local_rank = local_rank;
    self->created = created != 0;
    self->mutex_in_python = Py_NewRef(mutex);
    self->consistent_error = Py_NewRef(error);
    self->doorbell_count = (int)PyTuple_Size(doorbells);
    self->eventfds = PyMem_Calloc(2 * (size_t)self->doorbell_count + 1, sizeof(int));
    if (!self->eventfds) {
        PyErr_NoMemory();
        goto failed;
    }
    self->ringing = self->eventfds + self->doorbell_count;
    for (int i = 0; i < self->doorbell_count; i++) {
        self->eventfds[i] = (int)PyLong_AsLong(PyTuple_GetItem(doorbells, i));
        if (PyErr_Occurred())
            goto failed;
    }
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE) < 0)
        goto failed;
    Py_ssize_t own = MUTEX_BYTES + (Py_ssize_t)sizeof(int64_t) * (FLAGS + self->doorbell_count);
    if (self->memory.len < own || self->memory.len % (Py_ssize_t)sizeof(int64_t)) {
        PyErr_SetString(PyExc_ValueError, "the memory is no control block");
        goto failed;
    }
    char *start = self->memory.buf;
    self->mutex = (pthread_mutex_t *)start;
    self->holder = (int64_t *)(start + HOLDER_OFFSET);
    self->flags = (int64_t *)(start + MUTEX_BYTES);
    self->cells = (int64_t *)(start + own);
    self->cell_count = (self->memory.len - own) / (Py_ssize_t)sizeof(int64_t);
    self->view = cells_of(memory, own, self->memory.len);
    if (!self->view)
        goto failed;
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static int traverse(PyObject *object, visitproc visit, void *arg)
{
    ControlBlock *self = (ControlBlock *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->mutex_in_python);
    Py_VISIT(self->consistent_error);
    Py_VISIT(self->substitute);
    Py_VISIT(self->passing);
    Py_VISIT(self->view);
    return 0;
}

/* What a critical section needs stays until the end: one may run in a finalizer of the same cycle. */
static int clear(PyObject *object)
{
    ControlBlock *self = (ControlBlock *)object;
    Py_CLEAR(self->substitute);
    Py_CLEAR(self->passing);
    return 0;
}

static void destroy(PyObject *object)
{
    ControlBlock *self = (ControlBlock *)object;
    PyObject_GC_UnTrack(object);
    clear(object);
    Py_XDECREF(self->mutex_in_python);
    Py_XDECREF(self->consistent_error);
    Py_XDECREF(self->view);
    if (self->memory.obj)
        PyBuffer_Release(&self->memory);
    PyMem_Free(self->eventfds);
    free_object(object);
}

static PyMethodDef methods[] = {
    {"__enter__", enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))leave, METH_FASTCALL, NULL},
    {"wake", (PyCFunction)(void (*)(void))wake, METH_FASTCALL, NULL},
    {"ring_at_next_wake", ring_at_next_wake, METH_O, NULL},
    {"wake_futex", wake_futex, METH_O, NULL},
    {"abandon", replace_lock, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"cells", T_OBJECT, offsetof(ControlBlock, view), READONLY, NULL},
    {"passing", T_OBJECT, offsetof(ControlBlock, passing), 0, NULL},
    {"created", T_BOOL, offsetof(ControlBlock, created), READONLY, NULL},
    {"interleaved", T_BOOL, offsetof(ControlBlock, interleaved), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, create},
    {Py_tp_dealloc, destroy},
    {Py_tp_traverse, traverse},
    {Py_tp_clear, clear},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, NULL},
};

PyType_Spec control_block_spec = {
    .name = "asyncoll._core.native.ControlBlock",
    .basicsize = sizeof(ControlBlock),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

bool is_control_block(PyObject *object)
{
    return PyType_GetSlot(Py_TYPE(object), Py_tp_new) == create;
}
