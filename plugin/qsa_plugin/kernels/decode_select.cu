// Decode, kernel 3: one thread block a row selects the row's blocks and resolves their pages, ascending, the causal
// tail last. Where all complete blocks fit the budget, all are listed and no score is read.
#include "decode.cuh"
#include "select.cuh"

#ifndef SELECT_SHARED_KEYS
#define SELECT_SHARED_KEYS 16384  // keys kept in shared memory; longer rows read the scores again in every pass
#endif
constexpr int THREADS = RADIX_BINS / 2;

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_select(const __grid_constant__ DecodeParams p) {
    extern __shared__ uint32_t shared_keys[];  // [SELECT_SHARED_KEYS]
    __shared__ SelectScratch scratch;
    __shared__ int ids[BUDGET_BLOCKS];
    const int row = blockIdx.x;
    grid_dependency_wait();
    grid_dependency_launch();
    const int length = p.live[row];
    if (length == 0) return;

    const int n = complete_blocks(length), listed = listed_blocks(length);
    Block* list = p.blocks + static_cast<int64_t>(row) * (BUDGET_BLOCKS + 1);
    const int* k_pages = p.page_table + static_cast<int64_t>(row) * 2 * p.pages_per_seq;
    const int* v_pages = k_pages + p.pages_per_seq;
    const auto emit = [&](int place, int block) {
        const int slot = block * R / PAGE;
        *reinterpret_cast<int4*>(list + place) = make_int4(block * R, k_pages[slot], v_pages[slot], 0);
    };
    if (n <= BUDGET_BLOCKS) {
        for (int i = threadIdx.x; i < listed; i += THREADS) emit(i, i);  // the tail is block n
        return;
    }

    const float* scores = p.scores + static_cast<int64_t>(row) * p.score_stride;
    if (n <= SELECT_SHARED_KEYS) {
#pragma unroll 4
        for (int i = 4 * threadIdx.x; i + 3 < n; i += 4 * THREADS) {
            const float4 four = *reinterpret_cast<const float4*>(scores + i);
            *reinterpret_cast<uint4*>(shared_keys + i) =
                make_uint4(score_key(four.x), score_key(four.y), score_key(four.z), score_key(four.w));
        }
        const int last = n / 4 * 4 + threadIdx.x;
        if (last < n) shared_keys[last] = score_key(scores[last]);
        __syncthreads();
        const auto keys = [&](int i) { return shared_keys[i]; };
        write_selected(keys, n, find_threshold(keys, n, BUDGET_BLOCKS, scratch), scratch, ids);
    } else {
        const auto keys = [&](int i) { return score_key(scores[i]); };
        write_selected(keys, n, find_threshold(keys, n, BUDGET_BLOCKS, scratch), scratch, ids);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < listed; i += THREADS) emit(i, i < BUDGET_BLOCKS ? ids[i] : n);
}
