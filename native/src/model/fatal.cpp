#include "model/fatal.h"

#include "base/status.h"

#include "ggml.h"

#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>

namespace pyorch {
namespace {

thread_local int n_guards = 0;

std::terminate_handler default_terminate = nullptr;

void say(const char * what) { notice(std::string("fatal error in llama.cpp: ") + what); }

// "/home/me/llama.cpp/src/llama-model.cpp:1328: GGML_ASSERT(...) failed": whose directories these are tells nothing.
const char * without_directories(const char * message) {
    const char * place_end = strstr(message, ": ");
    const char * start     = message;
    for (const char * c = message; place_end && c < place_end; ++c) {
        start = *c == '/' ? c + 1 : start;
    }
    return start;
}

// Unwinds through C code of ggml, which holds nothing that a refused model would need again.
void on_fatal(const char * message) {
    if (n_guards > 0) {
        std::string sentence = without_directories(message);
        sentence.erase(sentence.find_last_not_of(" \n") + 1);
        throw std::runtime_error(sentence);
    }
    say(without_directories(message));
}

void on_terminate() {
    try {
        if (const std::exception_ptr error = std::current_exception()) {
            std::rethrow_exception(error);
        }
        say("terminated");
    } catch (const std::exception & error) {
        say(error.what());
    } catch (...) {
        say("an exception that says nothing");
    }
    default_terminate();
}

} // namespace

void show_fatal_errors() {
    if (!default_terminate) {
        keep_stderr();
        ggml_set_abort_callback(on_fatal);
        default_terminate = std::set_terminate(on_terminate);
    }
}

void guard_fatal_errors(bool on) { n_guards += on ? 1 : -1; }

} // namespace pyorch
