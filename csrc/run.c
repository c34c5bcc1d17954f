/* Runs the steps of a program. */

#include "program.h"

#include <string.h>

typedef struct {
    PyObject *objects[MAX_VALUES]; /* owned but for the inputs */
    uint64_t addresses[MAX_VALUES];
    PyObject *taken[MAX_VALUES]; /* the address of memory without a tensor, as a Python int; owned */
} State;

/* The object of a value, borrowed; NULL with an exception where it has none. */
static PyObject *object_of(const State *state, int value) {
    if (!state->objects[value])
        PyErr_Format(PyExc_RuntimeError, "value %d of a program is no tensor at this step", value);
    return state->objects[value];
}

static PyObject *filled_arguments(const Step *step, const State *state) {
    Py_ssize_t count = PyTuple_Size(step->arguments), places = PyTuple_Size(step->places);
    PyObject *filled[MAX_CALL_ARGUMENTS];
    for (Py_ssize_t i = 0; i < count; i++)
        filled[i] = PyTuple_GetItem(step->arguments, i);
    for (Py_ssize_t i = 0; i < places; i++) {
        PyObject *place = PyTuple_GetItem(step->places, i);
        PyObject *object = object_of(state, (int)PyLong_AsLong(PyTuple_GetItem(place, 1)));
        if (!object)
            return NULL;
        filled[PyLong_AsLong(PyTuple_GetItem(place, 0))] = object;
    }
    PyObject *tuple = PyTuple_New(count);
    for (Py_ssize_t i = 0; tuple && i < count; i++) {
        Py_INCREF(filled[i]);
        PyTuple_SetItem(tuple, i, filled[i]);
    }
    return tuple;
}

/* A new reference, or NULL: with an exception, or where there are no keywords. */
static PyObject *filled_keywords(const Step *step, const State *state) {
    Py_ssize_t count = PyTuple_Size(step->named);
    if (!count) {
        Py_XINCREF(step->keywords);
        return step->keywords;
    }
    PyObject *keywords = step->keywords ? PyDict_Copy(step->keywords) : PyDict_New();
    for (Py_ssize_t i = 0; keywords && i < count; i++) {
        PyObject *place = PyTuple_GetItem(step->named, i);
        PyObject *object = object_of(state, (int)PyLong_AsLong(PyTuple_GetItem(place, 1)));
        if (!object || PyDict_SetItem(keywords, PyTuple_GetItem(place, 0), object))
            Py_CLEAR(keywords);
    }
    return keywords;
}

static int keep_result(State *state, int value, PyObject *object) { /* takes the reference */
    PyObject *old = state->objects[value];
    state->objects[value] = object;
    Py_XDECREF(old);
    return read_address(object, &state->addresses[value], value);
}

static int run_call(const Step *step, State *state) {
    PyObject *arguments = filled_arguments(step, state);
    PyObject *keywords = arguments ? filled_keywords(step, state) : NULL;
    PyObject *result = NULL;
    if (arguments && (keywords || !PyErr_Occurred()))
        result = PyObject_Call(step->function, arguments, keywords);
    Py_XDECREF(arguments);
    Py_XDECREF(keywords);
    if (!result)
        return -1;
    if (step->count == 1 && !PyTuple_Check(result) && !PyList_Check(result))
        return keep_result(state, step->results[0], result);
    int failed = 0;
    if (step->count && PySequence_Size(result) != step->count) {
        PyErr_Format(PyExc_RuntimeError, "%R returned another number of results than it did before", step->function);
        failed = -1;
    }
    for (int i = 0; i < step->count && !failed; i++) {
        PyObject *part = PySequence_GetItem(result, i);
        failed = part ? keep_result(state, step->results[i], part) : -1;
    }
    Py_DECREF(result);
    return failed;
}

static int take(const Step *step, State *state, PyObject *stream) {
    PyObject *address = PyObject_CallFunctionObjArgs(torch.allocate, step->bytes, stream, NULL);
    if (!address)
        return -1;
    state->taken[step->value] = address;
    state->addresses[step->value] = PyLong_AsUnsignedLongLong(address);
    return state->addresses[step->value] == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

/* Keeps the exception that is set, if any: memory goes back after failures too. */
static int give(State *state, int value) {
    PyObject *type, *error, *trace, *address = state->taken[value];
    if (!address)
        return 0;
    PyErr_Fetch(&type, &error, &trace);
    state->taken[value] = NULL;
    PyObject *done = PyObject_CallFunctionObjArgs(torch.release, address, NULL);
    Py_DECREF(address);
    Py_XDECREF(done);
    if (type)
        PyErr_Restore(type, error, trace);
    return done ? 0 : -1;
}

static int run_launch(const Program *program, const Step *step, const State *state, CUstream stream) {
    Value values[MAX_ARGUMENTS];
    for (int i = 0; i < program->slot_count; i++) {
        const Slot *slot = &program->slots[i];
        uint64_t first = state->addresses[slot->values[0]] + slot->offsets[0];
        uint64_t second = slot->pair ? state->addresses[slot->values[1]] + slot->offsets[1] : 0;
        values[i].kind = slot->pair ? PAIR : ADDRESS;
        values[i].first = slot->pair && second < first ? second : first;
        values[i].second = slot->pair && second < first ? first : second;
    }
    return plan_check((Plan *)program->plan, values) ||
                   plan_run((Plan *)program->plan, step->first, step->count, values, stream)
               ? -1
               : 0;
}

static int run_steps(const Program *program, State *state, CUstream stream) {
    PyObject *number = PyLong_FromUnsignedLongLong((uintptr_t)stream);
    int failed = number ? 0 : -1;
    for (int i = 0; i < program->step_count && !failed; i++) {
        const Step *step = &program->steps[i];
        if (step->kind == CALL)
            failed = run_call(step, state);
        else if (step->kind == TAKE)
            failed = take(step, state, number);
        else if (step->kind == GIVE)
            failed = give(state, step->value);
        else if (step->kind == DROP)
            Py_CLEAR(state->objects[step->value]);
        else
            failed = run_launch(program, step, state, stream);
    }
    Py_XDECREF(number);
    return failed;
}

static PyObject *outputs_of(const Program *program, const State *state) {
    if (program->single) {
        PyObject *only = program->outputs[0] < 0 ? Py_None : object_of(state, program->outputs[0]);
        Py_XINCREF(only);
        return only;
    }
    PyObject *tuple = PyTuple_New(program->output_count);
    for (int i = 0; tuple && i < program->output_count; i++) {
        PyObject *object = program->outputs[i] < 0 ? Py_None : object_of(state, program->outputs[i]);
        if (!object) {
            Py_CLEAR(tuple);
            break;
        }
        Py_INCREF(object);
        PyTuple_SetItem(tuple, i, object);
    }
    return tuple;
}

PyObject *program_run(PyObject *self, PyObject *const *inputs, const uint64_t *addresses, CUstream stream) {
    const Program *program = (Program *)self;
    State state;
    memset(state.objects, 0, (size_t)program->value_count * sizeof *state.objects);
    memset(state.taken, 0, (size_t)program->value_count * sizeof *state.taken);
    for (int i = 0; i < program->input_count; i++) {
        state.objects[i] = inputs[i];
        state.addresses[i] = addresses[i];
    }
    PyObject *result = run_steps(program, &state, stream) ? NULL : outputs_of(program, &state);
    int lost = 0;
    for (int i = program->input_count; i < program->value_count; i++) {
        lost |= give(&state, i);
        Py_XDECREF(state.objects[i]);
    }
    if (lost && result)
        Py_CLEAR(result);
    return result;
}
