// Several contexts share the slots and areas of a device, forecasts order experts, contexts are aborted and freed,
// limits and predictors change, and reads fail now and then. Each slot that a layer computes with must hold the bytes
// of its expert from then on until the next layer comes. The device is the processor: so a sanitizer sees what goes
// there.

#include "routing/device_stress.h"

#include "check.h"

#include "banks/host_bank.h"
#include "base/cpu_backend.h"
#include "loading/codec.h"
#include "loading/readers.h"
#include "residency/table.h"
#include "routing/device_tier.h"

#include "ggml.h"
#include "gguf.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <tuple>

using namespace pyorch;

static constexpr int N_LAYERS   = 12;
static constexpr int N_EXPERT   = 16;
static constexpr int N_USED     = 3;
static constexpr int N_CONTEXTS = 3;

static uint32_t word_of(int layer, int role, int expert) {
    return 0x10000000u * (uint32_t) (layer + 1) + 0x10000u * (uint32_t) role + (uint32_t) expert;
}

// One layer is of another kind, so that there are two pools.
static void write_model(const char * path) {
    ggml_context * ctx  = ggml_init({ 64u << 20, nullptr, false });
    gguf_context * gguf = gguf_init_empty();
    gguf_set_val_str(gguf, "general.architecture", "stress");
    gguf_set_val_u32(gguf, "stress.block_count", N_LAYERS);
    gguf_set_val_u32(gguf, "stress.expert_used_count", N_USED);
    for (int l = 0; l < N_LAYERS; ++l) {
        int role = 0;
        for (const char * name : { "gate", "up", "down" }) {
            ggml_tensor * t = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, 64, l == 2 ? 24 : 40, N_EXPERT);
            ggml_format_name(t, "blk.%d.ffn_%s_exps.weight", l, name);
            for (int e = 0; e < N_EXPERT; ++e) {
                uint32_t * words = (uint32_t *) ((char *) t->data + e * t->nb[2]);
                std::fill(words, words + t->nb[2] / sizeof(uint32_t), word_of(l, role, e));
            }
            gguf_add_tensor(gguf, t);
            ++role;
        }
    }
    CHECK(gguf_write_to_file(gguf, path, false));
    gguf_free(gguf);
    ggml_free(ctx);
}

// The files, but one read in so many fails.
class UnsteadySource : public Source {
public:
    UnsteadySource(const ModelMap & map) : files(open_files(map, true)) {}

    int64_t read(int file, uint64_t offset, void * buf, uint64_t size) override {
        return count.fetch_add(1) % 499 == 498 ? -EIO : files->read(file, offset, buf, size);
    }

    bool direct(int file) const override { return files->direct(file); }
    int  descriptor(int file, bool direct, int) const override { return files->descriptor(file, direct); }
    int  check(int file, int) override { return files->check(file); }

private:
    std::unique_ptr<Source> files;
    std::atomic<unsigned>   count{ 0 };
};

static std::vector<int> random_experts(std::mt19937 & rng, int n) {
    std::vector<int> ids(N_EXPERT);
    for (int i = 0; i < N_EXPERT; ++i) {
        ids[i] = i;
    }
    std::shuffle(ids.begin(), ids.end(), rng);
    ids.resize(n);
    return ids;
}

// What a layer of a context computes with on the device.
struct Computed {
    bool             in_area = false;
    int              layer   = -1;
    std::vector<int> slots   = {}; // by expert
};

static void check(const DeviceTier & tier, const Table & table, const Computed & computed_layer) {
    for (int e = 0; e < (int) computed_layer.slots.size(); ++e) {
        for (int role = 0;
            computed_layer.slots[e] >= 0 && role < (int) table.map.layers[computed_layer.layer].tensors.size();
            ++role) {
            ggml_tensor *         t = computed_layer.in_area ?
                tier.area(computed_layer.layer, role) :
                tier.bank(computed_layer.layer).slots(computed_layer.layer, role);
            std::vector<uint32_t> words(t->nb[2] / sizeof(uint32_t));
            ggml_backend_tensor_get(t, words.data(), computed_layer.slots[e] * t->nb[2], t->nb[2]);
            const uint32_t expected = word_of(computed_layer.layer, role, e);
            CHECK(std::all_of(words.begin(), words.end(), [&](uint32_t word) { return word == expected; }));
        }
    }
}

// One context: the stages that a device has a part in.
static void decode(DeviceTier & tier, Table & table, int seed, int n_passes, std::atomic<int> & n_computed) {
    std::mt19937                  rng(seed);
    Owner                         owner = { &owner };
    DeviceHold                    hold;
    std::thread                   predictor;
    std::vector<std::vector<int>> next(N_LAYERS);
    const auto                    settle = [&] {
        if (predictor.joinable()) {
            predictor.join();
        }
    };
    for (int pass = 0; pass < n_passes; ++pass) {
        const bool prompt   = pass % 8 == 7;
        const int  n_tokens = prompt ? 64 : 1 + (int) (rng() % 2);
        const auto popular  = random_experts(rng, 6);
        Computed   computed;
        for (int l = 0; l < N_LAYERS; ++l) {
            std::vector<int32_t> ids;
            for (int t = 0; t < n_tokens; ++t) {
                for (int e : rng() % 2 && !next[l].empty() && !prompt ? next[l] : random_experts(rng, N_USED)) {
                    ids.push_back(e);
                }
            }
            std::vector<int> experts(ids.begin(), ids.end());
            std::sort(experts.begin(), experts.end());
            experts.erase(std::unique(experts.begin(), experts.end()), experts.end());
            RoutedBatch batch = {};
            batch.layer       = l;
            batch.decode      = !prompt;
            batch.n_tokens    = n_tokens;
            batch.n_expert    = N_EXPERT;
            batch.n_used      = N_USED;
            batch.experts     = ids.data();
            batch.way         = tier.takes_area(batch.layer, n_tokens, !prompt) ? Way::AREA_BESIDE :
                tier.brings_behind()                                            ? Way::SLOTS_OVERLAPPED :
                                                                                  Way::SLOTS_BESIDE;
            check(tier, table, computed); // until now
            if (seed % 2) {               // else predictors have changed: their forecasts may come at any time
                settle();
            }
            batch.wanted = batch.asked = experts;
            const Visit visit          = { owner.context, l, true, experts };
            tier.choose(hold, batch, visit);
            if (batch.overlaps() && pass % 5 == 4 && l == 1) { // aborted while the device computes
                tier.release(hold);
                computed = {};
                break;
            }
            if (batch.overlaps()) {
                tier.replace(batch, visit);
            }
            std::vector<int> here;
            std::copy_if(experts.begin(), experts.end(), std::back_inserter(here),
                [&](int e) { return batch.device.slots.empty() || batch.device.slots[e] < 0; });
            table.acquire(owner, l, { here, here, n_tokens, true, true, !batch.device.slots.empty() });
            settle();
            const int to    = (l + 1) % N_LAYERS;
            const int then  = (l + 2) % N_LAYERS;
            next[then]      = random_experts(rng, N_USED);
            const int wrong = (int) (rng() % N_EXPERT);
            const int right = next[to].empty() ? wrong : next[to][1];
            predictor       = std::thread([&tier, &owner, to, then, right, wrong, later = next[then][0]] {
                tier.order(owner.context, then, { { later, 0, 2 } }, 0);
                tier.order(owner.context, to, { { right, 0, 1 }, { wrong, 1, 1 } }, 0);
            });
            if (!batch.device.slots.empty()) {
                tier.bring(owner, hold, batch);
            }
            computed = { batch.through_area(), l, batch.device.slots };
            if (table.release(owner)) {
                check(tier, table, computed);
            } else { // the decode fails
                computed = {};
            }
            n_computed += !batch.device.slots.empty();
            if (batch.through_area() && l == N_LAYERS - 1) {
                tier.release_areas(hold);
                computed = {}; // others have them now
            }
            if (pass % 7 == 6 && l == 3) { // aborted
                tier.release(hold);
                computed = {};
                break;
            }
            if (pass % 11 == 10 && l == 2) { // aborted and freed; another one takes its place
                tier.release(hold);
                settle();
                table.forget(owner);
                tier.forget(owner.context);
                computed = {};
                break;
            }
        }
        check(tier, table, computed);
    }
    settle();
    tier.release(hold);
    tier.forget(owner.context);
    table.release(owner);
}

static void change_about(DeviceTier & tier, int seed, const std::atomic<bool> & done) {
    std::mt19937 rng(seed);
    while (!done) {
        const int layer = (int) (rng() % N_LAYERS);
        try {
            switch (rng() % 5) {
            case 0: {
                const int max = N_EXPERT - (int) (rng() % 8);
                tier.set_limits(layer, (int) (rng() % 2), max);
                break;
            }
            case 1: {
                constexpr pyorch_policy POLICIES[] = { PYORCH_LFU, PYORCH_LRU };
                tier.set_policy(POLICIES[rng() % std::size(POLICIES)]);
                break;
            }
            case 2: tier.set_by_forecasts(rng() % 4 > 0); break;
            case 3: {
                std::vector<uint8_t> mask(N_EXPERT);
                tier.mark((int) (rng() % N_LAYERS), mask);
                break;
            }
            default: {
                pyorch_stats stats = {};
                tier.add_stats(-1, stats);
                CHECK(stats.device_used_bytes <= stats.device_budget_bytes);
                CHECK(stats.device_ahead_hits <= stats.device_ahead);
            }
            }
        } catch (const Failure & e) {
            CHECK(e.status == (tier.is_whole(layer) ? PYORCH_INVALID : PYORCH_BUDGET));
        }
        std::this_thread::yield();
    }
}

void stress_device(const char * path, int seed, int n_passes) {
    write_model(path);
    ModelMap      map(path);
    pyorch_config config = {};
    config.budget_bytes  = map.expert_bytes() / 2;
    config.read_bytes    = 48 * 1024;
    config.devices[0] = config.devices[1] = cpu_backend().device;
    Table table(map, std::make_unique<HostBank>(map, config.budget_bytes), std::make_unique<UnsteadySource>(map),
        plain_codec(), config);
    ReaderThreads reader(table.loader(), 2);
    const double  some = 2.0 / 3, nearly_all = 1 - 1e-6; // with whole layers
    for (const auto & [misses, ahead, share, ends] : {
             std::tuple(PYORCH_PROCESSOR, 2, some, std::vector<int>{ N_LAYERS }),
             std::tuple(PYORCH_UPLOAD, 2, some, std::vector<int>{ N_LAYERS }),
             std::tuple(PYORCH_PROCESSOR, 0, nearly_all, std::vector<int>{ N_LAYERS }),
             std::tuple(PYORCH_PROCESSOR, 2, some, std::vector<int>{ 5, N_LAYERS }),
             std::tuple(PYORCH_UPLOAD, 0, nearly_all, std::vector<int>{ 5, N_LAYERS }),
         }) {
        config.device_misses = misses;
        config.device_ahead  = ahead;
        config.n_devices     = ends.size();
        for (size_t i = 0; i < ends.size(); ++i) {
            const LayerRange layers = { i > 0 ? ends[i - 1] : 0, ends[i] };
            config.device_ends[i]   = ends[i];
            config.device_bytes[i]  = (uint64_t) (share * (double) expert_bytes(map, layers));
        }
        DeviceTier tier(table, config);
        tier.open(0);
        CHECK(!tier.has_room_for_all());
        for (const auto & bank : tier.banks.all()) {
            CHECK(bank->n_areas() >= (ends.size() == 1 ? 2 : 1));
        }
        std::atomic<bool>        done{ false };
        std::atomic<int>         n_computed{ 0 };
        std::thread              changes([&] { change_about(tier, seed, done); });
        std::vector<std::thread> contexts;
        for (int i = 0; i < N_CONTEXTS; ++i) {
            contexts.emplace_back([&, i] { decode(tier, table, seed * 7 + i, n_passes, n_computed); });
        }
        for (auto & t : contexts) {
            t.join();
        }
        done = true;
        changes.join();
        tier.wait_idle();
        pyorch_stats stats = {};
        tier.add_stats(-1, stats);
        CHECK(n_computed > 0 && stats.device_hits > 0 && (stats.device_ahead_hits > 0) == (ahead > 0));
        printf("%llu hits, %llu misses, %llu loads, %llu ordered, %llu of use, %llu of these late\n",
            (unsigned long long) stats.device_hits, (unsigned long long) stats.device_misses,
            (unsigned long long) stats.device_loads, (unsigned long long) stats.device_ahead,
            (unsigned long long) stats.device_ahead_hits, (unsigned long long) stats.device_ahead_late);
    }
}
