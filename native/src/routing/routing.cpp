#include "routing/routing.h"

#include "model/layout.h"
#include "routing/contexts.h"

#include <algorithm>
#include <map>

namespace pyorch {

static Mutex                             owners_mutex;
static std::map<const void *, Routing *> owners GUARDED_BY(owners_mutex); // of managed tensors

const ManagedTensor * managed(const ggml_tensor * tensor) {
    const auto * m = tensor ? (const ManagedTensor *) tensor->extra : nullptr;
    return m && m->magic == ManagedTensor::MAGIC ? m : nullptr;
}

static Multiplication multiplication_of(const ExpertTensor & tensor, bool repacked, bool nibbles) {
    const ggml_type type = type_of(tensor);
    return { type == GGML_TYPE_COUNT ? nullptr : find_kernel(type, tensor.n_in, tensor.n_out, repacked), nibbles };
}

Routing::Routing(
    Table & table, Prefetcher & prefetcher, Routers & routers, RemoteBank & remote, bool repack, bool own_kernels) :
        table(table), prefetcher(prefetcher), routers(routers), remote(remote), activations(table.map.n_experts()),
        substitutions((int) table.map.layers.size()), calibration(table.map.n_experts()) {
    for (size_t i = 0; i < table.map.layers.size(); ++i) {
        const auto & of_layer = table.map.layers[i].tensors;
        const auto & pack     = table.map.layers[i].pack;
        for (size_t r = 0; r < PYORCH_MAX_ROLES; ++r) {
            auto t     = std::make_unique<ManagedTensor>();
            t->routing = this;
            t->layer   = (int) i;
            t->role    = (int) r;
            if (r < of_layer.size()) {
                t->repacked = repack && can_repack(of_layer[r]);
                if (own_kernels) {
                    t->multiplication = multiplication_of(of_layer[r], t->repacked, pack && pack->nibbles[r]);
                }
            }
            tensors.push_back(std::move(t));
        }
    }
    MutexLock lock(owners_mutex);
    for (const auto & t : tensors) {
        owners[t.get()] = this;
    }
}

Routing * Routing::owner_of(const void * tensor) {
    MutexLock  lock(owners_mutex);
    const auto owner = owners.find(tensor);
    return owner == owners.end() ? nullptr : owner->second;
}

Routing::~Routing() {
    forget_contexts(*this);
    MutexLock lock(owners_mutex);
    for (const auto & t : tensors) {
        owners.erase(t.get());
    }
}

ManagedTensor * Routing::find(const char * name) const {
    const ExpertPlace * place = table.map.find_experts(name);
    return place ? tensors[place->layer * PYORCH_MAX_ROLES + place->role].get() : nullptr;
}

bool insert(std::vector<int> & ascending, int number) {
    const auto at = std::lower_bound(ascending.begin(), ascending.end(), number);
    if (at != ascending.end() && *at == number) {
        return false;
    }
    ascending.insert(at, number);
    return true;
}

void Routing::computes(int layer) {
    MutexLock lock(mutex);
    if (insert(layers, layer)) {
        table.set_executed(layers);
    }
}

void Routing::check_routers() const {
    const bool by_choice = (prefetcher.needs() & PYORCH_NEEDS_ROUTERS) && !prefetcher.is_automatic();
    const bool executed  = speculation.active(true) && prefetcher.active();
    if (by_choice || executed) {
        const std::string why = routers.unknown();
        if (!why.empty()) {
            throw Failure(
                PYORCH_INVALID, why + (executed ? ": it cannot be speculated" : ": no predictor can apply its router"));
        }
    }
}

} // namespace pyorch
