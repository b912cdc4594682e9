// Stages 4 and 5 of prefill in one launch (`select_tiles`), and selection alone on given scores (`select_rows`).
//
// CTAs are as many as fit the GPU; each walks over tiles of ROW_TILE sparse rows. A tile's blocks come in chunks: all
// warps score a chunk into a scratch of the CTA, then each selects from it for rows of its own while the scores are in
// cache. The scratch grows with the number of CTAs, not with the number of rows, nor, past a chunk, with their length.
#include "prefill_score.cuh"
#include "prefill_select.cuh"

constexpr int THREADS = SCORE_THREADS;
constexpr int WARPS = THREADS / 32;

struct SelectTilesParams {
    const surf_t* queries;   // [batch, rows, IH, ID], as qprep_rows stores them
    const surf_t* pool;      // [2*N, PAGE, HKV, POOL_WIDTH]
    const int* page_table;   // [batch, 2, pages_per_seq]
    const int* live;         // [batch]
    const int* past;         // [batch], or null: 0
    float* scratch;          // [CTAs, ROW_TILE, chunk + 2 * candidates]: keys; keys and ids of candidates
    int* lists;              // [batch, rows, BUDGET_BLOCKS] out, rows of dense rows stay unwritten
    int batch;
    int seq_len;
    int pages_per_seq;
    int row_begin;           // first row of the range: a row that is dense for every sequence is not in it
    int rows;
    int chunk;               // blocks; a multiple of BLOCK_TILE
    int candidates;          // 0 if a chunk holds the longest row, else MAX_CANDIDATES + chunk
};

// A chunk of the blocks of ROW_TILE rows of one sequence.
struct Work {
    ScoreWork score;  // the chunk, and the real rows
    int index;        // of the tile
    int position;     // of the first row
    int blocks;       // that the last row sees
    int64_t base;     // of the first row in `queries` and `lists`
};

__device__ __forceinline__ float* own_scratch(const SelectTilesParams& p) {
    return p.scratch + static_cast<int64_t>(blockIdx.x) * ROW_TILE * (p.chunk + 2 * p.candidates);
}

// One thread: the next chunk, of this tile or of the next that has a sparse row. False if there is none.
__device__ __forceinline__ bool next_work(const SelectTilesParams& p, Work& work) {
    const int tiles = (p.rows + ROW_TILE - 1) / ROW_TILE;
    work.score.begin += p.chunk;
    while (work.score.begin >= work.blocks) {
        work.index += gridDim.x;
        if (work.index >= p.batch * tiles) return false;
        const int b = work.index % p.batch;
        const int row = (tiles - 1 - work.index / p.batch) * ROW_TILE;  // the longest tiles first
        const Sequence sequence = sequence_of(p.live, p.past, b, p.seq_len);
        const int rows = min(min(ROW_TILE, p.rows - row), sequence.live - p.row_begin - row);
        work.position = sequence.past + p.row_begin + row;
        work.base = static_cast<int64_t>(b) * p.rows + row;
        work.blocks = rows > 0 ? visible_blocks(work.position + rows - 1) : 0;
        if (work.blocks <= BUDGET_BLOCKS) work.blocks = 0;
        work.score.rows = rows;
        work.score.begin = 0;
        work.score.v_pages = p.page_table + (static_cast<int64_t>(b) * 2 + 1) * p.pages_per_seq;
    }
    work.score.end = min(work.score.begin + p.chunk, work.blocks);
    return true;
}

extern "C" __global__ void __launch_bounds__(THREADS, SCORE_CTAS) qsa_select_tiles(
    const __grid_constant__ SelectTilesParams p) {
    extern __shared__ __align__(1024) unsigned char shared[];  // queries [QUERY_BYTES], histograms [WARPS, BINS]
    __shared__ RowState states[ROW_TILE];
    __shared__ Work work;
    if (threadIdx.x == 0) {
        work.index = static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x);
        work.score.begin = work.blocks = 0;
        work.score.out = own_scratch(p);
    }
    while (__syncthreads_or(threadIdx.x == 0 && next_work(p, work))) {
        if (!QUERIES_STAY || work.score.begin == 0) {
            stage_queries(p.queries + work.base * (IH * ID), work.score.rows, shared);
            __syncthreads();
        }
        score_blocks<true>(shared, work.score, p.pool, p.chunk);
        __syncthreads();
        int thread;  // read again, not kept while scores are made: the products need all registers
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        const int warp = thread / 32, lane = thread % 32;
        uint32_t* scratch = reinterpret_cast<uint32_t*>(own_scratch(p));
#pragma unroll 1
        for (int r = warp; r < work.score.rows; r += WARPS) {
            const int blocks = visible_blocks(work.position + r);
            if (blocks <= BUDGET_BLOCKS) continue;  // not a sparse row
            uint32_t* keys = scratch + ROW_TILE * p.chunk + r * 2 * p.candidates;
            const int first = work.score.begin;
            select_chunk(scratch + r * p.chunk, first, max(0, min(p.chunk, blocks - first)),
                         work.score.end == work.blocks, keys, reinterpret_cast<int*>(keys + p.candidates), states[r],
                         reinterpret_cast<uint32_t*>(shared + (QUERIES_STAY ? QUERY_BYTES : 0)) + warp * BINS,
                         p.lists + (work.base + r) * BUDGET_BLOCKS, lane);
        }
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
constexpr int ROW_WARPS = 8;
extern "C" __global__ void __launch_bounds__(ROW_WARPS * 32, 4) qsa_select_rows(
    const __grid_constant__ SelectRowsParams p) {
    __shared__ alignas(16) uint32_t histogram[ROW_WARPS][BINS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * ROW_WARPS + warp;
    if (row < p.rows)
        select_row<false>(Scores{p.scores + row * p.stride}, nullptr, p.counts[row], histogram[warp],
                          p.lists + row * BUDGET_BLOCKS, lane);
}
