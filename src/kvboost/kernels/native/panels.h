// Products of more rows of x than dot products serve at the speed of memory, with the roles turned round: x is packed (it is
// small), 16 of its rows side by side, W is read as it lies, a panel of rows at a time, and y^T comes out in squares of 16 x 16.
// Packed weights are unpacked into a buffer that stays in the cache.
#pragma once

#include <omp.h>

#include "linear_call.h"

namespace kvb {

constexpr int64_t PANEL_BYTES = 1 << 20;  // of W, dense, which a thread takes at once: half of a second-level cache

#if defined(__AVX512F__)
#define KVB_PANELS 1

// What is multiplied and summed together along k: 4 bytes, one number in fp32, two in bf16.
template <typename T> inline int64_t words(int64_t k) { return k * int64_t(sizeof(T)) / 4; }

// A square of 16 x 16 values of 32 bits, rows become columns.
inline void transpose(__m512* r) {
    __m512 t[TILE];
    for (int i = 0; i < TILE; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < TILE; i += 4) {
        r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; ++i) {
        r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    }
}

// 16 rows of x: for each word of k the words of all. Rows beyond `rows` are zeros.
template <typename T> inline void pack(const T* x, int64_t stride, int rows, int64_t k, T* packed) {
    const int64_t count = words<T>(k);
    float* out = reinterpret_cast<float*>(packed);
    int64_t p = 0;
    for (; p + TILE <= count; p += TILE) {
        __m512 square[TILE];
        for (int m = 0; m < TILE; ++m)
            square[m] = m < rows ? _mm512_loadu_ps(reinterpret_cast<const float*>(x + m * stride) + p) : _mm512_setzero_ps();
        transpose(square);
        for (int i = 0; i < TILE; ++i) _mm512_store_ps(out + (p + i) * TILE, square[i]);
    }
    for (; p < count; ++p)
        for (int m = 0; m < TILE; ++m) {
            float word = 0;
            if (m < rows) std::memcpy(&word, reinterpret_cast<const float*>(x + m * stride) + p, 4);
            std::memcpy(out + p * TILE + m, &word, 4);
        }
}

// [16][16] floats at a cache line, rows of W down, rows of x across; y gets row m at y + m * stride.
template <typename T> inline void put(const float* tile, const T* bias, int64_t rows, T* y, int64_t stride) {
    __m512 r[TILE];
    for (int i = 0; i < TILE; ++i) r[i] = _mm512_load_ps(tile + i * TILE);
    transpose(r);
    const vec b = bias ? load(bias) : vec{};
    for (int64_t i = 0; i < rows; ++i) store(y + i * stride, reinterpret_cast<vec>(r[i]) + b);
}

// Rows of W a thread takes at once, a multiple of `unit`: few, so that all threads have as much to do, but for many rows of x
// more, so that these are read fewer times.
template <typename T> inline int64_t panel_rows(const LinearCall<T>& call, int64_t unit, int threads) {
    if (call.rows <= 2 * TILE) return unit;
    const int64_t most = std::max<int64_t>(1, PANEL_BYTES / (unit * call.k * int64_t(sizeof(T))));
    const int64_t mine = std::max<int64_t>(1, call.weights->n / unit / threads), turns = (mine + most - 1) / most;
    return (mine + turns - 1) / turns * unit;
}

// multiply(block, w) for all of W, in panels of up to `grain` rows, dense at w, when x is packed at call.tiles.
template <typename T, typename Multiply>
inline void each_panel(const LinearCall<T>& call, int64_t grain, Multiply multiply) {
    const Weights& weights = *call.weights;
    const int64_t tiles = padded(call.rows) / TILE, k = call.k, room = affine_room(weights, k);
    float* ab = room ? scratch(2 * room + words<T>(grain * k)) : nullptr;
    T* unpacked = reinterpret_cast<T*>(ab + 2 * room);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tiles; ++t)
        pack(call.x + t * TILE * call.x_stride, call.x_stride, int(std::min<int64_t>(TILE, call.rows - t * TILE)), k,
             call.tiles + t * TILE * k);
#pragma omp for schedule(static)
    for (int64_t b = 0; b < num_blocks(weights, grain); ++b) {
        const Block block = block_at(weights, grain, b);
        const Packing& p = block.piece->packing;
        const T* w = static_cast<const T*>(block.piece->weight) + block.first * k;
        if (block.piece->packed()) {
            unpack_rows(p, static_cast<const uint8_t*>(block.piece->weight) + block.first * p.row_bytes, block.count, k,
                        ab, unpacked);
            w = unpacked;
        }
        multiply(block, w);
    }
}
#endif

}  // namespace kvb
