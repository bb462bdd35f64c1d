// Devices: a tier of memory above the host's. A device computes with the experts in its memory.
//
// An engine gets devices with pyorch_config.devices. The rules of pyorch.h hold.

#ifndef PYORCH_DEVICES_H
#define PYORCH_DEVICES_H

#include "pyorch.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pyorch_device_info {
    uint64_t free_bytes, total_bytes; // of its memory
    int32_t  shares_memory;           // nonzero: its memory is the processor's
    char     name[64];
    char     buffers[64]; // llama.cpp's name of its buffers
    char     description[192];
} pyorch_device_info;

// Finds a device (ggml_backend_dev_t) by its name in ggml's registry, such as CUDA0; "auto" is the first device with
// its own memory, and "rpc:HOST:PORT" the device of a process that serves ggml's RPC there. It exists as long as the
// process. PYORCH_INVALID if there is no such device, PYORCH_IO if it cannot be reached.
pyorch_status pyorch_find_device(const char * name, void ** device);

// Finds the next device of that backend with its own memory, or NULL.
pyorch_status pyorch_next_device(void * after, void ** device);

// Measures, in some tenths of a second, the device for experts of this model, and the processor with so many threads.
// rates[5] are bytes of weights a second: uploads; the processor for the first row of an expert, and for each further
// row; the same two of the device. PYORCH_MEMORY if there is no memory for it.
pyorch_status pyorch_measure_device(const pyorch_model_map * map, void * device, int32_t n_threads, double * rates);

// Returns facts of a device. For a lost device of another process, its memory is 0 bytes, or the result is PYORCH_IO.
pyorch_status pyorch_get_device(void * device, pyorch_device_info * info);

// Limits the bytes of a device's memory for experts. device: its number in the engine. The first context allocates
// them; after that the result is PYORCH_INVALID. If the device refuses, fewer are allocated, and a line on stderr says
// so.
pyorch_status pyorch_set_device_budget(pyorch_engine * engine, int32_t device, uint64_t bytes);

// Sets the limits of pyorch_set_layer_limits for a layer's experts in slots of the device, after its memory was
// allocated: eviction leaves min of them, and no more than max are loaded, unless all experts of the model have slots.
// PYORCH_BUDGET if the minima leave no slot.
pyorch_status pyorch_set_device_limits(pyorch_engine * engine, int32_t il, int32_t min, int32_t max);

#ifdef __cplusplus
}
#endif

#endif
