#include "model/fatal.h"
#include "model/model_map.h"

#include "model/form.h"

#include "ggml-cpp.h"
#include "llama.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <sys/stat.h>

namespace pyorch {

uint64_t MoeLayer::expert_bytes() const {
    uint64_t n = 0;
    for (const auto & t : tensors) {
        n += t.stride;
    }
    return n;
}

uint64_t MoeLayer::slot_bytes() const { return pyorch::slot_bytes(*this, PART_MATRICES); }

static const char * const SLIM =
    "pyorch.slim"; // key: the model has no expert data; its value is the whole model's fingerprint

// Returns the rank in the order of the kernels, -1 if the tensor is no routed expert.
static int parse_name(const char * name, int & il, std::string & role) {
    char part[32];
    int  end = 0;
    if (sscanf(name, "blk.%d.ffn_%31[a-z_].weight%n", &il, part, &end) != 2 || end == 0 || name[end] != '\0') {
        return -1;
    }
    static const char * const roles[] = { "gate_up_exps", "gate_exps", "up_exps", "down_exps" };
    for (int i = 0; i < 4; ++i) {
        if (strcmp(part, roles[i]) == 0) {
            role.assign(part, strlen(part) - strlen("_exps"));
            return i;
        }
    }
    return -1;
}

void check_readable(const std::string & path) {
    struct stat st;
    if (stat(path.c_str(), &st) != 0) {
        throw Failure(PYORCH_IO, format("%s: %s", path.c_str(), errno == ENOENT ? "no such file" : strerror(errno)));
    }
    if (S_ISDIR(st.st_mode)) {
        throw Failure(PYORCH_FORMAT, format("%s is a directory, not a GGUF file", path.c_str()));
    }
    if (!S_ISREG(st.st_mode)) { // reading a pipe would block
        throw Failure(PYORCH_FORMAT, format("%s is no file, so it is not a GGUF file", path.c_str()));
    }
    FILE * f = fopen(path.c_str(), "rb");
    if (!f) {
        throw Failure(PYORCH_IO, format("%s: %s", path.c_str(), strerror(errno)));
    }
    char         magic[4] = {};
    const size_t n        = fread(magic, 1, 4, f);
    fclose(f);
    if (n != 4 || memcmp(magic, "GGUF", 4) != 0) {
        throw Failure(PYORCH_FORMAT, format("%s is not a GGUF file: it does not begin with GGUF", path.c_str()));
    }
}

// ggml's reader logs why it refuses a file. Without a log of the caller's own, that line would precede our message.
static thread_local bool is_reading = false;

static const bool log_is_kept = [] {
    static ggml_log_callback log;
    static void *            user_data;
    ggml_log_get(&log, &user_data);
    ggml_log_set(
        [](ggml_log_level level, const char * text, void *) {
            if (!is_reading) {
                log(level, text, user_data);
            }
        },
        nullptr);
    return true;
}();

static gguf_context_ptr read_header(const std::string & path, ggml_context ** meta) {
    struct Reading {
        Reading() { is_reading = true; }
        ~Reading() { is_reading = false; } // also if ggml asserts instead of refusing
    } const reading;
    return gguf_context_ptr(gguf_init_from_file(path.c_str(), { /*.no_alloc =*/true, /*.ctx =*/meta }));
}

std::shared_ptr<gguf_context> ModelMap::read_file(const std::string & path) {
    check_readable(path);

    ggml_context *                      meta = nullptr;
    const std::shared_ptr<gguf_context> ctx  = read_header(path, &meta);
    const ggml_context_ptr              meta_owner(meta);
    if (!ctx) {
        throw Failure(PYORCH_FORMAT,
            format("%s is a truncated or damaged GGUF: its header cannot be read to the end", path.c_str()));
    }

    struct stat st;
    stat(path.c_str(), &st);
    const int      file         = (int) files.size();
    uint64_t       first_lacked = UINT64_MAX;
    const uint64_t data         = gguf_get_data_offset(ctx.get());
    const uint64_t in_file      = (uint64_t) st.st_size;
    uint64_t       span         = in_file;
    uint64_t       needed       = 0;
    // Read here, because the tensors are checked before the rest of the metadata. A slim model is one file.
    slim = slim || gguf_find_key(ctx.get(), SLIM) >= 0;

    for (int64_t i = 0; i < gguf_get_n_tensors(ctx.get()); ++i) {
        const char *        tensor_name = gguf_get_tensor_name(ctx.get(), i);
        const ggml_tensor * t           = ggml_get_tensor(meta, tensor_name);
        const uint64_t      offset      = data + gguf_get_tensor_offset(ctx.get(), i);
        const uint64_t      bytes       = ggml_nbytes(t);
        int                 il          = 0;
        std::string         role;
        const bool          is_expert = parse_name(tensor_name, il, role) >= 0 && t->ne[2] >= 2;
        // Absent bytes of a slim file start at its end or in its last page; the loader unmaps the bytes before them.
        const bool lacked = slim && is_expert && offset >= in_file;
        first_lacked      = lacked ? std::min(first_lacked, offset) : first_lacked;
        span              = std::max(span, offset + bytes);
        needed            = lacked ? needed : std::max(needed, offset + bytes);
        tensor_bytes += bytes;
        n_params += (uint64_t) ggml_nelements(t);
        tensors[tensor_name] = { file, offset, bytes, ggml_type_name(t->type) };

        if (!is_expert) {
            continue;
        }
        if (il < 0 || il >= MAX_LAYERS || t->ne[2] > MAX_EXPERTS || bytes == 0) {
            throw Failure(PYORCH_FORMAT,
                format("%s: tensor %s has %lld experts of %llu bytes together: llama.cpp knows up to %d "
                       "experts in each of %d layers",
                    path.c_str(), tensor_name, (long long) t->ne[2], (unsigned long long) bytes, MAX_EXPERTS,
                    MAX_LAYERS));
        }
        auto layer = std::find_if(layers.begin(), layers.end(), [&](const MoeLayer & l) { return l.il == il; });
        if (layer == layers.end()) {
            layers.push_back({ il, (int) t->ne[2], 0, {} });
            layer = layers.end() - 1;
        }
        if (layer->n_expert != t->ne[2]) {
            throw Failure(PYORCH_FORMAT,
                format("%s: tensor %s has %lld experts, the others of its layer have %d", path.c_str(), tensor_name,
                    (long long) t->ne[2], layer->n_expert));
        }
        layer->tensors.push_back(
            { tensor_name, role, ggml_type_name(t->type), file, offset, t->nb[2], t->ne[0], t->ne[1] });
    }
    if (needed > in_file) {
        throw Failure(PYORCH_FORMAT,
            format("%s is truncated: it has %llu of %llu bytes%s", path.c_str(), (unsigned long long) in_file,
                (unsigned long long) needed, in_file <= data ? ", which are its header only" : ""));
    }
    if (first_lacked != UINT64_MAX && first_lacked > round_up(in_file, PAGE)) {
        throw Failure(PYORCH_FORMAT,
            format("%s is truncated: it has %llu bytes, and what it should have ends at %llu", path.c_str(),
                (unsigned long long) in_file, (unsigned long long) first_lacked));
    }
    files.push_back({ path, in_file, span });
    return ctx;
}

ModelMap::ModelMap(const std::string & path) {
    const FatalGuard guard; // ggml's readers assert conditions that they should refuse
    metadata = read_file(path);

    // Read this first: later shards have no other metadata.
    int64_t n_split = 1, no = 0;
    get_int("split.count", 0, n_split);
    get_int("split.no", 0, no);
    char prefix[4096];
    if (n_split > 1 &&
        (!llama_split_prefix(prefix, sizeof(prefix), path.c_str(), (int) no, (int) n_split) || no != 0)) {
        throw Failure(PYORCH_FORMAT,
            format("%s is shard %d of %d: name the first one, ending in -00001-of-%05d.gguf", path.c_str(),
                (int) no + 1, (int) n_split, (int) n_split));
    }

    const char * text = nullptr;
    if (!get_str("general.architecture", text)) {
        throw Failure(PYORCH_FORMAT, format("%s is not a model: it has no general.architecture", path.c_str()));
    }
    arch = text;
    if (get_str("general.name", text)) {
        name = text;
    }
    n_layers = (int) checked_int("block_count", 1, MAX_LAYERS);
    checked_int("expert_used_count", 0, MAX_EXPERTS);
    checked_int("expert_count", 0, MAX_EXPERTS);
    checked_int("context_length", 1, INT32_MAX);
    checked_int("embedding_length", 1, INT32_MAX);
    check_heads();
    for (const char * name : { "layer_norm_rms_epsilon", "layer_norm_epsilon", "group_norm_epsilon" }) {
        const std::string key     = arch + ".attention." + name;
        double            epsilon = 0;
        if (get_float(key, epsilon) && !(epsilon >= 0)) {
            throw Failure(
                PYORCH_FORMAT, format("%s: %s is %g, and must be 0 or more", path.c_str(), key.c_str(), epsilon));
        }
    }

    for (int i = 1; i < n_split; ++i) {
        char shard[4096];
        llama_split_path(shard, sizeof(shard), prefix, i, (int) n_split);
        struct stat st;
        if (stat(shard, &st) != 0 && errno == ENOENT) {
            throw Failure(PYORCH_IO, format("%s: no such file (shard %d of %d)", shard, i + 1, (int) n_split));
        }
        read_file(shard);
    }

    n_shards = (int) files.size();

    std::sort(layers.begin(), layers.end(), [](const MoeLayer & a, const MoeLayer & b) { return a.il < b.il; });
    if (n_layers > 0 && !layers.empty() && layers.back().il >= n_layers) {
        throw Failure(PYORCH_FORMAT,
            format("%s: there are experts of layer %d, and %s.block_count is %d", path.c_str(), layers.back().il,
                arch.c_str(), n_layers));
    }
    read_top_k();
    for (auto & layer : layers) {
        std::sort(layer.tensors.begin(), layer.tensors.end(), [](const ExpertTensor & a, const ExpertTensor & b) {
            int         il;
            std::string role;
            return parse_name(a.name.c_str(), il, role) < parse_name(b.name.c_str(), il, role);
        });
        if (layer.tensors.size() > PYORCH_MAX_ROLES) {
            throw Failure(PYORCH_FORMAT,
                format("%s: layer %d has %zu expert tensors, at most %d are known", path.c_str(), layer.il,
                    layer.tensors.size(), (int) PYORCH_MAX_ROLES));
        }
        for (size_t role = 0; role < layer.tensors.size(); ++role) {
            experts_by_name[layer.tensors[role].name] = { (int) (&layer - layers.data()), (int) role };
        }
    }
}

void ModelMap::read_top_k() {
    const std::string key = arch + ".expert_used_count";
    for (auto & layer : layers) {
        int64_t n_used = 0;
        if (get_int(key, layer.il, n_used) && (n_used < 1 || n_used > layer.n_expert)) {
            throw Failure(PYORCH_FORMAT,
                format("%s: %s is %lld for layer %d, and must be from 1 to %d, its number of experts",
                    files[0].path.c_str(), key.c_str(), (long long) n_used, layer.il, layer.n_expert));
        }
        layer.n_used  = (int) n_used;
        n_expert_used = std::max(n_expert_used, layer.n_used);
    }
}

// Returns 0 if the key is missing. An array has an element for each layer, and may be longer.
int64_t ModelMap::checked_int(const char * name, int64_t low, int64_t high, bool even) const {
    const std::string key   = arch + "." + name;
    int64_t           first = 0;
    int64_t           value = 0;
    for (int i = 0; get_int(key, i, value); ++i) {
        if (value < low || value > high || (even && value % 2 != 0)) {
            throw Failure(PYORCH_FORMAT,
                format("%s: %s is %lld, and must be %sfrom %lld to %lld", files[0].path.c_str(), key.c_str(),
                    (long long) value, even ? "an even number " : "", (long long) low, (long long) high));
        }
        first = i == 0 ? value : first;
        if (gguf_get_kv_type(metadata.get(), gguf_find_key(metadata.get(), key.c_str())) != GGUF_TYPE_ARRAY) {
            break;
        }
    }
    return first;
}

// Kernels rotate a head's numbers in pairs. If a head has no numbers, or fewer than are rotated, they notice only while
// they compute, and then loop for ever or end the process.
void ModelMap::check_heads() const {
    int64_t n_embd = 0, n_head = 0, n_rot = 0;
    get_int(arch + ".rope.dimension_count", 0, n_rot);
    if (!get_int(arch + ".embedding_length", 0, n_embd) || !get_int(arch + ".attention.head_count", 0, n_head)) {
        return;
    }
    const int64_t heads = gguf_find_key(metadata.get(), (arch + ".attention.head_count").c_str());
    const bool    each  = gguf_get_kv_type(metadata.get(), heads) == GGUF_TYPE_ARRAY; // some layers have no attention
    checked_int("attention.head_count", n_rot > 0 && !each, n_embd);
    if (n_head == 0) {
        return;
    }
    int64_t n_key = n_embd / n_head;
    for (const std::string window : { "", "_swa" }) {
        get_int(arch + ".attention.key_length" + window, 0, n_key);
        checked_int(("rope.dimension_count" + window).c_str(), 2, n_key, true);
    }
}

int ModelMap::n_decoded() const {
    int64_t n_further = 0;
    get_int(arch + ".nextn_predict_layers", 0, n_further);
    return (int) std::count_if(
        layers.begin(), layers.end(), [&](const MoeLayer & layer) { return layer.il < n_layers - n_further; });
}

std::vector<int> ModelMap::n_experts() const {
    std::vector<int> n;
    for (const MoeLayer & layer : layers) {
        n.push_back(layer.n_expert);
    }
    return n;
}

uint64_t ModelMap::file_bytes() const {
    uint64_t n = 0;
    for (int i = 0; i < n_shards; ++i) {
        n += files[i].bytes;
    }
    return n;
}

uint64_t ModelMap::expert_bytes() const {
    uint64_t n = 0;
    for (const auto & l : layers) {
        n += l.expert_bytes() * l.n_expert;
    }
    return n;
}

uint64_t ModelMap::slots_bytes() const {
    uint64_t n = 0;
    for (const auto & l : layers) {
        n += l.slot_bytes() * l.n_expert;
    }
    return n + max_staged() * parts_bytes();
}

uint64_t ModelMap::floor_bytes() const {
    uint64_t n = 0;
    for (const auto & l : layers) {
        n = std::max(n, l.slot_bytes() * floor_experts(l));
    }
    return n + MIN_STAGED * parts_bytes();
}

uint64_t ModelMap::parts_bytes() const {
    uint64_t n = 0;
    for (const auto & l : layers) {
        n = std::max(n, pyorch::slot_bytes(l, PART_E) + pyorch::slot_bytes(l, PART_SM));
    }
    return n;
}

// Returns the experts of a token, and some that are prefetched meanwhile.
int ModelMap::max_staged() const {
    constexpr int AHEAD = 2;
    return std::max(MIN_STAGED, n_expert_used + AHEAD);
}

int ModelMap::floor_experts(const MoeLayer & layer) const {
    return layer.n_used > 0 ? std::min(layer.n_expert, 2 * layer.n_used + 1) : layer.n_expert;
}

const ExpertPlace * ModelMap::find_experts(const std::string & tensor) const {
    const auto place = experts_by_name.find(tensor);
    return place == experts_by_name.end() ? nullptr : &place->second;
}

int ModelMap::index_of(int il) const {
    const auto layer =
        std::lower_bound(layers.begin(), layers.end(), il, [](const MoeLayer & l, int il) { return l.il < il; });
    if (layer == layers.end() || layer->il != il) {
        throw Failure(PYORCH_INVALID, format("layer %d has no routed experts", il));
    }
    return (int) (layer - layers.begin());
}

bool ModelMap::get_int(const std::string & key, int index, int64_t & value) const {
    const int64_t id = gguf_find_key(metadata.get(), key.c_str());
    if (id < 0) {
        return false;
    }
    gguf_type    type = gguf_get_kv_type(metadata.get(), id);
    const char * data;
    if (type == GGUF_TYPE_ARRAY) {
        type = gguf_get_arr_type(metadata.get(), id);
        if (type == GGUF_TYPE_STRING || index < 0 || (size_t) index >= gguf_get_arr_n(metadata.get(), id)) {
            return false;
        }
        data = (const char *) gguf_get_arr_data(metadata.get(), id);
    } else {
        if (type == GGUF_TYPE_STRING) {
            return false;
        }
        data  = (const char *) gguf_get_val_data(metadata.get(), id);
        index = 0;
    }
    auto read = [&](auto zero) {
        memcpy(&zero, data + index * sizeof(zero), sizeof(zero));
        value = (int64_t) zero;
        return true;
    };
    switch (type) {
    case GGUF_TYPE_UINT8: return read(uint8_t());
    case GGUF_TYPE_INT8: return read(int8_t());
    case GGUF_TYPE_BOOL: return read(int8_t());
    case GGUF_TYPE_UINT16: return read(uint16_t());
    case GGUF_TYPE_INT16: return read(int16_t());
    case GGUF_TYPE_UINT32: return read(uint32_t());
    case GGUF_TYPE_INT32: return read(int32_t());
    case GGUF_TYPE_UINT64: return read(uint64_t());
    case GGUF_TYPE_INT64: return read(int64_t());
    default: return false;
    }
}

bool ModelMap::get_float(const std::string & key, double & value) const {
    const int64_t   id   = gguf_find_key(metadata.get(), key.c_str());
    const gguf_type type = id < 0 ? GGUF_TYPE_COUNT : gguf_get_kv_type(metadata.get(), id);
    if (type == GGUF_TYPE_FLOAT32) {
        value = gguf_get_val_f32(metadata.get(), id);
    } else if (type == GGUF_TYPE_FLOAT64) {
        value = gguf_get_val_f64(metadata.get(), id);
    }
    return type == GGUF_TYPE_FLOAT32 || type == GGUF_TYPE_FLOAT64;
}

bool ModelMap::get_str(const std::string & key, const char *& value) const {
    const int64_t id = gguf_find_key(metadata.get(), key.c_str());
    if (id < 0 || gguf_get_kv_type(metadata.get(), id) != GGUF_TYPE_STRING) {
        return false;
    }
    value = gguf_get_val_str(metadata.get(), id);
    return true;
}

} // namespace pyorch
