#include "api/api.h"
#include "api/choices.h"
#include "api/structs.h"

using namespace pyorch;

static thread_local std::string last_error;

void pyorch::set_last_error(const char * sentence) { last_error = sentence; }

extern "C" {

const char * pyorch_last_error(void) { return last_error.c_str(); }

int32_t pyorch_abi(void) { return PYORCH_ABI; }

const char * pyorch_version(void) { return PYORCH_VERSION; }

int32_t pyorch_version_number(void) { return PYORCH_VERSION_NUMBER; }

pyorch_status pyorch_get_choice(int32_t which, int32_t index, pyorch_choice * choice) {
    return guarded([&] {
        const auto & list = choices(which);
        if (index < 0 || (size_t) index >= list.size()) {
            throw Failure(PYORCH_INVALID, format("there are %zu choices of this kind, not %d", list.size(), index + 1));
        }
        write_struct(choice, "pyorch_choice", list[index]);
    });
}

} // extern "C"
