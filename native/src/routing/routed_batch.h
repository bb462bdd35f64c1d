// One layer of one ubatch between its router and its experts: what the router asked for, and what is computed.
//
// Each layer of a graph owns one (GraphLayer), and every ubatch begins in it anew. What predictors need of it is copied
// for their thread (RoutedLayer); nothing else is.

#pragma once

#include "cluster/remote_bank.h"
#include "residency/device_table.h"
#include "routing/ghosts.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace pyorch {

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

    // complete: all that follows is there; else there are the experts, and what else was wanted when the graph was made.
    // changeable: the graph takes other experts and weights than the router's. estimable: and what ghosts compute.
    bool complete   = false;
    bool changeable = false;
    bool estimable  = false;

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

    // on_device: a device takes part. What it has, in which of its slots, and what comes there.
    bool       on_device    = false;
    bool       alone        = false; // and computes all: no row is the processor's
    bool       through_area = false; // of the device: an expert's slot there is its own number
    bool       overlaps     = false; // what the device computes need not wait for the stages behind `offload`
    DevicePass device       = {};

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
