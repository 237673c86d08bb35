// Packed weights: rows of bytes as kvboost/weights/packing.py lays them out. Every scheme comes down to w = a * q + b with a
// and b per group, so a row has two steps: its scales become arrays of a and b (`affine`, here), then its codes q become
// weights in registers (packed_codes.h).
#pragma once

#include <algorithm>

#include "common.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace kvb {

constexpr int RUN = 32;
constexpr int SUPER = 256;  // weights under one pair of fp16 scales in the two-level schemes
constexpr int64_t AHEAD_BYTES = 8192;  // one row of x against 4-bit weights takes half as long with them fetched ahead

enum Scheme { DENSE = 0, SYMMETRIC = 1, ZEROS = 2, MINIMUM = 3, TWO_LEVEL = 4, TWO_LEVEL_SIGNED = 5, FLOAT8 = 6 };

// Mirrored in library.py. Offsets count bytes from the beginning of a row.
struct Packing {
    int32_t scheme, bits, group, scale_bytes;
    int64_t high_at, scales_at, beside_at, row_bytes;
};

// What the code bytes are.
enum class Codes { BITS4, BITS5, BITS6, SIGNED8, UNSIGNED8, FLOAT8 };

// Calls body(std::integral_constant<Codes, ...>).
template <typename Body> inline void by_codes(const Packing& packing, Body body) {
    using std::integral_constant;
    if (packing.scheme == FLOAT8) return body(integral_constant<Codes, Codes::FLOAT8>{});
    if (packing.bits == 4) return body(integral_constant<Codes, Codes::BITS4>{});
    if (packing.bits == 5) return body(integral_constant<Codes, Codes::BITS5>{});
    if (packing.bits == 6) return body(integral_constant<Codes, Codes::BITS6>{});
    if (packing.scheme == ZEROS) return body(integral_constant<Codes, Codes::UNSIGNED8>{});
    return body(integral_constant<Codes, Codes::SIGNED8>{});
}

// -- primitives ---------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
inline ivec widen_bytes(const uint8_t* p) {
    return reinterpret_cast<ivec>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline ivec widen_signed(const uint8_t* p) {
    return reinterpret_cast<ivec>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
#else
inline ivec widen_bytes(const uint8_t* p) {
    ivec out;
    for (int i = 0; i < LANES; ++i) out[i] = p[i];
    return out;
}
inline ivec widen_signed(const uint8_t* p) {
    ivec out;
    for (int i = 0; i < LANES; ++i) out[i] = int8_t(p[i]);
    return out;
}
#endif
inline vec to_float(ivec x) { return __builtin_convertvector(x, vec); }

template <typename T> inline T read(const uint8_t* p) {
    T out;
    std::memcpy(&out, p, sizeof(T));
    return out;
}

inline float widen_half(uint16_t x) {
#if defined(__F16C__)
    return _cvtsh_ss(x);
#else
    const uint32_t sign = uint32_t(x & 0x8000) << 16, exponent = x >> 10 & 31, mantissa = x & 1023;
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * mantissa * 0x1p-24f;
    const uint32_t bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | mantissa << 13;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
#endif
}

// n numbers of 2 or 4 bytes as floats; `to` has room for a multiple of 16.
inline void scales(const uint8_t* from, int bytes, float* to, int64_t n) {
    if (bytes == 4) {
        std::memcpy(to, from, 4 * n);
        return;
    }
    int64_t i = 0;
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    for (; i < n; i += LANES) {
        const __mmask16 present = n - i >= LANES ? 0xffff : (1u << (n - i)) - 1;
        store(to + i, reinterpret_cast<vec>(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(present, from + 2 * i))));
    }
#else
    for (; i < n; ++i) to[i] = widen_half(read<uint16_t>(from + 2 * i));
#endif
}

// Bytes of a row for each of its runs, rounded up: less than a cache line, so that a walk over a row in such steps touches
// each of its lines.
inline int64_t bytes_of_run(const Packing& p, int64_t k) { return (p.row_bytes * RUN + k - 1) / k; }

// How far ahead of their use bytes are fetched, in whole rows.
inline int64_t bytes_ahead(const Packing& p) { return (AHEAD_BYTES + p.row_bytes - 1) / p.row_bytes * p.row_bytes; }

// -- scales of a row ----------------------------------------------------------------------------------------------------

inline int64_t groups_of(const Packing& p, int64_t k) { return k / p.group; }

// Room for the a (or the b) of one row.
inline int64_t affine_room(const Packing& p, int64_t k) { return (groups_of(p, k) + LANES - 1) / LANES * LANES; }

inline void two_level(const Packing& p, const uint8_t* row, int64_t k, float* a, float* b) {
    const ivec odd{0, -1, 0, -1, 0, -1, 0, -1, 0, -1, 0, -1, 0, -1, 0, -1};
    for (int64_t s = 0; s < k / SUPER; ++s) {
        const uint8_t* pair = row + p.scales_at + 4 * s;
        const float d = widen_half(read<uint16_t>(pair)), dmin = widen_half(read<uint16_t>(pair + 2));
        const vec both = to_float(widen_bytes(row + p.beside_at + 16 * s)) * select(odd, splat(-dmin), splat(d));
        const half_vec even_lanes = __builtin_shufflevector(both, both, 0, 2, 4, 6, 8, 10, 12, 14);
        const half_vec odd_lanes = __builtin_shufflevector(both, both, 1, 3, 5, 7, 9, 11, 13, 15);
        std::memcpy(a + 8 * s, &even_lanes, 32);
        std::memcpy(b + 8 * s, &odd_lanes, 32);
    }
}

inline void two_level_signed(const Packing& p, const uint8_t* row, int64_t k, float* a, float* b) {
    for (int64_t s = 0; s < k / SUPER; ++s) {
        const vec scale = to_float(widen_signed(row + p.beside_at + 16 * s)) *
                          widen_half(read<uint16_t>(row + p.scales_at + 2 * s));
        store(a + 16 * s, scale);
        store(b + 16 * s, scale * -32.0f);
    }
}

// a[groups], b[groups] of the weights w = a * q + b in a row; b stays as it is where all are zero (8 bits, no zeros).
inline void affine(const Packing& p, const uint8_t* row, int64_t k, float* a, float* b) {
    if (p.scheme == TWO_LEVEL) return two_level(p, row, k, a, b);
    if (p.scheme == TWO_LEVEL_SIGNED) return two_level_signed(p, row, k, a, b);
    const int64_t groups = groups_of(p, k);
    scales(row + p.scales_at, p.scale_bytes, a, groups);
    const uint8_t* beside = row + p.beside_at;
    if (p.scheme == MINIMUM) return scales(beside, p.scale_bytes, b, groups);
    if (p.scheme == SYMMETRIC && p.bits < 8) {
        const float middle = -float(1 << (p.bits - 1));
        for (int64_t g = 0; g < groups; g += LANES) store(b + g, load(a + g) * middle);
    } else if (p.scheme == ZEROS && p.bits == 8) {
        for (int64_t g = 0; g < groups; ++g) b[g] = -a[g] * beside[g];
    } else if (p.scheme == ZEROS) {
        for (int64_t g = 0; g < groups; ++g) b[g] = -a[g] * (beside[g / 2] >> g % 2 * 4 & 15);
    }
}

}  // namespace kvb
