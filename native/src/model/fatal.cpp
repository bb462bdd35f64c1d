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

// "/home/me/llama.cpp/src/llama-model.cpp:1328: GGML_ASSERT(...) failed": the directories of the build say nothing.
const char * without_directories(const char * message) {
    const char * place_end = strstr(message, ": ");
    const char * start     = message;
    for (const char * c = message; place_end && c < place_end; ++c) {
        start = *c == '/' ? c + 1 : start;
    }
    return start;
}

// "llama-model.cpp:1370: GGML_ASSERT(a <= b) failed" becomes a sentence: the model is refused. A text in the condition
// replaces it.
std::string as_condition(std::string message) {
    static constexpr char BEGIN[] = ": GGML_ASSERT(", END[] = ") failed";
    message.erase(message.find_last_not_of(" \n") + 1);
    const size_t begin = message.find(BEGIN), end = message.rfind(END);
    if (begin == std::string::npos || end == std::string::npos) {
        return message;
    }
    const size_t first     = begin + strlen(BEGIN);
    std::string  condition = message.substr(first, end - first);
    const size_t text      = condition.find("&& \"");
    if (text != std::string::npos && condition.back() == '"') {
        condition = condition.substr(text + 4, condition.size() - text - 5);
    }
    return "a condition of llama.cpp does not hold: " + condition + " (" + message.substr(0, begin) + ")";
}

// Unwinds through C code of ggml, which holds nothing that is needed after a model is refused.
void on_fatal(const char * message) {
    if (n_guards > 0) {
        throw std::runtime_error(as_condition(without_directories(message)));
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
