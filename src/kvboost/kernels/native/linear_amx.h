// Products by AMX tiles in bf16, which serve many rows of x for one reading of W, with the roles turned round: 16 rows of W
// are a tile as they lie in memory, x is packed (it is small), and y^T comes out. Packed weights are unpacked 32 rows at a
// time into a buffer that stays in the cache.
#pragma once

#include "linear_call.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define KVB_AMX 1
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvb {

constexpr int AMX_ROWS = 2 * TILE;  // rows of W whose products with two tiles of x are summed together
constexpr int64_t PANEL_BYTES = 1 << 20;  // of W as bf16, which a thread takes at once: half of a second-level cache

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

inline bool fits_amx(const Weights& weights) {
    for (int i = 0; i < weights.count; ++i)
        if (weights.pieces[i].n % AMX_ROWS) return false;
    return weights.k % DEPTH == 0;
}

#ifdef KVB_AMX
struct TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t column_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE};
};

// All eight tiles whole. The memory is static because GCC 12 takes only its first 8 bytes for read, and may leave the
// others of a local one unwritten.
inline void use_tiles() {
    static const TileConfig config;
    _tile_loadconfig(&config);
}

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

// [16][16] floats, rows of W down, rows of x across; y gets row m at y + m * stride.
inline void put(const float* tile, const bf16* bias, int64_t rows, bf16* y, int64_t stride) {
    __m512 r[TILE];
    for (int i = 0; i < TILE; ++i) r[i] = _mm512_load_ps(tile + i * TILE);
    transpose(r);
    const vec b = bias ? load(bias) : vec{};
    for (int64_t i = 0; i < rows; ++i) store(y + i * stride, reinterpret_cast<vec>(r[i]) + b);
}

// 32 rows of W, the first of which is row `first` of the block, against 32 rows of x from row m on. `next`, if not null, is
// fetched meanwhile, as many bytes as the rows have: a tile load gives the hardware no stream to follow.
inline void amx_square(const LinearCall<bf16>& call, const Block& block, int64_t first, int64_t m, const bf16* w,
                       const bf16* next) {
    alignas(64) float out[4][TILE * TILE];
    const int64_t k = call.k, steps = k / DEPTH, row_bytes = k * 2, width = call.weights->n;
    const int64_t lines = next ? AMX_ROWS * row_bytes / 64 / steps : 0;
    const bool second = m + TILE < call.rows;
    const bf16 *a = call.tiles + m * k, *b = a + TILE * k;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t s = 0; s < steps; ++s) {
        _tile_loadd(4, w + s * DEPTH, row_bytes);
        _tile_loadd(5, w + TILE * k + s * DEPTH, row_bytes);
        _tile_loadd(6, a + s * TILE * DEPTH, 64);
        for (int64_t l = 0; l < lines; ++l)
            _mm_prefetch(reinterpret_cast<const char*>(next) + (s * lines + l) * 64, _MM_HINT_T0);
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
    const bf16* bias = static_cast<const bf16*>(block.piece->bias);
    for (int t = 0; t < (second ? 4 : 2); ++t) {
        const int64_t row = m + t / 2 * TILE, at = first + t % 2 * TILE;
        put(out[t], bias ? bias + block.first + at : nullptr, std::min<int64_t>(TILE, call.rows - row),
            call.y + row * width + block.column + at, width);
    }
}

// A block of W, as bf16 at `w`, against all of x. Rows of x outermost: two tiles of them stay in the nearest cache.
inline void amx_block(const LinearCall<bf16>& call, const Block& block, const bf16* w) {
    for (int64_t m = 0; m < call.rows; m += 2 * TILE)
        for (int64_t first = 0; first < block.count; first += AMX_ROWS) {
            const bf16* rows = w + first * call.k;
            const bool fetch = m == 0 && !block.piece->packed() && block.first + first + 2 * AMX_ROWS <= block.piece->n;
            amx_square(call, block, first, m, rows, fetch ? rows + AMX_ROWS * call.k : nullptr);
        }
}

// Rows of W a thread takes at once: few, so that all threads have as much to do, but for many rows of x more, so that
// these are read fewer times.
inline int64_t amx_grain(const Weights& weights, int64_t rows, int64_t k, int threads) {
    if (rows <= 2 * TILE) return AMX_ROWS;
    const int64_t most = std::max<int64_t>(1, PANEL_BYTES / (AMX_ROWS * k * 2));
    const int64_t mine = std::max<int64_t>(1, weights.n / AMX_ROWS / threads), turns = (mine + most - 1) / most;
    return (mine + turns - 1) / turns * AMX_ROWS;
}

inline void linear_amx(const LinearCall<bf16>& call) {
    const Weights& weights = *call.weights;
    const int64_t tiles = padded(call.rows) / TILE, k = call.k, room = affine_room(weights, k);
    const int64_t grain = amx_grain(weights, call.rows, k, omp_get_num_threads()), blocks = num_blocks(weights, grain);
    float* ab = room ? scratch(2 * room + grain * k / 2) : nullptr;
    bf16* unpacked = reinterpret_cast<bf16*>(ab + 2 * room);
    use_tiles();
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tiles; ++t)
        pack(call.x + t * TILE * call.x_stride, call.x_stride, int(std::min<int64_t>(TILE, call.rows - t * TILE)), k,
             call.tiles + t * TILE * k);
#pragma omp for schedule(static)
    for (int64_t b = 0; b < blocks; ++b) {
        const Block block = block_at(weights, grain, b);
        const Packing& p = block.piece->packing;
        const bf16* w = static_cast<const bf16*>(block.piece->weight) + block.first * k;
        if (block.piece->packed()) {
            unpack_rows(p, static_cast<const uint8_t*>(block.piece->weight) + block.first * p.row_bytes, block.count, k,
                        ab, unpacked);
            w = unpacked;
        }
        amx_block(call, block, w);
    }
    _tile_release();
}
#endif

}  // namespace kvb
