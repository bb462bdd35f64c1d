#include "residency/policies/moments.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <tuple>

namespace pyorch {
namespace {

// Moments that a search finds; of equally alike ones, the newest.
constexpr size_t N_MATCHES = 8;

// In shares of the uses in a window.
constexpr double TAU = 0.08;

// Tokens after a moment that vote.
constexpr int HORIZON = 12;

// Moments that vote, and the share of weight that earlier ones keep at a search.
constexpr size_t N_VOTERS = 24;
constexpr float  FADE     = 0.7f;

// A search compares all stored tokens. So bytes bound their number, and a constant the number of searches.
constexpr size_t MOST_BYTES   = 2u << 20;
constexpr int    MOST_TOKENS  = 16384;
constexpr int    LEAST_TOKENS = 256;
constexpr int    SEARCHES     = 2; // for each token

int tokens_for(int n_layers, int n_words) {
    const size_t bytes = (size_t) n_layers * n_words * sizeof(uint32_t);
    return (int) std::clamp<size_t>(MOST_BYTES / bytes, LEAST_TOKENS, MOST_TOKENS);
}

template <typename T, typename Test>
void erase_if(std::vector<T> & from, Test test) {
    from.erase(std::remove_if(from.begin(), from.end(), test), from.end());
}

#if defined(__x86_64__) && defined(__GNUC__)
#define WITH_POPCOUNT __attribute__((target("popcnt")))
bool has_popcount() { return __builtin_cpu_supports("popcnt"); }
#else
#define WITH_POPCOUNT
bool has_popcount() { return true; }
#endif

// The window of the present token, and the stored tokens that a search compares with it.
struct Search {
    const uint32_t * masks;    // of all tokens
    const int32_t *  previous; // of each
    const int32_t *  next;
    int              n_tokens, token_words;
    int              present; // its place
    const uint32_t * window;  // [token_words] the layers after this one of the token before, then those up to this one
    int              n_words; // of the second part
};

struct Alike {
    int n_common = -1, token = -1;
};

using MostAlike = std::array<Alike, N_MATCHES>; // the most alike first

// Bits set in both.
inline __attribute__((always_inline)) int count_common(const uint32_t * a, const uint32_t * b, int n_words) {
    int n = 0;
    for (int i = 0; i < n_words / 2; ++i) {
        uint64_t x, y;
        memcpy(&x, a + 2 * i, sizeof(x));
        memcpy(&y, b + 2 * i, sizeof(y));
        n += __builtin_popcountll(x & y);
    }
    return n_words % 2 ? n + __builtin_popcount(a[n_words - 1] & b[n_words - 1]) : n;
}

// Of equally alike tokens, the first compared stays first.
inline __attribute__((always_inline)) void compare(const Search & search, int token, MostAlike & most) {
    if (search.next[token] < 0 || search.next[token] == search.present || token == search.present) {
        return; // no token follows it
    }
    const uint32_t * masks  = search.masks + (size_t) token * search.token_words;
    const int        before = search.previous[token], rest = search.token_words - search.n_words;
    int              n;
    if (before >= 0 && before == token - 1) { // its window is contiguous
        n = count_common(masks - rest, search.window, search.token_words);
    } else {
        n = count_common(masks, search.window + rest, search.n_words);
        if (before >= 0) {
            n +=
                count_common(search.masks + (size_t) before * search.token_words + search.n_words, search.window, rest);
        }
    }
    if (n > most.back().n_common) {
        size_t place = most.size() - 1;
        for (; place > 0 && most[place - 1].n_common < n; --place) {
            most[place] = most[place - 1];
        }
        most[place] = { n, token };
    }
}

// The newest token first. Tokens take places in turn, so the oldest is behind the newest.
inline __attribute__((always_inline)) MostAlike compare_all(const Search & search, int newest) {
    MostAlike most;
    for (int token = newest; token >= 0; --token) {
        compare(search, token, most);
    }
    for (int token = search.n_tokens - 1; token > newest; --token) {
        compare(search, token, most);
    }
    return most;
}

WITH_POPCOUNT MostAlike compare_by_popcount(const Search & search, int newest) { return compare_all(search, newest); }
MostAlike               compare_by_bits(const Search & search, int newest) { return compare_all(search, newest); }

} // namespace

Moments::Moments(int n_layers, int n_expert, int n_used) :
        capacity(tokens_for(n_layers, (n_expert + 31) / 32)), n_layers(n_layers), words((n_expert + 31) / 32),
        layers_a_search((n_layers + SEARCHES - 1) / SEARCHES) {
    const auto step = (float) std::exp(-1 / (TAU * n_layers * n_used));
    for (float weight = 1; weight > 1e-6f; weight *= step) {
        likeness_weight.push_back(weight);
    }
    for (float discount = 1; (int) discounts.size() < HORIZON; discount *= (float) DISCOUNT) {
        discounts.push_back(discount);
    }
    masks.reserve((size_t) capacity * n_layers * words);
}

// The oldest token is overwritten.
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
        erase_if(passage.voters, [&](const Match & voter) { return voter.token == newest; });
    }
    return newest;
}

// The context has a new token. Each voter becomes the moment one token later.
void Moments::move_on(Passage & passage) const {
    for (Match & voter : passage.voters) {
        voter.token = next[voter.token];
    }
    erase_if(passage.voters, [&](const Match & voter) { return voter.token < 0 || voter.token == passage.token; });
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
        move_on(passage);
    }
    passage.layer = visit.layer;
    for (int expert : visit.experts) {
        mask(passage.token, visit.layer)[expert / 32] |= 1u << (expert % 32);
    }
    if (begins || visit.layer >= passage.searched + layers_a_search) {
        search(passage);
    }
}

// The moments most like the present one. The sum of their weights is 1.
std::vector<Moments::Match> Moments::most_alike(const Passage & passage) {
    const int token_words = n_layers * words, n_words = (passage.layer + 1) * words, before = previous[passage.token];
    window.assign((size_t) token_words, 0);
    if (before >= 0) {
        std::copy_n(mask(before, 0) + n_words, token_words - n_words, window.begin());
    }
    std::copy_n(mask(passage.token, 0), n_words, window.end() - n_words);

    static const auto compare = has_popcount() ? compare_by_popcount : compare_by_bits;
    const MostAlike   most    = compare(
        { masks.data(), previous.data(), next.data(), size(), token_words, passage.token, window.data(), n_words },
        newest);

    std::vector<Match> matches;
    float              sum = 0;
    for (const Alike & alike : most) {
        const auto less = (size_t) (most[0].n_common - alike.n_common);
        if (alike.token >= 0 && less < likeness_weight.size()) {
            matches.push_back({ alike.token, likeness_weight[less] });
            sum += matches.back().weight;
        }
    }
    for (Match & match : matches) {
        match.weight /= sum;
    }
    return matches;
}

void Moments::search(Passage & passage) {
    passage.searched             = passage.layer;
    std::vector<Match> & voters  = passage.voters;
    const auto           matches = most_alike(passage);
    for (Match & voter : voters) {
        voter.weight *= FADE;
    }
    for (const Match & match : matches) {
        const auto voter =
            std::find_if(voters.begin(), voters.end(), [&](const Match & v) { return v.token == match.token; });
        if (voter == voters.end()) {
            voters.push_back(match);
        } else {
            voter->weight += match.weight;
        }
    }
    if (voters.size() > N_VOTERS) { // a total order, so that every machine keeps the same ones
        std::sort(voters.begin(), voters.end(),
            [](const Match & a, const Match & b) { return std::tie(b.weight, b.token) < std::tie(a.weight, a.token); });
        voters.resize(N_VOTERS);
    }
}

bool Moments::votes(const void * context, int layer, float * sums) {
    const auto found = passages.find(context);
    if (found == passages.end() || found->second.voters.empty()) {
        return false;
    }
    const Passage & passage = found->second;

    float weights = 0;
    for (const Match & voter : passage.voters) {
        weights += voter.weight;
    }
    std::fill_n(sums, (size_t) words * 32, 0.0f);
    for (const Match & voter : passage.voters) {
        used_before.assign((size_t) words, 0);
        int token = next[voter.token];
        for (int h = 0; h < HORIZON && token >= 0 && token != passage.token; ++h, token = next[token]) {
            const float      vote = voter.weight / weights * discounts[(size_t) h];
            const uint32_t * used = mask(token, layer);
            for (int word = 0; word < words; ++word) {
                for (uint32_t bits = used[word] & ~used_before[(size_t) word]; bits != 0; bits &= bits - 1) {
                    sums[32 * word + __builtin_ctz(bits)] += vote;
                }
                used_before[(size_t) word] |= used[word];
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
