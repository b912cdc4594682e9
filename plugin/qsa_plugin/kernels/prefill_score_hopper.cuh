// Scores of prefill with warpgroup products (compute capability 9.0). Left operand: 64 block keys, a warp's 16 in its
// registers as score_mma takes them. Right operand: the queries of two heads of ROW_TILE rows in shared memory, their
// elements in the order in which score_mma's products meet them, so that every product sums the same 16 elements.
#pragma once

#include "wgmma.cuh"

constexpr int ROW_TILE = 32;
constexpr int BLOCK_TILE = 64;
constexpr int SCORE_THREADS = IH > 4 ? 384 : 256;
constexpr int SCORE_CTAS = IH > 4 ? 1 : 2;  // an SM, without spills; of two one scores while the other selects
constexpr int PRODUCTS = ID / 16;  // of a dot
constexpr int PAIRS = (IH + 1) / 2;
constexpr int PAIR_BYTES = 2 * ROW_TILE * 128;
constexpr int QUERY_SLAB_BYTES = PAIRS * PAIR_BYTES;
constexpr int QUERY_BYTES = (PRODUCTS + 3) / 4 * QUERY_SLAB_BYTES;
static_assert(2 * ROW_TILE == 64, "the right operand of wgmma_rs_64");
constexpr int SUM_ROWS = 8, SUM_KEYS = 2;
typedef float Sums[SUM_ROWS][SUM_KEYS];

__device__ __forceinline__ void stage_queries(const surf_t* queries, int rows, unsigned char* staged) {
    constexpr int CHUNKS = ID / 8;
    for (int i = threadIdx.x; i < ROW_TILE * IH * CHUNKS; i += SCORE_THREADS) {
        const int row = i / (IH * CHUNKS), head = i / CHUNKS % IH, chunk = i % CHUNKS;
        const uint4 piece = *reinterpret_cast<const uint4*>(
            queries + (static_cast<int64_t>(min(row, rows - 1)) * IH + head) * ID + chunk * 8);
        const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
        const int n = head * ROW_TILE + row;  // of the right operands
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            // score_mma: of piece 4 j + t, product 2 j has the first two words, 2 j + 1 the others, at 2 t and 2 t + 8
            const int product = chunk / 4 * 2 + w / 2, to = product % 4 * 2 + w % 2;
            *reinterpret_cast<uint32_t*>(staged + product / 4 * QUERY_SLAB_BYTES + n * 128 + ((to ^ n % 8) << 4) +
                                         chunk % 4 * 4) = words[w];
        }
    }
    fence_for_wgmma();
}

// relu(dot) of heads 2 pair and 2 pair + 1 summed; one that does not exist adds nothing.
// sum[n][2 half + i]: row 8 n + 2 t + i, key g + 8 half of the warp's 16.
__device__ __forceinline__ void score_pair(
    float (&sum)[4][4], const uint32_t (&keys)[PRODUCTS][4], uint64_t queries, int pair) {
    float dots[8][4] = {};
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < PRODUCTS; ++k)
        wgmma_rs_64(dots, keys[k], queries + (pair * PAIR_BYTES + k / 4 * QUERY_SLAB_BYTES + k % 4 * 32) / 16);
    wgmma_commit();
    wgmma_wait<0>();  // other warpgroups' products fill the gap
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const float second = 2 * pair + 1 < IH ? relu(dots[4 + i / 4][i % 4]) : 0.f;
        sum[i / 4][i % 4] = relu(dots[i / 4][i % 4]) + second;
    }
}

// The head sum as score_of_quad forms it: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).
__device__ __forceinline__ void score_heads(
    float (&sum)[4][4], const uint32_t (&keys)[PRODUCTS][4], uint64_t queries) {
    float four[4][4], pair_sum[4][4];
#pragma unroll 1  // or the compiler would keep accumulators for all pairs
    for (int pair = 0; pair < PAIRS; pair += 2) {
        score_pair(four, keys, queries, pair);
        if (pair + 1 < PAIRS) {
            score_pair(pair_sum, keys, queries, pair + 1);
#pragma unroll
            for (int i = 0; i < 16; ++i) four[i / 4][i % 4] += pair_sum[i / 4][i % 4];
        }
#pragma unroll
        for (int i = 0; i < 16; ++i)
            sum[i / 4][i % 4] = pair == 0 ? four[i / 4][i % 4] : sum[i / 4][i % 4] + four[i / 4][i % 4];
    }
}

// As in prefill_score.cuh.
template <class Take>
__device__ __forceinline__ void score_blocks(
    const unsigned char* staged, const volatile ScoreWork& work, const surf_t* pool, const Take& take) {
    const int warpgroup = threadIdx.x / 128;
    const uint64_t queries = wgmma_descriptor(shared_address(staged), 0);
    uint4 pieces[2][PIECES];  // of keys g and g + 8
    auto load = [&](int first) {
        const int thread = thread_now(), warp = thread / 32 % 4, g = thread / 4 % 8, t = thread % 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const surf_t* from = key_of_place(pool, work, first + warp * 16 + g + 8 * half) + 8 * t;
#pragma unroll
            for (int j = 0; j < PIECES; ++j) pieces[half][j] = *reinterpret_cast<const uint4*>(from + 32 * j);
        }
    };
    int first = work.begin + warpgroup * BLOCK_TILE;
    if (first < work.end) load(first);
#pragma unroll 1
    for (; first < work.end; first += SCORE_THREADS / 128 * BLOCK_TILE) {
        uint32_t keys[PRODUCTS][4];
#pragma unroll
        for (int j = 0; j < PIECES; ++j) {
            const uint4 one = pieces[0][j], other = pieces[1][j];
            keys[2 * j][0] = one.x, keys[2 * j][1] = other.x, keys[2 * j][2] = one.y, keys[2 * j][3] = other.y;
            keys[2 * j + 1][0] = one.z, keys[2 * j + 1][1] = other.z;
            keys[2 * j + 1][2] = one.w, keys[2 * j + 1][3] = other.w;
        }
        float sum[4][4];
        score_heads(sum, keys, queries);
        load(first + SCORE_THREADS / 128 * BLOCK_TILE);  // on its way while this step's sums are taken
        Sums sums;
#pragma unroll
        for (int i = 0; i < 16; ++i) sums[i / 4 * 2 + i % 2][i / 2 % 2] = sum[i / 4][i % 4];
        take(sums, first + thread_now() / 32 % 4 * 16, 0);
    }
}
