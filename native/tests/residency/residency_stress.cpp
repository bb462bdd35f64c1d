// Several contexts use one residency table at a tight budget while orders come from outside and reads
// fail now and then. Every matrix must hold its own bytes while it is held, and the budget must hold.
// Built with a sanitizer:
//
//     residency_stress FILE.gguf SEED N_PASSES threads|io_uring plain|compressed
//     residency_stress FILE.gguf SEED N_PASSES threads device
//
// FILE.gguf is written, used and left; compressed: experts come from FILE.gguf.pack, in all forms; device: in its
// memory and in that of a device (routing/device_stress.cpp). Exit status 77: this system has no io_uring.

#include "compressed_pack.h"

#include "check.h"

#include "banks/host_bank.h"
#include "loading/readers.h"
#include "loading/uring_reader.h"
#include "replay/policies/replay_policies.h"
#include "residency/table.h"
#include "routing/device_stress.h"

#include "ggml.h"
#include "gguf.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>

using namespace pyorch;

static constexpr int N_LAYERS   = 5;
static constexpr int N_EXPERT   = 12;
static constexpr int N_CONTEXTS = 8;

static uint32_t word_of(int layer, int role, int expert) {
    return 0x10000000u * (uint32_t) (layer + 1) + 0x10000u * (uint32_t) role + (uint32_t) expert;
}

// Experts of four sizes: some are read directly, some through the page cache; one layer has gate and up in one tensor.
static void write_model(const char * path) {
    ggml_init_params params = { 64u << 20, nullptr, false };
    ggml_context *   ctx    = ggml_init(params);
    gguf_context *   gguf   = gguf_init_empty();
    gguf_set_val_str(gguf, "general.architecture", "stress");
    gguf_set_val_u32(gguf, "stress.block_count", N_LAYERS + 1);
    gguf_set_val_u32(gguf, "stress.expert_used_count", 3);
    for (int l = 0; l < N_LAYERS; ++l) {
        const bool                      fused = l == 2;
        const std::vector<const char *> roles =
            fused ? std::vector<const char *>{ "gate_up", "down" } : std::vector<const char *>{ "gate", "up", "down" };
        for (size_t r = 0; r < roles.size(); ++r) {
            ggml_tensor * t = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, 64, l == 4 ? 300 : l % 2 ? 17 : 560, N_EXPERT);
            ggml_format_name(t, "blk.%d.ffn_%s_exps.weight", l + 1, roles[r]); // block 0 is dense
            for (int e = 0; e < N_EXPERT; ++e) {
                uint32_t * words = (uint32_t *) ((char *) t->data + e * t->nb[2]);
                std::fill(words, words + t->nb[2] / sizeof(uint32_t), ~word_of(l, (int) r, e));
            }
            gguf_add_tensor(gguf, t);
        }
    }
    CHECK(gguf_write_to_file(gguf, path, false));
    gguf_free(gguf);
    ggml_free(ctx);
}

// The file holds every bit flipped: what nobody decodes, and what is decoded twice, is wrong.
class Flipping : public Codec {
public:
    const char * decode(const ExpertTensor & tensor, char *, char * read) const override {
        if (count.fetch_add(1) % 701 == 700) {
            return nullptr;
        }
        for (uint64_t i = 0; i < tensor.stride; i += sizeof(uint64_t)) { // a sanitizer looks at each access
            uint64_t word;
            memcpy(&word, read + i, sizeof(word));
            word = ~word;
            memcpy(read + i, &word, sizeof(word));
        }
        return read;
    }

private:
    mutable std::atomic<unsigned> count{ 0 };
};

static const Codec & flipping_codec() {
    static const Flipping flipping;
    return flipping;
}

// The files, but one read in so many fails, and some take their time.
class UnsteadySource : public Source {
public:
    UnsteadySource(const ModelMap & map) : files(open_files(map, true)) {}

    int64_t read(int file, uint64_t offset, void * buf, uint64_t size) override {
        const unsigned n = count.fetch_add(1);
        if (n % 997 == 996) {
            return -EIO;
        }
        if (n % 7 == 0) {
            std::this_thread::yield();
        }
        const int64_t n_read = files->read(file, offset, buf, size);
        return n % 499 == 498 ? n_read / 2 : n_read;
    }

    bool direct(int file) const override { return files->direct(file); }
    int  descriptor(int file, bool direct, int) const override { return files->descriptor(file, direct); }

    int check(int file, int) override {
        const unsigned n = count.fetch_add(1);
        return n % 997 == 996 ? -EIO : files->check(file);
    }

private:
    std::unique_ptr<Source> files;
    std::atomic<unsigned>   count{ 0 };
};

// A number that others wait for, asleep: 17 threads that spin instead need minutes of a small machine.
class Count {
public:
    void add() {
        std::lock_guard<std::mutex> lock(mutex);
        ++n;
        changed.notify_all();
    }

    void wait(int least) {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return n >= least; });
    }

private:
    std::mutex              mutex;
    std::condition_variable changed;
    int                     n = 0;
};

static std::vector<int> random_experts(std::mt19937 & rng, int n) {
    std::vector<int> ids(N_EXPERT);
    for (int i = 0; i < N_EXPERT; ++i) {
        ids[i] = i;
    }
    std::shuffle(ids.begin(), ids.end(), rng);
    ids.resize(n);
    std::sort(ids.begin(), ids.end());
    return ids;
}

// Two of the guessed experts will be used, one will not.
static void guess(Table & table, const void * context, std::mt19937 & rng, int layer, std::vector<int> & used) {
    used = random_experts(rng, 3);
    std::vector<Table::Want> wants;
    for (int id : { used[0], used[1], (int) (rng() % N_EXPERT) }) {
        wants.push_back({ id, 0.5, true, false });
    }
    table.expect(context, layer, layer - 1, std::vector<float>(N_EXPERT, 1.0f / (float) (1 + rng() % N_EXPERT)));
    table.want(context, layer, layer - 1, wants);
}

// One context: two compute threads go through the layers as mul_mat_id does.
static void decode(Table & table, int seed, int n_passes, std::atomic<int> & n_failed) {
    std::mt19937 rng(seed);
    Owner        owner = { &owner };
    owner.n_threads    = 2;
    std::vector<std::vector<int>> next(N_LAYERS);
    for (int pass = 0; pass < n_passes; ++pass) {
        const int n_tokens = pass % 6 == 0 ? 64 : 1; // a prompt now and then
        for (int l = 0; l < N_LAYERS; ++l) {
            const auto ids =
                n_tokens == 1 && !next[l].empty() ? next[l] : random_experts(rng, n_tokens > 1 ? N_EXPERT : 3);
            next[l].clear();
            table.acquire(owner, l, { ids, random_experts(rng, 3), n_tokens, pass % 3 != 0 });
            if (n_tokens == 1) {
                guess(table, owner.context, rng, (l + 1) % N_LAYERS, next[(l + 1) % N_LAYERS]);
            }
            const bool aborted = pass % 7 == 6 && l == 2; // after its first matrix
            Count      n_passed;
            auto       compute = [&](const char * thread) {
                const auto & tensors = table.map.layers[l].tensors;
                for (int r = 0; r < (aborted ? 1 : (int) tensors.size()); ++r) {
                    for (int round = owner.stream ? 1 : 0; round < 2; ++round) {
                        for (int id : ids) {
                            const char * p = table.address(owner, l, id, r, round == 1, thread);
                            if (!p) {
                                CHECK(round == 0);
                                continue;
                            }
                            const uint32_t * words = (const uint32_t *) p;
                            const uint32_t   first = words[0];
                            const uint32_t   last  = words[tensors[r].stride / sizeof(uint32_t) - 1];
                            // zeros: could not be read
                            CHECK(first == last && (first == word_of(l, r, id) || first == 0));
                        }
                    }
                    n_passed.add();
                    n_passed.wait(2 * (r + 1)); // as the threads of a graph do behind each node
                }
            };
            std::thread other(compute, "other");
            compute("one");
            other.join();
            if (aborted) {
                break; // the next acquire gives it back
            }
            if (pass % 5 == 4 && l == 3) {
                table.forget(owner); // aborted, and the context is freed; another one takes its place
                break;
            }
            n_failed += !table.release(owner);
        }
    }
    table.release(owner);
}

static void order_about(Table & table, int seed, const std::atomic<bool> & done) {
    std::mt19937           rng(seed);
    const uint64_t         floor = table.map.floor_bytes();
    const std::vector<int> all = { 0, 1, 2, 3, 4 }, but_the_last = { 0, 1, 2, 3 };
    while (!done) {
        const int    il    = table.map.layers[rng() % N_LAYERS].il;
        const auto   ids   = random_experts(rng, 2);
        pyorch_stats stats = {};
        uint8_t      mask[N_EXPERT];
        try {
            switch (rng() % 10) {
            case 0: table.pin(il, ids.data(), 2); break;
            case 1: table.unpin(il, ids.data(), 2); break;
            case 2: table.evict(il, ids.data(), 2); break;
            case 3: table.set_budget(floor + rng() % floor); break;
            case 4: {
                constexpr pyorch_policy POLICIES[] = { PYORCH_LFU, PYORCH_LRU, PYORCH_LEARNED, PYORCH_FIFO,
                    PYORCH_MARKING };
                table.set_policy(POLICIES[rng() % std::size(POLICIES)]);
                break;
            }
            case 5: table.set_limits(table.layer_index(il), (int) (rng() % 3), N_EXPERT - (int) (rng() % 3)); break;
            case 6: table.get_residency(il, mask, N_EXPERT); break;
            case 7: table.set_executed(rng() % 2 ? but_the_last : all); break;
            case 8: {
                if (rng() % 8 > 0) { // pools get the time to fill
                    break;
                }
                constexpr PoolShares SHARES[] = { ALL_FULL, { 0, 0.5, 0.5, 0, 0 }, { 0, 0.4, 0.2, 0.2, 0.2 },
                    { 0, 0.6, 0, 0.4, 0 }, { 0, 0, 0, 0, 1 } };
                for (const auto & l : table.map.layers) { // what is pinned and reserved leaves pools no memory
                    table.unpin(l.il, random_experts(rng, N_EXPERT).data(), N_EXPERT);
                    table.set_limits(table.layer_index(l.il), 0, N_EXPERT);
                }
                table.set_budget(2 * floor);
                table.set_pools(SHARES[rng() % std::size(SHARES)]);
                break;
            }
            default: table.prefetch(il, ids.data(), 2); break;
            }
        } catch (const Failure & e) {
            CHECK(e.status == PYORCH_BUDGET);
        }
        table.add_stats(-1, stats);
        CHECK(stats.peak_bytes <= 2 * floor && stats.used_bytes <= 2 * floor);
        CHECK(stats.prefetch_late <= stats.prefetch_hits);
        std::this_thread::yield();
    }
    for (const auto & l : table.map.layers) {
        table.unpin(l.il, random_experts(rng, N_EXPERT).data(), N_EXPERT);
    }
}

// Memory of this process that the kernel has hold of for a reader.
static uint64_t pinned_bytes() {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
        if (line.rfind("VmPin:", 0) == 0) {
            return 1024 * strtoull(line.c_str() + 6, nullptr, 10);
        }
    }
    return 0;
}

int main(int argc, char ** argv) {
    CHECK(argc == 6);
    const int seed     = atoi(argv[2]);
    const int n_passes = atoi(argv[3]);
    if (std::string(argv[5]) == "device") {
        stress_device(argv[1], seed, n_passes);
        return 0;
    }
    write_model(argv[1]);

    ModelMap map(argv[1]);
    CHECK(map.layers.size() == N_LAYERS && map.layers[0].il == 1 && map.layers[2].tensors.size() == 2);

    const bool compressed = std::string(argv[5]) == "compressed";
    if (compressed) {
        CHECK(compress(map, std::string(argv[1]) + ".pack"));
    }
    pyorch_config config = {};
    config.budget_bytes  = map.floor_bytes();
    config.read_bytes    = 48 * 1024;
    Table table(map, std::make_unique<HostBank>(map, config.budget_bytes), std::make_unique<UnsteadySource>(map),
        flipping_codec(), config, replay_policies());
    {
        std::unique_ptr<Reader> reader;
        if (std::string(argv[4]) == "io_uring") {
            reader = UringReader::create(table.loader(), 3);
            if (!reader) {
                return 77;
            }
        } else {
            reader = std::make_unique<ReaderThreads>(table.loader(), 3);
        }
        std::atomic<bool>        done{ false };
        std::atomic<int>         n_failed{ 0 };
        std::thread              orders([&] { order_about(table, seed, done); });
        std::vector<std::thread> contexts;
        for (int i = 0; i < N_CONTEXTS; ++i) {
            contexts.emplace_back([&, i] { decode(table, seed * 7 + i, n_passes, n_failed); });
        }
        for (auto & t : contexts) {
            t.join();
        }
        done = true;
        orders.join();
        table.wait_idle();

        pyorch_stats stats = {};
        table.add_stats(-1, stats);
        CHECK(stats.failures == (uint64_t) n_failed && stats.loads > 0 && stats.evictions > 0);
        CHECK(stats.used_bytes <= stats.budget_bytes);
        CHECK(compressed == (stats.decoded_bytes > 0));
        CHECK(compressed == (stats.compressed_hits + stats.sm_hits + stats.e_hits > 0));
        table.set_pools(ALL_FULL);
        stats = {};
        table.add_stats(-1, stats);
        CHECK(stats.stored_bytes == 0);
        for (const auto & l : table.map.layers) {
            uint8_t mask[N_EXPERT];
            table.get_residency(l.il, mask, N_EXPERT);
            for (uint8_t m : mask) {
                CHECK((m & ~PYORCH_RESIDENT) == 0); // nothing is held, pinned or on its way
            }
        }
        // What slots gave up, the reader lets go of when it is told, on its thread.
        const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(5);
        while (pinned_bytes() > stats.used_bytes) {
            CHECK(std::chrono::steady_clock::now() < until);
            std::this_thread::yield();
        }
        printf("%llu hits, %llu misses (%llu of stored parts), %llu loads, %d failed layers\n",
            (unsigned long long) stats.hits, (unsigned long long) stats.misses,
            (unsigned long long) (stats.compressed_hits + stats.sm_hits + stats.e_hits),
            (unsigned long long) stats.loads, (int) n_failed);
    }
    return 0;
}
