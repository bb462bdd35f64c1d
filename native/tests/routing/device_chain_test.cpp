// Which slots of a device the rows of a layer go through: claims about native/src/routing/device_chain.h.

#include "check.h"
#include "routing/device_chain.h"

#include <algorithm>
#include <set>

using namespace pyorch;

namespace {

constexpr int NONE   = SlotPools::NONE;
constexpr int N_USED = 3;

// Of two tokens; experts 0, 1, 2 and 5 have slots.
std::vector<int32_t>   experts      = { 1, 4, 3, 5, 4, 0 };
const std::vector<int> device_slots = { 0, 2, 7, NONE, NONE, 1 };

GraphLayer layer(std::vector<int32_t> & named, int n_tokens = 1) {
    GraphLayer g     = { nullptr };
    g.batch.n_used   = N_USED;
    g.batch.n_tokens = n_tokens;
    g.batch.experts  = named.data();
    return g;
}

void set_rows(GraphLayer & g, const std::vector<int> & slots, int n_device_slots) {
    g.batch.device.slots = slots;
    set_device_rows(g, n_device_slots);
}

void each_row_is_taken_from_the_side_that_computes_it() {
    GraphLayer g = layer(experts, 2);
    set_rows(g, device_slots, 8);
    CHECK(g.joined_rows == std::vector<int32_t>({ 0, 4, 5, 0, 4, 2 }));
    // The processor's go through slots that no other rows are in.
    CHECK(g.slot_rows == std::vector<int32_t>({ 2, 3, 4, 1, 3, 0 }));
    g.batch.ghosts = { 0 };
    set_rows(g, device_slots, 8);
    CHECK(g.joined_rows == std::vector<int32_t>({ 3, 4, 5, 0, 4, 2 }));
    set_rows(g, {}, 8);
    CHECK(g.joined_rows == std::vector<int32_t>({ 3, 4, 5, 3, 4, 5 }));
}

void no_token_names_a_slot_twice() {
    for (const auto & slots : { device_slots, std::vector<int>(), std::vector<int>({ 2, 0, NONE, NONE, NONE, 1 }) }) {
        GraphLayer g = layer(experts, 2);
        set_rows(g, slots, N_USED);
        for (int token = 0; token < 2; ++token) {
            const auto begin = g.slot_rows.begin() + token * N_USED;
            CHECK(std::set<int32_t>(begin, begin + N_USED).size() == N_USED);
            CHECK(*std::max_element(begin, begin + N_USED) < N_USED);
        }
    }
}

void an_expert_that_is_named_again_is_computed_once() {
    std::vector<int32_t> twice = { 1, 0, 1 };
    GraphLayer           g     = layer(twice);
    set_rows(g, device_slots, 8);
    CHECK(g.joined_rows == std::vector<int32_t>({ 0, 1, 0 }));
    CHECK(g.slot_rows == std::vector<int32_t>({ 2, 0, 3 }));
}

void where_kernels_take_it_all_rows_of_the_processor_go_through_one_slot() {
    std::vector<int32_t> one = { 4, 0, 3 };
    GraphLayer           g   = layer(one);
    g.may_repeat             = true;
    set_rows(g, device_slots, 8);
    CHECK(g.slot_rows == std::vector<int32_t>({ 3, 0, 3 }));
    CHECK(g.joined_rows == std::vector<int32_t>({ 3, 1, 5 }));
    set_rows(g, device_slots, 1); // there is no other
    CHECK(g.slot_rows == std::vector<int32_t>({ 0, 0, 0 }));
}

// A graph of the processor's as ggml's scheduler cuts it: what is beside the device, and what comes behind.
void a_graph_in_which_the_device_computes_all_has_one_thread() {
    ggml_context * const ctx     = ggml_init({ 1 << 20, nullptr, true });
    ggml_tensor * const  weights = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 4, 4);
    ggml_tensor *        args[]  = { weights };
    std::vector<int32_t> named   = { 0, 1, 2 };
    GraphLayer           g       = layer(named);
    g.batch.way                  = Way::SLOTS_BESIDE;
    ggml_tensor * const inputs =
        ggml_custom_4d(ctx, GGML_TYPE_F32, 4, 1, 1, 1, args, 1, inputs_op, GGML_N_TASKS_MAX, &g);
    ggml_cgraph * const graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, ggml_sqr(ctx, inputs));
    const auto n_threads = [&](const std::vector<int> & slots) {
        set_rows(g, slots, 8);
        return threads_of(graph, 16);
    };
    const std::vector<int> all = { 0, 2, 7, NONE, NONE, 1 }, less = { 0, NONE, 7, NONE, NONE, 1 };
    CHECK(n_threads(all) == 1 && n_threads(less) == 16);
    g.jobs.emplace_back(); // what ghosts compute is the processor's
    CHECK(n_threads(all) == 16);
    g.jobs.clear();
    g.batch.way = Way::HOST;
    CHECK(n_threads(all) == 16);
    g.batch.way = Way::SLOTS_BESIDE;
    // A dense layer beside it, which the processor has, too.
    ggml_build_forward_expand(graph, ggml_mul_mat(ctx, weights, inputs));
    CHECK(n_threads(all) == 16);
    ggml_free(ctx);
}

} // namespace

int main() {
    for (auto * claim : { each_row_is_taken_from_the_side_that_computes_it, no_token_names_a_slot_twice,
             an_expert_that_is_named_again_is_computed_once,
             where_kernels_take_it_all_rows_of_the_processor_go_through_one_slot,
             a_graph_in_which_the_device_computes_all_has_one_thread }) {
        claim();
    }
    return 0;
}
