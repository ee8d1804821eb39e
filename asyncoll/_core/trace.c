/* The events of calls that are carried out here: see asyncoll/runtime/trace.py. */
#include "native.h"

void trace_event(const Tracing *trace, enum What what, double at_s, PyObject *about)
{
    PyObject *append = Py_NewRef(trace->append); /* the sink may be changed meanwhile */
    PyObject *event = Py_BuildValue("(OidO)", trace->make, (int)what, at_s, about);
    PyObject *told = event ? PyObject_CallFunctionObjArgs(append, event, NULL) : NULL;
    if (!told)
        PyErr_WriteUnraisable(append); /* it changes no call that an event is lost */
    Py_DECREF(append);
    Py_XDECREF(event);
    Py_XDECREF(told);
}

void trace_forget(Tracing *trace)
{
    Py_CLEAR(trace->append);
    Py_CLEAR(trace->make);
}

PyObject *trace_switch(Tracing *trace, PyObject *arguments)
{
    PyObject *append, *make;
    if (!PyArg_ParseTuple(arguments, "OO:trace", &append, &make))
        return NULL;
    Tracing before = *trace;
    *trace = append == Py_None ? (Tracing){NULL, NULL} : (Tracing){Py_NewRef(append), Py_NewRef(make)};
    trace_forget(&before);
    Py_RETURN_NONE;
}
