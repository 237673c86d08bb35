// Products by AVX-512 (panels.h), where there is no AMX: a word of W, in all lanes, meets that of 16 rows of x. No sums across
// lanes are needed, and each word of x is used for as many rows of W as registers hold.
#pragma once

#include "linear_dot.h"
#include "panels.h"

namespace kvb {

constexpr int VECTOR_TILES = 3;  // of x, that 8 rows of W meet together

#ifdef KVB_PANELS
// acc += x * w in every lane.
template <typename T> inline void add(vec& acc, vec x, float word);
template <> inline void add<float>(vec& acc, vec x, float word) { acc += x * splat(word); }
#ifdef __AVX512BF16__
template <> inline void add<bf16>(vec& acc, vec x, float word) {
    acc = reinterpret_cast<vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(acc), reinterpret_cast<__m512bh>(x),
                                                 reinterpret_cast<__m512bh>(_mm512_set1_ps(word))));
}
#endif

// R rows of W, `count` words each, against V tiles of x, `count` vectors each, all one after the other: out[v][r][16]. Meanwhile
// as many rows more are fetched. Rows are addressed by fours: one pointer each would take more registers than there are.
template <typename T, int R, int V>
inline void vector_square(const float* w, const float* x, int64_t count, bool fetch, float (*out)[TILE * TILE]) {
    vec acc[R][V] = {};
    const float* fours[R / 4];
    for (int q = 0; q < R / 4; ++q) fours[q] = w + 4 * q * count;
    for (int64_t line = 0; line < count; line += TILE) {
        if (fetch)
            for (int r = 0; r < R; ++r) __builtin_prefetch(w + (R + r) * count + line);
        const int64_t end = std::min(line + TILE, count);
        for (int64_t i = line; i < end; ++i) {
            vec xs[V];
            for (int v = 0; v < V; ++v) xs[v] = load(x + (v * count + i) * TILE);
            for (int r = 0; r < R; ++r) {
                const float word = fours[r / 4][r % 4 * count];
                for (int v = 0; v < V; ++v) add<T>(acc[r][v], xs[v], word);
            }
            for (int q = 0; q < R / 4; ++q) ++fours[q];
        }
    }
    for (int v = 0; v < V; ++v)
        for (int r = 0; r < R; ++r) store(out[v] + r * TILE, acc[r][v]);
}

// 16 rows of W, the first of which is row `first` of the block, against V tiles of x from row m on.
template <typename T, int V>
inline void vector_rows(const LinearCall<T>& call, const Block& block, int64_t first, int64_t m, const T* w, bool fetch) {
    constexpr int R = V == 1 ? TILE : TILE / 2;
    alignas(64) float out[V][TILE * TILE];
    const int64_t count = words<T>(call.k);
    const float* x = reinterpret_cast<const float*>(call.tiles + m * call.k);
    for (int r = 0; r < TILE; r += R)
        vector_square<T, R, V>(reinterpret_cast<const float*>(w) + (first + r) * count, x, count, fetch,
                               reinterpret_cast<float(*)[TILE * TILE]>(&out[0][r * TILE]));
    const T* bias = bias_at<T>(block);
    for (int v = 0; v < V; ++v) {
        const int64_t row = m + v * TILE, width = call.weights->n;
        put(out[v], bias ? bias + first : nullptr, std::min<int64_t>(TILE, call.rows - row),
            call.y + row * width + block.column + first, width);
    }
}

// A block of W, dense at `w`, against all of x: 3 tiles of it at a time, or 2, but not 1 where there are more.
template <typename T> inline void vector_block(const LinearCall<T>& call, const Block& block, const T* w) {
    const int64_t whole = block.count / TILE * TILE;
    for (int64_t tile = 0, tiles = padded(call.rows) / TILE; tile < tiles;) {
        const int64_t groups = (tiles - tile + VECTOR_TILES - 1) / VECTOR_TILES, together = (tiles - tile + groups - 1) / groups;
        for (int64_t first = 0; first < whole; first += TILE) {
            const bool fetch = tile == 0 && !block.piece->packed() && block.first + first + 2 * TILE <= block.piece->n;
            switch (together) {
                case 1: vector_rows<T, 1>(call, block, first, tile * TILE, w, fetch); break;
                case 2: vector_rows<T, 2>(call, block, first, tile * TILE, w, fetch); break;
                default: vector_rows<T, 3>(call, block, first, tile * TILE, w, fetch);
            }
        }
        tile += together;
    }
    if (whole < block.count)
        dense_block(call, {block.piece, block.first + whole, block.count - whole, block.column + whole}, w + whole * call.k);
}

template <typename T> inline void linear_vectors(const LinearCall<T>& call) {
    each_panel(call, panel_rows(call, TILE, omp_get_num_threads()),
               [&](const Block& block, const T* w) { vector_block(call, block, w); });
}
#endif

// Whether `linear_vectors` serves T here, and is faster than what PyTorch has: with bf16 that packs W anew each time, and in fp32
// it takes older instructions on AMD's processors.
template <typename T> inline bool has_vectors();
template <> inline bool has_vectors<float>() {
#if defined(KVB_PANELS) && defined(__x86_64__)
    return __builtin_cpu_is("amd");
#else
    return false;
#endif
}
template <> inline bool has_vectors<bf16>() {
#if defined(KVB_PANELS) && defined(__AVX512BF16__)
    return true;
#else
    return false;
#endif
}

}  // namespace kvb
