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
// Demand is served first, in the order in which the kernels will need it: all first matrices of the layer, then all
// second, then all third, experts ascending, as mul_mat_id goes through them. Compressed experts may have the order of
// ZipMoE instead (loading/schedule.h). Where small matrices lie together, one
// request reads several. What is read ahead is asked for only when a reader has nothing better to do
// (Orders::order_ahead), and guesses last. A guess is read into time in which the disk would idle: it delays what is
// demanded after it by no more than the request of it that is under way, so that is small, and begins only while a disk
// has no other under way, of whatever kind.
//
// The mutex is that of who orders. Functions for the readers take it, the others REQUIRE it; it is never held
// across a read or a decode.

#pragma once

#include "banks/bank.h"
#include "loading/codec.h"
#include "loading/schedule.h"
#include "loading/source.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

namespace pyorch {

class Reader;
struct Stream;

// Of a request of a guess: what the disk reads in half a millisecond, and not less than this, which is a millisecond of a
// disk of 0.5 GB/s, and still most of its bandwidth. Each request costs an interrupt.
constexpr uint64_t LEAST_GUESS_BYTES = 512u << 10;

// One expert on its way into its slot.
struct Load {
    int      layer  = 0; // index into the layers with experts
    int      expert = 0;
    Slot     slot;
    Slot     parts[N_STORED_PARTS]      = {};      // of a compressed expert, from stage() on
    uint32_t there                      = 0;       // bits: those of them that are whole in memory
    bool     staged                     = false;   // who orders has given it memory for all of them
    bool     damaged                    = false;   // what was read of them is not what was packed
    bool     urgent                     = false;   // a layer waits for it
    uint32_t roles                      = ~0u;     // bits: the matrices that are read
    int      n_rows                     = 1;       // of the ubatch that the expert computes
    int      place[PYORCH_MAX_ROLES]    = {};      // of each matrix, in the order of what a layer waits for
    int      sm_place[PYORCH_MAX_ROLES] = {};      // of the read of its signs and mantissas, in the same order
    bool     scheduled                  = false;   // the places are those of schedule()
    Stream * stream                     = nullptr; // of who orders: what the slot is a part of, if not an expert's own
    bool     failed                     = false;
    int      queued                     = 0;  // requests that no reader works on yet
    int      in_flight                  = 0;  // that one does
    uint64_t read                       = 0;  // bytes that are there
    int      unread[PYORCH_MAX_ROLES]   = {}; // requests of each matrix that have not been read yet
    bool     missed[PYORCH_MAX_ROLES]   = {}; // the pack could not be read there

    bool ended() const { return queued == 0 && in_flight == 0; }

    void in_order_of_kernels() {
        std::iota(std::begin(place), std::end(place), 0);
        std::iota(std::begin(sm_place), std::end(sm_place), 0);
        scheduled = false;
    }
};

struct ReadRequest {
    Load *   load;
    int      role;      // the first matrix of which it reads something
    int      last_role; // and the last
    int      file;
    uint64_t offset;
    uint64_t size;   // to read
    uint64_t needed; // of them, the rest is alignment
    char *   buf;
    bool     direct;    // around the page cache
    bool     from_pack; // what it reads has a checksum
    uint32_t complete;  // bits: the matrices of which it was the last request, when it was read
    uint32_t touches;   // bits: the matrices that it reads something of, or is to decode
    Part     part;      // whose slot it reads into
    bool     waits;     // for memory: its load has not been cut into requests yet. No reader sees it

    // What it reads into, where its slot has room for the matrix only as the pack has it.
    std::shared_ptr<char[]> plain = {};

    // Of a compressed expert whose stored parts are there: nothing is to be read, only to be decoded.
    bool reads() const { return size > 0; }

    bool waited_for = false; // by a layer, when a reader took it
};

// What comes of a load's wish for memory.
enum class Staged : uint8_t { YES, LATER, NEVER };

class Loader {
public:
    // Who orders loads. Called with the mutex held.
    class Orders {
    public:
        virtual ~Orders() = default;

        // Nothing else is queued: starts a load with read_ahead(), or with guess(), if there is one. False: there is
        // none now.
        virtual bool order_ahead() = 0;
        virtual bool order_guess() = 0;

        // Gives a load of a compressed expert slots for those stored parts that are not there.
        virtual Staged stage(Load & load) = 0;

        // A matrix is there, and begins at address.
        virtual void published(Load & load, int role, const char * address) = 0;

        // No more of it will be read or published.
        virtual void failed(Load & load, const std::string & sentence) = 0;

        // A request or a matrix came to its end, whatever became of it; load.ended() after the last one.
        virtual void finished(Load & load) = 0;

        // There is something for decode_next() to do.
        virtual void decodable() {}
    };

    Loader(const ModelMap & map, std::unique_ptr<Source> source, const Codec & codec, uint64_t read_bytes,
        std::mutex & mutex, Orders & orders);

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
    void demand(const std::vector<Load *> & loads, const std::vector<Load *> & queued, const Recoverer & by = { 0 });

    // Queues all reads of a load behind all demand.
    void read_ahead(Load & load) {
        load.in_order_of_kernels();
        start(load, ahead, read_bytes);
    }

    // The same in small requests, behind everything else.
    void guess(Load & load) {
        load.in_order_of_kernels();
        start(load, guessed, guess_bytes());
    }

    // Of a request of a guess at most: whole pages, as direct reads want them.
    uint64_t guess_bytes() const {
        const auto half_a_millisecond = (uint64_t) (0.5e-3 * bytes_per_second());
        return std::min(read_bytes, std::max(LEAST_GUESS_BYTES, half_a_millisecond / PAGE * PAGE));
    }

    // The next load of an expert takes its matrices from here and reads nothing, unless it is in a pack. bytes: of all
    // its matrices, as the model's file has them, in the order of the kernels.
    void offer(int layer, int expert, std::vector<char> bytes) { offered[{ layer, expert }] = std::move(bytes); }

    // Takes back the requests of a load that no reader works on yet.
    void take_back(Load & load);

    // A load with requests that no reader works on yet, and for which condition(load) holds; or null.
    template <typename Condition>
    Load * find_queued(Condition condition) const {
        for (const auto * queue : { &guessed, &ahead, &demanded }) {
            for (const ReadRequest & request : *queue) {
                if (condition(*request.load)) {
                    return request.load;
                }
            }
        }
        return nullptr;
    }

    // The same for who waits for a matrix: lets go of the mutex meanwhile. False at once while there is none.
    bool decode_next(std::unique_lock<std::mutex> & lock);

    // A slot, by its memory, gave that up.
    void given_up(char * slot);

    // New requests may be there, or memory for some.
    void wake();

    // Sleeps until changed is notified; a reader may end a read meanwhile (see Reader::wait).
    void wait(std::unique_lock<std::mutex> & lock, std::condition_variable & changed);

    bool     idle() const { return demanded.empty() && ahead.empty() && guessed.empty() && n_in_flight == 0; }
    bool     was_stopped() const { return stopped; }
    bool     has_reader() const { return reader != nullptr; } // a simulated engine has one while it replays
    uint64_t bytes_read(int layer) const { return read_by_layer[layer]; }
    uint64_t read_ns() const { return ns_read; }
    uint64_t bytes_decoded() const { return decoded; } // of compressed experts, as kernels compute with them
    uint64_t decode_ns() const { return ns_decoded; }
    void     reset_stats();

    // Lately; 0 before the first read.
    double bytes_per_second() const { return recent_ns > 0 ? recent_bytes / recent_ns * 1e9 : 0; }

    // Of the time, the share in which a reader read what a layer waited for, lately.
    double busy_share() const;

    // Of demand that no reader works on yet.
    uint64_t bytes_demanded() const {
        uint64_t bytes = 0;
        for (const ReadRequest & request : demanded) {
            bytes += request.size;
        }
        return bytes;
    }

    // Of the time of reads, the share in which a processor is busy with them, lately.
    double cpu_share() const { return recent_ns > 0 ? std::min(1.0, recent_cpu / recent_ns) : 0; }

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
    std::mutex &            mutex;
    Orders &                orders;
    Reader *                reader = nullptr;
    std::mutex              waking; // held while the reader is told; taken with or without the other, never before it
    std::condition_variable work;
    std::condition_variable decode_work;
    std::list<Decoding>     decoding;           // what is needed first comes first
    bool                    decodes     = true; // until stop_decoding()
    bool                    has_waiters = true;
    std::deque<ReadRequest> demanded;
    std::deque<ReadRequest> ahead;
    std::deque<ReadRequest> guessed;                                // of one load
    std::map<std::pair<int, int>, std::vector<char>> offered;       // by layer and expert
    int                                              n_reading = 0; // requests under way
    int                   n_in_flight                          = 0; // the same, and those whose matrix is being decoded
    bool                  stopped                              = false;
    bool                  watched                              = false;
    std::atomic<bool>     any_stripped{ false };
    std::vector<char *>   stripped;
    std::vector<uint64_t> read_by_layer;
    uint64_t              ns_read = 0;
    uint64_t              decoded = 0;
    std::atomic<uint64_t> ns_decoded{ 0 };  // the sum over threads
    double                recent_bytes = 0; // fading sums
    double                recent_ns    = 0;
    double                recent_cpu   = 0;     // ns
    int                   n_waited_for = 0;     // of n_reading
    uint64_t              began        = 0;     // when there was first one of them
    uint64_t              ended        = 0;     // and when there was none any more
    double                recent_busy  = 0;     // ns of the time between the two, a fading sum
    double                recent_time  = 0;     // ns of all of it
    bool                  said         = false; // that a pack is damaged

    void         start(Load & load, std::deque<ReadRequest> & queue, uint64_t request_bytes);
    void         cut(Load & load, std::deque<ReadRequest> & queue, uint64_t request_bytes);
    void         cut(Load & load, const Extent & extent, std::deque<ReadRequest> & queue, uint64_t request_bytes);
    void         ask_nothing(Load & load, std::deque<ReadRequest> & queue, int role, uint64_t needed = 0);
    void         place_for_recovery(const std::vector<Load *> & loads, const Recoverer & by);
    bool         take_offered(Load & load, std::deque<ReadRequest> & queue);
    bool         take(std::deque<ReadRequest> & queue, uint64_t request_bytes, ReadRequest & request);
    bool         pop(ReadRequest & request);
    Decoding     decoding_of(const ReadRequest & request, int role) const;
    bool         decode_step(const Decoding & matrix, int step);
    const char * decoded_at(const Decoding & matrix);
    void         end_decoding(const Decoding & matrix, std::unique_lock<std::mutex> & lock);
    void         missing(const ReadRequest & request, int role, const char * why);
    void         fail(Load & load, int role, int file, const std::string & why);
    void         end(const ReadRequest & request);
};

} // namespace pyorch
