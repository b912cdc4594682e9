// Stages 4 and 5 of prefill in one launch (`select_tiles`), and selection alone on given scores (`select_rows`).
//
// CTAs are as many as fit the GPU; each walks over tiles of ROW_TILE sparse rows. All warps score a tile's blocks into a
// scratch of the CTA, then each selects from it for rows of its own while the scores are in cache. Where a chunk does not
// hold all blocks, that is done with a sample of them, and of the chunks that follow only candidates are stored. The
// scratch grows with the number of CTAs, not with the number of rows, nor, past a chunk, with their length.
#include "prefill_candidates.cuh"

constexpr int THREADS = SCORE_THREADS;
constexpr int WARPS = THREADS / 32;

struct SelectTilesParams {
    const surf_t* queries;   // [batch, rows, IH, ID], as qprep_rows stores them
    const surf_t* pool;      // [2*N, PAGE, HKV, POOL_WIDTH]
    const int* page_table;   // [batch, 2, pages_per_seq]
    const int* live;         // [batch]
    const int* past;         // [batch], or null: 0
    uint32_t* scratch;       // [CTAs, ROW_TILE, chunk + 2 * candidates]: keys; candidates, with their ids
    int* lists;              // [batch, rows, BUDGET_BLOCKS] out, rows of dense rows stay unwritten
    int batch;
    int seq_len;
    int pages_per_seq;
    int row_begin;           // first row of the range: a row that is dense for every sequence is not in it
    int rows;
    int chunk;               // blocks; a multiple of BLOCK_TILE
    int candidates;          // 0 if a chunk holds the longest row, else MAX_CANDIDATES + chunk
};

// ROW_TILE rows of one sequence.
struct Work {
    Pass pass;
    ScoreWork score;  // what of their blocks is scored now
    int index;        // of the tile
    int rows;         // that are real
    int position;     // of the first row
    int blocks;       // that the last row sees
    int64_t base;     // of the first row in `queries` and `lists`
};

__device__ __forceinline__ uint32_t* own_scratch(const SelectTilesParams& p) {
    return p.scratch + static_cast<int64_t>(blockIdx.x) * ROW_TILE * (p.chunk + 2 * p.candidates);
}

// One thread: the next tile that has a sparse row. False if there is none.
__device__ __forceinline__ bool next_tile(const SelectTilesParams& p, Work& work) {
    const int tiles = (p.rows + ROW_TILE - 1) / ROW_TILE;
    while ((work.index += gridDim.x) < p.batch * tiles) {
        const int b = work.index % p.batch;
        const int row = (tiles - 1 - work.index / p.batch) * ROW_TILE;  // the longest tiles first
        const Sequence sequence = sequence_of(p.live, p.past, b, p.seq_len);
        work.rows = min(min(ROW_TILE, p.rows - row), sequence.live - p.row_begin - row);
        work.position = sequence.past + p.row_begin + row;
        work.base = static_cast<int64_t>(b) * p.rows + row;
        work.blocks = work.rows > 0 ? visible_blocks(work.position + work.rows - 1) : 0;
        work.pass = work.blocks > p.chunk ? SAMPLING : WHOLE;
        const int sample = sample_size(work.blocks, p.chunk), least = visible_blocks(work.position);
        work.score = {0, work.pass == WHOLE ? work.blocks : sample,
                      p.page_table + (static_cast<int64_t>(b) * 2 + 1) * p.pages_per_seq,
                      work.pass == WHOLE ? 0u : static_cast<uint32_t>((static_cast<uint64_t>(least) << 16) / sample)};
        if (work.blocks > BUDGET_BLOCKS) return true;
    }
    return false;
}

extern "C" __global__ void __launch_bounds__(THREADS, SCORE_CTAS) qsa_select_tiles(
    const __grid_constant__ SelectTilesParams p) {
    // queries [QUERY_BYTES], and BINS words a warp: histograms, or what waits for its place in a list
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ RowState states[ROW_TILE];
    __shared__ Work work;
    __shared__ int waiting[WARPS];
    const auto list_of = [&](int r) {
        return reinterpret_cast<Candidate*>(own_scratch(p) + ROW_TILE * p.chunk) + r * p.candidates;
    };
    const auto own_words = [&] { return reinterpret_cast<uint32_t*>(shared + QUERY_BYTES) + thread_now() / 32 * BINS; };
    const auto own_queue = [&] {
        return Queue{reinterpret_cast<Queue::Entry*>(own_words()), waiting[thread_now() / 32]};
    };
    if (threadIdx.x < WARPS) waiting[threadIdx.x] = 0;
    if (threadIdx.x == 0) work.index = static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x);
    while (__syncthreads_or(threadIdx.x == 0 && next_tile(p, work))) {
        if (threadIdx.x < ROW_TILE) {
            const int blocks = threadIdx.x < work.rows ? visible_blocks(work.position + threadIdx.x) : 0;
            states[threadIdx.x].blocks = blocks > BUDGET_BLOCKS ? blocks : 0;
            states[threadIdx.x].bound(0xff800000u);  // infinity, until there is a list
        }
        stage_queries(p.queries + work.base * (IH * ID), work.rows, shared);
        bool more;
        do {
            __syncthreads();
            score_blocks(shared, work.score, p.pool, [&](const Sums& sums, int first, int first_row) {
                const volatile Work& now = work;  // read again, not kept while products need all registers
                if (now.pass == COLLECTING) {
                    own_queue().add(sums, first, first_row, states, list_of);
                    return;
                }
                const int rows = now.rows, thread = thread_now(), g = thread / 4 % 8, t = thread % 4;
                uint32_t* to = own_scratch(p) + first + g + (first_row + 2 * t) * p.chunk;
#pragma unroll
                for (int i = 0; i < SUM_ROWS; ++i) {
                    if (first_row + row_of(i, t) >= rows) continue;
#pragma unroll
                    for (int j = 0; j < SUM_KEYS; ++j) to[row_of(i, 0) * p.chunk + 8 * j] = key_of_sum(sums[i][j]);
                }
            });
            own_queue().flush(states, list_of);
            __syncthreads();
            const volatile Work& now = work;
            const bool last = now.pass != SAMPLING && now.score.end == now.blocks;
            bool again = false;
#pragma unroll 1
            for (int r = thread_now() / 32; r < work.rows; r += WARPS) {
                if (states[r].blocks == 0) continue;
                const bool done = select_from(now.pass, last, own_scratch(p) + r * p.chunk, now.score.end, list_of(r),
                                              states[r], own_words(), p.lists + (now.base + r) * BUDGET_BLOCKS,
                                              thread_now() % 32);
                __syncwarp();
                if (last && thread_now() % 32 == 0) states[r].begin_again(done);
                again |= !done;
            }
            more = __syncthreads_or(again || !last);
            if (threadIdx.x == 0) {
                work.score.begin = last || work.pass == SAMPLING ? 0 : work.score.end;
                work.score.end = min(work.score.begin + p.chunk, work.blocks);
                work.score.apart = 0;
                work.pass = COLLECTING;
            }
        } while (more);
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
    if (row >= p.rows) return;
    const Scores scores = {p.scores + row * p.stride};
    const int count = p.counts[row];
    int* ids = p.lists + row * BUDGET_BLOCKS;
    const Threshold threshold =
        count > BUDGET_BLOCKS ? find_threshold(scores, count, BUDGET_BLOCKS, 0u, 0, histogram[warp], lane) : EVERYTHING;
    const int taken = gather(scores, count, threshold, lane, [&](int place, uint32_t, int id) { ids[place] = id; });
    for (int i = taken + lane; i < BUDGET_BLOCKS; i += 32) ids[i] = -1;
}
