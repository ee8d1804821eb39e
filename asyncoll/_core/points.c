/* Named moments inside the primitives, for tests that let a rank fail there: `native.points` and `native.watch`. */
#include "native.h"

static const char *const names[POINTS] = {
    [LOCK_TAKEN] = "lock-taken",
    [LOCK_NOTED] = "lock-noted",
    [LOCK_RELEASED] = "lock-released",
    [DOORBELL_CHOSEN] = "doorbell-chosen",
    [DOORBELL_RUNG] = "doorbell-rung",
    [FUTEX_WOKEN] = "futex-woken",
    [MEETING_COPIED] = "meeting-copied",
    [MEETING_OPENED] = "meeting-opened",
    [MEETING_ARRIVED] = "meeting-arrived",
    [MEETING_CLAIMED] = "meeting-claimed",
    [MEETING_REDUCED] = "meeting-reduced",
    [MEETING_SHOWN] = "meeting-shown",
    [MEETING_COUNTED] = "meeting-counted",
    [MEETING_PUBLISHED] = "meeting-published",
    [MEETING_NOT_WOKEN] = "meeting-not-woken",
    [MEETING_ASLEEP] = "meeting-asleep",
    [MEETING_RECEIVED] = "meeting-received",
    [MEETING_LEFT] = "meeting-left",
    [PIECE_COPIED_IN] = "piece-copied-in",
    [PIECE_REDUCED] = "piece-reduced",
    [PIECE_COPIED_OUT] = "piece-copied-out",
    [PIECE_COUNTED] = "piece-counted",
    [PIECE_AWAITED] = "piece-awaited",
    [PEER_READ] = "peer-read",
    [PEERS_REDUCED] = "peers-reduced",
    [PEER_TAKEN] = "peer-taken",
    [ROUND_FILLED] = "round-filled",
    [ROUND_STAGED] = "round-staged",
    [ROUND_ARRIVED] = "round-arrived",
    [ROUND_OPENED] = "round-opened",
    [ROUND_TAKEN] = "round-taken",
    [ROUND_REDUCED] = "round-reduced",
    [ROUND_GRANTED] = "round-granted",
    [ROUND_PUBLISHED] = "round-published",
    [ROUND_LEFT] = "round-left",
    [ROUND_COPIED] = "round-copied",
    [ROUND_CLAIMED] = "round-claimed",
    [ROUND_HELPED] = "round-helped",
    [ROUND_COUNTED] = "round-counted",
    [REDUCTION_DONE] = "reduction-done",
};

int points_are_watched; /* of the process, as is the fault */
static PyObject *watcher;

void point_passed(enum Point point)
{
    /* Some points lie where the GIL is released, and some are passed with an exception set, which the watcher must
     * not see. */
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *callable = Py_XNewRef(watcher), *result = NULL;
    if (callable && !(result = PyObject_CallFunction(callable, "s", names[point])))
        PyErr_WriteUnraisable(callable); /* a primitive cannot fail at any point */
    Py_XDECREF(result);
    Py_XDECREF(callable);
    PyErr_Restore(type, value, trace);
    PyGILState_Release(state);
}

PyObject *watch_in_python(PyObject *module, PyObject *callable)
{
    (void)module;
    PyObject *before = watcher;
    watcher = callable == Py_None ? NULL : Py_NewRef(callable);
    __atomic_store_n(&points_are_watched, watcher != NULL, __ATOMIC_RELAXED);
    if (!before)
        Py_RETURN_NONE;
    return before;
}

PyObject *points_in_python(void)
{
    PyObject *tuple = PyTuple_New(POINTS);
    for (int i = 0; tuple && i < POINTS; i++) {
        PyObject *name = Py_BuildValue("s", names[i]);
        if (!name || PyTuple_SetItem(tuple, i, name) < 0)
            Py_CLEAR(tuple);
    }
    return tuple;
}
