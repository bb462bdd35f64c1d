// Computes given rows with experts of a layer outside of any decode: for other servers, and for what they did not
// answer.
//
// The graph is the layer's own (routing/expert_recipe.h), with one expert for each row; the experts are held in the
// table meanwhile, as by a context. The bits are those of a decode: kernels go through the rows of an expert one by one,
// or in tiles whose numbers do not meet, and choose between the two by how many rows the expert has.

#pragma once

#include "cluster/frames.h"
#include "routing/contexts.h"

struct ggml_backend;
struct ggml_gallocr;

namespace pyorch {

class ExpertWorker {
public:
    ExpertWorker(Routing & routing, int n_threads);
    ~ExpertWorker();

    ExpertWorker(const ExpertWorker &) = delete;
    ExpertWorker & operator=(const ExpertWorker &) = delete;

    // outputs [n_slots][n_out]. One call at a time, by a thread that no graph is computed on. Throws Failure: an expert
    // could not be read, or nothing is known of the layer.
    void compute(const ExpertRows & rows, float * outputs);

private:
    Context        context;
    ggml_backend * backend;
    ggml_gallocr * memory;
};

} // namespace pyorch
