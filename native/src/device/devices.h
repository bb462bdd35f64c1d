// Devices of ggml's backends, by their names.

#pragma once

#include "ggml-backend.h"

#include <cstdint>
#include <string>

namespace pyorch {

// "auto": the first device with memory of its own; "rpc:HOST:PORT": the device of a process that serves ggml's RPC;
// otherwise a name of ggml's registry, such as CUDA0. Devices live as long as this process. Throws Failure if there is
// none, with the names of all devices.
ggml_backend_dev_t find_device(const std::string & name);

// The next device with memory of its own, of the same backend (another one may offer the same GPUs). null: none.
ggml_backend_dev_t next_device(ggml_backend_dev_t device);

// In bytes. Throws Failure if the device belongs to another process that cannot be reached.
void device_memory(ggml_backend_dev_t device, uint64_t & free, uint64_t & total);

} // namespace pyorch
