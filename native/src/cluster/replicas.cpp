#include "cluster/replicas.h"

#include <algorithm>
#include <numeric>

namespace pyorch {
namespace {

constexpr double FADING = 15.0 / 16; // of older answers, with each one

// Servers count as equal if their expected times differ by no more than this factor. Smaller differences come and go
// with the waiting requests, and all servers would ask the same one.
constexpr double ALIKE = 2.5;

// The seconds of an answer: a constant, and a time for each slot.
struct Line {
    double first, slot;
};

// Fits a line by least squares to all answers.
Line line_of(const pyorch_pace & p) {
    const double spread = p.answers * p.slots_squared - p.slots * p.slots;
    double       slot   = p.seconds / p.slots / 2; // if all had equally many slots: half of the time is for the slots
    if (spread > 1e-3 * p.answers * p.slots_squared) {
        slot =
            std::clamp((p.answers * p.slots_seconds - p.slots * p.seconds) / spread, 1e-3 * slot, p.seconds / p.slots);
    }
    return { (p.seconds - slot * p.slots) / p.answers, slot };
}

} // namespace

void note_answer(pyorch_pace & pace, int n_slots, double seconds) {
    pace.answers       = FADING * pace.answers + 1;
    pace.slots         = FADING * pace.slots + n_slots;
    pace.slots_squared = FADING * pace.slots_squared + (double) n_slots * n_slots;
    pace.seconds       = FADING * pace.seconds + seconds;
    pace.slots_seconds = FADING * pace.slots_seconds + n_slots * seconds;
}

std::vector<int> choose_replicas(const std::vector<std::vector<int>> & places, const std::vector<int> & slots,
    const std::vector<pyorch_pace> & paces) {
    pyorch_pace all = {};
    for (const pyorch_pace & pace : paces) {
        all.answers += pace.answers;
        all.slots += pace.slots;
        all.slots_squared += pace.slots_squared;
        all.seconds += pace.seconds;
        all.slots_seconds += pace.slots_seconds;
    }
    const Line          usual = all.answers > 0 ? line_of(all) : Line{ 1, 1 }; // also for an unknown server
    std::vector<Line>   lines;
    std::vector<double> asked;
    for (const pyorch_pace & pace : paces) {
        const double seconds  = usual.first * pace.answers + usual.slot * pace.slots;
        const bool   is_alike = seconds <= ALIKE * pace.seconds && pace.seconds <= ALIKE * seconds;
        lines.push_back(pace.answers > 0 && !is_alike ? line_of(pace) : usual);
        asked.push_back(pace.pending);
    }
    std::vector<int> order(places.size()), chosen(places.size(), -1);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return slots[a] > slots[b]; });
    for (int e : order) {
        double least = 0;
        for (int peer : places[e]) {
            const double seconds = lines[peer].first + lines[peer].slot * (asked[peer] + slots[e]);
            if (chosen[e] < 0 || seconds < least) {
                chosen[e] = peer;
                least     = seconds;
            }
        }
        if (chosen[e] >= 0) {
            asked[chosen[e]] += slots[e];
        }
    }
    return chosen;
}

} // namespace pyorch
