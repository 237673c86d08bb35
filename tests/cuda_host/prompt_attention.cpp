// prompt_attention.cu as a function of a library, for tests/unit/test_cuda_prompt_attention.py.
#include <prompt_attention.cu>

extern "C" void run(int grid_x, int grid_y, int grid_z, size_t shared_bytes, int together, u32 seed, const TensorMap* keys,
                    const TensorMap* values, const u8* query, u8* out, float* partial, float* partial_lse, const u8* positions,
                    const int* query_start, const int* tables, const int* table_start, const int* kv_len, const Launch* s) {
    host::launch(grid_x, grid_y, grid_z, THREADS, shared_bytes, together, seed, [=] {
        prompt_attention(*keys, *values, query, out, partial, partial_lse, positions, query_start, tables, table_start, kv_len, *s);
    });
}
