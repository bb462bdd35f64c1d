#include "residency/victims.h"

#include <algorithm>

namespace pyorch {

Victims::Victims(const std::vector<int> & n_experts) {
    for (int n : n_experts) {
        for (int purpose = 0; purpose < N_PURPOSES; ++purpose) {
            all.push_back({});
            all.back().key.assign(n, NEVER);
        }
    }
}

void Victims::look_through(Keys & keys) {
    // Four minima at once do not wait for each other.
    const double * key  = keys.key.data();
    const int      n    = (int) keys.key.size();
    double         m[4] = { NEVER, NEVER, NEVER, NEVER };
    int            i    = 0;
    for (; i + 4 <= n; i += 4) {
        for (int j = 0; j < 4; ++j) {
            m[j] = key[i + j] < m[j] ? key[i + j] : m[j];
        }
    }
    for (; i < n; ++i) {
        m[0] = key[i] < m[0] ? key[i] : m[0];
    }
    const double lowest = std::min(std::min(m[0], m[1]), std::min(m[2], m[3]));
    keys.least          = { lowest < NEVER ? (int) (std::find(key, key + n, lowest) - key) : -1, lowest };
    keys.dirty          = false;
}

} // namespace pyorch
