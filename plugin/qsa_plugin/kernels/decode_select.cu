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

__device__ __forceinline__ void touch(const Pages& pages) { asm volatile("" ::"r"(pages.k), "r"(pages.v)); }

extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1) decode_select(const __grid_constant__ DecodeParams p) {
    extern __shared__ float4 shared_scores[];  // [SELECT_QUADS * QUAD_PITCH]
    __shared__ SelectScratch scratch;
    __shared__ Survivors survivors;
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
    // Every page of the row goes through L1 now, so that the look-ups at the end are short.
    constexpr int BLOCKS_A_PAGE = PAGE / R;
    for (int i = threadIdx.x * BLOCKS_A_PAGE; i < n; i += SELECT_THREADS * BLOCKS_A_PAGE) touch(pages_of(p, row, i));
    grid_dependency_wait();
    grid_dependency_launch();
    const int live = p.live[row];
    const float highest = scores.load();
    if (live == 0) return;  // the same in all threads; the scores are garbage
    __syncthreads();
    Reduced left = {scores, {}, false, false};
    if (n > 8 * SELECT_THREADS && n <= scores.round())
        left = reduce_row(scores, highest, BUDGET_BLOCKS, scratch, survivors);
    if (!left.known) left.threshold = find_threshold(left.row, BUDGET_BLOCKS, scratch);
    emit_selected(left.row, left.threshold, scratch, [&](int place, int i) {
        const int block = left.mapped ? survivors.ids[i] : i;
        list_block(list, place, block, pages_of(p, row, block));
    });
}
