// Stages 4 and 5 of prefill in one launch (`select_tiles`), and selection alone on given scores (`select_rows`).
//
// CTAs are as many as fit the GPU; each walks over tiles of ROW_TILE sparse rows, scores a tile into a scratch of its
// own and selects from there while the scores are in cache. The scratch has CTAs * ROW_TILE rows whatever seq_len is.
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

// ROW_TILE rows of one sequence.
struct RowTile {
    int b;
    int row;       // the first, counted in the range
    int rows;      // real ones; 0 if none is sparse
    int position;  // of the first row
    int64_t base;  // of the first row in `queries` and `lists`
};

__device__ __forceinline__ RowTile row_tile(const SelectTilesParams& p, int index) {
    const int tiles = (p.rows + ROW_TILE - 1) / ROW_TILE;
    RowTile tile;
    tile.b = index / tiles;
    tile.row = index % tiles * ROW_TILE;
    const Sequence sequence = sequence_of(p.live, p.past, tile.b, p.seq_len);
    tile.position = sequence.past + p.row_begin + tile.row;
    tile.rows = min(min(ROW_TILE, p.rows - tile.row), sequence.live - p.row_begin - tile.row);
    if (tile.rows <= 0 || visible_blocks(tile.position + tile.rows - 1) <= BUDGET_BLOCKS) tile.rows = 0;
    tile.base = static_cast<int64_t>(tile.b) * p.rows + tile.row;
    return tile;
}

__device__ __forceinline__ float* own_scratch(const SelectTilesParams& p) {
    return p.scratch + static_cast<int64_t>(blockIdx.x) * ROW_TILE * p.stride;
}

__device__ __forceinline__ void score_half(const SelectTilesParams& p, int index, surf_t* staged) {
    const RowTile tile = row_tile(p, index);
    if (tile.rows > 0)
        score_tile(p.queries + tile.base * (IH * ID), tile.rows, p.pool, p.page_table, p.pages_per_seq, tile.b,
                   visible_blocks(tile.position + tile.rows - 1), staged, own_scratch(p), p.stride);
}

__device__ __forceinline__ void select_half(const SelectTilesParams& p, int index, uint32_t (*histogram)[BINS]) {
    const RowTile tile = row_tile(p, index);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int r = warp; r < tile.rows; r += WARPS) {
        const int blocks = visible_blocks(tile.position + r);
        if (blocks > BUDGET_BLOCKS)  // a sparse row
            select_row(own_scratch(p) + static_cast<int64_t>(r) * p.stride, blocks, histogram[warp],
                       p.lists + (tile.base + r) * BUDGET_BLOCKS, lane);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, SCORE_CTAS) qsa_select_tiles(
    const __grid_constant__ SelectTilesParams p) {
    __shared__ union {
        alignas(16) surf_t queries[ROW_TILE * QUERY_STRIDE];
        alignas(16) uint32_t histogram[WARPS][BINS];
    } shared;
    const int tiles = p.batch * ((p.rows + ROW_TILE - 1) / ROW_TILE);
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
        score_half(p, index, shared.queries);
        __syncthreads();
        // the halves share nothing but the index, hidden from the compiler: scoring needs all registers for itself
        int again = index;
        asm volatile("" : "+r"(again));
        select_half(p, again, shared.histogram);
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
