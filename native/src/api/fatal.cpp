#include "base/status.h"
#include "model/fatal.h"

#include "pyorch.h"

using namespace pyorch;

extern "C" {

void pyorch_show_fatal_errors(void) { show_fatal_errors(); }

void pyorch_notice(const char * line) { notice(line); }

void pyorch_refuse_fatal_errors(int32_t on) { guard_fatal_errors(on != 0); }

} // extern "C"
