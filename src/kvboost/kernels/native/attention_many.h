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

// Scores to weights, in place, with the running maximum and sum; `scale` is the factor for what was summed before.
template <int V>
void many_softmax(float* scores, int at, int n, const ivec* position, const Options& options, bool all_seen, vec* peak,
                  vec* total, vec* scale) {
    vec top[V];
    for (int v = 0; v < V; ++v) top[v] = peak[v];
    for (int j = 0; j < n; ++j)
        for (int v = 0; v < V; ++v) {
            float* place = scores + (j * V + v) * LANES;
            vec s = load(place);
            if (options.softcap != 0) s = tanh(s / options.softcap) * options.softcap;
            if (!all_seen) s = select(sees(position[v], at + j, options.window), s, splat(NONE));
            if (options.softcap != 0 || !all_seen) store(place, s);
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

template <int V, typename T> void many_rows_of(const Call<T>& call, const Task& task, Scratch& scratch) {
    const int dim = call.shape.dim, v_dim = call.shape.v_dim;
    const Range range(call, task);
    ivec position[V];
    vec peak[V], total[V], scale[V];
    for (int v = 0; v < V; ++v) {
        peak[v] = splat(NONE);
        total[v] = vec{};
        for (int i = 0; i < LANES; ++i) {
            const int r = std::min(v * LANES + i, task.rows - 1);  // spare lanes repeat the last row
            const T* q = call.query_row(task, r);
            position[v][i] = call.position(task, r);
            for (int d = 0; d < dim; ++d)
                scratch.query[(d * V + v) * LANES + i] = widen(q[d]) * call.options.scaling;
        }
    }
    std::fill(scratch.out, scratch.out + v_dim * V * LANES, 0.0f);
    for (int at = range.from; at < range.to; at += KEYS) {
        const int n = std::min(KEYS, range.to - at);
        const float* rows[KEYS];
        for (int j = 0; j < n; ++j) {
            rows[j] = as_float(call.key(task, at + j), scratch.rows + j * dim, dim);
            prefetch(call.value(task, at + j), v_dim * sizeof(T));
        }
        many_scores<V>(scratch.query, rows, n, dim, scratch.scores);
        many_softmax<V>(scratch.scores, at, n, position, call.options, range.all_seen(at, n, call.options.window), peak,
                        total, scale);
        for (int j = 0; j < n; ++j) {
            rows[j] = as_float(call.value(task, at + j), scratch.rows + j * v_dim, v_dim);
            if (at + n + j < range.to) prefetch(call.key(task, at + n + j), dim * sizeof(T));
        }
        many_values<V>(scratch.scores, rows, n, v_dim, scale, scratch.out);
    }
    for (int v = 0; v < V; ++v) {
        store(scratch.peak + v * LANES, peak[v]);
        store(scratch.total + v * LANES, total[v]);
    }
    scratch.row_stride = 1;
    scratch.dim_stride = V * LANES;
}

template <typename T> void many_rows(const Call<T>& call, const Task& task, Scratch& scratch) {
    if (task.rows <= LANES) return many_rows_of<1>(call, task, scratch);
    if (task.rows <= 2 * LANES) return many_rows_of<2>(call, task, scratch);
    many_rows_of<3>(call, task, scratch);
}

}  // namespace kvb
