#include "api/api.h"

using namespace pyorch;

static thread_local std::string last_error;

void pyorch::set_last_error(const char * sentence) {
    last_error = sentence;
}

extern "C" {

const char * pyorch_last_error(void) {
    return last_error.c_str();
}

} // extern "C"
