// Stages 4 and 5 of prefill in one launch (`select_tiles`), and selection alone on given scores (`select_rows`).
//
// CTAs are as many as fit the GPU; each walks over tiles of ROW_TILE sparse rows, scores a tile into a scratch of its own
// and selects from there while the scores are in cache. The scratch has (CTAs * ROW_TILE) rows whatever seq_len is.
#include "prefill_score.cuh"
#include "prefill_select.cuh"

static_assert(SELECT_THREADS == SCORE_THREADS, "one CTA does both");

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
    Sequence sequence;
    int b, row, rows;  // row: the first, counted in the range; rows: real ones, <= 0 if there is nothing to do
    int64_t base;      // of the first row in `queries` and `lists`
    int position;      // of the first row
};

__device__ __forceinline__ RowTile row_tile(const SelectTilesParams& p, int index) {
    const int tiles = (p.rows + ROW_TILE - 1) / ROW_TILE;
    RowTile tile;
    tile.b = index / tiles;
    tile.sequence = sequence_of(p.live, p.past, tile.b, p.seq_len);
    tile.row = index % tiles * ROW_TILE;
    tile.rows = min(min(ROW_TILE, p.rows - tile.row), tile.sequence.live - p.row_begin - tile.row);
    if (p.row_begin + tile.row + tile.rows <= tile.sequence.first_sparse) tile.rows = 0;
    tile.base = static_cast<int64_t>(tile.b) * p.rows + tile.row;
    tile.position = tile.sequence.past + p.row_begin + tile.row;
    return tile;
}

__device__ __forceinline__ void score_half(const SelectTilesParams& p, int index, surf_t* staged) {
    const RowTile tile = row_tile(p, index);
    if (tile.rows <= 0) return;
    score_tile(p.queries + tile.base * IH * ID, tile.rows, p.pool, p.page_table, p.pages_per_seq, tile.b,
               visible_blocks(tile.position + tile.rows - 1),
               staged, p.scratch + static_cast<int64_t>(blockIdx.x) * ROW_TILE * p.stride, p.stride);
}

__device__ __forceinline__ void select_half(const SelectTilesParams& p, int index, SelectShared& shared) {
    const RowTile tile = row_tile(p, index);
    const float* scratch = p.scratch + static_cast<int64_t>(blockIdx.x) * ROW_TILE * p.stride;
    for (int r = 0; r < tile.rows; ++r) {
        if (p.row_begin + tile.row + r < tile.sequence.first_sparse) continue;
        select_row(scratch + static_cast<int64_t>(r) * p.stride, visible_blocks(tile.position + r),
                   p.lists + (tile.base + r) * BUDGET_BLOCKS, shared);
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(SELECT_THREADS, SCORE_CTAS) qsa_select_tiles(
    const __grid_constant__ SelectTilesParams p) {
    __shared__ SelectShared shared;
    __shared__ alignas(16) surf_t queries[ROW_TILE * QUERY_STRIDE];
    const int tiles = p.batch * ((p.rows + ROW_TILE - 1) / ROW_TILE);
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
        score_half(p, index, queries);
        __syncthreads();
        select_half(p, index, shared);
        __syncthreads();
    }
}

struct SelectRowsParams {
    const float* scores;     // [rows, stride]
    const int* counts;       // [rows], visible blocks
    int* lists;              // [rows, BUDGET_BLOCKS] out
    int rows;
    int stride;
};

// One CTA a row.
extern "C" __global__ void __launch_bounds__(SELECT_THREADS) qsa_select_rows(const __grid_constant__ SelectRowsParams p) {
    __shared__ SelectShared shared;
    const int64_t row = blockIdx.x;
    select_row(p.scores + row * p.stride, p.counts[row], p.lists + row * BUDGET_BLOCKS, shared);
}
