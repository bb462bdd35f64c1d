// One layer of one ubatch between its router and its experts: what the router asked for, and what is computed.

#pragma once

#include "cluster/remote_bank.h"
#include "routing/ghosts.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace pyorch {

// Arrays are row-major by token.
struct RoutedBatch {
    int  layer;  // index into the layers with experts
    int  il;     // of the same layer, in llama.cpp's count
    bool decode; // one token of each sequence
    int  n_tokens;
    int  n_expert;
    int  n_used;
    int  n_embd;

    // Whether all that follows is there, and what is computed may be changed; else there are the experts, and what
    // else was wanted when the graph was made.
    bool complete;

    // What the router asked for, and what it saw. Stays as it is.
    const int32_t * requested;         // [n_tokens][n_used] experts
    const float *   requested_weights; // [n_tokens][n_used] of their outputs
    const float *   probs;             // [n_tokens][n_expert] after gating
    const float *   logits;            // [n_tokens][n_expert]
    const float *   selection_bias;    // [n_expert] that the router adds to probs for its choice only, or null
    const float *   inputs;            // [n_tokens][n_embd]
    const float *   residuals;         // [n_tokens][n_embd] that the inputs are the normalization of, or null
    bool            normalized;        // the weights of a token have a constant sum
    bool            softmax_selected;  // probs are logits, the weights their softmax over the selected

    // What is computed: what the router asked for, until a stage puts something else in its place.
    int32_t * experts; // [n_tokens][n_used]
    float *   weights; // [n_tokens][n_used]

    // By expert: nonzero for those that were forecast for the layer, which are there or will be waited for. Empty:
    // nothing was forecast, or it was executed.
    std::vector<uint8_t> guessed;

    // Experts that were requested and that others stand in for, or that are left out, for some token at least,
    // ascending: to be read when nothing else is wanted.
    std::vector<int> deferred;

    // By token: how many of its slots the layers before, and this one when it is done, have replaced or left out in
    // this ubatch. null: nobody counts.
    int32_t * changed;

    // Slots that ghosts compute, and slots that are left out, ascending. While the graph computes, their rows name
    // hole, with which nothing is computed, or where it is -1 an expert whose output is not wanted.
    std::vector<int>                  ghosts;
    std::vector<int>                  dropped;
    std::shared_ptr<const GhostLayer> ghost_layer;
    int                               hole = -1;

    // Where it is computed. portable: other servers can. elsewhere: by expert, nonzero for those that one of them
    // computes now; empty: none.
    bool                    portable;
    std::vector<uint8_t>    elsewhere;
    std::vector<RemoteRows> remote;

    // on_device: a device takes part. By expert: the slot of the device in which it is computed now, -1: it is not
    // there; empty: none is. Those that come there before the layer is computed, and those that come while it is and
    // serve the next time.
    bool             on_device;
    bool             alone;        // and computes all: no row is the processor's
    bool             through_area; // of the device: an expert's slot there is its own number
    std::vector<int> device_slots;
    std::vector<int> uploads;
    std::vector<int> uploads_behind;
    std::vector<int> device_guests; // that are computed there, and do not stay: who comes again comes from host memory
};

} // namespace pyorch
