#include "prediction/expert_maps.h"
#include "prediction/predictor_list.h"

#include <algorithm>

namespace pyorch {
namespace {

// Predicts the experts of the past iteration with the most similar embedding, and later of the one with the most
// similar routing so far (FineMoE, sections 4.2 and 4.3). Decoded tokens are added to the history when they end.
class ExpertMap : public Predictor {
public:
    ExpertMap(std::shared_ptr<ExpertMapStore> history, std::vector<int> n_expert, Distances distance) :
            history(std::move(history)), n_expert(std::move(n_expert)), distance(std::move(distance)) {}

    void begin(const IterationBegin & iteration, std::vector<Forecast> & forecasts) override {
        auto & store = *history;
        n_tokens     = iteration.decode ? iteration.n_tokens : 0;
        while ((int) searches.size() < n_tokens) {
            searches.emplace_back(store);
        }
        const bool embedded = iteration.embeddings.size() == (size_t) iteration.n_tokens * store.n_embd;
        for (int t = 0; t < n_tokens; ++t) {
            const float * embedding = embedded ? iteration.embeddings.data() + (size_t) t * store.n_embd : nullptr;
            const Match   match     = searches[t].begin(embedding);
            for (int layer = 0; layer < store.n_layers; ++layer) {
                if (layer < distance[layer]) {
                    forecast(match, layer, layer + 1, t, forecasts);
                }
            }
        }
    }

    void routed(const RoutedLayer & routed_layer, std::vector<Forecast> & forecasts) override {
        auto & store = *history;
        if (routed_layer.layer >= store.n_layers) {
            return; // a layer that is not executed
        }
        n_used          = routed_layer.n_used;
        const int width = n_expert[routed_layer.layer];
        if (!n_tokens || routed_layer.n_tokens != n_tokens || searches[0].n_known() != routed_layer.layer ||
            routed_layer.probs.size() != (size_t) n_tokens * width) {
            n_tokens = 0; // different iterations: nothing is known until new ones begin
            return;
        }
        for (int t = 0; t < n_tokens; ++t) {
            const Match match = searches[t].observe(routed_layer.probs.data() + (size_t) t * width, width);
            for (int layer = routed_layer.layer + 1; layer < store.n_layers; ++layer) {
                if (layer - routed_layer.layer == distance[layer]) {
                    forecast(match, layer, distance[layer], t, forecasts);
                }
            }
            if (routed_layer.layer == store.n_layers - 1) {
                searches[t].add();
            }
        }
    }

private:
    const std::shared_ptr<ExpertMapStore> history;
    const std::vector<int>                n_expert;
    const Distances                       distance;
    std::vector<ExpertMapSearch>          searches; // by token
    int                                   n_tokens = 0;
    int                                   n_used   = 1;

    // Forecasts the likeliest experts whose probabilities reach a threshold, which is higher for a less similar past
    // iteration, and at least as many as a token uses (eqs. 6 to 8).
    void forecast(const Match & match, int layer, int ahead, int token, std::vector<Forecast> & forecasts) const {
        Forecast f = { layer, ahead, token, {}, std::vector<float>(n_expert[layer]), {} };
        if (match.index < 0 || !history->row(match, layer, f.probability.data(), n_expert[layer])) {
            return;
        }
        const float threshold = std::max(0.0f, std::min(1 - match.score, 1.0f));
        f.experts             = top(f.probability.data(), n_expert[layer], n_expert[layer]);
        float  sum            = 0;
        size_t n              = 0;
        while (n < f.experts.size() && (n < (size_t) n_used || sum < threshold)) {
            sum += f.probability[f.experts[n++]];
        }
        f.experts.resize(n);
        forecasts.push_back(std::move(f));
    }
};

} // namespace

std::unique_ptr<Predictor> make_expert_map(const PredictionModel & model, const Distances & distance) {
    return model.maps ? std::make_unique<ExpertMap>(model.maps, model.n_expert, distance) : nullptr;
}

} // namespace pyorch
