// Paged attention on a CPU, read in place: no gather, no mask tensor, no page beyond what a query sees.
//
// One task is (sequence, KV head, tile of query rows, piece of the keys); sequences that decode behind the same blocks share
// tasks over those (attention_plan.h). A query row is (token, head of the group). The keys of a task go by in tiles of 64;
// the running maximum and sum per row follow the online softmax (Milakov and Gimelshein 2018), and pieces of one tile of
// rows are merged by their log-sum-exp. Four ways to compute a tile:
// attention_few.h (decode: head dims across vector lanes), attention_many.h (prefill: query rows across lanes),
// attention_dots.h (the same in bf16, for pairs) and attention_amx.h (by matrix units).
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "attention_amx.h"
#include "attention_dots.h"
#include "attention_few.h"
#include "attention_many.h"
#include "attention_plan.h"
#include "attention_task.h"
#include "common.h"

namespace kvb {

template <typename T> void run_rows(const Call<T>& call, const Task& task, Scratch& scratch) {
    if (task.rows <= FEW_ROWS) return few_rows(call, task, scratch);
#ifdef KVB_TILES
    if constexpr (std::is_same_v<T, bf16>)
        if (in_tiles<T>(call.shape)) return many_rows<AmxTiles>(call, task, scratch);
#endif
#ifdef KVB_DOTS
    if constexpr (std::is_same_v<T, bf16>)
        if (in_dots(call.shape)) return many_rows<DotTiles>(call, task, scratch);
#endif
    many_rows<VectorTiles>(call, task, scratch);
}

// One finished row: `column` is its output, not yet divided by `total`.
template <typename T>
void write(const Call<T>& call, const Task& task, int r, const float* column, int stride, float peak, float total) {
    const Sequence& seq = call.sequences[task.sequence];
    int group = call.shape.group(), at = r + task.first_row, head = task.head * group + at % group;
    float factor = 1.0f;
    if (call.options.sinks) {  // one more logit in the softmax, without a value
        float sink = call.options.sinks[head], top = std::max(peak, sink);
        factor = std::exp(peak - top);
        total = total * factor + std::exp(sink - top);
    }
    factor /= total;
    T* place = call.out + (seq.begin + at / group) * call.out_stride + head * call.shape.v_dim;
    for (int d = 0; d < call.shape.v_dim; ++d) place[d] = round_to<T>(column[d * stride] * factor);
}

template <typename T> void run(const Call<T>& call, const Task& task, Scratch& scratch, float* partials) {
    run_rows(call, task, scratch);
    const int v_dim = call.shape.v_dim;
    if (!task.is_part()) {
        for (int r = 0; r < task.rows; ++r)
            write(call, task, r, scratch.out + r * scratch.row_stride, scratch.dim_stride, scratch.peak[r],
                  scratch.total[r]);
        return;
    }
    for (int r = 0; r < task.rows; ++r) {
        float* kept = partial_row(call.shape, task, task.piece, r, partials);
        kept[0] = scratch.peak[r];
        kept[1] = scratch.total[r];
        for (int d = 0; d < v_dim; ++d) kept[2 + d] = scratch.out[r * scratch.row_stride + d * scratch.dim_stride];
    }
}

// Merge what was left of the rows of a tile: its own pieces, `task` the first, and those over keys it shares.
template <typename T> void merge(const Call<T>& call, const Task& task, float* partials, float* column) {
    const int v_dim = call.shape.v_dim, shared = task.shared ? task.shared->pieces : 0;
    for (int r = 0; r < task.rows; ++r) {
        const auto part = [&](int p) -> const float* {
            return p < shared ? partial_row(call.shape, *task.shared, p, task.shared_row + r, partials)
                              : partial_row(call.shape, task, p - shared, r, partials);
        };
        float peak = NONE, total = 0;
        for (int p = 0; p < shared + task.pieces; ++p) peak = std::max(peak, part(p)[0]);
        std::fill(column, column + v_dim, 0.0f);
        for (int p = 0; p < shared + task.pieces; ++p) {
            const float* kept = part(p);
            const float factor = std::exp(kept[0] - peak);
            total += kept[1] * factor;
            for (int d = 0; d < v_dim; ++d) column[d] += kept[2 + d] * factor;
        }
        write(call, task, r, column, 1, peak, total);
    }
}

template <typename T> void attention(const Call<T>& call, Plan& plan) {
    Scratch scratch(call.shape);
    const int64_t count = plan.tasks.size();
#ifdef KVB_TILES
    if (in_tiles<T>(call.shape)) use_tiles();
#endif
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; ++i) run(call, plan.tasks[i], scratch, plan.partials);
#ifdef KVB_TILES
    if (in_tiles<T>(call.shape)) _tile_release();
#endif
    if (!plan.partials) return;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; ++i)
        if (const Task& task = plan.tasks[i]; task.is_part() && !task.members && task.piece == 0)
            merge(call, task, plan.partials, scratch.query);
}

}  // namespace kvb
