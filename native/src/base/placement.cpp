#include "base/placement.h"

#include "base/mutex.h"
#include "base/status.h"

#ifdef __linux__
#include <sched.h>
#endif

namespace pyorch {

std::atomic<unsigned> placement::version{ 0 };
thread_local unsigned placement::seen = 0;

#ifdef __linux__

static Mutex     mutex;
static cpu_set_t allowed GUARDED_BY(mutex);   // at first
static cpu_set_t computing GUARDED_BY(mutex); // empty: none was named

void set_compute_cpus(const std::vector<int> & cpus) {
    MutexLock lock(mutex);
    if (placement::version == 0 && cpus.empty()) {
        return;
    }
    if (placement::version == 0 && sched_getaffinity(0, sizeof(allowed), &allowed) != 0) {
        throw Failure(PYORCH_IO, "the system does not say which processors this process may use");
    }
    cpu_set_t named;
    CPU_ZERO(&named);
    for (const int cpu : cpus) {
        if (cpu < 0 || cpu >= CPU_SETSIZE || !CPU_ISSET(cpu, &allowed)) {
            throw Failure(PYORCH_INVALID, format("processor %d is none of those that this process may use", cpu));
        }
        CPU_SET(cpu, &named);
    }
    if (!CPU_EQUAL(&named, &computing)) {
        computing = named;
        ++placement::version;
    }
}

void placement::place(bool computes) {
    MutexLock lock(mutex);
    cpu_set_t others;
    CPU_XOR(&others, &allowed, &computing);
    const cpu_set_t & set = CPU_COUNT(&computing) == 0 || CPU_COUNT(&others) == 0 ? allowed :
        computes                                                                  ? computing :
                                                                                    others;
    sched_setaffinity(0, sizeof(set), &set); // a thread that may not moves nowhere, and works as well
    seen = version;
}

#else

void set_compute_cpus(const std::vector<int> & cpus) {
    if (!cpus.empty()) {
        throw Failure(PYORCH_INVALID, "threads cannot be kept on processors on this system");
    }
}

void placement::place(bool) {}

#endif

} // namespace pyorch
