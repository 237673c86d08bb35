// Products by AMX tiles in bf16 (panels.h): 16 rows of W are a tile as they lie in memory.
#pragma once

#include "panels.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define KVB_AMX 1
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvb {

constexpr int AMX_ROWS = 2 * TILE;  // rows of W whose products with two tiles of x are summed together

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

inline void linear_amx(const LinearCall<bf16>& call) {
    use_tiles();
    each_panel(call, panel_rows(call, AMX_ROWS, omp_get_num_threads()),
               [&](const Block& block, const bf16* w) { amx_block(call, block, w); });
    _tile_release();
}
#endif

}  // namespace kvb
