// What one attention task is, and the memory it works in.
#pragma once

#include <algorithm>
#include <vector>

#include "common.h"

namespace kvb {

constexpr int KEYS = 64;        // keys per tile
constexpr int MAX_VECS = 3;     // vectors of query rows per tile
constexpr int MAX_ROWS = MAX_VECS * LANES;
constexpr int FEW_ROWS = 8;     // up to here head dims lie across lanes, beyond query rows do
constexpr float NONE = -1e30f;  // running maximum before any key was seen

struct Shape {
    int q_heads, kv_heads, dim, v_dim, block_size;
    int group() const { return q_heads / kv_heads; }
};

struct Options {
    float scaling, softcap;  // softcap 0: none
    int window;              // 0: none
    const float* sinks;      // [q_heads] or null
};

struct Sequence {
    int begin, count, start;  // first row in the packed batch, rows, position of the first
    const int32_t* table;     // pool index of its blocks
};

// Row r stands for token (first_row + r) / group and head (first_row + r) % group of the KV head. A task over keys that
// sequences share has rows of all of them: r / group then counts `members`, which have one token each.
struct Task {
    int sequence, head, first_row, rows;
    int piece = 0, pieces = 1;
    int from = 0;                      // keys before it are another task's
    int to = 0;                        // with members: where their shared keys end
    const int32_t* members = nullptr;  // numbers of sequences; `sequence` is the first
    int64_t partial = 0;               // where the first piece leaves its result, in floats
    const Task* shared = nullptr;      // the first piece over the keys before `from`, and the row there of row 0
    int shared_row = 0;

    // Whether its result is a part of one.
    bool is_part() const { return pieces > 1 || members || shared; }
};

template <typename T> struct Call {
    Shape shape;
    Options options;
    const T* query;
    int64_t query_stride;
    const T *keys, *values;
    int64_t block_stride;
    T* out;
    int64_t out_stride;
    const Sequence* sequences;

    // Of row r: the sequence, and which of its tokens.
    const Sequence& sequence(const Task& task, int r) const {
        return sequences[task.members ? task.members[r / shape.group()] : task.sequence];
    }
    int token(const Task& task, int r) const { return task.members ? 0 : (task.first_row + r) / shape.group(); }

    const T* query_row(const Task& task, int r) const {
        const int group = shape.group(), head = task.head * group + (task.first_row + r) % group;
        return query + (sequence(task, r).begin + token(task, r)) * query_stride + head * shape.dim;
    }
    int position(const Task& task, int r) const { return sequence(task, r).start + token(task, r); }
    const T* key(const Task& task, int at) const {
        return keys + sequences[task.sequence].table[at / shape.block_size] * block_stride +
               (int64_t(at % shape.block_size) * shape.kv_heads + task.head) * shape.dim;
    }
    const T* value(const Task& task, int at) const {
        return values + sequences[task.sequence].table[at / shape.block_size] * block_stride +
               (int64_t(at % shape.block_size) * shape.kv_heads + task.head) * shape.v_dim;
    }
};

// The keys [from, to) of a task's piece, from at a multiple of `alignment`, and the positions of its first and last row.
struct Range {
    int from, to, oldest, newest;
    template <typename T> Range(const Call<T>& call, const Task& task, int alignment = 1) {
        oldest = task.members ? task.to - 1 : call.position(task, 0);
        newest = task.members ? task.to - 1 : call.position(task, task.rows - 1);
        int window = call.options.window, begin = window ? std::max(0, oldest - window + 1) : 0, end = newest + 1;
        begin = std::max(begin / alignment * alignment, task.from);
        int share = ((end - begin + task.pieces - 1) / task.pieces + KEYS - 1) / KEYS * KEYS;
        from = std::min(begin + task.piece * share, end);
        to = std::min(from + share, end);
    }
    // Whether every row sees keys [at, at + n).
    bool all_seen(int at, int n, int window) const {
        return at + n - 1 <= oldest && (!window || at > newest - window);
    }
};

// Memory of one thread, one at a time. A task leaves its result here: out (element d of row r at r * row_stride + d * dim_stride, not
// yet divided by the sum of weights), peak and total.
struct Scratch {
    float *query, *scores, *out, *rows;
    float peak[MAX_ROWS], total[MAX_ROWS];
    int row_stride = 0, dim_stride = 0;

    explicit Scratch(const Shape& s) {
        const int dim = (s.dim + LANES - 1) / LANES * LANES, v_dim = (s.v_dim + LANES - 1) / LANES * LANES;
        const size_t needed = size_t(dim + v_dim + 2 * KEYS) * MAX_ROWS + KEYS * std::max(dim, v_dim) + LANES;
        static thread_local std::vector<float> memory;  // kept between layers
        if (memory.size() < needed) memory.resize(needed);
        query = aligned(memory.data());
        out = query + dim * MAX_ROWS;
        scores = out + v_dim * MAX_ROWS;
        rows = scores + KEYS * MAX_ROWS;
    }
};

inline void prefetch(const void* row, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(row) + i);
}

}  // namespace kvb
