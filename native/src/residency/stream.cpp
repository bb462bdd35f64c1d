#include "residency/stream.h"

#include <algorithm>

namespace pyorch {

Stream::Frame & Stream::frame_of(const Load & load) {
    return *std::find_if(frames.begin(), frames.end(), [&](const Frame & frame) { return &frame.load == &load; });
}

bool Stream::ask(int role, int place, const void * thread, int n_threads) {
    bool as_thought = true;
    if (pass < 0 || roles[pass] != role) {
        ++pass;
        if (pass == (int) roles.size() || roles[pass] != role) {
            const auto later = std::find(roles.begin() + pass, roles.end(), role);
            if (later != roles.end()) {
                std::rotate(roles.begin() + pass, later, later + 1);
            } else {
                roles.insert(roles.begin() + pass, role);
            }
            as_thought = false;
        }
        reached.clear();
        passed = number(0);
    }
    auto mine = std::find_if(reached.begin(), reached.end(), [&](const auto & each) { return each.first == thread; });
    if (mine == reached.end()) {
        mine = reached.insert(mine, { thread, place });
    }
    mine->second = std::max(mine->second, place);
    if ((int) reached.size() == n_threads) { // else some have not begun
        int last = place;
        for (const auto & each : reached) {
            last = std::min(last, each.second);
        }
        passed = std::max(passed, number(last));
    }
    return as_thought;
}

} // namespace pyorch
