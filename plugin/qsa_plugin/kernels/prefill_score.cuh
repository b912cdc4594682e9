// Stage 4 of prefill: scores of ROW_TILE neighbouring rows against all blocks that the last of them sees, on tensor
// cores. Bit for bit what decode computes: the products of score_mma in its order, the head sum of score_of_quad.
#pragma once

#include "prefill.cuh"

constexpr int ROW_TILE = 16;
constexpr int BLOCK_TILE = 32;  // block keys that a warp scores at a time: two left operands of score_mma
constexpr int SCORE_THREADS = 256;
constexpr int SCORE_WARPS = SCORE_THREADS / 32;
constexpr int SCORE_CTAS = IH > 4 || (IH == 4 && ID == 128 && __CUDA_ARCH__ < 900) ? 1 : 2;  // an SM, without spills
constexpr int PIECES = ID / 32;  // 16-byte pieces of a vector in a lane
// Elements from one row of queries to the next in shared memory: neighbours start half of all banks apart.
constexpr int QUERY_STRIDE = IH * ID + (IH * ID % 64 == 0 ? 32 : 0);

constexpr float SQRT_ID = ID == 128 ? 11.3137085f : ID == 64 ? 8.f : 5.65685425f;  // fp32 square root of ID
constexpr float RSQRT_ID = 1.f / SQRT_ID;

// sum / SQRT_ID, correctly rounded as __fdiv_rn: one multiplication and one exact correction. __fdiv_rn itself takes a
// slow path for zero, the score of every block that no head likes.
__device__ __forceinline__ float divide_by_sqrt(float sum) {
    const float quotient = sum * RSQRT_ID;
    const float corrected = fmaf(fmaf(-quotient, SQRT_ID, sum), RSQRT_ID, quotient);
    return fabsf(quotient) <= 3.4e38f ? corrected : quotient;  // infinity and NaN stay
}

// relu that lets NaN pass
__device__ __forceinline__ float relu(float x) { return x < 0.f ? 0.f : x; }

// Left operands of BLOCK_TILE keys, as score_mma makes them, made once: [16 keys][piece][two products].
typedef uint32_t Keys[2][PIECES][2][4];

// relu(dot) of heads FIRST and FIRST + 1 summed, for BLOCK_TILE keys and 8 rows; heads that do not exist add nothing.
// query: this lane's first piece.
template <int FIRST>
__device__ __forceinline__ void score_pair(float (&sum)[2][4], const Keys& keys, const surf_t* query) {
    constexpr int HEADS = IH - FIRST < 2 ? IH - FIRST : 2;
    if constexpr (HEADS <= 0) {
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i / 4][i % 4] = 0.f;
    } else {
        float dot[HEADS][2][4] = {};
#pragma unroll
        for (int j = 0; j < PIECES; ++j)
#pragma unroll
            for (int head = 0; head < HEADS; ++head) {
                const uint4 piece = *reinterpret_cast<const uint4*>(query + (FIRST + head) * ID + 32 * j);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    mma_16816(dot[head][half], keys[half][j][0], piece.x, piece.y);
                    mma_16816(dot[head][half], keys[half][j][1], piece.z, piece.w);
                }
            }
#pragma unroll
        for (int i = 0; i < 8; ++i)
            sum[i / 4][i % 4] = relu(dot[0][i / 4][i % 4]) + (HEADS > 1 ? relu(dot[HEADS - 1][i / 4][i % 4]) : 0.f);
    }
}

// The head sum as score_of_quad forms it: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).
template <int FIRST>
__device__ __forceinline__ void score_four(float (&sum)[2][4], const Keys& keys, const surf_t* query) {
    float other[2][4];
    score_pair<FIRST>(sum, keys, query);
    score_pair<FIRST + 2>(other, keys, query);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i / 4][i % 4] += other[i / 4][i % 4];
}

__device__ __forceinline__ const surf_t* block_key(
    const surf_t* pool, const int* page_table, int pages_per_seq, int b, int block) {
    const int token = block * R;
    return pool + pool_offset(page_of(page_table, pages_per_seq, b, 1, token), token % PAGE, 0) + D;
}

// All SCORE_THREADS threads of a CTA.
// queries: [rows, IH, ID] from the tile's first row on, rows <= ROW_TILE; a short tile computes its last row again and
// stores the same bits once more. staged: [ROW_TILE, QUERY_STRIDE] in shared memory, free after the next barrier.
// scores: [rows, stride], stride >= blocks rounded up to BLOCK_TILE; columns at or past `blocks` get garbage.
__device__ __forceinline__ void score_tile(
    const surf_t* queries, int rows, const surf_t* pool, const int* page_table, int pages_per_seq, int b, int blocks,
    surf_t* staged, float* scores, int stride) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    constexpr int CHUNKS = IH * ID / 8;
    for (int i = threadIdx.x; i < ROW_TILE * CHUNKS; i += SCORE_THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        *reinterpret_cast<uint4*>(staged + row * QUERY_STRIDE + chunk * 8) =
            *reinterpret_cast<const uint4*>(queries + static_cast<int64_t>(min(row, rows - 1)) * (IH * ID) + chunk * 8);
    }
    __syncthreads();
    const int* pages = page_table + (static_cast<int64_t>(b) * 2 + 1) * pages_per_seq;  // of values
#pragma unroll 1
    for (int first = warp * BLOCK_TILE; first < blocks; first += SCORE_WARPS * BLOCK_TILE) {
        Keys keys;
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // this lane's pieces of block first + g + 8 i
            // 16 blocks lie in one page; those past the last one are read from it too, whatever is there
            const int start = first + i / 2 * 16;
            const int page = pages[min(start, blocks - 1) * R / PAGE];
            const surf_t* from = pool + pool_offset(page, start * R % PAGE, 0) + D + 8 * t +
                                 (g + i % 2 * 8) * (R * HKV * POOL_WIDTH);
#pragma unroll
            for (int j = 0; j < PIECES; ++j) {
                const uint4 piece = *reinterpret_cast<const uint4*>(from + 32 * j);
                keys[i / 2][j][0][i % 2] = piece.x;
                keys[i / 2][j][0][i % 2 + 2] = piece.y;
                keys[i / 2][j][1][i % 2] = piece.z;
                keys[i / 2][j][1][i % 2 + 2] = piece.w;
            }
        }
#pragma unroll 1  // both at once would not fit the registers
        for (int n = 0; n < ROW_TILE; n += 8) {
            float sum[2][4];
            const surf_t* query = staged + (n + g) * QUERY_STRIDE + 8 * t;
            score_four<0>(sum, keys, query);
            if constexpr (IH > 4) {
                float other[2][4];
                score_four<4>(other, keys, query);
#pragma unroll
                for (int i = 0; i < 8; ++i) sum[i / 4][i % 4] += other[i / 4][i % 4];
            }
            float* out = scores + (min(n + 2 * t, rows - 1) * stride + first + g);
            const int odd = n + 2 * t + 1 < rows ? stride : 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // block first + g + 8 i
                out[8 * i] = divide_by_sqrt(sum[i / 2][i % 2 * 2]);
                out[odd + 8 * i] = divide_by_sqrt(sum[i / 2][i % 2 * 2 + 1]);
            }
        }
    }
}
