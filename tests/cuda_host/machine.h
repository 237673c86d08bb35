// The functions of kvboost/kernels/cuda/machine.h for a CPU: the threads of a block are fibers that take turns, and so are
// blocks, in an order drawn by lot, so a kernel's arithmetic, its addresses, its barriers and what blocks tell each other are
// tested without a GPU. Shared memory begins as NaNs, copies happen at once or at the last moment allowed, numbers are published
// then, warps get their turns by lot, and a block that waits for ever ends the process.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

#define KERNEL(name) static void name
#define DEVICE static inline
#define SHARED_MEMORY(name) u8* name = host::block->shared.data()

struct Quad {
    u32 word[4];
};

namespace host {

struct Meeting {
    int waiting = 0, generation = 0;
};

typedef std::vector<std::pair<u8*, const u8*>> Copies;

struct Warp {
    Meeting meeting;
    u32 a[32][4], b[32][2];
    float numbers[32];
    std::vector<std::pair<float*, float>> published;  // that other blocks cannot see yet
    u32 arrived_before;
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK]};
    Copies copies;
    bool done = false;
    static constexpr size_t STACK = 256 << 10;
};

struct Block {
    int x, y, z;
    std::vector<u8> shared;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    Meeting whole;
    std::map<int, Meeting> numbered;
    std::vector<std::function<void()>> under_way;  // what happens by itself, sooner or later
};

static ucontext_t scheduler;
static std::function<void()> body;
static Block* block;  // whose turn it is
static int current, grid_x;
static bool moved;
static std::mt19937 lots;

static Fiber& fiber() { return block->fibers[current]; }

// Whether that was the last of `count`.
static bool come(Meeting& m, int count) {
    moved = true;
    if (++m.waiting < count) return false;
    m.waiting = 0;
    m.generation++;
    return true;
}

static void meet(Meeting& m, int count) {
    const int generation = m.generation;
    if (come(m, count)) return;
    while (m.generation == generation) swapcontext(&fiber().context, &scheduler);
}

static Warp& warp() { return block->warps[current / 32]; }
static void meet_warp() { meet(warp().meeting, 32); }

static void make_visible(Warp& w) {
    for (auto [at, value] : w.published) *at = value;
    w.published.clear();
}

static void enter() {
    body();
    moved = true;
    fiber().done = true;
}

static std::unique_ptr<Block> start_block(int x, int y, int z, int threads, size_t shared_bytes) {
    auto made = std::make_unique<Block>(Block{x, y, z});
    made->shared.assign(shared_bytes, 0xff);
    made->fibers.resize(threads);
    made->warps.resize(threads / 32);
    for (auto& fiber : made->fibers) {
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = Fiber::STACK;
        fiber.context.uc_link = &scheduler;
        makecontext(&fiber.context, enter, 0);
    }
    return made;
}

static int turns(Block& with, u32 warps) {
    int left = 0;
    for (current = 0; current < (int)with.fibers.size(); current++) {
        if (!fiber().done && warps >> current / 32 & 1) swapcontext(&scheduler, &fiber().context);
        left += !fiber().done;
    }
    return left;
}

// A turn for each thread of some warps of a block, of all if that leads nowhere; whether some have not ended.
static bool go_on(Block& with) {
    block = &with;
    moved = false;
    for (size_t i = with.under_way.size(); i-- > 0;)
        if (lots() % 2) {
            with.under_way[i]();
            with.under_way.erase(with.under_way.begin() + i);
        }
    int left = turns(with, lots());
    if (left && !moved && with.under_way.empty()) left = turns(with, ~0u);
    if (left && !moved && with.under_way.empty()) {
        std::fprintf(stderr, "block %d: %d threads wait for ever\n", with.x, left);
        std::abort();
    }
    if (!left)
        for (auto& w : with.warps) make_visible(w);
    return left;
}

// At most `together` blocks at a time; `seed` decides which begin first and whose turn it is.
static void launch(int x, int y, int z, int threads, size_t shared_bytes, int together, u32 seed, std::function<void()> kernel) {
    body = std::move(kernel);
    grid_x = x;
    lots.seed(seed);
    std::vector<int> waiting(x * y * z);
    for (int i = 0; i < x * y * z; i++) waiting[i] = i;
    std::shuffle(waiting.begin(), waiting.end(), lots);
    std::vector<std::unique_ptr<Block>> running;
    while (!waiting.empty() || !running.empty()) {
        while (!waiting.empty() && (int)running.size() < together) {
            const int at = waiting.back();
            running.push_back(start_block(at % x, at / x % y, at / x / y, threads, shared_bytes));
            waiting.pop_back();
        }
        const size_t turn = lots() % running.size();
        if (!go_on(*running[turn])) running.erase(running.begin() + turn);
    }
}

template <class T>
static T read(const void* at, size_t alignment = sizeof(T)) {
    if ((uintptr_t)at % alignment) {
        std::fprintf(stderr, "%p is not aligned to %zu bytes\n", at, alignment);
        std::abort();
    }
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

static float as_float(u32 bits) {
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

static float half(u16 bits) {
    _Float16 h;
    std::memcpy(&h, &bits, 2);
    return (float)h;
}

static void copy(Copies& copies) {
    for (auto [to, from] : copies) std::memcpy(to, from, 16);
    copies.clear();
}

}  // namespace host

DEVICE Quad load16(const u8* at) { return host::read<Quad>(at, 16); }
DEVICE Quad read16(const u8* at) { return host::read<Quad>(at, 16); }
DEVICE u32 read4(const u8* at) { return host::read<u32>(at); }
DEVICE void read8(const u8* at, u32& a, u32& b) {
    const u64 both = host::read<u64>(at);
    a = (u32)both;
    b = (u32)(both >> 32);
}
DEVICE void load8(const u8* at, u32& a, u32& b) { read8(at, a, b); }

DEVICE void copy16(u8* to, const u8* from) {
    auto& shared = host::block->shared;
    if (to < shared.data() || to + 16 > shared.data() + shared.size()) {
        std::fprintf(stderr, "a copy ends %td bytes beyond shared memory\n", to + 16 - shared.data() - shared.size());
        std::abort();
    }
    read16(from);
    host::Copies now{{to, from}};
    host::lots() % 2 ? host::copy(now) : host::fiber().copies.push_back(now[0]);
}
DEVICE void wait_for_copies() { host::copy(host::fiber().copies); }

DEVICE void publish(float* at, float value) { host::warp().published.push_back({at, value}); }
DEVICE float read_published(const float* at) { return host::read<float>(at); }
DEVICE u32 arrive(u32* counter, u32 last) {
    auto& warp = host::warp();
    host::meet_warp();
    if (host::current % 32 == 0) {
        host::make_visible(warp);
        warp.arrived_before = *counter;
        *counter = *counter >= last ? 0 : *counter + 1;
    }
    host::meet_warp();
    return warp.arrived_before;
}

DEVICE u32 pick(u32 a, u32 b, u32 selector) {
    const u64 bytes = (u64)b << 32 | a;
    u32 out = 0;
    for (int i = 0; i < 4; i++) out |= (u32)(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
    return out;
}

DEVICE float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
DEVICE float divide(float a, float b) { return a / b; }
DEVICE float exponential(float a) { return std::exp(a); }
DEVICE float error_function(float a) { return std::erf(a); }
DEVICE float reciprocal_root(float a) { return 1 / std::sqrt(a); }
DEVICE float small_float(u32 value) { return (float)value; }
DEVICE float from_half(u32 bits) { return host::half((u16)bits); }
DEVICE float widen(u16 bits) { return BF16 ? host::as_float((u32)bits << 16) : host::half(bits); }

DEVICE u16 narrow(float f) {
    u32 bits;
    std::memcpy(&bits, &f, 4);
    if (BF16) return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    const _Float16 h = (_Float16)f;
    u16 out;
    std::memcpy(&out, &h, 2);
    return out;
}

DEVICE u32 narrow_pair(float a, float b) { return narrow(a) | (u32)narrow(b) << 16; }
DEVICE u32 multiply_pairs(u32 a, u32 b) {
    return narrow_pair(widen((u16)a) * widen((u16)b), widen((u16)(a >> 16)) * widen((u16)(b >> 16)));
}

DEVICE void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    auto& warp = host::warp();
    const int lane = host::current % 32, g = lane / 4, t = lane % 4;
    const u32 a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    std::memcpy(warp.a[lane], a, sizeof a);
    std::memcpy(warp.b[lane], b, sizeof b);
    host::meet_warp();
    for (int i = 0; i < 4; i++) {
        double sum = c[i];
        for (int k = 0; k < 16; k++) {
            const int holder = k % 8 / 2, upper = k / 8, part = k % 2 * 16;
            const u32 left = warp.a[g * 4 + holder][upper * 2 + i / 2] >> part;
            const u32 right = warp.b[(t * 2 + i % 2) * 4 + holder][upper] >> part;
            sum += (double)widen((u16)left) * widen((u16)right);
        }
        c[i] = (float)sum;
    }
    host::meet_warp();
}

namespace host {
// Of a number of `lanes` neighbouring threads, by twos, then fours ...
template <typename Combine>
static float combined(float f, int lanes, Combine combine) {
    const int lane = current % 32;
    for (int i = 1; i < lanes; i *= 2) {
        warp().numbers[lane] = f;
        meet_warp();
        f = combine(f, warp().numbers[lane ^ i]);
        meet_warp();
    }
    return f;
}
}  // namespace host

DEVICE float sum_over(float f, int lanes) { return host::combined(f, lanes, std::plus<float>()); }

DEVICE int uniform(int value) { return value; }
DEVICE int afresh(int value) { return value; }
DEVICE int thread() { return host::current; }
DEVICE int block() { return host::block->x; }
DEVICE int blocks() { return host::grid_x; }
DEVICE int block_of_columns() { return host::block->y; }
DEVICE void wait_for_block() { host::meet(host::block->whole, (int)host::block->fibers.size()); }
DEVICE void wait_for_kernel_before() {}
DEVICE void let_next_kernel_start() {}
