// What a layer needs for one ubatch.

#pragma once

#include <vector>

namespace pyorch {

// Experts ascending, each once.
struct Demand {
    // A batch this wide is a prompt: it touches most experts once, and says little about which ones decoding will need.
    static constexpr int SCAN_TOKENS = 8;

    const std::vector<int> & experts; // that it computes with: they are held
    const std::vector<int> & asked;   // that its router chose: they count as used, whatever took their place
    int                      n_tokens;
    bool                     continues = false; // see Visit
    bool                     own       = true;  // its tokens are this server's: no other one asked
    bool                     learned   = false; // learn_visit() was told of it

    bool scans() const { return n_tokens >= SCAN_TOKENS; }
};

} // namespace pyorch
