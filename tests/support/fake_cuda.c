/* A stand-in for the CUDA driver: it records launches instead of making them. For the tests of csrc/launcher.c.
 *
 * A "function" is the address of a Signature, so that the stand-in knows how many bytes each parameter has. An
 * "encoded" tensor map holds what it was encoded from. */

#include <sched.h>
#include <string.h>

#include "../../csrc/cuda_driver.h"

typedef struct {
    int count;
    int bytes[160];
} Signature;

typedef struct {
    unsigned int grid[3], block[3], shared_bytes, attribute_count;
    int attributes[4];
    uint64_t stream, function, context;
    uint32_t parameter_bytes;
    unsigned char parameters[4096];
} Launch;

typedef struct {
    uint64_t address, sizes[5], strides[4];
    uint32_t box[5];
    int8_t data_type, rank, swizzle, fill;
    int32_t serial;
} FakeMap;

_Static_assert(sizeof(FakeMap) <= sizeof(CUtensorMap), "a map has 128 bytes");

enum { CAPACITY = 65536 };
static Launch last[16];
static int launches, encodes, retained, pushed, popped, mixed_up, fail_after, fail_code;
static const char *fail_at = "";
static _Thread_local CUcontext current;
static struct CUctx_st {
    int device;
} contexts[4];

static CUresult failing(const char *name) { return strcmp(name, fail_at) || fail_after-- > 0 ? 0 : fail_code; }

/* For the tests. */
int fake_launches(void) { return __atomic_load_n(&launches, __ATOMIC_SEQ_CST); }
int fake_encodes(void) { return encodes; }
int fake_retained(void) { return retained; }
int fake_pushed(void) { return pushed; }
int fake_mixed_up(void) { return mixed_up; }
int fake_popped(void) { return popped; }
const Launch *fake_launch(int index) { return &last[index % 16]; }
void fake_fail(const char *name, int code, int after) { fail_at = name, fail_code = code, fail_after = after; }
void fake_make_current(int device) { current = device < 0 ? NULL : &contexts[device]; }

CUresult cuInit(unsigned int flags) { return flags ? 1 : failing("cuInit"); }

CUresult cuGetErrorName(CUresult error, const char **text) {
    *text = error == 1 ? "CUDA_ERROR_INVALID_VALUE" : error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : NULL;
    return *text ? 0 : 1;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == 1 ? "invalid argument" : error == 2 ? "out of memory" : NULL;
    return *text ? 0 : 1;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return ordinal < 0 || ordinal > 3 ? 1 : failing("cuDeviceGet");
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    CUresult code = failing("cuDevicePrimaryCtxRetain");
    if (code)
        return code;
    contexts[device].device = device;
    *context = &contexts[device];
    retained++;
    return 0;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    (void)device;
    retained--;
    return 0;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = current;
    return failing("cuCtxGetCurrent");
}

CUresult cuCtxGetDevice(CUdevice *device) {
    if (!current)
        return 201; /* CUDA_ERROR_INVALID_CONTEXT */
    *device = current->device;
    return failing("cuCtxGetDevice");
}

static _Thread_local CUcontext below;

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    CUresult code = failing("cuCtxPushCurrent");
    if (code)
        return code;
    below = current;
    current = context;
    pushed++;
    return 0;
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    *context = current;
    current = below;
    popped++;
    return 0;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, int data_type, uint32_t rank, void *address, const uint64_t *sizes,
                                const uint64_t *strides, const uint32_t *box, const uint32_t *element_strides,
                                int interleave, int swizzle, int l2_promotion, int fill) {
    CUresult code = failing("cuTensorMapEncodeTiled");
    memset(map, 0, sizeof *map); /* a failure may leave anything */
    if (code)
        return code;
    if ((uintptr_t)map % 64 || rank < 1 || rank > 5 || interleave || l2_promotion != 2)
        return 1;
    FakeMap made = {.address = (uint64_t)(uintptr_t)address, .data_type = (int8_t)data_type, .rank = (int8_t)rank,
                    .swizzle = (int8_t)swizzle, .fill = (int8_t)fill};
    for (uint32_t i = 0; i < rank; i++) {
        if (element_strides[i] != 1)
            return 1;
        made.sizes[i] = sizes[i];
        made.box[i] = box[i];
        if (i + 1 < rank)
            made.strides[i] = strides[i];
    }
    made.serial = __atomic_add_fetch(&encodes, 1, __ATOMIC_SEQ_CST);
    sched_yield(); /* time for a thread that does not wait for its turn, before and after */
    memcpy(map, &made, sizeof made);
    sched_yield();
    return 0;
}

static int capturing;
void fake_capture(int on) { capturing = on; }

CUresult cuStreamIsCapturing(CUstream stream, int *status) {
    (void)stream;
    *status = capturing;
    return failing("cuStreamIsCapturing");
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    CUresult code = failing("cuLaunchKernelEx");
    if (code)
        return code;
    if (extra || !current)
        return 201; /* CUDA_ERROR_INVALID_CONTEXT */
    Launch made = {{config->grid_x, config->grid_y, config->grid_z},
                   {config->block_x, config->block_y, config->block_z},
                   config->shared_bytes,
                   config->attribute_count,
                   {0},
                   (uint64_t)(uintptr_t)config->stream,
                   (uint64_t)(uintptr_t)function,
                   (uint64_t)current->device,
                   0,
                   {0}};
    for (unsigned int i = 0; i < config->attribute_count; i++)
        if (config->attributes[i].value.cooperative == 1) /* both attributes that we know are flags */
            made.attributes[i] = config->attributes[i].id;
    const Signature *signature = (const Signature *)function;
    for (int i = 0; i < signature->count; i++) {
        if (signature->bytes[i] == 128 && (uintptr_t)parameters[i] % 64)
            return 1;
        memcpy(made.parameters + made.parameter_bytes, parameters[i], (size_t)signature->bytes[i]);
        made.parameter_bytes += (uint32_t)signature->bytes[i];
    }
    /* Kernels that take one tensor as an address and as a map: both must be of the same launch. */
    if (signature->count > 1 && signature->bytes[0] == 8 && signature->bytes[1] == 128)
        if (memcmp(parameters[0], parameters[1], 8))
            __atomic_add_fetch(&mixed_up, 1, __ATOMIC_SEQ_CST);
    last[__atomic_fetch_add(&launches, 1, __ATOMIC_SEQ_CST) % 16] = made;
    return 0;
}
