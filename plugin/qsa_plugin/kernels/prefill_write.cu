// Stage 1 of prefill: RMSNorm and RoPE of main queries and keys, and the paged write of keys and values.
// One warp a head of a token. Query heads of padding rows become zeros: that is their final output, because the
// attention kernel reads its queries where it will store its result, and skips padding.
#include "prefill.cuh"

struct WriteParams {
    const surf_t* qkv;       // [batch, seq_len, QKV_WIDTH]
    surf_t* pool;            // [2*N, PAGE, HKV, POOL_WIDTH]
    surf_t* q_out;           // [batch, seq_len, HQ, D]
    const int* page_table;   // [batch, 2, pages_per_seq]
    const float* rope;       // [positions, ROTARY]
    const surf_t* q_gamma;   // [D]
    const surf_t* k_gamma;   // [D]
    const int* live;         // [batch]
    const int* past;         // [batch], or null: 0
    int batch;
    int seq_len;
    int pages_per_seq;
    float eps;
};

constexpr int WARPS = 8;
constexpr int E = D / 32;
constexpr int HEADS = HQ + 2 * HKV;

extern "C" __global__ void __launch_bounds__(WARPS * 32) qsa_prefill_write(const __grid_constant__ WriteParams p) {
    __shared__ float buffer[WARPS][ROTARY];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * WARPS + warp;  // (token, head)
    const int64_t token = index / HEADS;
    const int head = static_cast<int>(index % HEADS);
    if (token >= static_cast<int64_t>(p.batch) * p.seq_len) return;
    const int b = static_cast<int>(token / p.seq_len), s = static_cast<int>(token % p.seq_len);
    const Sequence sequence = sequence_of(p.live, p.past, b, p.seq_len);
    const bool is_query = head < HQ, is_value = head >= HQ + HKV;
    surf_t* q_row = p.q_out + (token * HQ + head) * D;
    float x[E];
    if (s >= sequence.live) {
        if (!is_query) return;
#pragma unroll
        for (int e = 0; e < E; ++e) x[e] = 0.f;
        store_row(q_row, lane, x);
        return;
    }
    const int t = sequence.past + s;
    load_row(p.qkv + token * QKV_WIDTH + head * D, lane, x);
    if (!is_value) {
        warp_norm_main(x, is_query ? p.q_gamma : p.k_gamma, lane, p.eps);
        warp_rope(x, p.rope + static_cast<int64_t>(t) * ROTARY, buffer[warp], lane);
    }
    if (is_query) {
        store_row(q_row, lane, x);
        return;
    }
    const int kv_head = is_value ? head - HQ - HKV : head - HQ;
    const int page = page_of(p.page_table, p.pages_per_seq, b, is_value, t);
    store_row(p.pool + pool_offset(page, t % PAGE, kv_head), lane, x);
}
