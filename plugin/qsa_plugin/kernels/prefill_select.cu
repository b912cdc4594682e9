// Stages 4 and 5 of prefill in one launch (`select_tiles`), and selection alone on given scores (`select_rows`).
//
// CTAs are as many as fit the GPU; each walks over tiles of ROW_TILE sparse rows, scores a tile into a scratch of its own
// and selects from there while the scores are in cache. The scratch has (CTAs * ROW_TILE) rows whatever seq_len is.
#include "prefill_score.cuh"
#include "prefill_select.cuh"

constexpr int THREADS = SCORE_THREADS;
constexpr int WARPS = SCORE_WARPS;

struct SelectTilesParams {
    const surf_t* queries;   // [batch, rows, IH, ID], as qprep_rows stores them
    const surf_t* pool;      // [2*N, PAGE, HKV, POOL_WIDTH]
    const int* page_table;   // [batch, 2, pages_per_seq]
    const int* live;         // [batch]
    const int* past;         // [batch], or null: 0
    float* scratch;          // [CTAs, ROW_TILE, stride]
    int* lists;              // [batch, rows, BUDGET_BLOCKS] out, rows of dense rows stay unwritten
    int batch;
    int seq_len;
    int pages_per_seq;
    int row_begin;           // first row of the range: a row that is dense for every sequence is not in it
    int rows;
    int stride;              // a multiple of BLOCK_TILE, at least the blocks of the longest row
};

extern "C" __global__ void __launch_bounds__(THREADS, SCORE_CTAS) qsa_select_tiles(
    const __grid_constant__ SelectTilesParams p) {
    __shared__ union {
        alignas(16) surf_t queries[ROW_TILE * QUERY_STRIDE];
        alignas(16) uint32_t histogram[WARPS][BINS];
    } shared;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tiles = (p.rows + ROW_TILE - 1) / ROW_TILE;
    float* scratch = p.scratch + static_cast<int64_t>(blockIdx.x) * ROW_TILE * p.stride;
    for (int tile = blockIdx.x; tile < p.batch * tiles; tile += gridDim.x) {
        const int b = tile / tiles, row = tile % tiles * ROW_TILE;  // the tile's first row, counted in the range
        const Sequence sequence = sequence_of(p.live, p.past, b, p.seq_len);
        const int rows = min(min(ROW_TILE, p.rows - row), sequence.live - p.row_begin - row);
        if (rows <= 0 || p.row_begin + row + rows <= sequence.first_sparse) continue;
        const int position = sequence.past + p.row_begin + row;
        const int64_t base = static_cast<int64_t>(b) * p.rows + row;
        score_tile(p.queries + base * IH * ID, rows, p.pool, p.page_table, p.pages_per_seq, b,
                   visible_blocks(position + rows - 1), shared.queries, scratch, p.stride);
        __syncthreads();
#pragma unroll 1
        for (int r = warp; r < rows; r += WARPS)
            if (p.row_begin + row + r >= sequence.first_sparse)
                select_row(scratch + static_cast<int64_t>(r) * p.stride, visible_blocks(position + r),
                           shared.histogram[warp], p.lists + (base + r) * BUDGET_BLOCKS, lane);
        __syncthreads();
    }
}

struct SelectRowsParams {
    const float* scores;     // [rows, stride]
    const int* counts;       // [rows], visible blocks
    int* lists;              // [rows, BUDGET_BLOCKS] out
    int rows;
    int stride;              // a multiple of 4
};

// One warp a row.
extern "C" __global__ void __launch_bounds__(THREADS) qsa_select_rows(const __grid_constant__ SelectRowsParams p) {
    __shared__ alignas(16) uint32_t histogram[WARPS][BINS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * WARPS + warp;
    if (row < p.rows)
        select_row(p.scores + row * p.stride, p.counts[row], histogram[warp], p.lists + row * BUDGET_BLOCKS, lane);
}
