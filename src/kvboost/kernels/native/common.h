// Vector types and small functions shared by the CPU kernels. Plain GCC/Clang vector extensions: the compiler lowers
// 16 floats to whatever the machine has (AVX-512, two AVX2, four NEON registers).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define KVB_EXPORT extern "C" __attribute__((visibility("default")))

namespace kvb {

constexpr int LANES = 16;

typedef float vec __attribute__((vector_size(64), aligned(4)));      // loads and stores at any address
typedef int32_t ivec __attribute__((vector_size(64), aligned(4)));

struct bf16 {
    uint16_t bits;
};

inline vec splat(float x) { return vec{} + x; }
inline ivec isplat(int32_t x) { return ivec{} + x; }
inline vec load(const float* p) { return *reinterpret_cast<const vec*>(p); }
inline void store(float* p, vec x) { *reinterpret_cast<vec*>(p) = x; }

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// Round to nearest, ties to even; NaN stays NaN.
inline bf16 narrow(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return bf16{uint16_t((bits >> 16) | 0x40)};
    return bf16{uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

template <typename T> inline T round_to(float x);
template <> inline float round_to<float>(float x) { return x; }
template <> inline bf16 round_to<bf16>(float x) { return narrow(x); }

inline vec select(ivec mask, vec yes, vec no) {
    return reinterpret_cast<vec>((mask & reinterpret_cast<ivec>(yes)) | (~mask & reinterpret_cast<ivec>(no)));
}
inline vec vmax(vec a, vec b) { return select(a > b, a, b); }
inline vec vmin(vec a, vec b) { return select(a < b, a, b); }

typedef float half_vec __attribute__((vector_size(32)));
typedef float quarter_vec __attribute__((vector_size(16)));

// Pairwise, so that the adds do not wait for one another.
inline float sum(vec x) {
    half_vec half = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                    __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    quarter_vec quarter = __builtin_shufflevector(half, half, 0, 1, 2, 3) + __builtin_shufflevector(half, half, 4, 5, 6, 7);
    quarter += __builtin_shufflevector(quarter, quarter, 2, 3, 0, 1);
    return quarter[0] + quarter[1];
}

inline float highest(vec x) {
    float top = x[0];
    for (int i = 1; i < LANES; ++i) top = x[i] > top ? x[i] : top;
    return top;
}

// e^x within 2 ulp for x in [-87, 88]; below that 0.
inline vec exp(vec x) {
    ivec tiny = x < splat(-87.0f);
    x = vmin(vmax(x, splat(-87.0f)), splat(88.0f));
    vec shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: rounds to a whole number
    vec n = shifted - 12582912.0f;
    vec r = x - n * 0.693145751953125f;
    r = r - n * 1.42860682030941723212e-6f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ivec exponent = (reinterpret_cast<ivec>(shifted) - 0x4b400000) << 23;
    return select(tiny, vec{}, reinterpret_cast<vec>(reinterpret_cast<ivec>(p) + exponent));
}

inline vec tanh(vec x) {
    vec magnitude = vmin(select(x < vec{}, -x, x), splat(20.0f));
    vec e = exp(magnitude * -2.0f);
    vec t = (1.0f - e) / (1.0f + e);
    return select(x < vec{}, -t, t);
}

#if defined(__AVX512F__)
}  // namespace kvb
#include <immintrin.h>
namespace kvb {
inline vec load(const bf16* p) {
    __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return reinterpret_cast<vec>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline void store(bf16* p, vec x) {
#if defined(__AVX512BF16__)
    __m256bh half = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(x));
    std::memcpy(p, &half, 32);
#else
    for (int i = 0; i < LANES; ++i) p[i] = narrow(x[i]);
#endif
}
#else
inline vec load(const bf16* p) {
    vec out;
    for (int i = 0; i < LANES; ++i) out[i] = widen(p[i]);
    return out;
}
inline void store(bf16* p, vec x) {
    for (int i = 0; i < LANES; ++i) p[i] = narrow(x[i]);
}
#endif

// What a value becomes when it is stored as T and read again.
template <typename T> inline vec rounded(vec x);
template <> inline vec rounded<float>(vec x) { return x; }
template <> inline vec rounded<bf16>(vec x) {
    bf16 kept[LANES];
    store(kept, x);
    return load(kept);
}

// The first cache line at or after p.
template <typename T> inline T* aligned(T* p) {
    return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(p) + 63) & ~uintptr_t(63));
}

// Calls `body` with a zero of the element type.
template <typename Body> inline void typed(int is_bf16, Body body) {
    if (is_bf16)
        body(bf16{});
    else
        body(float{});
}

constexpr int64_t PARALLEL_FROM = 8192;  // elements; below, a second thread costs more than it does

// body(i) for every row; by several threads when there is enough to do. A parallel region of one thread is not the same
// as none: libgomp takes its team apart for it.
template <typename Body> inline void each_row(int64_t rows, int64_t elements, int threads, Body body) {
    if (elements < PARALLEL_FROM || threads == 1) {
        for (int64_t i = 0; i < rows; ++i) body(i);
        return;
    }
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < rows; ++i) body(i);
}

// The first n (< 16) elements; the rest are zeros.
template <typename T> inline vec load_part(const T* p, int n) {
    vec out{};
    for (int i = 0; i < n; ++i) out[i] = widen(p[i]);
    return out;
}
template <typename T> inline void store_part(T* p, vec x, int n) {
    for (int i = 0; i < n; ++i) p[i] = round_to<T>(x[i]);
}

}  // namespace kvb
