/* A launch: the addresses and numbers of a call go into the blocks of a plan's kernels, tensor maps are encoded where
 * their tensor has moved, and the driver gets the kernels.
 */

#include "launcher.h"

#include <sched.h>
#include <string.h>

int read_address(PyObject *tensor, uint64_t *address, int position) {
    PyObject *number = PyObject_CallMethodObjArgs(tensor, name_data_ptr, NULL);
    if (!number) {
        if (PyErr_ExceptionMatches(PyExc_AttributeError))
            PyErr_Format(PyExc_TypeError, "argument %d must be a tensor, a pair of tensors, an int or None, got %R",
                         position, (PyObject *)Py_TYPE(tensor));
        return -1;
    }
    *address = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return *address == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

static int read_value(PyObject *argument, Value *value, int position) {
    value->second = 0;
    if (argument == Py_None) {
        value->kind = NOTHING;
        value->first = 0;
        return 0;
    }
    if (PyLong_Check(argument)) {
        value->kind = NUMBER;
        long long number = PyLong_AsLongLong(argument);
        value->first = (uint64_t)number;
        return number == -1 && PyErr_Occurred() ? -1 : 0;
    }
    if (PyTuple_Check(argument)) {
        if (PyTuple_Size(argument) != 2) {
            PyErr_Format(PyExc_TypeError, "argument %d is a tuple of %zd; allowed: two tensors", position,
                         PyTuple_Size(argument));
            return -1;
        }
        value->kind = PAIR;
        if (read_address(PyTuple_GetItem(argument, 0), &value->first, position) ||
            read_address(PyTuple_GetItem(argument, 1), &value->second, position))
            return -1;
        if (value->second < value->first) { /* the lower in memory first */
            uint64_t upper = value->first;
            value->first = value->second;
            value->second = upper;
        }
        return 0;
    }
    value->kind = ADDRESS;
    return read_address(argument, &value->first, position);
}

static int check_value(const Field *field, const Value *value, const Kernel *kernel) {
    const char *wanted = NULL;
    if (field->source == FROM_MAP) {
        if (value->kind != (field->map->pair ? PAIR : ADDRESS))
            wanted = field->map->pair ? "a pair of tensors" : "a tensor";
    } else if (field->source == FROM_ADDRESS) {
        if (value->kind != ADDRESS && value->kind != NOTHING)
            wanted = "a tensor or None";
    } else if (value->kind != NUMBER) {
        wanted = "an int";
    } else if (field->source == FROM_INT32 && (int64_t)value->first != (int32_t)value->first) {
        wanted = "an int of 32 bits";
    }
    if (!wanted)
        return 0;
    PyErr_Format(PyExc_TypeError, "kernel %s: argument %d must be %s", kernel->name, field->argument, wanted);
    return -1;
}

/* The encoded map of a value, into the block. Runs without the GIL. */
static CUresult fill_map(Map *map, const Value *value, unsigned char *block, uint32_t at) {
    static const uint32_t ones[MAX_RANK] = {1, 1, 1, 1, 1};
    uint64_t address = value->first + map->offset;
    uint64_t stride = map->pair ? value->second - value->first : 0;
    if (!map->known || map->address != address || map->stride != stride) {
        if (map->pair)
            map->strides[map->rank - 2] = stride;
        map->known = 0;
        CUresult code = driver.encode(&map->encoded, map->data_type, map->rank, (void *)(uintptr_t)address, map->sizes,
                                      map->strides, map->box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, map->swizzle,
                                      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, map->fill);
        if (code)
            return code;
        map->address = address;
        map->stride = stride;
        map->known = 1;
    }
    memcpy(block + at, &map->encoded, sizeof map->encoded);
    if (map->pair) {
        uint64_t elements = stride / (uint64_t)map->element_bytes;
        memcpy(block + map->stride_at, &elements, sizeof elements);
    }
    return 0;
}

static CUresult launch_kernel(Plan *plan, Kernel *kernel, const Value *values, CUstream stream, const char **what) {
    _Alignas(64) unsigned char block[MAX_BLOCK];
    void *parameters[MAX_PARAMETERS];
    CUlaunchConfig config = kernel->config;
    CUresult code = 0;
    memcpy(block, kernel->block, kernel->block_bytes);
    if (kernel->map_count)
        while (atomic_flag_test_and_set_explicit(&plan->lock, memory_order_acquire))
            sched_yield();
    for (int i = 0; i < kernel->field_count && !code; i++) {
        const Field *field = &kernel->fields[i];
        const Value *value = &values[field->argument];
        int32_t narrow = (int32_t)value->first;
        if (field->source == FROM_MAP)
            code = fill_map(field->map, value, block, field->at);
        else if (field->source == FROM_INT32)
            memcpy(block + field->at, &narrow, 4);
        else
            memcpy(block + field->at, &value->first, 8);
    }
    if (kernel->map_count)
        atomic_flag_clear_explicit(&plan->lock, memory_order_release);
    *what = "cuTensorMapEncodeTiled";
    if (code)
        return code;
    for (int i = 0; i < kernel->parameter_count; i++)
        parameters[i] = block + kernel->offsets[i];
    config.stream = stream;
    config.attributes = kernel->attributes;
    *what = "cuLaunchKernelEx";
    return driver.launch(&config, kernel->function, parameters, NULL);
}

static CUresult launch_some(Plan *plan, int first, int count, const Value *values, CUstream stream, const char **what,
                            int *failed) {
    CUcontext current = NULL, popped;
    *failed = -1;
    *what = "cuCtxGetCurrent";
    CUresult code = driver.context_get(&current);
    int push = !code && current != plan->primary;
    if (push) { /* a thread that has not used CUDA yet, or one that works on another device */
        *what = "cuCtxPushCurrent";
        code = driver.context_push(plan->primary);
    }
    if (code)
        return code;
    for (int i = first; i < first + count && !code; i++) {
        *failed = i;
        code = launch_kernel(plan, &plan->kernels[i], values, stream, what);
    }
    if (push)
        driver.context_pop(&popped);
    return code;
}

int plan_run(Plan *plan, int first, int count, const Value *values, CUstream stream) {
    const char *what;
    int failed;
    PyThreadState *state = PyEval_SaveThread(); /* the driver waits where its queue is full */
    CUresult code = launch_some(plan, first, count, values, stream, &what, &failed);
    PyEval_RestoreThread(state);
    if (!code)
        return 0;
    char detail[MAX_NAME + 160] = "";
    if (failed >= 0) {
        const Kernel *kernel = &plan->kernels[failed];
        const CUlaunchConfig *config = &kernel->config;
        PyOS_snprintf(detail, sizeof detail, ", kernel %s, grid (%u, %u, %u), %u threads, %u bytes of shared memory",
                      kernel->name, config->grid_x, config->grid_y, config->grid_z, config->block_x,
                      config->shared_bytes);
    }
    driver_error(code, what, detail);
    return -1;
}

int plan_check(const Plan *plan, const Value *values) {
    for (int k = 0; k < plan->kernel_count; k++)
        for (int i = 0; i < plan->kernels[k].field_count; i++) {
            const Field *field = &plan->kernels[k].fields[i];
            if (check_value(field, &values[field->argument], &plan->kernels[k]))
                return -1;
        }
    return 0;
}

PyObject *plan_launch(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Plan *plan = (Plan *)self;
    Value values[MAX_ARGUMENTS];
    if (count != plan->argument_count + 1) {
        PyErr_Format(PyExc_TypeError, "launch() takes the stream and %d arguments, got %zd", plan->argument_count, count);
        return NULL;
    }
    unsigned long long stream = PyLong_AsUnsignedLongLong(args[0]);
    if (stream == (unsigned long long)-1 && PyErr_Occurred())
        return NULL;
    for (int i = 0; i < plan->argument_count; i++)
        if (read_value(args[i + 1], &values[i], i))
            return NULL;
    if (plan_check(plan, values) || plan_run(plan, 0, plan->kernel_count, values, (CUstream)(uintptr_t)stream))
        return NULL;
    Py_RETURN_NONE;
}
