// Up to 48 query rows against a tile of keys in bf16, where there are instructions that multiply and sum pairs of it but no AMX:
// as attention_many.h, with rows across lanes, but for two dims of a key, or two keys of a dim, at once. Weights are rounded to
// bf16 as in any bf16 attention, their sums are not.
#pragma once

#include "attention_many.h"
#include "linear_vectors.h"

namespace kvb {

#if defined(KVB_PANELS) && defined(__AVX512BF16__) && defined(__AVX512BW__)
#define KVB_DOTS 1

inline bool in_dots(const Shape& s) { return s.dim % (2 * TILE) == 0 && s.v_dim % LANES == 0; }

// Of 16 numbers of two rows the pairs.
inline __m512i paired(const bf16* low, const bf16* high) {
    const __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(low)));
    const __m512i b = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(high)));
    return _mm512_or_si512(a, _mm512_slli_epi32(b, 16));
}

// Two vectors, rounded to bf16, as one of pairs.
inline __m512i paired(vec low, vec high) {
    alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                                   8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512bh both = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(high), reinterpret_cast<__m512>(low));
    return _mm512_permutexvar_epi16(_mm512_load_si512(order), reinterpret_cast<__m512i>(both));
}

template <int V, typename T> struct DotTiles {
    static constexpr int ALIGNMENT = 1;
    static constexpr bool SCALED = false;
    const Call<T>& call;
    const Task& task;
    Scratch& scratch;

    void load_query() {  // [dim / 2][V] vectors of pairs
        for (int v = 0; v < V; ++v)
            for (int p = 0; p < call.shape.dim / 2; p += TILE) {
                __m512 r[TILE];
                for (int i = 0; i < TILE; ++i)  // spare lanes repeat the last row
                    r[i] = _mm512_loadu_ps(call.query_row(task, std::min(v * TILE + i, task.rows - 1)) + 2 * p);
                transpose(r);
                for (int i = 0; i < TILE; ++i) _mm512_store_ps(scratch.query + ((p + i) * V + v) * LANES, r[i]);
            }
    }

    void scores(int at, int n) {
        const float* keys[KEYS];
        for (int j = 0; j < n; ++j) {
            keys[j] = reinterpret_cast<const float*>(call.key(task, at + j));
            prefetch(call.value(task, at + j), call.shape.v_dim * sizeof(T));
        }
        for (int j = 0; j < n; j += UNROLL) {  // beyond the end the last key again, where nobody looks
            const float* row[UNROLL];
            for (int u = 0; u < UNROLL; ++u) row[u] = keys[std::min(j + u, n - 1)];
            vec acc[UNROLL][V] = {};
            for (int p = 0; p < call.shape.dim / 2; ++p) {
                vec q[V];
                for (int v = 0; v < V; ++v) q[v] = load(scratch.query + (p * V + v) * LANES);
                for (int u = 0; u < UNROLL; ++u)
                    for (int v = 0; v < V; ++v) add<T>(acc[u][v], q[v], row[u][p]);
            }
            for (int u = 0; u < UNROLL; ++u)
                for (int v = 0; v < V; ++v) store(scratch.scores + ((j + u) * V + v) * LANES, acc[u][v]);
        }
    }

    void values(int at, int n, int to, const vec* scale) {
        const int v_dim = call.shape.v_dim, pairs = (n + 1) / 2;
        for (int j = 0; j < KEYS && at + n + j < to; ++j) prefetch(call.key(task, at + n + j), call.shape.dim * sizeof(T));
        for (int p = 0; p < pairs; ++p) pair(at, n, p);
        for (int d = 0; d < v_dim; d += UNROLL) {
            vec acc[UNROLL][V];
            for (int u = 0; u < UNROLL; ++u)
                for (int v = 0; v < V; ++v) acc[u][v] = load(scratch.out + ((d + u) * V + v) * LANES) * scale[v];
            for (int p = 0; p < pairs; ++p) {
                const float* value = scratch.rows + p * v_dim + d;
                vec w[V];
                for (int v = 0; v < V; ++v) w[v] = load(scratch.scores + (p * V + v) * LANES);
                for (int u = 0; u < UNROLL; ++u)
                    for (int v = 0; v < V; ++v) add<T>(acc[u][v], w[v], value[u]);
            }
            for (int u = 0; u < UNROLL; ++u)
                for (int v = 0; v < V; ++v) store(scratch.out + ((d + u) * V + v) * LANES, acc[u][v]);
        }
    }

  private:
    // Two keys: their values as [v_dim] pairs, and their weights as [V] vectors of pairs where those of earlier keys were.
    void pair(int at, int n, int p) {
        static const bf16 none[LANES] = {};
        const T *low = call.value(task, at + 2 * p), *high = 2 * p + 1 < n ? call.value(task, at + 2 * p + 1) : nullptr;
        for (int d = 0; d < call.shape.v_dim; d += LANES)
            _mm512_storeu_si512(scratch.rows + p * call.shape.v_dim + d, paired(low + d, high ? high + d : none));
        for (int v = 0; v < V; ++v) {
            const float* weights = scratch.scores + (2 * p * V + v) * LANES;
            const vec second = high ? load(weights + V * LANES) : vec{};
            _mm512_storeu_si512(scratch.scores + (p * V + v) * LANES, paired(load(weights), second));
        }
    }
};
#endif

}  // namespace kvb
