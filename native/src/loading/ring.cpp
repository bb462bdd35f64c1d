#include "loading/ring.h"

#include <cerrno>

#if defined(__linux__) && defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif
#endif

// Names of kernel 5.6, the first that reads into plain memory, and of 5.19, which registers single buffers.
#ifdef IORING_FEAT_RW_CUR_POS

#include <cstring>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
#include <utility>

namespace pyorch {

static void * shared(int fd, size_t bytes, uint64_t what) {
    void * p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, (off_t) what);
    return p == MAP_FAILED ? nullptr : p;
}

std::unique_ptr<Ring> Ring::open(unsigned depth) {
    std::unique_ptr<Ring> ring(new Ring);
    io_uring_params       params = {};
    params.flags                 = IORING_SETUP_CLAMP;
#ifdef IORING_SETUP_COOP_TASKRUN
    params.flags |= IORING_SETUP_COOP_TASKRUN; // the thread sleeps while it waits: no interrupt is needed
#endif
    // One more entry, for the poll.
    ring->fd = (int) syscall(__NR_io_uring_setup, depth + 1, &params);
    if (ring->fd < 0 && errno == EINVAL) {
        params       = {};
        params.flags = IORING_SETUP_CLAMP;
        ring->fd     = (int) syscall(__NR_io_uring_setup, depth + 1, &params);
    }
    if (ring->fd < 0) {
        return nullptr;
    }
    if (!(params.features & IORING_FEAT_RW_CUR_POS) || params.sq_entries < depth + 1) {
        errno = ENOSYS;
        return nullptr;
    }
    ring->submissions_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    ring->completions_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    ring->entries_bytes     = params.sq_entries * sizeof(io_uring_sqe);
    ring->submissions       = shared(ring->fd, ring->submissions_bytes, IORING_OFF_SQ_RING);
    ring->completions       = shared(ring->fd, ring->completions_bytes, IORING_OFF_CQ_RING);
    ring->entries           = shared(ring->fd, ring->entries_bytes, IORING_OFF_SQES);
    if (!ring->submissions || !ring->completions || !ring->entries) {
        return nullptr;
    }
    char * const sq = (char *) ring->submissions;
    char * const cq = (char *) ring->completions;
    ring->tail      = (unsigned *) (sq + params.sq_off.tail);
    ring->queued = ring->given = *ring->tail;
    ring->order                = (unsigned *) (sq + params.sq_off.array);
    ring->mask                 = *(unsigned *) (sq + params.sq_off.ring_mask);
    ring->results_head         = (unsigned *) (cq + params.cq_off.head);
    ring->results_tail         = (unsigned *) (cq + params.cq_off.tail);
    ring->results              = cq + params.cq_off.cqes;
    ring->results_mask         = *(unsigned *) (cq + params.cq_off.ring_mask);
    return ring;
}

Ring::~Ring() {
    for (auto [memory, bytes] : { std::pair(submissions, submissions_bytes), std::pair(completions, completions_bytes),
             std::pair(entries, entries_bytes) }) {
        if (memory) {
            munmap(memory, bytes);
        }
    }
    if (fd >= 0) {
        // close() alone frees the memory and the files a little later, when others may need them.
        syscall(__NR_io_uring_register, fd, IORING_UNREGISTER_BUFFERS, nullptr, 0);
        syscall(__NR_io_uring_register, fd, IORING_UNREGISTER_FILES, nullptr, 0);
        close(fd);
    }
}

bool Ring::register_files(const std::vector<int> & files) {
    has_files = syscall(__NR_io_uring_register, fd, IORING_REGISTER_FILES, files.data(), files.size()) == 0;
    return has_files;
}

bool Ring::reserve_buffers(unsigned n) {
#ifdef IORING_RSRC_REGISTER_SPARSE
    io_uring_rsrc_register table = {};
    table.nr                     = n;
    table.flags                  = IORING_RSRC_REGISTER_SPARSE;
    return syscall(__NR_io_uring_register, fd, IORING_REGISTER_BUFFERS2, &table, sizeof(table)) == 0;
#else
    (void) n;
    return false;
#endif
}

bool Ring::set_buffer(unsigned number, void * memory, size_t bytes) {
#ifdef IORING_RSRC_REGISTER_SPARSE
    iovec                 range  = { memory, bytes };
    uint64_t              tag    = 0;
    io_uring_rsrc_update2 update = {};
    update.offset                = number;
    update.data                  = (uint64_t) (uintptr_t) &range;
    update.tags                  = (uint64_t) (uintptr_t) &tag;
    update.nr                    = 1;
    return syscall(__NR_io_uring_register, fd, IORING_REGISTER_BUFFERS_UPDATE, &update, sizeof(update)) == 1;
#else
    (void) number, (void) memory, (void) bytes;
    return false;
#endif
}

void * Ring::next_entry() {
    const unsigned index = queued++ & mask;
    order[index]         = index;
    void * entry         = (io_uring_sqe *) entries + index;
    memset(entry, 0, sizeof(io_uring_sqe));
    return entry;
}

void Ring::queue(const Read & read, uint64_t tag) {
    io_uring_sqe & entry = *(io_uring_sqe *) next_entry();
    entry.opcode         = read.buffer >= 0 ? IORING_OP_READ_FIXED : IORING_OP_READ;
    entry.flags          = (uint8_t) ((has_files ? IOSQE_FIXED_FILE : 0) | (read.may_block ? IOSQE_ASYNC : 0));
    entry.fd             = read.file;
    entry.off            = read.offset;
    entry.addr           = (uint64_t) (uintptr_t) read.buf;
    entry.len            = read.size;
    entry.buf_index      = (uint16_t) (read.buffer >= 0 ? read.buffer : 0);
    entry.user_data      = tag;
}

void Ring::queue_poll(int file, uint64_t tag) {
    io_uring_sqe & entry = *(io_uring_sqe *) next_entry();
    entry.opcode         = IORING_OP_POLL_ADD;
    entry.fd             = file;
    entry.poll32_events  = POLLIN;
    entry.user_data      = tag;
}

bool Ring::submit() {
    __atomic_store_n(tail, queued, __ATOMIC_RELEASE);
    const long n = syscall(__NR_io_uring_enter, fd, queued - given, 0, 0, nullptr, 0);
    given += n > 0 ? (unsigned) n : 0;
    return given == queued;
}

void Ring::submit_and_wait() {
    __atomic_store_n(tail, queued, __ATOMIC_RELEASE);
    while (refused.empty() && (given != queued || *results_head == __atomic_load_n(results_tail, __ATOMIC_ACQUIRE))) {
        const long n = syscall(__NR_io_uring_enter, fd, queued - given, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
        if (n >= 0) {
            given += (unsigned) n;
        } else if (errno == EAGAIN || errno == EBUSY) {
            // No memory for it, or no room for its result: running requests must end first.
            if (*results_head != __atomic_load_n(results_tail, __ATOMIC_ACQUIRE)) {
                return;
            }
            sched_yield();
        } else if (errno != EINTR) {
            const int why = errno;
            if (given == queued) {
                pollfd results = { fd, POLLIN, 0 };
                ::poll(&results, 1, -1);
            }
            while (given != queued) {
                refused.push_back({ ((io_uring_sqe *) entries)[--queued & mask].user_data, -why });
            }
            __atomic_store_n(tail, queued, __ATOMIC_RELEASE);
        }
    }
}

bool Ring::take(Result & result) {
    if (!refused.empty()) {
        result = refused.back();
        refused.pop_back();
        return true;
    }
    const unsigned head = *results_head;
    if (head == __atomic_load_n(results_tail, __ATOMIC_ACQUIRE)) {
        return false;
    }
    const io_uring_cqe & cqe = ((const io_uring_cqe *) results)[head & results_mask];
    result                   = { cqe.user_data, cqe.res };
    __atomic_store_n(results_head, head + 1, __ATOMIC_RELEASE);
    return true;
}

} // namespace pyorch

#else

namespace pyorch {

std::unique_ptr<Ring> Ring::open(unsigned) {
    errno = ENOSYS;
    return nullptr;
}

Ring::~Ring() {}
bool Ring::register_files(const std::vector<int> &) { return false; }
bool Ring::reserve_buffers(unsigned) { return false; }
bool Ring::set_buffer(unsigned, void *, size_t) { return false; }
void Ring::queue(const Read &, uint64_t) {}
void Ring::queue_poll(int, uint64_t) {}
bool Ring::submit() { return false; }
void Ring::submit_and_wait() {}
bool Ring::take(Result &) { return false; }

} // namespace pyorch

#endif
