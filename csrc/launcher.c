/* fusedmlp._launcher: launches kernels, and runs whole operations, with little host work. */

#include "launcher.h"

PyObject *name_data_ptr;
PyTypeObject *plan_type;

PyDoc_STRVAR(open_doc,
             "open(path)\n--\n\n"
             "Open a CUDA driver library by another name than libcuda.so.1. Once a driver is open it stays.");

static PyObject *module_open(PyObject *self, PyObject *path) {
    (void)self;
    PyObject *bytes;
    if (!PyUnicode_FSConverter(path, &bytes))
        return NULL;
    int failed = open_driver(PyBytes_AsString(bytes));
    Py_DECREF(bytes);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(connect_doc,
             "connect(**parts)\n--\n\n"
             "Tell programs and tables what they ask of PyTorch and Triton: tensor_type, parameter_type, exchange (the\n"
             "capsule of DLPack's exchange interface), grad_enabled, dispatch_modes, tracing_state, transforms_active\n"
             "(callables), forward_ad (the module), hooks (Triton's, of launches), busy (a tuple of lists that are empty\n"
             "while calls go their usual way), precision (a callable), allocate, release (of memory). Raises TypeError\n"
             "where one is missing, RuntimeError where the exchange interface is of another version.");

static PyObject *add_type(PyObject *module, PyType_Spec *spec, const char *name) {
    PyObject *type = PyType_FromSpec(spec);
    if (!type)
        return NULL;
    Py_INCREF(type); /* one for the module, one for us */
    if (PyModule_AddObject(module, name, type)) {
        Py_DECREF(type);
        Py_CLEAR(type);
    }
    return type;
}

static int module_exec(PyObject *module) {
    if (!name_data_ptr)
        name_data_ptr = PyUnicode_InternFromString("data_ptr");
    if (!name_data_ptr)
        return -1;
    plan_type = (PyTypeObject *)add_type(module, &plan_spec, "Plan");
    program_type = (PyTypeObject *)add_type(module, &program_spec, "Program");
    PyObject *table = add_type(module, &table_spec, "Table");
    Py_XDECREF(table);
    return plan_type && program_type && table ? 0 : -1;
}

static PyMethodDef module_methods[] = {
    {"open", module_open, METH_O, open_doc},
    {"connect", (PyCFunction)(void (*)(void))torch_connect, METH_VARARGS | METH_KEYWORDS, connect_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, (void *)module_exec},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "fusedmlp._launcher", "Launches kernels with little host work.",
    0, module_methods, module_slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__launcher(void) { return PyModuleDef_Init(&module_definition); }
