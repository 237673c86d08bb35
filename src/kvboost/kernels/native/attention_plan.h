// How the attention of one layer is cut into tasks: tiles of query rows, pieces of their keys, and, where sequences that
// decode begin with the same blocks (a system prompt), tasks that serve all of them: what they share is read once, and many
// rows meet it in the matrix units.
#pragma once

#include <algorithm>
#include <iterator>
#include <vector>

#include "attention_task.h"

namespace kvb {

constexpr int MIN_PIECE = 256;  // keys; smaller pieces cost more in merging than they gain
constexpr int MIN_SHARED = 64;  // keys; below, the merge costs more than it gains

// Sequences, and how many of their first blocks are the same.
struct Sharing {
    std::vector<int32_t> members;
    int blocks = 0;
    int64_t saved() const { return int64_t(members.size() - 1) * blocks; }
};

// Appends to `found` the ways of sharing among `members` that save most; all have their first `blocks` blocks in common.
// Returns what they save. Blocks count that lie before the one of a sequence's token.
inline int64_t find_sharing(const Sequence* sequences, int block_size, std::vector<int32_t> members, int blocks,
                            std::vector<Sharing>& found) {
    if (members.size() < 2) return 0;
    const auto before = [&](int32_t s) { return sequences[s].start / block_size; };
    int most = before(members[0]);
    for (int32_t s : members) most = std::min(most, before(s));
    const int32_t* first = sequences[members[0]].table;
    const auto same = [&](int at) {
        return std::all_of(members.begin(), members.end(), [&](int32_t s) { return sequences[s].table[at] == first[at]; });
    };
    while (blocks < most && same(blocks)) ++blocks;
    Sharing together{std::move(members), blocks};

    std::vector<int32_t> left;  // those that go on, by their next block
    for (int32_t s : together.members)
        if (before(s) > blocks) left.push_back(s);
    std::stable_sort(left.begin(), left.end(), [&](int32_t a, int32_t b) {
        return sequences[a].table[blocks] < sequences[b].table[blocks];
    });
    std::vector<Sharing> apart;
    int64_t saved = 0;
    for (size_t from = 0, to; from < left.size(); from = to) {
        for (to = from; to < left.size() && sequences[left[to]].table[blocks] == sequences[left[from]].table[blocks];) ++to;
        saved += find_sharing(sequences, block_size, {left.begin() + from, left.begin() + to}, blocks, apart);
    }
    if (together.saved() >= saved) {
        saved = together.saved();
        apart.assign(1, std::move(together));
    }
    found.insert(found.end(), std::make_move_iterator(apart.begin()), std::make_move_iterator(apart.end()));
    return saved;
}

// A row of a partial result: peak, total, then v_dim numbers.
inline float* partial_row(const Shape& shape, const Task& task, int piece, int r, float* partials) {
    return partials + task.partial + (int64_t(piece) * task.rows + r) * (shape.v_dim + 2);
}

// All tasks of one layer, prepared by one thread and then run by all of a parallel region together.
struct Plan {
    Shape shape;
    std::vector<Sequence> sequences;
    std::vector<Task> tasks;
    std::vector<Sharing> sharing;
    float* partials = nullptr;  // where tasks leave parts of results, if any does

    // spans: per sequence (begin, count, start, table), `table` an offset into `tables`.
    Plan(const Shape& s, const int32_t* spans, int num_spans, const int32_t* tables, int window, int threads)
        : shape(s), sequences(num_spans) {
        for (int i = 0; i < num_spans; ++i)
            sequences[i] = {spans[4 * i], spans[4 * i + 1], spans[4 * i + 2], tables + spans[4 * i + 3]};
        if (!window && 2 * shape.group() <= MAX_ROWS) share();
        cut(window, threads);
        keep_parts();
    }
    Plan(const Plan&) = delete;  // tasks point to one another

  private:
    void share() {
        std::vector<int32_t> decoding;
        for (size_t i = 0; i < sequences.size(); ++i)
            if (sequences[i].count == 1) decoding.push_back(i);
        std::vector<Sharing> found;
        find_sharing(sequences.data(), shape.block_size, std::move(decoding), 0, found);
        for (Sharing& group : found)
            if (int(group.members.size()) * shape.group() > FEW_ROWS && group.blocks * shape.block_size >= MIN_SHARED)
                sharing.push_back(std::move(group));
    }

    // Tiles of up to 48 rows; where there are too few tiles for the threads, their keys too. Heads outermost: sequences that
    // begin alike find their keys and values in the cache, one after the other.
    void cut(int window, int threads) {
        const int group = shape.group(), together = std::max(1, MAX_ROWS / group);  // sequences in a shared tile
        std::vector<int> which(sequences.size(), -1), place(sequences.size());
        for (size_t g = 0; g < sharing.size(); ++g)
            for (size_t m = 0; m < sharing[g].members.size(); ++m) {
                which[sharing[g].members[m]] = g;
                place[sharing[g].members[m]] = m;
            }
        const auto tiles_of = [&](int64_t rows) { return (rows + MAX_ROWS - 1) / MAX_ROWS; };
        int64_t tiles = 0;
        for (const Sharing& g : sharing) tiles += (g.members.size() + together - 1) / together;
        for (const Sequence& s : sequences) tiles += tiles_of(int64_t(s.count) * group);
        tiles *= shape.kv_heads;
        const int wanted = threads == 1 ? 1 : std::max<int64_t>(1, (4 * threads + tiles - 1) / std::max<int64_t>(1, tiles));
        const auto add = [&](Task task, int keys) {
            task.pieces = std::clamp(keys / MIN_PIECE, 1, wanted);
            for (task.piece = 0; task.piece < task.pieces; ++task.piece) tasks.push_back(task);
        };
        tasks.reserve(tiles * wanted);  // tasks point to others
        std::vector<std::vector<const Task*>> first(sharing.size());
        for (int head = 0; head < shape.kv_heads; ++head) {
            for (size_t g = 0; g < sharing.size(); ++g) {
                const auto& members = sharing[g].members;
                first[g].clear();
                for (size_t m = 0; m < members.size(); m += together) {
                    Task task{members[m], head, 0, int(std::min<size_t>(together, members.size() - m)) * group};
                    task.to = sharing[g].blocks * shape.block_size;
                    task.members = members.data() + m;
                    first[g].push_back(tasks.data() + tasks.size());
                    add(task, task.to);
                }
            }
            for (size_t s = 0; s < sequences.size(); ++s) {
                const int rows = sequences[s].count * group;
                for (int row = 0; row < rows; row += MAX_ROWS) {
                    Task task{int(s), head, row, std::min(MAX_ROWS, rows - row)};
                    if (which[s] >= 0) {
                        task.from = sharing[which[s]].blocks * shape.block_size;
                        task.shared = first[which[s]][place[s] / together];
                        task.shared_row = place[s] % together * group;
                    }
                    int keys = sequences[s].start + sequences[s].count - task.from;
                    if (window) keys = std::min(keys, window + sequences[s].count);
                    add(task, keys);
                }
            }
        }
    }

    void keep_parts() {
        int64_t needed = 0;
        for (Task& task : tasks)
            if (task.is_part() && task.piece == 0) {
                for (int p = 0; p < task.pieces; ++p) (&task)[p].partial = needed;
                needed += int64_t(task.pieces) * task.rows * (shape.v_dim + 2);
            }
        static thread_local std::vector<float> memory;  // kept between layers
        if (int64_t(memory.size()) < needed) memory.resize(needed);
        if (needed) partials = memory.data();
    }
};

}  // namespace kvb
