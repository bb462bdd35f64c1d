// The loader: which request is read next, and the way of a read to its publication.
//
// The owner of loads (the table, say) gives the loader an expert and a slot. The loader cuts the load into requests.
// Readers take requests and end them. After the last request of a matrix comes its decode stage. Then the matrix is
// published to the owner:
//
//     start --next--> request --read--> read --decode--> decoded --published()--> ... --finished()
//
// A reader may leave a decode stage that computes to other threads: its own helpers, or compute threads that wait for a
// matrix. A large matrix of a compressed expert is recovered in steps, which several threads share. The matrices that a
// layer waits for go first, in the order of the kernels.
//
// A damaged matrix of a pack is read once more, from the model's own file, if that has it.
//
// A compressed expert is a small graph. Its E-chunks and its SM-chunks are read, or are in memory, in slots of their
// own. Once both of a matrix are in memory, it is recovered into the slot of the load. Memory for stored parts is
// scarce; the owner gives it (Orders::stage). A load without it is one waiting request in the queue, and becomes its
// requests when it gets the memory. Other loads behind it go first; they have their memory, so they end, and free it.
//
// Demand is served first (loading/queue.h has its order). Loads ahead are begun only when a reader is free
// (Orders::order_ahead), and guesses last. A guess uses time in which the disk would idle. It delays later demand by at
// most one of its requests. So these are small, and begin only while the disk has no other request under way.
//
// The mutex is the owner's; the owner calls functions with a `const Locked &` (base/mutex.h). Functions for the readers
// lock it. No thread holds it during a read or a decode.

#pragma once

#include "banks/bank.h"
#include "base/mutex.h"
#include "loading/codec.h"
#include "loading/queue.h"
#include "loading/rates.h"
#include "loading/requests.h"
#include "loading/schedule.h"
#include "loading/source.h"

#include <algorithm>
#include <atomic>
#include <list>
#include <memory>
#include <string>
#include <vector>

namespace pyorch {

class Reader;

// Least size of a request of a guess. The size is what the disk reads in half a millisecond. This much takes a disk of
// 0.5 GB/s a millisecond, and still gives most of its bandwidth. Each request costs an interrupt.
constexpr uint64_t LEAST_GUESS_BYTES = 512u << 10;

// Whether a load gets memory for stored parts.
enum class Staged : uint8_t { YES, LATER, NEVER };

class Loader {
public:
    // The owner of the loads.
    class Orders {
    public:
        virtual ~Orders() = default;

        // The queue is empty: starts a load with read_ahead(), or with guess(). False: none is wanted now.
        virtual bool order_ahead(const Locked & locked) = 0;
        virtual bool order_guess(const Locked & locked) = 0;

        // Gives a load of a compressed expert slots for its absent stored parts.
        virtual Staged stage(const Locked & locked, Load & load) = 0;

        // A matrix was read and decoded; it begins at address.
        virtual void published(const Locked & locked, Load & load, int role, const char * address) = 0;

        // The load failed: nothing more of it is read or published.
        virtual void failed(const Locked & locked, Load & load, const std::string & sentence) = 0;

        // A request or a matrix has ended, well or not; load.ended() after the last one.
        virtual void finished(const Locked & locked, Load & load) = 0;

        // decode_next() has work.
        virtual void decodable(const Locked &) {}
    };

    Loader(const ModelMap & map, std::unique_ptr<Source> source, const Codec & codec, uint64_t read_bytes,
        Mutex & mutex, Orders & orders);

    // No layer waits for the reads, so no waiting thread decodes. Call it before the first load.
    void nobody_waits() { has_waiters = false; }

    // For the readers.

    // The next request; false after stop(). Decodes or sleeps while the queue is empty.
    bool next(ReadRequest & request);

    // The same, but returns false at once if the queue is empty.
    bool try_next(ReadRequest & request);

    // A request was read. result: bytes read, or negative errno; ns: this request's part of the time in which the
    // reader had reads under way; cpu_ns: the same of processor time. True: it was the last of a matrix; end it with
    // decode(), on any thread, or with decode_later(). False: it has ended.
    bool read(ReadRequest & request, int64_t result, uint64_t ns, uint64_t cpu_ns = 0);
    void decode(const ReadRequest & request);

    // Leaves it to the threads of decode_next().
    void decode_later(const ReadRequest & request);

    // Bytes that decode() will make of compressed experts. REQUIRES: read() returned true.
    uint64_t bytes_to_decode(const ReadRequest & request) const;

    // The number of its steps that threads may share.
    int steps_to_decode(const ReadRequest & request) const;

    // read() and decode() on this thread.
    void finish(ReadRequest request, int64_t result, uint64_t ns, uint64_t cpu_ns = 0) {
        if (read(request, result, ns, cpu_ns)) {
            decode(request);
        }
    }
    void stop();

    // For decoding threads: does the most urgent step that was left to them. Sleeps while none is left, or while
    // waiting threads do better. False after stop_decoding(), when none is left.
    bool decode_next();
    void stop_decoding();

    Source & bytes() { return *source; }
    int      n_files() const { return (int) map.files.size(); }
    bool     computes() const { return codec.computes() || map.layers[0].pack; } // packs have checksums

    // The slot of a request.
    struct Memory {
        char *   begin;
        uint64_t bytes;
        bool     fresh;
    };
    Memory slot_of(const ReadRequest & request) const;

    // For a reader that registers the memory of slots: from now on, slots that free their memory are listed. The reader
    // takes the list before it reads into a slot.
    void watch_memory();
    void take_given_up(std::vector<char *> & slots);

    // For the owner of loads.

    // Queues all reads of experts that a layer needs now, each with a form and a slot. queued: loads ahead of this
    // layer that wait; their requests that no reader has begun become demand, and what was read of them is decoded as
    // demand. by: recovers compressed experts, in the order of schedule(); without workers, all are in the order of the
    // kernels.
    void demand(const Locked & locked, const std::vector<Load *> & loads, const std::vector<Load *> & queued,
        const Recoverer & by = { 0 });

    // Queues all reads of a load behind all demand.
    void read_ahead(const Locked & locked, Load & load) {
        mutex.assert_held(locked);
        load.in_order_of_kernels();
        start(load, queue.ahead, read_bytes);
    }

    // The same in small requests, behind all others.
    void guess(const Locked & locked, Load & load) {
        mutex.assert_held(locked);
        load.in_order_of_kernels();
        start(load, queue.guessed, guess_bytes());
    }

    // The largest request of a guess, in whole pages for direct reads.
    uint64_t guess_bytes(const Locked & locked) const {
        mutex.assert_held(locked);
        return guess_bytes();
    }

    // See Requests::offer().
    void offer(const Locked & locked, int layer, int expert, std::vector<char> bytes) {
        mutex.assert_held(locked);
        requests.offer(layer, expert, std::move(bytes));
    }

    // Removes the requests of a load that no reader works on yet.
    void take_back(const Locked & locked, Load & load) {
        mutex.assert_held(locked);
        queue.take_back(load);
    }

    // A load with requests that no reader works on, for which condition(load) holds; or null.
    template <typename Condition>
    Load * find_queued(const Locked & locked, Condition condition) const {
        mutex.assert_held(locked);
        return queue.find(condition);
    }

    // The same for a thread that waits for a matrix: releases the mutex meanwhile. False at once if no step is left.
    bool decode_next(const Locked & locked);

    // A slot freed its memory.
    void given_up(const Locked & locked, char * slot);

    // New requests may wait, or memory be free. With the mutex or without it.
    void wake();

    // Sleeps until `changed` is notified; a reader may end a read meanwhile (see Reader::wait).
    void wait(const Locked & locked, CondVar & changed);

    bool idle(const Locked & locked) const {
        mutex.assert_held(locked);
        return queue.empty() && n_in_flight == 0;
    }
    bool was_stopped(const Locked & locked) const {
        mutex.assert_held(locked);
        return stopped;
    }
    bool has_reader(const Locked &) const { return reader != nullptr; } // a simulated engine has one during a replay

    // Of all layers.
    struct Counts {
        uint64_t read_ns       = 0;
        uint64_t bytes_decoded = 0; // of compressed experts, full size
    };
    uint64_t bytes_read(const Locked & locked, int layer) const {
        mutex.assert_held(locked);
        return read_by_layer[layer];
    }
    Counts counts(const Locked & locked) const {
        mutex.assert_held(locked);
        return counted;
    }
    uint64_t decode_ns() const { return ns_decoded; }
    void     reset_stats(const Locked & locked);

    ReadRates read_rates(const Locked & locked) const {
        mutex.assert_held(locked);
        return rates;
    }
    uint64_t bytes_demanded(const Locked & locked) const {
        mutex.assert_held(locked);
        return queue.bytes_demanded();
    }

private:
    friend class Reader; // attaches itself

    // A matrix that was read whole. Several threads may decode it, step by step.
    struct Decoding {
        ReadRequest request; // its last one
        int         role;
        int         n_steps;
        uint64_t    since;
        int         begun   = 0;
        int         ended   = 0;
        bool        damaged = false;

        bool goes_before(const Decoding & other) const {
            const bool urgent = request.load->urgent;
            return urgent != other.request.load->urgent ? urgent : place() < other.place();
        }

        int place() const { return request.load->place[role]; }
    };

    const ModelMap &        map;
    std::unique_ptr<Source> source;
    const Codec &           codec;
    const uint64_t          read_bytes; // of one request at most
    Mutex &                 mutex;
    Orders &                orders;
    Mutex                   waking; // held while the reader is woken; taken with or without the other, never before it
    Reader *                reader = nullptr; // written under both, read under one
    CondVar                 work;
    CondVar                 decode_work;
    std::list<Decoding>     decoding GUARDED_BY(mutex);       // the most urgent first
    bool                    decodes GUARDED_BY(mutex) = true; // until stop_decoding()
    bool                    has_waiters               = true;
    Requests                requests GUARDED_BY(mutex);
    RequestQueue            queue GUARDED_BY(mutex);
    ReadRates               rates GUARDED_BY(mutex);
    int                     n_reading GUARDED_BY(mutex)   = 0; // requests under way
    int                     n_in_flight GUARDED_BY(mutex) = 0; // the same, and requests whose matrix is being decoded
    bool                    stopped GUARDED_BY(mutex)     = false;
    bool                    watched GUARDED_BY(mutex)     = false;
    std::atomic<bool>       any_stripped{ false };
    std::vector<char *>     stripped GUARDED_BY(mutex);
    std::vector<uint64_t>   read_by_layer GUARDED_BY(mutex); // bytes
    Counts                  counted GUARDED_BY(mutex);
    std::atomic<uint64_t>   ns_decoded{ 0 };                // the sum over threads
    bool                    said GUARDED_BY(mutex) = false; // that a pack is damaged

    uint64_t guess_bytes() const REQUIRES(mutex) {
        const auto half_a_millisecond = (uint64_t) (0.5e-3 * rates.bytes_per_second());
        return std::min(read_bytes, std::max(LEAST_GUESS_BYTES, half_a_millisecond / PAGE * PAGE));
    }

    void         start(Load & load, std::deque<ReadRequest> & into, uint64_t request_bytes) REQUIRES(mutex);
    void         place_for_recovery(const std::vector<Load *> & loads, const Recoverer & by) REQUIRES(mutex);
    bool         take(std::deque<ReadRequest> & from, uint64_t request_bytes, ReadRequest & request) REQUIRES(mutex);
    bool         pop(ReadRequest & request) REQUIRES(mutex);
    Decoding     decoding_of(const ReadRequest & request, int role) const;
    bool         decode_step(const Decoding & matrix, int step);
    const char * decoded_at(const Decoding & matrix);
    bool         decode_first() REQUIRES(mutex);
    void         end_decoding(const Decoding & matrix, const char * address) REQUIRES(mutex);
    void         missing(const ReadRequest & request, int role, const char * why) REQUIRES(mutex);
    void         fail(Load & load, int role, int file, const std::string & why) REQUIRES(mutex);
    void         end(const ReadRequest & request) REQUIRES(mutex);
};

} // namespace pyorch
