#include "residency/guesses.h"

#include <algorithm>

namespace pyorch {

void Guesses::replace(const void * context, int layer, std::vector<Guess> guesses) {
    settle(context, layer);
    if (guesses.empty()) {
        return;
    }
    // Of equal ones, the first is the best.
    std::reverse(guesses.begin(), guesses.end());
    std::stable_sort(
        guesses.begin(), guesses.end(), [](const Guess & a, const Guess & b) { return a.probability < b.probability; });
    lists.push_back({ context, layer, std::move(guesses) });
}

void Guesses::settle(const void * context, int layer) {
    lists.erase(std::remove_if(lists.begin(), lists.end(),
                    [&](const List & list) { return list.context == context && list.layer == layer; }),
        lists.end());
}

void Guesses::forget(const void * context) {
    lists.erase(std::remove_if(lists.begin(), lists.end(), [&](const List & list) { return list.context == context; }),
        lists.end());
}

} // namespace pyorch
