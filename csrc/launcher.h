/* What the files of fusedmlp._launcher share.
 *
 * Built against CPython's limited API (one binary for Python 3.10 and newer). The CUDA driver is opened at run time;
 * no headers of CUDA or PyTorch are needed.
 */

#ifndef FUSEDMLP_LAUNCHER_H
#define FUSEDMLP_LAUNCHER_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdatomic.h>
#include <stdint.h>

#include "cuda_driver.h"
#include "dlpack_exchange.h"

enum { MAX_ARGUMENTS = 64, MAX_PARAMETERS = 160, MAX_BLOCK = 4096, MAX_RANK = 5, MAX_NAME = 96 };
enum { MAX_OPERANDS = 24, MAX_ENTRIES = 512 }; /* of a program; of a table, as many as there may be plans */

/* ------------------------------------------------------------------------------------------ driver.c */

typedef struct {
    void *library;
    cuInit_t init;
    cuGetErrorName_t error_name;
    cuGetErrorString_t error_string;
    cuDeviceGet_t device_get;
    cuDevicePrimaryCtxRetain_t primary_retain;
    cuDevicePrimaryCtxRelease_t primary_release;
    cuCtxGetCurrent_t context_get;
    cuCtxGetDevice_t context_device;
    cuCtxPushCurrent_t context_push;
    cuCtxPopCurrent_t context_pop;
    cuStreamIsCapturing_t is_capturing;
    cuLaunchKernelEx_t launch;
    cuTensorMapEncodeTiled_t encode; /* NULL where the driver is older than TMA */
} Driver;

extern Driver driver;

/* Opens the driver the first time. -1 with an exception where that fails. */
int open_driver(const char *path);

/* Raises RuntimeError with the driver's own words. */
void driver_error(CUresult code, const char *what, const char *detail);

/* ------------------------------------------------------------------------------------------ plan.c, launch.c */

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

/* An argument of a launch. */
typedef struct {
    enum { NOTHING, ADDRESS, NUMBER, PAIR } kind;
    uint64_t first, second; /* addresses, or the number */
} Value;

extern PyType_Spec plan_spec;
extern PyTypeObject *plan_type;

/* Launches the kernels from `first` on, `count` of them, without holding the GIL. -1 with an exception. */
int plan_run(Plan *plan, int first, int count, const Value *values, CUstream stream);

/* -1 with an exception where a value does not suit the kernels. */
int plan_check(const Plan *plan, const Value *values);

/* The address of a tensor, by its data_ptr(); `position` is that of the argument, for the message. */
int read_address(PyObject *tensor, uint64_t *address, int position);

extern PyObject *name_data_ptr; /* "data_ptr" */

PyObject *plan_launch(PyObject *self, PyObject *const *args, Py_ssize_t count);

/* Memory that is zero and aligned to 64 bytes; `memory` is what PyMem_Free takes. */
void *new_aligned(size_t bytes, void **memory);

/* ------------------------------------------------------------------------------------------ tensors.c */

/* Of PyTorch: what a steady call asks it, connected once. */
typedef struct {
    PyObject *tensor_type, *parameter_type, *linear_type;
    PyObject *global_hooks; /* a tuple of dicts, empty while no hook is registered for every module */
    PyObject *grad_enabled, *dispatch_modes, *tracing_state, *transforms_active; /* callables without arguments */
    PyObject *forward_ad;                                                        /* a module: its _current_level */
    PyObject *hooks;      /* has a launch_enter_hook, whose `calls` are empty while nobody looks on */
    PyObject *busy;       /* a tuple of lists, empty while calls go their usual way */
    PyObject *precision;  /* a callable: how products in float32 are computed */
    PyObject *allocate, *release; /* (bytes, stream) -> address; (address) */
    const DLPackExchange *exchange;
} Torch;

extern Torch torch;

PyObject *torch_connect(PyObject *module, PyObject *args, PyObject *keywords);

/* 1 where nothing stands between a call and its kernels, 0 where something does, -1 with an exception. */
int torch_quiet(void);

/* 1 with the view of a plain tensor whose memory holds its values, 0 where it is none; never an exception. */
int torch_view(PyObject *object, DLTensor *view);

/* Fills in the weights, then the biases (borrowed), of children that are Linears and nothing else. 1; 0 where one is more
 * than that; never an exception. */
int torch_linears(PyObject *children, PyObject *names, PyObject **operands);

/* What a callable without arguments says: 1, 0, or -1 with an exception. */
int torch_ask(PyObject *callable);

/* The current stream of a CUDA device. -1 where it cannot be told, with no exception. */
int torch_stream(const DLTensor *view, CUstream *stream);

/* ------------------------------------------------------------------------------------------ program.c */

extern PyType_Spec program_spec;
extern PyTypeObject *program_type;

/* Runs a program on inputs at these addresses; NULL with an exception. */
PyObject *program_run(PyObject *self, PyObject *const *inputs, const uint64_t *addresses, CUstream stream);

/* How many inputs it takes. */
int program_inputs(PyObject *self);

/* ------------------------------------------------------------------------------------------ table.c */

extern PyType_Spec table_spec;

#endif
