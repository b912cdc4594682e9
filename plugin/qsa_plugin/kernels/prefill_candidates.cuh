// Rows of several chunks: what of them is kept between two chunks, and what a warp does with what was scored.
//
// A sample of a row's blocks comes first. It gives a bound that BUDGET_BLOCKS keys of all blocks and some more should
// reach: what reaches it is a candidate. Scores of the chunks are compared with the bound where they are made (Queue),
// and only candidates leave the registers, in no order. When their list grows long, a histogram of it gives a higher
// bound and the list is thinned out; only what cannot be selected leaves it. The threshold of the last list is as exact
// as that of a row. A bit for every block brings the selected ids in order. If the sample promised too much, the row is
// gone through once more without it.
#pragma once

#include "prefill_select.cuh"

// What has been scored: a whole row; a sample of it; a chunk of it, with an eye to candidates.
enum Pass { WHOLE, SAMPLING, COLLECTING };

// Longest list of candidates that is kept as it is; a longer one is thinned out. It is longer by a chunk at most.
constexpr int MAX_CANDIDATES = 2 * BUDGET_BLOCKS > 1024 ? 2 * BUDGET_BLOCKS : 1024;

// What is known of a row of several chunks, in shared memory.
struct RowState {
    uint32_t low;    // lowest key of a candidate among blocks to come
    float limit;     // no head sum below it has such a key
    int candidates;
    int blocks;      // complete ones of the row; 0: not a sparse row, or one that is done
    __device__ __forceinline__ void bound(uint32_t key) {
        low = key;
        // of the smallest score with that key, less more than rounding can make up for; a tiny one may be rounded a lot
        const float score = key < 0x80000000u ? 0.f : __uint_as_float(min(key, 0xff800000u) & 0x7fffffffu);
        limit = score < 1e-30f ? 0.f : score * (SQRT_ID * 0.999999f);
    }
    __device__ __forceinline__ void begin_again(bool done) {  // every block is a candidate, or none is needed any more
        bound(done ? 0xff800000u : 0u);
        candidates = 0;
        if (done) blocks = 0;
    }
};

// Blocks of a sample of a row: a power of two, so large that many of them are selected ones.
__device__ __forceinline__ int sample_size(int blocks, int chunk) { return blocks <= 8192 ? chunk / 2 : chunk; }

// How many of a sample to let pass, so that BUDGET_BLOCKS of all should: four standard deviations more than their share.
__device__ __forceinline__ int sample_rank(int size, int blocks) {
    const float share = static_cast<float>(BUDGET_BLOCKS) * size / blocks;
    return static_cast<int>(share + 4.f * sqrtf(share)) + 1;
}

// What a warp does for a row when something has been scored. scored: the keys of a whole row or a sample, `size` of them
// at most; list: the candidates of chunks, with room for MAX_CANDIDATES and a chunk. `last`: the row ends, and its
// selected ids [BUDGET_BLOCKS] are written; false if there are too few candidates.
__device__ __forceinline__ bool select_from(Pass pass, bool last, const uint32_t* scored, int size, Candidate* list,
                                            RowState& state, uint32_t* histogram, int* selected, int lane) {
    const int count = pass == WHOLE ? state.blocks : pass == SAMPLING ? size : state.candidates;
    if (pass == COLLECTING && !last && count <= MAX_CANDIDATES) return true;
    if (last && count < BUDGET_BLOCKS) return false;
    const Keys blocks = {scored, pass == COLLECTING ? list : nullptr};
    const int wanted = pass == SAMPLING ? sample_rank(size, state.blocks) : BUDGET_BLOCKS;
    Threshold threshold = EVERYTHING;
    if (count > wanted)
        threshold = find_threshold(blocks, count, wanted, pass == COLLECTING ? state.low : 0u,
                                   last ? 0 : pass == SAMPLING ? size : MAX_CANDIDATES, histogram, lane);
    if (last && pass == COLLECTING) {
        store_in_order(blocks, count, threshold, state.blocks, histogram, selected, lane);
        return true;
    }
    int taken = 0;
    if (pass != SAMPLING)
        taken = gather(blocks, count, threshold, lane, [&](int place, uint32_t key, int id) {
            if (last) selected[place] = id;
            else list[place] = {key, id};
        });
    if (!last && lane == 0) {
        state.candidates = taken;
        // of chunks all blocks to come lose against equal ones
        state.bound(threshold.last == EVERYTHING.last ? 0u : threshold.key + 1u);
    }
    return true;
}

// Head sums of a warp that may be candidates, until there are enough to be worth it: then each lane judges one.
struct Queue {
    struct Entry {
        float sum;
        int block;  // id * 32 + row
    };
    static constexpr int ROOM = BINS / 2;  // entries in BINS words of shared memory of this warp
    static_assert(ROOM >= 32 * SUM_ROWS * SUM_KEYS, "the sums of a call");
    static_assert(ROW_TILE <= 32, "five bits for the row");
    Entry* entries;
    int& waiting;  // in shared memory

    // list_of(row): the row's candidates.
    template <class ListOf>
    __device__ __forceinline__ void flush(RowState* states, const ListOf& list_of) const {
        const int lane = thread_now() % 32;
        __syncwarp();
        const int count = waiting;
#pragma unroll 2
        for (int i = lane; i < count; i += 32) {
            const Entry entry = entries[i];
            const uint32_t key = key_of_sum(entry.sum);
            const int id = entry.block / 32, r = entry.block % 32;
            RowState& state = states[r];
            if (key >= state.low && id < state.blocks) list_of(r)[atomicAdd(&state.candidates, 1)] = {key, id};
        }
        __syncwarp();
        if (lane == 0) waiting = 0;
        __syncwarp();
    }

    // Sums as score_blocks gives them.
    template <class ListOf>
    __device__ __forceinline__ void add(const Sums& sums, int first, int first_row, RowState* states,
                                        const ListOf& list_of) const {
        const int lane = thread_now() % 32, g = lane / 4, t = lane % 4;
        uint32_t reached = 0;  // a bit a sum
#pragma unroll
        for (int i = 0; i < SUM_ROWS; ++i) {
            const float limit = states[first_row + row_of(i, t)].limit;
#pragma unroll
            for (int j = 0; j < SUM_KEYS; ++j)
                if (!(sums[i][j] < limit)) reached |= 1u << (i * SUM_KEYS + j);  // NaN may be wanted
        }
        if (!__any_sync(0xffffffffu, reached != 0)) return;
        int all;
        const int before = lanes_below(__popc(reached), lane, all);
        if (waiting + all > ROOM) flush(states, list_of);
        const int count = waiting;
        Entry* to = entries + count + before;
        const int block = (first + g) * 32 + first_row + 2 * t;
#pragma unroll
        for (int i = 0; i < SUM_ROWS; ++i)
#pragma unroll
            for (int j = 0; j < SUM_KEYS; ++j)
                if (reached >> (i * SUM_KEYS + j) & 1u) *to++ = {sums[i][j], block + 8 * 32 * j + row_of(i, 0)};
        __syncwarp();
        if (lane == 0) waiting = count + all;
        __syncwarp();
    }
};
