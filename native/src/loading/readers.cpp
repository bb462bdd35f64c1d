#include "loading/readers.h"

#include <chrono>

namespace pyorch {

static void read_until_stopped(ResidencyTable & table) {
    using clock = std::chrono::steady_clock;
    ReadRequest request;
    while (table.next_read(request)) {
        const auto    begin = clock::now();
        const int64_t n     = table.bytes().read(request.file, request.offset, request.buf, request.size);
        const auto    end   = clock::now();
        table.finish_read(request, n, (uint64_t) std::chrono::duration_cast<std::chrono::nanoseconds>(end - begin).count());
    }
}

Readers::Readers(ResidencyTable & table, int n_threads) : table(table) {
    for (int i = 0; i < n_threads; ++i) {
        threads.emplace_back([&table] { read_until_stopped(table); });
    }
}

Readers::~Readers() {
    table.stop();
    for (auto & t : threads) {
        t.join();
    }
}

} // namespace pyorch
