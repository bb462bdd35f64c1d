// One layer of one ubatch between its router and its experts: what the router asked for, and what is computed.
//
// Each layer of a graph owns one (GraphLayer), and every ubatch begins in it anew. What predictors need of it is copied
// for their thread (RoutedLayer); nothing else is.

#pragma once

#include "cluster/remote_bank.h"
#include "residency/tier.h"
#include "routing/ghosts.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace pyorch {

// What graphs bring to host memory from layers whose dense part a device computes.
//
// The choice of the router comes always: it says which experts to bring. All else is brought for those who look at it,
// or where something else may be computed than what was chosen, or by the processor; and a graph holds what was wanted
// when it was built. Where that changes, the next ubatch has another graph.
enum : unsigned {
    GRAPH_WEIGHTS   = 1, // of the experts chosen
    GRAPH_PROBS     = 2,
    GRAPH_LOGITS    = 4,
    GRAPH_INPUTS    = 8,  // of the router
    GRAPH_RESIDUALS = 16, // that they are the normalization of; where there are none, the inputs
    GRAPH_CHANGES   = 32, // other experts, or other weights, may be put in place of the chosen
    GRAPH_PROCESSOR = 64, // the processor may compute experts
    GRAPH_ALL       = 127,
    GRAPH_GHOSTS    = 128, // what ghosts compute is put in: a node more, where settings use them
    GRAPH_OTHERS    = 256, // another context may have the areas of the device, through which prompts pass
};

// Which memory the experts of a layer are computed from. The graph of the layer decides it once, when it is built.
enum class Way {
    HOST,             // the processor computes all rows
    SLOTS,            // the device computes all rows, with experts in its slots
    SLOTS_BESIDE,     // the processor computes the rows of experts that have no slot
    SLOTS_OVERLAPPED, // the same, and the device does not wait for the stages behind `offload`
    AREA,             // the device computes all rows; the slot of an expert in the area is its own number
    AREA_BESIDE,      // the processor computes the rows of experts that are not in the area
};

// Arrays are row-major by token.
struct RoutedBatch {
    int  layer    = 0;     // index into the layers with experts
    int  il       = 0;     // of the same layer, in llama.cpp's count
    bool decode   = false; // one token of each sequence
    int  n_tokens = 0;
    int  n_expert = 0;
    int  n_used   = 0;
    int  n_embd   = 0; // of the experts' input
    int  n_state  = 0; // of the router's input: the hidden state

    unsigned needs = GRAPH_ALL; // of the graph

    // Whether the graph brings all of these. It brings the experts always.
    bool has(unsigned parts) const { return (needs & parts) == parts; }
    bool has_any(unsigned parts) const { return (needs & parts) != 0; }

    // What the router asked for, and what it saw. Stays as it is.
    const int32_t * requested         = nullptr; // [n_tokens][n_used] experts
    const float *   requested_weights = nullptr; // [n_tokens][n_used] of their outputs
    const float *   probs             = nullptr; // [n_tokens][n_expert] after gating
    const float *   logits            = nullptr; // [n_tokens][n_expert]
    const float *   selection_bias   = nullptr; // [n_expert] that the router adds to probs for its choice only, or null
    const float *   inputs           = nullptr; // [n_tokens][n_embd] of the experts
    const float *   states           = nullptr; // [n_tokens][n_state] of the router; inputs may be projected from them
    const float *   residuals        = nullptr; // [n_tokens][n_state] that the states are the normalization of, or null
    bool            normalized       = false;   // the weights of a token have a constant sum
    bool            softmax_selected = false;   // probs are logits, the weights their softmax over the selected

    // What is computed: what the router asked for, until a stage puts something else in its place.
    int32_t * experts = nullptr; // [n_tokens][n_used]
    float *   weights = nullptr; // [n_tokens][n_used]

    // By expert: nonzero for those that were forecast for the layer, which are there or will be waited for. Empty:
    // nothing was forecast, or it was executed.
    std::vector<uint8_t> guessed = {};

    // Experts that were requested and that others stand in for, or that are left out, for some token at least,
    // ascending: to be read when nothing else is wanted.
    std::vector<int> deferred = {};

    // By token: how many of its slots the layers before, and this one when it is done, have replaced or left out in
    // this ubatch. null: nobody counts.
    int32_t * changed = nullptr;

    // Slots that ghosts compute, and slots that are left out, ascending. While the graph computes, their rows name
    // hole, with which nothing is computed, or where it is -1 an expert whose output is not wanted.
    std::vector<int>                  ghosts      = {};
    std::vector<int>                  dropped     = {};
    std::shared_ptr<const GhostLayer> ghost_layer = {};
    int                               hole        = -1;

    // The experts of `experts` and of `requested` that are this server's business, ascending, each once.
    std::vector<int> wanted = {};
    std::vector<int> asked  = {};

    // Where it is computed. portable: other servers can. elsewhere: by expert, nonzero for those that one of them
    // computes now, and behind the stages those that a device does; empty: none.
    bool                    portable  = false;
    std::vector<uint8_t>    elsewhere = {};
    std::vector<RemoteRows> remote    = {};

    // What the device has, in which of its slots, and what is uploaded.
    Way        way    = Way::HOST;
    DevicePass device = {};

    bool on_device() const { return way != Way::HOST; }
    bool alone() const { return way == Way::SLOTS || way == Way::AREA; }
    bool through_area() const { return way == Way::AREA || way == Way::AREA_BESIDE; }
    bool overlaps() const { return way == Way::SLOTS_OVERLAPPED; }

    // What was decided for the ubatch before: nothing of it holds for the one that begins. Memory stays.
    void clear() {
        for (std::vector<int> * list :
            { &deferred, &ghosts, &dropped, &device.slots, &device.uploads, &device.behind, &device.guests }) {
            list->clear();
        }
        guessed.clear();
        elsewhere.clear();
        remote.clear();
        ghost_layer.reset();
        changed = nullptr;
        hole    = -1;
    }
};

} // namespace pyorch
