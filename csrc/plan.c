/* fusedmlp._launcher.Plan: kernels that one call launches.
 *
 * A Plan is made once for a kind of call: functions, grids, attributes, and for each kernel a block of parameters
 * with everything that stays the same. A launch (launch.c) fills in the addresses and numbers of the call.
 */

#include "launcher.h"

#include <string.h>

void *new_aligned(size_t bytes, void **memory) {
    *memory = PyMem_Malloc(bytes + 64);
    if (!*memory) {
        PyErr_NoMemory();
        return NULL;
    }
    void *aligned = (void *)(((uintptr_t)*memory + 63) & ~(uintptr_t)63);
    memset(aligned, 0, bytes);
    return aligned;
}

/* Room for a parameter; returns its offset, or UINT32_MAX with an exception. */
static uint32_t add_parameter(Kernel *kernel, uint32_t bytes, uint32_t alignment) {
    uint32_t at = (kernel->block_bytes + alignment - 1) & ~(alignment - 1);
    if (kernel->parameter_count == MAX_PARAMETERS || at + bytes > MAX_BLOCK) {
        PyErr_Format(PyExc_ValueError, "kernel %s has more than %d parameters or %d bytes of them", kernel->name,
                     (int)MAX_PARAMETERS, (int)MAX_BLOCK);
        return UINT32_MAX;
    }
    kernel->offsets[kernel->parameter_count++] = at;
    kernel->block_bytes = at + bytes;
    return at;
}

static int add_constant(Kernel *kernel, long long value, uint32_t bytes) {
    uint32_t at = add_parameter(kernel, bytes, bytes);
    if (at == UINT32_MAX)
        return -1;
    int32_t narrow = (int32_t)value;
    memcpy(kernel->block + at, bytes == 4 ? (void *)&narrow : (void *)&value, bytes);
    return 0;
}

/* Reads a tuple of ints, outermost first, into values innermost first. */
static int read_sizes(PyObject *tuple, uint32_t rank, uint64_t *values, const char *what) {
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != (Py_ssize_t)rank) {
        PyErr_Format(PyExc_ValueError, "%s of a tensor map must be a tuple of %u ints", what, rank);
        return -1;
    }
    for (uint32_t i = 0; i < rank; i++) {
        long long value = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
        if (value == -1 && PyErr_Occurred())
            return -1;
        if (value < 0) {
            PyErr_Format(PyExc_ValueError, "%s of a tensor map must not be negative, got %lld", what, value);
            return -1;
        }
        values[rank - 1 - i] = (uint64_t)value;
    }
    return 0;
}

/* ("map", argument, pair, offset, data type, element bytes, swizzle, fill, sizes, strides, box); sizes, strides and
 * offset in elements. The kernel takes the map, its sizes (int32) and its strides (int64). */
static int add_map(Kernel *kernel, PyObject *spec, int argument, Map *map) {
    PyObject *sizes, *strides, *box;
    const char *kind;
    unsigned long long offset;
    int unused;
    if (!PyArg_ParseTuple(spec, "sipKiiiiO!O!O!;a map parameter is not as documented", &kind, &unused, &map->pair,
                          &offset, &map->data_type, &map->element_bytes, &map->swizzle, &map->fill, &PyTuple_Type,
                          &sizes, &PyTuple_Type, &strides, &PyTuple_Type, &box))
        return -1;
    Py_ssize_t rank = PyTuple_Size(sizes);
    if (rank < 1 || rank > MAX_RANK || map->element_bytes < 1 || (map->pair && rank < 2)) {
        PyErr_Format(PyExc_ValueError, "a tensor map has rank %zd (of a pair: %d) and elements of %d bytes; allowed: "
                     "1 (a pair: 2) to %d, and at least 1", rank, map->pair, map->element_bytes, (int)MAX_RANK);
        return -1;
    }
    if (!driver.encode) {
        PyErr_SetString(PyExc_RuntimeError, "the CUDA driver has no cuTensorMapEncodeTiled; update it");
        return -1;
    }
    map->rank = (uint32_t)rank;
    uint64_t in_elements[MAX_RANK], wide_box[MAX_RANK];
    if (read_sizes(sizes, map->rank, map->sizes, "sizes") || read_sizes(strides, map->rank, in_elements, "strides") ||
        read_sizes(box, map->rank, wide_box, "box"))
        return -1;
    map->offset = offset * (uint64_t)map->element_bytes;
    uint32_t at = add_parameter(kernel, sizeof(CUtensorMap), 64);
    if (at == UINT32_MAX)
        return -1;
    Field field = {FROM_MAP, argument, at, map};
    kernel->fields[kernel->field_count++] = field;
    for (uint32_t i = map->rank; i-- > 0;) {
        map->box[i] = (uint32_t)wide_box[i];
        if (add_constant(kernel, (long long)map->sizes[i], 4))
            return -1;
    }
    for (uint32_t i = map->rank; i-- > 0;) {
        if (i)
            map->strides[i - 1] = in_elements[i] * (uint64_t)map->element_bytes;
        if (add_constant(kernel, (long long)in_elements[i], 8))
            return -1;
        if (i == map->rank - 1)
            map->stride_at = kernel->offsets[kernel->parameter_count - 1];
    }
    return 0;
}

/* One of ("address" | "int32" | "int64", argument), ("constant32" | "constant64", value) or a map. */
static int add_spec(Kernel *kernel, PyObject *spec, int argument_count) {
    if (!PyTuple_Check(spec) || PyTuple_Size(spec) < 2) {
        PyErr_SetString(PyExc_ValueError, "a parameter must be a tuple that starts with its kind");
        return -1;
    }
    PyObject *kind = PyTuple_GetItem(spec, 0);
    long long value = PyLong_AsLongLong(PyTuple_GetItem(spec, 1));
    if (value == -1 && PyErr_Occurred())
        return -1;
    if (!PyUnicode_Check(kind)) {
        PyErr_SetString(PyExc_ValueError, "the kind of a parameter must be a str");
        return -1;
    }
    if (!PyUnicode_CompareWithASCIIString(kind, "constant32"))
        return add_constant(kernel, value, 4);
    if (!PyUnicode_CompareWithASCIIString(kind, "constant64"))
        return add_constant(kernel, value, 8);
    if (value < 0 || value >= argument_count) {
        PyErr_Format(PyExc_ValueError, "kernel %s takes argument %lld of a plan with %d", kernel->name, value,
                     argument_count);
        return -1;
    }
    if (!PyUnicode_CompareWithASCIIString(kind, "map"))
        return add_map(kernel, spec, (int)value, &kernel->maps[kernel->map_count++]);
    Field field = {FROM_ADDRESS, (int)value, 0, NULL};
    if (!PyUnicode_CompareWithASCIIString(kind, "int32"))
        field.source = FROM_INT32;
    else if (!PyUnicode_CompareWithASCIIString(kind, "int64"))
        field.source = FROM_INT64;
    else if (PyUnicode_CompareWithASCIIString(kind, "address")) {
        PyErr_Format(PyExc_ValueError,
                     "unknown kind of parameter %R; allowed: address, int32, int64, constant32, constant64, map", kind);
        return -1;
    }
    uint32_t bytes = field.source == FROM_INT32 ? 4 : 8;
    field.at = add_parameter(kernel, bytes, bytes);
    if (field.at == UINT32_MAX)
        return -1;
    kernel->fields[kernel->field_count++] = field;
    return 0;
}

static int is_map(PyObject *spec) {
    PyObject *kind = PyTuple_Check(spec) && PyTuple_Size(spec) ? PyTuple_GetItem(spec, 0) : NULL;
    return kind && PyUnicode_Check(kind) && !PyUnicode_CompareWithASCIIString(kind, "map");
}

/* Memory for the most that these parameters can come to: of a map 128 bytes, its sizes and strides, and gaps. */
static int make_room(Kernel *kernel, PyObject *parameters) {
    size_t count = (size_t)PyTuple_Size(parameters), maps = 0;
    for (size_t i = 0; i < count; i++)
        maps += (size_t)is_map(PyTuple_GetItem(parameters, (Py_ssize_t)i));
    size_t offsets = count + maps * 2 * MAX_RANK;
    size_t bytes = count * 16 + maps * (64 + sizeof(CUtensorMap) + 12 * MAX_RANK + 8);
    kernel->maps = new_aligned(maps * sizeof(Map) + count * sizeof(Field) + offsets * sizeof(uint32_t) + bytes,
                               &kernel->memory);
    if (!kernel->maps)
        return -1;
    kernel->fields = (Field *)(kernel->maps + maps); /* after the maps, which need the alignment */
    kernel->offsets = (uint32_t *)(kernel->fields + count);
    kernel->block = (unsigned char *)(kernel->offsets + offsets);
    return 0;
}

/* (name, function, (grid x, y, z), threads, shared bytes, cooperative, dependent, parameters) */
static int read_kernel(Kernel *kernel, PyObject *spec, int argument_count) {
    const char *name;
    unsigned long long function;
    PyObject *parameters;
    int cooperative, dependent;
    CUlaunchConfig *config = &kernel->config;
    if (!PyTuple_Check(spec)) {
        PyErr_SetString(PyExc_TypeError, "a kernel of a plan must be a tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(spec, "sK(III)IIppO!;a kernel of a plan is not as documented", &name, &function,
                          &config->grid_x, &config->grid_y, &config->grid_z, &config->block_x, &config->shared_bytes,
                          &cooperative, &dependent, &PyTuple_Type, &parameters))
        return -1;
    strncpy(kernel->name, name, MAX_NAME - 1);
    if (!function || !config->grid_x || !config->grid_y || !config->grid_z || !config->block_x ||
        config->block_x > 1024) {
        PyErr_Format(PyExc_ValueError,
                     "kernel %s: function %llu, grid (%u, %u, %u), %u threads; allowed: a loaded function, at least 1 "
                     "in each, at most 1024 threads",
                     kernel->name, function, config->grid_x, config->grid_y, config->grid_z, config->block_x);
        return -1;
    }
    kernel->function = (CUfunction)(uintptr_t)function;
    config->block_y = config->block_z = 1;
    if (cooperative) {
        CUlaunchAttribute *attribute = &kernel->attributes[config->attribute_count++];
        attribute->id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
        attribute->value.cooperative = 1;
    }
    if (dependent) {
        CUlaunchAttribute *attribute = &kernel->attributes[config->attribute_count++];
        attribute->id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute->value.programmatic_stream_serialization = 1;
    }
    Py_ssize_t count = PyTuple_Size(parameters);
    if (count > MAX_PARAMETERS) {
        PyErr_Format(PyExc_ValueError, "kernel %s has %zd parameters; allowed: at most %d", kernel->name, count,
                     (int)MAX_PARAMETERS);
        return -1;
    }
    if (make_room(kernel, parameters))
        return -1;
    for (Py_ssize_t i = 0; i < count; i++)
        if (add_spec(kernel, PyTuple_GetItem(parameters, i), argument_count))
            return -1;
    return 0;
}

static void plan_dealloc(PyObject *self) {
    Plan *plan = (Plan *)self;
    for (int i = 0; i < plan->kernel_count; i++)
        PyMem_Free(plan->kernels[i].memory);
    PyMem_Free(plan->memory);
    if (plan->primary)
        driver.primary_release(plan->device); /* fails where the driver has shut down, which is no matter */
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *plan_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    int ordinal, argument_count;
    PyObject *kernels;
    if (keywords && PyDict_Size(keywords)) {
        PyErr_SetString(PyExc_TypeError, "Plan(device, argument_count, kernels) takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "iiO!:Plan", &ordinal, &argument_count, &PyTuple_Type, &kernels))
        return NULL;
    Py_ssize_t count = PyTuple_Size(kernels);
    if (argument_count < 0 || argument_count > MAX_ARGUMENTS || count > 64) {
        PyErr_Format(PyExc_ValueError, "a plan has %d arguments and %zd kernels; allowed: at most %d, and at most 64",
                     argument_count, count, (int)MAX_ARGUMENTS);
        return NULL;
    }
    if (open_driver("libcuda.so.1"))
        return NULL;
    Plan *plan = (Plan *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!plan)
        return NULL;
    atomic_flag_clear(&plan->lock);
    plan->argument_count = argument_count;
    plan->kernels = new_aligned((size_t)count * sizeof(Kernel), &plan->memory);
    if (!plan->kernels)
        goto failed;
    plan->kernel_count = (int)count;
    for (Py_ssize_t i = 0; i < count; i++)
        if (read_kernel(&plan->kernels[i], PyTuple_GetItem(kernels, i), argument_count))
            goto failed;
    CUresult code = driver.device_get(&plan->device, ordinal);
    if (!code)
        code = driver.primary_retain(&plan->primary, plan->device);
    if (code) {
        plan->primary = NULL;
        char detail[48];
        PyOS_snprintf(detail, sizeof detail, ", CUDA device %d", ordinal);
        driver_error(code, "cuDevicePrimaryCtxRetain", detail);
        goto failed;
    }
    return (PyObject *)plan;
failed:
    Py_DECREF(plan);
    return NULL;
}

PyDoc_STRVAR(launch_doc,
             "launch(stream, *arguments)\n--\n\n"
             "Launch every kernel of the plan, in order, on a stream (its address, as an int). An argument is a tensor,\n"
             "two of them as a tuple, an int or None. Raises TypeError for arguments of another kind or number, and\n"
             "RuntimeError with the driver's message.");

PyDoc_STRVAR(plan_doc,
             "Plan(device, argument_count, kernels)\n--\n\n"
             "device: ordinal of the CUDA device. kernels: a tuple of (name, function, (grid x, y, z), threads, bytes of\n"
             "shared memory, cooperative, dependent, parameters). A parameter is (\"address\" | \"int32\" | \"int64\",\n"
             "argument), (\"constant32\" | \"constant64\", value) or (\"map\", argument, pair, offset, data type, bytes of\n"
             "an element, swizzle, fill, sizes, strides, box), which stands for a tensor map, its sizes (int32) and its\n"
             "strides (int64). Raises ValueError, OSError without a driver, RuntimeError with the driver's message.");


static PyMethodDef plan_methods[] = {
    {"launch", (PyCFunction)(void (*)(void))plan_launch, METH_FASTCALL, launch_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot plan_slots[] = {
    {Py_tp_new, (void *)plan_new},
    {Py_tp_dealloc, (void *)plan_dealloc},
    {Py_tp_methods, plan_methods},
    {Py_tp_doc, (void *)plan_doc},
    {0, NULL},
};

PyType_Spec plan_spec = {"fusedmlp._launcher.Plan", sizeof(Plan), 0, Py_TPFLAGS_DEFAULT, plan_slots};
