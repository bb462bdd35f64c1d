#include "prediction/expert_maps.h"

#include "prediction/compact_matrix.h"

#include <algorithm>
#include <cmath>

namespace pyorch {
namespace {

double squares_of(const float * values, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; ++i) {
        sum += (double) values[i] * values[i];
    }
    return sum;
}

float inverse_root(double squares) { return squares > 0 ? (float) (1 / std::sqrt(squares)) : 0; }

} // namespace

ExpertMapStore::ExpertMapStore(int n_layers, int n_expert, int n_embd, int capacity, int distance) :
        n_layers(n_layers), n_expert(n_expert), n_embd(n_embd), capacity(capacity), distance(distance),
        layers(n_layers) {}

bool ExpertMapStore::add(const float * embedding, const float * map) {
    ExpertMapSearch iteration(*this);
    iteration.begin(embedding);
    for (int l = 0; l < n_layers; ++l) {
        iteration.observe(map + (size_t) l * n_expert, n_expert);
    }
    return iteration.add();
}

int ExpertMapStore::size() const {
    MutexLock lock(mutex);
    return (int) generation.size();
}

int ExpertMapStore::copy_to(float * embeddings_out, float * maps, int n) const {
    MutexLock lock(mutex);
    n = std::min(n, (int) generation.size());
    if (embeddings_out) {
        std::copy_n(embeddings.data(), (size_t) n * n_embd, embeddings_out);
    }
    for (int i = 0; i < n && maps; ++i) {
        for (const Layer & layer : layers) {
            maps = std::copy_n(layer.rows.data() + (size_t) i * n_expert, n_expert, maps);
        }
    }
    return n;
}

bool ExpertMapStore::row(const Match & match, int layer, float * probs, int n) const {
    MutexLock lock(mutex);
    if (generation[match.index] != match.generation) {
        return false;
    }
    std::copy_n(layers[layer].rows.data() + (size_t) match.index * n_expert, n, probs);
    return true;
}

void ExpertMapStore::put(size_t entry, const float * embedding, const float * map) {
    if (entry == generation.size()) {
        embeddings.resize((entry + 1) * n_embd);
        inverse_embedding_norm.resize(entry + 1);
        for (Layer & layer : layers) {
            layer.rows.resize((entry + 1) * n_expert);
            layer.inverse_norm.resize(entry + 1);
        }
        generation.push_back(0);
    }
    std::copy_n(embedding, n_embd, embeddings.data() + entry * n_embd);
    inverse_embedding_norm[entry] = inverse_root(squares_of(embedding, n_embd));
    double squares                = 0;
    for (Layer & layer : layers) {
        std::copy_n(map, n_expert, layer.rows.data() + entry * n_expert);
        squares += squares_of(map, n_expert);
        layer.inverse_norm[entry] = inverse_root(squares);
        map += n_expert;
    }
    generation[entry]++;
}

ExpertMapSearch::ExpertMapSearch(ExpertMapStore & store) :
        store(store), embedding(store.n_embd), map((size_t) store.n_layers * store.n_expert) {}

Match ExpertMapSearch::begin(const float * values) {
    known   = 0;
    squares = 0;
    if (values) {
        embedding.assign(values, values + store.n_embd);
    } else {
        std::fill(embedding.begin(), embedding.end(), 0.0f);
    }
    embedding_squares = squares_of(embedding.data(), store.n_embd);

    MutexLock lock(store.mutex);
    generation.clear();
    refresh();
    return best(semantic, store.inverse_embedding_norm, embedding_squares);
}

Match ExpertMapSearch::observe(const float * probs, int n) {
    const size_t E   = store.n_expert;
    float *      row = map.data() + known * E;
    std::copy_n(probs, n, row);
    std::fill(row + n, row + E, 0.0f);
    squares += squares_of(row, n);

    MutexLock lock(store.mutex);
    refresh();
    const auto & layer = store.layers[known++];
    for (size_t c = 0; c < trajectory.size(); ++c) {
        trajectory[c] += dot(layer.rows.data() + c * E, row, E);
    }
    return best(trajectory, layer.inverse_norm, squares);
}

bool ExpertMapSearch::add() {
    if (!std::isfinite(embedding_squares) || !std::isfinite(squares)) {
        return false;
    }
    MutexLock lock(store.mutex);
    refresh();
    size_t entry = store.generation.size();
    if (entry == (size_t) store.capacity) {
        const float  share        = std::min(1.0f, (float) store.distance / store.n_layers);
        const float  s            = share * inverse_root(embedding_squares);
        const float  t            = (1 - share) * inverse_root(squares);
        const auto & inverse_norm = store.layers.back().inverse_norm;
        float        most         = -2; // below every cosine
        entry                     = 0;
        for (size_t c = 0; c < store.generation.size(); ++c) {
            const float redundancy =
                s * semantic[c] * store.inverse_embedding_norm[c] + t * trajectory[c] * inverse_norm[c];
            if (redundancy > most) {
                most  = redundancy;
                entry = c;
            }
        }
    }
    store.put(entry, embedding.data(), map.data());
    return true;
}

// Computes the sums of new or replaced entries.
void ExpertMapSearch::refresh() {
    const size_t size = store.generation.size();
    const size_t E    = store.n_expert;
    const size_t seen = generation.size();
    semantic.resize(size);
    trajectory.resize(size);
    generation.resize(size);
    for (size_t c = 0; c < size; ++c) {
        if (c < seen && generation[c] == store.generation[c]) {
            continue;
        }
        generation[c] = store.generation[c];
        semantic[c]   = 0;
        trajectory[c] = 0;
        if (embedding_squares > 0) {
            semantic[c] = dot(store.embeddings.data() + c * store.n_embd, embedding.data(), store.n_embd);
        }
        for (int l = 0; l < known; ++l) {
            trajectory[c] += dot(store.layers[l].rows.data() + c * E, map.data() + l * E, E);
        }
    }
}

Match ExpertMapSearch::best(
    const std::vector<float> & dots, const std::vector<float> & inverse_norm, double own_squares) const {
    const float own   = inverse_root(own_squares);
    int         index = -1;
    float       most  = 0;
    for (size_t c = 0; c < dots.size() && own > 0; ++c) {
        const float scaled = dots[c] * inverse_norm[c];
        if (inverse_norm[c] > 0 && (index < 0 || scaled > most)) {
            most  = scaled;
            index = (int) c;
        }
    }
    if (index < 0) {
        return {};
    }
    return { index, std::max(-1.0f, std::min(most * own, 1.0f)), store.generation[index] };
}

} // namespace pyorch
