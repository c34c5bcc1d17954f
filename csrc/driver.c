/* The CUDA driver, opened at run time. */

#include "launcher.h"

#include <dlfcn.h>
#include <string.h>

Driver driver;

void driver_error(CUresult code, const char *what, const char *detail) {
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

int open_driver(const char *path) {
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
        {"cuCtxGetDevice", &driver.context_device},
        {"cuCtxPushCurrent_v2", &driver.context_push},
        {"cuCtxPopCurrent_v2", &driver.context_pop},
        {"cuStreamIsCapturing", &driver.is_capturing},
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
