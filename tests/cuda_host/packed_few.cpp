// packed_few.cu as a function of a library, for tests/unit/test_cuda_packed_few.py.
#include <packed_few.cu>

extern "C" void run(int grid_x, int grid_y, size_t shared_bytes, int together, u32 seed, const u8* x, const u8* weight,
                    const u16* bias, const u16* total, const u8* norm, u16* y, const Shape* shape, float* partials, u32* counters) {
    host::launch(grid_x, grid_y, 1, THREADS, shared_bytes, together, seed,
                 [=] { packed_few(x, weight, bias, total, norm, y, *shape, partials, counters); });
}
