// One decoder layer in one parallel region: with few rows, calls and thread wake-ups would cost as much as the work.
//
//   h = x + o(attention(qkv(norm(x))));  out = h + down(activation(gate(norm(h))) * up(norm(h)))
#pragma once

#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "linear.h"

namespace kvb {

struct NormWeight {
    const void* weight;  // null: no norm
    float eps, offset;
    int32_t width;  // elements normalised together
};

// What does not change between steps. Mirrored field by field in library.py.
struct Layer {
    int32_t hidden, inner, q_heads, kv_heads, dim, v_dim, activation, window;
    float scaling, softcap;
    const float* sinks;
    NormWeight before, between, q_norm, k_norm;
    Weights qkv, out, gate_up, down;
};

// What one step brings. Mirrored in library.py.
struct Step {
    int64_t rows, block_stride;
    int32_t block_size, num_spans, rotary;
    const int32_t *spans, *tables, *slot_block, *slot_offset;
    const void *cos, *sin;  // [rows, rotary]
    void *keys, *values;    // of this layer, in slab 0
};

template <typename T> class LayerRun {
    const Layer& layer;
    const Step& step;
    const T* x;
    T* out;
    int64_t rows, qkv_width, att_width;
    T *normed, *qkv, *attended, *delta, *total, *gate_up, *gated;
    T* tiles;

    T* take(T*& at, int64_t count) {
        T* start = at;
        at += (count + 63) / 64 * 64;
        return start;
    }

  public:
    LayerRun(const Layer& l, const Step& s, const T* input, T* output) : layer(l), step(s), x(input), out(output) {
        rows = step.rows;
        qkv_width = (layer.q_heads + layer.kv_heads) * layer.dim + layer.kv_heads * layer.v_dim;
        att_width = layer.q_heads * layer.v_dim;
        const int64_t widest = std::max<int64_t>({layer.hidden, layer.inner, att_width});
        const int64_t room = rows * (3 * layer.hidden + qkv_width + att_width + 3 * layer.inner) + 8 * 64;
        const int64_t needed = room + padded(rows) * widest + 64;
        static thread_local std::vector<T> memory;  // of the thread that opens the region; kept between layers
        if (int64_t(memory.size()) < needed) memory.resize(needed);
        T* at = aligned(memory.data());
        normed = take(at, rows * layer.hidden);
        qkv = take(at, rows * qkv_width);
        attended = take(at, rows * att_width);
        delta = take(at, rows * layer.hidden);
        total = take(at, rows * layer.hidden);
        gate_up = take(at, rows * 2 * layer.inner);
        gated = take(at, rows * layer.inner);
        tiles = at;
    }

    // Called by every thread of a parallel region.
    void run(Plan& plan) {
        norms(x, layer.before);
        product(normed, layer.qkv, qkv);
        store_kv();
        Call<T> call{plan.shape,
                     {layer.scaling, layer.softcap, layer.window, layer.sinks},
                     qkv, qkv_width,
                     static_cast<const T*>(step.keys), static_cast<const T*>(step.values), step.block_stride,
                     attended, att_width,
                     plan.sequences.data()};
        attention(call, plan);
        product(attended, layer.out, delta);
#pragma omp for
        for (int64_t i = 0; i < rows; ++i)
            add_norm_row(at(x, i, layer.hidden), at(delta, i, layer.hidden), static_cast<const T*>(layer.between.weight),
                         total + i * layer.hidden, normed + i * layer.hidden, layer.hidden, layer.between.eps,
                         layer.between.offset);
        product(normed, layer.gate_up, gate_up);
#pragma omp for
        for (int64_t i = 0; i < rows; ++i) {
            const T* gate = at(gate_up, i, 2 * layer.inner);
            gate_row(gate, gate + layer.inner, gated + i * layer.inner, layer.inner, layer.activation);
        }
        product(gated, layer.down, delta);
#pragma omp for
        for (int64_t i = 0; i < rows; ++i)
            add_row(at(total, i, layer.hidden), at(delta, i, layer.hidden), out + i * layer.hidden, layer.hidden);
    }

  private:
    static const T* at(const T* base, int64_t i, int64_t width) { return base + i * width; }

    void norms(const T* from, const NormWeight& norm) {
#pragma omp for
        for (int64_t i = 0; i < rows; ++i)
            norm_row(at(from, i, layer.hidden), static_cast<const T*>(norm.weight), normed + i * layer.hidden,
                     layer.hidden, norm.eps, norm.offset);
    }

    void product(const T* from, const Weights& w, T* to) {
        linear(LinearCall<T>{from, w.k, &w, to, rows, w.k, tiles});
    }

    void head_norms(T* part, int width, const NormWeight& norm) {
        for (int at = 0; norm.weight && at < width; at += norm.width)
            norm_row<T>(part + at, static_cast<const T*>(norm.weight), part + at, norm.width, norm.eps, norm.offset);
    }

    void store_kv() {
#pragma omp for
        for (int64_t i = 0; i < rows; ++i) {
            T* q = qkv + i * qkv_width;
            head_norms(q, layer.q_heads * layer.dim, layer.q_norm);
            head_norms(q + layer.q_heads * layer.dim, layer.kv_heads * layer.dim, layer.k_norm);
            rotate_and_write_row(q, layer.q_heads, layer.kv_heads, layer.dim, layer.v_dim, step.rotary,
                                 static_cast<const T*>(step.cos) + i * step.rotary,
                                 static_cast<const T*>(step.sin) + i * step.rotary, step.slot_block[i],
                                 step.slot_offset[i], static_cast<T*>(step.keys), static_cast<T*>(step.values),
                                 step.block_stride);
        }
    }
};

template <typename T> void run_layer(const Layer& layer, const Step& step, const T* x, T* out, int threads) {
    const Shape shape{layer.q_heads, layer.kv_heads, layer.dim, layer.v_dim, step.block_size};
    Plan plan(shape, step.spans, step.num_spans, step.tables, layer.window, threads);
    LayerRun<T> run(layer, step, x, out);
#pragma omp parallel num_threads(threads)
    run.run(plan);
}

}  // namespace kvb
