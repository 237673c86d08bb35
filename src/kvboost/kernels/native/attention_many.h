// Up to 48 query rows against a tile of keys: rows across lanes, so one element of a key or value, broadcast, serves
// them all: S^T[key][row] = K Q^T, then O^T[dim][row] += V^T P^T, and the softmax of all rows runs in lanes.
#pragma once

#include "attention_task.h"

namespace kvb {

constexpr int UNROLL = 8;  // keys or dims whose accumulators are live at once

// A row as fp32: the pool's own memory, or a converted copy.
inline const float* as_float(const float* row, float*, int) { return row; }
inline const float* as_float(const bf16* row, float* copy, int n) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store(copy + i, load(row + i));
    for (; i < n; ++i) copy[i] = widen(row[i]);
    return copy;
}

// scores[(j * V + v) * 16]: S^T of n keys.
template <int V> void many_scores(const float* query, const float* const* keys, int n, int dim, float* scores) {
    int j = 0;
    for (; j + UNROLL <= n; j += UNROLL) {
        vec acc[UNROLL][V] = {};
        for (int d = 0; d < dim; ++d) {
            vec q[V];
            for (int v = 0; v < V; ++v) q[v] = load(query + (d * V + v) * LANES);
            for (int u = 0; u < UNROLL; ++u)
                for (int v = 0; v < V; ++v) acc[u][v] += q[v] * keys[j + u][d];
        }
        for (int u = 0; u < UNROLL; ++u)
            for (int v = 0; v < V; ++v) store(scores + ((j + u) * V + v) * LANES, acc[u][v]);
    }
    for (; j < n; ++j) {
        vec acc[V] = {};
        for (int d = 0; d < dim; ++d)
            for (int v = 0; v < V; ++v) acc[v] += load(query + (d * V + v) * LANES) * keys[j][d];
        for (int v = 0; v < V; ++v) store(scores + (j * V + v) * LANES, acc[v]);
    }
}

// O^T = O^T * scale + V^T P^T.
template <int V>
void many_values(const float* weights, const float* const* values, int n, int v_dim, const vec* scale, float* out) {
    int d = 0;
    for (; d + UNROLL <= v_dim; d += UNROLL) {
        vec acc[UNROLL][V];
        for (int u = 0; u < UNROLL; ++u)
            for (int v = 0; v < V; ++v) acc[u][v] = load(out + ((d + u) * V + v) * LANES) * scale[v];
        for (int j = 0; j < n; ++j) {
            const float* value = values[j] + d;
            vec p[V];
            for (int v = 0; v < V; ++v) p[v] = load(weights + (j * V + v) * LANES);
            for (int u = 0; u < UNROLL; ++u)
                for (int v = 0; v < V; ++v) acc[u][v] += p[v] * value[u];
        }
        for (int u = 0; u < UNROLL; ++u)
            for (int v = 0; v < V; ++v) store(out + ((d + u) * V + v) * LANES, acc[u][v]);
    }
    for (; d < v_dim; ++d)
        for (int v = 0; v < V; ++v) {
            vec acc = load(out + (d * V + v) * LANES) * scale[v];
            for (int j = 0; j < n; ++j) acc += load(weights + (j * V + v) * LANES) * values[j][d];
            store(out + (d * V + v) * LANES, acc);
        }
}

inline ivec sees(ivec position, int key, int window) {
    ivec seen = position >= isplat(key);
    if (window) seen &= position - isplat(window) < isplat(key);
    return seen;
}

// Scores, times `factor`, to weights, in place, with the running maximum and sum; `scale` is the factor for what was summed before.
template <int V>
void many_softmax(float* scores, int at, int n, const ivec* position, const Options& options, float factor,
                  bool all_seen, vec* peak, vec* total, vec* scale) {
    const bool changed = factor != 1 || options.softcap != 0 || !all_seen;
    vec top[V];
    for (int v = 0; v < V; ++v) top[v] = peak[v];
    for (int j = 0; j < n; ++j)
        for (int v = 0; v < V; ++v) {
            float* place = scores + (j * V + v) * LANES;
            vec s = load(place) * factor;
            if (options.softcap != 0) s = tanh(s / options.softcap) * options.softcap;
            if (!all_seen) s = select(sees(position[v], at + j, options.window), s, splat(NONE));
            if (changed) store(place, s);
            top[v] = vmax(s, top[v]);
        }
    for (int v = 0; v < V; ++v) {
        scale[v] = exp(peak[v] - top[v]);
        total[v] *= scale[v];
        peak[v] = top[v];
    }
    for (int j = 0; j < n; ++j)
        for (int v = 0; v < V; ++v) {
            float* place = scores + (j * V + v) * LANES;
            vec p = exp(load(place) - peak[v]);
            if (!all_seen) p = select(sees(position[v], at + j, options.window), p, vec{});
            total[v] += p;
            store(place, p);
        }
}

// The products of a task, in fp32 by vectors. Another class with these members computes them otherwise.
template <int V, typename T> struct VectorTiles {
    static constexpr int ALIGNMENT = 1;     // of the first key of a tile
    static constexpr bool SCALED = true;    // the query is scaled before, not the scores
    const Call<T>& call;
    const Task& task;
    Scratch& scratch;

    void load_query() {
        const int dim = call.shape.dim;
        for (int r = 0; r < V * LANES; ++r) {
            const T* q = call.query_row(task, std::min(r, task.rows - 1));  // spare lanes repeat the last row
            for (int d = 0; d < dim; ++d)
                scratch.query[(d * V + r / LANES) * LANES + r % LANES] = widen(q[d]) * call.options.scaling;
        }
    }
    void scores(int at, int n) {
        const int dim = call.shape.dim;
        const float* rows[KEYS];
        for (int j = 0; j < n; ++j) {
            rows[j] = as_float(call.key(task, at + j), scratch.rows + j * dim, dim);
            prefetch(call.value(task, at + j), call.shape.v_dim * sizeof(T));
        }
        many_scores<V>(scratch.query, rows, n, dim, scratch.scores);
    }
    // `to`: where the keys end.
    void values(int at, int n, int to, const vec* scale) {
        const int v_dim = call.shape.v_dim;
        const float* rows[KEYS];
        for (int j = 0; j < n; ++j) {
            rows[j] = as_float(call.value(task, at + j), scratch.rows + j * v_dim, v_dim);
            if (at + n + j < to) prefetch(call.key(task, at + n + j), call.shape.dim * sizeof(T));
        }
        many_values<V>(scratch.scores, rows, n, v_dim, scale, scratch.out);
    }
};

template <int V, typename T, typename Tiles> void many_rows_of(const Call<T>& call, const Task& task, Scratch& scratch) {
    const Range range(call, task, Tiles::ALIGNMENT);
    Tiles tiles{call, task, scratch};
    ivec position[V];
    vec peak[V], total[V], scale[V];
    for (int v = 0; v < V; ++v) {
        peak[v] = splat(NONE);
        total[v] = vec{};
        for (int i = 0; i < LANES; ++i) position[v][i] = call.position(task, std::min(v * LANES + i, task.rows - 1));
    }
    tiles.load_query();
    std::fill(scratch.out, scratch.out + call.shape.v_dim * V * LANES, 0.0f);
    for (int at = range.from; at < range.to; at += KEYS) {
        const int n = std::min(KEYS, range.to - at);
        tiles.scores(at, n);
        many_softmax<V>(scratch.scores, at, n, position, call.options, Tiles::SCALED ? 1.0f : call.options.scaling,
                        range.all_seen(at, n, call.options.window), peak, total, scale);
        tiles.values(at, n, range.to, scale);
    }
    for (int v = 0; v < V; ++v) {
        store(scratch.peak + v * LANES, peak[v]);
        store(scratch.total + v * LANES, total[v]);
    }
    scratch.row_stride = 1;
    scratch.dim_stride = V * LANES;
}

template <template <int, typename> class Tiles, typename T>
void many_rows(const Call<T>& call, const Task& task, Scratch& scratch) {
    if (task.rows <= LANES) return many_rows_of<1, T, Tiles<1, T>>(call, task, scratch);
    if (task.rows <= 2 * LANES) return many_rows_of<2, T, Tiles<2, T>>(call, task, scratch);
    many_rows_of<3, T, Tiles<3, T>>(call, task, scratch);
}

}  // namespace kvb
