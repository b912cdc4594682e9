// Stage 4 of prefill: scores of ROW_TILE neighbouring rows against all blocks that the last of them sees, on tensor cores.
#pragma once

#include "prefill.cuh"

constexpr int ROW_TILE = 16;
constexpr int BLOCK_TILE = 16;  // block keys that an mma takes
constexpr int PIECES = ID / 32;  // 16-byte pieces of a vector in a lane
constexpr float SQRT_ID = ID == 128 ? 11.3137085f : ID == 64 ? 8.f : 5.65685425f;  // fp32 square root of ID
// Rows whose queries a warp holds in registers at once: IH * ID * rows / 64 registers, at most 128.
constexpr int HELD_ROWS = IH * ID <= 512 ? 16 : 8;

// relu that lets NaN pass
__device__ __forceinline__ float relu(float x) { return x < 0.f ? 0.f : x; }

// Four heads of the head sum, as score_of_quad adds them; heads that do not exist add nothing.
template <int HEADS>
__device__ __forceinline__ float sum_of_heads(const float (&dot)[HEADS][4], int i) {
    float x[4];
#pragma unroll
    for (int head = 0; head < 4; ++head) x[head] = head < HEADS ? relu(dot[head < HEADS ? head : 0][i]) : 0.f;
    return (x[0] + x[1]) + (x[2] + x[3]);
}

// Adds the dots of heads [FIRST, FIRST + 4) of a block tile with 8 rows to `sum`.
template <int FIRST>
__device__ __forceinline__ void score_heads(
    float (&sum)[4], const uint4 (&key)[2][PIECES], const uint4 (&query)[IH][PIECES]) {
    constexpr int HEADS = IH - FIRST < 4 ? IH - FIRST : 4;
    float dot[HEADS][4] = {};
#pragma unroll
    for (int j = 0; j < PIECES; ++j)
#pragma unroll
        for (int head = 0; head < HEADS; ++head) score_mma(dot[head], key[0][j], key[1][j], query[FIRST + head][j]);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += sum_of_heads(dot, i);
}

__device__ __forceinline__ const surf_t* block_key(
    const surf_t* pool, const int* page_table, int pages_per_seq, int b, int block) {
    const int token = block * R;
    return pool + pool_offset(page_of(page_table, pages_per_seq, b, 1, token), token % PAGE, 0) + D;
}

// All threads of the CTA; `warps` of them share the blocks out, BLOCK_TILE at a time.
// queries: [rows, IH, ID] from the tile's first row on, rows <= ROW_TILE; a short tile computes its last row again and
// stores the same bits once more. scores: [rows, stride], stride >= blocks rounded up to BLOCK_TILE; columns at or past
// `blocks` get garbage.
__device__ __forceinline__ void score_tile(
    const surf_t* queries, int rows, const surf_t* pool, const int* page_table, int pages_per_seq, int b, int blocks,
    float* scores, int64_t stride, int warp, int warps, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (int held = 0; held < ROW_TILE; held += HELD_ROWS) {
        uint4 query[HELD_ROWS / 8][IH][PIECES];
#pragma unroll
        for (int n = 0; n < HELD_ROWS / 8; ++n) {
            const surf_t* row = queries + static_cast<int64_t>(min(held + n * 8 + g, rows - 1)) * (IH * ID) + 8 * t;
#pragma unroll
            for (int head = 0; head < IH; ++head)
#pragma unroll
                for (int j = 0; j < PIECES; ++j)
                    query[n][head][j] = *reinterpret_cast<const uint4*>(row + head * ID + 32 * j);
        }
        uint4 next[2][PIECES];  // keys of rows g and g + 8 of the next block tile: in flight while this one is computed
        auto fetch = [&](int first) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int block = min(first + half * 8 + g, blocks - 1);
                const surf_t* key = block_key(pool, page_table, pages_per_seq, b, block) + 8 * t;
#pragma unroll
                for (int j = 0; j < PIECES; ++j) next[half][j] = *reinterpret_cast<const uint4*>(key + 32 * j);
            }
        };
        int first = warp * BLOCK_TILE;
        if (first < blocks) fetch(first);
#pragma unroll 1
        for (; first < blocks; first += warps * BLOCK_TILE) {
            uint4 key[2][PIECES];
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int j = 0; j < PIECES; ++j) key[half][j] = next[half][j];
            if (first + warps * BLOCK_TILE < blocks) fetch(first + warps * BLOCK_TILE);
#pragma unroll
            for (int n = 0; n < HELD_ROWS / 8; ++n) {
                float sum[4] = {};
                score_heads<0>(sum, key, query[n]);
                if constexpr (IH > 4) score_heads<4>(sum, key, query[n]);
                const int row = held + n * 8 + 2 * t;
                float* even = scores + min(row, rows - 1) * stride + first + g;
                float* odd = scores + min(row + 1, rows - 1) * stride + first + g;
                even[0] = __fdiv_rn(sum[0], SQRT_ID);
                odd[0] = __fdiv_rn(sum[1], SQRT_ID);
                even[8] = __fdiv_rn(sum[2], SQRT_ID);
                odd[8] = __fdiv_rn(sum[3], SQRT_ID);
            }
        }
    }
}
