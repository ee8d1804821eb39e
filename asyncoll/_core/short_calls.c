/* Whole short calls, an allreduce or a barrier, from the arguments of the caller to the end of its `await`.
 *
 * Implements `ShortCalls` of asyncoll/algorithms/seam/short_calls.py, which says what it does. A call
 * that is unusual in any way is left to Python before it has a number: nothing has changed then. A call that has begun,
 * and has to sleep or has failed, goes on in Python, too: `go_on` makes the coroutine of the rest.
 *
 * No signal handler of Python runs here, except while this calls Python: before the call has a number, or after it has
 * arrived. Then `CompiledCalls.interrupted` ends the communicator.
 */
#include "native.h"

#include <stddef.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

/* Entries of the table of kinds, a power of two, and how many of them are used. */
enum { KINDS = 256, KINDS_MAX = 192 };

/* What all calls with the same arguments have in common. */
typedef struct {
    PyObject *key; /* names the dtype; compared by identity, as `op`. NULL for barriers */
    PyObject *op;
    Py_ssize_t nbytes;
    PyObject *plan; /* asyncoll.algorithms.seam.short_calls.Plan; NULL in an empty entry */
    Meeting meeting;
    int ways;         /* BY_MEETING, or the sum of others, in the order in which they are tried; 0 for barriers */
    bool is_shown;    /* the others see a registered array where it is */
    int64_t reduced;  /* since `counts`: calls that ended here, and that this rank has reduced */
    int64_t received; /* calls that another rank has reduced */
} Kind;

/* Names of attributes, as Python strings in ShortCalls.names. */
enum { ANY, BACK, CLOSED, DRIVE, DTYPE, INSTRUCTION, IS_TIMER_SET, SET_TIMER, TURN, UNSTARTED, NAMES };
static const char *const names[NAMES] = {"any",     "f_back",       "closed",    "drive", "dtype",
                                         "f_lasti", "is_timer_set", "set_timer", "turn",  "unstarted"};

/* The objects that the calls need. The first ones are arguments of `ShortCalls`. */
enum {
    GENERAL,       /* asyncoll.algorithms.seam.short_calls.GeneralCalls */
    REST,          /* goes on with calls that have to wait: asyncoll.algorithms.dense.compiled.CompiledCalls */
    RUNNER,        /* asyncoll.runtime.progress.Runner */
    HOME,          /* the only loop that may make calls; None: any loop may */
    HELD,          /* the calls that have begun and wait for their callers: a dict of the runner, or None */
    ENDPOINT,      /* `closed` if this rank has left */
    FAILURES,      /* `any` if something has failed */
    UNUSED,        /* registered memory to give back before the next call, if not empty */
    OWN,           /* a list: ways of the program, which come first */
    BLOCKS,        /* a list: blocks of shared memory that no call uses, each a tuple of its address and its memory */
    UNFINISHED,    /* a set: the numbers of the calls under way */
    TURNS,         /* a dict, empty unless a call waits for the end of another one */
    END,           /* end(number): tells that call */
    NOTE,          /* note(entry): for reports; plan, number, code, instruction */
    PLACE_OUTSIDE, /* asyncoll.runtime.signature.place_outside */
    REPORTED,      /* the place that calls of the current context are reported at, or None */
    RUNNING_LOOP,  /* asyncio.get_running_loop */
    EXPIRY,        /* the end of the deadline of the current context, or None */
    ARRAY_TYPE,    /* numpy.ndarray */
    MAY_RAISE,     /* may_raise(): whether a signal handler may raise in this thread */
    GIVEN,
    CALL_TYPE = GIVEN, /* ShortCall */
    ENTRY,             /* of the newest call, or NULL */
    LIBRARIES,         /* a tuple: what the names of files begin with that are not the user's */
    METHOD,            /* the code of a public method; that of its caller, which is the user's; and LIBRARIES then; */
    CALLER,            /* or NULL */
    CALLER_LIBRARIES,
    PARTS
};

static const char *const given[GIVEN] = {
    "general",       "rest",     "runner",       "home",       "held",       "endpoint",  "failures",
    "unused",        "own",      "blocks",       "unfinished", "turns",      "end",       "note",
    "place_outside", "reported", "running_loop", "expiry",     "array_type", "may_raise",
};

typedef struct {
    PyObject_HEAD
    Meetings *meetings;
    PyObject *parts[PARTS];
    PyObject *names[NAMES];
    long long last; /* the number of the last call */
    long long polls, sleep_ns, calls_per_turn;
    long long start, length, first; /* of this rank's shared memory: pointer, bytes, address of the first byte */
    double ended_s;                 /* when the last call ended */
    int calls_in_row;               /* that have ended since the caller's loop has turned */
    int known;                      /* entries of `kinds` that are used */
    Tracing trace;
    Kind barriers;
    Kind *kinds;
} ShortCalls;

/* It is BEGUN once this rank has arrived. */
typedef struct {
    Awaitable head;
    PyObject *weak_references;
    ShortCalls *calls;
    Kind *kind;
    PyObject *array; /* None for a barrier */
    PyObject *entry;
    PyObject *expires_s;
    Py_buffer bytes;
    Py_buffer shown;           /* what takes part in the meeting: `bytes`, or their copy in `block`; not held */
    PyObject *block;           /* of BLOCKS, while this call uses it; or NULL */
    long long number, address; /* the address is that of `shown`, if the others see it */
    double since_s;
    bool is_looked_at; /* by a thread in `look`, so that no other thread goes on with it */
    bool is_wanted;    /* another thread is to go on with it */
} ShortCall;

static const AwaitableKind kind_of_calls;

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now); /* `time.monotonic`, the clock of `runtime.deadlines` */
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* -- what a call is ----------------------------------------------------------------------------- */

/* The entry for these arguments, or the empty one to put them in. */
static Kind *entry_of(ShortCalls *self, PyObject *key, PyObject *op, Py_ssize_t nbytes)
{
    /* A program repeats a few kinds of calls, so a table of a fixed size is enough. Addresses are multiples of 16:
     * their lowest bits say nothing. */
    uintptr_t hash = ((uintptr_t)key >> 4) * 31 + ((uintptr_t)op >> 4) * 17 + (uintptr_t)nbytes * 2654435761u;
    for (hash ^= hash >> 15;; hash++) { /* ends: there are always empty entries */
        Kind *kind = &self->kinds[hash % KINDS];
        if (!kind->plan || (kind->key == key && kind->op == op && kind->nbytes == nbytes))
            return kind;
    }
}

static void fill(ShortCalls *self, Kind *kind, PyObject *plan, const Meeting *meeting, int ways)
{
    kind->meeting = *meeting;
    kind->ways = ways;
    kind->is_shown = kind->nbytes && kind->nbytes >= meetings_shown_min(self->meetings);
    kind->plan = Py_NewRef(plan);
}

/* Whether arrays of `nbytes` bytes go these ways here. */
static bool goes(const ShortCalls *self, long long nbytes, int ways)
{
    if (nbytes <= meetings_short_bytes(self->meetings))
        return ways == BY_MEETING;
    return ways && !(ways & ~(IN_PLACE | IN_A_COPY | IN_PRIVATE_MEMORY));
}

/* `learn(key, op, nbytes, plan, fingerprint, divisor, done, kernel, ways)`: the next calls with these arguments begin
 * here. A barrier has the key None. Without effect if too many kinds are known, or Python has other ways for them. */
static PyObject *learn(PyObject *object, PyObject *arguments)
{
    ShortCalls *self = (ShortCalls *)object;
    PyObject *key, *op, *plan;
    long long nbytes, fingerprint, divisor, done;
    int kernel, ways;
    if (!PyArg_ParseTuple(arguments, "OOLOLLLii:learn", &key, &op, &nbytes, &plan, &fingerprint, &divisor, &done,
                          &kernel, &ways))
        return NULL;
    const Meeting meeting = {.fingerprint = fingerprint, .divisor = divisor, .done = done, .kernel = kernel};
    bool fits = key == Py_None ? nbytes == 0 && done == 1
                               : nbytes > 0 && nbytes == done && divisor > 0 && kernel_at(kernel) &&
                                     nbytes % (long long)kernel_element_size(kernel) == 0;
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "this is no kind of short calls");
        return NULL;
    }
    if (key == Py_None) {
        if (!self->barriers.plan)
            fill(self, &self->barriers, plan, &meeting, 0);
        Py_RETURN_NONE;
    }
    if (!goes(self, nbytes, ways))
        Py_RETURN_NONE;
    Kind *kind = entry_of(self, key, op, (Py_ssize_t)nbytes);
    if (!kind->plan && self->known < KINDS_MAX) {
        self->known++;
        kind->key = Py_NewRef(key); /* so no other object gets its address */
        kind->op = Py_NewRef(op);
        kind->nbytes = (Py_ssize_t)nbytes;
        fill(self, kind, plan, &meeting, ways);
    }
    Py_RETURN_NONE;
}

/* Put `value` in the place of an object. */
static void replace(PyObject **place, PyObject *value)
{
    PyObject *before = *place;
    *place = value;
    Py_XDECREF(before);
}

static int is_true(PyObject *object, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(object, name);
    int truth = value ? PyObject_IsTrue(value) : -1;
    Py_XDECREF(value);
    return truth;
}

/* Whether the call is left to Python, which raises an error or does something first. -1 with an exception. */
static int is_unusual(ShortCalls *self)
{
    /* Each of these is rare, and what follows is written in Python: an error that names the call, or the return of
     * memory. */
    int is = is_true(self->parts[ENDPOINT], self->names[CLOSED]);
    if (!is)
        is = is_true(self->parts[FAILURES], self->names[ANY]);
    if (!is)
        is = is_true(self->parts[GENERAL], self->names[UNSTARTED]);
    if (!is)
        is = PyList_Size(self->parts[OWN]) > 0;
    if (!is)
        is = PyObject_IsTrue(self->parts[UNUSED]);
    return is;
}

/* The running loop, if a call may be made on it; None if not. */
static PyObject *loop_of(ShortCalls *self)
{
    PyObject *loop = PyObject_CallNoArgs(self->parts[RUNNING_LOOP]);
    /* No loop runs in this thread. Python makes the call, and raises the error that says what to do. */
    if (!loop && PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    if (loop && self->parts[HOME] != Py_None && loop != self->parts[HOME]) {
        Py_DECREF(loop);
        Py_RETURN_NONE;
    }
    return loop;
}

/* Whether nothing is reported elsewhere, and `method` and `caller` are those of the last call whose place was looked for.
 * The place depends on nothing else. -1 with an exception. */
static int is_known(ShortCalls *self, PyObject *method, PyObject *caller)
{
    PyObject **parts = self->parts;
    if (method != parts[METHOD] || caller != parts[CALLER] || parts[LIBRARIES] != parts[CALLER_LIBRARIES])
        return 0;
    PyObject *reported = PyObject_CallNoArgs(parts[REPORTED]);
    Py_XDECREF(reported);
    return reported ? reported == Py_None : -1;
}

/* The entry of a call with its place, which the rule in Python finds. To ask it takes as long as to reduce a short array,
 * so the user's last line is known by its code. */
static PyObject *found(ShortCalls *self, Kind *kind, long long number, PyObject *frame, PyObject *method,
                       PyObject *caller)
{
    PyObject *place = PyObject_CallFunctionObjArgs(self->parts[PLACE_OUTSIDE], frame, self->parts[LIBRARIES], NULL),
             *reported = place ? PyObject_CallNoArgs(self->parts[REPORTED]) : NULL, *entry = NULL;
    PyObject *code, *instruction;
    if (reported && PyArg_ParseTuple(place, "OO:place", &code, &instruction)) {
        if (reported == Py_None && code == caller) {
            replace(&self->parts[METHOD], Py_NewRef(method));
            replace(&self->parts[CALLER], Py_NewRef(caller));
            replace(&self->parts[CALLER_LIBRARIES], Py_NewRef(self->parts[LIBRARIES]));
        }
        entry = Py_BuildValue("OLOO", kind->plan, number, code, instruction);
    }
    Py_XDECREF(reported);
    Py_XDECREF(place);
    return entry;
}

/* The entry of a call for reports: its plan, its number, and the place of the call, which the frame on top leads to: that
 * of the public method. */
static PyObject *describe(ShortCalls *self, Kind *kind, long long number)
{
    /* The place is found now, in every call: when an error has to name it, the caller has gone on from there. */
    PyFrameObject *frame = PyEval_GetFrame();
    if (!frame) {
        PyErr_SetString(PyExc_RuntimeError, "no Python function makes this call");
        return NULL;
    }
    PyObject *back = PyObject_GetAttr((PyObject *)frame, self->names[BACK]), *entry = NULL;
    if (!back)
        return NULL;
    PyObject *method = (PyObject *)PyFrame_GetCode(frame);
    PyObject *caller = back == Py_None ? Py_NewRef(Py_None) : (PyObject *)PyFrame_GetCode((PyFrameObject *)back);
    int is = is_known(self, method, caller);
    if (!is)
        entry = found(self, kind, number, (PyObject *)frame, method, caller);
    PyObject *instruction = is > 0 ? PyObject_GetAttr(back, self->names[INSTRUCTION]) : NULL;
    if (instruction)
        entry = Py_BuildValue("OLON", kind->plan, number, caller, instruction);
    Py_DECREF(caller);
    Py_DECREF(method);
    Py_DECREF(back);
    return entry;
}

/* -- the end of a call ---------------------------------------------------------------------------- */

/* The call uses its array no longer. */
static void forget(ShortCall *call)
{
    if (call->bytes.obj)
        PyBuffer_Release(&call->bytes);
    Py_CLEAR(call->array);
    Py_CLEAR(call->block);
}

/* Copy between the array and its block. The other threads of this rank, such as its loop, run meanwhile. */
static void copy_long(void *to, const void *from, Py_ssize_t bytes)
{
    PyThreadState *state = PyEval_SaveThread();
    memcpy(to, from, bytes);
    PyEval_RestoreThread(state);
}

/* Take the result out of the block, which no other rank uses any more. */
static void return_block(ShortCall *call)
{
    copy_long(call->bytes.buf, call->shown.buf, call->bytes.len);
    if (PyList_Append(call->calls->parts[BLOCKS], call->block) < 0)
        PyErr_Clear(); /* the call is over all the same, and a later one allocates another block */
}

/* The result is in the array. Returns 0, or -1 with an exception. */
static int end(ShortCall *call, bool is_last)
{
    ShortCalls *self = call->calls;
    if (call->block)
        return_block(call);
    call->head.state = ENDED;
    call->head.turns = ++self->calls_in_row >= self->calls_per_turn;
    if (call->head.turns)
        self->calls_in_row = 0;
    /* Before others are told: the caller may use its array again as soon as it knows the end, perhaps in another
     * thread. */
    forget(call);
    *(is_last ? &call->kind->reduced : &call->kind->received) += 1;
    self->ended_s = now_s();
    if (self->trace.append) {
        trace_event(&self->trace, WHAT_REDUCE, self->ended_s, call->entry);
        trace_event(&self->trace, WHAT_END, self->ended_s, call->entry);
    }
    PyObject *number = PyTuple_GetItem(call->entry, 1);
    if (PySet_Discard(self->parts[UNFINISHED], number) < 0)
        return -1;
    return PyDict_Size(self->parts[TURNS]) ? call_to_its_end(self->parts[END], number) : 0;
}

/* The rest of a call, with the exception that is set, as a coroutine. NULL with an exception. */
static PyObject *go_on(ShortCall *call)
{
    ShortCalls *self = call->calls;
    PyObject *type, *error, *trace, *coroutine = NULL;
    PyErr_Fetch(&type, &error, &trace);
    /* Python must not be called with an exception set, and takes the error as an object. */
    PyErr_NormalizeException(&type, &error, &trace);
    PyObject *work = PyObject_CallMethod(self->parts[REST], "general", "OO", call, error ? error : Py_None);
    if (work)
        coroutine = PyObject_CallMethodObjArgs(self->parts[RUNNER], self->names[DRIVE], work, NULL);
    Py_XDECREF(work);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    if (coroutine)
        return coroutine;
    /* The call has begun, and nothing is left that completes it: the other ranks would wait for this one for ever.
     * So the communicator ends, and the caller gets the exception. */
    PyErr_Fetch(&type, &error, &trace);
    PyObject *told = PyObject_CallMethod(self->parts[REST], "interrupted", "O", call);
    if (!told)
        PyErr_WriteUnraisable(self->parts[REST]);
    Py_XDECREF(told);
    PyErr_Restore(type, error, trace);
    return NULL;
}

/* -- the beginning of a call ---------------------------------------------------------------------- */

/* Note when the call began, and its deadline: the rest of it may run in another context. 0, or -1 with an exception. */
static int date(ShortCalls *self, ShortCall *call)
{
    /* Only calls that have to wait come here: one that is over at once has no use for either. */
    call->since_s = now_s();
    call->expires_s = PyObject_CallNoArgs(self->parts[EXPIRY]);
    return call->expires_s ? 0 : -1;
}

/* Keep a call that has begun for its caller. Returns 0, or -1 with an exception. */
static int hold(ShortCalls *self, ShortCall *call, PyObject *loop)
{
    /* The runner takes over what has waited for a whole turn of its timer. */
    PyObject *turn = PyObject_GetAttr(self->parts[RUNNER], self->names[TURN]);
    PyObject *where = turn ? PyTuple_Pack(2, loop, turn) : NULL;
    int failed = where ? PyDict_SetItem(self->parts[HELD], (PyObject *)call, where) : -1;
    Py_XDECREF(where);
    Py_XDECREF(turn);
    int is_set = failed ? -1 : is_true(self->parts[RUNNER], self->names[IS_TIMER_SET]);
    if (is_set)
        return is_set < 0 ? -1 : 0;
    PyObject *told = PyObject_CallMethodObjArgs(self->parts[RUNNER], self->names[SET_TIMER], NULL);
    Py_XDECREF(told);
    if (told)
        return 0;
    /* The caller gets the exception, so the runner must not go on with the call. */
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (PyDict_DelItem(self->parts[HELD], (PyObject *)call) < 0)
        PyErr_Clear(); /* it has been taken out already */
    PyErr_Restore(type, value, trace);
    return -1;
}

/* Arrive. Returns 1 if the call is over, 0 if it is to go on, -1 with an exception. */
static int arrive(ShortCalls *self, ShortCall *call, bool is_clear)
{
    PyObject *told = PyObject_CallFunctionObjArgs(self->parts[NOTE], call->entry, NULL);
    Py_XDECREF(told);
    if (!told)
        return -1;
    if (call->block)
        copy_long(call->shown.buf, call->bytes.buf, call->bytes.len);
    int state =
        meetings_arrive(self->meetings, call->number, &call->kind->meeting, call->address, &call->shown, is_clear);
    if (state == OVER)
        return end(call, true) < 0 ? -1 : 1;
    return state < 0 ? -1 : 0;
}

/* Whether the record of call `number` is free, and no earlier call may come back to it. `is_clear`: no call is under way
 * at this rank. -1 with an exception. */
static int is_way_free(ShortCalls *self, long long number, bool is_clear)
{
    /* A call that is under way uses its record until it is over at this rank, even if all ranks have left that for
     * the moment. With no call under way there is nothing to look up. */
    if (!is_clear) {
        PyObject *before = PyLong_FromLongLong(number - meetings_calls(self->meetings));
        int is_under_way = before ? PySet_Contains(self->parts[UNFINISHED], before) : -1;
        Py_XDECREF(before);
        if (is_under_way)
            return is_under_way < 0 ? -1 : 0;
    }
    return meetings_is_free(self->meetings, number);
}

/* Take a block for a copy of the array, if the call needs one: the others see that. Returns 0 if there is none, -1 with an
 * exception, and else 1. */
static int take_block(ShortCalls *self, ShortCall *call)
{
    if (call->address || call->bytes.len <= meetings_short_bytes(self->meetings))
        return 1;
    PyObject *blocks = self->parts[BLOCKS], *memory;
    Py_ssize_t count = PyList_Size(blocks);
    PyObject *block = count > 0 ? PyList_GetItem(blocks, count - 1) : NULL;
    Py_buffer room;
    if (!block)
        return 0;
    if (!PyArg_ParseTuple(block, "LO:block", &call->address, &memory) ||
        PyObject_GetBuffer(memory, &room, PyBUF_WRITABLE) < 0)
        return -1;
    call->shown.buf = room.buf; /* `block` keeps the memory */
    bool fits = room.len >= call->bytes.len;
    PyBuffer_Release(&room);
    if (!fits)
        return 0;
    call->block = Py_NewRef(block);
    return PyList_SetSlice(blocks, count - 1, count, NULL) < 0 ? -1 : 1;
}

/* Number `call` and begin it. Returns what its caller awaits, or None if it is left to Python, without a number. */
static PyObject *begin(ShortCalls *self, ShortCall *call, PyObject *loop)
{
    /* Asked before this call is in the set. */
    bool is_clear = PySet_Size(self->parts[UNFINISHED]) == 0;
    int is_free = is_way_free(self, call->number, is_clear);
    /* With the lock held by another thread, this one may have waited without the GIL. */
    if (is_free >= 0 && (!is_free || self->last + 1 != call->number))
        Py_RETURN_NONE;
    int has_memory = take_block(self, call);
    if (has_memory <= 0)
        return has_memory < 0 ? NULL : Py_NewRef(Py_None);
    /* From here on the call has a number, and the other ranks wait for it. A look at the record that has failed,
     * because the lock is lost, gives it a number, too: only a call can tell the communicator of the loss, and it
     * does so in `go_on`. */
    self->last = call->number;
    replace(&self->parts[ENTRY], Py_NewRef(call->entry));
    if (self->trace.append) {
        double at_s = now_s();
        trace_event(&self->trace, WHAT_BEGIN, at_s, call->entry);
        trace_event(&self->trace, WHAT_ARRIVE, at_s, call->entry);
    }
    PyObject *number = PyTuple_GetItem(call->entry, 1);
    int is_over = is_free < 0 || PySet_Add(self->parts[UNFINISHED], number) < 0 ? -1 : arrive(self, call, is_clear);
    if (is_over > 0)
        return Py_NewRef((PyObject *)call);
    if (is_over < 0 || date(self, call) < 0 || self->parts[HELD] == Py_None || hold(self, call, loop) < 0)
        return go_on(call);
    return Py_NewRef((PyObject *)call);
}

/* A call of `kind`, without a number. It takes over `bytes`. */
static ShortCall *make(ShortCalls *self, Kind *kind, PyObject *array, PyObject *result, Py_buffer *bytes)
{
    allocfunc allocate = PyType_GetSlot((PyTypeObject *)self->parts[CALL_TYPE], Py_tp_alloc); /* sets all to zero */
    ShortCall *call = (ShortCall *)allocate((PyTypeObject *)self->parts[CALL_TYPE], 0);
    if (!call) {
        if (bytes->obj)
            PyBuffer_Release(bytes);
        return NULL;
    }
    call->head.kind = &kind_of_calls;
    call->calls = (ShortCalls *)Py_NewRef((PyObject *)self);
    call->kind = kind;
    call->array = Py_NewRef(array);
    call->head.result = Py_NewRef(result);
    call->bytes = *bytes;
    call->shown = (Py_buffer){.buf = bytes->buf, .len = bytes->len};
    /* For the description alone: `begin` takes the number, unless another call has taken it meanwhile. */
    call->number = self->last + 1;
    call->entry = describe(self, kind, call->number);
    if (!call->entry)
        Py_CLEAR(call);
    return call;
}

/* Whether a signal handler may raise in this thread; -1 with an exception. */
static int may_handler_raise(ShortCalls *self)
{
    PyObject *may_raise = PyObject_CallNoArgs(self->parts[MAY_RAISE]);
    int is = may_raise ? PyObject_IsTrue(may_raise) : -1;
    Py_XDECREF(may_raise);
    return is;
}

/* What becomes of a call. A call that is DECLINED is left to Python: it has no number, and nothing has changed. */
typedef enum { FAILED = -1, DECLINED, TAKEN } Verdict;

/* Find out where the others see an array: where it is registered, or, negative, where it is private; 0: they see a copy.
 * An array that others see has to be taken back after an exception. That takes several steps, so Python makes the call
 * where a signal handler may raise between them. */
static Verdict locate(ShortCalls *self, const Kind *kind, const Py_buffer *bytes, long long *address)
{
    /* The question is asked for each such call, because the program may have set a handler since the last one. */
    int is_unsafe = may_handler_raise(self);
    if (is_unsafe)
        return is_unsafe < 0 ? FAILED : DECLINED;
    int64_t pointer = (int64_t)(intptr_t)bytes->buf, offset = pointer - self->start;
    if (offset >= 0 && offset < self->length && kind->ways & (BY_MEETING | IN_PLACE))
        *address = self->first + offset;
    else if (kind->ways & (BY_MEETING | IN_A_COPY))
        return TAKEN;
    else if (kind->ways & IN_PRIVATE_MEMORY && meetings_can_read(self->meetings))
        *address = -pointer;
    else
        return DECLINED;
    return TAKEN;
}

/* Whether the core takes this call, and where the others see its array: 0 if they see a copy. */
static Verdict judge(ShortCalls *self, const Kind *kind, const Py_buffer *bytes, long long *address)
{
    *address = 0;
    int unusual = is_unusual(self);
    if (unusual)
        return unusual < 0 ? FAILED : DECLINED;
    Verdict located = kind->is_shown ? locate(self, kind, bytes, address) : TAKEN;
    if (located != TAKEN)
        return located;
    bool is_short = kind->nbytes && !*address && kind->nbytes <= meetings_short_bytes(self->meetings);
    return is_short && !meetings_has_short_arrays(self->meetings) ? DECLINED : TAKEN; /* Python allocates the copy */
}

/* Start a call of `kind`. */
static PyObject *start_kind(ShortCalls *self, Kind *kind, PyObject *array, PyObject *result, Py_buffer *bytes)
{
    long long address;
    /* The loop is asked for last: a call that is declined for another reason is checked in Python. */
    bool is_taken = judge(self, kind, bytes, &address) == TAKEN;
    PyObject *loop = is_taken ? loop_of(self) : NULL, *started = NULL;
    if (!loop || loop == Py_None) {
        if (bytes->obj)
            PyBuffer_Release(bytes);
        Py_XDECREF(loop);
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    }
    ShortCall *call = make(self, kind, array, result, bytes);
    if (call) {
        call->address = address;
        started = begin(self, call, loop);
    }
    Py_XDECREF((PyObject *)call);
    Py_DECREF(loop);
    return started;
}

static PyObject *start_array(ShortCalls *self, PyObject *array, PyObject *key, PyObject *op, PyObject *result)
{
    Py_buffer bytes;
    /* Without a kind no call can begin here, and to hold the buffer takes longer than to ask. */
    if (!self->known)
        Py_RETURN_NONE;
    if (PyObject_GetBuffer(array, &bytes, PyBUF_WRITABLE) < 0) { /* it is read-only, or not contiguous */
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    Kind *kind = entry_of(self, key, op, bytes.len);
    if (kind->plan)
        return start_kind(self, kind, array, result, &bytes);
    PyBuffer_Release(&bytes);
    Py_RETURN_NONE;
}

/* `allreduce(x, op)`: start an allreduce of a numpy array. */
static PyObject *allreduce(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    ShortCalls *self = (ShortCalls *)object;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "allreduce(x, op)");
        return NULL;
    }
    PyObject *x = arguments[0];
    if ((PyObject *)Py_TYPE(x) != self->parts[ARRAY_TYPE])
        Py_RETURN_NONE;
    PyObject *dtype = PyObject_GetAttr(x, self->names[DTYPE]);
    PyObject *started = dtype ? start_array(self, x, dtype, arguments[1], x) : NULL;
    Py_XDECREF(dtype);
    return started;
}

/* `allreduce_view(x, op, array, key)`: start an allreduce of the tensor `x`, whose elements `array` shows. */
static PyObject *allreduce_view(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "allreduce_view(x, op, array, key)");
        return NULL;
    }
    return start_array((ShortCalls *)object, arguments[2], arguments[3], arguments[1], arguments[0]);
}

/* `barrier()` */
static PyObject *barrier(PyObject *object, PyObject *unused)
{
    ShortCalls *self = (ShortCalls *)object;
    Py_buffer bytes = {0};
    (void)unused;
    if (!self->barriers.plan)
        Py_RETURN_NONE;
    return start_kind(self, &self->barriers, Py_None, Py_None, &bytes);
}

/* -- what others ask ------------------------------------------------------------------------------ */

static int add_counts(PyObject *list, Kind *kind)
{
    if (!kind->plan || !(kind->reduced || kind->received))
        return 0;
    PyObject *counts = Py_BuildValue("OLL", kind->plan, (long long)kind->reduced, (long long)kind->received);
    int failed = counts ? PyList_Append(list, counts) : -1;
    if (!failed)
        kind->reduced = kind->received = 0;
    Py_XDECREF(counts);
    return failed;
}

/* `counts()`: of each kind with calls since the last time: the plan, and the calls that this rank, and another, reduced. */
static PyObject *counts(PyObject *object, PyObject *unused)
{
    ShortCalls *self = (ShortCalls *)object;
    (void)unused;
    PyObject *list = PyList_New(0);
    int failed = list ? add_counts(list, &self->barriers) : -1;
    for (int i = 0; !failed && i < KINDS; i++)
        failed = add_counts(list, &self->kinds[i]);
    if (failed)
        Py_CLEAR(list);
    return list;
}

/* `latest()`: the entry of the newest call, and when a call last ended; None before the first call. */
static PyObject *latest(PyObject *object, PyObject *unused)
{
    ShortCalls *self = (ShortCalls *)object;
    (void)unused;
    return self->parts[ENTRY] ? Py_BuildValue("Od", self->parts[ENTRY], self->ended_s) : Py_NewRef(Py_None);
}

/* `trace(append, make)` */
static PyObject *trace(PyObject *object, PyObject *arguments)
{
    return trace_switch(&((ShortCalls *)object)->trace, arguments);
}

/* -- the awaitable -------------------------------------------------------------------------------- */

/* Look whether the result is there, for the caller, which has come back. Returns 1 if the call is over. */
static int look(ShortCall *call)
{
    ShortCalls *self = call->calls;
    const Meeting *meeting = &call->kind->meeting;
    /* The look is a hint, mostly without the lock. `meetings_complete` decides under the lock, which also orders the
     * memory of the result. */
    int is_over = meetings_look(self->meetings, call->number, meeting, self->polls, self->sleep_ns);
    if (is_over > 0) {
        bool is_clear = PySet_Size(self->parts[UNFINISHED]) <= 1; /* this one */
        is_over = meetings_complete(self->meetings, call->number, meeting->done, &call->shown, is_clear);
    }
    if (is_over > 0 && end(call, false) < 0)
        return -1;
    return is_over;
}

/* Whether the call waits for its caller, and no thread looks at it. -1 with an exception. */
static int is_held(const ShortCall *call)
{
    if (call->head.state != BEGUN || call->is_looked_at || call->calls->parts[HELD] == Py_None)
        return 0;
    return PyDict_Contains(call->calls->parts[HELD], (PyObject *)call);
}

/* Take the call out of `held`. Keeps an exception that is set. Returns 0, or -1 with an exception. */
static int take_out(ShortCall *call)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    int failed = PyDict_DelItem(call->calls->parts[HELD], (PyObject *)call);
    if (type)
        PyErr_Restore(type, value, trace); /* in place of a later one */
    return failed;
}

/* The first step of an `await`: end the call, or make `rest`. Returns 0, or -1 with an exception. */
static int resume(Awaitable *head)
{
    ShortCall *call = (ShortCall *)head;
    ShortCalls *self = call->calls;
    /* Exactly one of the caller and the runtime removes the call from `held`, and goes on with it. */
    int is_mine = PyDict_Contains(self->parts[HELD], (PyObject *)call);
    if (is_mine < 0 || (is_mine && take_out(call) < 0))
        return -1;
    /* An array that others see is taken back after an exception, which takes more than one step. So a handler that the
     * program has set since the call leaves the rest to Python, too. */
    int is_unsafe = is_mine && call->address ? may_handler_raise(self) : 0;
    if (is_mine && !is_unsafe && look(call) > 0)
        return 0;
    head->rest = is_mine ? go_on(call) : PyObject_CallMethod(self->parts[RUNNER], "taken", "O", call);
    head->state = RESTING;
    return head->rest ? 0 : -1;
}

static void forget_array(Awaitable *head)
{
    forget((ShortCall *)head);
}

static const AwaitableKind kind_of_calls = {.resume = resume, .left = forget_array};

/* `look()`: see asyncoll.runtime.handles.Shared. The call stays in `held` meanwhile, so an exception loses nothing. */
static PyObject *look_in_any_thread(PyObject *object, PyObject *unused)
{
    ShortCall *call = (ShortCall *)object;
    (void)unused;
    int outcome = call->is_wanted ? 0 : is_held(call);
    if (outcome > 0) {
        /* `look` releases the GIL. Another thread that awaits or claims the call meanwhile finds it looked at, and
         * does not begin a second look at the same array. */
        call->is_looked_at = true;
        outcome = look(call);
        call->is_looked_at = false;
        if (call->head.state == ENDED && take_out(call) < 0)
            outcome = -1;
    }
    return outcome < 0 ? NULL : PyBool_FromLong(call->head.state == ENDED);
}

/* `claim()`: see asyncoll.runtime.handles.Shared. */
static PyObject *claim(PyObject *object, PyObject *unused)
{
    ShortCall *call = (ShortCall *)object;
    (void)unused;
    /* A thread that looks again and again is in `look` whenever another one gets the GIL, unless `look` ends at once. */
    call->is_wanted = true;
    int is = is_held(call);
    if (is < 0 || (is && take_out(call) < 0))
        return NULL;
    return PyBool_FromLong(is);
}

/* `finish()`: as asyncoll.runtime.shared_work.Driven.finish, for the runtime, which has taken the call over. */
static PyObject *finish(PyObject *object, PyObject *unused)
{
    ShortCall *call = (ShortCall *)object;
    (void)unused;
    PyObject *work = PyObject_CallMethod(call->calls->parts[REST], "general", "OO", call, Py_None);
    PyObject *coroutine = work ? PyObject_CallMethod(work, "finish", NULL) : NULL;
    Py_XDECREF(work);
    return coroutine;
}

static int traverse_call(PyObject *object, visitproc visit, void *arg)
{
    ShortCall *call = (ShortCall *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(call->calls);
    Py_VISIT(call->array);
    Py_VISIT(call->block);
    Py_VISIT(call->head.result);
    Py_VISIT(call->entry);
    Py_VISIT(call->expires_s);
    Py_VISIT(call->head.rest);
    return 0;
}

/* `calls` stays until the end, because a method may run in a finalizer of the same cycle, and so does `entry`. */
static int clear_call(PyObject *object)
{
    ShortCall *call = (ShortCall *)object;
    forget(call);
    Py_CLEAR(call->head.result);
    Py_CLEAR(call->expires_s);
    Py_CLEAR(call->head.rest);
    return 0;
}

static void destroy_call(PyObject *object)
{
    ShortCall *call = (ShortCall *)object;
    PyObject_GC_UnTrack(object);
    if (call->weak_references)
        PyObject_ClearWeakRefs(object);
    clear_call(object);
    Py_XDECREF((PyObject *)call->calls);
    Py_XDECREF(call->entry);
    free_object(object);
}

static PyMethodDef call_methods[] = {
    {"look", look_in_any_thread, METH_NOARGS, NULL},
    {"claim", claim, METH_NOARGS, NULL},
    {"finish", finish, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef call_members[] = {
    {"array", T_OBJECT, offsetof(ShortCall, array), READONLY, NULL},
    {"block", T_OBJECT, offsetof(ShortCall, block), READONLY, NULL},
    {"result", T_OBJECT, offsetof(ShortCall, head.result), READONLY, NULL},
    {"entry", T_OBJECT, offsetof(ShortCall, entry), READONLY, NULL},
    {"since_s", T_DOUBLE, offsetof(ShortCall, since_s), READONLY, NULL},
    {"expires_s", T_OBJECT, offsetof(ShortCall, expires_s), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(ShortCall, weak_references), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot call_slots[] = {
    {Py_tp_dealloc, destroy_call},
    {Py_tp_traverse, traverse_call},
    {Py_tp_clear, clear_call},
    {Py_tp_methods, call_methods},
    {Py_tp_members, call_members},
    {Py_am_send, awaitable_send},
    {0, NULL},
};

PyType_Spec short_call_spec = {
    .name = "asyncoll._core.native.ShortCall",
    .basicsize = sizeof(ShortCall),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = call_slots,
};

/* -- the type of the factory ---------------------------------------------------------------------- */

/* `ShortCalls(meetings, (start, length, first), polls, sleep_ns, calls_per_turn, **parts)` */
static PyObject *create(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    PyObject *meetings, *parts[GIVEN];
    long long start, length, first, polls, sleep_ns, calls_per_turn;
    if (!PyArg_ParseTuple(arguments, "O(LLL)LLL:ShortCalls", &meetings, &start, &length, &first, &polls, &sleep_ns,
                          &calls_per_turn))
        return NULL;
    for (int i = 0; i < GIVEN; i++) {
        parts[i] = keywords ? PyDict_GetItemString(keywords, given[i]) : NULL;
        if (!parts[i])
            return PyErr_Format(PyExc_TypeError, "ShortCalls needs %s", given[i]);
    }
    bool fits = is_meetings(meetings) && PyList_Check(parts[OWN]) && PyList_Check(parts[BLOCKS]) &&
                PySet_Check(parts[UNFINISHED]) && PyDict_Check(parts[TURNS]);
    if (!fits || (parts[HELD] != Py_None && !PyDict_Check(parts[HELD]))) {
        PyErr_SetString(PyExc_ValueError, "these are no short calls");
        return NULL;
    }
    allocfunc allocate = PyType_GetSlot(type, Py_tp_alloc); /* sets all to zero */
    ShortCalls *self = (ShortCalls *)allocate(type, 0);
    if (!self)
        return NULL;
    self->meetings = (Meetings *)Py_NewRef(meetings);
    for (int i = 0; i < GIVEN; i++)
        self->parts[i] = Py_NewRef(parts[i]);
    self->start = start;
    self->length = length;
    self->first = first;
    self->polls = polls;
    self->sleep_ns = sleep_ns;
    self->calls_per_turn = calls_per_turn;
    PyObject *module = PyType_GetModule(type);
    self->parts[CALL_TYPE] = module ? PyObject_GetAttrString(module, "ShortCall") : NULL;
    self->parts[LIBRARIES] = PyTuple_New(0);
    self->kinds = PyMem_Calloc(KINDS, sizeof(Kind));
    bool is_complete = self->parts[CALL_TYPE] && self->parts[LIBRARIES] && self->kinds;
    for (int i = 0; is_complete && i < NAMES; i++)
        is_complete = (self->names[i] = PyUnicode_InternFromString(names[i])) != NULL;
    if (is_complete)
        return (PyObject *)self;
    Py_DECREF(self);
    return PyErr_Occurred() ? NULL : PyErr_NoMemory();
}

static int traverse(PyObject *object, visitproc visit, void *arg)
{
    ShortCalls *self = (ShortCalls *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->meetings);
    Py_VISIT(self->trace.append);
    Py_VISIT(self->trace.make);
    for (int i = 0; i < PARTS; i++)
        Py_VISIT(self->parts[i]);
    return 0;
}

/* `general` alone: every cycle goes through it. The other parts stay until the end, for a call in a finalizer. */
static int clear(PyObject *object)
{
    ShortCalls *self = (ShortCalls *)object;
    PyObject *before = self->parts[GENERAL];
    self->parts[GENERAL] = Py_NewRef(Py_None); /* has no attribute `unstarted`: no call begins */
    Py_XDECREF(before);
    return 0;
}

static void destroy(PyObject *object)
{
    ShortCalls *self = (ShortCalls *)object;
    PyObject_GC_UnTrack(object);
    for (int i = 0; self->kinds && i < KINDS; i++) {
        Py_XDECREF(self->kinds[i].key);
        Py_XDECREF(self->kinds[i].op);
        Py_XDECREF(self->kinds[i].plan);
    }
    PyMem_Free(self->kinds);
    Py_XDECREF(self->barriers.plan);
    Py_XDECREF((PyObject *)self->meetings);
    trace_forget(&self->trace);
    for (int i = 0; i < PARTS; i++)
        Py_XDECREF(self->parts[i]);
    for (int i = 0; i < NAMES; i++)
        Py_XDECREF(self->names[i]);
    free_object(object);
}

static PyMethodDef methods[] = {
    {"allreduce", (PyCFunction)(void (*)(void))allreduce, METH_FASTCALL, NULL},
    {"allreduce_view", (PyCFunction)(void (*)(void))allreduce_view, METH_FASTCALL, NULL},
    {"barrier", barrier, METH_NOARGS, NULL},
    {"learn", learn, METH_VARARGS, NULL},
    {"counts", counts, METH_NOARGS, NULL},
    {"latest", latest, METH_NOARGS, NULL},
    {"trace", trace, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"last", T_LONGLONG, offsetof(ShortCalls, last), 0, NULL},
    {"libraries", T_OBJECT, offsetof(ShortCalls, parts[LIBRARIES]), 0, NULL},
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

PyType_Spec short_calls_spec = {
    .name = "asyncoll._core.native.ShortCalls",
    .basicsize = sizeof(ShortCalls),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};
