/* What the callers of whole calls await: coroutines without a frame.
 *
 * `Awaitable` is the coroutine, for calls of short meetings (`ShortCall` in short_calls.c) and of rounds (`Answer`, here).
 * No bytecode runs between the end of a call and its result, nor while the result is handed over or taken back. So an
 * exception of a signal handler finds a result that has been handed over, or one that is still here, and none is lost.
 *
 * An `Answer` is of a call that was over when it was made, the counterpart of `_EndedForOne` (asyncoll/runtime/progress.py).
 * A signal handler may raise in the caller before the answer is awaited. The answer is then destroyed, and its rounds are
 * owed to the next call, as when the program never awaits it.
 */
#include "native.h"

#include <stddef.h>
#include <structmember.h>

/* The result has no receiver. Returns 0, or -1 with an exception set. */
static int drop_result(Awaitable *self)
{
    if (self->state != ENDED)
        return 0;
    self->state = AWAITED; /* first: what follows may run Python, which may come back here */
    Py_CLEAR(self->result);
    return self->kind->unused ? self->kind->unused(self) : 0;
}

/* The caller drives the call no longer: it has the result or an exception. */
static void leave(Awaitable *self)
{
    self->state = AWAITED;
    Py_CLEAR(self->rest);
    if (self->kind->left)
        self->kind->left(self);
}

PySendResult awaitable_send(PyObject *object, PyObject *value, PyObject **result)
{
    Awaitable *self = (Awaitable *)object;
    *result = NULL;
    if (self->state == AWAITED) {
        PyErr_SetString(PyExc_RuntimeError, "cannot reuse already awaited coroutine");
        return PYGEN_ERROR;
    }
    if (self->state == BEGUN && self->kind->resume(self) < 0) {
        leave(self);
        return PYGEN_ERROR;
    }
    if (self->state == ENDED) {
        if (self->turns) {
            self->turns = false;
            *result = Py_NewRef(Py_None); /* what `asyncio.sleep(0)` yields */
            return PYGEN_NEXT;
        }
        self->state = AWAITED;
        *result = self->result;
        self->result = NULL;
        return PYGEN_RETURN;
    }
    PyObject *rest = Py_NewRef(self->rest); /* which the call lets go of if it is closed meanwhile */
    PySendResult how = PyIter_Send(rest, value, result);
    Py_DECREF(rest);
    if (how != PYGEN_NEXT)
        leave(self);
    return how;
}

/* The same for callers in Python: the result is the value of a StopIteration. */
static PyObject *send_in_python(PyObject *object, PyObject *value)
{
    PyObject *result;
    PySendResult how = awaitable_send(object, value, &result);
    if (how != PYGEN_RETURN)
        return result;
    PyObject *stop = PyObject_CallFunctionObjArgs(PyExc_StopIteration, result, NULL);
    if (stop)
        PyErr_SetObject(PyExc_StopIteration, stop);
    Py_XDECREF(stop);
    Py_DECREF(result);
    return NULL;
}

static PyObject *next(PyObject *object)
{
    return send_in_python(object, Py_None);
}

/* Raise the exception of the arguments of `throw`: an exception, or a class and a value. */
static PyObject *raise(PyObject *const *arguments, Py_ssize_t count)
{
    PyObject *type = arguments[0], *value = count > 1 && arguments[1] != Py_None ? arguments[1] : NULL;
    if (PyExceptionInstance_Check(type))
        PyErr_SetObject((PyObject *)Py_TYPE(type), type);
    else if (PyExceptionClass_Check(type))
        PyErr_SetObject(type, value);
    else
        PyErr_SetString(PyExc_TypeError, "exceptions must be classes or instances deriving from BaseException");
    return NULL;
}

/* `throw(error)`. A task that is cancelled before its first step throws at once; a call that has begun takes its first
 * step nevertheless, so that the cancellation reaches it. */
static PyObject *throw(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    Awaitable *self = (Awaitable *)object;
    PyObject *result = NULL;
    if (count < 1) {
        PyErr_SetString(PyExc_TypeError, "throw(error)");
        return NULL;
    }
    if (self->state == BEGUN) {
        PySendResult how = awaitable_send(object, Py_None, &result);
        Py_CLEAR(result);
        if (how == PYGEN_ERROR)
            return NULL;
    }
    if (self->state != RESTING) {
        if (drop_result(self) < 0)
            return NULL;
        leave(self);
        return raise(arguments, count);
    }
    PyObject *rest = Py_NewRef(self->rest);
    PyObject *method = PyObject_GetAttrString(rest, "throw");
    if (method)
        result = PyObject_CallFunctionObjArgs(method, arguments[0], count > 1 ? arguments[1] : NULL,
                                              count > 2 ? arguments[2] : NULL, NULL);
    Py_XDECREF(method);
    Py_DECREF(rest);
    if (!result)
        leave(self);
    return result;
}

/* `close()`: the caller does not want the result. The runtime goes on with a call that has begun. */
static PyObject *close_awaitable(PyObject *object, PyObject *unused)
{
    Awaitable *self = (Awaitable *)object;
    (void)unused;
    if (self->state != RESTING) {
        if (drop_result(self) < 0)
            return NULL;
        self->state = AWAITED;
        Py_RETURN_NONE;
    }
    PyObject *rest = Py_NewRef(self->rest);
    PyObject *closed = PyObject_CallMethod(rest, "close", NULL);
    Py_DECREF(rest);
    leave(self);
    return closed;
}

static PyMethodDef methods[] = {
    {"send", send_in_python, METH_O, NULL},
    {"throw", (PyCFunction)(void (*)(void))throw, METH_FASTCALL, NULL},
    {"close", close_awaitable, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"result", T_OBJECT, offsetof(Awaitable, result), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_members, members},        {Py_tp_methods, methods}, {Py_am_await, PyObject_SelfIter},
    {Py_tp_iter, PyObject_SelfIter}, {Py_tp_iternext, next},   {0, NULL},
};

PyType_Spec awaitable_spec = {
    .name = "asyncoll._core.native.Awaitable",
    .basicsize = sizeof(Awaitable),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};

/* -- calls of rounds ---------------------------------------------------------------------------- */

typedef struct {
    Awaitable head;
    PyObject *owed; /* `Engine.owed`, a deque */
    int64_t rounds; /* that the answer tells of: the one whose result was given, and those that were skipped */
    int64_t number; /* of that one */
} Answer;

/* As `Engine.take_back`. */
static int owe(Awaitable *object)
{
    Answer *self = (Answer *)object;
    PyObject *done =
        PyObject_CallMethod(self->owed, "append", "((LL))", (long long)self->rounds, (long long)self->number);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static const AwaitableKind kind_of_answers = {.unused = owe};

PyObject *make_answer(PyObject *type, PyObject *result, PyObject *owed, int64_t rounds, int64_t number, bool turns)
{
    allocfunc allocate = PyType_GetSlot((PyTypeObject *)type, Py_tp_alloc); /* sets all to zero */
    Answer *self = (Answer *)allocate((PyTypeObject *)type, 0);
    if (!self)
        return NULL;
    self->head.kind = &kind_of_answers;
    self->head.result = Py_NewRef(result);
    self->head.turns = turns;
    self->head.state = ENDED;
    self->owed = Py_NewRef(owed);
    self->rounds = rounds;
    self->number = number;
    return (PyObject *)self;
}

static void destroy(PyObject *object)
{
    Answer *self = (Answer *)object;
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    if (drop_result(&self->head) < 0)
        PyErr_WriteUnraisable(self->owed);
    PyErr_Restore(kind, value, trace);
    Py_XDECREF(self->owed);
    free_object(object);
}

static PyType_Slot answer_slots[] = {{Py_tp_dealloc, destroy}, {Py_am_send, awaitable_send}, {0, NULL}};

PyType_Spec answer_spec = {
    .name = "asyncoll._core.native.Answer",
    .basicsize = sizeof(Answer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = answer_slots,
};
