// The contexts that compute with managed models, from their first graph to their end.

#pragma once

#include "routing/device_tier.h"
#include "routing/routing.h"

#include <array>
#include <list>
#include <vector>

namespace pyorch {

struct Context;

// The place of a layer's graph in a context; user data of the graph's nodes.
struct GraphLayer {
    Context * context;

    // Of the running ubatch, between the nodes of the layer. Facts of the layer and its graph are set when the graph is
    // built. requested and weights are its arrays.
    RoutedBatch          batch     = {};
    std::vector<int32_t> requested = {};
    std::vector<float>   weights   = {};

    std::list<std::vector<float>> copies = {}; // of the router's selection bias, if it is on a device
    std::vector<GhostJob>         jobs   = {}; // ghosts of the batch, which threads share

    // The device's part of the batch, [n_used * n_tokens] each: the slot with the expert, and the row of the joined
    // outputs.
    bool                 unasked     = false; // the graph has no node of ours in this layer
    bool                 may_repeat  = false; // a token may have a slot twice: kernels compute each row by itself
    std::vector<int32_t> slot_rows   = {};
    std::vector<int32_t> joined_rows = {};

    // Data between host memory and the device, needed only if the processor computes a row: the router's inputs, and
    // the place for its rows. null: the graph copies them.
    ggml_tensor *                   device_inputs = nullptr;
    std::vector<float>              inputs        = {};
    const DeviceLandings::Landing * landing       = nullptr;
    const DeviceLandings::Landing * zero_copy = nullptr; // memory for these, and for the numbers above, without a copy
    ggml_tensor *                   numbers   = nullptr; // of the graph: slots and rows

    // Lets the processor begin while the device computes, see beside_device(); null: the device computes nothing.
    ggml_tensor * beside = nullptr;
};

struct Context {
    Context(const void * id, Routing & routing);

    const void * const      id; // llama.cpp's
    Routing &               routing;
    Owner                   owner;
    std::vector<int>        layers;            // that it computes, ascending
    std::vector<int32_t>    positions;         // of the tokens of its last ubatch
    bool                    continues = false; // the last ubatch had the next token of each sequence of the one before
    bool                    tries     = false; // a trial: its outputs are not used
    std::vector<int32_t>    changed;           // see RoutedBatch, for the layers of its running ubatch
    DeviceHold              on_device;         // experts of its latest layer on devices
    std::array<unsigned, 2> needs = {};        // of the graphs that are built now: for prompts, and for few tokens
    // Device memory for rows that the processor computes, also for one token; for each device, the larger one last.
    std::vector<std::pair<DeviceLandings *, const DeviceLandings::Landing *>> landings, zero_copies;
    std::vector<GraphLayer> graph; // two entries a layer: prefill, decode

    GraphLayer & at(int layer, bool decode) { return graph[2 * layer + decode]; }

    // Counts layers without a node of ours, in a graph like the latest one.
    void count_unasked(int n_tokens, bool decode);

    unsigned needs_of(int n_tokens) const { return needs[n_tokens <= MAX_PREDICTED_TOKENS]; }

    // Begins a ubatch: takes the areas for a prompt, if they are free. Returns true if graphs need other data than
    // before.
    bool look_at_needs(int n_tokens, bool decode);

    // A graph of the context computes this layer.
    void computes(int layer);

    // Returns `changed` for a layer with so many tokens. A last layer has fewer tokens than those before, and llama.cpp
    // does not say which: then each counts for as many as the token that changed most.
    int32_t * changed_of(int n_tokens);

    // Returns memory of the layer's device for n floats, until the context is freed. Allocates the most that will be
    // needed if there is room. null: the device has no memory.
    const DeviceLandings::Landing * landing_of(int layer, int64_t n, int64_t most);

    // Returns memory for one token without a copy, for n_used rows of n floats each; null: the device cannot do this.
    const DeviceLandings::Landing * zero_copy_of(int layer, int64_t n, int64_t n_used);

    // Begins a ubatch with tokens at these positions. `continues` becomes false if a request begins, or a sequence
    // joins, leaves or is cut back.
    void advance(const int32_t * positions, int n_tokens);
};

// Returns the context of an id, or null. It exists until close().
Context * find_context(const void * id);

// Returns the context of an id, and makes it if necessary.
Context & open_context(const void * id, Routing & routing);

// Releases everything that a context holds, because nothing computes in it. freed: nothing ever will, so the context is
// removed. Does nothing for contexts that were never opened.
void end_context(const void * id, bool freed);

// Ends an engine. Its contexts should be gone; remaining ones may still be freed, but must not compute.
void forget_contexts(const Routing & routing);

// Returns the present needs of graphs. predicted: predictors may read them. Without a device: all, which costs nothing.
unsigned graph_needs(const Routing & routing, bool predicted);

} // namespace pyorch
