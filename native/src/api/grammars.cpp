// Limits the cost of grammars, and wraps the functions with which Python uses one: llama.cpp throws there, and
// exceptions cannot pass through ctypes.

#include "api.h"
#include "base/cpu_time.h"
#include "model/fatal.h"

#include "llama-grammar-work.h"
#include "llama.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace pyorch {
namespace {

// Limits of one task: to convert a request's schemas, to read a grammar, to apply it to the candidates for a token, or
// to advance it by a token. Steps bound the memory, some hundred megabytes.
constexpr uint64_t MOST_STEPS = 1ull << 30;
constexpr uint64_t MOST_NS    = 2000000000; // processor time

constexpr uint64_t STEPS_BETWEEN = 1 << 20; // between two looks at the clock

thread_local uint64_t n_left = MOST_STEPS;
thread_local uint64_t n_look = MOST_STEPS; // remaining steps at the last look at the clock
thread_local uint64_t due    = 0;          // 0: the clock was not read yet

void work(uint64_t n_steps) {
    if (n_steps == 0) { // another grammar begins
        n_left = n_look = MOST_STEPS;
        due             = 0;
        return;
    }
    n_left -= std::min(n_steps, n_left);
    if (n_left > n_look - std::min(n_look, STEPS_BETWEEN)) {
        return;
    }
    n_look             = n_left;
    const uint64_t now = thread_cpu_ns();
    due                = due > 0 ? due : now + MOST_NS;
    if (n_left == 0 || now >= due) {
        throw std::invalid_argument(
            "the grammar takes too long: it, or the JSON schema of it, is too large or has too many alternatives");
    }
}

const bool is_set = [] {
    llama_grammar_work = work;
    return true;
}();

template <typename Body>
pyorch_status guarded_grammar(Body body) {
    return guarded([&] {
        const FatalGuard guard;
        try {
            body();
        } catch (const std::logic_error & e) {
            throw Failure(PYORCH_INVALID, e.what());
        } catch (const std::runtime_error & e) { // also for regular expressions of triggers
            throw Failure(PYORCH_INVALID, e.what());
        }
    });
}

} // namespace
} // namespace pyorch

using namespace pyorch;

extern "C" {

pyorch_status pyorch_init_grammar(const void * vocab, const char * grammar, const char * root, int32_t lazy,
    const char ** patterns, uint64_t n_patterns, const int32_t * tokens, uint64_t n_tokens, void ** sampler) {
    return guarded_grammar([&] {
        const auto * of = (const llama_vocab *) vocab;
        *sampler        = lazy ?
            llama_sampler_init_grammar_lazy_patterns(of, grammar, root, patterns, n_patterns, tokens, n_tokens) :
            llama_sampler_init_grammar(of, grammar, root);
        if (!*sampler) {
            throw std::invalid_argument("llama.cpp refuses it");
        }
    });
}

pyorch_status pyorch_sample(void * sampler, void * context, int32_t index, int32_t * token) {
    return guarded_grammar(
        [&] { *token = llama_sampler_sample((llama_sampler *) sampler, (llama_context *) context, index); });
}

} // extern "C"
