// y = x W^T (+ bias) for few rows, straight from the row-major weight `[n, k]` that PyTorch holds: no second, packed copy.
//
// Dot products along k read every weight once, at the speed of memory. In bf16, AMX tiles do so for many rows, with the
// roles turned round: 16 rows of W are a tile as they lie in memory, x is packed (it is small), and y^T comes out.
//
// These functions run inside a parallel region: every thread calls them with the same arguments, they share the work and
// return together.
#pragma once

#include <algorithm>

#include "common.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define KVB_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvb {

constexpr int DOT_ROWS = 4;     // rows of x whose products are summed together
constexpr int DOT_COLUMNS = 4;  // rows of W alike
constexpr int GRAIN = 16;       // rows of W a thread takes at once
constexpr int TILE = 16;        // rows of an AMX tile; also its columns in fp32
constexpr int DEPTH = 32;       // bf16 elements along k per AMX tile

template <typename T> struct LinearCall {
    const T* x;  // [rows, k], rows x_stride apart
    int64_t x_stride;
    const T *w, *bias;  // [n, k]; [n] or null
    T* y;               // [rows, n], rows y_stride apart
    int64_t y_stride, rows, n, k;
    bf16* packed;  // room for padded(rows) * k, at a cache line; only AMX needs it
};

inline int64_t padded(int64_t rows) { return (rows + TILE - 1) / TILE * TILE; }

template <typename T, int M>
inline void dots(const T* const* x, const T* w, int64_t k, int columns, const T* bias, T* const* y) {
    vec acc[DOT_COLUMNS][M] = {};
    const T* rows[DOT_COLUMNS];
    for (int c = 0; c < DOT_COLUMNS; ++c) rows[c] = w + std::min(c, columns - 1) * k;
    int64_t i = 0;
    for (; i + LANES <= k; i += LANES) {
        vec a[M];
        for (int m = 0; m < M; ++m) a[m] = load(x[m] + i);
        for (int c = 0; c < DOT_COLUMNS; ++c) {
            vec b = load(rows[c] + i);
            for (int m = 0; m < M; ++m) acc[c][m] += a[m] * b;
        }
    }
    for (int c = 0; c < columns; ++c)
        for (int m = 0; m < M; ++m) {
            float total = sum(acc[c][m]);
            for (int64_t j = i; j < k; ++j) total += widen(x[m][j]) * widen(rows[c][j]);
            y[m][c] = round_to<T>(total + (bias ? widen(bias[c]) : 0.0f));
        }
}

// Columns [from, to) of M rows, the first of which is row m.
template <typename T, int M> inline void dot_block(const LinearCall<T>& call, int64_t m, int64_t from, int64_t to) {
    const T* xs[M];
    T* ys[M];
    for (int64_t n = from; n < to; n += DOT_COLUMNS) {
        for (int i = 0; i < M; ++i) {
            xs[i] = call.x + (m + i) * call.x_stride;
            ys[i] = call.y + (m + i) * call.y_stride + n;
        }
        dots<T, M>(xs, call.w + n * call.k, call.k, int(std::min<int64_t>(DOT_COLUMNS, to - n)),
                   call.bias ? call.bias + n : nullptr, ys);
    }
}

template <typename T> void linear_dot(const LinearCall<T>& call) {
    const int64_t blocks = (call.n + GRAIN - 1) / GRAIN;
#pragma omp for schedule(static)
    for (int64_t b = 0; b < blocks; ++b) {
        const int64_t from = b * GRAIN, to = std::min(call.n, from + GRAIN);
        for (int64_t m = 0; m < call.rows; m += DOT_ROWS) switch (std::min<int64_t>(DOT_ROWS, call.rows - m)) {
                case 1: dot_block<T, 1>(call, m, from, to); break;
                case 2: dot_block<T, 2>(call, m, from, to); break;
                case 3: dot_block<T, 3>(call, m, from, to); break;
                default: dot_block<T, 4>(call, m, from, to);
            }
    }
}

// Whether this process may use AMX tiles; asks the kernel once.
inline bool has_amx() {
#ifdef KVB_AMX
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    static const bool granted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return granted;
#else
    return false;
#endif
}

inline bool fits_amx(int64_t n, int64_t k) { return n % (2 * TILE) == 0 && k % DEPTH == 0; }

#ifdef KVB_AMX
struct TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t column_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE};
};

// One tile of x: for each pair of k, the pairs of 16 rows. Rows beyond `rows` are zeros.
inline void pack(const bf16* x, int64_t stride, int rows, int64_t k, bf16* packed) {
    uint32_t* out = reinterpret_cast<uint32_t*>(packed);
    for (int64_t p = 0; p < k / 2; ++p)
        for (int m = 0; m < TILE; ++m) {
            uint32_t pair = 0;
            if (m < rows) std::memcpy(&pair, x + m * stride + 2 * p, 4);
            out[p * TILE + m] = pair;
        }
}

// [16][16] floats, rows of W down, rows of x across; y gets row m at y + m * stride.
inline void put(const float* tile, const bf16* bias, int64_t rows, bf16* y, int64_t stride) {
    __m512 r[TILE], t[TILE];
    for (int i = 0; i < TILE; ++i) r[i] = _mm512_load_ps(tile + i * TILE);
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
    const vec b = bias ? load(bias) : vec{};
    for (int i = 0; i < 8; ++i) {
        __m512 low = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88), high = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
        if (i < rows) store(y + i * stride, reinterpret_cast<vec>(low) + b);
        if (i + 8 < rows) store(y + (i + 8) * stride, reinterpret_cast<vec>(high) + b);
    }
}

// 32 rows of W, the first of which is row n, against all of x, two tiles of x at a time. The next 32 rows are fetched
// meanwhile: a tile load gives the hardware no stream to follow.
inline void amx_block(const LinearCall<bf16>& call, int64_t n) {
    alignas(64) float out[4][TILE * TILE];
    const int64_t k = call.k, steps = k / DEPTH, row_bytes = k * 2;
    const bf16* w = call.w + n * k;
    const char* next = reinterpret_cast<const char*>(w + 2 * TILE * k);
    const int64_t lines = n + 4 * TILE <= call.n ? 2 * TILE * row_bytes / 64 / steps : 0;
    for (int64_t m = 0; m < call.rows; m += 2 * TILE) {
        const bool second = m + TILE < call.rows;
        const bf16 *a = call.packed + m * k, *b = a + TILE * k;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t s = 0; s < steps; ++s) {
            _tile_loadd(4, w + s * DEPTH, row_bytes);
            _tile_loadd(5, w + TILE * k + s * DEPTH, row_bytes);
            _tile_loadd(6, a + s * TILE * DEPTH, 64);
            for (int64_t l = 0; m == 0 && l < lines; ++l) _mm_prefetch(next + (s * lines + l) * 64, _MM_HINT_T0);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 5, 6);
            if (second) {
                _tile_loadd(7, b + s * TILE * DEPTH, 64);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, out[0], 64);
        _tile_stored(1, out[1], 64);
        if (second) {
            _tile_stored(2, out[2], 64);
            _tile_stored(3, out[3], 64);
        }
        for (int t = 0; t < (second ? 4 : 2); ++t) {
            const int64_t row = m + t / 2 * TILE, column = n + t % 2 * TILE;
            put(out[t], call.bias ? call.bias + column : nullptr, std::min<int64_t>(TILE, call.rows - row),
                call.y + row * call.y_stride + column, call.y_stride);
        }
    }
}

inline void linear_amx(const LinearCall<bf16>& call) {
    const int64_t tiles = padded(call.rows) / TILE, blocks = call.n / (2 * TILE);
    TileConfig config;
    _tile_loadconfig(&config);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tiles; ++t)
        pack(call.x + t * TILE * call.x_stride, call.x_stride, int(std::min<int64_t>(TILE, call.rows - t * TILE)),
             call.k, call.packed + t * TILE * call.k);
#pragma omp for schedule(static)
    for (int64_t b = 0; b < blocks; ++b) amx_block(call, b * 2 * TILE);
    _tile_release();
}
#endif

inline void linear(const LinearCall<float>& call) { linear_dot(call); }
inline void linear(const LinearCall<bf16>& call) {
#ifdef KVB_AMX
    if (has_amx() && fits_amx(call.n, call.k)) return linear_amx(call);
#endif
    linear_dot(call);
}

}  // namespace kvb
