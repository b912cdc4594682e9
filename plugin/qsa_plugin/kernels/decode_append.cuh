// What one thread block does with the new token of its row: judges the row (live length, page ids), writes the token's
// key, value and indexer state to the pool, zeroes the split counters. One warp an item; what an item reads is on its
// way while the row is judged.
#pragma once

#include "decode.cuh"

constexpr int APPEND_WARPS = 8;
constexpr int MAIN_E = D / 32;    // elements a lane
constexpr int INDEX_E = ID / 32;

// Whether every page of the first `length` tokens exists. Called by the whole block.
__device__ __forceinline__ bool pages_exist(const DecodeParams& p, int row, int length) {
    const int pages = (length + PAGE - 1) / PAGE;
    const int* k_pages = p.page_table + static_cast<int64_t>(row) * 2 * p.pages_per_seq;
    const int* v_pages = k_pages + p.pages_per_seq;
    bool good = true;
#pragma unroll 4
    for (int i = threadIdx.x; i < pages; i += APPEND_WARPS * 32) {
        const int k = k_pages[i], v = v_pages[i];
        good = good && k >= 0 && k < p.num_pages && v >= p.num_pages && v - p.num_pages < p.num_pages;
    }
    return __syncthreads_and(good);
}

// The block key of the block that token `position` completes, from the raw keys of its other tokens in the pool.
// x: the token's own raw key. Lane l of the warp gets elements [l*INDEX_E, +INDEX_E), not yet rounded.
__device__ __forceinline__ void complete_block_key(const DecodeParams& p, int k_page, int position,
                                                   const float (&x)[INDEX_E], float (&key)[INDEX_E], float* buffer) {
    const int lane = threadIdx.x % 32, first = position - (R - 1);  // same page: a block never crosses one
    float earlier[R - 1][INDEX_E];
    Rope<INDEX_E> rope;
    float weight[INDEX_E];
#pragma unroll
    for (int r = 0; r < R - 1; ++r)
        load_row(p.pool + pool_offset(k_page, first % PAGE + r, 0) + D, lane, earlier[r]);
    load_rope(rope, p.cos_sin + static_cast<int64_t>(first) * ROTARY, lane);
    load_row(p.ik_weight, lane, weight);
#pragma unroll
    for (int e = 0; e < INDEX_E; ++e) {
        float sum = earlier[0][e];  // in token order
#pragma unroll
        for (int r = 1; r < R - 1; ++r) sum = __fadd_rn(sum, earlier[r][e]);
        key[e] = h(__fadd_rn(sum, x[e]) * (1.f / R));  // R is a power of two: exact
    }
    warp_norm_indexer(key, weight, p.eps);
    warp_rope(key, rope, buffer, lane);
}

// The raw indexer key of an open block, or the block key of the block that this token completes.
__device__ __forceinline__ void write_index_state(const DecodeParams& p, int position, const Pages& pages,
                                                  const float (&x)[INDEX_E], float* buffer) {
    const int lane = threadIdx.x % 32;
    if (position % R != R - 1) {
        store_row(p.pool + pool_offset(pages.k, position % PAGE, 0) + D, lane, x);
        return;
    }
    float key[INDEX_E];
    complete_block_key(p, pages.k, position, x, key, buffer);
    store_row(p.pool + pool_offset(pages.v, (position - (R - 1)) % PAGE, 0) + D, lane, key);
}

// Called by a whole block of APPEND_WARPS warps. buffer: ROTARY floats of this warp.
__device__ __forceinline__ void append_token(const DecodeParams& p, int row, int length, float* buffer) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < HKV; i += APPEND_WARPS * 32) p.counters[row * HKV + i] = 0;
    if (length == 0) {
        if (threadIdx.x == 0) p.live[row] = 0;
        return;
    }
    const int position = length - 1;
    const Pages pages = pages_in_range(p, row, position / PAGE);
    const surf_t* keys = p.qkv + static_cast<int64_t>(row) * QKV_WIDTH + HQ * D;
    float index_key[INDEX_E];
    load_row(p.index_qk + static_cast<int64_t>(row) * INDEX_WIDTH + IH * ID, lane, index_key);
    Rope<MAIN_E> rope;
    load_rope(rope, p.cos_sin + static_cast<int64_t>(position) * ROTARY, lane);
    float gamma[MAIN_E];
    load_row(p.k_gamma, lane, gamma);

    const bool live = pages_exist(p, row, length);
    if (threadIdx.x == 0) p.live[row] = live ? length : 0;
    if (!live) return;
    for (int item = warp; item < 2 * HKV + 1; item += APPEND_WARPS) {
        if (item == 0) {  // first: it has the longest chain
            write_index_state(p, position, pages, index_key, buffer);
            continue;
        }
        const int head = (item - 1) % HKV;
        float x[MAIN_E];
        if (item <= HKV) {
            load_row(keys + head * D, lane, x);
            warp_norm_main(x, gamma, p.eps);
            warp_rope(x, rope, buffer, lane);
            store_row(p.pool + pool_offset(pages.k, position % PAGE, head), lane, x);
        } else {
            load_row(keys + (HKV + head) * D, lane, x);
            store_row(p.pool + pool_offset(pages.v, position % PAGE, head), lane, x);
        }
    }
}
