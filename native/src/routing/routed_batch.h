// One layer of one ubatch between its router and its experts: the router's choice, and the computed experts.
//
// Each layer of a graph owns one (GraphLayer), and every ubatch resets it. Predictors get a copy of what they need for
// their thread (RoutedLayer); all else stays here.

#pragma once

#include "cluster/remote_bank.h"
#include "residency/tier.h"
#include "routing/ghosts.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace pyorch {

// The data that graphs copy to host memory from layers whose dense part a device computes.
//
// The router's choice is always copied, because it names the experts to load. All else is copied for its readers, or if
// stages may change the choice, or if the processor may compute experts. A graph has the needs of its building; if they
// change, the next ubatch builds another graph.
enum : unsigned {
    GRAPH_WEIGHTS   = 1, // of the chosen experts
    GRAPH_PROBS     = 2,
    GRAPH_LOGITS    = 4,
    GRAPH_INPUTS    = 8,  // of the router
    GRAPH_RESIDUALS = 16, // the inputs before their normalization; without it, the inputs
    GRAPH_CHANGES   = 32, // stages may replace chosen experts, or their weights
    GRAPH_PROCESSOR = 64, // the processor may compute experts
    GRAPH_ALL       = 127,
    GRAPH_GHOSTS    = 128, // rows of ghosts are inserted: one more node, if settings use ghosts
    GRAPH_OTHERS    = 256, // another context may have the areas of the device, through which prompts pass
};

// The memory from which the experts of a layer are computed, decided once when the graph of the layer is built.
enum class Way {
    HOST,             // the processor computes all rows
    SLOTS,            // the device computes all rows, with experts in its slots
    SLOTS_BESIDE,     // the processor computes the rows of experts that have no slot
    SLOTS_OVERLAPPED, // the same, and the device does not wait for the stages after `offload`
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
    int  n_embd   = 0; // numbers of the experts' input
    int  n_state  = 0; // numbers of the router's input: the hidden state

    unsigned needs = GRAPH_ALL; // of the graph

    // Whether the graph copies all of these. It always copies the experts.
    bool has(unsigned parts) const { return (needs & parts) == parts; }
    bool has_any(unsigned parts) const { return (needs & parts) != 0; }

    // The router's choice and its data. Stages do not change them.
    const int32_t * requested         = nullptr; // [n_tokens][n_used] experts
    const float *   requested_weights = nullptr; // [n_tokens][n_used] of their outputs
    const float *   probs             = nullptr; // [n_tokens][n_expert] after gating
    const float *   logits            = nullptr; // [n_tokens][n_expert]
    const float *   selection_bias   = nullptr; // [n_expert] that the router adds to probs only for its choice, or null
    const float *   inputs           = nullptr; // [n_tokens][n_embd] of the experts
    const float *   states           = nullptr; // [n_tokens][n_state] of the router; inputs may be projected from them
    const float *   residuals        = nullptr; // [n_tokens][n_state] the states before their normalization, or null
    bool            normalized       = false;   // the weights of a token have a constant sum
    bool            softmax_selected = false;   // probs are logits, the weights their softmax over the selected

    // The computed experts: the router's choice, until a stage replaces them.
    int32_t * experts = nullptr; // [n_tokens][n_used]
    float *   weights = nullptr; // [n_tokens][n_used]

    // By expert: nonzero for experts that were forecast for the layer, and are resident or will be waited for. Empty:
    // no forecast, or it was executed.
    std::vector<uint8_t> guessed = {};

    // Requested experts that are replaced or omitted for at least one token, ascending: they are read with the lowest
    // priority.
    std::vector<int> deferred = {};

    // By token: slots of this ubatch that earlier layers, and this one when it is done, have replaced or omitted. null:
    // not counted.
    int32_t * changed = nullptr;

    // Slots of ghosts, and omitted slots, ascending. While the graph computes, their rows name `hole`, with which
    // nothing is computed, or, if it is -1, an expert whose output is not used.
    std::vector<int>                  ghosts      = {};
    std::vector<int>                  dropped     = {};
    std::shared_ptr<const GhostLayer> ghost_layer = {};
    int                               hole        = -1;

    // The experts of `experts` and of `requested` that this server handles, ascending, each once.
    std::vector<int> wanted = {};
    std::vector<int> asked  = {};

    // The place of computing. portable: other servers can compute the layer. elsewhere: by expert, nonzero if another
    // server computes it now, and after the stages also if a device does; empty: none.
    bool                    portable  = false;
    std::vector<uint8_t>    elsewhere = {};
    std::vector<RemoteRows> remote    = {};

    // The experts of the device, their slots, and the uploads.
    Way        way    = Way::HOST;
    DevicePass device = {};

    bool on_device() const { return way != Way::HOST; }
    bool alone() const { return way == Way::SLOTS || way == Way::AREA; }
    bool through_area() const { return way == Way::AREA || way == Way::AREA_BESIDE; }
    bool overlaps() const { return way == Way::SLOTS_OVERLAPPED; }

    // Resets the decisions of the last ubatch. Keeps memory.
    void clear() {
        for (std::vector<int> * list :
            { &deferred, &ghosts, &dropped, &device.slots, &device.uploads, &device.behind, &device.ordered }) {
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
