#include "routing/substitute/gates.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace pyorch {
namespace {

struct Sensitivity {
    double entropy; // token activating entropy, TAE (eq. 1)
    double margin;  // of the two largest probabilities
};

// From the renormalized probabilities of the selected experts. At a temperature T these are powers of 1 / T, because
// exp(z)^(1/T) is exp(z / T).
Sensitivity sensitivity(const RoutedBatch & batch, int t, const int32_t * experts, double temperature) {
    const RawWeights                 raw(batch, t);
    thread_local std::vector<double> p;
    p.resize(batch.n_used);
    double sum = 0;
    for (int s = 0; s < batch.n_used; ++s) {
        p[s] = raw.of(experts[s]);
        p[s] = temperature == 1 ? p[s] : std::pow(p[s], 1 / temperature);
        sum += p[s];
    }
    double entropy = 0;
    double first   = 0;
    double second  = 0;
    for (int s = 0; s < batch.n_used; ++s) {
        const double share = sum > 0 ? p[s] / sum : 1.0 / batch.n_used;
        if (share > 0) {
            entropy -= share * std::log(share);
        }
        second = std::max(second, std::min(first, share));
        first  = std::max(first, share);
    }
    return { batch.n_used > 1 ? std::min(entropy / std::log((double) batch.n_used), 1.0) : 0, first - second };
}

} // namespace

Requested count_requested(const RoutedBatch & batch, const uint8_t * resident) {
    thread_local std::vector<uint8_t> requested;
    requested.assign(batch.n_expert, 0);
    auto ghost = batch.ghosts.begin();
    for (int i = 0; i < batch.n_tokens * batch.n_used; ++i) {
        if (ghost != batch.ghosts.end() && *ghost == i) {
            ++ghost;
        } else {
            requested[batch.experts[i]] = 1;
        }
    }
    Requested count;
    for (int id = 0; id < batch.n_expert; ++id) {
        count.n += requested[id];
        count.n_absent += requested[id] && !resident[id];
    }
    return count;
}

Gates::Gates(const pyorch_substitution & settings, const RoutedBatch & batch, const Requested & requested) :
        settings(settings), batch(batch), crowded((double) requested.n_absent / requested.n >= settings.beta) {
} // the distribution gate (eq. 2)

Refusal Gates::refuses_token(int t, const int32_t * experts) const {
    const Sensitivity token =
        has_sensitivity_gates(settings) ? sensitivity(batch, t, experts, settings.temperature) : Sensitivity{ 1, 0 };
    return token.entropy <= settings.tau ? &pyorch_substitution_counts::refused_tae :
        token.margin >= settings.gamma   ? &pyorch_substitution_counts::refused_margin :
        crowded                          ? &pyorch_substitution_counts::refused_distribution :
                                           nullptr;
}

Refusal Gates::refuses_slot(int changed, int earlier) const {
    const bool all = (settings.max_per_token > 0 && changed == settings.max_per_token) ||
        (settings.max_all_layers > 0 && changed + earlier >= settings.max_all_layers);
    return all ? &pyorch_substitution_counts::refused_rho : nullptr;
}

} // namespace pyorch
