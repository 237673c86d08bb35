// The functions of kvboost/kernels/cuda/hopper.h for a CPU (machine.h beside this). What the copy engine brings arrives at any
// time after it was asked for; products are done when they are begun.
#pragma once
#include <machine.h>

struct TensorMap {  // of tensors of 16-bit numbers, the last dimension first
    u64 address, sizes[4], strides[4], box[4];  // strides: bytes
};

#define ALIGNED_SHARED_MEMORY(name) SHARED_MEMORY(name)
#define TENSOR_MAP(name) const TensorMap& name

namespace host {

struct Barrier {
    u32 arrivals, missing;
    long bytes;
    int phase;
};
static std::map<std::pair<Block*, const u64*>, Barrier> barriers;

static void check_phase(Barrier& b) {
    moved = true;
    if (b.missing || b.bytes) return;
    b.missing = b.arrivals;
    b.phase++;
}

// A byte of shared memory where 16 bytes of 8 rows of 128 are exchanged.
static u32 exchanged(u32 at) { return at ^ (at >> 7 & 7) << 4; }

static float number(u32 at) {
    return widen(read<u16>(&block->shared.at(exchanged(at))));
}

struct Operand {
    u32 at, to_next_8, to_next_64;
    explicit Operand(u64 bits)
        : at((bits & 0x3fff) << 4), to_next_8((bits >> 32 & 0x3fff) << 4), to_next_64((bits >> 16 & 0x3fff) << 4) {}
    float across(int row, int k) const { return number(at + row / 8 * to_next_8 + row % 8 * 128 + k * 2); }
    float along(int column, int k) const {
        return number(at + column / 64 * to_next_64 + column % 64 * 2 + k / 8 * to_next_8 + k % 8 * 128);
    }
};

}  // namespace host

DEVICE u32 shared_address(const void* at) { return (u32)((const u8*)at - host::block->shared.data()); }

DEVICE void barrier_init(u64* barrier, u32 arrivals) { host::barriers[{host::block, barrier}] = {arrivals, arrivals, 0, 0}; }
DEVICE void barriers_made() {}
DEVICE void barrier_arrive_announcing(u64* barrier, u32 bytes) {
    auto& b = host::barriers.at({host::block, barrier});
    b.bytes += bytes;
    b.missing--;
    host::check_phase(b);
}
DEVICE void barrier_arrive(u64* barrier) { barrier_arrive_announcing(barrier, 0); }
DEVICE void barrier_wait(u64* barrier, u32 parity) {
    auto& b = host::barriers.at({host::block, barrier});
    while ((u32)b.phase % 2 == parity) swapcontext(&host::fiber().context, &host::scheduler);
    host::moved = true;
}

DEVICE void bring_box(u8* to, const TensorMap& map, u64* barrier, int c0, int c1, int c2, int c3) {
    host::Block* const block = host::block;
    block->under_way.push_back([=, &map] {
        u32 at = shared_address(to), bytes = 0;
        const u64 from[4] = {(u64)c0, (u64)c1, (u64)c2, (u64)c3};
        for (u64 i3 = 0; i3 < map.box[3]; i3++)
            for (u64 i2 = 0; i2 < map.box[2]; i2++)
                for (u64 i1 = 0; i1 < map.box[1]; i1++)
                    for (u64 i0 = 0; i0 < map.box[0]; i0++, at += 2, bytes += 2) {
                        const u64 place[4] = {from[0] + i0, from[1] + i1, from[2] + i2, from[3] + i3};
                        u64 address = map.address;
                        bool exists = true;
                        for (int d = 0; d < 4; d++) {
                            exists = exists && place[d] < map.sizes[d];
                            address += place[d] * map.strides[d];
                        }
                        const u16 value = exists ? *(const u16*)address : 0;
                        std::memcpy(&block->shared.at(host::exchanged(at)), &value, 2);
                    }
        auto& b = host::barriers.at({block, barrier});
        b.bytes -= bytes;
        host::check_phase(b);
    });
}

DEVICE void show_to_products() {}
DEVICE void wait_for_each_other(int number, int threads) { host::meet(host::block->numbered[number], threads); }
DEVICE void arrive_for(int number, int threads) { host::come(host::block->numbered[number], threads); }
template <int COUNT>
DEVICE void take_registers() {}
template <int COUNT>
DEVICE void give_registers() {}

DEVICE u64 operand(const u8* at, u32 to_next_8, u32 to_next_64) {
    return (u64)(shared_address(at) >> 4 & 0x3fff) | (u64)(to_next_64 >> 4) << 16 | (u64)(to_next_8 >> 4) << 32;
}

DEVICE void begin_products() {}
DEVICE void end_batch() {}
template <int LEFT>
DEVICE void wait_for_batches() {}
template <int COUNT>
DEVICE void hold(float (&)[COUNT]) {}

DEVICE void product(float (&c)[64], u64 a, u64 b, int add) {
    const int warp = host::current / 32 % 4, lane = host::current % 32;
    const host::Operand left(a), right(b);
    for (int i = 0; i < 64; i++) {
        const int row = warp * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        double sum = add ? c[i] : 0;
        for (int k = 0; k < 16; k++) sum += (double)left.across(row, k) * right.across(column, k);
        c[i] = (float)sum;
    }
}

DEVICE void add_product(float (&c)[64], const u32 (&a)[4], u64 b) {
    auto& warp = host::warp();
    const int lane = host::current % 32, g = lane / 4, t = lane % 4;
    const host::Operand right(b);
    std::memcpy(warp.a[lane], a, sizeof a);
    host::meet_warp();
    for (int i = 0; i < 64; i++) {
        const int upper_row = i / 2 % 2, column = i / 4 * 8 + t * 2 + i % 2;
        double sum = c[i];
        for (int k = 0; k < 16; k++)
            sum += (double)widen((u16)(warp.a[g * 4 + k % 8 / 2][k / 8 * 2 + upper_row] >> k % 2 * 16)) * right.along(column, k);
        c[i] = (float)sum;
    }
    host::meet_warp();
}

DEVICE float power_of_two(float a) { return std::exp2(a); }
DEVICE float logarithm(float a) { return std::log2(a); }
DEVICE float greater(float a, float b) { return std::fmax(a, b); }
DEVICE float greatest_of(float f, int lanes) { return host::combined(f, lanes, greater); }
DEVICE void store8(float* at, float a, float b) {
    at[0] = a;
    at[1] = b;
}
DEVICE bool any_of_warp(bool is) { return greatest_of(is, 32) > 0; }
DEVICE void wait_for_warp() { host::meet_warp(); }
DEVICE int split() { return host::block->z; }
