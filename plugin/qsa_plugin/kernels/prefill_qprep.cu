// Stage 2 of prefill (launcher `qprep_rows`): indexer queries of a row range, RMSNorm with 1 + w and RoPE in fp32, one
// rounding. One warp a head of a row.
#include "prefill.cuh"

struct QprepRowsParams {
    const surf_t* index_qk;  // [batch, seq_len, INDEX_WIDTH]
    surf_t* out;             // [batch, rows, IH, ID]
    const float* rope;       // [positions, ROTARY]
    const surf_t* weight;    // [ID], raw w
    const int* live;         // [batch]
    const int* past;         // [batch], or null: 0
    int batch;
    int seq_len;
    int row_begin;           // first row of the range
    int rows;
    float eps;
};

constexpr int WARPS = 8;
constexpr int E = ID / 32;

extern "C" __global__ void __launch_bounds__(WARPS * 32) qsa_qprep_rows(const __grid_constant__ QprepRowsParams p) {
    __shared__ float buffer[WARPS][ROTARY];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * WARPS + warp;  // (row, head)
    const int64_t row = index / IH;
    const int head = static_cast<int>(index % IH);
    if (row >= static_cast<int64_t>(p.batch) * p.rows) return;
    const int b = static_cast<int>(row / p.rows), s = p.row_begin + static_cast<int>(row % p.rows);
    const Sequence sequence = sequence_of(p.live, p.past, b, p.seq_len);
    if (s >= sequence.live) return;
    float x[E];
    load_row(p.index_qk + (static_cast<int64_t>(b) * p.seq_len + s) * INDEX_WIDTH + head * ID, lane, x);
    warp_norm_indexer(x, p.weight, lane, p.eps);
    warp_rope(x, p.rope + static_cast<int64_t>(sequence.past + s) * ROTARY, buffer[warp], lane);
    store_row(p.out + (row * IH + head) * ID, lane, x);
}
