// The codes of packed weights become weights in registers, 32 (a run) at a time. With AVX-512 the 16 values that a 4-bit
// code can stand for are computed once per group, and a shuffle looks them up.
#pragma once

#include <array>

#include "packed.h"

namespace kvb {

#if defined(__AVX512F__)
// The values that the low four bits of a code stand for, and what each bit above them adds to one.
template <Codes C> struct Group {
    vec table, scale;

    Group() = default;
    Group(float a, float b) : table(iota() * splat(a) + b), scale(splat(a)) {}

    static vec iota() { return vec{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

    vec value(ivec nibbles) const {  // only the low four bits of each lane count
        return reinterpret_cast<vec>(
            _mm512_permutexvar_ps(reinterpret_cast<__m512i>(nibbles), reinterpret_cast<__m512>(table)));
    }
    vec add(vec w, uint32_t lanes, float times) const {
        return reinterpret_cast<vec>(_mm512_mask3_fmadd_ps(reinterpret_cast<__m512>(scale), _mm512_set1_ps(times),
                                                           reinterpret_cast<__m512>(w), __mmask16(lanes)));
    }
};
#else
template <Codes C> struct Group {
    vec a, b;

    Group() = default;
    Group(float scale, float offset) : a(splat(scale)), b(splat(offset)) {}
};
#endif

// float8_e4m3fn: no infinities, NaN where all seven bits are set.
inline float widen_e4m3(uint8_t x) {
    const int exponent = x >> 3 & 15, mantissa = x & 7;
    const float magnitude = exponent ? std::ldexp(8 + mantissa, exponent - 10) : mantissa * 0x1p-9f;
    if ((x & 127) == 127) return NAN;
    return x & 128 ? -magnitude : magnitude;
}

// Codes of 8 bits have too many values for a table.
template <> struct Group<Codes::SIGNED8> {
    vec a;
    Group() = default;
    Group(float scale, float) : a(splat(scale)) {}
};
template <> struct Group<Codes::UNSIGNED8> {
    vec a, b;
    Group() = default;
    Group(float scale, float offset) : a(splat(scale)), b(splat(offset)) {}
};
template <> struct Group<Codes::FLOAT8> {
    vec a;
    Group() = default;
    Group(float scale, float) : a(splat(scale * 256)) {}  // see Run
};

// The codes of one run of a row: weights 0 to 15 and 16 to 31 of it, given the group of each.
template <Codes C> struct Run {
    ivec codes;
    uint32_t bit4 = 0, bit5 = 0;

    Run(const Packing& p, const uint8_t* row, int64_t run) : codes(widen_bytes(row + 16 * run)) {
        const uint8_t* high = row + p.high_at;
        if constexpr (C == Codes::BITS5) bit4 = read<uint32_t>(high + 4 * run);
        if constexpr (C == Codes::BITS6) {
            bit4 = read<uint32_t>(high + 8 * run);
            bit5 = read<uint32_t>(high + 8 * run + 4);
        }
    }
    vec low(const Group<C>& group) const { return value(group, codes, bit4, bit5); }
    vec high(const Group<C>& group) const { return value(group, codes >> 4, bit4 >> 16, bit5 >> 16); }

  private:
#if defined(__AVX512F__)
    static vec value(const Group<C>& group, ivec nibbles, uint32_t bits4, uint32_t bits5) {
        vec w = group.value(nibbles);
        if constexpr (C != Codes::BITS4) w = group.add(w, bits4, 16);
        if constexpr (C == Codes::BITS6) w = group.add(w, bits5, 32);
        return w;
    }
#else
    static ivec spread(uint32_t bits, int to) {
        ivec lane;
        for (int i = 0; i < LANES; ++i) lane[i] = i;
        return (isplat(int32_t(bits & 0xffff)) >> lane & 1) << to;
    }
    static vec value(const Group<C>& group, ivec nibbles, uint32_t bits4, uint32_t bits5) {
        ivec q = nibbles & 15;
        if constexpr (C != Codes::BITS4) q |= spread(bits4, 4);
        if constexpr (C == Codes::BITS6) q |= spread(bits5, 5);
        return to_float(q) * group.a + group.b;
    }
#endif
};

template <> struct Run<Codes::SIGNED8> {
    const uint8_t* at;
    Run(const Packing&, const uint8_t* row, int64_t run) : at(row + RUN * run) {}
    vec low(const Group<Codes::SIGNED8>& g) const { return to_float(widen_signed(at)) * g.a; }
    vec high(const Group<Codes::SIGNED8>& g) const { return to_float(widen_signed(at + 16)) * g.a; }
};

template <> struct Run<Codes::UNSIGNED8> {
    const uint8_t* at;
    Run(const Packing&, const uint8_t* row, int64_t run) : at(row + RUN * run) {}
    vec low(const Group<Codes::UNSIGNED8>& g) const { return to_float(widen_bytes(at)) * g.a + g.b; }
    vec high(const Group<Codes::UNSIGNED8>& g) const { return to_float(widen_bytes(at + 16)) * g.a + g.b; }
};

template <> struct Run<Codes::FLOAT8> {
    const uint8_t* at;
    Run(const Packing&, const uint8_t* row, int64_t run) : at(row + RUN * run) {}
    vec low(const Group<Codes::FLOAT8>& g) const { return value(at) * g.a; }
    vec high(const Group<Codes::FLOAT8>& g) const { return value(at + 16) * g.a; }

  private:
    // 16 numbers, 2^8 too small.
    static vec one_by_one(const uint8_t* p) {
        static const auto table = [] {
            std::array<float, 256> all;
            for (int i = 0; i < 256; ++i) all[i] = widen_e4m3(uint8_t(i)) / 256;
            return all;
        }();
        vec out;
        for (int i = 0; i < LANES; ++i) out[i] = table[p[i]];
        return out;
    }
    static vec value(const uint8_t* p) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), nan = _mm_set1_epi8(127);
        if (__builtin_expect(_mm_cmpeq_epi8_mask(_mm_and_si128(bytes, nan), nan) != 0, 0)) return one_by_one(p);
        // Seven bits up a float8 is an fp16 2^8 too small, subnormal or not; sign extension has brought its sign to the top.
        const __m256i half = _mm256_andnot_si256(_mm256_set1_epi16(0x4000), _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7));
        return reinterpret_cast<vec>(_mm512_cvtph_ps(half));
#else
        return one_by_one(p);
#endif
    }
};

// Calls body(run, group of weights 0 to 15, group of weights 16 to 31) for each run of a row. Groups are made by
// make(g), as few times as possible.
template <Codes C, typename Make, typename Body>
inline void each_run(const Packing& p, int64_t k, Make make, Body body) {
    const int64_t runs = k / RUN;
    if constexpr (C == Codes::BITS6) {  // groups of 16
        for (int64_t run = 0; run < runs; ++run) body(run, make(2 * run), make(2 * run + 1));
    } else if (p.group == RUN) {
        for (int64_t run = 0; run < runs; ++run) {
            const auto group = make(run);
            body(run, group, group);
        }
    } else {
        const int64_t length = p.group / RUN;
        for (int64_t run = 0, g = 0; run < runs; ++g) {
            const auto group = make(g);
            for (const int64_t end = run + length; run < end; ++run) body(run, group, group);
        }
    }
}

inline void store_run(float* out, vec low, vec high) {
    store(out, low);
    store(out + LANES, high);
}
inline void store_run(bf16* out, vec low, vec high) {
#if defined(__AVX512BF16__)
    const __m512bh both = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(high), reinterpret_cast<__m512>(low));
    std::memcpy(out, &both, 64);
#else
    store(out, low);
    store(out + LANES, high);
#endif
}

// out[k]: the weights of a row. `ab`: room for 2 * affine_room floats.
template <Codes C, typename T> inline void unpack_row(const Packing& p, const uint8_t* row, int64_t k, float* ab, T* out) {
    float* b = ab + affine_room(p, k);
    const int64_t ahead = bytes_ahead(p), stride = bytes_of_run(p, k);
    affine(p, row, k, ab, b);
    each_run<C>(
        p, k, [&](int64_t g) { return Group<C>(ab[g], b[g]); },
        [&](int64_t run, const Group<C>& low, const Group<C>& high) {
            __builtin_prefetch(row + ahead + run * stride);
            const Run<C> codes(p, row, run);
            store_run(out + RUN * run, codes.low(low), codes.high(high));
        });
}

template <typename T>
inline void unpack_rows(const Packing& p, const uint8_t* rows, int64_t count, int64_t k, float* ab, T* out) {
    by_codes(p, [&](auto codes) {
        for (int64_t i = 0; i < count; ++i) unpack_row<decltype(codes)::value>(p, rows + i * p.row_bytes, k, ab, out + i * k);
    });
}

}  // namespace kvb
