// Attention of pieces of prompts to keys in pages, on Hopper GPUs. As kernels/triton/attention_kernels.py, which serves what this
// does not, for heads of 128 numbers, without windows, caps, slopes or sinks.
//
// A tile holds 128 rows of one sequence and key head: a row is a query of one of the GROUP heads that share the key head, those
// of a token next to one another, so that a key is read once for all of them. Of the block's three groups of 4 warps, one warp
// of the first has the copy engine bring keys and values, 128 at a time, 16 from a page, into two places each, and waits where
// these are still in use. Each of the other groups attends with half of the rows. A group begins the scores of the next keys
// and the sums of these keys' values together, and while the latter go on makes weights of the former. The two groups take turns
// at beginning, so that one has the matrix units while the other makes weights: 1.07 times as fast.
//
// With SPLIT the keys are shared out among `splits` blocks, which leave normalised results and their log2-sum-exp2.
//
// Compiled for: BF16 (else fp16), GROUP, PAGE (tokens in it, a multiple of 16), WIDE (positions have 64 bits, else 32), SPLIT.
#define THREADS 384
#define BLOCKS 1
#include <hopper.h>

constexpr int ROWS = 128, KEYS = 128, DIM = 128;
constexpr int PLACES = 2;             // of keys, and of values
constexpr int BOX_KEYS = 16;          // that the copy engine brings at a time
constexpr int HALF = KEYS * 128;      // bytes of the first 64 numbers of KEYS rows; then come the others
constexpr int TILE = HALF * 2;
constexpr int QUERY_HALF = 64 * 128;  // of the rows of a group of warps
constexpr int FIRST_TURN = 2;         // the number of a group is that of a barrier of its own; from here on: whose turn it is
#define NOTHING (-1.0f / 0.0f)  // of a score

struct Launch {
    u64 query_token, query_head, out_token, out_head;  // numbers from one to the next
    int seqs, decode_seqs, heads;                      // heads: of queries
    int blocks;                                        // in the pool
    int splits, first_split, all_splits;               // these are numbered `first_split` and on
    float scale;                                       // of scores, in units of log2(e), above 0
};

struct Barriers {
    u64 keys_there[PLACES], keys_read[PLACES], values_there[PLACES], values_read[PLACES];
};

// What a block has to do.
struct Work {
    int first_token, rows;  // of the sequence in the batch; of the sequence from the tile's first on, which may be more than ROWS
    int first;              // row of the tile, in the sequence
    int begin, end;         // keys
    int plain;              // tiles of keys that all rows see
};

DEVICE int position_at(const u8* positions, int token) {
    return WIDE ? (int)((const long long*)positions)[token] : ((const int*)positions)[token];
}
DEVICE int smaller(int a, int b) { return a < b ? a : b; }
DEVICE int larger(int a, int b) { return a > b ? a : b; }
DEVICE int tiles_of(int keys) { return (keys + KEYS - 1) / KEYS; }

// Sequence s has the tiles from query_start[s] * GROUP / ROWS + s on: enough for its rows wherever they begin.
DEVICE int sequence_of(const int* query_start, int seqs, int tile) {
    int low = 0, high = seqs;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (query_start[middle] * GROUP / ROWS + middle <= tile)
            low = middle;
        else
            high = middle;
    }
    return low;
}

DEVICE Work work_of(const Launch& s, int tile, int seq, const u8* positions, const int* query_start, int length) {
    Work w;
    w.first_token = query_start[seq];
    const int count = query_start[seq + 1] - w.first_token;
    w.first = (tile - w.first_token * GROUP / ROWS - seq) * ROWS;
    const bool decoded = w.first_token == seq && count == 1 && seq < s.decode_seqs;
    w.rows = decoded ? 0 : count * GROUP - w.first;
    w.begin = w.end = w.plain = 0;
    if (w.rows <= 0) return w;
    const int low = position_at(positions, w.first_token + w.first / GROUP);
    const int high = position_at(positions, w.first_token + (w.first + smaller(w.rows, ROWS) - 1) / GROUP);
    w.end = smaller(high + 1, length);
    if (SPLIT) {
        const int share = tiles_of((larger(w.end, 0) + s.splits - 1) / s.splits) * KEYS;
        w.begin = split() * share;
        w.end = smaller(w.end, w.begin + share);
    }
    w.plain = larger(smaller(low + 1, w.end) - w.begin, 0) / KEYS;
    return w;
}

// Where a row of the tile is in the batch: its token there, and its head.
DEVICE int token_of(const Work& w, int row) { return w.first_token + (w.first + row) / GROUP; }
DEVICE int head_of(const Work& w, int row, int key_head) { return key_head * GROUP + (w.first + row) % GROUP; }

// The copy engine's warp.
DEVICE void bring(const TensorMap& keys, const TensorMap& values, u8* key_tiles, u8* value_tiles, Barriers& b, const Work& w,
                  const int* table, int blocks, int key_head) {
    const int lane = thread() % 32, unit = lane / 2, half = lane % 2, tiles = tiles_of(w.end - w.begin);
    const bool brings = unit < KEYS / BOX_KEYS;
    const auto block_at = [&](int tile) {  // beyond the end one that does not exist: zeros
        const int at = w.begin + tile * KEYS + unit * BOX_KEYS;
        return brings && at < w.end ? table[at / PAGE] : blocks;
    };
    int block = block_at(0);
    for (int tile = 0; tile < tiles; tile++) {
        const int place = tile % PLACES, parity = (tile / PLACES + 1) % 2;
        const int to = place * TILE + half * HALF + unit * BOX_KEYS * 128;
        const int token = (w.begin + tile * KEYS + unit * BOX_KEYS) % PAGE, block_after = block_at(tile + 1);
        barrier_wait(&b.keys_read[place], parity);
        if (lane == 0) barrier_arrive_announcing(&b.keys_there[place], TILE);
        wait_for_warp();
        if (brings) bring_box(key_tiles + to, keys, &b.keys_there[place], half * 64, key_head, token, block);
        barrier_wait(&b.values_read[place], parity);
        if (lane == 0) barrier_arrive_announcing(&b.values_there[place], TILE);
        wait_for_warp();
        if (brings) bring_box(value_tiles + to, values, &b.values_there[place], half * 64, key_head, token, block);
        block = block_after;
    }
}

DEVICE void begin_scores(float (&scores)[64], const u8* query, const u8* keys) {
    begin_products();
#pragma unroll
    for (int i = 0; i < DIM / 16; i++)
        product(scores, operand(query + i / 4 * QUERY_HALF + i % 4 * 32, 1024, 16),
                operand(keys + i / 4 * HALF + i % 4 * 32, 1024, 16), i > 0);
    end_batch();
}

DEVICE void begin_values(float (&sums)[64], const u32 (&weights)[KEYS / 16][4], const u8* values) {
    begin_products();
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) add_product(sums, weights[i], operand(values + i * 16 * 128, 1024, HALF));
    end_batch();
}

// Scores become powers of two below `peak`, which may grow; `shrink` is what the sums before are to be multiplied by. last_key:
// the last that each of the thread's two rows sees, counted from these on.
template <bool MASKED>
DEVICE void weigh(float (&scores)[64], float scale, const int (&last_key)[2], float (&peak)[2], float (&total)[2],
                  float (&shrink)[2]) {
    if (MASKED)
#pragma unroll
        for (int i = 0; i < 64; i++)
            if (i / 4 * 8 + thread() % 4 * 2 + i % 2 > last_key[i / 2 % 2]) scores[i] = NOTHING;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most = scores[half * 2];
#pragma unroll
        for (int i = 0; i < 16; i++) most = greater(most, greater(scores[i * 4 + half * 2], scores[i * 4 + half * 2 + 1]));
        most = greater(peak[half], greatest_of(most, 4) * scale);
        const float safe = most == NOTHING ? 0 : most;  // a row that has seen nothing yet: no number minus itself
        shrink[half] = power_of_two(peak[half] - safe);
        peak[half] = most;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 32; i++) {
            float& score = scores[i / 2 * 4 + half * 2 + i % 2];
            score = power_of_two(multiply_add(score, scale, -safe));
            sum += score;
        }
        total[half] = multiply_add(total[half], shrink[half], sum);
    }
}

DEVICE void shrink_by(float (&sums)[64], const float (&shrink)[2]) {
#pragma unroll
    for (int i = 0; i < 64; i++) sums[i] *= shrink[i / 2 % 2];
}

DEVICE void narrow_all(u32 (&weights)[KEYS / 16][4], const float (&scores)[64]) {
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) weights[i / 4][i % 4] = narrow_pair(scores[i * 2], scores[i * 2 + 1]);
}

KERNEL(prompt_attention)(TENSOR_MAP(keys), TENSOR_MAP(values), const u8* query, u8* out, float* partial, float* partial_lse,
                         const u8* positions, const int* query_start, const int* tables, const int* table_start, const int* kv_len,
                         const Launch s) {
    ALIGNED_SHARED_MEMORY(memory);
    u8* key_tiles = memory;
    u8* value_tiles = key_tiles + PLACES * TILE;
    u8* query_tile = value_tiles + PLACES * TILE;
    Barriers& b = *(Barriers*)(query_tile + 4 * QUERY_HALF);
    const int tile = blocks() - 1 - block();  // the last tokens see the most keys: begin with them
    const int key_head = block_of_columns();
    const int seq = sequence_of(query_start, s.seqs, tile);
    const Work w = work_of(s, tile, seq, positions, query_start, kv_len[seq]);
    const int* table = tables + table_start[seq];
    const int tiles = tiles_of(larger(w.end - w.begin, 0)), group = uniform(thread() / 128);
    const int users = w.rows > ROWS / 2 ? 2 : 1;  // groups that have rows
    if (thread() == 0) {
        for (int i = 0; i < PLACES; i++) {
            barrier_init(&b.keys_there[i], 1);
            barrier_init(&b.values_there[i], 1);
            barrier_init(&b.keys_read[i], users * 4);
            barrier_init(&b.values_read[i], users * 4);
        }
        barriers_made();
    }
    let_next_kernel_start();
    wait_for_kernel_before();
    if (w.rows <= 0) return;
    wait_for_block();

    if (group == 0) {
        give_registers<24>();
        if (thread() < 32) bring(keys, values, key_tiles, value_tiles, b, w, table, s.blocks, key_head);
        return;
    }
    take_registers<240>();
    const int mine = (group - 1) * 64, number = thread() % 128, lane = thread() % 32, t = lane % 4;
    if (w.rows <= mine) return;
    query_tile += (group - 1) * 2 * QUERY_HALF;
    const int row_of_thread = mine + number / 32 * 16 + lane / 4;  // and the one 8 further
    if (tiles > 0) {
#pragma unroll 4
        for (int i = number; i < 64 * 16; i += 128) {
            const int row = i / 16, unit = i % 16;
            Quad q = {};
            if (mine + row < w.rows)
                q = load16(query + (token_of(w, mine + row) * s.query_token + head_of(w, mine + row, key_head) * s.query_head) * 2 +
                           unit * 16);
            *(Quad*)(query_tile + unit / 8 * QUERY_HALF + row * 128 + (unit % 8 ^ row % 8) * 16) = q;
        }
        show_to_products();
        wait_for_each_other(group, 128);
    }

    float sums[64] = {}, scores[64];
    u32 weights[KEYS / 16][4];
    float peak[2] = {NOTHING, NOTHING}, total[2] = {}, shrink[2];
    int last_key[2];
    for (int half = 0; half < 2; half++) {
        const int row = row_of_thread + half * 8;
        const int seen = row < w.rows ? position_at(positions, token_of(w, row)) : -1;
        last_key[half] = smaller(seen, w.end - 1) - w.begin;
    }
    const auto weigh_tile = [&](int i) {
        const int last[2] = {last_key[0] - i * KEYS, last_key[1] - i * KEYS};
        if (i < w.plain)
            weigh<false>(scores, s.scale, last, peak, total, shrink);
        else
            weigh<true>(scores, s.scale, last, peak, total, shrink);
    };
    if (tiles > 0) {
        barrier_wait(&b.keys_there[0], 0);
        begin_scores(scores, query_tile, key_tiles);
        wait_for_batches<0>();
        hold(scores);
        if (lane == 0) barrier_arrive(&b.keys_read[0]);
        weigh_tile(0);
        narrow_all(weights, scores);
        if (users == 2 && group == 2 && tiles > 1) arrive_for(FIRST_TURN + 1, 256);
        for (int i = 1; i < tiles; i++) {
            const int place = i % PLACES, before = (i - 1) % PLACES;
            barrier_wait(&b.keys_there[place], i / PLACES % 2);
            if (users == 2) wait_for_each_other(FIRST_TURN + group, 256);
            begin_scores(scores, query_tile, key_tiles + place * TILE);
            barrier_wait(&b.values_there[before], (i - 1) / PLACES % 2);
            begin_values(sums, weights, value_tiles + before * TILE);
            if (users == 2 && (group == 1 || i < tiles - 1)) arrive_for(FIRST_TURN + 3 - group, 256);
            wait_for_batches<1>();
            hold(scores);
            if (lane == 0) barrier_arrive(&b.keys_read[place]);
            weigh_tile(i);
            wait_for_batches<0>();
            hold(sums);
            if (lane == 0) barrier_arrive(&b.values_read[before]);
            if (any_of_warp(shrink[0] != 1 || shrink[1] != 1)) shrink_by(sums, shrink);  // peaks seldom grow
            narrow_all(weights, scores);
        }
        const int place = (tiles - 1) % PLACES, left = w.end - w.begin - (tiles - 1) * KEYS;
        u8* last_values = value_tiles + place * TILE;
        barrier_wait(&b.values_there[place], (tiles - 1) / PLACES % 2);
        if (left % BOX_KEYS) {  // what the page has beyond its end may be no numbers: zeros, as where there is no page
            const int until = (left + BOX_KEYS - 1) / BOX_KEYS * BOX_KEYS;
            for (int i = left * 8 + number; i < until * 8; i += 128)
                for (int half = 0; half < 2; half++) *(Quad*)(last_values + half * HALF + i * 16) = {};
            show_to_products();
            wait_for_each_other(group, 128);
        }
        begin_values(sums, weights, last_values);
        wait_for_batches<0>();
        hold(sums);
    }

    for (int half = 0; half < 2; half++) {
        const int row = row_of_thread + half * 8;
        const float all = sum_over(total[half], 4);
        if (row >= w.rows) continue;
        const u64 token = token_of(w, row), head = head_of(w, row, key_head);
        const float share = all > 0 ? divide(1, all) : 0;
        if (SPLIT) {
            const u64 entry = (token * s.heads + head) * s.all_splits + s.first_split + split();
            if (t == 0) partial_lse[entry] = all > 0 ? peak[half] + logarithm(all) : NOTHING;
            if (tiles > 0 || split() == 0)
                for (int i = 0; i < 16; i++) {
                    const float a = sums[i * 4 + half * 2] * share, b = sums[i * 4 + half * 2 + 1] * share;
                    store8(partial + entry * DIM + i * 8 + t * 2, a, b);
                }
        } else {
            u8* to = out + (token * s.out_token + head * s.out_head) * 2;
            for (int i = 0; i < 16; i++) {
                const float a = sums[i * 4 + half * 2] * share, b = sums[i * 4 + half * 2 + 1] * share;
                *(u32*)(to + (i * 8 + t * 2) * 2) = narrow_pair(a, b);
            }
        }
    }
}
