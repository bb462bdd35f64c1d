#include "prediction/expert_maps.h"
#include "replay/predictors/compared.h"

#include <algorithm>

namespace pyorch {
namespace {

// What the past request used that is most alike in its counts of uses so far (MoE-Infinity). While there is none, what
// this request itself used.
class ActivationMatrix : public Predictor {
public:
    ActivationMatrix(std::shared_ptr<ExpertMaps> history, std::vector<int> n_expert, std::vector<int> distance) :
            history(std::move(history)), n_expert(std::move(n_expert)), distance(std::move(distance)),
            request(this->history->requests) {}

    void begin(const IterationBegin & iteration, std::vector<Forecast> & forecasts) override {
        if (iteration.request) {
            request.add();
            request.begin();
        }
        if (iteration.decode) {
            forecast(-1, iteration.n_tokens, forecasts);
        }
    }

    void routed(const RoutedLayer & routed_layer, std::vector<Forecast> & forecasts) override {
        if (routed_layer.layer >= history->requests.n_layers) {
            return; // of layers that a decode does not pass
        }
        n_used = routed_layer.n_used;
        request.count(routed_layer.layer, routed_layer.experts.data(), routed_layer.experts.size());
        if (routed_layer.decode) {
            forecast(routed_layer.layer, routed_layer.n_tokens, forecasts);
        }
    }

private:
    const std::shared_ptr<ExpertMaps> history;
    const std::vector<int>            n_expert;
    const std::vector<int>            distance;
    ActivationMatrixSearch            request;
    int                               n_used = 1;

    // Once `from` was routed, -1: before any was. All tokens are the same request's.
    void forecast(int from, int n_tokens, std::vector<Forecast> & forecasts) {
        const Match match = request.nearest();
        for (int layer = from + 1; layer < history->requests.n_layers; ++layer) {
            if (from < 0 ? layer >= distance[layer] : layer - from != distance[layer]) {
                continue;
            }
            Forecast f = { layer, layer - from, 0, {}, std::vector<float>(n_expert[layer]), {} };
            float *  p = f.probability.data();
            if (match.index < 0 ? !request.row(layer, p, n_expert[layer]) :
                                  !history->requests.row(match, layer, p, n_expert[layer])) {
                continue;
            }
            f.experts = top(p, n_expert[layer], 2 * n_used);
            while (!f.experts.empty() && p[f.experts.back()] == 0) {
                f.experts.pop_back();
            }
            for (f.token = 0; f.token < n_tokens; ++f.token) {
                forecasts.push_back(f);
            }
        }
    }
};

} // namespace

std::unique_ptr<Predictor> make_activation_matrix(const PredictionModel & model, const std::vector<int> & distance) {
    return model.maps ? std::make_unique<ActivationMatrix>(model.maps, model.n_expert, distance) : nullptr;
}

} // namespace pyorch
