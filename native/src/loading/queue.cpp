#include "loading/queue.h"

#include <algorithm>
#include <climits>

namespace pyorch {

int place_of(const Load & load, uint32_t roles, Part part) {
    const int * places = part == PART_SM ? load.sm_place : load.place;
    int         place  = INT_MAX;
    for (int role = 0; role < PYORCH_MAX_ROLES; ++role) {
        place = roles >> role & 1 ? std::min(place, places[role]) : place;
    }
    return place;
}

static int place_of(const ReadRequest & request) {
    return place_of(*request.load, request.waits ? request.load->roles : request.touches, request.part);
}

bool goes_before(const ReadRequest & a, const ReadRequest & b) {
    const bool a_reads = a.reads() || a.waits, b_reads = b.reads() || b.waits;
    const int  a_place = place_of(a), b_place = place_of(b);
    return a_reads != b_reads ? b_reads : a_place != b_place ? a_place < b_place : a.load->expert < b.load->expert;
}

void RequestQueue::hurry(const std::vector<Load *> & loads) {
    for (auto * queue : { &ahead, &guessed }) {
        auto hurried = std::stable_partition(queue->begin(), queue->end(),
            [&](const ReadRequest & r) { return std::find(loads.begin(), loads.end(), r.load) == loads.end(); });
        demanded.insert(demanded.end(), hurried, queue->end());
        queue->erase(hurried, queue->end());
    }
}

void RequestQueue::take_back(Load & load) {
    for (auto * queue : { &guessed, &ahead, &demanded }) {
        if (load.queued == 0) {
            return;
        }
        auto mine =
            std::stable_partition(queue->begin(), queue->end(), [&](const ReadRequest & r) { return r.load != &load; });
        load.queued -= (int) (queue->end() - mine);
        queue->erase(mine, queue->end());
    }
}

void replace_waiting(std::deque<ReadRequest> & queue, size_t i, const std::deque<ReadRequest> & requests) {
    const Load & load = *queue[i].load;
    --queue[i].load->queued;
    queue.erase(queue.begin() + i);
    auto at = queue.begin() + i;
    for (const ReadRequest & each : requests) {
        const auto goes_behind = [&](const ReadRequest & other) {
            return other.load->layer == load.layer && !goes_before(each, other);
        };
        // In a schedule each request has its own place; otherwise all take the load's place.
        at = load.scheduled ? std::find_if_not(queue.begin() + i, queue.end(), goes_behind) : at;
        at = queue.insert(at, each) + 1;
    }
}

} // namespace pyorch
