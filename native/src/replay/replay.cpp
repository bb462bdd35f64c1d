#include "replay/replay.h"

#include "base/cpu_time.h"
#include "residency/simulated.h"
#include "replay/simulated_device.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <numeric>
#include <utility>
#include <variant>

namespace pyorch {
namespace {

constexpr int MAX_DECODERS = 512;

SimulatedDisk disk_of(const pyorch_replay_config & config) {
    return { config.read_seconds, config.read_bytes_per_second, config.pause_seconds, config.period_seconds };
}

SimulatedDecoders decoders_of(const pyorch_replay_config & config) {
    const bool takes_time = config.decode_bytes_per_second > 0;
    return { (int) config.n_decoders, takes_time ? config.decode_bytes_per_second : INFINITY };
}

class Replay {
public:
    Replay(Table & table, PrefetchPlanner & planner, const std::vector<Router> & routers,
        const pyorch_recording & recording, const pyorch_replay_config & config, const RankCounts & ranks,
        double * ends, const ReplayWatch & watch) :
            table(table), planner(planner), routers(routers), rec(recording), config(config), ranks(ranks), ends(ends),
            watch(watch), n_layers(recording.n_layers),
            // A read that no layer needs any more may hold memory until it ends; meanwhile time passes.
            reader(table.loader(), disk_of(config), decoders_of(config), [this](double ended) { wait_until(ended); }),
            forecasts(table.map.layers.size()) {
        std::vector<int> executed(n_layers);
        std::iota(executed.begin(), executed.end(), 0);
        table.set_executed(executed);
        owner.context = this;
        if (config.device_bytes > 0) {
            device = std::make_unique<SimulatedDevice>(table, config);
        }
        collect_uses();
        planner.set_layers(this, executed);
        planner.set_oracle(
            [this](const std::vector<int> & distance) { return std::make_unique<Oracle>(*this, distance); });
        observer = planner.set_observer([this](const void * context, int from, const Forecast & new_forecast) {
            if (observer) {
                observer(context, from, new_forecast);
            }
            forecasts[new_forecast.layer].push_back({ forecasting + (from >= new_forecast.layer), new_forecast });
        });
        if (device && device->takes_forecasts()) {
            planner.set_above(
                [this](const void * context, int layer, const std::vector<ForecastExpert> & experts, double precision) {
                    device->order(context, layer, experts, precision, forecast_at);
                });
        }
    }

    ~Replay() {
        table.forget(owner);
        planner.set_oracle({});
        planner.set_above({});
        planner.set_observer(std::move(observer));
        planner.forget(this);
    }

    pyorch_replay_result run() {
        for (ubatch = 0; ubatch < rec.n_ubatches; ++ubatch) {
            if (ubatch == config.n_warm) {
                table.reset_stats();
                result = {};
                if (device) {
                    device->reset_counts();
                }
                reader.busy_seconds = reader.decode_seconds = 0;
            }
            play();
            if (ends) {
                ends[ubatch] = now;
            }
        }
        // No layer needs the remaining reads; finish them, so that the next replay on this engine starts without any.
        while (reader.at_work()) {
            reader.end_next();
        }
        if (device) {
            device->add_counts(result);
        }
        result.read_seconds        = reader.busy_seconds;
        result.decode_work_seconds = reader.decode_seconds;
        return result;
    }

private:
    // The input of forecasts, which is available from some time on.
    struct Pending {
        double                                    at;
        int64_t                                   ubatch;
        std::variant<IterationBegin, RoutedLayer> event;
    };

    struct Forecasted {
        int64_t  ubatch; // the forecast one
        Forecast forecast;
    };

    // Forecasts from the recording.
    class Oracle : public Predictor {
    public:
        Oracle(const Replay & replay, const std::vector<int> & distance) : replay(replay), distance(distance) {}

        void begin(const IterationBegin & iteration, std::vector<Forecast> & forecasts) override {
            forecast(-1, iteration.n_tokens, forecasts);
        }

        void routed(const RoutedLayer & routed_layer, std::vector<Forecast> & forecasts) override {
            forecast(routed_layer.layer, routed_layer.n_tokens, forecasts);
        }

    private:
        const Replay &         replay;
        const std::vector<int> distance;

        void forecast(int from, int n_tokens, std::vector<Forecast> & forecasts) const {
            const pyorch_recording & rec = replay.rec;
            for (int layer = from + 1; layer < rec.n_layers; ++layer) {
                const int ahead = layer - from;
                for (int t = 0; ahead <= std::min(distance[layer], rec.n_distances) && t < n_tokens; ++t) {
                    const size_t    row   = (size_t) replay.token_of(t) * rec.n_layers + layer;
                    const int16_t * begin = rec.forecasts + (row * rec.n_distances + ahead - 1) * rec.n_forecast;
                    const int16_t * end   = std::find(begin, begin + rec.n_forecast, -1);
                    if (begin < end) {
                        forecasts.push_back({ layer, ahead, t, std::vector<int>(begin, end), {}, {} });
                    }
                }
            }
        }
    };

    Table &                                         table;
    PrefetchPlanner &                               planner;
    const std::vector<Router> &                     routers;
    const pyorch_recording &                        rec;
    const pyorch_replay_config &                    config;
    const RankCounts                                ranks;
    double * const                                  ends;
    const ReplayWatch &                             watch;
    const int                                       n_layers;
    SimulatedReader                                 reader;
    std::unique_ptr<SimulatedDevice>                device;   // null: none
    PrefetchPlanner::Observer                       observer; // the engine's own
    Owner                                           owner;
    double                                          now         = 0;
    int64_t                                         ubatch      = 0;
    int64_t                                         forecasting = 0; // the ubatch of the present forecasts
    double                                          forecast_at = 0; // their time
    std::deque<Pending>                             pending;
    std::vector<std::vector<Forecasted>>            forecasts; // of future layers, by layer
    std::vector<std::vector<std::vector<uint64_t>>> uses;      // [layer][expert]: the ubatches, ascending
    pyorch_replay_result                            result = {};

    int64_t token_of(int t) const { return rec.order[rec.begin[ubatch] + t]; }

    const uint16_t * experts_of(int64_t token, int layer) const {
        return rec.experts + ((size_t) token * n_layers + layer) * rec.n_used;
    }

    void collect_uses() {
        for (int layer = 0; layer < n_layers; ++layer) {
            uses.emplace_back(table.map.layers[layer].n_expert);
            for (int64_t u = 0; u < rec.n_ubatches; ++u) {
                for (int64_t i = rec.begin[u]; i < rec.begin[u + 1]; ++i) {
                    const uint16_t * used = experts_of(rec.order[i], layer);
                    for (int s = 0; s < rec.n_used; ++s) {
                        auto & of_expert = uses[layer][used[s]];
                        if (of_expert.empty() || of_expert.back() != (uint64_t) u) {
                            of_expert.push_back((uint64_t) u);
                        }
                    }
                }
            }
            for (int e = 0; e < table.map.layers[layer].n_expert; ++e) {
                foresee(layer, e, 0);
            }
        }
    }

    // Tells the table the next use of an expert, from a ubatch on. The clock counts layers.
    void foresee(int layer, int expert, uint64_t from) {
        const auto &   all  = uses[layer][expert];
        const auto     next = std::lower_bound(all.begin(), all.end(), from);
        const uint64_t use  = next == all.end() ? UINT64_MAX : *next * n_layers + layer;
        table.foresee(layer, expert, use);
        if (device) {
            device->foresee(layer, expert, use);
        }
    }

    void run_until(double time) {
        while (!pending.empty() && pending.front().at <= time) {
            const Pending due = std::move(pending.front());
            pending.pop_front();
            reader.run_until(due.at);
            forecast(due);
            reader.run_until(due.at);
        }
        reader.run_until(time);
    }

    void forecast(const Pending & due) {
        forecasting          = due.ubatch;
        forecast_at          = due.at;
        const uint64_t began = clock_ns();
        if (const auto * layer = std::get_if<RoutedLayer>(&due.event)) {
            planner.routed(this, *layer);
        } else {
            planner.begin(this, std::get<IterationBegin>(due.event));
        }
        result.predict_wall_seconds += 1e-9 * (double) (clock_ns() - began);
    }

    // Lets time pass without computing.
    void wait_until(double time) {
        const double waited = std::max(0.0, time - now);
        now += waited;
        result.stall_seconds += rec.decode[ubatch] ? waited : 0;
    }

    void show(int layer) {
        if (watch) {
            watch(ubatch, layer, table, owner, device ? &device->table_of_slots() : nullptr);
        }
    }

    void play() {
        show(-1);
        const int    n_tokens = (int) (rec.begin[ubatch + 1] - rec.begin[ubatch]);
        const bool   decode   = rec.decode[ubatch] != 0;
        const double began    = now;
        const double compute  = decode ? config.compute_seconds : config.prefill_seconds * n_tokens;
        const double speed    = decode ? config.device_speed : config.device_prefill_speed;

        const bool predicts =
            (decode || (planner.needs() & PYORCH_NEEDS_ROUTERS)) && is_predicted(n_tokens, rec.n_used, rec.n_expert);

        IterationBegin begin = { decode, n_tokens, {} };
        for (int t = 0; rec.embeddings && decode && predicts && t < n_tokens; ++t) {
            const float * row = rec.embeddings + (size_t) token_of(t) * rec.n_embd;
            begin.embeddings.insert(begin.embeddings.end(), row, row + rec.n_embd);
        }
        pending.push_back({ now + config.predict_seconds, ubatch, std::move(begin) });
        const bool continues = follows_last();

        for (int layer = 0; layer < n_layers; ++layer) {
            const double share = compute / n_layers;
            pass(share * config.route_share / speed);
            std::vector<int> rows(rec.n_expert), experts;
            for (int t = 0; t < n_tokens; ++t) {
                const uint16_t * used = experts_of(token_of(t), layer);
                std::for_each(used, used + rec.n_used, [&](uint16_t e) { ++rows[e]; });
            }
            for (int e = 0; e < rec.n_expert; ++e) {
                if (rows[e] > 0) {
                    experts.push_back(e);
                }
            }
            count_ranks(layer, n_tokens, decode);
            for (int e : experts) {
                foresee(layer, e, ubatch + 1);
            }
            DevicePass       on_device;
            std::vector<int> here = experts; // computed by the processor
            std::vector<int> used = experts; // in host memory: the processor's experts, and uploads that pass through
            if (device) {
                while (device->takes_forecasts() && !pending.empty()) {
                    wait_until(pending.front().at);
                    run_until(now);
                }
                double at = now;
                on_device = device->begin({ this, layer, continues, experts }, n_tokens, decode, at);
                wait_until(at);
                const auto computes = [&](int e) { return on_device.computes(e); };
                const auto stays    = [&](int e) { return on_device.keeps(e); };
                here.erase(std::remove_if(here.begin(), here.end(), computes), here.end());
                used.erase(std::remove_if(used.begin(), used.end(), stays), used.end());
            }
            run_until(now);
            table.acquire(owner, layer, { here, used, n_tokens, continues, true, device != nullptr });
            reader.run_until(now);
            show(layer);
            if (predicts || (!decode && (planner.needs() & PYORCH_NEEDS_FUTURE))) {
                pending.push_back({ now + config.predict_seconds, ubatch, routed_layer(layer, n_tokens, decode) });
            }
            // In a decoding ubatch an expert's time does not depend on the number of tokens that share it.
            const double each =
                share * (1 - config.route_share) / (decode ? (double) rec.n_used : (double) experts.size());
            if (device) {
                bring(layer, on_device, here);
            }
            // Processor and device start at the same time.
            const double device_ends = now + each * (double) (experts.size() - here.size()) / speed;
            compute_layer(layer, here, each);
            pass(std::max(0.0, device_ends - now));
            table.release(owner);
            reader.run_until(now);
            show(layer);
        }
        result.n_tokens += n_tokens;
        result.seconds += now - began;
        if (decode) {
            result.n_decoded += n_tokens;
            result.decode_seconds += now - began;
        }
    }

    // Returns whether each sequence continues the last ubatch by one token.
    bool follows_last() const {
        const int64_t n = rec.begin[ubatch + 1] - rec.begin[ubatch];
        if (ubatch == 0 || rec.begin[ubatch] - rec.begin[ubatch - 1] != n) {
            return false;
        }
        for (int64_t i = rec.begin[ubatch]; i < rec.begin[ubatch + 1]; ++i) {
            const int64_t token = rec.order[i], before = rec.order[i - n];
            if (token != before + 1 || rec.request[token] != rec.request[before]) {
                return false;
            }
        }
        return true;
    }

    void pass(double seconds) {
        now += seconds;
        run_until(now);
    }

    // Removes from `here` the experts that reach the device before the layer is computed.
    void bring(int layer, const DevicePass & on_device, std::vector<int> & here) {
        for (int role = 0; role < (int) table.map.layers[layer].tensors.size(); ++role) {
            for (int e : on_device.uploads) {
                if (!owner.stream || owner.stream->place_of[e] < 0) { // an expert in the window stays here
                    wait_for(layer, e, role);
                }
            }
        }
        std::vector<uint8_t> on_time;
        wait_until(device->bring(owner, on_device, now, on_time));
        run_until(now);
        here.erase(std::remove_if(here.begin(), here.end(), [&](int e) { return on_time[e] != 0; }), here.end());
    }

    // Computes matrix by matrix, in the order of the kernels, and for each matrix the resident experts first. A
    // streamed layer computes one expert after another. seconds: for one expert.
    void compute_layer(int layer, const std::vector<int> & experts, double seconds) {
        const int    n_roles = (int) table.map.layers[layer].tensors.size();
        const double each    = seconds / n_roles;
        for (int role = 0; role < n_roles; ++role) {
            std::vector<int> absent;
            for (int e : experts) {
                run_until(now);
                if (owner.stream) {
                    wait_for(layer, e, role);
                } else if (!table.address(owner, layer, e, role, false)) {
                    absent.push_back(e);
                    continue;
                }
                now += each;
            }
            for (int e : absent) {
                run_until(now);
                wait_for(layer, e, role);
                now += each;
            }
        }
        run_until(now);
    }

    // Waits for a matrix; forecasts that become available meanwhile are made at their time.
    void wait_for(int layer, int expert, int role) {
        while (!table.address(owner, layer, expert, role, false) && reader.at_work()) {
            wait_until(next_event());
            run_until(now);
        }
    }

    // REQUIRES: a read or a decode is running.
    double next_event() const {
        const double ends = reader.ends_at();
        return pending.empty() ? ends : std::min(ends, pending.front().at);
    }

    RoutedLayer routed_layer(int layer, int n_tokens, bool decode) const {
        RoutedLayer routed_layer;
        routed_layer.layer    = layer;
        routed_layer.n_tokens = n_tokens;
        routed_layer.n_used   = rec.n_used;
        routed_layer.decode   = decode;
        const unsigned needs  = planner.needs();
        const Router & router = routers[layer];
        for (int t = 0; t < n_tokens; ++t) {
            const size_t     at   = (size_t) token_of(t) * n_layers + layer;
            const uint16_t * used = rec.experts + at * rec.n_used;
            routed_layer.experts.insert(routed_layer.experts.end(), used, used + rec.n_used);
            routed_layer.weights.insert(
                routed_layer.weights.end(), rec.weights + at * rec.n_used, rec.weights + (at + 1) * rec.n_used);
            if ((needs & PYORCH_NEEDS_DISTRIBUTIONS) && rec.probs) {
                routed_layer.probs.insert(
                    routed_layer.probs.end(), rec.probs + at * rec.n_expert, rec.probs + (at + 1) * rec.n_expert);
            }
            if (rec.states && (needs & PYORCH_NEEDS_STATES)) {
                const float * state = rec.states + at * rec.n_embd;
                routed_layer.residuals.insert(routed_layer.residuals.end(), state, state + rec.n_embd);
                double squares = 0;
                for (int i = 0; i < rec.n_embd; ++i) {
                    squares += (double) state[i] * state[i];
                }
                const float scale = router.norm ? (float) (1 / std::sqrt(squares / rec.n_embd + router.eps)) : 1;
                for (int i = 0; i < rec.n_embd; ++i) {
                    routed_layer.inputs.push_back(state[i] * (router.norm ? scale * router.norm[i] : 1));
                }
            }
        }
        routed_layer.computed = routed_layer.experts;
        return routed_layer;
    }

    // Counts forecasts; forecasts after the start of their layer do not count.
    void count_ranks(int layer, int n_tokens, bool decode) {
        const std::vector<Forecasted> of_layer = std::exchange(forecasts[layer], {});
        if (!ranks.right || !decode || ubatch < config.n_warm) {
            return;
        }
        for (const auto & [for_ubatch, f] : of_layer) {
            if (for_ubatch != ubatch || f.distance > ranks.max_distance || f.token >= n_tokens) {
                continue;
            }
            const uint16_t * used = experts_of(token_of(f.token), layer);
            for (int r = 0; r < std::min<int>(ranks.n_ranks, (int) f.experts.size()); ++r) {
                const size_t at = ((size_t) layer * ranks.max_distance + f.distance - 1) * ranks.n_ranks + r;
                ++ranks.total[at];
                ranks.right[at] += std::find(used, used + rec.n_used, f.experts[r]) != used + rec.n_used;
            }
        }
    }
};

} // namespace

void check_recording(const ModelMap & map, const pyorch_recording & rec, const pyorch_replay_config & config) {
    if (rec.n_layers < 1 || (size_t) rec.n_layers > map.layers.size() || rec.n_used < 1 || rec.n_tokens < 1) {
        throw Failure(PYORCH_INVALID,
            format("a recording of %lld tokens in %d layers with %d experts used does not fit a model of %zu layers",
                (long long) rec.n_tokens, rec.n_layers, rec.n_used, map.layers.size()));
    }
    const int64_t n_uses = rec.n_tokens * rec.n_layers * rec.n_used;
    for (int l = 0; l < rec.n_layers; ++l) {
        const auto & layer = map.layers[l];
        if (layer.n_expert != rec.n_expert) {
            throw Failure(PYORCH_INVALID,
                format("layer %d has %d experts, the recording %d", layer.il, layer.n_expert, rec.n_expert));
        }
    }
    if (std::any_of(rec.experts, rec.experts + n_uses, [&](uint16_t e) { return e >= rec.n_expert; })) {
        throw Failure(PYORCH_INVALID, format("the recording names experts beyond %d", rec.n_expert - 1));
    }
    const int64_t n_forecast = rec.n_tokens * rec.n_layers * rec.n_distances * rec.n_forecast;
    if (rec.n_distances < 0 || rec.n_forecast < 0 || (n_forecast > 0 && !rec.forecasts) ||
        std::any_of(
            rec.forecasts, rec.forecasts + n_forecast, [&](int16_t e) { return e < -1 || e >= rec.n_expert; })) {
        throw Failure(PYORCH_INVALID, format("the forecasts name experts beyond %d", rec.n_expert - 1));
    }
    for (int64_t u = 0; u < rec.n_ubatches; ++u) {
        if (rec.begin[u] >= rec.begin[u + 1]) {
            throw Failure(PYORCH_INVALID, "a replay needs ubatches of at least one token");
        }
    }
    if (std::any_of(
            rec.order, rec.order + rec.begin[rec.n_ubatches], [&](int64_t t) { return t < 0 || t >= rec.n_tokens; })) {
        throw Failure(PYORCH_INVALID,
            format("a replay names tokens that the recording of %lld does not have", (long long) rec.n_tokens));
    }
    if (config.device_misses > PYORCH_UPLOAD) {
        throw Failure(PYORCH_INVALID, "a replay of a device needs a rule for experts that the device lacks");
    }
    if (!(config.device_speed > 0) || !(config.device_prefill_speed > 0)) {
        throw Failure(PYORCH_INVALID, "a device computes at a speed above 0");
    }
    if (config.device_ahead > SlotPools::MOST_AHEAD) {
        throw Failure(PYORCH_INVALID,
            format("a replay takes no more than %d forecasts of a layer to a device", SlotPools::MOST_AHEAD));
    }
    if (!(config.read_bytes_per_second > 0) || !(config.read_seconds >= 0) || !(config.compute_seconds >= 0) ||
        !(config.prefill_seconds >= 0) || !(config.predict_seconds >= 0) || !(config.decode_bytes_per_second >= 0) ||
        !(config.link_bytes_per_second >= 0) || config.n_decoders < 1 || config.n_decoders > MAX_DECODERS ||
        !(config.pause_seconds >= 0) || (config.pause_seconds > 0 && !(config.period_seconds > config.pause_seconds)) ||
        !(config.route_share >= 0 && config.route_share <= 1)) {
        throw Failure(PYORCH_INVALID,
            "a replay needs a bandwidth above 0, times that are not negative, shares from 0 to 1, 1 to "
            "512 decoders, and pauses shorter than their period");
    }
}

pyorch_replay_result replay(Table & table, PrefetchPlanner & planner, const std::vector<Router> & routers,
    const pyorch_recording & recording, const pyorch_replay_config & config, const RankCounts & ranks, double * ends,
    const ReplayWatch & watch) {
    for (const Router & router : routers) {
        if (recording.states && router && router.n_embd != recording.n_embd) {
            throw Failure(PYORCH_INVALID,
                format("routers take %d values, the recording's states have %d", router.n_embd, recording.n_embd));
        }
    }
    return Replay(table, planner, routers, recording, config, ranks, ends, watch).run();
}

} // namespace pyorch
