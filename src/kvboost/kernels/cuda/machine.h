// What one thread of an NVIDIA GPU can do (compute capability 8.0 and newer), as functions. tests/cuda_host/machine.h has
// the same functions for a CPU, so that the kernels' arithmetic is tested without a GPU.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define KERNEL(name) extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) name
#define DEVICE static __device__ __forceinline__
#define SHARED_MEMORY(name) extern __shared__ __align__(16) u8 name[]

struct Quad {
    u32 word[4];
};

// Global memory that the kernel before may have written after this one started.
DEVICE Quad load16(const u8* at) {
    Quad q;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(q.word[0]), "=r"(q.word[1]), "=r"(q.word[2]), "=r"(q.word[3])
                 : "l"(at));
    return q;
}

DEVICE void load8(const u8* at, u32& a, u32& b) {
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "l"(at));
}

// Global memory that nobody writes while the kernel runs.
DEVICE Quad read16(const u8* at) {
    Quad q;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(q.word[0]), "=r"(q.word[1]), "=r"(q.word[2]), "=r"(q.word[3])
                 : "l"(at));
    return q;
}

DEVICE void read8(const u8* at, u32& a, u32& b) {
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "l"(at));
}

DEVICE u32 read4(const u8* at) {
    u32 a;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(a) : "l"(at));
    return a;
}

// 16 bytes to shared memory while the thread goes on; it has them there after `wait_for_copies`.
DEVICE void copy16(u8* to, const u8* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}

DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Memory that blocks of one launch write for each other. A thread publishes numbers; when all threads of its warp have, the
// warp arrives at a counter. A warp that finds all others have arrived may read what they published.
DEVICE void publish(float* at, float value) {
    asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(at), "f"(value) : "memory");
}

DEVICE float read_published(const float* at) {
    float value;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(value) : "l"(at) : "memory");
    return value;
}

// How many had arrived before, by all threads of a warp. The arrival after `last` others sets the counter to 0 again.
DEVICE u32 arrive(u32* counter, u32 last) {
    u32 before = 0;
    __syncwarp();
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    if (threadIdx.x % 32 == 0)
        asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
    before = __shfl_sync(0xffffffffu, before, 0);
    if (before == last) asm volatile("fence.acq_rel.gpu;" ::: "memory");
    __syncwarp();
    return before;
}

// Bytes of (a, b), numbered 0 to 7, by the four nibbles of `selector`.
DEVICE u32 pick(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }

// To the last bit or two, as Triton has them.
DEVICE float divide(float a, float b) {
    float f;
    asm("div.full.f32 %0, %1, %2;" : "=f"(f) : "f"(a), "f"(b));
    return f;
}

DEVICE float exponential(float a) {
    float f;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(f) : "f"(a * 1.4426950408889634f));
    return f;
}

DEVICE float error_function(float a) { return erff(a); }

DEVICE float reciprocal_root(float a) {
    float f;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(f) : "f"(a));
    return f;
}

// An integer below 2 ** 23.
DEVICE float small_float(u32 value) { return __uint_as_float(0x4b000000u | value) - 8388608.f; }

// fp16 in the low half of `bits`.
DEVICE float from_half(u32 bits) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)bits));
    return f;
}

DEVICE float widen(u16 bits) {
    if (BF16) return __uint_as_float((u32)bits << 16);
    return from_half(bits);
}

DEVICE u16 narrow(float f) {
    u16 bits;
    if (BF16)
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(f));
    else
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(f));
    return bits;
}

// Pairs of numbers, the first in the low half.
DEVICE u32 narrow_pair(float a, float b) {
    u32 bits;
    if (BF16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(b), "f"(a));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(b), "f"(a));
    return bits;
}

DEVICE u32 multiply_pairs(u32 a, u32 b) {
    u32 bits;
    if (BF16)
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(bits) : "r"(a), "r"(b), "r"(0x80008000u));
    else
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(bits) : "r"(a), "r"(b));
    return bits;
}

// c[16 x 8] += a[16 x 16] b[16 x 8] by the 32 threads of a warp. With g = lane / 4 and t = lane % 4 a thread holds of a the
// pairs of columns (2t, 2t + 1) of rows g and g + 8, then the pairs (2t + 8, 2t + 9); of b the same pairs of rows of column
// g; of c the columns 2t and 2t + 1 of rows g and g + 8.
DEVICE void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (BF16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The sum of a number over `lanes` (a power of two) neighbouring threads of a warp, in all of them.
DEVICE float sum_over(float f, int lanes) {
    for (int i = 1; i < lanes; i *= 2) f += __shfl_xor_sync(0xffffffffu, f, i);
    return f;
}

// A number that all threads of a warp have, told to the compiler.
DEVICE int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// The same number, of which the compiler keeps nothing that it made of it before.
DEVICE int afresh(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

DEVICE int thread() { return threadIdx.x; }
DEVICE int block() { return blockIdx.x; }
DEVICE int blocks() { return gridDim.x; }
DEVICE int block_of_columns() { return blockIdx.y; }
DEVICE void wait_for_block() { __syncthreads(); }

// With programmatic dependent launches: the kernel before has stored everything. Else nothing.
DEVICE void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
