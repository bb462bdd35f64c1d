#include "device/devices.h"

#include "base/cpu_backend.h"
#include "base/status.h"
#include "model/fatal.h"

#include <exception>

namespace pyorch {
namespace {

bool computes(ggml_backend_dev_t device) {
    const auto type = ggml_backend_dev_type(device);
    return type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU;
}

// The GPU backends of this build, which look for a driver.
std::string gpu_backends() {
    std::string names;
    for (size_t i = 0; i < ggml_backend_reg_count(); ++i) {
        const std::string name = ggml_backend_reg_name(ggml_backend_reg_get(i));
        names += name == "CPU" || name == "RPC" || name == "BLAS" ? "" : (names.empty() ? "" : " and ") + name;
    }
    return names;
}

[[noreturn]] void refuse(const char * endpoint, const std::exception & failure) {
    throw Failure(PYORCH_IO, format("no device can be reached at %s: %s", endpoint, failure.what()));
}

ggml_backend_dev_t find_remote(const std::string & endpoint) {
    const ggml_backend_reg_t rpc = ggml_backend_reg_by_name("RPC");
    const auto               add = rpc ?
        (ggml_backend_reg_t (*)(const char *)) ggml_backend_reg_get_proc_address(rpc, "ggml_backend_rpc_add_server") :
        nullptr;
    if (!add) {
        throw Failure(PYORCH_INVALID, "this build has no devices of other processes: build it with -DGGML_RPC=ON");
    }
    ggml_backend_reg_t server = nullptr;
    try {
        FatalGuard guard; // ggml ends the process if it cannot reach the device
        server = add(endpoint.c_str());
    } catch (const std::exception & failure) {
        refuse(endpoint.c_str(), failure);
    }
    if (!server || ggml_backend_reg_dev_count(server) == 0) {
        throw Failure(PYORCH_IO, format("the process at %s has no device", endpoint.c_str()));
    }
    return ggml_backend_reg_dev_get(server, 0);
}

} // namespace

void device_memory(ggml_backend_dev_t device, uint64_t & free, uint64_t & total) {
    size_t free_bytes = 0, all_bytes = 0;
    try {
        FatalGuard guard;
        ggml_backend_dev_memory(device, &free_bytes, &all_bytes);
    } catch (const std::exception & failure) {
        refuse(ggml_backend_dev_description(device), failure);
    }
    free  = free_bytes;
    total = all_bytes;
}

ggml_backend_dev_t find_device(const std::string & name) {
    cpu_backend(); // loads all backends
    constexpr char REMOTE[] = "rpc:";
    if (name.rfind(REMOTE, 0) == 0) {
        return find_remote(name.substr(sizeof(REMOTE) - 1));
    }
    std::string names;
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        const ggml_backend_dev_t device     = ggml_backend_dev_get(i);
        const bool               has_memory = ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_GPU;
        if (name == "auto" ? has_memory : computes(device) && name == ggml_backend_dev_name(device)) {
            return device;
        }
        names += computes(device) ? std::string(names.empty() ? "" : ", ") + ggml_backend_dev_name(device) : "";
    }
    const std::string backends = gpu_backends();
    std::string       available =
        "this build finds none: a GPU needs CMAKE_ARGS=\"-DGGML_CUDA=ON\" pip install ., see docs/how-to/gpu.md";
    if (!names.empty()) {
        available = "there are " + names;
    } else if (!backends.empty()) {
        available = backends + " of this build finds none: is the driver of a GPU installed? See docs/how-to/gpu.md";
    }
    throw Failure(PYORCH_INVALID,
        format("there is no device%s: %s; a device of another process is rpc:HOST:PORT",
            name == "auto" ? (names.empty() ? "" : " with memory of its own") : (" " + name).c_str(),
            available.c_str()));
}

ggml_backend_dev_t next_device(ggml_backend_dev_t device) {
    bool behind = false;
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        const ggml_backend_dev_t next = ggml_backend_dev_get(i);
        if (behind && ggml_backend_dev_type(next) == GGML_BACKEND_DEVICE_TYPE_GPU &&
            ggml_backend_dev_backend_reg(next) == ggml_backend_dev_backend_reg(device)) {
            return next;
        }
        behind |= next == device;
    }
    return nullptr;
}

} // namespace pyorch
