// Paged attention on a CPU, read in place: no gather, no mask tensor, no page beyond what a query sees.
//
// One task is (sequence, KV head, tile of query rows, piece of the keys). A query row is (token, head of the group). The
// keys of a task go by in tiles of 64; the running maximum and sum per row follow the online softmax (Milakov and
// Gimelshein 2018), and pieces of one tile of rows are merged by their log-sum-exp. Three ways to compute a tile:
// attention_few.h (decode: head dims across vector lanes), attention_many.h (prefill: query rows across lanes) and
// attention_amx.h (the same in bf16, by matrix units).
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "attention_amx.h"
#include "attention_few.h"
#include "attention_many.h"
#include "attention_task.h"
#include "common.h"

namespace kvb {

constexpr int MIN_PIECE = 256;  // keys; smaller pieces cost more in merging than they gain

template <typename T> void run_rows(const Call<T>& call, const Task& task, Scratch& scratch) {
    if (task.rows <= FEW_ROWS) return few_rows(call, task, scratch);
#ifdef KVB_TILES
    if constexpr (std::is_same_v<T, bf16>)
        if (in_tiles<T>(call.shape)) return many_rows<AmxTiles>(call, task, scratch);
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

// Partial result of one piece: peak[rows], total[rows], out[rows][v_dim].
inline int64_t partial_floats(const Shape& shape) { return int64_t(shape.v_dim + 2) * MAX_ROWS; }

template <typename T> void run(const Call<T>& call, const Task& task, Scratch& scratch, float* partials) {
    run_rows(call, task, scratch);
    const int v_dim = call.shape.v_dim;
    if (task.pieces == 1) {
        for (int r = 0; r < task.rows; ++r)
            write(call, task, r, scratch.out + r * scratch.row_stride, scratch.dim_stride, scratch.peak[r],
                  scratch.total[r]);
        return;
    }
    float* kept = partials + (task.partial + task.piece) * partial_floats(call.shape);
    for (int r = 0; r < task.rows; ++r) {
        kept[r] = scratch.peak[r];
        kept[MAX_ROWS + r] = scratch.total[r];
        for (int d = 0; d < v_dim; ++d)
            kept[2 * MAX_ROWS + r * v_dim + d] = scratch.out[r * scratch.row_stride + d * scratch.dim_stride];
    }
}

// Merge the pieces of the tile whose first piece is `task`.
template <typename T> void merge(const Call<T>& call, const Task& task, const float* partials, float* column) {
    const int v_dim = call.shape.v_dim;
    const int64_t size = partial_floats(call.shape);
    const float* first = partials + task.partial * size;
    for (int r = 0; r < task.rows; ++r) {
        float peak = NONE, total = 0;
        for (int p = 0; p < task.pieces; ++p) peak = std::max(peak, first[p * size + r]);
        std::fill(column, column + v_dim, 0.0f);
        for (int p = 0; p < task.pieces; ++p) {
            const float* kept = first + p * size;
            float factor = std::exp(kept[r] - peak);
            total += kept[MAX_ROWS + r] * factor;
            for (int d = 0; d < v_dim; ++d) column[d] += kept[2 * MAX_ROWS + r * v_dim + d] * factor;
        }
        write(call, task, r, column, 1, peak, total);
    }
}

// Cut the work: tiles of up to 48 rows; where there are too few tiles for the threads, their keys too.
inline std::vector<Task> plan(const Shape& shape, const Sequence* sequences, int count, int window, int threads) {
    std::vector<Task> tiles;
    // Heads outermost: sequences that share a prefix find its keys and values in the cache, one after the other.
    for (int head = 0; head < shape.kv_heads; ++head)
        for (int s = 0; s < count; ++s) {
            const int rows = sequences[s].count * shape.group();
            for (int first = 0; first < rows; first += MAX_ROWS)
                tiles.push_back({s, head, first, std::min(MAX_ROWS, rows - first), 0, 1, 0});
        }
    int wanted = (4 * threads + int(tiles.size()) - 1) / std::max<int>(1, tiles.size());
    if (threads == 1 || wanted <= 1) return tiles;
    std::vector<Task> tasks;
    for (Task tile : tiles) {
        int seen = sequences[tile.sequence].start + sequences[tile.sequence].count;
        if (window) seen = std::min(seen, window + sequences[tile.sequence].count);
        tile.pieces = std::clamp(seen / MIN_PIECE, 1, wanted);
        tile.partial = tasks.size();
        for (tile.piece = 0; tile.piece < tile.pieces; ++tile.piece) tasks.push_back(tile);
    }
    return tasks;
}

// All tasks of one layer, prepared by one thread and then run by all of a parallel region together.
struct Plan {
    Shape shape;
    std::vector<Sequence> sequences;
    std::vector<Task> tasks;
    std::vector<float> partials;

    // spans: per sequence (begin, count, start, table), `table` an offset into `tables`.
    Plan(const Shape& s, const int32_t* spans, int num_spans, const int32_t* tables, int window, int threads)
        : shape(s), sequences(num_spans) {
        for (int i = 0; i < num_spans; ++i)
            sequences[i] = {spans[4 * i], spans[4 * i + 1], spans[4 * i + 2], tables + spans[4 * i + 3]};
        tasks = plan(shape, sequences.data(), num_spans, window, threads);
        if (std::any_of(tasks.begin(), tasks.end(), [](const Task& t) { return t.pieces > 1; }))
            partials.resize(tasks.size() * partial_floats(shape));
    }
};

template <typename T> void attention(const Call<T>& call, Plan& plan) {
    Scratch scratch(call.shape);
    const int64_t count = plan.tasks.size();
#ifdef KVB_TILES
    if (in_tiles<T>(call.shape)) use_tiles();
#endif
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; ++i) run(call, plan.tasks[i], scratch, plan.partials.data());
#ifdef KVB_TILES
    if (in_tiles<T>(call.shape)) _tile_release();
#endif
    if (plan.partials.empty()) return;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; ++i)
        if (plan.tasks[i].pieces > 1 && plan.tasks[i].piece == 0)
            merge(call, plan.tasks[i], plan.partials.data(), scratch.query);
}

}  // namespace kvb
