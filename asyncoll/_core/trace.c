/* The events of calls that are carried out here: see asyncoll/runtime/trace.py. */
#include "native.h"

void trace_event(const Tracing *trace, enum What what, double at_s, PyObject *about)
{
    PyObject *appended = PyObject_CallMethod(trace->sink, "append", "((OidO))", trace->make, (int)what, at_s, about);
    if (!appended)
        PyErr_WriteUnraisable(trace->sink); /* it changes no call that an event is lost */
    Py_XDECREF(appended);
}

void trace_forget(Tracing *trace)
{
    Py_CLEAR(trace->sink);
    Py_CLEAR(trace->make);
}

PyObject *trace_switch(Tracing *trace, PyObject *arguments)
{
    PyObject *sink, *make;
    if (!PyArg_ParseTuple(arguments, "OO:trace", &sink, &make))
        return NULL;
    Tracing before = *trace;
    *trace = sink == Py_None ? (Tracing){NULL, NULL} : (Tracing){Py_NewRef(sink), Py_NewRef(make)};
    trace_forget(&before);
    Py_RETURN_NONE;
}
