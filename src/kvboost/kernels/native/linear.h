// y = x W^T (+ bias) for few rows, straight from the weight as PyTorch holds it, dense or packed: no second copy.
//
// These functions run inside a parallel region: every thread calls them with the same arguments, they share the work and
// return together.
#pragma once

#include "linear_amx.h"
#include "linear_dot.h"
#include "linear_vectors.h"

namespace kvb {

constexpr int DOT_ROWS_MOST = 4;  // rows of x up to which dot products along k are as fast

template <typename T> inline void linear_wide(const LinearCall<T>& call) {
#ifdef KVB_PANELS
    if (has_vectors<T>() && call.rows > DOT_ROWS_MOST) return linear_vectors(call);
#endif
    linear_dot(call);
}

inline void linear(const LinearCall<float>& call) { linear_wide(call); }

// Tiles, for more rows than a dot product serves at the speed of memory.
inline void linear(const LinearCall<bf16>& call) {
#ifdef KVB_AMX
    if (has_amx() && fits_amx(*call.weights) && call.rows > DIRECT_ROWS) return linear_amx(call);
#endif
    linear_wide(call);
}

}  // namespace kvb
