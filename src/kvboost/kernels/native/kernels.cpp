// The C interface. `is_bf16` 0: all tensors are float; 1: all are bf16. Strides count elements.
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "layer.h"
#include "linear.h"

using namespace kvb;

// x, out: [rows, groups, n], groups n apart, rows x_stride and out_stride apart. One norm per (row, group).
KVB_EXPORT void kvb_rms_norm(int is_bf16, const void* x, int64_t x_stride, const void* weight, void* out,
                             int64_t out_stride, int64_t rows, int groups, int n, float eps, float weight_offset,
                             int threads) {
    typed(is_bf16, [=](auto zero) {
        using T = decltype(zero);
        each_row(rows, rows * groups * n, threads, [=](int64_t i) {
            for (int g = 0; g < groups; ++g)
                norm_row(row<T>(x, x_stride, i) + g * n, static_cast<const T*>(weight),
                         row<T>(out, out_stride, i) + g * n, n, eps, weight_offset);
        });
    });
}

// total = x + delta; out = norm(total). All [rows, n], contiguous.
KVB_EXPORT void kvb_add_rms_norm(int is_bf16, const void* x, const void* delta, const void* weight, void* total,
                                 void* out, int64_t rows, int n, float eps, float weight_offset, int threads) {
    typed(is_bf16, [=](auto zero) {
        using T = decltype(zero);
        each_row(rows, rows * n, threads, [=](int64_t i) {
            add_norm_row(row<T>(x, n, i), row<T>(delta, n, i), static_cast<const T*>(weight), row<T>(total, n, i),
                         row<T>(out, n, i), n, eps, weight_offset);
        });
    });
}

// qkv: [rows, q_heads * dim + kv_heads * dim + kv_heads * v_dim], rows `stride` apart. Rotates q and k in place and
// writes k and v into the pool: `keys` and `values` point to the layer's part of slab 0, slabs lie block_stride
// elements apart, and row i goes to offset slot_offset[i] of slab slot_block[i].
KVB_EXPORT void kvb_rotate_and_write(int is_bf16, void* qkv, int64_t stride, int64_t rows, int q_heads, int kv_heads,
                                     int dim, int v_dim, int rotary, const void* cos, const void* sin,
                                     const int32_t* slot_block, const int32_t* slot_offset, void* keys, void* values,
                                     int64_t block_stride, int threads) {
    typed(is_bf16, [=](auto zero) {
        using T = decltype(zero);
        each_row(rows, rows * (q_heads + kv_heads) * dim, threads, [=](int64_t i) {
            rotate_and_write_row(row<T>(qkv, stride, i), q_heads, kv_heads, dim, v_dim, rotary, row<T>(cos, rotary, i),
                                 row<T>(sin, rotary, i), slot_block[i], slot_offset[i], static_cast<T*>(keys),
                                 static_cast<T*>(values), block_stride);
        });
    });
}

// key, value: [rows, heads, dim], rows k_stride and v_stride apart, heads k_head and v_head apart. Slots as above.
KVB_EXPORT void kvb_write(int is_bf16, const void* key, int64_t k_stride, int64_t k_head, const void* value,
                          int64_t v_stride, int64_t v_head, int64_t rows, int k_heads, int v_heads, int dim, int v_dim,
                          const int32_t* slot_block, const int32_t* slot_offset, void* keys, void* values,
                          int64_t block_stride) {
    typed(is_bf16, [=](auto zero) {
        using T = decltype(zero);
        for (int64_t i = 0; i < rows; ++i) {
            T* k = static_cast<T*>(keys) + slot_block[i] * block_stride + int64_t(slot_offset[i]) * k_heads * dim;
            T* v = static_cast<T*>(values) + slot_block[i] * block_stride + int64_t(slot_offset[i]) * v_heads * v_dim;
            for (int h = 0; h < k_heads; ++h)
                std::memcpy(k + h * dim, row<T>(key, k_stride, i) + h * k_head, sizeof(T) * dim);
            for (int h = 0; h < v_heads; ++h)
                std::memcpy(v + h * v_dim, row<T>(value, v_stride, i) + h * v_head, sizeof(T) * v_dim);
        }
    });
}

// gate_up: [rows, 2n], gate first. out: [rows, n].
KVB_EXPORT void kvb_gate(int is_bf16, const void* gate_up, void* out, int64_t rows, int n, int kind, int threads) {
    typed(is_bf16, [=](auto zero) {
        using T = decltype(zero);
        each_row(rows, rows * n, threads, [=](int64_t i) {
            const T* gate = row<T>(gate_up, 2 * n, i);
            gate_row(gate, gate + n, row<T>(out, n, i), n, kind);
        });
    });
}

// query: [rows, q_heads, dim], rows query_stride apart; out: [rows, q_heads, v_dim], rows out_stride apart. `keys` and
// `values` as in kvb_rotate_and_write. spans: per sequence (begin, count, start, table), `table` an offset into
// `tables`. Query token i of a sequence, at position start + i, sees keys at positions <= its own.
KVB_EXPORT void kvb_attention(int is_bf16, const void* query, int64_t query_stride, const void* keys,
                              const void* values, int64_t block_stride, void* out, int64_t out_stride, int q_heads,
                              int kv_heads, int dim, int v_dim, int block_size, const int32_t* spans, int num_spans,
                              const int32_t* tables, float scaling, float softcap, int window, const float* sinks,
                              int threads) {
    Plan plan({q_heads, kv_heads, dim, v_dim, block_size}, spans, num_spans, tables, window, threads);
    typed(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        Call<T> call{plan.shape,
                     {scaling, softcap, window, sinks},
                     static_cast<const T*>(query), query_stride,
                     static_cast<const T*>(keys), static_cast<const T*>(values), block_stride,
                     static_cast<T*>(out), out_stride,
                     plan.sequences.data()};
#pragma omp parallel num_threads(threads)
        attention(call, plan);
    });
}

KVB_EXPORT int kvb_has_amx() { return has_amx(); }

KVB_EXPORT int kvb_has_vectors(int is_bf16) { return is_bf16 ? has_vectors<bf16>() : has_vectors<float>(); }

// x: [rows, weights->k], rows x_stride apart; y: [rows, weights->n], contiguous.
KVB_EXPORT void kvb_linear(int is_bf16, const void* x, int64_t x_stride, const Weights* weights, void* y, int64_t rows,
                           int threads) {
    const int64_t k = weights->k;
    typed(is_bf16, [=](auto zero) {
        using T = decltype(zero);
        static thread_local std::vector<T> memory;
        if (int64_t(memory.size()) < padded(rows) * k + 32) memory.resize(padded(rows) * k + 32);
        const LinearCall<T> call{static_cast<const T*>(x), x_stride, weights, static_cast<T*>(y), rows, k,
                                 aligned(memory.data())};
#pragma omp parallel num_threads(threads)
        linear(call);
    });
}

// out: [rows, k], the weights of rows index[0], index[1], ... of a packed matrix of `n` rows; without `index` of its first
// rows. Returns the place of the first index that is not in [0, n), or -1.
KVB_EXPORT int64_t kvb_unpack(int is_bf16, const void* weight, const Packing* packing, int64_t n, int64_t k,
                              const int64_t* index, void* out, int64_t rows, int threads) {
    for (int64_t i = 0; index && i < rows; ++i)
        if (index[i] < 0 || index[i] >= n) return i;
    typed(is_bf16, [=](auto zero) {
        using T = decltype(zero);
        each_row(rows, rows * k, threads, [=](int64_t i) {
            const uint8_t* from = static_cast<const uint8_t*>(weight) + (index ? index[i] : i) * packing->row_bytes;
            unpack_rows(*packing, from, 1, k, scratch(2 * affine_room(*packing, k)), row<T>(out, k, i));
        });
    });
    return -1;
}

// One decoder layer; see layer.h.
KVB_EXPORT void kvb_layer(int is_bf16, const Layer* layer, const Step* step, const void* x, void* out, int threads) {
    typed(is_bf16, [=](auto zero) {
        using T = decltype(zero);
        run_layer(*layer, *step, static_cast<const T*>(x), static_cast<T*>(out), threads);
    });
}
