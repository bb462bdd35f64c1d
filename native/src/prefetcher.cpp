#include "prefetcher.h"

#include <algorithm>

namespace pyorch {

// More layers than this waiting: the thread does not get its turn, and what it would predict has passed.
static constexpr size_t MAX_WAITING = 4;

// Counts of about so many predictions ago have faded.
static constexpr double MEMORY = 200;

void Precision::add(bool hit) {
    const double fade = 1 - 1 / MEMORY;
    hits  = hits  * fade + hit;
    total = total * fade + 1;
}

Prefetcher::Prefetcher(ResidencyTable & table, std::function<std::vector<RouterWeights>()> routers) :
        table(table), routers(std::move(routers)) {
    precision.resize(table.map.layers.size());
}

Prefetcher::~Prefetcher() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopped = true;
    }
    work.notify_all();
    if (thread.joinable()) {
        thread.join();
    }
}

void Prefetcher::set(pyorch_predictor kind_, int distance_, double min_precision_, bool automatic_) {
    std::lock_guard<std::mutex> state_lock(state_mutex);
    std::lock_guard<std::mutex> lock(mutex);
    kind          = kind_;
    distance      = distance_;
    min_precision = min_precision_;
    automatic     = automatic_;
    controller    = {};
    timed_context = nullptr;
    streams.clear();
    queue.clear();
    for (size_t layer = 0; layer < precision.size(); ++layer) {
        precision[layer].assign((size_t) distance * table.map.layers[layer].n_expert, Precision());
    }
    wants_layers = kind != PYORCH_PREDICT_NONE;
    wanted       = needs_of(kind);
    if (wants_layers && !thread.joinable()) {
        thread = std::thread([this] { run(); });
    }
}

void Prefetcher::set_default_vectors(int layer, std::vector<float> vectors) {
    std::lock_guard<std::mutex> lock(state_mutex);
    auto changed = defaults ? std::make_shared<DefaultVectors>(*defaults) : std::make_shared<DefaultVectors>(table.map.layers.size());
    (*changed)[layer] = std::move(vectors);
    defaults = changed;
    streams.clear(); // their predictors have the old ones
}

void Prefetcher::set_observer(Observer observer_) {
    std::lock_guard<std::mutex> lock(state_mutex);
    observer = std::move(observer_);
}

bool Prefetcher::wants(const void * context, int layer) {
    if (!wants_layers.load(std::memory_order_relaxed)) {
        return false;
    }
    std::lock_guard<std::mutex> lock(mutex);
    if (!automatic) {
        return true;
    }
    if (layer == 0) {
        const auto now = std::chrono::steady_clock::now();
        // Contexts that run at once would be taken for one slow token.
        if (timed_context == context) {
            controller.token(std::chrono::duration<double>(now - token_begin).count());
        }
        timed_context = context;
        token_begin   = now;
    }
    return controller.on();
}

void Prefetcher::routed(const void * context, RoutedLayer && layer) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (queue.size() >= MAX_WAITING) {
            queue.pop_front();
        }
        queue.emplace_back(context, std::move(layer));
    }
    work.notify_one();
}

Precision & Prefetcher::precision_of(const Prediction & it) {
    return precision[it.layer][(size_t) (it.distance - 1) * table.map.layers[it.layer].n_expert + it.rank];
}

void Prefetcher::run() {
    while (true) {
        std::unique_lock<std::mutex> lock(mutex);
        work.wait(lock, [&] { return stopped || !queue.empty(); });
        if (stopped) {
            return;
        }
        const auto [context, layer] = std::move(queue.front());
        queue.pop_front();
        lock.unlock();

        std::lock_guard<std::mutex> state_lock(state_mutex);
        Stream & stream = streams[context];
        if (!stream.predictor) {
            std::vector<int> n_expert;
            for (const auto & l : table.map.layers) {
                n_expert.push_back(l.n_expert);
            }
            stream.predictor = make_predictor(kind, routers(), defaults, n_expert, distance);
            stream.open.resize(n_expert.size());
        }
        if (stream.predictor) {
            predict(stream, context, layer);
        }
    }
}

void Prefetcher::predict(Stream & stream, const void * context, const RoutedLayer & layer) {
    auto & open = stream.open[layer.layer];
    for (const Prediction & it : open) {
        const bool came_true = std::find(layer.experts.begin(), layer.experts.end(), it.expert) != layer.experts.end();
        precision_of(it).add(came_true);
    }
    open.clear();

    std::vector<Prediction> predictions;
    stream.predictor->routed(layer, predictions);
    // Several tokens may want the same expert: its best rank counts.
    std::stable_sort(predictions.begin(), predictions.end(), [](const Prediction & a, const Prediction & b) {
        return a.layer != b.layer ? a.layer < b.layer : a.rank < b.rank;
    });
    std::vector<Prediction> each;
    for (const Prediction & it : predictions) {
        if (std::none_of(each.begin(), each.end(), [&](const Prediction & o) { return o.layer == it.layer && o.expert == it.expert; })) {
            each.push_back(it);
        }
    }

    std::vector<int32_t> experts;
    std::vector<ResidencyTable::Want> wants;
    for (size_t i = 0; i < each.size(); ++i) {
        const Prediction & it = each[i];
        const double       p  = precision_of(it).value();
        wants.push_back({ it.expert, p, p >= min_precision, false });
        experts.push_back(it.expert);
        if (i + 1 == each.size() || each[i + 1].layer != it.layer) {
            table.want(it.layer, wants);
            auto & opened = stream.open[it.layer];
            for (size_t w = 0; w < wants.size(); ++w) {
                if (wants[w].absent) {
                    opened.push_back(each[i + 1 - wants.size() + w]);
                }
            }
            if (observer) {
                observer(context, layer.layer, it.layer, experts);
            }
            wants.clear();
            experts.clear();
        }
    }
}

} // namespace pyorch
