/* The awaitable of a call that is over: a coroutine without a frame.
 *
 * The counterpart of `_EndedForOne` (asyncoll/runtime/progress.py). A signal handler may raise in the caller before the answer
 * is awaited. The answer is then destroyed, and its round is owed to the next call, as when the program never awaits it.
 * No bytecode runs between the end of the call and the answer, nor while the answer is handed over or taken back. So no
 * answer is lost.
 */
#include "native.h"

#include <stddef.h>
#include <structmember.h>

typedef struct {
    PyObject_HEAD
    PyObject *result; /* NULL once it has been handed over */
    PyObject *owed;   /* `Engine.owed`, a deque */
    int64_t rounds;   /* that the answer tells of: the one whose result was given, and those that were skipped */
    int64_t number;   /* of that one */
    bool turns;       /* the caller's loop turns once before it has the result */
} Answer;

static PyObject *create(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    (void)type, (void)arguments, (void)keywords;
    PyErr_SetString(PyExc_TypeError, "answers are made by calls");
    return NULL;
}

bool is_answer_type(PyObject *type)
{
    return PyType_Check(type) && PyType_GetSlot((PyTypeObject *)type, Py_tp_new) == create;
}

PyObject *make_answer(PyObject *type, PyObject *result, PyObject *owed, int64_t rounds, int64_t number, bool turns)
{
    allocfunc allocate = PyType_GetSlot((PyTypeObject *)type, Py_tp_alloc);
    Answer *self = (Answer *)allocate((PyTypeObject *)type, 0);
    if (!self)
        return NULL;
    self->result = Py_NewRef(result);
    self->owed = Py_NewRef(owed);
    self->rounds = rounds;
    self->number = number;
    self->turns = turns;
    return (PyObject *)self;
}

/* The result has no receiver: as `Engine.take_back`. Without effect if it was handed over. Returns 0, or -1 with an
 * exception set. */
static int return_result(Answer *self)
{
    PyObject *result = self->result;
    if (!result)
        return 0;
    self->result = NULL;
    Py_DECREF(result);
    PyObject *done =
        PyObject_CallMethod(self->owed, "append", "((LL))", (long long)self->rounds, (long long)self->number);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* Returns None if the loop is to turn, or NULL with StopIteration set: its value is the result. */
static PyObject *advance(PyObject *object)
{
    Answer *self = (Answer *)object;
    PyObject *result = self->result;
    if (!result) {
        PyErr_SetString(PyExc_RuntimeError, "cannot reuse already awaited coroutine");
        return NULL;
    }
    if (self->turns) {
        self->turns = false;
        Py_RETURN_NONE; /* what `asyncio.sleep(0)` yields */
    }
    PyObject *stop = PyObject_CallFunctionObjArgs(PyExc_StopIteration, result, NULL);
    if (!stop)
        return NULL;
    self->result = NULL;
    Py_DECREF(result);
    PyErr_SetObject(PyExc_StopIteration, stop);
    Py_DECREF(stop);
    return NULL;
}

static PyObject *send_value(PyObject *object, PyObject *value)
{
    (void)value;
    return advance(object);
}

/* `throw(error)`, or `throw(type, value, trace)` as of old */
static PyObject *throw_error(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    if (count < 1) {
        PyErr_SetString(PyExc_TypeError, "throw() needs an exception");
        return NULL;
    }
    if (return_result((Answer *)object) < 0)
        return NULL;
    PyObject *error = arguments[0];
    if (PyType_Check(error))
        PyErr_SetObject(error, count > 1 ? arguments[1] : NULL);
    else
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    return NULL;
}

static PyObject *close_answer(PyObject *object, PyObject *unused)
{
    (void)unused;
    if (return_result((Answer *)object) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static void destroy(PyObject *object)
{
    Answer *self = (Answer *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    if (return_result(self) < 0)
        PyErr_WriteUnraisable(self->owed);
    PyErr_Restore(kind, value, trace);
    Py_XDECREF(self->owed);
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"send", send_value, METH_O, NULL},
    {"throw", (PyCFunction)(void (*)(void))throw_error, METH_FASTCALL, NULL},
    {"close", close_answer, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"result", T_OBJECT, offsetof(Answer, result), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, create},
    {Py_tp_dealloc, destroy},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_iter, PyObject_SelfIter},
    {Py_tp_iternext, advance},
    {Py_am_await, PyObject_SelfIter},
    {0, NULL},
};

PyType_Spec answer_spec = {
    .name = "asyncoll._core.native.Answer",
    .basicsize = sizeof(Answer),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};
