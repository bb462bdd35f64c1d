// The contexts that compute with managed models, from their first graph to their end.

#pragma once

#include "routing/device_tier.h"
#include "routing/routing.h"

#include <array>
#include <list>
#include <vector>

namespace pyorch {

struct Context;

// Where in which context a layer of a graph belongs; user data of the graph's nodes.
struct GraphLayer {
    Context * context;

    // Of the running ubatch, between the nodes of the layer; what it says of the layer and of its graph stands since
    // that was built. requested, weights: its arrays.
    RoutedBatch          batch     = {};
    std::vector<int32_t> requested = {};
    std::vector<float>   weights   = {};

    std::list<std::vector<float>> copies = {}; // of the router's selection bias, where it lies on a device
    std::vector<GhostJob>         jobs   = {}; // what ghosts compute of the batch, for threads to share

    // What a device computes of it, [n_used * n_tokens] each: the slot with the expert, and the row of the joined
    // outputs.
    bool                 unasked     = false; // the graph has no node of ours there
    bool                 may_repeat  = false; // a token may name a slot twice: kernels compute each row by itself
    std::vector<int32_t> slot_rows   = {};
    std::vector<int32_t> joined_rows = {};

    // What goes between host memory and the device only where the processor computes a row: the router's inputs,
    // and where its rows are wanted there. null: they go with the graph.
    ggml_tensor *                   device_inputs = nullptr;
    std::vector<float>              inputs        = {};
    const DeviceLandings::Landing * landing       = nullptr;
    const DeviceLandings::Landing * zero_copy     = nullptr; // where they, and the numbers above, go without a copy
    ggml_tensor *                   numbers       = nullptr; // of the graph: the latter, slots and rows

    // What lets the processor begin beside the device, see beside_device(); null: nothing is computed there.
    ggml_tensor * beside = nullptr;
};

struct Context {
    Context(const void * id, Routing & routing);

    const void * const      id; // llama.cpp's
    Routing &               routing;
    Owner                   owner;
    std::vector<int>        layers;            // that it computes, ascending
    std::vector<int32_t>    positions;         // of the tokens of its last ubatch
    bool                    continues = false; // that one had the next token of each sequence of the one before
    bool                    tries     = false; // its outputs are wanted by nobody
    std::vector<int32_t>    changed;           // see RoutedBatch, of the layers of its running ubatch
    DeviceHold              on_device;         // what its latest layer computes with there
    std::array<unsigned, 2> needs = {};        // of the graphs that are built now: of prompts, and of few tokens
    // Where the rows that the processor computes go there, those of one token too; of each device, the larger last.
    std::vector<std::pair<DeviceLandings *, const DeviceLandings::Landing *>> landings, zero_copies;
    std::vector<GraphLayer> graph; // two entries a layer: prefill, decode

    GraphLayer & at(int layer, bool decode) { return graph[2 * layer + decode]; }

    // Counts what passes layers without a node of ours, in a graph as the latest one.
    void count_unasked(int n_tokens, bool decode);

    unsigned needs_of(int n_tokens) const { return needs[n_tokens <= MAX_PREDICTED_TOKENS]; }

    // A ubatch comes: takes the areas for a prompt, if they are free. True: graphs need other things than before.
    bool look_at_needs(int n_tokens, bool decode);

    // A graph of it computes this layer.
    void computes(int layer);

    // `changed`, for a layer of so many tokens. A last layer has fewer than those before, and nobody says which: each
    // then counts for as many as the one that lost most.
    int32_t * changed_of(int n_tokens);

    // Memory of the layer's device for n floats, until the context is freed, and at once for the most that will be asked
    // for if there is room; null: it has none.
    const DeviceLandings::Landing * landing_of(int layer, int64_t n, int64_t most);

    // The same for one token without a copy, of n_used rows of n floats each; null: the device cannot.
    const DeviceLandings::Landing * zero_copy_of(int layer, int64_t n, int64_t n_used);

    // A ubatch begins, with tokens at these positions. A request that begins, a sequence that joins or leaves, or one
    // that was cut back breaks what went on.
    void advance(const int32_t * positions, int n_tokens);
};

// The context of that id, null where there is none. Stays until close().
Context * find_context(const void * id);

// The same, made where there is none.
Context & open_context(const void * id, Routing & routing);

// Nothing computes in it any more: what it held is given back. freed: and nothing will, so it goes. Nothing is done
// for contexts that were never opened.
void end_context(const void * id, bool freed);

// The engine goes. Its contexts should be gone; those that are not may still be freed, but compute nothing.
void forget_contexts(const Routing & routing);

// As of now. predicted: predictors may look. Without a device: all, for nothing has a way to go.
unsigned graph_needs(const Routing & routing, bool predicted);

} // namespace pyorch
