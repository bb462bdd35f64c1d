// Devices of ggml's backends, by the names that people give.

#pragma once

#include "ggml-backend.h"

#include <cstdint>
#include <string>

namespace pyorch {

// "auto": the first one with memory of its own; "rpc:HOST:PORT": that of a process which serves ggml's RPC there; else a
// name of ggml's registry, such as CUDA0. They live as long as this process. Throws Failure where there is none, with
// the names of those that there are.
ggml_backend_dev_t find_device(const std::string & name);

// The next one with memory of its own, of the same backend: another may offer the same GPUs. null: there is none.
ggml_backend_dev_t next_device(ggml_backend_dev_t device);

// In bytes. Throws Failure where the device is another process's and cannot be reached.
void device_memory(ggml_backend_dev_t device, uint64_t & free, uint64_t & total);

} // namespace pyorch
