// Up to 8 query rows against a tile of keys: head dims across lanes, so each key and value is loaded once, whole, for
// all rows, and the softmax runs with keys across lanes.
#pragma once

#include "attention_task.h"

namespace kvb {

constexpr int FEW_KEYS = 4;      // keys whose products are summed together
constexpr int ACCUMULATORS = 24; // vectors of output live at once

template <typename T> inline vec load_dims(const T* row, int d, int dim) {
    return d + LANES <= dim ? load(row + d) : load_part(row + d, dim - d);
}

// scores[r * KEYS + j] for keys [at, at + n).
template <int R, typename T>
void few_scores(const Call<T>& call, const Task& task, int at, int n, const float* query, float* scores) {
    const int dim = call.shape.dim, padded = (dim + LANES - 1) / LANES * LANES;
    for (int j = 0; j < n; j += FEW_KEYS) {
        const T* rows[FEW_KEYS];
        for (int u = 0; u < FEW_KEYS; ++u) {
            rows[u] = call.key(task, at + std::min(j + u, n - 1));
            prefetch(call.value(task, at + std::min(j + u, n - 1)), call.shape.v_dim * sizeof(T));
        }
        vec acc[FEW_KEYS][R] = {};
        for (int d = 0; d < padded; d += LANES) {
            vec q[R];
            for (int r = 0; r < R; ++r) q[r] = load(query + r * padded + d);
            for (int u = 0; u < FEW_KEYS; ++u) {
                vec k = load_dims(rows[u], d, dim);
                for (int r = 0; r < R; ++r) acc[u][r] += q[r] * k;
            }
        }
        for (int u = 0; u < FEW_KEYS; ++u)
            for (int r = 0; r < R; ++r) scores[r * KEYS + j + u] = sum(acc[u][r]);
    }
}

// out[r] = out[r] * scale[r] + sum over j of weights[r][j] * V[j]; meanwhile the next tile's keys are fetched.
template <int R, typename T>
void few_values(const Call<T>& call, const Task& task, int at, int n, int next, const float* weights,
                const float* scale, float* out) {
    constexpr int WIDTH = ACCUMULATORS / R < 4 ? ACCUMULATORS / R : 4;
    const int v_dim = call.shape.v_dim, padded = (v_dim + LANES - 1) / LANES * LANES;
    for (int d = 0; d < padded; d += WIDTH * LANES) {
        const int vecs = std::min(WIDTH, (padded - d) / LANES);
        vec acc[R][WIDTH] = {};
        for (int r = 0; r < R; ++r)
            for (int w = 0; w < vecs; ++w) acc[r][w] = load(out + r * padded + d + w * LANES) * scale[r];
        for (int j = 0; j < n; ++j) {
            const T* row = call.value(task, at + j);
            if (d == 0 && j < next) prefetch(call.key(task, at + n + j), call.shape.dim * sizeof(T));
            if (vecs == WIDTH && d + WIDTH * LANES <= v_dim) {
                for (int w = 0; w < WIDTH; ++w) {
                    vec v = load(row + d + w * LANES);
                    for (int r = 0; r < R; ++r) acc[r][w] += v * weights[r * KEYS + j];
                }
            } else {
                for (int w = 0; w < vecs; ++w) {
                    vec v = load_dims(row, d + w * LANES, v_dim);
                    for (int r = 0; r < R; ++r) acc[r][w] += v * weights[r * KEYS + j];
                }
            }
        }
        for (int r = 0; r < R; ++r)
            for (int w = 0; w < vecs; ++w) store(out + r * padded + d + w * LANES, acc[r][w]);
    }
}

// Scores of one row to weights, in place; returns the factor for what was summed before.
template <typename T>
float few_softmax(const Call<T>& call, float* scores, int at, int n, int position, float& peak, float& total) {
    ivec lane;
    for (int i = 0; i < LANES; ++i) lane[i] = i;
    const int window = call.options.window, vecs = (n + LANES - 1) / LANES;
    const int first = window ? std::max(0, position - window + 1 - at) : 0, last = std::min(n - 1, position - at);
    vec top = splat(NONE);
    for (int w = 0; w < vecs; ++w) {
        vec s = load(scores + w * LANES);
        if (call.options.softcap != 0) s = tanh(s / call.options.softcap) * call.options.softcap;
        ivec index = lane + w * LANES;
        s = select((index >= isplat(first)) & (index <= isplat(last)), s, splat(NONE));
        store(scores + w * LANES, s);
        top = vmax(s, top);
    }
    const float before = peak;
    peak = std::max(peak, highest(top));
    vec sums{};
    for (int w = 0; w < vecs; ++w) {
        ivec index = lane + w * LANES;
        vec p = exp(load(scores + w * LANES) - peak);
        p = select((index >= isplat(first)) & (index <= isplat(last)), p, vec{});
        sums += p;
        store(scores + w * LANES, p);
    }
    const float factor = std::exp(before - peak);
    total = total * factor + sum(sums);
    return factor;
}

template <int R, typename T> void few_rows_of(const Call<T>& call, const Task& task, Scratch& scratch) {
    const int dim = call.shape.dim, padded = (dim + LANES - 1) / LANES * LANES;
    const int v_padded = (call.shape.v_dim + LANES - 1) / LANES * LANES;
    const Range range(call, task);
    std::fill(scratch.query, scratch.query + R * padded, 0.0f);
    std::fill(scratch.out, scratch.out + R * v_padded, 0.0f);
    for (int r = 0; r < R; ++r) {
        const T* q = call.query_row(task, r);
        for (int d = 0; d < dim; ++d) scratch.query[r * padded + d] = widen(q[d]) * call.options.scaling;
        scratch.peak[r] = NONE;
        scratch.total[r] = 0;
    }
    for (int at = range.from; at < range.to; at += KEYS) {
        const int n = std::min(KEYS, range.to - at), next = std::min(KEYS, range.to - at - n);
        few_scores<R>(call, task, at, n, scratch.query, scratch.scores);
        float scale[R];
        for (int r = 0; r < R; ++r)
            scale[r] = few_softmax(call, scratch.scores + r * KEYS, at, n, call.position(task, r), scratch.peak[r],
                                   scratch.total[r]);
        few_values<R>(call, task, at, n, next, scratch.scores, scale, scratch.out);
    }
    scratch.row_stride = v_padded;
    scratch.dim_stride = 1;
}

template <typename T> void few_rows(const Call<T>& call, const Task& task, Scratch& scratch) {
    switch (task.rows) {
        case 1: return few_rows_of<1>(call, task, scratch);
        case 2: return few_rows_of<2>(call, task, scratch);
        case 3: return few_rows_of<3>(call, task, scratch);
        case 4: return few_rows_of<4>(call, task, scratch);
        case 5: return few_rows_of<5>(call, task, scratch);
        case 6: return few_rows_of<6>(call, task, scratch);
        case 7: return few_rows_of<7>(call, task, scratch);
        default: return few_rows_of<8>(call, task, scratch);
    }
}

}  // namespace kvb
