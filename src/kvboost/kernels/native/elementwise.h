// Norms, rotary embedding with the KV write, gated activations: each one pass over its rows, rounding where
// Transformers' own code rounds.
#pragma once

#include "common.h"

namespace kvb {

// Row i of a matrix whose rows lie `stride` elements apart.
template <typename T> inline T* row(void* base, int64_t stride, int64_t i) { return static_cast<T*>(base) + i * stride; }
template <typename T> inline const T* row(const void* base, int64_t stride, int64_t i) {
    return static_cast<const T*>(base) + i * stride;
}

// weight_offset 1 (Gemma): the product is taken in fp32 and rounded once. 0 (Llama): the normalised row is rounded
// to T first, then multiplied.
template <typename T> inline void norm_row(const T* x, const T* weight, T* out, int n, float eps, float weight_offset) {
    vec squares{};
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        vec v = load(x + i);
        squares += v * v;
    }
    float total = sum(squares);
    for (int j = i; j < n; ++j) total += widen(x[j]) * widen(x[j]);
    float scale = 1.0f / std::sqrt(total / n + eps);
    for (i = 0; i + LANES <= n; i += LANES) {
        vec v = load(x + i) * scale;
        vec w = load(weight + i);
        store(out + i, weight_offset != 0 ? v * (w + weight_offset) : rounded<T>(v) * w);
    }
    for (; i < n; ++i) {
        float v = widen(x[i]) * scale, w = widen(weight[i]);
        out[i] = round_to<T>(weight_offset != 0 ? v * (w + weight_offset) : widen(round_to<T>(v)) * w);
    }
}

template <typename T> inline void add_row(const T* a, const T* b, T* out, int n) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store(out + i, load(a + i) + load(b + i));
    for (; i < n; ++i) out[i] = round_to<T>(widen(a[i]) + widen(b[i]));
}

template <typename T>
inline void add_norm_row(const T* x, const T* delta, const T* weight, T* total, T* out, int n, float eps, float weight_offset) {
    add_row(x, delta, total, n);
    norm_row(total, weight, out, n, eps, weight_offset);
}

// Half-rotation layout: pairs (i, i + rotary/2) of the first `rotary` dims.
template <typename T> inline void rotate(T* x, const T* cos, const T* sin, int rotary) {
    int half = rotary / 2, i = 0;
    for (; i + LANES <= half; i += LANES) {
        vec a = load(x + i), b = load(x + half + i);
        vec first = rounded<T>(a * load(cos + i)) + rounded<T>(-b * load(sin + i));
        vec second = rounded<T>(b * load(cos + half + i)) + rounded<T>(a * load(sin + half + i));
        store(x + i, first);
        store(x + half + i, second);
    }
    for (; i < half; ++i) {
        float a = widen(x[i]), b = widen(x[half + i]);
        float ac = widen(round_to<T>(a * widen(cos[i]))), bs = widen(round_to<T>(-b * widen(sin[i])));
        float bc = widen(round_to<T>(b * widen(cos[half + i]))), as = widen(round_to<T>(a * widen(sin[half + i])));
        x[i] = round_to<T>(ac + bs);
        x[half + i] = round_to<T>(bc + as);
    }
}

// Rotates q and k of one row of a fused q/k/v product and writes k and v to their slot.
template <typename T>
inline void rotate_and_write_row(T* q, int q_heads, int kv_heads, int dim, int v_dim, int rotary, const T* cos,
                                 const T* sin, int32_t block, int32_t offset, T* keys, T* values,
                                 int64_t block_stride) {
    T* k = q + q_heads * dim;
    const T* v = k + kv_heads * dim;
    for (int h = 0; rotary && h < q_heads + kv_heads; ++h) rotate(q + h * dim, cos, sin, rotary);
    const int64_t slab = block * block_stride, slot = int64_t(offset) * kv_heads;
    std::memcpy(keys + slab + slot * dim, k, sizeof(T) * kv_heads * dim);
    std::memcpy(values + slab + slot * v_dim, v, sizeof(T) * kv_heads * v_dim);
}

enum Activation { SILU = 0, GELU_TANH = 1, GELU_ERF = 2, RELU = 3 };

inline vec activate(vec x, int kind) {
    if (kind == SILU) return x / (1.0f + exp(-x));
    if (kind == GELU_TANH) return 0.5f * x * (1.0f + tanh(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    if (kind == RELU) return vmax(x, vec{});
    vec out;
    for (int i = 0; i < LANES; ++i) out[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678118654752f));
    return out;
}

template <typename T> inline void gate_row(const T* gate, const T* up, T* out, int n, int kind) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store(out + i, rounded<T>(activate(load(gate + i), kind)) * load(up + i));
    if (i < n) {
        int rest = n - i;
        store_part(out + i, rounded<T>(activate(load_part(gate + i, rest), kind)) * load_part(up + i, rest), rest);
    }
}

}  // namespace kvb
