#include "loading/uring_reader.h"

#include "base/cpu_time.h"
#include "base/placement.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <unistd.h>

#ifdef __linux__
#include <sys/eventfd.h>
#endif

namespace pyorch {

static constexpr uint64_t BELL = UINT64_MAX;

// The kernel's table has no more entries.
static constexpr unsigned MAX_BUFFERS = 1 << 14;

static int make_bell() {
#ifdef __linux__
    return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
#else
    return -1;
#endif
}

std::unique_ptr<UringReader> UringReader::create(Loader & loader, int depth) {
    std::vector<int> files;
    for (int disk = 0; disk < loader.bytes().n_disks(); ++disk) {
        for (int file = 0; file < loader.n_files(); ++file) {
            files.push_back(loader.bytes().descriptor(file, false, disk));
            if (disk == 0 && files.back() < 0) {
                return nullptr;
            }
            files.push_back(loader.bytes().direct(file) ? loader.bytes().descriptor(file, true, disk) : -1);
        }
    }
    std::unique_ptr<Ring> ring = Ring::open((unsigned) depth);
    const int             bell = ring ? make_bell() : -1;
    if (bell < 0) {
        return nullptr;
    }
    ring->queue_poll(bell, BELL);
    if (!ring->submit()) { // forbidden, though opening the ring was not
        close(bell);
        return nullptr;
    }
    const bool                   registered = ring->register_files(files);
    std::unique_ptr<UringReader> reader(new UringReader(loader, depth, std::move(ring), bell));
    reader->registered_files = registered;
    reader->registers        = reader->ring->reserve_buffers(MAX_BUFFERS);
    if (reader->registers) {
        loader.watch_memory();
        for (unsigned i = MAX_BUFFERS; i > 0; --i) {
            reader->unused.push_back(i - 1);
        }
    }
    if (loader.computes()) {
        reader->decoders = std::make_unique<DecodeThreads>(loader, default_threads());
    }
    reader->thread = std::thread([r = reader.get()] { r->run(); });
    return reader;
}

UringReader::UringReader(Loader & loader, int depth, std::unique_ptr<Ring> ring, int bell) :
        Reader(loader), ring(std::move(ring)), bell(bell), under_way(depth) {
    for (int i = 0; i < depth; ++i) {
        idle.push_back(i);
    }
}

UringReader::~UringReader() {
    ending = true;
    loader.stop();
    if (thread.joinable()) {
        thread.join();
    }
    decoders.reset();
    attach(nullptr); // wake() is not called any more
    close(bell);
}

void UringReader::wake() {
    if (asleep.exchange(false)) {
        const uint64_t one = 1;
        const ssize_t  n   = write(bell, &one, sizeof(one));
        (void) n; // it fails only if the bell rings already
    }
}

void UringReader::run() {
    for (;;) {
        place_thread(false);
        if (!idle.empty() && !ending && start_one()) {
            continue;
        }
        if (!idle.empty()) {
            // Orders from here on ring; earlier ones are seen now.
            asleep = true;
            if (!ending && start_one()) {
                asleep = false;
                continue;
            }
        }
        if (ending && idle.size() == under_way.size()) {
            return;
        }
        ring->submit_and_wait();
        asleep = false;
        for (Ring::Result result; ring->take(result);) {
            if (result.tag != BELL) {
                ended(under_way[result.tag], result.value);
            } else {
                listen();
            }
        }
    }
}

void UringReader::listen() {
    uint64_t      n_rung;
    const ssize_t n = read(bell, &n_rung, sizeof(n_rung));
    (void) n;
    ring->queue_poll(bell, BELL);
}

// Starts the next request. False if the queue is empty.
bool UringReader::start_one() {
    ReadRequest request;
    const bool  any = loader.try_next(request);
    loader.take_given_up(given_up);
    for (char * slot : given_up) {
        const auto place = buffers.find(slot);
        if (place != buffers.end()) {
            ring->set_buffer(place->second.number, nullptr, 0);
            unused.push_back(place->second.number);
            buffers.erase(place);
        }
    }
    if (!any) {
        return false;
    }
    if (!request.reads()) {
        if (loader.read(request, 0, 0)) {
            hand_over(request);
        }
        return true;
    }
    if (idle.size() == under_way.size()) {
        last_ns  = clock_ns();
        last_cpu = thread_cpu_ns();
    }
    UnderWay & u = under_way[idle.back()];
    idle.pop_back();
    // The first touch of a page of fresh memory takes time: threads of the kernel spend it, in parallel.
    u = { request, 0, buffer_of(request), loader.slot_of(request).fresh };
    choose_disk(u);
    return true;
}

int UringReader::buffer_of(const ReadRequest & request) {
    const auto [slot, bytes, fresh] = loader.slot_of(request);
    if (!registers || !request.direct || fresh) {
        return -1;
    }
    auto place = buffers.find(slot);
    if (place == buffers.end()) {
        if (unused.empty()) {
            return -1;
        }
        place = buffers.emplace(slot, Buffer{ unused.back(), 0 }).first;
        unused.pop_back();
    }
    Buffer & buffer = place->second;
    if (buffer.bytes < bytes) { // the slots of a disk probe hold experts of all layers: the last one was smaller
        if (!ring->set_buffer(buffer.number, slot, bytes)) {
            registers = false; // no further ones: the limit on locked memory is reached
            return -1;
        }
        buffer.bytes = bytes;
    }
    return (int) buffer.number;
}

void UringReader::choose_disk(UnderWay & u) {
    u.done = 0;
    u.disk = loader.bytes().begin(u.request.file, u.request.size);
    if (const int error = loader.bytes().check(u.request.file, u.disk)) {
        end(u, error);
    } else {
        start(u);
    }
}

void UringReader::start(UnderWay & u) {
    const ReadRequest & r    = u.request;
    const int           file = registered_files ? 2 * (u.disk * loader.n_files() + r.file) + r.direct :
                                                  loader.bytes().descriptor(r.file, r.direct, u.disk);
    ring->queue({ file, r.offset + u.done, r.buf + u.done, (uint32_t) (r.size - u.done), u.buffer, u.may_block },
        (uint64_t) (&u - under_way.data()));
}

void UringReader::ended(UnderWay & u, int32_t value) {
    if (value == -EINTR || (value == -EAGAIN && !u.may_block)) {
        u.may_block = true;
        start(u);
        return;
    }
    if (value < 0) {
        end(u, value);
        return;
    }
    u.done += (uint64_t) value;
    // A direct read that stops inside a page has met the end of the file.
    const int  file   = u.request.file;
    const auto direct = [&] {
        return u.request.direct &&
            loader.bytes().descriptor(file, true, u.disk) != loader.bytes().descriptor(file, false, u.disk);
    };
    if (value > 0 && u.done < u.request.size && (u.done % PAGE == 0 || !direct())) {
        start(u);
        return;
    }
    end(u, (int64_t) u.done);
}

void UringReader::end(UnderWay & u, int64_t result) {
    ReadRequest request = u.request;
    if (loader.bytes().end(request.file, u.disk, request.size, request.needed, result)) {
        choose_disk(u);
        return;
    }
    const uint64_t now    = clock_ns();
    const uint64_t cpu    = thread_cpu_ns();
    const uint64_t ns     = now - last_ns;
    const uint64_t cpu_ns = cpu - last_cpu;
    last_ns               = now;
    last_cpu              = cpu;
    idle.push_back((int) (&u - under_way.data()));
    if (loader.read(request, result, ns, cpu_ns)) {
        hand_over(request);
    }
}

void UringReader::hand_over(const ReadRequest & request) {
    if (decoders && loader.computes()) {
        loader.decode_later(request);
    } else {
        loader.decode(request);
    }
}

} // namespace pyorch
