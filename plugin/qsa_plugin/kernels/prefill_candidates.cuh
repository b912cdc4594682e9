// Rows of several chunks: what of them is kept between two chunks, and what a warp does with a chunk that was scored.
//
// Of a row of several chunks the first gives a bound that BUDGET_BLOCKS keys and few more reach: what reaches it is a
// candidate. Scores of later chunks are compared with the bound where they are made (Queue), and only
// candidates leave the registers, in no order. When their list grows long, a histogram of it gives a higher bound and
// the list is thinned out; only what cannot be selected leaves it. The threshold of the last list is as exact as that of
// a row. A bit for every block brings the selected ids in order.
#pragma once

#include "prefill_select.cuh"

// Longest list of candidates that is kept as it is; a longer one is thinned out. It is longer by a chunk at most.
constexpr int MAX_CANDIDATES = 2 * BUDGET_BLOCKS > 1024 ? 2 * BUDGET_BLOCKS : 1024;

// What is known of a row of several chunks, in shared memory.
struct RowState {
    uint32_t low;    // lowest key of a candidate among blocks to come
    float limit;     // no head sum below it has such a key
    int candidates;
    int blocks;      // complete ones of the row; 0: not a sparse row
    __device__ __forceinline__ void bound(uint32_t key) {
        low = key;
        // of the smallest score with that key, less more than rounding can make up for; a tiny one may be rounded a lot
        const float score = key < 0x80000000u ? 0.f : __uint_as_float(min(key, 0xff800000u) & 0x7fffffffu);
        limit = score < 1e-30f ? 0.f : score * (SQRT_ID * 0.999999f);
    }
};

// What a warp does for a row when a chunk has been scored. chunk: keys of the first one, `size` of them at most; list:
// the candidates so far, if it is not the first, with room for MAX_CANDIDATES and a chunk. `last`: the row ends, and its
// selected ids [BUDGET_BLOCKS] are written.
__device__ __forceinline__ void select_from_chunk(const uint32_t* chunk, int size, bool first, bool last, Candidate* list,
                                                  RowState& state, uint32_t* histogram, int* selected, int lane) {
    const int count = first ? min(size, state.blocks) : state.candidates;
    if (!first && !last && count <= MAX_CANDIDATES) return;
    const Keys blocks = {chunk, first ? nullptr : list};
    Threshold threshold = EVERYTHING;
    if (count > BUDGET_BLOCKS)
        threshold = find_threshold(blocks, count, first ? 0u : state.low, last ? 0 : MAX_CANDIDATES, histogram, lane);
    if (last && !first) {
        store_in_order(blocks, count, threshold, state.blocks, histogram, selected, lane);
        return;
    }
    const int taken = gather(blocks, count, threshold, lane, [&](int place, uint32_t key, int id) {
        if (last) selected[place] = id;
        else list[place] = {key, id};
    });
    if (last || lane != 0) return;
    state.candidates = taken;
    state.bound(threshold.last == EVERYTHING.last ? 0u : threshold.key + 1u);  // later blocks lose against equal ones
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
