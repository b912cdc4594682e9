// What the decode kernels share: their one parameter, and a row's live length.
#pragma once

#include "common.cuh"

// One selected block (or the causal tail), page ids resolved: what attention needs to know of it.
struct Block {
    int token;   // first token
    int k_page;  // in [0, N)
    int v_page;  // in [N, 2N)
    int unused;  // keeps the record at 16 bytes, one load
};

// The layout is that of decode.LAYOUT in Python: pointers, then 4-byte fields.
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
    surf_t* q;                 // [B, HQ, D], normed and roped
    surf_t* index_q;           // [B, IH, ID], normed and roped
    int* live;                 // [B], the length, or 0 where the row must do nothing
    float* scores;             // [B, score_stride]
    Block* blocks;             // [B, BUDGET_BLOCKS + 1], ascending, the tail last
    float* partials;           // [B * HKV * splits, 16, D]
    float* stats;              // [B * HKV * splits, 2, 16]: row maximum (base 2), row sum
    int* counters;             // [B * HKV]
    int batch;
    int pages_per_seq;         // M
    int num_pages;             // N
    int max_positions;
    int score_stride;          // scores a row, a multiple of 4
    int score_ctas;            // blocks of decode_score a row
    int splits;
    float eps;
    float scale;               // attention scale
};

__device__ __forceinline__ int complete_blocks(int length) { return length / R; }

// Blocks that attention reads: the selected ones, and the tail if it is not empty.
__device__ __forceinline__ int listed_blocks(int length) {
    return min(complete_blocks(length), BUDGET_BLOCKS) + (length % R != 0);
}

// Tokens that attention reads; token i is blocks[i / R].token + i % R, because only the last block may be short.
__device__ __forceinline__ int listed_tokens(int length) {
    return min(complete_blocks(length), BUDGET_BLOCKS) * R + length % R;
}

// A row's length as the host gave it, or 0 where no pool could hold it. An input of the enqueue: kernels may read it
// before they wait for the kernel in front. `live` says in addition whether the pages exist.
__device__ __forceinline__ int length_in_reach(const DecodeParams& p, int row) {
    const int length = p.lengths[row];
    const int64_t reach = min(static_cast<int64_t>(p.pages_per_seq) * PAGE, static_cast<int64_t>(p.max_positions));
    return length > 0 && length <= reach ? length : 0;
}
