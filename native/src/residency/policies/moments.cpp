#include "residency/policies/moments.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace pyorch {
namespace {

// Moments that vote: of equally alike ones the newest.
constexpr int N_MATCHES = 32;

// Of the uses in a window.
constexpr double TAU = 0.05;

// Tokens behind a moment that vote.
constexpr int HORIZON = 12;

// A search passes over all stored tokens, so their number is bounded by bytes, and so is the number of searches.
constexpr size_t MOST_BYTES   = 2u << 20;
constexpr int    MOST_TOKENS  = 4096;
constexpr int    LEAST_TOKENS = 256;
constexpr int    SEARCHES     = 4; // for each token

int tokens_for(int n_layers, int n_words) {
    const size_t bytes = (size_t) n_layers * n_words * sizeof(uint32_t);
    return (int) std::clamp<size_t>(MOST_BYTES / bytes, LEAST_TOKENS, MOST_TOKENS);
}

#if defined(__x86_64__) && defined(__GNUC__)
#define WITH_POPCOUNT __attribute__((target("popcnt")))
bool has_popcount() { return __builtin_cpu_supports("popcnt"); }
#else
#define WITH_POPCOUNT
bool has_popcount() { return true; }
#endif

// Bits that both have.
inline __attribute__((always_inline)) int count_common(const uint32_t * a, const uint32_t * b, int n_words) {
    int n = 0, i = 0;
    for (; i + 1 < n_words; i += 2) {
        uint64_t x, y;
        memcpy(&x, a + i, sizeof(x));
        memcpy(&y, b + i, sizeof(y));
        n += __builtin_popcountll(x & y);
    }
    return i < n_words ? n + __builtin_popcount(a[i] & b[i]) : n;
}

// What a search compares: of the present token the layers up to this one, of the token before it the others.
struct Window {
    const uint32_t * masks;    // of all tokens
    const int32_t *  previous; // of each
    const int32_t *  next;
    int              n_tokens, token_words;
    int              token, before; // the places of the present tokens; before may be -1
    int              n_words;       // of the first part
};

// -1 for tokens that nothing follows yet.
inline __attribute__((always_inline)) void compare_all(const Window & w, int32_t * common) {
    const uint32_t * now    = w.masks + (size_t) w.token * w.token_words;
    const uint32_t * before = w.before < 0 ? nullptr : w.masks + (size_t) w.before * w.token_words + w.n_words;
    const int        rest   = w.token_words - w.n_words;
    for (int t = 0; t < w.n_tokens; ++t) {
        if (w.next[t] < 0 || w.next[t] == w.token || t == w.token) {
            common[t] = -1;
            continue;
        }
        common[t] = count_common(w.masks + (size_t) t * w.token_words, now, w.n_words);
        if (before && w.previous[t] >= 0) {
            common[t] += count_common(w.masks + (size_t) w.previous[t] * w.token_words + w.n_words, before, rest);
        }
    }
}

WITH_POPCOUNT void compare_all_by_popcount(const Window & window, int32_t * common) { compare_all(window, common); }
void               compare_all_by_bits(const Window & window, int32_t * common) { compare_all(window, common); }

} // namespace

Moments::Moments(int n_layers, int n_expert, int n_used) :
        capacity(tokens_for(n_layers, (n_expert + 31) / 32)), n_layers(n_layers), words((n_expert + 31) / 32),
        layers_a_search((n_layers + SEARCHES - 1) / SEARCHES), share((float) n_used / (float) n_expert) {
    const auto step = (float) std::exp(-1 / (TAU * n_layers * n_used));
    float      sum  = 0;
    for (float weight = 1; weight > 1e-6f; weight *= step) {
        likeness_weight.push_back(weight);
    }
    for (float discount = 1; (int) discounts.size() < HORIZON; discount *= (float) DISCOUNT) {
        discounts.push_back(discount);
        sum += discount;
    }
    for (float & discount : discounts) { // so that uniform votes are 1 for each expert
        discount /= sum * share;
    }
    masks.reserve((size_t) capacity * n_layers * words);
}

// The oldest token makes room.
int Moments::take_place() {
    newest = (newest + 1) % capacity;
    if (newest == size()) {
        masks.resize(masks.size() + (size_t) n_layers * words);
        previous.push_back(-1);
        next.push_back(-1);
        return newest;
    }
    std::fill_n(mask(newest, 0), (size_t) n_layers * words, 0u);
    if (previous[newest] >= 0) {
        next[previous[newest]] = -1;
    }
    if (next[newest] >= 0) {
        previous[next[newest]] = -1;
    }
    previous[newest] = next[newest] = -1;
    for (auto & [context, passage] : passages) {
        passage.token = passage.token == newest ? -1 : passage.token;
    }
    return newest;
}

void Moments::visit(const Visit & visit) {
    Passage &  passage = passages[visit.context];
    const bool begins  = passage.token < 0 || visit.layer <= passage.layer;
    if (begins) {
        int before    = passage.token;
        passage.token = take_place();
        before        = before == passage.token ? -1 : before;
        if (before >= 0 && visit.continues) {
            previous[passage.token] = before;
            next[before]            = passage.token;
        }
    }
    passage.layer = visit.layer;
    for (int expert : visit.experts) {
        mask(passage.token, visit.layer)[expert / 32] |= 1u << (expert % 32);
    }
    if (begins || visit.layer >= passage.searched + layers_a_search) {
        search(passage);
    }
}

void Moments::search(Passage & passage) {
    passage.searched = passage.layer;
    passage.matches.clear();
    common.resize(next.size());
    const Window      window   = { masks.data(), previous.data(), next.data(), size(), n_layers * words, passage.token,
        previous[passage.token], (passage.layer + 1) * words };
    static const bool popcount = has_popcount();
    popcount ? compare_all_by_popcount(window, common.data()) : compare_all_by_bits(window, common.data());

    const int most = common.empty() ? -1 : *std::max_element(common.begin(), common.end());
    if (most < 0) {
        return;
    }
    histogram.assign((size_t) most + 1, 0);
    for (int n : common) {
        if (n >= 0) {
            ++histogram[(size_t) n];
        }
    }
    int least = most, n_left = N_MATCHES; // of those that have `least` in common, so many are taken
    while (n_left > histogram[(size_t) least] && least > 0) {
        n_left -= histogram[(size_t) least--];
    }
    float sum = 0;
    for (int i = 0; i < size(); ++i) { // the newest first
        const int  token = (newest - i + size()) % size();
        const int  less  = most - common[token];
        const bool taken = common[token] > least || (common[token] == least && n_left-- > 0);
        if (taken && less < (int) likeness_weight.size()) {
            passage.matches.push_back({ token, likeness_weight[(size_t) less] });
            sum += passage.matches.back().weight;
        }
    }
    for (Match & match : passage.matches) {
        match.weight /= sum;
    }
}

bool Moments::votes(const void * context, int layer, float * sums) const {
    const auto found = passages.find(context);
    if (found == passages.end() || found->second.matches.empty()) {
        return false;
    }
    std::fill_n(sums, (size_t) words * 32, 0.0f);
    for (const Match & match : found->second.matches) {
        int token = next[match.token];
        for (int h = 0; h < HORIZON && token >= 0 && token != found->second.token; ++h, token = next[token]) {
            const float      vote = match.weight * discounts[(size_t) h];
            const uint32_t * used = mask(token, layer);
            for (int word = 0; word < words; ++word) {
                for (uint32_t bits = used[word]; bits != 0; bits &= bits - 1) {
                    sums[32 * word + __builtin_ctz(bits)] += vote;
                }
            }
        }
    }
    return true;
}

void Moments::forget(const void * context) { passages.erase(context); }

void Moments::export_tokens(std::vector<int32_t> & to, std::vector<int32_t> & before) const {
    const int  oldest = size() < capacity ? 0 : (newest + 1) % capacity;
    const auto index  = [&](int token) { return token < 0 ? -1 : (token - oldest + size()) % size(); };
    for (int i = 0; i < size(); ++i) {
        const int              token = (oldest + i) % size();
        const uint32_t * const first = mask(token, 0);
        to.insert(to.end(), first, first + (size_t) n_layers * words);
        before.push_back(index(previous[token]));
    }
}

void Moments::import_tokens(const std::vector<int32_t> & from, const std::vector<int32_t> & before) {
    const int n = std::min((int) before.size(), capacity), first = (int) before.size() - n; // the newest
    passages.clear();
    masks.assign(from.end() - (std::ptrdiff_t) n * n_layers * words, from.end());
    previous.assign((size_t) n, -1);
    next.assign((size_t) n, -1);
    for (int token = 0; token < n; ++token) {
        if (before[(size_t) (first + token)] >= first) {
            previous[token]       = before[(size_t) (first + token)] - first;
            next[previous[token]] = token;
        }
    }
    newest = n - 1;
}

} // namespace pyorch
