/* Whole calls of wait-avoiding rounds, in one step, if they are over without a wait.
 *
 * The counterpart of `Repeat.start` and `_PromptCall` (asyncoll/algorithms/rounds/repeats.py and operations.py), with the
 * accounting of `Engine` and the turns of `CallOrder`. No bytecode runs between the beginning of a call and its answer,
 * so an exception of a signal handler finds the call not begun, or over: see awaitables.c.
 */
#include "rounds.h"

/* The fields of a `Reduction` (reduction.py), in the order in which `reduction_of` has their values. */
static const char *const reduction_fields[] = {"round", "active", "included", "skipped",  "synchronous", "missed",
                                               "group", "ranks",  "lag",      "waited_s", "result"};
enum { REDUCTION_FIELDS = sizeof reduction_fields / sizeof *reduction_fields };

/* The turn of a call that begins now; NULL if an earlier call of this rank is under way, or with an exception set. */
static PyObject *take_turn(Rounds *self)
{
    PyObject *turn = PyIter_Next(self->attached[ORDER_NUMBERS]);
    if (!turn || PyObject_RichCompareBool(turn, PyList_GetItem(self->attached[ORDER_NOW], 0), Py_EQ) == 1)
        return turn;
    /* The call is over before its turn. No thread comes between, so the call whose turn it is finds this one. */
    PySet_Add(self->attached[ORDER_OVER], turn);
    Py_DECREF(turn);
    return NULL;
}

/* Wake the call that waits for turn `next`, if there is one. Returns 0, or -1 with the exception of a signal handler. */
static int wake_turn(Rounds *self, PyObject *next)
{
    PyObject *turn = PyDict_GetItemWithError(self->attached[ORDER_WAITING], next);
    if (!turn)
        return PyErr_Occurred() ? -1 : 0;
    PyObject *set = PyObject_GetAttrString(turn, "set");
    PyDict_DelItem(self->attached[ORDER_WAITING], next);
    int failed = set ? call_to_its_end(set, NULL) : -1;
    Py_XDECREF(set);
    return failed;
}

/* `CallOrder.end` of a call that had its turn. Returns 0, or -1 with an exception set. */
static int end_turn(Rounds *self, PyObject *turn)
{
    int64_t number = PyLong_AsLongLong(turn) + 1;
    PyObject *next = PyLong_FromLongLong(number);
    while (next && PySet_Discard(self->attached[ORDER_OVER], next) == 1) {
        Py_DECREF(next);
        next = PyLong_FromLongLong(++number);
    }
    if (!next)
        return -1;
    PyList_SetItem(self->attached[ORDER_NOW], 0, Py_NewRef(next));
    int failed = wake_turn(self, next);
    Py_DECREF(next);
    return failed;
}

/* Whether `block` has memory, or stands for none. */
static bool is_sound(const Rounds *self, int64_t block)
{
    return block == NONE || rounds_find_memory(self, block);
}

/* Whether the blocks that a call uses have memory: those that it takes, the staged ones, and the newest result. */
static bool has_sound_blocks(const Rounds *self)
{
    int64_t count = free_count(self), latest = self->head[HEAD_LATEST];
    if (count < 2 || count > self->limit || !is_sound(self, self->stack[count - 1]) ||
        !is_sound(self, self->stack[count - 2]) ||
        !is_sound(self, results_of(self, latest)[self->rank * KEPT_CELLS + KEPT_BLOCK]))
        return false;
    for (int64_t rank = 0; rank < self->size; rank++) {
        if (!is_sound(self, row_of(self, rank)[RANK_CELLS_STAGED]))
            return false;
    }
    return true;
}

/* Whether a call that aims at round `aim` is over without a wait, and needs nothing of Python. It opens that round, or is
 * late and given the newest one. Under the lock; changes nothing. */
static bool ends_at_once(Rounds *self, int64_t aim)
{
    int64_t latest = self->head[HEAD_LATEST], *here = &row_of(self, self->rank)[RANK_CELLS_HERE];
    bool asks_plan = needs_drawn(self->drawn, waits_for_all(self, latest + 1));
    if (latest < 0 || latest >= ROUNDS_MAX || latest < aim - 1 || latest - aim >= ENGINE_CELLS - LAGS ||
        self->head[HEAD_RUNNING] || (asks_plan && self->planned != latest + 1) || !has_sound_blocks(self))
        return false;
    if (latest >= aim)
        return !rounds_late_call_opens(self, latest + 1);
    int64_t before = *here;
    *here = aim; /* as if the caller had arrived */
    bool opens = rounds_may_open(self, aim);
    *here = before;
    return opens;
}

/* Divide the result in `flat` of `active` contributions by what the reduction demands. */
static void divide_result(const Rounds *self, const Py_buffer *flat, int64_t active)
{
    int64_t divisor = self->divisor ? self->divisor : active;
    void *array = flat->buf;
    if (divisor != 1)
        self->parts[0].kernel(array, &array, 1, (size_t)self->parts[0].elements, divisor);
}

/* Under the lock: copy the result of a call that is over to `flat`. Returns the ranks in it; NULL with an exception set. */
static PyObject *take_result(Rounds *self, const Call *call, const Py_buffer *flat, int64_t aim)
{
    int64_t block = call->kept[KEPT_BLOCK], lag = minus(call->kept[KEPT_NUMBER], aim);
    const char *memory = rounds_find_memory(self, block);
    if (block != NONE && !memory)
        return rounds_corrupt("block", block), NULL;
    if (lag < 0 || lag >= ENGINE_CELLS - LAGS)
        return rounds_corrupt("lag", lag), NULL;
    if (memory)
        rounds_copy_out(self, memory, flat);
    PyObject *ranks = rounds_contributors_of(self, block, call->kept[KEPT_ACTIVE]);
    if (ranks)
        rounds_drop_block(self, block);
    return ranks;
}

/* With the lock, which is released: carry out a call that `ends_at_once`. Returns as `take_result`. */
static PyObject *carry_out(Rounds *self, Call *call, const Py_buffer *flat, int64_t aim)
{
    call->number = self->head[HEAD_LATEST] < aim ? aim : 0;
    rounds_count_late(self, aim, call->came_ns);
    int64_t block = rounds_fill_block(self, flat);
    if (block < 0)
        return NULL;
    rounds_put(self, call, block, self->addresses[block], 1.0);
    PyObject *ranks = rounds_come(self, call, aim) < 0 ? NULL : take_result(self, call, flat, aim);
    leave_lock(self, ranks);
    return ranks;
}

/* `Engine.deliver` without history. Returns the lag: all rounds since the aim are skipped. */
static int64_t deliver(Rounds *self, const Call *call, bool *included)
{
    int64_t *cells = self->engine.buf, lag = call->kept[KEPT_NUMBER] - cells[AIM];
    *included = call->ticket <= call->kept[KEPT_TAKEN];
    cells[AIM] = call->kept[KEPT_NUMBER] + 1;
    cells[LAGS + lag] += 1;
    cells[STALE] += !*included;
    return lag;
}

/* The `Reduction` of a call of `array`; NULL with an exception set. Its class is written in Python, and its `__init__`
 * would be bytecode: see awaitables.c. */
static PyObject *reduction_of(Rounds *self, const Call *call, PyObject *ranks, bool included, int64_t lag,
                              PyObject *array)
{
    int64_t number = call->kept[KEPT_NUMBER];
    bool synchronous = waits_for_all(self, number) && !call->kept[KEPT_ABSENT];
    allocfunc allocate = PyType_GetSlot((PyTypeObject *)self->attached[REDUCTION], Py_tp_alloc);
    /* Without `__init__`, so that no bytecode runs; the slots are set one by one, as the class has no dictionary. */
    PyObject *made = allocate((PyTypeObject *)self->attached[REDUCTION], 0);
    PyObject *values =
        Py_BuildValue("(LnOLO()OOLdO)", (long long)number, PyTuple_Size(ranks), included ? Py_True : Py_False,
                      (long long)lag, synchronous ? Py_True : Py_False, self->attached[EVERYONE], ranks, (long long)lag,
                      1e-9 * (double)(clock_ns() - call->came_ns), PyTuple_Size(ranks) ? array : Py_None);
    for (Py_ssize_t i = 0; made && values && i < PyTuple_Size(values); i++) {
        PyObject *field = PyTuple_GetItem(self->attached[FIELDS], i);
        descrsetfunc set = PyType_GetSlot(Py_TYPE(field), Py_tp_descr_set);
        if (set(field, made, PyTuple_GetItem(values, i)) < 0)
            Py_CLEAR(made);
    }
    if (!values)
        Py_CLEAR(made);
    Py_XDECREF(values);
    return made;
}

/* With the turn: the awaitable of the call, or None if that has to wait, or needs Python: then nothing has changed. */
static PyObject *answer_at_once(Rounds *self, PyObject *array, const Py_buffer *flat)
{
    Call call = {.came_ns = clock_ns(), .first_missed = 1};
    int64_t aim = ((int64_t *)self->engine.buf)[AIM];
    /* A lock that others hold for long means waiting, which is left to Python: it would block the caller's loop
     * here. */
    int outcome = control_block_lock_soon(self->block);
    if (outcome < 0)
        return NULL;
    call.now_ns = clock_ns();
    bool ends = outcome == 0 && ends_at_once(self, aim);
    PyObject *ranks = ends ? carry_out(self, &call, flat, aim) : NULL;
    if (!ends && outcome == 0)
        control_block_unlock(self->block);
    if (!ranks)
        return ends ? NULL : Py_NewRef(Py_None);
    /* Divided after the lock is released: the array is the caller's own. */
    if (PyTuple_Size(ranks)) /* otherwise there is no result, and the array has the contribution still */
        divide_result(self, flat, PyTuple_Size(ranks));
    bool included, turns = ++self->calls_in_row >= self->calls_per_turn;
    int64_t lag = deliver(self, &call, &included);
    if (turns)
        self->calls_in_row = 0;
    PyObject *reduction = reduction_of(self, &call, ranks, included, lag, array);
    PyObject *answer = reduction ? make_answer(self->attached[ANSWER], reduction, self->attached[OWED], lag + 1,
                                               call.kept[KEPT_NUMBER], turns)
                                 : NULL;
    Py_XDECREF(reduction);
    Py_DECREF(ranks);
    return answer;
}

/* The end of a call that had `turn`, a new reference: what `at_once` returns if the call has come to `answer`, NULL with an
 * exception set. */
static PyObject *end_call(Rounds *self, PyObject *turn, PyObject *answer)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace); /* no Python runs with an exception set */
    PyErr_NormalizeException(&type, &value, &trace);
    int failed = end_turn(self, turn);
    Py_DECREF(turn);
    if (failed) {
        PyObject *handler_type, *handler_value, *handler_trace;
        PyErr_Fetch(&handler_type, &handler_value, &handler_trace);
        Py_CLEAR(answer); /* its round is owed to the next call */
        PyErr_Restore(handler_type, handler_value, handler_trace);
    } else if (value && PyErr_GivenExceptionMatches(type, PyExc_Exception)) {
        answer = Py_NewRef(value);
    } else if (type) {
        PyErr_Restore(type, value, trace);
        return NULL;
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return answer;
}

/* `at_once(array)`: a whole call, if it is over without a wait. A failure of the rounds is returned: what is raised is the
 * exception of a signal handler, which breaks nothing. */
PyObject *rounds_at_once(PyObject *object, PyObject *array)
{
    Rounds *self = (Rounds *)object;
    Py_buffer flat;
    if (!self->attached[ANSWER] || PyObject_Size(self->attached[OWED]))
        Py_RETURN_NONE;
    if (PyObject_GetBuffer(array, &flat, PyBUF_WRITABLE) < 0) {
        PyErr_Clear(); /* not contiguous, or not writable: left to Python */
        Py_RETURN_NONE;
    }
    bool suits = flat.len == self->parts[0].length && (uintptr_t)flat.buf % (uintptr_t)flat.itemsize == 0;
    PyObject *turn = suits ? take_turn(self) : NULL;
    PyObject *answer = turn ? answer_at_once(self, array, &flat) : PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    PyBuffer_Release(&flat);
    return turn ? end_call(self, turn, answer) : answer;
}

/* Whether these slots of a class are those of `reduction_fields`. A field that the core does not know would stay empty. */
static bool has_known_fields(PyObject *slots)
{
    bool is = PyTuple_Size(slots) == REDUCTION_FIELDS;
    for (Py_ssize_t i = 0; is && i < REDUCTION_FIELDS; i++) {
        PyObject *name = PyObject_GetAttrString(PyTuple_GetItem(slots, i), "__name__");
        is = name && PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, reduction_fields[i]) == 0;
        Py_XDECREF(name);
    }
    return is;
}

/* `attach(reduction, fields, turns, owed, engine, divisor, calls_per_turn)`: what `at_once` needs. */
PyObject *rounds_attach(PyObject *object, PyObject *arguments)
{
    Rounds *self = (Rounds *)object;
    PyObject *given[ATTACHED] = {NULL}, *engine;
    long long divisor, calls_per_turn;
    if (!PyArg_ParseTuple(arguments, "O!O!(OO!O!O!)OOLL:attach", &PyType_Type, &given[REDUCTION], &PyTuple_Type,
                          &given[FIELDS], &given[ORDER_NUMBERS], &PyList_Type, &given[ORDER_NOW], &PySet_Type,
                          &given[ORDER_OVER], &PyDict_Type, &given[ORDER_WAITING], &given[OWED], &engine, &divisor,
                          &calls_per_turn))
        return NULL;
    if (self->attached[ANSWER] || !has_known_fields(given[FIELDS]) || !PyIter_Check(given[ORDER_NUMBERS]) ||
        PyList_Size(given[ORDER_NOW]) != 1 || self->part_count != 1 || self->keeps || self->is_long || self->history ||
        divisor < 0)
        return PyErr_Format(PyExc_ValueError, "these calls cannot be over at once");
    if (PyObject_GetBuffer(engine, &self->engine, PyBUF_WRITABLE) < 0)
        return NULL;
    if (self->engine.len != ENGINE_CELLS * (Py_ssize_t)sizeof(int64_t))
        return PyErr_Format(PyExc_ValueError, "an engine has %d cells", ENGINE_CELLS);
    self->divisor = divisor;
    self->calls_per_turn = calls_per_turn;
    for (int i = REDUCTION; i < ATTACHED; i++)
        self->attached[i] = Py_XNewRef(given[i]);
    PyObject *everyone = self->attached[EVERYONE] = PyTuple_New((Py_ssize_t)self->size);
    for (Py_ssize_t rank = 0; everyone && rank < self->size; rank++)
        PyTuple_SetItem(everyone, rank, PyLong_FromSsize_t(rank));
    PyObject *module = everyone ? PyType_GetModule(Py_TYPE(object)) : NULL;
    PyObject *answer = module ? PyObject_GetAttrString(module, "Answer") : NULL;
    self->attached[ANSWER] = answer; /* last: now `at_once` may be called */
    return answer ? Py_NewRef(Py_None) : NULL;
}
