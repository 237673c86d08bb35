// AMX tiles in software, for processors that have AVX-512 with bf16 products and no AMX: included before the CPU kernels, it
// replaces the compiler's functions. A tile used before tiles are configured ends the process.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps

namespace emulated {

constexpr int ROWS = 16, BYTES = 64;
static thread_local uint8_t tiles[8][ROWS][BYTES];
static thread_local bool configured = false;

inline uint8_t (*tile(int number))[BYTES] {
    if (!configured) __builtin_trap();
    return tiles[number];
}

template <typename T> T at(const uint8_t* row, int place) {
    T value;
    std::memcpy(&value, row + place * sizeof(T), sizeof(T));
    return value;
}

inline float wide(uint16_t bits) {
    const uint32_t all = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &all, 4);
    return value;
}

inline void configure(const void*) { configured = true; }
inline void release() { configured = false; }
inline void zero(int number) { std::memset(tile(number), 0, ROWS * BYTES); }
inline void load(int number, const void* from, long stride) {
    for (int i = 0; i < ROWS; ++i) std::memcpy(tile(number)[i], static_cast<const char*>(from) + i * stride, BYTES);
}
inline void store(int number, void* to, long stride) {
    for (int i = 0; i < ROWS; ++i) std::memcpy(static_cast<char*>(to) + i * stride, tile(number)[i], BYTES);
}
inline void multiply(int to, int left, int right) {
    for (int m = 0; m < ROWS; ++m)
        for (int n = 0; n < ROWS; ++n) {
            float sum = at<float>(tile(to)[m], n);
            for (int k = 0; k < ROWS; ++k)
                for (int half = 0; half < 2; ++half)
                    sum += wide(at<uint16_t>(tile(left)[m], 2 * k + half)) * wide(at<uint16_t>(tile(right)[k], 2 * n + half));
            std::memcpy(tile(to)[m] + n * sizeof(float), &sum, sizeof(float));
        }
}

}  // namespace emulated

#define _tile_loadconfig(config) emulated::configure(config)
#define _tile_release() emulated::release()
#define _tile_zero(number) emulated::zero(number)
#define _tile_loadd(number, from, stride) emulated::load(number, from, stride)
#define _tile_stored(number, to, stride) emulated::store(number, to, stride)
#define _tile_dpbf16ps(to, left, right) emulated::multiply(to, left, right)
#define syscall(...) 0  // of asking for tiles: granted
