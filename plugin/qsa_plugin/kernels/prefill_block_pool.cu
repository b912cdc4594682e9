// Stage 3 of prefill (launcher `block_pool`): the block key of every block that this call completes, into the V tails,
// and the raw keys of the block left open, into the K tails. One warp a block. Tokens before this call are read back
// from the K tails, where the call that brought them left them.
#include "prefill.cuh"

struct BlockPoolParams {
    const surf_t* index_qk;  // [batch, seq_len, INDEX_WIDTH]; the raw key is the last head
    surf_t* pool;            // [2*N, PAGE, HKV, POOL_WIDTH]
    const int* page_table;   // [batch, 2, pages_per_seq]
    const float* rope;       // [positions, ROTARY]
    const surf_t* weight;    // [ID], raw w
    const int* live;         // [batch]
    const int* past;         // [batch], or null: 0
    int batch;
    int seq_len;
    int pages_per_seq;
    int blocks_per_seq;      // blocks that seq_len tokens may touch: ceil(seq_len / R), plus 1 with a past
    float eps;
};

constexpr int WARPS = 8;
constexpr int E = ID / 32;

extern "C" __global__ void __launch_bounds__(WARPS * 32) qsa_block_pool(const __grid_constant__ BlockPoolParams p) {
    __shared__ float buffer[WARPS][ROTARY];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * WARPS + warp;
    const int b = static_cast<int>(index / p.blocks_per_seq);
    if (b >= p.batch) return;
    const Sequence sequence = sequence_of(p.live, p.past, b, p.seq_len);
    const int length = sequence.past + sequence.live;
    const int first = (sequence.past / R + static_cast<int>(index % p.blocks_per_seq)) * R;  // the block's first token
    if (sequence.live <= 0 || first >= length) return;

    // a block lies in one page
    const int k_page = page_of(p.page_table, p.pages_per_seq, b, 0, first);
    const surf_t* fresh = p.index_qk + static_cast<int64_t>(b) * p.seq_len * INDEX_WIDTH + IH * ID;
    auto k_tail = [&](int t) { return p.pool + pool_offset(k_page, t % PAGE, 0) + D; };
    float key[E];
    if (first + R > length) {
        for (int t = max(first, sequence.past); t < length; ++t) {
            load_row(fresh + static_cast<int64_t>(t - sequence.past) * INDEX_WIDTH, lane, key);
            store_row(k_tail(t), lane, key);
        }
        return;
    }
    float mean[E];
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const int t = first + r;
        const surf_t* fresh_key = fresh + static_cast<int64_t>(t - sequence.past) * INDEX_WIDTH;
        load_row(t < sequence.past ? k_tail(t) : fresh_key, lane, key);
#pragma unroll
        for (int e = 0; e < E; ++e) mean[e] = r == 0 ? key[e] : __fadd_rn(mean[e], key[e]);
    }
#pragma unroll
    for (int e = 0; e < E; ++e) mean[e] = h(mean[e] * (1.f / R));  // R is a power of two: exact
    warp_norm_indexer(mean, p.weight, lane, p.eps);
    warp_rope(mean, p.rope + static_cast<int64_t>(first) * ROTARY, buffer[warp], lane);
    const int v_page = page_of(p.page_table, p.pages_per_seq, b, 1, first);
    store_row(p.pool + pool_offset(v_page, first % PAGE, 0) + D, lane, mean);
}
