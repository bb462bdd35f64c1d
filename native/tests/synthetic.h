// A model without weights, and a reader without threads: for programs that look at the residency table alone.

#pragma once

#include "loading/readers.h"

#include "ggml.h"
#include "gguf.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <unistd.h>

namespace pyorch {

// Experts of up, gate and down, each of rows(layer) times 32 bytes, whose weights are a hole in a file that is written
// to path and removed. n_used: by a token; 0: not said, so that all of a layer must fit into memory. type: of a layer's
// matrices, with rows of 32 numbers where not F32.
template <typename Rows>
ModelMap synthetic_map(
    const std::string & path, int n_layers, int n_expert, Rows rows, int n_used = 0, ggml_type (*type)(int) = nullptr) {
    ggml_init_params params = { 1u << 20, nullptr, true };
    ggml_context *   ctx    = ggml_init(params);
    gguf_context *   gguf   = gguf_init_empty();
    gguf_set_val_str(gguf, "general.architecture", "synthetic");
    gguf_set_val_u32(gguf, "synthetic.block_count", n_layers);
    if (n_used > 0) {
        gguf_set_val_u32(gguf, "synthetic.expert_used_count", n_used);
    }
    for (int l = 0; l < n_layers; ++l) {
        for (const char * role : { "up", "gate", "down" }) {
            ggml_tensor * t = type ? ggml_new_tensor_3d(ctx, type(l), 32, rows(l), n_expert) :
                                     ggml_new_tensor_3d(ctx, GGML_TYPE_F32, 8, rows(l), n_expert);
            ggml_format_name(t, "blk.%d.ffn_%s_exps.weight", l, role);
            gguf_add_tensor(gguf, t);
        }
    }
    const bool written = gguf_write_to_file(gguf, path.c_str(), true);
    uint64_t   bytes   = gguf_get_meta_size(gguf);
    for (int64_t i = 0; i < gguf_get_n_tensors(gguf); ++i) {
        const uint64_t end = gguf_get_tensor_offset(gguf, i) + gguf_get_tensor_size(gguf, i);
        bytes              = std::max<uint64_t>(bytes, gguf_get_meta_size(gguf) + end);
    }
    gguf_free(gguf);
    ggml_free(ctx);
    if (!written || truncate(path.c_str(), (off_t) bytes) != 0) {
        fprintf(stderr, "%s cannot be written\n", path.c_str());
        exit(1);
    }
    ModelMap map(path);
    unlink(path.c_str());
    return map;
}

// Reads nothing, but writes to each page that a read would write to.
inline int64_t touch_pages(void *, int32_t, uint64_t, void * buf, uint64_t size) {
    for (uint64_t at = 0; at < size; at += PAGE) {
        ((volatile char *) buf)[at] = 1;
    }
    return (int64_t) size;
}

// Reads when told to, and where a compute thread would sleep, on the calling thread.
class LocalReader : public Reader {
public:
    using Reader::Reader;

    uint64_t read_ns = 1; // that each request is said to take

    // One request; false if there is none.
    bool read_one() {
        ReadRequest request;
        if (!loader.try_next(request)) {
            return false;
        }
        loader.finish(request, loader.bytes().read(request.file, request.offset, request.buf, request.size), read_ns);
        return true;
    }

    void read_all() {
        while (read_one()) {
        }
    }

    void wait(Mutex & mutex, CondVar &) override REQUIRES(mutex) {
        MutexUnlock unlock(mutex);
        read_all();
    }
};

} // namespace pyorch
