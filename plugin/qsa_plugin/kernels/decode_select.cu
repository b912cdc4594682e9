// Decode, kernel 3: one thread block a row selects the row's blocks and resolves their pages, ascending, the causal
// tail last. Where all complete blocks fit the budget, all are listed and no score is read.
// Lengths and page tables are inputs of the enqueue: what follows from them alone is done before the wait.
#include "decode.cuh"
#include "select.cuh"

struct Pages {
    int k, v;
};

__device__ __forceinline__ Pages pages_of(const DecodeParams& p, int row, int block) {
    const int* k_pages = p.page_table + static_cast<int64_t>(row) * 2 * p.pages_per_seq + block * R / PAGE;
    return {__ldg(k_pages), __ldg(k_pages + p.pages_per_seq)};
}

__device__ __forceinline__ void list_block(Block* list, int place, int block, const Pages& pages) {
    *reinterpret_cast<int4*>(list + place) = make_int4(block * R, pages.k, pages.v, 0);
}

extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1) decode_select(const __grid_constant__ DecodeParams p) {
    extern __shared__ float4 shared_scores[];  // [SELECT_QUADS * QUAD_PITCH]
    __shared__ SelectScratch scratch;
    const int row = blockIdx.x;
    const int length = length_in_reach(p, row), n = complete_blocks(length);
    Block* list = p.blocks + static_cast<int64_t>(row) * (BUDGET_BLOCKS + 1);
    if (n <= BUDGET_BLOCKS) {
        for (int i = threadIdx.x; i < listed_blocks(length); i += SELECT_THREADS)  // the tail is block n
            list_block(list, i, i, pages_of(p, row, i));
        grid_dependency_wait();
        grid_dependency_launch();
        return;
    }

    if (threadIdx.x == 0 && length % R != 0) list_block(list, BUDGET_BLOCKS, n, pages_of(p, row, n));
    const ScoreRow scores(p.scores + static_cast<int64_t>(row) * p.score_stride, shared_scores, n);
    // The pages of this thread's word of the first round. Its at most 32 blocks lie in one page, in two where R is 8.
    constexpr int BLOCKS_A_PAGE = PAGE / R;
    const int word = scores.word(0);
    const Pages low = pages_of(p, row, min(word, n - 1));
    const Pages high = BLOCKS_A_PAGE < 32 ? pages_of(p, row, min(word + BLOCKS_A_PAGE, n - 1)) : low;
    const auto emit = [&](int place, int block) {
        if (block >= scores.round()) list_block(list, place, block, pages_of(p, row, block));
        else list_block(list, place, block, block - word < BLOCKS_A_PAGE ? low : high);
    };
    grid_dependency_wait();
    grid_dependency_launch();
    const int live = p.live[row];
    scores.load();
    if (live == 0) return;  // the same in all threads; the scores are garbage
    __syncthreads();
    emit_selected(scores, find_threshold(scores, BUDGET_BLOCKS, scratch), scratch, emit);
}
