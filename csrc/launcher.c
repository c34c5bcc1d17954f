/* fusedmlp._launcher: launches the kernels of a plan with one call and little host work.
 *
 * A Plan is made once for a kind of call: functions, grids, attributes, and for each kernel a block of parameters
 * with everything that stays the same. A launch fills in the addresses and numbers of the call, encodes a tensor map
 * only where its tensor has moved, and hands the kernels to the driver without holding the GIL.
 *
 * Built against CPython's limited API (one binary for Python 3.10 and newer). The CUDA driver is opened at run time.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "cuda_driver.h"

enum { MAX_ARGUMENTS = 64, MAX_PARAMETERS = 160, MAX_BLOCK = 4096, MAX_RANK = 5, MAX_NAME = 96 };

/* ------------------------------------------------------------------------------------------------ the driver */

static struct {
    void *library;
    cuInit_t init;
    cuGetErrorName_t error_name;
    cuGetErrorString_t error_string;
    cuDeviceGet_t device_get;
    cuDevicePrimaryCtxRetain_t primary_retain;
    cuDevicePrimaryCtxRelease_t primary_release;
    cuCtxGetCurrent_t context_get;
    cuCtxPushCurrent_t context_push;
    cuCtxPopCurrent_t context_pop;
    cuLaunchKernelEx_t launch;
    cuTensorMapEncodeTiled_t encode; /* NULL where the driver is older than TMA */
} driver;

static PyObject *data_ptr_name; /* "data_ptr" */

static void driver_error(CUresult code, const char *what, const char *detail) {
    const char *name = NULL, *text = NULL;
    driver.error_name(code, &name);
    driver.error_string(code, &text);
    PyErr_Format(PyExc_RuntimeError, "%s failed: %s (%s)%s", what, name ? name : "an unknown CUDA error",
                 text ? text : "no description", detail);
}

static int find_symbol(void *library, const char *name, void *target) {
    void *symbol = dlsym(library, name);
    memcpy(target, &symbol, sizeof symbol);
    return symbol != NULL;
}

/* Opens the driver the first time. -1 with an exception where that fails. */
static int open_driver(const char *path) {
    if (driver.library)
        return 0;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *why = dlerror();
        PyErr_Format(PyExc_OSError, "the CUDA driver cannot be opened: %s", why ? why : path);
        return -1;
    }
    struct {
        const char *name;
        void *target;
    } needed[] = {
        {"cuInit", &driver.init},
        {"cuGetErrorName", &driver.error_name},
        {"cuGetErrorString", &driver.error_string},
        {"cuDeviceGet", &driver.device_get},
        {"cuDevicePrimaryCtxRetain", &driver.primary_retain},
        {"cuDevicePrimaryCtxRelease_v2", &driver.primary_release},
        {"cuCtxGetCurrent", &driver.context_get},
        {"cuCtxPushCurrent_v2", &driver.context_push},
        {"cuCtxPopCurrent_v2", &driver.context_pop},
        {"cuLaunchKernelEx", &driver.launch},
    };
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
        if (!find_symbol(library, needed[i].name, needed[i].target)) {
            PyErr_Format(PyExc_RuntimeError, "the CUDA driver %s has no %s; a driver for CUDA 12 or newer is needed",
                         path, needed[i].name);
            dlclose(library);
            return -1;
        }
    }
    find_symbol(library, "cuTensorMapEncodeTiled", &driver.encode);
    CUresult code = driver.init(0);
    if (code) {
        driver_error(code, "cuInit", "");
        dlclose(library);
        return -1;
    }
    driver.library = library;
    return 0;
}

/* ------------------------------------------------------------------------------------------------- the plan */

/* Where a parameter comes from at each launch; constants lie in the template of the block. */
typedef enum { FROM_ADDRESS, FROM_INT32, FROM_INT64, FROM_MAP } Source;

typedef struct {
    int data_type, swizzle, fill, element_bytes, pair;
    uint32_t rank;
    uint64_t offset;             /* bytes from the tensor's address to the view's */
    uint64_t sizes[MAX_RANK];    /* innermost first, as the driver wants it */
    uint64_t strides[MAX_RANK];  /* bytes, innermost left out */
    uint32_t box[MAX_RANK];
    uint32_t stride_at;          /* offset in the block of the outermost stride, which a pair's distance is */
    int known;                   /* whether `encoded` is that of `address` and `stride` */
    uint64_t address, stride;
    CUtensorMap encoded;
} Map;

typedef struct {
    Source source;
    int argument;
    uint32_t at; /* offset in the block */
    Map *map;
} Field;

typedef struct {
    char name[MAX_NAME];
    CUfunction function;
    CUlaunchConfig config;
    CUlaunchAttribute attributes[2];
    int parameter_count, field_count, map_count;
    uint32_t block_bytes;
    Map *maps;
    Field *fields;
    uint32_t *offsets;
    unsigned char *block;
    void *memory; /* what the four lie in: no more than they need, since there may be thousands of plans */
} Kernel;

typedef struct {
    PyObject_HEAD
    CUdevice device;
    CUcontext primary; /* retained */
    int argument_count, kernel_count;
    Kernel *kernels;
    void *memory; /* what `kernels` lies in */
    atomic_flag lock; /* of the maps: without a GIL two threads may launch one plan */
} Plan;

typedef struct {
    enum { NOTHING, ADDRESS, NUMBER, PAIR } kind;
    uint64_t first, second; /* addresses, or the number */
} Value;

static void *new_aligned(size_t bytes, void **memory) {
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
    if (argument_count < 0 || argument_count > MAX_ARGUMENTS || count < 1 || count > 64) {
        PyErr_Format(PyExc_ValueError, "a plan has %d arguments and %zd kernels; allowed: at most %d, and 1 to 64",
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

/* ----------------------------------------------------------------------------------------------- a launch */

static int read_address(PyObject *tensor, uint64_t *address, int position) {
    PyObject *number = PyObject_CallMethodObjArgs(tensor, data_ptr_name, NULL);
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

static CUresult launch_all(Plan *plan, const Value *values, CUstream stream, const char **what, int *failed) {
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
    for (int i = 0; i < plan->kernel_count && !code; i++) {
        *failed = i;
        code = launch_kernel(plan, &plan->kernels[i], values, stream, what);
    }
    if (push)
        driver.context_pop(&popped);
    return code;
}

static PyObject *plan_launch(PyObject *self, PyObject *const *args, Py_ssize_t count) {
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
    for (int k = 0; k < plan->kernel_count; k++)
        for (int i = 0; i < plan->kernels[k].field_count; i++) {
            const Field *field = &plan->kernels[k].fields[i];
            if (check_value(field, &values[field->argument], &plan->kernels[k]))
                return NULL;
        }
    const char *what;
    int failed;
    PyThreadState *state = PyEval_SaveThread(); /* the driver waits where its queue is full */
    CUresult code = launch_all(plan, values, (CUstream)(uintptr_t)stream, &what, &failed);
    PyEval_RestoreThread(state);
    if (code) {
        char detail[MAX_NAME + 160] = "";
        if (failed >= 0) {
            const Kernel *kernel = &plan->kernels[failed];
            const CUlaunchConfig *config = &kernel->config;
            PyOS_snprintf(detail, sizeof detail, ", kernel %s, grid (%u, %u, %u), %u threads, %u bytes of shared memory",
                          kernel->name, config->grid_x, config->grid_y, config->grid_z, config->block_x,
                          config->shared_bytes);
        }
        driver_error(code, what, detail);
        return NULL;
    }
    Py_RETURN_NONE;
}

/* ----------------------------------------------------------------------------------------------- the module */

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

static PyType_Spec plan_spec = {"fusedmlp._launcher.Plan", sizeof(Plan), 0, Py_TPFLAGS_DEFAULT, plan_slots};

static int module_exec(PyObject *module) {
    if (!data_ptr_name)
        data_ptr_name = PyUnicode_InternFromString("data_ptr");
    if (!data_ptr_name)
        return -1;
    PyObject *type = PyType_FromSpec(&plan_spec);
    if (!type)
        return -1;
    if (PyModule_AddObject(module, "Plan", type)) {
        Py_DECREF(type);
        return -1;
    }
    return 0;
}

static PyMethodDef module_methods[] = {
    {"open", module_open, METH_O, open_doc},
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
    PyModuleDef_HEAD_INIT, "fusedmlp._launcher", "Launches the kernels of a plan with little host work.",
    0, module_methods, module_slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__launcher(void) { return PyModuleDef_Init(&module_definition); }
