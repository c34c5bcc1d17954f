/* What a steady call asks PyTorch: is the way free, and what do its tensors look like. */

#include "launcher.h"

#include <string.h>

Torch torch;

static PyObject *name_is_neg, *name_level, *name_hook, *name_calls;

static int make_names(void) {
    if (name_calls && name_hook && name_level && name_is_neg)
        return 0;
    name_is_neg = PyUnicode_InternFromString("is_neg");
    name_level = PyUnicode_InternFromString("_current_level");
    name_hook = PyUnicode_InternFromString("launch_enter_hook");
    name_calls = PyUnicode_InternFromString("calls");
    return name_is_neg && name_level && name_hook && name_calls ? 0 : -1;
}

PyObject *torch_connect(PyObject *module, PyObject *args, PyObject *keywords) {
    (void)module;
    struct {
        const char *name;
        PyObject **target;
    } wanted[] = {
        {"tensor_type", &torch.tensor_type},
        {"parameter_type", &torch.parameter_type},
        {"grad_enabled", &torch.grad_enabled},
        {"dispatch_modes", &torch.dispatch_modes},
        {"tracing_state", &torch.tracing_state},
        {"transforms_active", &torch.transforms_active},
        {"forward_ad", &torch.forward_ad},
        {"hooks", &torch.hooks},
        {"busy", &torch.busy},
        {"precision", &torch.precision},
        {"allocate", &torch.allocate},
        {"release", &torch.release},
    };
    PyObject *capsule = keywords ? PyDict_GetItemString(keywords, "exchange") : NULL;
    if (PyTuple_Size(args) || !capsule || make_names()) {
        PyErr_SetString(PyExc_TypeError, "connect() takes keywords, among them exchange");
        return NULL;
    }
    const DLPackExchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!exchange)
        return NULL;
    if (exchange->major != DLPACK_MAJOR || !exchange->view || !exchange->current_stream) {
        PyErr_Format(PyExc_RuntimeError, "the tensors' exchange interface is DLPack %u.%u; allowed: %d with views",
                     exchange->major, exchange->minor, (int)DLPACK_MAJOR);
        return NULL;
    }
    enum { COUNT = sizeof wanted / sizeof *wanted };
    PyObject *values[COUNT];
    for (size_t i = 0; i < COUNT; i++) {
        values[i] = PyDict_GetItemString(keywords, wanted[i].name);
        if (!values[i]) {
            PyErr_Format(PyExc_TypeError, "connect() needs %s", wanted[i].name);
            return NULL;
        }
        if (wanted[i].target == &torch.busy && !PyTuple_Check(values[i])) {
            PyErr_SetString(PyExc_TypeError, "busy must be a tuple of lists");
            return NULL;
        }
    }
    for (size_t i = 0; i < COUNT; i++) {
        PyObject *old = *wanted[i].target;
        Py_INCREF(values[i]);
        *wanted[i].target = values[i];
        Py_XDECREF(old);
    }
    torch.exchange = exchange; /* static in PyTorch */
    Py_RETURN_NONE;
}

int torch_ask(PyObject *callable) {
    PyObject *answer = PyObject_CallObject(callable, NULL);
    if (!answer)
        return -1;
    int yes = answer == Py_True ? 1 : answer == Py_False || answer == Py_None ? 0 : PyObject_IsTrue(answer);
    Py_DECREF(answer);
    return yes;
}

static int is_hooked(void) {
    PyObject *hook = PyObject_GetAttr(torch.hooks, name_hook);
    if (!hook)
        return -1;
    if (hook == Py_None) {
        Py_DECREF(hook);
        return 0;
    }
    PyObject *calls = PyObject_GetAttr(hook, name_calls);
    Py_DECREF(hook);
    if (!calls) { /* a plain function: somebody looks on */
        PyErr_Clear();
        return 1;
    }
    int hooked = PyObject_IsTrue(calls);
    Py_DECREF(calls);
    return hooked;
}

int torch_quiet(void) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(torch.busy); i++)
        if (PyObject_Size(PyTuple_GetItem(torch.busy, i)))
            return PyErr_Occurred() ? -1 : 0;
    PyObject *loud[] = {torch.dispatch_modes, torch.tracing_state, torch.transforms_active};
    for (size_t i = 0; i < sizeof loud / sizeof *loud; i++) {
        int answer = torch_ask(loud[i]);
        if (answer)
            return answer < 0 ? -1 : 0;
    }
    PyObject *level = PyObject_GetAttr(torch.forward_ad, name_level);
    if (!level)
        return -1;
    long depth = PyLong_AsLong(level);
    Py_DECREF(level);
    if (depth == -1 && PyErr_Occurred())
        return -1;
    if (depth >= 0)
        return 0;
    int hooked = is_hooked();
    return hooked < 0 ? -1 : !hooked;
}

int torch_view(PyObject *object, DLTensor *view) {
    PyObject *type = (PyObject *)Py_TYPE(object);
    if (type != torch.tensor_type && type != torch.parameter_type)
        return 0;
    PyObject *negative = PyObject_CallMethodObjArgs(object, name_is_neg, NULL);
    int plain = negative == Py_False;
    Py_XDECREF(negative);
    if (!plain || torch.exchange->view(object, view) || !view->data) {
        PyErr_Clear(); /* sparse, nested, batched: it has no memory of its own to look at */
        return 0;
    }
    view->data = (char *)view->data + view->byte_offset;
    return view->ndim == 0 || (view->shape && view->strides);
}

int torch_stream(const DLTensor *view, CUstream *stream) {
    void *found = NULL;
    if (view->device.type == DLPACK_CUDA && torch.exchange->current_stream(DLPACK_CUDA, view->device.id, &found)) {
        PyErr_Clear();
        return -1;
    }
    *stream = (CUstream)found;
    return 0;
}
