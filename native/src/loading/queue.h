// Requests that no reader works on yet: of demand, of what is read ahead, and of guesses.
//
// Demand is in the order in which the kernels will need it: all first matrices of the layer, then all second, then all
// third, experts ascending, as mul_mat_id goes through them. Compressed experts may have the order of ZipMoE instead
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

    // What is to be read ahead of some loads, or was guessed of them, is demanded.
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

// In which order what a layer waits for is done. What needs no reading goes first: it is decoded while the disk works.
bool goes_before(const ReadRequest & a, const ReadRequest & b);

// The requests of a load come in place of the one of it that waited for memory, the i-th of a queue.
void replace_waiting(std::deque<ReadRequest> & queue, size_t i, const std::deque<ReadRequest> & requests);

} // namespace pyorch
