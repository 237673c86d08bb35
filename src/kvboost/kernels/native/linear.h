// y = x W^T (+ bias) for few rows, straight from the weight as PyTorch holds it, dense or packed: no second copy.
//
// These functions run inside a parallel region: every thread calls them with the same arguments, they share the work and
// return together.
#pragma once

#include <type_traits>

#include "linear_amx.h"
#include "linear_dot.h"
#include "linear_vectors.h"

namespace kvb {

// Tiles or vectors, for more rows than a dot product serves at the speed of memory.
template <typename T> inline void linear(const LinearCall<T>& call) {
    if (call.rows <= DIRECT_ROWS) return linear_dot(call);
#ifdef KVB_AMX
    if constexpr (std::is_same_v<T, bf16>)
        if (has_amx() && fits_amx(*call.weights)) return linear_amx(call);
#endif
#ifdef KVB_PANELS
    if (has_vectors<T>()) return linear_vectors(call);
#endif
    linear_dot(call);
}

}  // namespace kvb
