// The queue of requests that no reader works on yet: demand, loads ahead, and guesses.
//
// Demand is in the order of the kernels: first the first matrix of all experts of the layer, then the second, then the
// third; experts ascending, as in mul_mat_id. Compressed experts may have the order of ZipMoE instead
// (loading/schedule.h).

#pragma once

#include "loading/requests.h"

#include <deque>
#include <vector>

namespace pyorch {

struct RequestQueue {
    std::deque<ReadRequest> demanded;
    std::deque<ReadRequest> ahead;
    std::deque<ReadRequest> guessed; // of one load

    bool empty() const { return demanded.empty() && ahead.empty() && guessed.empty(); }

    // The requests of some loads, ahead or guessed, become demand.
    void hurry(const std::vector<Load *> & loads);

    // See Loader::take_back().
    void take_back(Load & load);

    // See Loader::find_queued().
    template <typename Condition>
    Load * find(Condition condition) const {
        for (const auto * queue : { &guessed, &ahead, &demanded }) {
            for (const ReadRequest & request : *queue) {
                if (condition(*request.load)) {
                    return request.load;
                }
            }
        }
        return nullptr;
    }

    // Of demand.
    uint64_t bytes_demanded() const {
        uint64_t bytes = 0;
        for (const ReadRequest & request : demanded) {
            bytes += request.size;
        }
        return bytes;
    }
};

// The first of the places of some matrices, or of their reads.
int place_of(const Load & load, uint32_t roles, Part part = PART_MATRICES);

// The order of what a layer waits for. A request that needs no read goes first: it is decoded while the disk works.
bool goes_before(const ReadRequest & a, const ReadRequest & b);

// Puts the requests of a load in place of its waiting one, the i-th of a queue.
void replace_waiting(std::deque<ReadRequest> & queue, size_t i, const std::deque<ReadRequest> & requests);

} // namespace pyorch
