// Decode, kernel 1: everything that depends on the new token alone.
//   block part 0 of a row: judges the row (live length, page ids), writes the token's key, value and indexer state to
//     the pool, zeroes the split counters;
//   the other parts: norm and RoPE of the query heads and the indexer query heads into the workspace.
// One warp a head.
#include "decode.cuh"

constexpr int WARPS = 8;
constexpr int PARTS = 1 + (HQ + IH + WARPS - 1) / WARPS;
constexpr int MAIN_E = D / 32;    // elements a lane
constexpr int INDEX_E = ID / 32;

// Whether every page of the first `length` tokens exists. Called by the whole block.
__device__ bool pages_exist(const DecodeParams& p, int row, int length) {
    const int pages = (length + PAGE - 1) / PAGE;
    const int* k_pages = p.page_table + static_cast<int64_t>(row) * 2 * p.pages_per_seq;
    const int* v_pages = k_pages + p.pages_per_seq;
    bool good = true;
#pragma unroll 4
    for (int i = threadIdx.x; i < pages; i += WARPS * 32) {
        const int k = k_pages[i], v = v_pages[i];
        good = good && k >= 0 && k < p.num_pages && v >= p.num_pages && v - p.num_pages < p.num_pages;
    }
    return __syncthreads_and(good);
}

// The raw indexer key of an open block, or the block key of the block that this token completes.
__device__ void write_index_state(const DecodeParams& p, int row, int position, int k_page, int v_page, float* buffer) {
    const int lane = threadIdx.x % 32;
    float x[INDEX_E];
    load_row(p.index_qk + static_cast<int64_t>(row) * INDEX_WIDTH + IH * ID, lane, x);
    if (position % R != R - 1) {
        store_row(p.pool + pool_offset(k_page, position % PAGE, 0) + D, lane, x);
        return;
    }
    const int first = position - (R - 1);  // same page: a block never crosses one
    float earlier[R - 1][INDEX_E];
#pragma unroll
    for (int r = 0; r < R - 1; ++r)
        load_row(p.pool + pool_offset(k_page, first % PAGE + r, 0) + D, lane, earlier[r]);
    float mean[INDEX_E];
#pragma unroll
    for (int e = 0; e < INDEX_E; ++e) {
        float sum = earlier[0][e];  // in token order
#pragma unroll
        for (int r = 1; r < R - 1; ++r) sum = __fadd_rn(sum, earlier[r][e]);
        mean[e] = h(__fadd_rn(sum, x[e]) * (1.f / R));  // R is a power of two: exact
    }
    warp_norm_indexer(mean, p.ik_weight, lane, p.eps);
    warp_rope(mean, p.cos_sin + static_cast<int64_t>(first) * ROTARY, buffer, lane);
    store_row(p.pool + pool_offset(v_page, first % PAGE, 0) + D, lane, mean);
}

__device__ void write_token(const DecodeParams& p, int row, int length, float* buffer) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int position = length - 1;
    const int* pages = p.page_table + static_cast<int64_t>(row) * 2 * p.pages_per_seq + position / PAGE;
    const int k_page = pages[0], v_page = pages[p.pages_per_seq];
    const surf_t* keys = p.qkv + static_cast<int64_t>(row) * QKV_WIDTH + HQ * D;
    for (int item = warp; item < 2 * HKV + 1; item += WARPS) {
        if (item == 0) {  // first: it has the longest chain
            write_index_state(p, row, position, k_page, v_page, buffer);
            continue;
        }
        const int head = (item - 1) % HKV;
        float x[MAIN_E];
        if (item <= HKV) {
            load_row(keys + head * D, lane, x);
            warp_norm_main(x, p.k_gamma, lane, p.eps);
            warp_rope(x, p.cos_sin + static_cast<int64_t>(position) * ROTARY, buffer, lane);
            store_row(p.pool + pool_offset(k_page, position % PAGE, head), lane, x);
        } else {
            load_row(keys + (HKV + head) * D, lane, x);
            store_row(p.pool + pool_offset(v_page, position % PAGE, head), lane, x);
        }
    }
}

__device__ void prepare_query(const DecodeParams& p, int row, int length, int head, float* buffer) {
    const int lane = threadIdx.x % 32;
    const float* cos_sin = p.cos_sin + static_cast<int64_t>(length - 1) * ROTARY;
    if (head < HQ) {
        float x[MAIN_E];
        load_row(p.qkv + static_cast<int64_t>(row) * QKV_WIDTH + head * D, lane, x);
        warp_norm_main(x, p.q_gamma, lane, p.eps);
        warp_rope(x, cos_sin, buffer, lane);
        store_row(p.q + (static_cast<int64_t>(row) * HQ + head) * D, lane, x);
    } else if (head < HQ + IH) {
        float x[INDEX_E];
        load_row(p.index_qk + static_cast<int64_t>(row) * INDEX_WIDTH + (head - HQ) * ID, lane, x);
        warp_norm_indexer(x, p.iq_weight, lane, p.eps);
        warp_rope(x, cos_sin, buffer, lane);
        store_row(p.index_q + (static_cast<int64_t>(row) * IH + head - HQ) * ID, lane, x);
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) decode_append(const __grid_constant__ DecodeParams p) {
    __shared__ float buffers[WARPS][ROTARY];
    const int row = blockIdx.x / PARTS, part = blockIdx.x % PARTS, warp = threadIdx.x / 32;
    grid_dependency_wait();
    grid_dependency_launch();
    const int length = length_in_reach(p, row);  // the same in the whole block
    if (part == 0) {
        const bool live = length > 0 && pages_exist(p, row, length);
        if (threadIdx.x == 0) p.live[row] = live ? length : 0;
        for (int i = threadIdx.x; i < HKV; i += WARPS * 32) p.counters[row * HKV + i] = 0;
        if (live) write_token(p, row, length, buffers[warp]);
    } else if (length > 0) {
        prepare_query(p, row, length, (part - 1) * WARPS + warp, buffers[warp]);
    }
}
