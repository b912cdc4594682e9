// Launchers `score_rows_tc` (tensor cores) and `score_rows` (scalar, plain to read): scores of a row range, -inf past
// each row's complete blocks. The runner uses prefill_select.cu, which never keeps more than one row tile of them.
#include "prefill_score.cuh"

struct ScoreRowsParams {
    const surf_t* queries;   // [batch, rows, IH, ID], as qprep_rows stores them
    const surf_t* pool;      // [2*N, PAGE, HKV, POOL_WIDTH]
    const int* page_table;   // [batch, 2, pages_per_seq]
    const int* live;         // [batch]
    const int* past;         // [batch], or null: 0
    float* scores;           // [batch, rows, stride]
    int batch;
    int seq_len;
    int pages_per_seq;
    int row_begin;
    int rows;
    int stride;              // a multiple of BLOCK_TILE, at least the blocks of the longest row
};

constexpr int THREADS = SCORE_THREADS;

// One CTA a tile of ROW_TILE rows of one sequence. Padding rows get -inf everywhere.
extern "C" __global__ void __launch_bounds__(THREADS, SCORE_CTAS) qsa_score_rows_tc(
    const __grid_constant__ ScoreRowsParams p) {
    extern __shared__ __align__(1024) unsigned char staged[];  // [QUERY_BYTES]
    __shared__ ScoreWork work;
    __shared__ int position;
    __shared__ volatile int rows;
    __shared__ float* volatile out;  // of the tile; read again, not kept while products need all registers
    const int tiles = (p.rows + ROW_TILE - 1) / ROW_TILE;
    const int b = blockIdx.x / tiles, row = blockIdx.x % tiles * ROW_TILE, in_range = min(ROW_TILE, p.rows - row);
    const int64_t base = static_cast<int64_t>(b) * p.rows + row;
    if (threadIdx.x == 0) {
        const Sequence sequence = sequence_of(p.live, p.past, b, p.seq_len);
        const int real = min(in_range, sequence.live - p.row_begin - row);
        out = p.scores + base * p.stride;
        position = sequence.past + p.row_begin + row;
        rows = real;
        work = {0, real > 0 ? visible_blocks(position + real - 1) : 0,
                p.page_table + (static_cast<int64_t>(b) * 2 + 1) * p.pages_per_seq, 0};
    }
    __syncthreads();
    if (work.end > 0) {
        stage_queries(p.queries + base * IH * ID, rows, staged);
        __syncthreads();
        score_blocks(staged, work, p.pool, [&](const Sums& sums, int first, int first_row) {
            const int thread = thread_now(), g = thread / 4 % 8, t = thread % 4;
#pragma unroll
            for (int i = 0; i < SUM_ROWS; ++i) {
                const int r = first_row + row_of(i, t);
                if (r >= rows) continue;
                float* to = out + r * p.stride + first + g;
#pragma unroll
                for (int j = 0; j < SUM_KEYS; ++j) to[8 * j] = divide_by_sqrt(sums[i][j]);
            }
        });
    }
    __syncthreads();
    for (int r = 0; r < in_range; ++r) {
        const int visible = r < rows ? visible_blocks(position + r) : 0;
        for (int block = visible + threadIdx.x; block < p.stride; block += THREADS)
            out[static_cast<int64_t>(r) * p.stride + block] = NEGATIVE_INFINITY;
    }
}

// One thread a score.
extern "C" __global__ void __launch_bounds__(THREADS) qsa_score_rows(const __grid_constant__ ScoreRowsParams p) {
    const int64_t index = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
    const int64_t row = index / p.stride;
    const int block = static_cast<int>(index % p.stride);
    if (row >= static_cast<int64_t>(p.batch) * p.rows) return;
    const int b = static_cast<int>(row / p.rows), s = p.row_begin + static_cast<int>(row % p.rows);
    const Sequence sequence = sequence_of(p.live, p.past, b, p.seq_len);
    float score = NEGATIVE_INFINITY;
    if (s < sequence.live && block < visible_blocks(sequence.past + s)) {
        const surf_t* key = block_key(p.pool, p.page_table, p.pages_per_seq, b, block);
        float sum = 0.f;
        for (int head = 0; head < IH; ++head) {
            const surf_t* query = p.queries + (row * IH + head) * ID;
            float dot = 0.f;
            for (int i = 0; i < ID; ++i) dot = fmaf(to_float(query[i]), to_float(key[i]), dot);
            sum += relu(dot);
        }
        score = divide_by_sqrt(sum);
    }
    p.scores[index] = score;
}
