/* The module `asyncoll._core.native`. `asyncoll/_core/__init__.py` loads it, and says what runs without it. */
#include "native.h"

/* Add the type of `spec`. `base` is another type, or NULL. Returns the type, which the module keeps, or NULL with an
 * exception set. */
static PyObject *add_type(PyObject *module, PyType_Spec *spec, PyObject *base)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, base);
    int failed = type ? PyModule_AddType(module, (PyTypeObject *)type) : -1;
    Py_XDECREF(type);
    return failed ? NULL : type;
}

int call_to_its_end(PyObject *callable, PyObject *argument)
{
    PyObject *type = NULL, *value = NULL, *trace = NULL, *result;
    while (!(result = PyObject_CallFunctionObjArgs(callable, argument, NULL))) {
        Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(trace);
        PyErr_Fetch(&type, &value, &trace);
    }
    Py_DECREF(result);
    if (type)
        PyErr_Restore(type, value, trace);
    return type ? -1 : 0;
}

/* `native.declarations` */
static PyObject *declarations_in_python(void)
{
    static const char *const declarations[][2] = {DECLARATIONS};
    enum { COUNT = sizeof declarations / sizeof *declarations };
    PyObject *tuple = PyTuple_New(COUNT);
    for (int i = 0; tuple && i < COUNT; i++) {
        PyObject *pair = Py_BuildValue("ss", declarations[i][0], declarations[i][1]);
        if (!pair || PyTuple_SetItem(tuple, i, pair) < 0)
            Py_CLEAR(tuple);
    }
    return tuple;
}

/* Add `value`, a new reference, which is NULL with an exception set. */
static int add_value(PyObject *module, const char *name, PyObject *value)
{
    int failed = value ? PyModule_AddObjectRef(module, name, value) : -1;
    Py_XDECREF(value);
    return failed;
}

static int execute(PyObject *module)
{
    PyType_Spec *specs[] = {&control_block_spec, &meetings_spec, &pieces_spec, &rounds_spec, &short_calls_spec};
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++)
        if (!add_type(module, specs[i], NULL))
            return -1;
    PyObject *awaitable = add_type(module, &awaitable_spec, NULL);
    if (!awaitable || !add_type(module, &answer_spec, awaitable) || !add_type(module, &short_call_spec, awaitable))
        return -1;
    if (add_value(module, "declarations", declarations_in_python()) < 0)
        return -1;
    return add_value(module, "points", points_in_python());
}

static PyMethodDef functions[] = {
    {"find_kernel", find_kernel_in_python, METH_VARARGS, NULL},
    {"reduce", reduce_in_python, METH_VARARGS, NULL},
    {"reduce_to_all", reduce_to_all_in_python, METH_VARARGS, NULL},
    {"read_memory", read_memory, METH_VARARGS, NULL},
    {"reduce_from_peers", reduce_from_peers, METH_VARARGS, NULL},
    {"select", select_in_python, METH_VARARGS, NULL},
    {"keep_largest", keep_largest_in_python, METH_VARARGS, NULL},
    {"count_magnitudes", count_magnitudes_in_python, METH_VARARGS, NULL},
    {"sum_parts", sum_parts_in_python, METH_VARARGS, NULL},
    {"common", common_in_python, METH_VARARGS, NULL},
    {"watch", watch_in_python, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, execute},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "asyncoll._core.native",
    .m_doc = "Primitives in shared memory, in C.",
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit_native(void)
{
    return PyModuleDef_Init(&definition);
}
