// Computes given rows with experts of a layer outside of any decode: for other servers, and for what they did not
// answer.
//
// The graph is the layer's own (ExpertRecipe, routing/expert_graph.h), with one expert for each row; the experts are
// held in the table meanwhile, as by a context. The bits are those of a decode: kernels go through the rows of an
// expert one by one, or in tiles whose numbers do not meet, and choose between the two by how many rows the expert has.

#pragma once

#include "cluster/frames.h"
#include "routing/contexts.h"

#include "ggml-cpp.h"

#include <atomic>

namespace pyorch {

class ExpertWorker {
public:
    ExpertWorker(Routing & routing, int n_threads);
    ~ExpertWorker();

    ExpertWorker(const ExpertWorker &)             = delete;
    ExpertWorker & operator=(const ExpertWorker &) = delete;

    // Of a graph, unless one expert has more rows: so its memory, which no budget counts, stays small, and so does what
    // it holds at once.
    static constexpr int SLOTS_AT_ONCE = 512;

    // outputs [n_slots][n_out]. One call at a time, by a thread that no graph is computed on. Throws Failure: an expert
    // could not be read, or nothing is known of the layer.
    void compute(const ExpertRows & rows, float * outputs);

    // Of the memory in which it computes. Called by any thread.
    uint64_t buffer_bytes() const { return n_bytes; }

private:
    void compute_at_once(const ExpertRows & rows, float * outputs);

    Context               context;
    ggml_backend_ptr      backend;
    ggml_gallocr_ptr      memory;
    std::atomic<uint64_t> n_bytes{ 0 };
};

} // namespace pyorch
