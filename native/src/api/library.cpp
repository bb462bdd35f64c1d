#include "api/api.h"
#include "model/fatal.h"

using namespace pyorch;

static thread_local std::string last_error;

void pyorch::set_last_error(const char * sentence) {
    last_error = sentence;
}

extern "C" {

const char * pyorch_last_error(void) {
    return last_error.c_str();
}

void pyorch_show_fatal_errors(void) {
    show_fatal_errors();
}

void pyorch_refuse_fatal_errors(int32_t on) {
    guard_fatal_errors(on != 0);
}

} // extern "C"
