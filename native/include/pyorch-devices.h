// Devices: a tier of memory above the host's, whose experts a device computes with.
//
// An engine gets them with pyorch_config.devices. The rules of pyorch.h hold.

#ifndef PYORCH_DEVICES_H
#define PYORCH_DEVICES_H

#include "pyorch.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pyorch_device_info {
    uint64_t free_bytes, total_bytes; // of its memory
    int32_t  shares_memory;           // with this machine's processor: it has none of its own
    char     name[64];
    char     buffers[64]; // what llama.cpp calls its buffers
    char     description[192];
} pyorch_device_info;

// A device (ggml_backend_dev_t) by its name in ggml's registry, such as CUDA0, "auto" for the first one with memory of
// its own, or "rpc:HOST:PORT" for that of a process which serves ggml's RPC there. It stays as long as the process.
// PYORCH_INVALID where there is none, PYORCH_IO where none can be reached.
pyorch_status pyorch_find_device(const char * name, void ** device);

// The next one of that backend with memory of its own, NULL where there is none.
pyorch_status pyorch_next_device(void * after, void ** device);

// How fast it is for experts of this model, and the processor with so many threads: rates[5], bytes of weights a
// second, of uploads, of the processor for the first row of an expert and for each further one, and the same of the
// device. Measured now, in some tenths of a second. PYORCH_MEMORY where there is none for it.
pyorch_status pyorch_measure_device(const pyorch_model_map * map, void * device, int32_t n_threads, double * rates);

// A device of another process that is lost has no memory, 0 bytes, or PYORCH_IO is returned.
pyorch_status pyorch_get_device(void * device, pyorch_device_info * info);

// Bytes of a device's memory for experts, at most; device: its number among those of the engine. They are taken when the
// first context is made: PYORCH_INVALID then. Where the device refuses so many, fewer are taken, and a line on stderr
// says it.
pyorch_status pyorch_set_device_budget(pyorch_engine * engine, int32_t device, uint64_t bytes);

// As pyorch_set_layer_limits, of a layer's experts in slots of the device, once its memory was taken: min of them stay
// when others come, and no more than max come, unless all experts of the model have slots. PYORCH_BUDGET where the
// minima leave no slot.
pyorch_status pyorch_set_device_limits(pyorch_engine * engine, int32_t il, int32_t min, int32_t max);

#ifdef __cplusplus
}
#endif

#endif
