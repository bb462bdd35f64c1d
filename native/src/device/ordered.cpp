// Ordered experts: experts that come to slots of a device because of a forecast (SlotPools::order).
//
// They cost slots, which are kept for them, and an upload each. The device counts how often forecasts of a layer, a
// distance and a rank came true. If these were wrong more often than the precision that the user asked for, nothing is
// ordered for them. Forecasts of absent experts are counted even then, so that orders can begin again.
//
// None of this depends on time: orders follow from forecasts and passes only.

#include "device/slot_pools.h"
#include "residency/expert.h"

#include <algorithm>
#include <map>
#include <utility>

namespace pyorch {
namespace {

// Layers with ordered experts at once: the present layer and the next two.
constexpr int LAYERS_WITH_ORDERS = 3;

// Ordered experts have at most a share of a pool's slots.
constexpr int MOST_KEPT = 4; // a fourth

} // namespace

struct SlotPools::Ahead {
    struct Orders {
        std::vector<ForecastExpert> noted;  // absent when they were forecast
        std::vector<int>            chosen; // of these, the ordered ones
    };

    int                                            n; // ordered experts of a layer at most
    std::map<std::pair<const void *, int>, Orders> orders;
    std::vector<std::vector<Rate>>                 came_true; // by layer, then distance and rank

    Rate & rate(int layer, const ForecastExpert & named, int n_expert) {
        std::vector<Rate> & rates = came_true[layer];
        const size_t        at    = (size_t) std::max(named.distance - 1, 0) * n_expert + named.rank;
        rates.resize(std::max(rates.size(), at + 1), Rate(0.5));
        return rates[at];
    }
};

void SlotPools::set_ahead(int n) {
    ahead.reset(new Ahead{ n, {}, std::vector<std::vector<Rate>>(layers.size()) });
    for (Pool & pool : pools) {
        pool.n_kept = std::min(LAYERS_WITH_ORDERS * n, pool.n_slots / MOST_KEPT);
        for (int i = 0; i < pool.n_kept; ++i) {
            pool.kept.push_back(pool.free.back());
            pool.free.pop_back();
        }
    }
}

void SlotPools::give_kept(Pool & pool, int slot) {
    const bool keeps = (int) pool.kept.size() < pool.n_kept;
    (keeps ? pool.kept : pool.free).push_back(slot);
}

std::vector<int> SlotPools::order(
    const void * context, int layer, const std::vector<ForecastExpert> & forecast, double precision) {
    if (!ahead) {
        return {};
    }
    constexpr double EVEN   = 0.5;
    Ahead::Orders &  orders = ahead->orders[{ context, layer }];
    Layer &          l      = layers[layer];
    Pool &           pool   = pools[l.pool];
    std::vector<int> made;
    for (const ForecastExpert & named : forecast) {
        Slotted & e = l.experts[named.expert];
        if (e.slot != NONE) {
            continue;
        }
        orders.noted.push_back(named);
        if ((int) orders.chosen.size() < ahead->n && !pool.kept.empty() &&
            ahead->rate(layer, named, (int) l.experts.size()).value() >= (precision < 0 ? EVEN : precision)) {
            e.slot     = pool.kept.back();
            e.arrived  = false;
            e.guess_of = context;
            pool.kept.pop_back();
            ++seats.counts(layer).device_ahead;
            orders.chosen.push_back(named.expert);
            made.push_back(named.expert);
        }
    }
    return made;
}

const std::vector<int> & SlotPools::ordered(const void * context, int layer) const {
    static const std::vector<int> none;
    if (!ahead) {
        return none;
    }
    const auto found = ahead->orders.find({ context, layer });
    return found != ahead->orders.end() ? found->second.chosen : none;
}

std::vector<int> SlotPools::layers_ordered(const void * context) const {
    std::vector<int> found;
    if (ahead) {
        for (const auto & [of, orders] : ahead->orders) {
            if (of.first == context) {
                found.push_back(of.second);
            }
        }
    }
    return found;
}

void SlotPools::forget(const void * context, int layer) {
    if (ahead) {
        ahead->orders.erase({ context, layer });
    }
}

bool SlotPools::admit_ordered(Slotted & e, bool & took) {
    if (!make_room(e, false, took)) {
        return false;
    }
    Pool &    pool = pool_of(e);
    const int slot = pool.free.back();
    pool.free.pop_back();
    e.guess_of = nullptr;
    give_kept(pool, slot); // in exchange for its own
    seats.come(e);
    if (e.arrived) {
        seats.arrive(e);
    }
    mark_moved(e.layer);
    return true;
}

// Which forecasts of the layer came true. Of a prompt's layer none was made.
void SlotPools::judge(int layer, const DeviceDemand & demand) {
    const auto found = ahead->orders.find({ demand.context, layer });
    if (found == ahead->orders.end()) {
        return;
    }
    for (const ForecastExpert & named : found->second.noted) {
        const bool came_true = std::binary_search(demand.asked.begin(), demand.asked.end(), named.expert);
        if (demand.n_tokens < Demand::SCAN_TOKENS) {
            ahead->rate(layer, named, (int) layers[layer].experts.size()).add(came_true);
        }
    }
    ahead->orders.erase(found);
}

} // namespace pyorch
