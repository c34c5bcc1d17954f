/* The part of DLPack's C exchange interface (1.3) that is used here, declared so that building needs no headers of
 * PyTorch. Layouts are those of dlpack.h, which a major version keeps stable. PyTorch offers it from 2.10 on, as
 * torch.Tensor.__dlpack_c_exchange_api__. */

#ifndef FUSEDMLP_DLPACK_EXCHANGE_H
#define FUSEDMLP_DLPACK_EXCHANGE_H

#include <stdint.h>

enum { DLPACK_MAJOR = 1, DLPACK_CPU = 1, DLPACK_CUDA = 2 };

typedef struct {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides; /* borrowed from the tensor; strides in elements */
    uint64_t byte_offset;
} DLTensor;

typedef struct {
    uint32_t major, minor;
    void *older;
    void *allocate, *from_object, *to_object; /* not used here */
    int (*view)(void *object, DLTensor *view); /* may be NULL; -1 with a Python exception */
    int (*current_stream)(int32_t device_type, int32_t device_id, void **stream);
} DLPackExchange;

#endif
