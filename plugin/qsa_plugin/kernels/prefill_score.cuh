// Stage 4 of prefill: scores of ROW_TILE neighbouring rows against the blocks that the last of them sees, on tensor
// cores. Bit for bit what decode computes: the products of score_mma in its order, the head sum of score_of_quad.
//
// Two forms with one interface: mma.sync below, warpgroup products in prefill_score_hopper.cuh (QSA_SCORE_HOPPER 1).
// stage_queries puts a tile's queries into shared memory, score_blocks computes. All SCORE_THREADS threads call both,
// with a barrier between. score_blocks hands what it has summed over heads to its caller, a warp's share at a time, as
// sums[i][j]: row row_of(i), block first + g + 8 j.
#pragma once

#include "prefill.cuh"

constexpr int PIECES = ID / 32;  // 16-byte pieces of a vector in a lane

// score_key of a head sum's score; sums are not negative.
__device__ __forceinline__ uint32_t key_of_sum(float sum) {
    const float score = divide_by_sqrt(sum);
    return score >= 0.f ? __float_as_uint(score) | 0x80000000u : 0u;  // NaN
}

// relu that lets NaN pass
__device__ __forceinline__ float relu(float x) {
    asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(x));
    return x;
}

__device__ __forceinline__ const surf_t* block_key(
    const surf_t* pool, const int* page_table, int pages_per_seq, int b, int block) {
    const int token = block * R;
    return pool + pool_offset(page_of(page_table, pages_per_seq, b, 1, token), token % PAGE, 0) + D;
}

// What score_blocks computes, in shared memory: it is read where it is needed, for the products need all registers.
struct ScoreWork {
    int begin;  // blocks [begin, end)
    int end;
    const int* v_pages;  // of the sequence, [pages_per_seq]
    uint32_t apart;      // 0, or what is scored is a sample: place i is block i * apart / 2^16
};

// The key of a place; of one past the end, that of the last one.
__device__ __forceinline__ const surf_t* key_of_place(const surf_t* pool, const volatile ScoreWork& work, int place) {
    place = min(place, work.end - 1);
    const uint32_t apart = work.apart;
    const int block = apart == 0 ? place : static_cast<int>(__umulhi(static_cast<uint32_t>(place) << 16, apart));
    return pool + pool_offset(work.v_pages[block * R / PAGE], block * R % PAGE, 0) + D;
}

// threadIdx.x, read again: what is derived from it is not kept while products need all registers.
__device__ __forceinline__ int thread_now() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// The row of sums[i], counted from the first row, in lane 4 g + t.
__device__ __forceinline__ int row_of(int i, int t) { return i / 2 * 8 + 2 * t + i % 2; }

#if QSA_SCORE_HOPPER
#include "prefill_score_hopper.cuh"
#else

constexpr int ROW_TILE = 16;
constexpr int BLOCK_TILE = 32;  // block keys that a warp scores at a time: two left operands of score_mma
constexpr int SCORE_THREADS = 192;
constexpr int SCORE_CTAS = IH > 4 ? 1 : 2;  // an SM: without spills
// Elements from one row of queries to the next in shared memory: neighbours start half of all banks apart.
constexpr int QUERY_STRIDE = IH * ID + (IH * ID % 64 == 0 ? 32 : 0);
constexpr int QUERY_BYTES = ROW_TILE * QUERY_STRIDE * sizeof(surf_t);
constexpr int SUM_ROWS = 2, SUM_KEYS = 4;
typedef float Sums[SUM_ROWS][SUM_KEYS];

// Left operands of BLOCK_TILE keys, as score_mma makes them, made once: [16 keys][piece][two products].
typedef uint32_t KeyOperands[2][PIECES][2][4];

// relu(dot) of a head for BLOCK_TILE keys and 8 rows. query: this lane's first piece.
__device__ __forceinline__ void score_head(float (&dot)[2][4], const KeyOperands& keys, const surf_t* query) {
#pragma unroll
    for (int i = 0; i < 8; ++i) dot[i / 4][i % 4] = 0.f;
#pragma unroll
    for (int j = 0; j < PIECES; ++j) {
        const uint4 piece = *reinterpret_cast<const uint4*>(query + 32 * j);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            mma_16816(dot[half], keys[half][j][0], piece.x, piece.y);
            mma_16816(dot[half], keys[half][j][1], piece.z, piece.w);
        }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) dot[i / 4][i % 4] = relu(dot[i / 4][i % 4]);
}

// Sum of heads FIRST to FIRST + COUNT - 1 as score_of_quad forms it: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), where
// heads that do not exist add nothing. COUNT: 2, 4 or 8.
template <int FIRST, int COUNT>
__device__ __forceinline__ void score_heads(float (&sum)[2][4], const KeyOperands& keys, const surf_t* query) {
    if constexpr (COUNT == 1) {
        score_head(sum, keys, query + FIRST * ID);
    } else {
        score_heads<FIRST, COUNT / 2>(sum, keys, query);
        if constexpr (FIRST + COUNT / 2 < IH) {
            float other[2][4];
            score_heads<FIRST + COUNT / 2, COUNT / 2>(other, keys, query);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[i / 4][i % 4] += other[i / 4][i % 4];
        }
    }
}

// queries: [rows, IH, ID] from the tile's first row on, rows <= ROW_TILE; a short tile repeats its last row.
__device__ __forceinline__ void stage_queries(const surf_t* queries, int rows, unsigned char* staged) {
    constexpr int CHUNKS = IH * ID / 8;
    for (int i = threadIdx.x; i < ROW_TILE * CHUNKS; i += SCORE_THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        reinterpret_cast<uint4*>(staged)[row * (QUERY_STRIDE / 8) + chunk] =
            *reinterpret_cast<const uint4*>(queries + static_cast<int64_t>(min(row, rows - 1)) * (IH * ID) + chunk * 8);
    }
}

// Head sums of a piece of work: take(sums, first block, first row). The number of blocks is rounded up to BLOCK_TILE;
// what lies there is garbage, and so is what lies past the last row.
template <class Take>
__device__ __forceinline__ void score_blocks(
    const unsigned char* staged, const volatile ScoreWork& work, const surf_t* pool, const Take& take) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    // 0, unknown to the compiler: it would move every register of a key to its place again for every product
    const uint32_t zero = static_cast<uint32_t>(work.begin) >> 31;
#pragma unroll 1
    for (int first = work.begin + warp * BLOCK_TILE; first < work.end; first += SCORE_THREADS / 32 * BLOCK_TILE) {
        KeyOperands keys;
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // this lane's pieces of block first + g + 8 i
            const surf_t* from = key_of_place(pool, work, first + g + 8 * i) + 8 * t;
#pragma unroll
            for (int j = 0; j < PIECES; ++j) {
                const uint4 piece = *reinterpret_cast<const uint4*>(from + 32 * j);
                keys[i / 2][j][0][i % 2] = piece.x | zero;
                keys[i / 2][j][0][i % 2 + 2] = piece.y | zero;
                keys[i / 2][j][1][i % 2] = piece.z | zero;
                keys[i / 2][j][1][i % 2 + 2] = piece.w | zero;
            }
        }
#pragma unroll 1  // both at once would not fit the registers
        for (int n = 0; n < ROW_TILE; n += 8) {
            float sum[2][4];
            score_heads<0, 8>(sum, keys, reinterpret_cast<const surf_t*>(staged) + (n + g) * QUERY_STRIDE + 8 * t);
            const Sums sums = {{sum[0][0], sum[0][2], sum[1][0], sum[1][2]},
                               {sum[0][1], sum[0][3], sum[1][1], sum[1][3]}};
            take(sums, first, n);
        }
    }
}
#endif
