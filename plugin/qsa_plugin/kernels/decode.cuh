// What the decode kernels share: their one parameter, and a row's live length.
#pragma once

#include "common.cuh"

constexpr int SCORE_TILE = 16;  // blocks that one warp scores at a time; the group of one entry of `maxima`

// The layout is that of LAYOUT in decode_plan.py: pointers, then 4-byte fields.
struct DecodeParams {
    const surf_t* qkv;         // [B, 1, QKV_WIDTH]
    const surf_t* index_qk;    // [B, 1, INDEX_WIDTH]
    surf_t* pool;              // [2, N, PAGE, HKV, POOL_WIDTH]
    const int* lengths;        // [B], total, the new token included
    const float* cos_sin;      // [max_positions, ROTARY]
    const int* page_table;     // [B, 2, M]
    const surf_t* q_gamma;     // [D]
    const surf_t* k_gamma;     // [D]
    const surf_t* iq_weight;   // [ID]
    const surf_t* ik_weight;   // [ID]
    surf_t* output;            // [B, 1, HQ, D]
    const surf_t* queries;     // [B, IH, ID], normed and roped: of the scoring stage alone, not of the chain
    int* live;                 // [B], the length, or 0 where the row must do nothing
    uint32_t* scores;          // [B, score_stride]: sort keys; fp32 scores of the scoring stage alone
    uint32_t* maxima;          // [B, maxima_stride()]: the largest of each SCORE_TILE keys
    int* blocks;               // [B, BUDGET_BLOCKS + 1]: ids of the listed blocks, ascending, the tail last
    float* partials;           // [B * HKV * splits, 16, D]
    float* stats;              // [B * HKV * splits, 2, 16]: row maximum (base 2), row sum
    int* counters;             // [B * HKV]
    int pages_per_seq;         // M
    int num_pages;             // N
    int max_positions;
    int score_stride;          // scores a row, a multiple of 4
    int score_ctas;            // blocks of decode_score a row that score
    int splits;
    float eps;
    float scale;               // attention scale
};

__device__ __forceinline__ int maxima_stride(const DecodeParams& p) {
    return (p.score_stride + 4 * SCORE_TILE - 1) / (4 * SCORE_TILE) * 4;
}

__device__ __forceinline__ int complete_blocks(int length) { return length / R; }

// Blocks that attention reads: the selected ones, and the tail if it is not empty.
__device__ __forceinline__ int listed_blocks(int length) {
    return min(complete_blocks(length), BUDGET_BLOCKS) + (length % R != 0);
}

// Tokens that attention reads; token i is token i % R of listed block i / R, because only the last block may be short.
__device__ __forceinline__ int listed_tokens(int length) {
    return min(complete_blocks(length), BUDGET_BLOCKS) * R + length % R;
}

// A row's length as the host gave it, or 0 where no pool could hold it. An input of the enqueue. `live` says in addition
// whether the pages exist.
__device__ __forceinline__ int length_in_reach(const DecodeParams& p, int row) {
    const int length = p.lengths[row];
    const int64_t reach = min(static_cast<int64_t>(p.pages_per_seq) * PAGE, static_cast<int64_t>(p.max_positions));
    return length > 0 && length <= reach ? length : 0;
}

// Page ids of a token's page slot, in range whatever the table holds: they may be read before the row is judged.
struct Pages {
    int k, v;
};
__device__ __forceinline__ Pages pages_in_range(const DecodeParams& p, int row, int slot) {
    const int* k_pages = p.page_table + static_cast<int64_t>(row) * 2 * p.pages_per_seq + slot;
    const unsigned last = p.num_pages - 1, k = __ldg(k_pages), v = __ldg(k_pages + p.pages_per_seq);
    return {static_cast<int>(min(k, last)), static_cast<int>(min(v - p.num_pages, last)) + p.num_pages};
}
