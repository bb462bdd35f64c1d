// The predictor that learns from history, on numbers from stdin.
//
//     expert_map N_LAYERS N_EXPERT N_EMBD CAPACITY DISTANCE
//
// Each line is an event: what the predictor is shown, or what others put into its store meanwhile:
//
//     begin DECODE N_TOKENS HAS_EMBEDDINGS [embeddings]
//     routed LAYER N_TOKENS N_USED DECODE HAS_PROBS experts [probs]
//     add [embedding] [map]
//
// After each it prints the forecasts, "LAYER DISTANCE TOKEN N_EXPERTS experts [probability]", and then
// "size N_MAPS".

#include "prediction/expert_maps.h"
#include "prediction/predictor_list.h"

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>

template <typename T>
static std::vector<T> read(size_t n) {
    std::vector<T> values(n);
    for (T & value : values) {
        std::cin >> value;
    }
    return values;
}

int main(int argc, char ** argv) {
    if (argc != 6) {
        return 2;
    }
    int n[5];
    for (int i = 0; i < 5; ++i) {
        n[i] = atoi(argv[i + 1]);
    }
    const auto [n_layers, n_expert, n_embd, capacity, distance] = n;
    pyorch::PredictionModel model;
    model.n_expert.assign(n_layers, n_expert);
    model.maps            = std::make_shared<pyorch::ExpertMapStore>(n_layers, n_expert, n_embd, capacity, distance);
    const auto  predictor = pyorch::make_expert_map(model, std::vector<int>(n_layers, distance));
    std::string event;
    while (std::cin >> event) {
        std::vector<pyorch::Forecast> forecasts;
        if (event == "begin") {
            const auto head       = read<int>(3);
            const auto embeddings = read<float>((size_t) head[2] * head[1] * n_embd);
            predictor->begin({ head[0] != 0, head[1], embeddings }, forecasts);
        } else if (event == "routed") {
            const auto          head         = read<int>(5);
            pyorch::RoutedLayer routed_layer = {};
            routed_layer.layer               = head[0];
            routed_layer.n_tokens            = head[1];
            routed_layer.n_used              = head[2];
            routed_layer.decode              = head[3] != 0;
            routed_layer.experts             = read<int32_t>((size_t) routed_layer.n_tokens * routed_layer.n_used);
            routed_layer.probs               = read<float>((size_t) head[4] * routed_layer.n_tokens * n_expert);
            predictor->routed(routed_layer, forecasts);
        } else {
            const auto embedding = read<float>(n_embd);
            model.maps->add(embedding.data(), read<float>((size_t) n_layers * n_expert).data());
        }
        for (const auto & f : forecasts) {
            printf("%d %d %d %zu", f.layer, f.distance, f.token, f.experts.size());
            for (int e : f.experts) {
                printf(" %d", e);
            }
            for (float p : f.probability) {
                printf(" %.9g", p);
            }
            printf("\n");
        }
        printf("size %d\n", model.maps->size());
    }
}
