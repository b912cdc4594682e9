// Stage 6a of prefill: what a tile of UNION_ROWS neighbouring sparse rows attends to, as one list of blocks, each with
// the set of rows that selected it. The attention kernel loads a block once for all its rows. A row's causal tail is a
// block like any other: the one that the row has not completed; the attention kernel cuts it at the row's position.
#include "prefill.cuh"

struct UnionParams {
    const int* lists;        // [batch, rows, BUDGET_BLOCKS], ascending
    const int* live;         // [batch]
    const int* past;         // [batch], or null: 0
    uint32_t* entries;       // [batch, tiles, UNION_CLASSES, UNION_REGION] out
    int* counts;             // [batch, tiles, UNION_COUNTS] out
    int seq_len;
    int row_begin;           // first row of the range of `lists`
    int rows;
    int tiles;               // tile i of a sequence starts at row max(first_sparse, row_begin) + i * UNION_ROWS
};

constexpr int WARPS = 4;
constexpr int WINDOW = WARPS * 32 * 2 * 32;  // blocks a pass: two words of 32 a thread
constexpr int WORDS = WINDOW / 32;

extern "C" __global__ void __launch_bounds__(WARPS * 32) qsa_union(const __grid_constant__ UnionParams p) {
    __shared__ uint32_t bits[UNION_ROWS][WORDS];
    __shared__ int warp_totals[WARPS][UNION_CLASSES];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int b = blockIdx.x / p.tiles, tile = blockIdx.x % p.tiles;
    const Sequence sequence = sequence_of(p.live, p.past, b, p.seq_len);
    const int start = max(sequence.first_sparse, p.row_begin) + tile * UNION_ROWS;
    const int end = min(min(start + UNION_ROWS, sequence.live), p.row_begin + p.rows);
    uint32_t* out = p.entries + static_cast<int64_t>(blockIdx.x) * (UNION_CLASSES * UNION_REGION);
    int totals[UNION_CLASSES] = {};
    int cursor[(UNION_ROWS + WARPS - 1) / WARPS] = {};  // of the rows of this warp
    const int last_block = end > start ? (sequence.past + end - 1) / R : -1;
    for (int window = 0; window <= last_block; window += WINDOW) {
        for (int i = threadIdx.x; i < UNION_ROWS * WORDS; i += WARPS * 32) (&bits[0][0])[i] = 0;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < (UNION_ROWS + WARPS - 1) / WARPS; ++k) {
            const int r = warp + k * WARPS, s = start + r;
            if (r >= UNION_ROWS || s >= end) continue;
            const int* list = p.lists + (static_cast<int64_t>(b) * p.rows + s - p.row_begin) * BUDGET_BLOCKS;
            while (cursor[k] < BUDGET_BLOCKS) {
                const int i = cursor[k] + lane;
                const int block = i < BUDGET_BLOCKS ? list[i] - window : WINDOW;
                if (block < WINDOW) atomicOr(&bits[r][block / 32], 1u << block % 32);
                const int inside = __popc(__ballot_sync(0xffffffffu, block < WINDOW));
                cursor[k] += inside;
                if (inside < 32) break;
            }
            const int t = sequence.past + s, tail = (t + 1) / R - window;
            if (lane == 0 && (t + 1) % R != 0 && tail >= 0 && tail < WINDOW)
                atomicOr(&bits[r][tail / 32], 1u << tail % 32);
        }
        __syncthreads();
        // this thread's two words of 32 blocks, parted by class
        uint32_t words[UNION_CLASSES][2];
        int before[UNION_CLASSES];  // entries of the window in front of this thread's
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32_t halves[2] = {};
#pragma unroll
            for (int r = 0; r < UNION_ROWS; ++r)
                halves[UNION_SPLIT && r >= UNION_ROWS / 2] |= bits[r][threadIdx.x * 2 + i];
            if constexpr (UNION_SPLIT) {
                words[0][i] = halves[0] & halves[1];
                words[1][i] = halves[0] & ~halves[1];
                words[2][i] = halves[1] & ~halves[0];
            } else {
                words[0][i] = halves[0];
            }
        }
#pragma unroll
        for (int c = 0; c < UNION_CLASSES; ++c) {
            const int own = __popc(words[c][0]) + __popc(words[c][1]);
            int prefix = own;
#pragma unroll
            for (int step = 1; step < 32; step <<= 1) {
                const int other = __shfl_up_sync(0xffffffffu, prefix, step);
                if (lane >= step) prefix += other;
            }
            if (lane == 31) warp_totals[warp][c] = prefix;
            before[c] = prefix - own;
        }
        __syncthreads();
#pragma unroll
        for (int c = 0; c < UNION_CLASSES; ++c) {
            int at = totals[c] + before[c];
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                if (w < warp) at += warp_totals[w][c];
                totals[c] += warp_totals[w][c];
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int word = threadIdx.x * 2 + i;
                for (uint32_t left = words[c][i]; left != 0; left &= left - 1) {
                    const int bit = __ffs(left) - 1;
                    uint32_t members = 0;
#pragma unroll
                    for (int r = 0; r < UNION_ROWS; ++r) members |= (bits[r][word] >> bit & 1u) << r;
                    const uint32_t block = window + word * 32 + bit;
                    out[c * UNION_REGION + at++] = block << MEMBER_BITS | members;
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int c = 0; c < UNION_CLASSES; ++c) {
        const int padding = (UNION_STEP - totals[c] % UNION_STEP) % UNION_STEP;
        if (threadIdx.x < padding) out[c * UNION_REGION + totals[c] + threadIdx.x] = 0;
        if (threadIdx.x == 0) p.counts[blockIdx.x * UNION_COUNTS + c] = totals[c];
    }
}
