// Up to 48 query rows against a tile of keys in bf16, by AMX tiles: S^T = K Q^T, 16 keys a tile as they lie in their page,
// then O^T += V^T P^T. Between the two the softmax is that of attention_many.h, on the same layout; weights are rounded to
// bf16 as in any bf16 attention, their sums are not.
#pragma once

#include "attention_dots.h"
#include "linear_amx.h"

namespace kvb {

constexpr int MAX_PART = 512;  // dims of a value

// Whether prompts of such heads are computed in tiles.
template <typename T> inline bool in_tiles(const Shape&) { return false; }

#if defined(KVB_AMX) && defined(__AVX512BF16__) && defined(__AVX512BW__)
#define KVB_TILES 1
template <> inline bool in_tiles<bf16>(const Shape& s) {
    return has_amx() && s.dim % DEPTH == 0 && s.v_dim % TILE == 0 && s.v_dim <= MAX_PART && s.block_size % TILE == 0;
}

static_assert(KEYS % DEPTH == 0 && LANES == TILE, "tiles and vectors hold the same rows");

// Tile numbers are constants: body(v) is spelt out for v in [0, V).
#define KVB_EACH_TILE(V, CALL)      \
    do {                            \
        CALL(0);                    \
        if constexpr (V > 1) {      \
            CALL(1);                \
        }                           \
        if constexpr (V > 2) {      \
            CALL(2);                \
        }                           \
    } while (0)

// The tile of V's rows v, between its registers and rows of `out` that hold all V of them.
#define KVB_STORE(v) _tile_stored(v, out + (v) * LANES, V * LANES * sizeof(float))

template <int V, typename T> struct AmxTiles {
    static constexpr int ALIGNMENT = TILE;
    static constexpr bool SCALED = false;
    static constexpr int SIZE = TILE * DEPTH;  // bf16 of one tile
    const Call<T>& call;
    const Task& task;
    Scratch& scratch;

    bf16* query() const { return reinterpret_cast<bf16*>(scratch.query); }   // [V][dim / 32] tiles
    bf16* columns() const { return reinterpret_cast<bf16*>(scratch.rows); }  // V^T: [KEYS / 32][v_dim / 16] tiles
    bf16* weights() const { return columns() + KEYS * call.shape.v_dim; }    // P^T: [KEYS / 32][V] tiles

    void load_query() {
        const int steps = call.shape.dim / DEPTH;
        for (int v = 0; v < V; ++v)
            for (int s = 0; s < steps; ++s) {
                __m512 r[TILE];
                for (int i = 0; i < TILE; ++i)
                    r[i] = _mm512_loadu_ps(call.query_row(task, std::min(v * TILE + i, task.rows - 1)) + s * DEPTH);
                store_transposed(r, query() + (v * steps + s) * SIZE);
            }
    }

    void scores(int at, int n) {
        const int steps = call.shape.dim / DEPTH;
        const int64_t row_bytes = int64_t(call.shape.kv_heads) * call.shape.dim * sizeof(T);
        for (int j = 0; j < n; j += TILE) {
            const T* keys = call.key(task, at + j);
            float* out = scratch.scores + j * V * LANES;
#define KVB_PRODUCT(v)                                         \
    _tile_loadd(5, query() + ((v) * steps + s) * SIZE, 64);    \
    _tile_dpbf16ps(v, 4, 5)
            KVB_EACH_TILE(V, _tile_zero);
            for (int s = 0; s < steps; ++s) {
                _tile_loadd(4, keys + s * DEPTH, row_bytes);
                KVB_EACH_TILE(V, KVB_PRODUCT);
            }
            KVB_EACH_TILE(V, KVB_STORE);
#undef KVB_PRODUCT
        }
    }

    void values(int at, int n, int to, const vec* scale) {
        const int blocks = (n + DEPTH - 1) / DEPTH, parts = call.shape.v_dim / TILE;
        for (int j = 0; j < KEYS && at + n + j < to; ++j) prefetch(call.key(task, at + n + j), call.shape.dim * sizeof(T));
        for (int b = 0; b < blocks; ++b) {
            turn_values(at, n, b, parts);
            pack_weights(n, b);
        }
        for (int d = 0; d < parts; ++d) {
            float* out = scratch.out + d * TILE * V * LANES;
            for (int i = 0; i < TILE; ++i)
                for (int v = 0; v < V; ++v)
                    store(out + (i * V + v) * LANES, load(out + (i * V + v) * LANES) * scale[v]);
#define KVB_LOAD(v) _tile_loadd(v, out + (v) * LANES, V * LANES * sizeof(float))
#define KVB_PRODUCT(v)                                   \
    _tile_loadd(5, weights() + (b * V + (v)) * SIZE, 64); \
    _tile_dpbf16ps(v, 4, 5)
            KVB_EACH_TILE(V, KVB_LOAD);
            for (int b = 0; b < blocks; ++b) {
                _tile_loadd(4, columns() + (b * parts + d) * SIZE, 64);
                KVB_EACH_TILE(V, KVB_PRODUCT);
            }
            KVB_EACH_TILE(V, KVB_STORE);
#undef KVB_LOAD
#undef KVB_PRODUCT
        }
    }

   private:
    static void store_transposed(__m512* r, bf16* tile) {
        transpose(r);
        for (int i = 0; i < TILE; ++i) _mm512_storeu_ps(tile + i * DEPTH, r[i]);
    }

    // V^T of 32 keys: pairs of keys side by side, dims down. Keys from n on, whose memory may hold anything, are zeros.
    void turn_values(int at, int n, int block, int parts) {
        static const bf16 zeros[MAX_PART] = {};
        const T* rows[DEPTH];
        for (int i = 0; i < DEPTH; ++i) {
            const int j = block * DEPTH + i;
            rows[i] = j < n ? call.value(task, at + j) : zeros;
        }
        for (int d = 0; d < parts; ++d) {
            __m512 r[TILE];
            for (int i = 0; i < TILE; ++i) r[i] = _mm512_castsi512_ps(paired(rows[2 * i] + d * TILE, rows[2 * i + 1] + d * TILE));
            store_transposed(r, columns() + (block * parts + d) * SIZE);
        }
    }

    // P^T of 32 keys: for each pair of keys, the pairs of 16 rows.
    void pack_weights(int n, int block) {
        for (int j = n; j < (block + 1) * DEPTH; ++j)
            std::fill_n(scratch.scores + j * V * LANES, V * LANES, 0.0f);
        for (int i = 0; i < TILE; ++i) {
            const float* low = scratch.scores + (block * DEPTH + 2 * i) * V * LANES;
            for (int v = 0; v < V; ++v)
                _mm512_storeu_si512(weights() + (block * V + v) * SIZE + i * DEPTH,
                                    paired(load(low + v * LANES), load(low + (V + v) * LANES)));
        }
    }
};
#undef KVB_STORE
#undef KVB_EACH_TILE
#endif

}  // namespace kvb
