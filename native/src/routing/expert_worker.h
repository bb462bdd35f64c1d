// Computes given rows with experts of a layer outside of any decode: for other servers, and for rows that another
// server did not answer.
//
// The graph is the layer's own (ExpertRecipe, routing/expert_graph.h), with one expert for each row. The table holds
// the experts meanwhile, as for a context. The bits are those of a decode: kernels process the rows of an expert one by
// one, or in tiles whose rows are independent, and choose between the two by the expert's number of rows.

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

    // The most slots of a graph, unless one expert has more rows. This limits its memory, which no budget counts, and
    // the experts that it holds at once.
    static constexpr int SLOTS_AT_ONCE = 512;

    // Computes outputs [n_slots][n_out]. One call at a time, by a thread on which no graph is computed. Throws Failure
    // if an expert could not be read, or the layer is unknown.
    void compute(const ExpertRows & rows, float * outputs);

    // Returns the bytes of the memory in which it computes. Any thread may call it.
    uint64_t buffer_bytes() const { return n_bytes; }

private:
    void compute_at_once(const ExpertRows & rows, float * outputs);

    Context               context;
    ggml_backend_ptr      backend;
    ggml_gallocr_ptr      memory;
    std::atomic<uint64_t> n_bytes{ 0 };
};

} // namespace pyorch
