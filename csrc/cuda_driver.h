/* The part of the CUDA driver API that the launcher calls, declared here so that building needs no CUDA headers.
 * Names, values and layouts are those of cuda.h of CUDA 12 and 13, which keeps them stable. */

#ifndef FUSEDMLP_CUDA_DRIVER_H
#define FUSEDMLP_CUDA_DRIVER_H

#include <stdint.h>

typedef int CUresult; /* 0 is success */
typedef int CUdevice;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUfunc_st *CUfunction;

typedef struct {
    _Alignas(64) uint64_t opaque[16];
} CUtensorMap;

enum {
    CU_LAUNCH_ATTRIBUTE_COOPERATIVE = 2,
    CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6
};

typedef struct {
    int id;
    char pad[4];
    union {
        char pad[64];
        int cooperative;
        int programmatic_stream_serialization;
    } value;
} CUlaunchAttribute;

typedef struct {
    unsigned int grid_x, grid_y, grid_z;
    unsigned int block_x, block_y, block_z;
    unsigned int shared_bytes;
    CUstream stream;
    CUlaunchAttribute *attributes;
    unsigned int attribute_count;
} CUlaunchConfig;

typedef CUresult (*cuInit_t)(unsigned int flags);
typedef CUresult (*cuGetErrorName_t)(CUresult error, const char **text);
typedef CUresult (*cuGetErrorString_t)(CUresult error, const char **text);
typedef CUresult (*cuDeviceGet_t)(CUdevice *device, int ordinal);
typedef CUresult (*cuDevicePrimaryCtxRetain_t)(CUcontext *context, CUdevice device);
typedef CUresult (*cuDevicePrimaryCtxRelease_t)(CUdevice device);
typedef CUresult (*cuCtxGetCurrent_t)(CUcontext *context);
typedef CUresult (*cuCtxGetDevice_t)(CUdevice *device);
typedef CUresult (*cuCtxPushCurrent_t)(CUcontext context);
typedef CUresult (*cuCtxPopCurrent_t)(CUcontext *context);
typedef CUresult (*cuStreamIsCapturing_t)(CUstream stream, int *status); /* 0: no capture */
typedef CUresult (*cuLaunchKernelEx_t)(const CUlaunchConfig *config, CUfunction function, void **parameters,
                                       void **extra);
typedef CUresult (*cuTensorMapEncodeTiled_t)(CUtensorMap *map, int data_type, uint32_t rank, void *address,
                                             const uint64_t *sizes, const uint64_t *strides, const uint32_t *box,
                                             const uint32_t *element_strides, int interleave, int swizzle,
                                             int l2_promotion, int fill);

enum { CU_TENSOR_MAP_INTERLEAVE_NONE = 0, CU_TENSOR_MAP_L2_PROMOTION_L2_128B = 2 };

#endif
