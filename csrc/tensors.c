/* What a steady call asks PyTorch: is the way free, and what do its tensors look like. */

#include "launcher.h"

#include <string.h>

Torch torch;

static PyObject *name_is_neg, *name_level, *name_hook, *name_calls, *name_parameters, *name_weight, *name_bias;
/* Of a Linear's __dict__: dicts that are empty, and what is not there, while calling it is its product alone. */
static PyObject *hook_names[4], *name_forward;

static int make_names(void) {
    struct {
        const char *text;
        PyObject **name;
    } wanted[] = {
        {"is_neg", &name_is_neg},
        {"_current_level", &name_level},
        {"launch_enter_hook", &name_hook},
        {"calls", &name_calls},
        {"_parameters", &name_parameters},
        {"weight", &name_weight},
        {"bias", &name_bias},
        {"_forward_hooks", &hook_names[0]},
        {"_forward_pre_hooks", &hook_names[1]},
        {"_backward_hooks", &hook_names[2]},
        {"_backward_pre_hooks", &hook_names[3]},
        {"forward", &name_forward},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        if (!*wanted[i].name && !(*wanted[i].name = PyUnicode_InternFromString(wanted[i].text)))
            return -1;
    return 0;
}

PyObject *torch_connect(PyObject *module, PyObject *args, PyObject *keywords) {
    (void)module;
    struct {
        const char *name;
        PyObject **target;
    } wanted[] = {
        {"tensor_type", &torch.tensor_type},
        {"parameter_type", &torch.parameter_type},
        {"linear_type", &torch.linear_type},
        {"global_hooks", &torch.global_hooks},
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
        if ((wanted[i].target == &torch.busy || wanted[i].target == &torch.global_hooks) && !PyTuple_Check(values[i])) {
            PyErr_SetString(PyExc_TypeError, "busy and global_hooks must be tuples");
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

/* Whether `state`, a Linear's __dict__, has nothing around its forward; its weight and bias, borrowed. */
static int read_linear(PyObject *state, PyObject **weight, PyObject **bias) {
    for (size_t i = 0; i < sizeof hook_names / sizeof *hook_names; i++) {
        PyObject *hooks = PyDict_GetItem(state, hook_names[i]);
        if (!hooks || !PyDict_Check(hooks) || PyDict_Size(hooks))
            return 0;
    }
    PyObject *parameters = PyDict_GetItem(state, name_parameters);
    if (!parameters || !PyDict_Check(parameters) || PyDict_GetItem(state, name_forward))
        return 0;
    *weight = PyDict_GetItem(parameters, name_weight);
    *bias = PyDict_GetItem(parameters, name_bias);
    return *weight && *bias && *weight != Py_None; /* elsewhere: a parametrisation, or a wrapper's views */
}

int torch_linears(PyObject *children, PyObject *names, PyObject **operands) {
    if (!PyDict_Check(children) || !PyTuple_Check(names))
        return 0;
    for (Py_ssize_t i = 0; i < PyTuple_Size(torch.global_hooks); i++)
        if (PyObject_Size(PyTuple_GetItem(torch.global_hooks, i))) {
            PyErr_Clear();
            return 0;
        }
    Py_ssize_t count = PyTuple_Size(names);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *child = PyDict_GetItem(children, PyTuple_GetItem(names, i));
        if (!child || (PyObject *)Py_TYPE(child) != torch.linear_type)
            return 0;
        PyObject *state = PyObject_GenericGetDict(child, NULL);
        int plain = state && PyDict_Check(state) && read_linear(state, &operands[i], &operands[count + i]);
        Py_XDECREF(state); /* the child holds it */
        if (!plain) {
            PyErr_Clear();
            return 0;
        }
    }
    return 1;
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
