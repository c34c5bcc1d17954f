/* fusedmlp._launcher.Program: a whole operation, allocations, calls of PyTorch and launches, in one call from Python.
 *
 * A program works on numbered values: its inputs first, then what its steps make. A value is a tensor, or memory of
 * PyTorch's allocator that no tensor stands for, which a launch can use and nobody sees. Every argument of its
 * kernels is a value's address plus an offset, or a pair of them.
 */

#include "program.h"

PyTypeObject *program_type;

static int read_index(PyObject *number, int limit, int *index, const char *what) {
    long found = PyLong_AsLong(number);
    if (found == -1 && PyErr_Occurred())
        return -1;
    if (found < 0 || found >= limit) {
        PyErr_Format(PyExc_ValueError, "%s %ld of a program with %d", what, found, limit);
        return -1;
    }
    *index = (int)found;
    return 0;
}

static int read_slots(Program *program, PyObject *slots) {
    Py_ssize_t count = PyTuple_Size(slots);
    if (count > MAX_ARGUMENTS) {
        PyErr_Format(PyExc_ValueError, "a program has %zd kernel arguments; allowed: at most %d", count,
                     (int)MAX_ARGUMENTS);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *spec = PyTuple_GetItem(slots, i);
        Slot *slot = &program->slots[i];
        Py_ssize_t parts = PyTuple_Check(spec) ? PyTuple_Size(spec) : 0;
        if (parts != 2 && parts != 4) {
            PyErr_SetString(PyExc_ValueError, "a kernel argument must be (value, offset), or two of them in one tuple");
            return -1;
        }
        slot->pair = parts == 4;
        for (int j = 0; j <= slot->pair; j++) {
            if (read_index(PyTuple_GetItem(spec, 2 * j), program->value_count, &slot->values[j], "value"))
                return -1;
            long long offset = PyLong_AsLongLong(PyTuple_GetItem(spec, 2 * j + 1));
            if (offset == -1 && PyErr_Occurred())
                return -1;
            slot->offsets[j] = (uint64_t)offset;
        }
    }
    program->slot_count = (int)count;
    return 0;
}

/* The number of a value that a step makes or ends: inputs are the caller's. */
static int read_own(const Program *program, PyObject *number, int *value) {
    if (read_index(number, program->value_count, value, "value"))
        return -1;
    if (*value < program->input_count) {
        PyErr_SetString(PyExc_ValueError, "an input is not a program's to make, give or drop");
        return -1;
    }
    return 0;
}

/* A tuple of (position or keyword, value); the values are checked. */
static int check_places(const Program *program, PyObject *places, Py_ssize_t arguments) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(places); i++) {
        PyObject *place = PyTuple_GetItem(places, i);
        int unused;
        if (!PyTuple_Check(place) || PyTuple_Size(place) != 2) {
            PyErr_SetString(PyExc_ValueError, "a place must be (position or keyword, value)");
            return -1;
        }
        if (read_index(PyTuple_GetItem(place, 1), program->value_count, &unused, "value"))
            return -1;
        if (arguments >= 0 && read_index(PyTuple_GetItem(place, 0), (int)arguments, &unused, "argument"))
            return -1;
        if (arguments < 0 && !PyUnicode_Check(PyTuple_GetItem(place, 0))) {
            PyErr_SetString(PyExc_ValueError, "a keyword must be a str");
            return -1;
        }
    }
    return 0;
}

/* ("call", function, arguments, places, keywords or None, named, results) */
static int read_call(const Program *program, PyObject *spec, Step *step) {
    const char *kind;
    PyObject *results;
    if (!PyArg_ParseTuple(spec, "sOO!O!OO!O!;a call is not as documented", &kind, &step->function, &PyTuple_Type,
                          &step->arguments, &PyTuple_Type, &step->places, &step->keywords, &PyTuple_Type, &step->named,
                          &PyTuple_Type, &results))
        return -1;
    if (step->keywords == Py_None)
        step->keywords = NULL;
    if (step->keywords && !PyDict_Check(step->keywords)) {
        PyErr_SetString(PyExc_ValueError, "the keywords of a call must be a dict or None");
        return -1;
    }
    if (PyTuple_Size(results) > MAX_RESULTS || PyTuple_Size(step->arguments) > MAX_CALL_ARGUMENTS) {
        PyErr_SetString(PyExc_ValueError, "a call has too many arguments or results");
        return -1;
    }
    step->count = (int)PyTuple_Size(results);
    for (int i = 0; i < step->count; i++)
        if (read_own(program, PyTuple_GetItem(results, i), &step->results[i]))
            return -1;
    return check_places(program, step->places, PyTuple_Size(step->arguments)) ||
                   check_places(program, step->named, -1)
               ? -1
               : 0;
}

static int read_step(const Program *program, PyObject *spec, Step *step) {
    PyObject *name = PyTuple_Check(spec) && PyTuple_Size(spec) > 1 ? PyTuple_GetItem(spec, 0) : NULL;
    Py_ssize_t size = name ? PyTuple_Size(spec) : 0;
    if (!name || !PyUnicode_Check(name)) {
        PyErr_SetString(PyExc_ValueError, "a step must be a tuple that starts with its kind");
        return -1;
    }
    if (!PyUnicode_CompareWithASCIIString(name, "call")) {
        step->kind = CALL;
        return read_call(program, spec, step);
    }
    if (!PyUnicode_CompareWithASCIIString(name, "launch") && size == 3) {
        int kernels = ((Plan *)program->plan)->kernel_count;
        step->kind = LAUNCH;
        if (read_index(PyTuple_GetItem(spec, 1), kernels, &step->first, "kernel") ||
            read_index(PyTuple_GetItem(spec, 2), kernels + 1 - step->first, &step->count, "kernel"))
            return -1;
        return 0;
    }
    if (read_own(program, PyTuple_GetItem(spec, 1), &step->value))
        return -1;
    if (!PyUnicode_CompareWithASCIIString(name, "take") && size == 3) {
        step->kind = TAKE;
        step->bytes = PyTuple_GetItem(spec, 2);
        return 0;
    }
    if (!PyUnicode_CompareWithASCIIString(name, "give"))
        step->kind = GIVE;
    else if (!PyUnicode_CompareWithASCIIString(name, "drop"))
        step->kind = DROP;
    else {
        PyErr_Format(PyExc_ValueError, "unknown step %R; allowed: call, take, give, drop, launch", name);
        return -1;
    }
    return 0;
}

static void program_dealloc(PyObject *self) {
    Program *program = (Program *)self;
    Py_XDECREF(program->plan);
    Py_XDECREF(program->steps_kept);
    Py_XDECREF(program->kept);
    PyMem_Free(program->steps);
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *program_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    PyObject *plan, *slots, *steps, *outputs, *kept;
    int inputs, values, single;
    if (keywords && PyDict_Size(keywords)) {
        PyErr_SetString(PyExc_TypeError, "Program() takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "OiiO!O!O!pO:Program", &plan, &inputs, &values, &PyTuple_Type, &slots, &PyTuple_Type,
                          &steps, &PyTuple_Type, &outputs, &single, &kept))
        return NULL;
    if (Py_TYPE(plan) != plan_type) {
        PyErr_Format(PyExc_TypeError, "a program needs a Plan, got %R", (PyObject *)Py_TYPE(plan));
        return NULL;
    }
    Py_ssize_t count = PyTuple_Size(steps), returned = PyTuple_Size(outputs);
    if (inputs < 1 || inputs > MAX_OPERANDS || values < inputs || values > MAX_VALUES || count > MAX_STEPS ||
        returned < 1 || returned > MAX_VALUES) {
        PyErr_Format(PyExc_ValueError,
                     "a program has %d inputs, %d values, %zd steps and %zd outputs; allowed: 1 to %d, at most %d, %d "
                     "and %d",
                     inputs, values, count, returned, (int)MAX_OPERANDS, (int)MAX_VALUES, (int)MAX_STEPS,
                     (int)MAX_VALUES);
        return NULL;
    }
    Program *program = (Program *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!program)
        return NULL;
    Py_INCREF(plan);
    Py_INCREF(steps);
    Py_INCREF(kept);
    program->plan = plan;
    program->steps_kept = steps;
    program->kept = kept;
    program->input_count = inputs;
    program->value_count = values;
    program->single = single;
    program->steps = PyMem_Calloc((size_t)count + 1, sizeof(Step));
    if (!program->steps) {
        PyErr_NoMemory();
        goto failed;
    }
    if (read_slots(program, slots))
        goto failed;
    if (program->slot_count != ((Plan *)plan)->argument_count) {
        PyErr_Format(PyExc_ValueError, "%d kernel arguments for a plan that takes %d", program->slot_count,
                     ((Plan *)plan)->argument_count);
        goto failed;
    }
    for (Py_ssize_t i = 0; i < count; i++, program->step_count++)
        if (read_step(program, PyTuple_GetItem(steps, i), &program->steps[i]))
            goto failed;
    for (Py_ssize_t i = 0; i < returned; i++, program->output_count++) {
        PyObject *output = PyTuple_GetItem(outputs, i);
        program->outputs[i] = -1;
        if (output != Py_None && read_index(output, values, &program->outputs[i], "value"))
            goto failed;
    }
    return (PyObject *)program;
failed:
    Py_DECREF(program);
    return NULL;
}

int program_inputs(PyObject *self) { return ((Program *)self)->input_count; }

/* run(*inputs): without a look at whether the program suits them, which is the caller's to know. */
static PyObject *run_method(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    const Program *program = (Program *)self;
    uint64_t addresses[MAX_OPERANDS] = {0};
    DLTensor view;
    CUstream stream = NULL;
    if (count != program->input_count) {
        PyErr_Format(PyExc_TypeError, "run() takes %d inputs, got %zd", program->input_count, count);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (args[i] == Py_None)
            continue;
        if (!torch.exchange || torch.exchange->view(args[i], &view)) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_RuntimeError, "connect() first");
            return NULL;
        }
        addresses[i] = (uint64_t)(uintptr_t)view.data + view.byte_offset;
        if (!i && torch_stream(&view, &stream)) {
            PyErr_SetString(PyExc_RuntimeError, "the current stream cannot be told");
            return NULL;
        }
    }
    return program_run(self, args, addresses, stream);
}

PyDoc_STRVAR(run_doc,
             "run(*inputs)\n--\n\n"
             "Run every step on tensors (or None) laid out as those that the program was made for, on the current stream.\n"
             "Returns its outputs as a tuple, or the only one. Raises RuntimeError with the driver's message.");

PyDoc_STRVAR(program_doc,
             "Program(plan, inputs, values, arguments, steps, outputs, single, kept)\n--\n\n"
             "plan: the Plan of its kernels. inputs, values: how many, inputs among values. arguments: of the plan, each\n"
             "(value, offset in bytes) or a pair of them in one tuple. steps: (\"call\", function, arguments, ((position,\n"
             "value), ...), keywords or None, ((keyword, value), ...), results), (\"take\", value, bytes), (\"give\", value),\n"
             "(\"drop\", value) or (\"launch\", first kernel, count). outputs: values or None; single: return the first\n"
             "alone. kept: what must live as long. Raises TypeError and ValueError.");

static PyMethodDef program_methods[] = {
    {"run", (PyCFunction)(void (*)(void))run_method, METH_FASTCALL, run_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot program_slots[] = {
    {Py_tp_new, (void *)program_new},
    {Py_tp_dealloc, (void *)program_dealloc},
    {Py_tp_methods, program_methods},
    {Py_tp_doc, (void *)program_doc},
    {0, NULL},
};

PyType_Spec program_spec = {"fusedmlp._launcher.Program", sizeof(Program), 0, Py_TPFLAGS_DEFAULT, program_slots};
