// Products by dot products along k: every weight is read once, at the speed of memory, and one that is packed is unpacked
// in registers on its way.
#pragma once

#include "linear_call.h"

namespace kvb {

constexpr int DIRECT_ROWS = 4;  // rows of x up to which packed weights are unpacked in registers, and nothing else is faster

// -- dense ----------------------------------------------------------------------------------------------------------------

// What one vector instruction multiplies and sums: 16 numbers in fp32, or 32 in bf16 where the processor does that itself.
template <typename T> struct Numbers {
    static constexpr int LENGTH = LANES;
    vec x;
    Numbers() = default;
    explicit Numbers(const T* p) : x(load(p)) {}
    void add(const Numbers& other, vec& acc) const { acc += x * other.x; }
};
#ifdef __AVX512BF16__
template <> struct Numbers<bf16> {
    static constexpr int LENGTH = 2 * LANES;
    __m512i x;
    Numbers() = default;
    explicit Numbers(const bf16* p) : x(_mm512_loadu_si512(p)) {}
    void add(const Numbers& other, vec& acc) const {
        acc = reinterpret_cast<vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(acc), reinterpret_cast<__m512bh>(x),
                                                     reinterpret_cast<__m512bh>(other.x)));
    }
};
#endif

// Meanwhile the next rows are fetched: by itself the hardware reads 23 of the 31 GB/s that two cores can have here.
template <typename T, int M>
inline void dots(const T* const* x, const T* w, int64_t k, int columns, const T* bias, T* const* y) {
    constexpr int LENGTH = Numbers<T>::LENGTH;  // no more than a cache line
    vec acc[DOT_COLUMNS][M] = {};
    const T* rows[DOT_COLUMNS];
    for (int c = 0; c < DOT_COLUMNS; ++c) rows[c] = w + std::min(c, columns - 1) * k;
    int64_t i = 0;
    for (; i + LENGTH <= k; i += LENGTH) {
        Numbers<T> a[M];
        for (int m = 0; m < M; ++m) a[m] = Numbers<T>(x[m] + i);
        for (int c = 0; c < DOT_COLUMNS; ++c) {
            __builtin_prefetch(rows[c] + DOT_COLUMNS * k + i);
            const Numbers<T> b(rows[c] + i);
            for (int m = 0; m < M; ++m) a[m].add(b, acc[c][m]);
        }
    }
    for (int c = 0; c < columns; ++c)
        for (int m = 0; m < M; ++m) {
            float total = sum(acc[c][m]);
            for (int64_t j = i; j < k; ++j) total += widen(x[m][j]) * widen(rows[c][j]);
            y[m][c] = round_to<T>(total + (bias ? widen(bias[c]) : 0.0f));
        }
}

template <typename T> inline const T* bias_at(const Block& block) {
    return block.piece->bias ? static_cast<const T*>(block.piece->bias) + block.first : nullptr;
}

// M rows, the first of which is row m, times the rows `w[block.count, k]`.
template <typename T, int M> inline void dense_rows(const LinearCall<T>& call, const Block& block, const T* w, int64_t m) {
    const T *xs[M], *bias = bias_at<T>(block);
    T* ys[M];
    for (int64_t n = 0; n < block.count; n += DOT_COLUMNS) {
        for (int i = 0; i < M; ++i) {
            xs[i] = call.x + (m + i) * call.x_stride;
            ys[i] = call.y + (m + i) * call.weights->n + block.column + n;
        }
        dots<T, M>(xs, w + n * call.k, call.k, int(std::min<int64_t>(DOT_COLUMNS, block.count - n)),
                   bias ? bias + n : nullptr, ys);
    }
}

template <typename T> inline void dense_block(const LinearCall<T>& call, const Block& block, const T* w) {
    for (int64_t m = 0; m < call.rows; m += DOT_ROWS) switch (std::min<int64_t>(DOT_ROWS, call.rows - m)) {
            case 1: dense_rows<T, 1>(call, block, w, m); break;
            case 2: dense_rows<T, 2>(call, block, w, m); break;
            case 3: dense_rows<T, 3>(call, block, w, m); break;
            default: dense_rows<T, 4>(call, block, w, m);
        }
}

// -- packed ---------------------------------------------------------------------------------------------------------------

// N rows of W, each with its a and b (of affine_room floats) in `ab`, times M rows of x: sums[c * M + m].
template <Codes C, int N, int M>
[[gnu::noinline]] void packed_dots(const Packing& p, const uint8_t* const* rows, const float* ab, const float* const* x, int64_t k,
                        float* sums) {
    struct Groups {
        Group<C> of[N];
    };
    vec acc[N][M] = {};
    const int64_t room = affine_room(p, k), ahead = bytes_ahead(p), stride = bytes_of_run(p, k);
    each_run<C>(
        p, k,
        [&](int64_t g) {
            Groups groups;
            for (int c = 0; c < N; ++c) groups.of[c] = Group<C>(ab[2 * c * room + g], ab[(2 * c + 1) * room + g]);
            return groups;
        },
        [&](int64_t run, const Groups& low, const Groups& high) {
            for (int c = 0; c < N; ++c) {
                __builtin_prefetch(rows[c] + ahead + run * stride);
                const Run<C> codes(p, rows[c], run);
                const vec first = codes.low(low.of[c]), second = codes.high(high.of[c]);
                for (int m = 0; m < M; ++m) {
                    acc[c][m] += first * load(x[m] + RUN * run);
                    acc[c][m] += second * load(x[m] + RUN * run + LANES);
                }
            }
        });
    for (int c = 0; c < N; ++c)
        for (int m = 0; m < M; ++m) sums[c * M + m] = sum(acc[c][m]);
}

template <Codes C, int M, typename T>
inline void packed_rows(const LinearCall<T>& call, const Block& block, const float* const* x, float* ab) {
    constexpr int N = M <= 2 ? 4 : 2;
    const Packing& p = block.piece->packing;
    const uint8_t* w = static_cast<const uint8_t*>(block.piece->weight) + block.first * p.row_bytes;
    const T* bias = bias_at<T>(block);
    const int64_t room = affine_room(p, call.k);
    for (int64_t n = 0; n < block.count; n += N) {
        const int columns = int(std::min<int64_t>(N, block.count - n));
        const uint8_t* rows[N];
        for (int c = 0; c < N; ++c) {
            rows[c] = w + (n + std::min(c, columns - 1)) * p.row_bytes;
            affine(p, rows[c], call.k, ab + 2 * c * room, ab + (2 * c + 1) * room);
        }
        float sums[N * M];
        packed_dots<C, N, M>(p, rows, ab, x, call.k, sums);
        for (int c = 0; c < columns; ++c)
            for (int m = 0; m < M; ++m)
                call.y[m * call.weights->n + block.column + n + c] =
                    round_to<T>(sums[c * M + m] + (bias ? widen(bias[n + c]) : 0.0f));
    }
}

// x[rows]: all rows of x as floats, at most DIRECT_ROWS.
template <typename T>
inline void packed_block(const LinearCall<T>& call, const Block& block, const float* const* x, float* ab) {
    by_codes(block.piece->packing, [&](auto codes) {
        constexpr Codes C = decltype(codes)::value;
        switch (call.rows) {
            case 1: return packed_rows<C, 1>(call, block, x, ab);
            case 2: return packed_rows<C, 2>(call, block, x, ab);
            case 3: return packed_rows<C, 3>(call, block, x, ab);
            default: return packed_rows<C, 4>(call, block, x, ab);
        }
    });
}

// -- both -----------------------------------------------------------------------------------------------------------------

inline const float* as_floats(const float* x, float*, int64_t) { return x; }
inline const float* as_floats(const bf16* x, float* to, int64_t k) {  // k is a multiple of 32
    for (int64_t i = 0; i < k; i += LANES) store(to + i, load(x + i));
    return to;
}

template <typename T> inline void linear_dot(const LinearCall<T>& call) {
    const Weights& weights = *call.weights;
    const int64_t room = affine_room(weights, call.k), blocks = num_blocks(weights, GRAIN);
    const bool few = call.rows <= DIRECT_ROWS;
    float* ab = room ? scratch(2 * DOT_COLUMNS * room + (few ? DIRECT_ROWS : GRAIN) * call.k) : nullptr;
    float* rest = ab + 2 * DOT_COLUMNS * room;  // x as floats, or rows of W
    const float* x[DIRECT_ROWS];
    for (int64_t m = 0; room && few && m < call.rows; ++m)
        x[m] = as_floats(call.x + m * call.x_stride, rest + m * call.k, call.k);
#pragma omp for schedule(static)
    for (int64_t b = 0; b < blocks; ++b) {
        const Block block = block_at(weights, GRAIN, b);
        if (!block.piece->packed()) {
            dense_block(call, block, static_cast<const T*>(block.piece->weight) + block.first * call.k);
        } else if (few) {
            packed_block(call, block, x, ab);
        } else {
            const Packing& p = block.piece->packing;
            T* w = reinterpret_cast<T*>(rest);
            unpack_rows(p, static_cast<const uint8_t*>(block.piece->weight) + block.first * p.row_bytes, block.count,
                        call.k, ab, w);
            dense_block(call, block, w);
        }
    }
}

}  // namespace kvb
