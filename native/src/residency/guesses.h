// Guesses: the experts of forecasts that the planner wants read ahead, best first. A guess has no memory yet, and may
// never get any.

#pragma once

#include <cstddef>
#include <vector>

namespace pyorch {

// The share of recent outcomes that came true; older ones fade.
class Rate {
public:
    // before: the share as long as nothing is known; it weighs two outcomes.
    explicit Rate(double before = 0) : hits(2 * before), total(2) {}

    double value() const { return hits / total; }

    void add(bool hit) {
        hits += hit - hits / MEMORY;
        total += 1 - total / MEMORY;
    }

private:
    static constexpr double MEMORY = 200;

    double hits, total;
};

struct Guess {
    int    expert;
    double probability; // share of such guesses that came true lately
};

// An expert of a forecast.
struct ForecastExpert {
    int expert;
    int rank;     // 0: the likeliest
    int distance; // layers ahead
};

class Guesses {
public:
    // The guesses for the next pass of a context through a layer; they replace the earlier ones.
    void replace(const void * context, int layer, std::vector<Guess> guesses);

    // That pass begins.
    void settle(const void * context, int layer);

    // The context is gone.
    void forget(const void * context);

    bool empty() const { return lists.empty(); }

    struct Best {
        const void * context;
        int          layer;
        Guess        guess;
    };

    // Takes the guess with the highest probability over distance(context, layer). REQUIRES: !empty()
    template <typename Distance>
    Best take_best(Distance distance) {
        size_t best     = 0;
        double priority = -1;
        for (size_t i = 0; i < lists.size(); ++i) {
            const double p = lists[i].guesses.back().probability / distance(lists[i].context, lists[i].layer);
            if (p > priority) {
                priority = p;
                best     = i;
            }
        }
        List &     list  = lists[best];
        const Best taken = { list.context, list.layer, list.guesses.back() };
        list.guesses.pop_back();
        if (list.guesses.empty()) {
            lists.erase(lists.begin() + best);
        }
        return taken;
    }

private:
    struct List {
        const void *       context;
        int                layer;
        std::vector<Guess> guesses; // by rising probability, never empty
    };

    std::vector<List> lists; // at most one for each predicted layer
};

} // namespace pyorch
