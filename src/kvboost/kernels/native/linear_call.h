// What a product y = x W^T (+ bias) is given. W's rows may lie in up to three pieces of different kinds: weights that share
// their input are one product even where a file packs them differently.
#pragma once

#include <algorithm>
#include <vector>

#include "common.h"
#include "packed_codes.h"

namespace kvb {

constexpr int DOT_ROWS = 4;     // rows of x whose products are summed together
constexpr int DOT_COLUMNS = 4;  // rows of W alike
constexpr int GRAIN = 16;       // rows of W a thread takes at once
constexpr int TILE = 16;        // rows of an AMX tile; also its columns in fp32
constexpr int DEPTH = 32;       // bf16 elements along k per AMX tile
constexpr int PIECES = 3;

inline int64_t padded(int64_t rows) { return (rows + TILE - 1) / TILE * TILE; }

// Rows of W. Mirrored in library.py.
struct Weight {
    const void *weight, *bias;  // [n, k], or [n, packing.row_bytes] bytes; [n] or null
    int64_t n;
    Packing packing;

    bool packed() const { return packing.scheme != DENSE; }
};

// All of W: `count` pieces with n rows of k weights. Mirrored in library.py.
struct Weights {
    Weight pieces[PIECES];
    int64_t count, n, k;
};

template <typename T> struct LinearCall {
    const T* x;  // [rows, k], rows x_stride apart
    int64_t x_stride;
    const Weights* weights;
    T* y;  // [rows, weights->n], contiguous
    int64_t rows, k;
    T* tiles;  // room for padded(rows) * k, at a cache line; only panels.h needs it
};

// Some rows of one piece of W, the first of which is row `first` of it and gives column `column` of y.
struct Block {
    const Weight* piece;
    int64_t first, count, column;
};

// The work of a product, in blocks of `size` rows of W.
inline int64_t num_blocks(const Weights& weights, int64_t size) {
    int64_t total = 0;
    for (int i = 0; i < weights.count; ++i) total += (weights.pieces[i].n + size - 1) / size;
    return total;
}

inline Block block_at(const Weights& weights, int64_t size, int64_t index) {
    const Weight* piece = weights.pieces;
    int64_t column = 0;
    for (int64_t blocks; index >= (blocks = (piece->n + size - 1) / size); ++piece) {
        index -= blocks;
        column += piece->n;
    }
    const int64_t first = index * size;
    return {piece, first, std::min(size, piece->n - first), column + first};
}

// Floats of one row's a (or b), whichever piece it is of; 0 where all are dense.
inline int64_t affine_room(const Weights& weights, int64_t k) {
    int64_t room = 0;
    for (int i = 0; i < weights.count; ++i)
        if (weights.pieces[i].packed()) room = std::max(room, affine_room(weights.pieces[i].packing, k));
    return room;
}

// Memory of the calling thread, kept between calls: `floats` of it, at a cache line.
inline float* scratch(int64_t floats) {
    static thread_local std::vector<float> memory;
    if (int64_t(memory.size()) < floats + LANES) memory.resize(floats + LANES);
    return aligned(memory.data());
}

}  // namespace kvb
