// Counts what a program asks CUDA's runtime for: LD_PRELOAD=libcuda_trace.so, and scripts/measure_device.py reads it.
//
//     cc -O2 -shared -fPIC -o libcuda_trace.so scripts/cuda_trace.c -ldl

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <time.h>

typedef void * P;
typedef struct {
    unsigned x, y, z;
} Dim;

// name, parameters, arguments, kind of copy, bytes
#define CALLS(X)                                                                                                       \
    X(cudaStreamSynchronize, (P s), (s), 0, 0)                                                                         \
    X(cudaEventSynchronize, (P e), (e), 0, 0)                                                                          \
    X(cudaDeviceSynchronize, (void), (), 0, 0)                                                                         \
    X(cudaMemcpy, (P to, P from, size_t n, int kind), (to, from, n, kind), kind, n)                                    \
    X(cudaMemcpyAsync, (P to, P from, size_t n, int kind, P s), (to, from, n, kind, s), kind, n)                       \
    X(cudaMemsetAsync, (P to, int value, size_t n, P s), (to, value, n, s), 0, 0)                                      \
    X(cudaLaunchKernel, (P f, Dim g, Dim b, P * a, size_t n, P s), (f, g, b, a, n, s), 0, 0)                           \
    X(cudaLaunchKernelExC, (P config, P f, P * a), (config, f, a), 0, 0)                                               \
    X(cudaGraphLaunch, (P graph, P s), (graph, s), 0, 0)                                                               \
    X(cudaGraphInstantiate, (P * exec, P graph, unsigned long long flags), (exec, graph, flags), 0, 0)                 \
    X(cudaGraphExecUpdate, (P exec, P graph, P info), (exec, graph, info), 0, 0)                                       \
    X(cudaEventRecord, (P e, P s), (e, s), 0, 0)                                                                       \
    X(cudaMalloc, (P * p, size_t n), (p, n), 0, 0)

enum {
#define X(name, parameters, arguments, kind, bytes) CALL_##name,
    CALLS(X)
#undef X
    N_CALLS
};

static const char * const call_names[] = {
#define X(name, parameters, arguments, kind, bytes) #name,
    CALLS(X)
#undef X
};

// cudaMemcpyKind
static const char * const kind_names[] = { "h2h", "h2d", "d2h", "d2d", "default" };

enum { N_KINDS = sizeof(kind_names) / sizeof(*kind_names) };

static _Atomic long long calls[N_CALLS], ns_in[N_CALLS], copies[N_KINDS], bytes_of[N_KINDS];

static long long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

// In the library itself: a backend that was loaded at run time keeps it to itself.
static P find(const char * name) {
    P library = dlopen("libcudart.so.13", RTLD_LAZY | RTLD_NOLOAD);
    library   = library ? library : dlopen("libcudart.so.12", RTLD_LAZY | RTLD_NOLOAD);
    return library ? dlsym(library, name) : dlsym(RTLD_NEXT, name);
}

#define X(name, parameters, arguments, kind, bytes)                                                                    \
    int name parameters {                                                                                              \
        static int(*real) parameters;                                                                                  \
        if (!real) {                                                                                                   \
            real = (int(*) parameters) find(#name);                                                                    \
        }                                                                                                              \
        const long long begin  = now();                                                                                \
        const int       status = real arguments;                                                                       \
        ns_in[CALL_##name] += now() - begin;                                                                           \
        ++calls[CALL_##name];                                                                                          \
        if ((bytes) > 0 && (kind) >= 0 && (kind) < N_KINDS) {                                                          \
            ++copies[kind];                                                                                            \
            bytes_of[kind] += (long long) (bytes);                                                                     \
        }                                                                                                              \
        return status;                                                                                                 \
    }
CALLS(X)
#undef X

void cuda_trace_reset(void) {
    for (int i = 0; i < N_CALLS; ++i) {
        calls[i] = ns_in[i] = 0;
    }
    for (int i = 0; i < N_KINDS; ++i) {
        copies[i] = bytes_of[i] = 0;
    }
}

// JSON: calls and nanoseconds in them by name, copies and their bytes by direction.
void cuda_trace_read(char * text, size_t size) {
    size_t at = (size_t) snprintf(text, size, "{");
    for (int i = 0; i < N_CALLS && at < size; ++i) {
        at += (size_t) snprintf(text + at, size - at, "\"%s\": [%lld, %lld], ", call_names[i], calls[i], ns_in[i]);
    }
    for (int i = 0; i < N_KINDS && at < size; ++i) {
        at += (size_t) snprintf(text + at, size - at, "\"%s\": [%lld, %lld]%s", kind_names[i], copies[i], bytes_of[i],
            i + 1 < N_KINDS ? ", " : "}");
    }
}
