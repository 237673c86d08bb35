// What Hopper GPUs (compute capability 9.0, compiled for sm_90a) have beyond machine.h: the copy engine, barriers that count what
// it brings, and matrix products of 4 warps together that read their operands from shared memory by themselves. On a CPU:
// tests/cuda_host/hopper.h.
#pragma once
#include <machine.h>

// A kernel's parameter, made by the driver's cuTensorMapEncodeTiled.
struct __align__(64) TensorMap {
    u64 word[16];
};

// What the copy engine exchanges begins at a multiple of 8 rows of 128 bytes.
#define ALIGNED_SHARED_MEMORY(name) extern __shared__ __align__(1024) u8 name[]

#define TENSOR_MAP(name) const __grid_constant__ TensorMap name

DEVICE u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// A barrier in shared memory. Its phases, numbered from 0, end when so many have arrived and all bytes that were announced are
// there. To be made by one thread, followed by `barriers_made`, before the block's first barrier.
DEVICE void barrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

DEVICE void barriers_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

DEVICE void barrier_arrive_announcing(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// For the end of a phase, by the parity of its number. No thread may be more than one phase behind.
DEVICE void barrier_wait(u64* barrier, u32 parity) {
    u32 over = 0;
    while (!over)
        asm volatile("{ .reg .pred over; mbarrier.try_wait.parity.shared.b64 over, [%1], %2; selp.u32 %0, 1, 0, over; }"
                     : "=r"(over)
                     : "r"(shared_address(barrier)), "r"(parity)
                     : "memory");
}

// A box of a tensor of 4 dimensions, from those coordinates on; what is outside of the tensor arrives as zeros. With the map's
// swizzle of 128 bytes, of 8 rows of 128 bytes those of 16 bytes are exchanged: unit u of row r is in place u ^ r % 8.
DEVICE void bring_box(u8* to, const TensorMap& map, u64* barrier, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
            shared_address(to)),
        "l"(&map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

// What this thread has stored in shared memory may be read by matrix products, after a barrier.
DEVICE void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Among `threads` threads that use the number of a barrier of their own, from 1 on.
DEVICE void wait_for_each_other(int number, int threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// The same, for the threads that do not wait.
DEVICE void arrive_for(int number, int threads) {
    asm volatile("barrier.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Registers of a thread, to be called by all 4 warps of a group.
template <int COUNT>
DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// An operand in shared memory, in rows of 128 bytes exchanged as above, 8 rows at a time: `to_next_8` bytes from 8 rows to the
// next. With rows of what is summed over, more than 64 columns go on `to_next_64` bytes further.
DEVICE u64 operand(const u8* at, u32 to_next_8, u32 to_next_64) {
    return (u64)(shared_address(at) >> 4 & 0x3fff) | (u64)(to_next_64 >> 4) << 16 | (u64)(to_next_8 >> 4) << 32 | 1ull << 62;
}

// Products are begun in order and go on by themselves. Before the first: `begin_products`; after the last of a batch:
// `end_batch`. `wait_for_batches(N)`: until at most the last N batches are not done. Registers of a product that goes on must
// not be touched; `hold` keeps the compiler from doing so.
DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void end_batch() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
DEVICE void wait_for_batches() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
template <int COUNT>
DEVICE void hold(float (&numbers)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(numbers[i])::"memory");
}

#if BF16
#define WGMMA "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
#else
#define WGMMA "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
#endif
#define RESULT_64                                                                                                        \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"    \
    "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,"   \
    "%58,%59,%60,%61,%62,%63}, "
#define REGISTERS_4(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define REGISTERS_16(c, i) REGISTERS_4(c, i), REGISTERS_4(c, i + 4), REGISTERS_4(c, i + 8), REGISTERS_4(c, i + 12)
#define REGISTERS_64(c) REGISTERS_16(c, 0), REGISTERS_16(c, 16), REGISTERS_16(c, 32), REGISTERS_16(c, 48)

// c[64 x 128] (+)= a[64 x 16] b^T, by 4 warps: a and b have rows of what is summed over. Of c a thread with g = lane / 4 and t =
// lane % 4 has in c[4 j] and c[4 j + 1] the columns 8 j + 2t and 8 j + 2t + 1 of row 16 * warp + g, then those of row g + 8.
DEVICE void product(float (&c)[64], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %66, 0;\n" WGMMA RESULT_64 "%64, %65, add, 1, 1, 0, 0; }"
                 : REGISTERS_64(c)
                 : "l"(a), "l"(b), "r"(add));
}

// c[64 x 128] += a[64 x 16] b, a in registers as in `multiply`, of the rows of each warp; b has rows of columns.
DEVICE void add_product(float (&c)[64], const u32 (&a)[4], u64 b) {
    asm volatile(WGMMA RESULT_64 "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : REGISTERS_64(c)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

DEVICE float power_of_two(float a) {
    float f;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(f) : "f"(a));
    return f;
}

DEVICE float logarithm(float a) {  // to the base of 2
    float f;
    asm("lg2.approx.f32 %0, %1;" : "=f"(f) : "f"(a));
    return f;
}

DEVICE float greater(float a, float b) { return fmaxf(a, b); }

// The greatest of a number of `lanes` (a power of two) neighbouring threads of a warp, in all of them.
DEVICE float greatest_of(float f, int lanes) {
    for (int i = 1; i < lanes; i *= 2) f = fmaxf(f, __shfl_xor_sync(0xffffffffu, f, i));
    return f;
}

DEVICE void store8(float* at, float a, float b) { *(float2*)at = make_float2(a, b); }

DEVICE bool any_of_warp(bool is) { return __any_sync(0xffffffffu, is); }
DEVICE void wait_for_warp() { __syncwarp(); }
DEVICE int split() { return blockIdx.z; }
