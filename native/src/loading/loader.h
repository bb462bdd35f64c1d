// The loader: what is read next, and what becomes of a read.
//
// Who orders loads gives the loader an expert and a slot. The loader cuts what is to be read into requests; readers
// take them and end them, and the last one of a matrix is followed by its decode stage. Then the matrix is published
// to who ordered it:
//
//     start --next--> request --read--> read --decode--> decoded --published()--> ... --finished()
//
// A decode stage that computes may be left to whoever has time: threads of the reader, and those that wait for a
// matrix. A large matrix that is recovered has steps, which several threads take. What a layer waits for goes first, in
// the order of the kernels.
//
// A matrix of a pack that is not as it was packed is read once more, from the model's own file, if that has it.
//
// A compressed expert is a small graph: its E-chunks and its SM-chunks are read, or are there already, into slots of
// their own; once both of a matrix are there, it is recovered into the slot of the load. Memory for stored parts is
// scarcer than loads are: who orders gives it (Orders::stage). A load for which there is none yet is one request that
// waits, in its place of the queue, and becomes its requests once there is. Others that are behind it go before it;
// those have their memory, so they end, and give it back.
//
// Demand is served first (loading/queue.h says in which order). What is read ahead is asked for only when a reader has
// nothing better to do (Orders::order_ahead), and guesses last. A guess is read into time in which the disk would idle:
// it delays what is demanded after it by no more than the request of it that is under way, so that is small, and begins
// only while a disk has no other under way, of whatever kind.
//
// The mutex is that of who orders, for whom functions take a `const Locked &` (base/mutex.h). Functions for the readers
// lock it. It is never held across a read or a decode.

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

// Of a request of a guess: what the disk reads in half a millisecond, and not less than this, which is a millisecond of a
// disk of 0.5 GB/s, and still most of its bandwidth. Each request costs an interrupt.
constexpr uint64_t LEAST_GUESS_BYTES = 512u << 10;

// What comes of a load's wish for memory.
enum class Staged : uint8_t { YES, LATER, NEVER };

class Loader {
public:
    // Who orders loads.
    class Orders {
    public:
        virtual ~Orders() = default;

        // Nothing else is queued: starts a load with read_ahead(), or with guess(), if there is one. False: there is
        // none now.
        virtual bool order_ahead(const Locked & locked) = 0;
        virtual bool order_guess(const Locked & locked) = 0;

        // Gives a load of a compressed expert slots for those stored parts that are not there.
        virtual Staged stage(const Locked & locked, Load & load) = 0;

        // A matrix is there, and begins at address.
        virtual void published(const Locked & locked, Load & load, int role, const char * address) = 0;

        // No more of it will be read or published.
        virtual void failed(const Locked & locked, Load & load, const std::string & sentence) = 0;

        // A request or a matrix came to its end, whatever became of it; load.ended() after the last one.
        virtual void finished(const Locked & locked, Load & load) = 0;

        // There is something for decode_next() to do.
        virtual void decodable(const Locked &) {}
    };

    Loader(const ModelMap & map, std::unique_ptr<Source> source, const Codec & codec, uint64_t read_bytes,
        Mutex & mutex, Orders & orders);

    // No layer waits for what is read, so its decoding is nobody's who waits. Before the first load.
    void nobody_waits() { has_waiters = false; }

    // For the readers.

    // The next request, or false when stop() was called. While there is none it decodes, or sleeps.
    bool next(ReadRequest & request);

    // The same, but false at once while there is none.
    bool try_next(ReadRequest & request);

    // A request was read. result: bytes read or negative errno; ns: of the time that the reader spent with reads under
    // way, what fell to this one; cpu_ns: of a processor's time, the same. True: it was the last of a matrix, and ends
    // with decode(), on any thread, or with decode_later(). Else it has ended.
    bool read(ReadRequest & request, int64_t result, uint64_t ns, uint64_t cpu_ns = 0);
    void decode(const ReadRequest & request);

    // Leaves it to the threads that call decode_next().
    void decode_later(const ReadRequest & request);

    // Bytes of the matrices of compressed experts among those that decode() makes. REQUIRES: read() returned true
    uint64_t bytes_to_decode(const ReadRequest & request) const;

    // Of the same, the steps that threads may share.
    int steps_to_decode(const ReadRequest & request) const;

    // Both, on this thread.
    void finish(ReadRequest request, int64_t result, uint64_t ns, uint64_t cpu_ns = 0) {
        if (read(request, result, ns, cpu_ns)) {
            decode(request);
        }
    }
    void stop();

    // For threads that decode: a step of what was left to them, what is needed first. Sleeps while there is none, or who
    // waits for it does it better; false when stop_decoding() was called and nothing is left.
    bool decode_next();
    void stop_decoding();

    Source & bytes() { return *source; }
    int      n_files() const { return (int) map.files.size(); }
    bool     computes() const { return codec.computes() || map.layers[0].pack; } // packs have checksums

    // The slot that a request is for.
    struct Memory {
        char *   begin;
        uint64_t bytes;
        bool     fresh;
    };
    Memory slot_of(const ReadRequest & request) const;

    // For a reader that takes hold of the memory of slots: from watch_memory() on, what slots give up is kept in a
    // list. Who reads into a slot takes the list before.
    void watch_memory();
    void take_given_up(std::vector<char *> & slots);

    // For who orders.

    // Queues all reads of experts that a layer needs now, each with a form and a slot. queued: those among the experts
    // of that layer that were to be read ahead; what no reader has begun of them is demanded too, and what was read of
    // them is decoded as if it had been. by: recovers compressed experts, which are then in the order of schedule(); all
    // are in the order of the kernels if it has no workers.
    void demand(const Locked & locked, const std::vector<Load *> & loads, const std::vector<Load *> & queued,
        const Recoverer & by = { 0 });

    // Queues all reads of a load behind all demand.
    void read_ahead(const Locked & locked, Load & load) {
        mutex.assert_held(locked);
        load.in_order_of_kernels();
        start(load, queue.ahead, read_bytes);
    }

    // The same in small requests, behind everything else.
    void guess(const Locked & locked, Load & load) {
        mutex.assert_held(locked);
        load.in_order_of_kernels();
        start(load, queue.guessed, guess_bytes());
    }

    // Of a request of a guess at most: whole pages, as direct reads want them.
    uint64_t guess_bytes(const Locked & locked) const {
        mutex.assert_held(locked);
        return guess_bytes();
    }

    // See Requests::offer().
    void offer(const Locked & locked, int layer, int expert, std::vector<char> bytes) {
        mutex.assert_held(locked);
        requests.offer(layer, expert, std::move(bytes));
    }

    // Takes back the requests of a load that no reader works on yet.
    void take_back(const Locked & locked, Load & load) {
        mutex.assert_held(locked);
        queue.take_back(load);
    }

    // A load with requests that no reader works on yet, and for which condition(load) holds; or null.
    template <typename Condition>
    Load * find_queued(const Locked & locked, Condition condition) const {
        mutex.assert_held(locked);
        return queue.find(condition);
    }

    // The same for who waits for a matrix: lets go of the mutex meanwhile. False at once while there is none.
    bool decode_next(const Locked & locked);

    // A slot, by its memory, gave that up.
    void given_up(const Locked & locked, char * slot);

    // New requests may be there, or memory for some. With the mutex or without it.
    void wake();

    // Sleeps until changed is notified; a reader may end a read meanwhile (see Reader::wait).
    void wait(const Locked & locked, CondVar & changed);

    bool idle(const Locked & locked) const {
        mutex.assert_held(locked);
        return queue.empty() && n_in_flight == 0;
    }
    bool was_stopped(const Locked & locked) const {
        mutex.assert_held(locked);
        return stopped;
    }
    bool has_reader(const Locked &) const { return reader != nullptr; } // a simulated engine has one while it replays

    // Of all layers.
    struct Counts {
        uint64_t read_ns       = 0;
        uint64_t bytes_decoded = 0; // of compressed experts, as kernels compute with them
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

    // A matrix of which everything was read. Several threads may decode it, step by step.
    struct Decoding {
        ReadRequest request; // the last one of it
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
    Mutex                   waking; // held while the reader is told; taken with or without the other, never before it
    Reader *                reader = nullptr; // written under both, read under one
    CondVar                 work;
    CondVar                 decode_work;
    std::list<Decoding>     decoding GUARDED_BY(mutex);       // what is needed first comes first
    bool                    decodes GUARDED_BY(mutex) = true; // until stop_decoding()
    bool                    has_waiters               = true;
    Requests                requests GUARDED_BY(mutex);
    RequestQueue            queue GUARDED_BY(mutex);
    ReadRates               rates GUARDED_BY(mutex);
    int                     n_reading GUARDED_BY(mutex)   = 0; // requests under way
    int                     n_in_flight GUARDED_BY(mutex) = 0; // the same, and those whose matrix is being decoded
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
