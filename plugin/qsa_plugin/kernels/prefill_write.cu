// Stage 1 of prefill: RMSNorm and RoPE of main queries and keys, and the paged write of keys and values.
// One CTA a token, its heads dealt to the warps; a warp loads AT_ONCE heads before it computes the first. Query heads
// of padding rows become zeros: that is their final output, for the attention kernel reads its queries where it will
// store its result, and skips padding.
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

constexpr int WARPS = 7;    // 24 + 2 + 2 heads: four a warp
constexpr int CTAS = ROTARY > 64 ? 3 : 4;  // an SM, without spills
constexpr int AT_ONCE = 4;
constexpr int E = D / 32;
constexpr int HEADS = HQ + 2 * HKV;

struct alignas(E * sizeof(surf_t)) Piece {  // a lane's elements of a head
    surf_t x[E];
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, CTAS) qsa_prefill_write(
    const __grid_constant__ WriteParams p) {
    __shared__ float buffer[WARPS][ROTARY];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t token = blockIdx.x;
    const surf_t* row = p.qkv + token * QKV_WIDTH;
    // the first heads are under way before anything is known of the token; those of padding rows are not looked at
    Piece pieces[AT_ONCE];
    auto load = [&](int first) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (first + i * WARPS < HEADS)
                pieces[i] = *reinterpret_cast<const Piece*>(row + (first + i * WARPS) * D + lane * E);
    };
    load(warp);
    const int b = blockIdx.x / p.seq_len, s = blockIdx.x % p.seq_len;
    const Sequence sequence = sequence_of(p.live, p.past, b, p.seq_len);
    surf_t* queries = p.q_out + token * HQ * D;
    if (s >= sequence.live) {
        const float zeros[E] = {};
        for (int head = warp; head < HQ; head += WARPS) store_row(queries + head * D, lane, zeros);
        return;
    }
    const int t = sequence.past + s;
    Rope<E> rope;
    load_rope(rope, p.rope + static_cast<int64_t>(t) * ROTARY, lane);
    surf_t* kv_rows[2];  // of KV head 0, in both planes
#pragma unroll
    for (int plane = 0; plane < 2; ++plane)
        kv_rows[plane] =
            p.pool + pool_offset(page_of(p.page_table, p.pages_per_seq, b, plane, t), t % PAGE, 0);
#pragma unroll 1
    for (int first = warp; first < HEADS; first += WARPS * AT_ONCE) {
        if (first != warp) load(first);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int head = first + i * WARPS;
            if (head >= HEADS) break;
            float x[E];
#pragma unroll
            for (int e = 0; e < E; ++e) x[e] = to_float(pieces[i].x[e]);
            if (head < HQ + HKV) {
                warp_norm_main(x, head < HQ ? p.q_gamma : p.k_gamma, lane, p.eps);
                warp_rope(x, rope, buffer[warp], lane);
            }
            surf_t* out = head < HQ         ? queries + head * D
                          : head < HQ + HKV ? kv_rows[0] + (head - HQ) * POOL_WIDTH
                                            : kv_rows[1] + (head - HQ - HKV) * POOL_WIDTH;
            store_row(out, lane, x);
        }
    }
}
