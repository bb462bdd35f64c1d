#include "engine.h"

#include "banks/host_bank.h"
#include "base/checksum.h"
#include "base/cpu_backend.h"
#include "loading/readers.h"
#include "model/layout.h"
#include "replay/policies/replay_policies.h"
#include "residency/simulated.h"

#include "ggml-backend.h"

#include <algorithm>

static std::unique_ptr<pyorch::Bank> make_bank(const pyorch::ModelMap & map, const pyorch_config & config,
    bool simulated, std::shared_ptr<pyorch::PageLocks> locks) {
    const uint64_t budget = std::min(config.budget_bytes, map.slots_bytes());
    if (simulated) {
        return std::make_unique<pyorch::SimulatedBank>(map, budget);
    }
    return std::make_unique<pyorch::HostBank>(map, budget, std::move(locks));
}

static std::shared_ptr<pyorch::PageLocks> make_locks(const pyorch_config & config, bool simulated) {
    if (config.n_devices == 0 || simulated) {
        return nullptr;
    }
    return std::make_shared<pyorch::PageLocks>(pyorch::devices_of(config));
}

static bool repacks(const pyorch::ModelMap & map) {
    for (const auto & layer : map.layers) {
        if (std::any_of(layer.tensors.begin(), layer.tensors.end(), pyorch::can_repack)) {
            return true;
        }
    }
    return false;
}

static const pyorch::Codec & codec_of(const pyorch::ModelMap & map, const pyorch_config & config, bool simulated) {
    if (simulated) {
        return pyorch::no_codec();
    }
    return config.plain || !repacks(map) ? pyorch::plain_codec() : pyorch::repacking_codec();
}

// Returns the numbers in the input and output rows of each layer's experts.
static std::vector<pyorch::LayerShape> shapes_of(const pyorch::ModelMap & map) {
    std::vector<pyorch::LayerShape> shapes;
    for (const auto & layer : map.layers) {
        pyorch::LayerShape shape = { layer.n_expert, 0, 0 };
        for (const auto & t : layer.tensors) {
            (t.role == "down" ? shape.n_out : shape.n_in) = (int) (t.role == "down" ? t.n_out : t.n_in);
        }
        shapes.push_back(shape);
    }
    return shapes;
}

// Returns, by layer and expert, the experts that no file of a share has.
static std::vector<std::vector<uint8_t>> lacking_of(const pyorch::ModelMap & map) {
    std::vector<std::vector<uint8_t>> lacking;
    for (const auto & layer : map.layers) {
        auto & of_layer = lacking.emplace_back();
        for (int expert = 0; expert < layer.n_expert; ++expert) {
            of_layer.push_back(layer.lacks(expert));
        }
    }
    return lacking;
}

uint64_t pyorch_engine::shape() const {
    std::string text = table.map.arch;
    for (const auto & layer : table.map.layers) {
        text += pyorch::format("\n%d %d", layer.il, layer.n_expert);
        for (const auto & t : layer.tensors) {
            text += pyorch::format(
                " %s %s [%lld, %lld]", t.role.c_str(), t.type.c_str(), (long long) t.n_in, (long long) t.n_out);
        }
    }
    return pyorch::checksum(text.data(), text.size());
}

uint64_t pyorch_engine::kernels() const {
    std::string text = PYORCH_VERSION;
    for (const auto & layer : table.map.layers) {
        for (size_t role = 0; role < layer.tensors.size(); ++role) {
            const auto * tensor = routing.find(layer.tensors[role].name.c_str());
            text += "\n" + (tensor && tensor->repacked ? pyorch::layout_name(layer.tensors[role]) : pyorch::PLAIN);
        }
    }
    const pyorch::CpuBackend & cpu = pyorch::cpu_backend();
    for (const auto * feature = cpu.features(cpu.registration); feature && feature->name; ++feature) {
        text += pyorch::format("\n%s %s", feature->name, feature->value);
    }
    return pyorch::checksum(text.data(), text.size());
}

pyorch_engine::pyorch_engine(const pyorch::ModelMap & map, const pyorch_config & config, bool simulated) :
        simulated(simulated), config(config), locks(make_locks(config, simulated)),
        table(map, make_bank(map, config, simulated, locks), pyorch::open_source(map, config),
            codec_of(map, config, simulated), config, simulated ? pyorch::replay_policies() : pyorch::policy_list()),
        routers((int) map.layers.size()), prefetcher(table, routers), remote(shapes_of(map), lacking_of(map)),
        routing(table, prefetcher, routers, remote, config.plain == 0, !simulated && !config.stock),
        reader(simulated ? nullptr : pyorch::make_reader(table.loader(), pyorch::plan_reads(config))),
        tiers({ &table, &remote }) {
    if (config.n_devices > 0 && !simulated) {
        device         = std::make_unique<pyorch::DeviceTier>(table, config, locks);
        routing.device = device.get();
        tiers.push_back(device.get());
        prefetcher.change([this](pyorch::PrefetchPlanner & planner) {
            planner.set_above(
                [this](const void * context, int layer, const std::vector<pyorch::ForecastExpert> & experts,
                    double precision) { device->order(context, layer, experts, precision); });
        });
    }
    remote.on_change(
        [this](int layer, const std::vector<uint8_t> & elsewhere) { table.set_elsewhere(layer, elsewhere); });
}

// The device is destroyed before the predicting thread.
pyorch_engine::~pyorch_engine() {
    prefetcher.change([](pyorch::PrefetchPlanner & planner) { planner.set_above({}); });
}
