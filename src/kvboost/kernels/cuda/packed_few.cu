// y = x W^T + bias + total for a few rows of x and packed 4-bit W (kvboost/weights/packing.py), where reading W is all there is
// to do; or of that, activation(first half) * second half.
//
// A block takes tiles of ROWS rows of W in turn. Its warps take turns along k, 128 weights of each of the rows in a step;
// at the end of a tile their sums are added, in order. Codes go from memory straight into the registers that the matrix
// units read, W being the tall operand, 16 bytes of a row for a thread, DEPTH steps ahead, beyond the end of a tile, too.
// The rest comes from shared memory: what rows have beside their codes (2 bytes of each of 16 rows cost the L1 cache as much
// as 64), copied a tile ahead, and x, where there is room for it.
//
// With PARTS > 1 a block takes one part of k, so it keeps no more than that of x, and few tiles with long rows still keep all
// multiprocessors busy. Its last warp, which has no more steps than the others, publishes the sums of a tile in fp32, and counts
// itself a tile later, when they have long been where others read them. Whom it finds to be the last of PARTS blocks adds up
// the sums of all, in the order of parts, whatever the order in which they came. No block waits for another.
//
// A code becomes a number by putting it into the mantissa of OFFSET, which takes less than one instruction a weight. OFFSET and
// the zero point are subtracted from sums, scales multiply sums, all in fp32: no weight is rounded. For that the sums of x
// over groups are needed. What is subtracted may be some 10 times the result, of 2 ** 24.
//
// Loops that go round once or twice are not unrolled: instructions have to be fetched past the weights, through the same cache. 27
// to 45% fewer of them made a token of a 32B model 1.6% faster.
//
// With an ACTIVATION rows of W are gates, then as many that they gate. Of each 16 rows of a tile 8 are gates and 8 their partners,
// so a tile has all that its outputs need: half as many. With a NORM x is normalised on its way to shared memory, by each block
// for itself; the norm's weight is there before x is.
//
// Compiled for: BF16 (else fp16), SCHEME (as in packed_codes.py), WORDS (4: groups of a multiple of 128 weights, 2: of 64,
// 1: of 32), STEPS (of a group, with WORDS = 4), X_SHARED (at least so many rows x has, 1, 2, 4 or 8, and it is kept in
// shared memory; 0: COLS * 8 rows of it at a time are read from the cache, where other warps find them, too), TILES, COLS,
// WARPS, DEPTH (even with X_SHARED = 0), BLOCKS (at least so many at a time on a multiprocessor), PARTS (of k; `blocks()` is a
// multiple of it, and there are that many steps at least), ACTIVATION and NORM (as in elementwise.h, or NONE; the latter with
// X_SHARED; both with PARTS = 1).
#define THREADS (WARPS * 32)
#include <elementwise.h>

#define SYMMETRIC 0
#define ZEROS 1
#define MINIMUM 4
#define TWO_LEVEL 5

constexpr int GROUPS = 4 / WORDS;  // groups in a step
constexpr int ROWS = 16 * TILES;
constexpr bool GATED = ACTIVATION != NONE, PLAIN = !GATED && !NORM;
constexpr int WIDTH = GATED ? ROWS / 2 : ROWS;  // outputs of a tile, for each row of x
constexpr int SUM_COLS = X_SHARED ? X_SHARED : COLS * 8;  // rows of x that sums are kept of
constexpr int PADDED = ROWS + 4;  // so that threads that store together use different banks
constexpr int AT_ONCE = 4;       // pieces of x that a thread fetches before it waits for them
constexpr int X_ROWS = X_SHARED ? X_SHARED : 1;
constexpr int UNITS = X_ROWS < AT_ONCE ? AT_ONCE / X_ROWS : 1;  // of each row
constexpr int LANES = 16;        // threads that copy the factors of a row: most rows have no more units of 16 bytes
constexpr u32 OFFSET = BF16 ? 128 : 64;
constexpr u32 OFFSET_BYTE = BF16 ? 0x43 : 0x54;   // the upper half of its bits
constexpr u32 CODE_BITS = BF16 ? 0x0f0f0f0fu : 0xf0f0f0f0u;  // where a code is worth itself in the lower half
constexpr u32 ONES = BF16 ? 0x3f803f80u : 0x3c003c00u;

struct Shape {
    u64 row_bytes, x_bytes;  // from row to row
    int rows, n, k;          // of x; outputs for each: rows of W, or half of them; of both
    int tail;                // bytes of shared memory for a row's scales and what is beside them: with PARTS = 1, all there are
    int scales_at, beside_at;
    int factors_at;  // in shared memory, after sums of `buffers` tiles and what a NORM has there before
    int buffers;  // 1 where every block has one tile, else 2
    float eps, offset;  // of the norm
};

DEVICE u32 word_at(const u8* at) { return *(const u32*)at; }
DEVICE u32 half_at(const u8* at) { return *(const u16*)at; }

// Where among a row's scales those of a step begin, and how many bytes they have; then the same of what is beside them.
constexpr int SCALE_BYTES = SCHEME == TWO_LEVEL ? 4 : 2 * GROUPS;
constexpr int BESIDE_BYTES = SCHEME == TWO_LEVEL ? 8 : SCHEME == MINIMUM ? SCALE_BYTES : SCHEME == ZEROS ? (GROUPS + 1) / 2 : 0;

DEVICE int scales_of(int step) {
    return SCHEME == TWO_LEVEL ? step / 2 * 4 : WORDS == 4 ? step / STEPS * 2 : step * SCALE_BYTES;
}
DEVICE int beside_of(int step) {
    return SCHEME == MINIMUM ? scales_of(step) : SCHEME == ZEROS && WORDS == 4 ? step / STEPS / 2 : step * BESIDE_BYTES;
}

// What a row of W has for one step beside its codes.
struct Factors {
    u32 scale[2], beside[2];
};

DEVICE Factors factors_of(const u8* scales, const u8* beside, int step) {
    Factors f = {};
    scales += scales_of(step);
    beside += beside_of(step);
    if (SCHEME == TWO_LEVEL) {  // 4 groups of 32, half of 256 weights
        f.scale[0] = word_at(scales);
        f.beside[0] = word_at(beside);
        f.beside[1] = word_at(beside + 4);
    } else if (WORDS == 4) {
        f.scale[0] = half_at(scales);
        if (SCHEME == ZEROS) f.beside[0] = *beside >> (step / STEPS % 2 * 4) & 15;
        if (SCHEME == MINIMUM) f.beside[0] = half_at(beside);
    } else {
        for (int i = 0; i < GROUPS / 2; i++) {
            f.scale[i] = word_at(scales + i * 4);
            if (SCHEME == MINIMUM) f.beside[i] = word_at(beside + i * 4);
            if (SCHEME == ZEROS) f.beside[0] |= beside[i] << (8 * i);
        }
    }
    return f;
}

// w = a * (OFFSET + q) + b
DEVICE void affine(const Factors& f, int group, float& a, float& b) {
    if (SCHEME == TWO_LEVEL) {
        const u32 both = f.beside[group / 2] >> (group % 2 * 16);
        a = from_half(f.scale[0]) * small_float(both & 0xff);
        b = -from_half(f.scale[0] >> 16) * small_float(both >> 8 & 0xff) - (float)OFFSET * a;
    } else {
        a = from_half(f.scale[group / 2] >> (group % 2 * 16));
        if (SCHEME == MINIMUM)
            b = from_half(f.beside[group / 2] >> (group % 2 * 16)) - (float)OFFSET * a;
        else
            b = -a * (SCHEME == ZEROS ? small_float(OFFSET + (f.beside[0] >> (4 * group) & 15)) : (float)(OFFSET + 8));
    }
}

// The codes of a thread in one row and step: WORDS words of each group.
struct Codes {
    u32 word[4];
};

// at: the first of them.
DEVICE Codes read_codes(const u8* at) {
    Codes c;
    if (WORDS == 4) {
        const Quad q = read16(at);
        for (int i = 0; i < 4; i++) c.word[i] = q.word[i];
    } else if (WORDS == 2) {
        read8(at, c.word[0], c.word[1]);
        read8(at + 32, c.word[2], c.word[3]);
    } else {
        for (int i = 0; i < 4; i++) c.word[i] = read4(at + i * 16);
    }
    return c;
}

// The numbers of x that meet those codes: for each word those of its low nibbles, then those of its high ones.
struct Inputs {
    u32 low[4][2], high[4][2];
};

DEVICE void put(u32 (&to)[4][2], int first, const Quad& q) {
    for (int i = 0; i < 4; i++) to[first + i / 2][i % 2] = q.word[i];
}

// From the 256 bytes of a step and a row.
DEVICE void read_inputs(Inputs& in, const u8* at, int t) {
    for (int i = 0; i < 4; i++) {
        if (WORDS == 4) put(i < 2 ? in.low : in.high, i % 2 * 2, load16(at + t * 64 + i * 16));
        if (WORDS == 2) put(i % 2 ? in.high : in.low, i / 2 * 2, load16(at + i / 2 * 128 + t / 2 * 64 + t % 2 * 16 + i % 2 * 32));
        if (WORDS == 1) {
            load8(at + i * 64 + t * 8, in.low[i][0], in.low[i][1]);
            load8(at + i * 64 + t * 8 + 32, in.high[i][0], in.high[i][1]);
        }
    }
}

// In shared memory x lies by steps, then 4 quarters, then rows: 64 bytes that the 4 threads of a row read together. The
// place of the 16 bytes `unit` of a step and row.
DEVICE int quarter_of(int unit) { return WORDS == 4 ? unit % 4 : WORDS == 2 ? unit / 8 * 2 + unit / 2 % 2 : unit / 4; }
DEVICE int place_of(int unit) { return WORDS == 4 ? unit / 4 : WORDS == 2 ? unit / 4 % 2 * 2 + unit % 2 : unit % 4; }

// From where the numbers of a row and thread begin in a step.
DEVICE void take_inputs(Inputs& in, const u8* at) {
    for (int i = 0; i < 4; i++, at += X_SHARED * 64) {
        if (WORDS == 4) put(i < 2 ? in.low : in.high, i % 2 * 2, *(const Quad*)at);
        if (WORDS == 2) put(i % 2 ? in.high : in.low, i / 2 * 2, *(const Quad*)at);
        if (WORDS == 1)
            for (int j = 0; j < 2; j++) {
                in.low[i][j] = word_at(at + j * 4);
                in.high[i][j] = word_at(at + 32 + j * 4);
            }
    }
}

// 8 codes as numbers OFFSET + q, in pairs: those of the low nibbles, then those of the high ones.
DEVICE void decode(u32 word, u32 (&out)[4]) {
    const u32 low = (BF16 ? word : word << 4) & CODE_BITS, high = (BF16 ? word >> 4 : word) & CODE_BITS;
    out[0] = pick(low, OFFSET_BYTE, 0x4140);
    out[1] = pick(low, OFFSET_BYTE, 0x4342);
    out[2] = pick(high, OFFSET_BYTE, 0x4140);
    out[3] = pick(high, OFFSET_BYTE, 0x4342);
}

// Sums of x over the groups of a step for the columns 2t and 2t + 1, as the matrix units have them.
typedef float GroupSums[GROUPS][COLS][2];

DEVICE void add_up(GroupSums& sums, const Inputs (&in)[COLS]) {
    for (int group = 0; group < GROUPS; group++)
        for (int c = 0; c < COLS; c++) {
            float all[4] = {};
            for (int i = group * WORDS; i < group * WORDS + WORDS; i++) {
                multiply(all, ONES, ONES, ONES, ONES, in[c].low[i][0], in[c].low[i][1]);
                multiply(all, ONES, ONES, ONES, ONES, in[c].high[i][0], in[c].high[i][1]);
            }
            sums[group][c][0] = all[0];
            sums[group][c][1] = all[1];
        }
}

// factors: of the first row of a tile; to_row: from there to the thread's rows.
DEVICE void compute(const Codes (&codes)[TILES][2], const u8* factors, const u32 (&to_row)[TILES][2], int beside, int step,
                    const Inputs (&in)[COLS], const GroupSums& sums, float (&acc)[TILES][COLS][4]) {
    for (int group = 0; group < GROUPS; group++)
        for (int tile = 0; tile < TILES; tile++) {
            float products[COLS][4] = {};
            for (int i = group * WORDS; i < group * WORDS + WORDS; i++) {
                u32 upper[4], lower[4];
                decode(codes[tile][0].word[i], upper);
                decode(codes[tile][1].word[i], lower);
                for (int c = 0; c < COLS; c++) {
                    multiply(products[c], upper[0], lower[0], upper[1], lower[1], in[c].low[i][0], in[c].low[i][1]);
                    multiply(products[c], upper[2], lower[2], upper[3], lower[3], in[c].high[i][0], in[c].high[i][1]);
                }
            }
            for (int half = 0; half < 2; half++) {
                float a, b;
                affine(factors_of(factors + to_row[tile][half], factors + beside + to_row[tile][half], step), group, a, b);
                for (int c = 0; c < COLS; c++)
                    for (int i = 0; i < 2; i++) {
                        float& sum = acc[tile][c][half * 2 + i];
                        sum = multiply_add(a, products[c][half * 2 + i], multiply_add(b, sums[group][c][i], sum));
                    }
            }
        }
}

// s.n is WIDTH at least: the last tile begins WIDTH before the end, and stores only what the tile before does not.
// bias and total (like y, and possibly y itself) may be null; norm: the weight of a NORM, [k]. With PARTS > 1: partials
// [PARTS, rows of x, n]; counters of all tiles and blocks of columns, zero before and after every launch. Launches that may
// overlap must not have the same.
KERNEL(packed_few)(const u8* x, const u8* weight, const u16* bias, const u16* total, const u8* norm, u16* y, const Shape s,
                   float* partials, u32* counters) {
    SHARED_MEMORY(memory);
    typedef float TileSums[WARPS][SUM_COLS][PADDED];
    constexpr int SUM_ROWS = X_SHARED > 2 ? X_SHARED : 2;
    const int tail = s.tail;
    TileSums* tile_sums = (TileSums*)memory;                  // for tiles in turn
    u8* norm_shared = memory;                                 // until then: a NORM's weight, and squares by rows, then warps
    u8* factors = memory + (s.factors_at & ~15);  // for tiles in turn: ROWS * tail; that it is aligned saves 14 instructions a step
    u8* x_shared = factors + s.buffers * ROWS * tail;         // X_SHARED rows, of the part
    const int steps = s.k / 128, tiles = (s.n + WIDTH - 1) / WIDTH;
    const int x_row = PARTS == 1 ? s.k * 2 : (steps + PARTS - 1) / PARTS * 256;
    float* x_sums = (float*)(x_shared + X_SHARED * x_row);  // by groups, then SUM_ROWS
    const int warp = uniform(thread() / 32), lane = thread() % 32, g = lane / 4, t = lane % 4;
    const int first_column = block_of_columns() * COLS * 8;
    const int part = block() % PARTS, place = block() / PARTS, places = blocks() / PARTS;
    const int first = part * steps / PARTS, last = (part + 1) * steps / PARTS;

    // Of a row's tail the part's scales are copied in units of 16 bytes, then what is beside them.
    const int beside = s.beside_at - s.scales_at;
    const int scales_from = scales_of(first) & ~15, beside_from = (beside + beside_of(first)) & ~15;
    const int scale_units = (scales_of(last - 1) + SCALE_BYTES - scales_from + 15) / 16;
    const int beside_units = BESIDE_BYTES ? (beside + beside_of(last - 1) + BESIDE_BYTES - beside_from + 15) / 16 : 0;
    const int units = PARTS == 1 ? tail / 16 : scale_units + beside_units;
    const int to_beside = PARTS == 1 ? beside : beside + scales_from + scale_units * 16 - beside_from;

    const auto first_row = [&](int tile) { return tile * WIDTH < s.n - WIDTH ? tile * WIDTH : s.n - WIDTH; };
    const auto beyond_first = [&](int r) { return GATED ? r / 16 * 8 + r % 8 + r / 8 % 2 * s.n : r; };  // row r of a tile
    const auto codes_at = [&](int tile) { return weight + first_row(tile) * s.row_bytes; };
    // `afresh` below: addresses that wait for the end of a tile would take registers of its steps, and these are used up.
    const auto copy_factors = [&](int tile, int turn) {
        const u8* from = codes_at(tile) + s.scales_at;
        const int me = PLAIN ? thread() : afresh(thread());
        for (int r = me / LANES; r < ROWS; r += THREADS / LANES) {
            const u8* row = from + beyond_first(r) * s.row_bytes;
            u8* to = factors + (turn * ROWS + r) * tail;
#pragma unroll(PARTS == 1 ? 1 : 4)
            for (int unit = me % LANES; unit < units; unit += LANES) {
                const int beyond = unit - scale_units;
                const int at = PARTS == 1 ? unit * 16 : beyond < 0 ? scales_from + unit * 16 : beside_from + beyond * 16;
                copy16(to + unit * 16, row + at);
            }
        }
    };
    u32 to_codes[TILES][2], to_factors[TILES][2];
    for (int i = 0; i < TILES; i++)
        for (int half = 0; half < 2; half++) {
            const int r = i * 16 + half * 8 + g;
            to_codes[i][half] = beyond_first(r) * (u32)s.row_bytes + t * 4 * WORDS;
            to_factors[i][half] = r * tail;
        }

    Codes codes[DEPTH][TILES][2];
    const u8* here = codes_at(place);
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
        if (first + warp + d * WARPS < last)
            for (int i = 0; i < TILES; i++)
                for (int half = 0; half < 2; half++)
                    codes[d][i][half] = read_codes(here + (first + warp + d * WARPS) * 64 + to_codes[i][half]);
    copy_factors(place, 0);
    if (NORM)
        for (int i = thread(); i < s.k / 8; i += THREADS) copy16(norm_shared + i * 16, norm + i * 16);

    let_next_kernel_start();
    wait_for_kernel_before();
    const u8* x_at[COLS];
    Inputs in[2][COLS] = {};  // without X_SHARED those of this step and of the next
    if (X_SHARED) {
        const int x_units = PARTS == 1 ? s.k / 8 : (last - first) * 16;
        const auto keep = [&](const Quad& q, int r, int unit, bool exists) {  // by all threads of a warp together
            const float sum = sum_over(sum_of(q), 4 * WORDS);
            if (!exists) return;
            const int at = (unit / 16 * 4 + quarter_of(unit % 16)) * X_SHARED + r;
            *(Quad*)(x_shared + at * 64 + place_of(unit % 16) * 16) = q;
            if (unit % (4 * WORDS) == 0) x_sums[unit / (4 * WORDS) * SUM_ROWS + r] = sum;
        };
        Quad q[UNITS][X_ROWS];
        const auto fetch = [&](int start) {
            for (int u = 0; u < UNITS; u++)
                for (int r = 0; r < X_ROWS; r++) {
                    const int unit = start + u * THREADS + thread();
                    q[u][r] = unit < x_units && r < s.rows ? load16(x + r * s.x_bytes + first * 256 + unit * 16) : Quad{};
                }
        };
        if (!NORM)
            for (int start = 0; start < x_units; start += UNITS * THREADS) {
                fetch(start);
                for (int u = 0; u < UNITS; u++) {
                    const int unit = start + u * THREADS + thread();
                    for (int r = 0; r < X_ROWS; r++) keep(q[u][r], r, unit, unit < x_units);
                }
            }
        if (NORM) {
            float squares[X_ROWS] = {};
            for (int start = 0; start < x_units; start += UNITS * THREADS) {
                fetch(start);
                for (int u = 0; u < UNITS; u++)
                    for (int r = 0; r < X_ROWS; r++) squares[r] += squares_of(q[u][r]);
            }
            float* of_warps = (float*)(norm_shared + s.k * 2);
            for (int r = 0; r < X_ROWS; r++) {
                squares[r] = sum_over(squares[r], 32);
                if (lane == 0) of_warps[r * WARPS + warp] = squares[r];
            }
            wait_for_copies();
            wait_for_block();
            float scale[X_ROWS];
            for (int r = 0; r < X_ROWS; r++) {
                float sum = 0;
                for (int w = 0; w < WARPS; w++) sum += of_warps[r * WARPS + w];
                scale[r] = reciprocal_root(divide(sum, s.k) + s.eps);
            }
            for (int start = 0; start < x_units; start += UNITS * THREADS) {
                if (x_units > UNITS * THREADS) fetch(start);  // else it is still here
                for (int u = 0; u < UNITS; u++) {
                    const int unit = start + u * THREADS + thread();
                    if (unit - lane >= x_units) break;
                    const Quad weight = unit < x_units ? *(const Quad*)(norm_shared + unit * 16) : Quad{};
                    for (int r = 0; r < X_ROWS; r++) {
                        normalise(q[u][r], weight, scale[r], s.offset);
                        keep(q[u][r], r, unit, unit < x_units);
                    }
                }
            }
        }
        x_at[0] = x_shared + g * 64 + t * (WORDS == 1 ? 8 : 16);
        x_sums += t * 2 % SUM_ROWS - first * GROUPS * SUM_ROWS;
    } else {
        for (int c = 0; c < COLS; c++) {  // beyond x its last row again, not stored
            const int column = first_column + c * 8 + g;
            x_at[c] = x + (column < s.rows ? column : s.rows - 1) * s.x_bytes;
        }
    }
    wait_for_copies();
    wait_for_block();

    // Outputs of a tile that x has rows for. Whether one, `at`, is the block's to store; then its row of W and its place in y.
    const int columns = s.rows - first_column < COLS * 8 ? s.rows - first_column : COLS * 8, outputs = columns * WIDTH;
    const auto is_ours = [&](int tile, int at, int& r, u64& to) {
        const int column = first_column + at / WIDTH;
        r = first_row(tile) + at % WIDTH;
        to = (u64)column * s.n + r;
        return r >= tile * WIDTH;
    };
    const auto sum_of_warps = [&](int turn, int at, int half = 0) {  // half: 1 for what output `at` gates
        const int r = at % WIDTH;
        float sum = 0;
        for (int w = 0; w < WARPS; w++) sum += tile_sums[turn][w][at / WIDTH][GATED ? r / 8 * 16 + half * 8 + r % 8 : r];
        return sum;
    };
    const auto biased = [&](float sum, int r) { return bias ? sum + widen(bias[r]) : sum; };
    const auto store = [&](u64 to, int r, float sum) {
        sum = biased(sum, r);
        if (total) sum += widen(total[to]);
        y[to] = narrow(sum);
    };
    const u64 part_size = (u64)s.rows * s.n;
    const auto join_before = [&](int tile) {
        if (warp < WARPS - 1 || tile == place) return;
        tile -= places;
        if (arrive(counters + block_of_columns() * tiles + tile, PARTS - 1) != PARTS - 1) return;
#pragma unroll 1
        for (int at = lane; at < outputs; at += 32) {
            int r;
            u64 to;
            if (!is_ours(tile, at, r, to)) continue;
            float sum = 0;
            for (int p = 0; p < PARTS; p++) sum += read_published(partials + p * part_size + to);
            store(to, r, sum);
        }
    };

    int tile = place;
    for (int turn = 0; tile < tiles; tile += places, turn ^= 1) {
        const int tile_after = tile + places;
        const bool more = tile_after < tiles;
        const u8* after = codes_at(tile_after);
        if (more) copy_factors(tile_after, turn ^ 1);
        if (!X_SHARED && first + warp < last)
            for (int c = 0; c < COLS; c++) read_inputs(in[0][c], x_at[c] + (first + warp) * 256, t);
        float acc[TILES][COLS][4] = {};
        for (int start = first + warp; start < last; start += DEPTH * WARPS) {
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                const int step = start + d * WARPS;
                if (step >= last) break;
                GroupSums sums;
                Inputs(&now)[COLS] = in[X_SHARED ? 0 : d % 2];
                if (X_SHARED) {
                    if (g < X_SHARED) take_inputs(now[0], x_at[0] + (step - first) * X_SHARED * 256);
                    for (int group = 0; group < GROUPS; group++)
                        for (int i = 0; i < 2; i++) sums[group][0][i] = x_sums[(step * GROUPS + group) * SUM_ROWS + i];
                } else {
                    if (step + WARPS < last)
                        for (int c = 0; c < COLS; c++) read_inputs(in[(d + 1) % 2][c], x_at[c] + (step + WARPS) * 256, t);
                    add_up(sums, now);
                }
                const u8* scales = factors + turn * ROWS * tail - (PARTS == 1 ? 0 : scales_from);
                compute(codes[d], scales, to_factors, to_beside, step, now, sums, acc);
                const int next = step + DEPTH * WARPS;
                const u8* from = next < last ? here + next * 64 : after + (first + warp + d * WARPS) * 64;
                if (next < last || more)
                    for (int i = 0; i < TILES; i++)
                        for (int half = 0; half < 2; half++) codes[d][i][half] = read_codes(from + to_codes[i][half]);
            }
        }
        here = after;

        for (int i = 0; i < TILES; i++)
            for (int c = 0; c < COLS; c++)
                for (int j = 0; j < 4; j++)
                    if (SUM_COLS == COLS * 8 || t * 2 + j % 2 < SUM_COLS)
                        tile_sums[turn][warp][c * 8 + t * 2 + j % 2][i * 16 + j / 2 * 8 + g] = acc[i][c][j];
        if (PARTS > 1) join_before(tile);
        wait_for_copies();
        wait_for_block();
        int r;
        u64 to;
        if (PARTS == 1) {
#pragma unroll 1
            for (int at = PLAIN ? thread() : afresh(thread()); at < outputs; at += THREADS) {
                if (!is_ours(tile, at, r, to)) continue;
                const float sum = sum_of_warps(turn, at);
                if (GATED)
                    y[to] = gated(biased(sum, r), biased(sum_of_warps(turn, at, 1), r + s.n));
                else
                    store(to, r, sum);
            }
        } else if (warp == WARPS - 1) {
#pragma unroll 1
            for (int at = lane; at < outputs; at += 32)
                if (is_ours(tile, at, r, to)) publish(partials + part * part_size + to, sum_of_warps(turn, at));
        }
    }
    if (PARTS > 1) join_before(tile);
}
