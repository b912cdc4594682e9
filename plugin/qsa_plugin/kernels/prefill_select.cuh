// Stage 5 of prefill: the BUDGET_BLOCKS best blocks of a row, exactly, by one warp.
//
// The sort keys of a row (score_key) lie in a range [low, high]. A histogram of BINS equal slices of that range (of its
// top 2^SPAN_BITS keys; the rest joins the lowest slice) finds the slice that holds the last block to take; the range
// shrinks to it and the pass repeats until the slice is one key or is taken whole. No candidate is buffered, so nothing
// can overflow; a range that follows the row's own minimum and maximum makes the cost much the same for spread and for
// concentrated scores. A warp a row, not a CTA a row: passes are short, barriers would cost more than they share.
#pragma once

#include "prefill.cuh"

constexpr int BINS = 1024;
constexpr int BIN_BITS = 10;
constexpr int SPAN_BITS = 26;  // keys that one histogram spreads out: eight octaves of scores
constexpr int QUADS = 4;       // vector loads in flight a lane

struct Threshold {
    uint32_t key;  // take every block whose key is larger
    int ties;      // and so many of those that equal it, lowest ids first
};

// Calls f(first, keys, valid) for every four neighbouring scores of a row: first is the id of keys[0], and only the
// first `valid` (which may be none) exist. scores is 16-byte aligned and may be read up to the next multiple of four.
template <class F>
__device__ __forceinline__ void for_quads(const float* scores, int count, int lane, const F& f) {
    for (int base = 0; base < count; base += 128 * QUADS) {
        float4 raw[QUADS];
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            const int first = base + i * 128 + lane * 4;
            raw[i] = first < count ? *reinterpret_cast<const float4*>(scores + first) : make_float4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            if (base + i * 128 >= count) break;  // for the whole warp
            const int first = base + i * 128 + lane * 4;
            const float4 four = raw[i];
            const uint32_t keys[4] = {score_key(four.x), score_key(four.y), score_key(four.z), score_key(four.w)};
            f(first, keys, count - first);
        }
    }
}

// Counts four keys a lane. A warp of one mind adds once: many equal scores cost no more than others.
__device__ __forceinline__ void count_bins(
    uint32_t* histogram, const uint32_t (&bins)[4], const bool (&inside)[4], int lane) {
    const uint32_t first = __shfl_sync(0xffffffffu, bins[0], 0);
    bool same = true;
#pragma unroll
    for (int i = 0; i < 4; ++i) same &= inside[i] && bins[i] == first;
    if (__all_sync(0xffffffffu, same)) {
        if (lane == 0) atomicAdd(histogram + first, 128u);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (inside[i]) atomicAdd(histogram + bins[i], 1u);
}

// Sum over this lane and those above it.
__device__ __forceinline__ int suffix_sum(int x, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const int other = __shfl_down_sync(0xffffffffu, x, step);
        if (lane + step < 32) x += other;
    }
    return x;
}

// The bin, counted from the top, in which the running count reaches `wanted`, and what lies above it.
__device__ __forceinline__ void find_bin(
    const uint32_t* histogram, int wanted, int lane, int& bin, int& above, int& inside) {
    // lane l sums bins [l*32, l*32+32), starting at another bank than its neighbours
    int sum = 0;
#pragma unroll 8
    for (int i = 0; i < 32; ++i) sum += histogram[lane * 32 + (i + lane) % 32];
    int suffix = suffix_sum(sum, lane);
    const int slice = 31 - __clz(__ballot_sync(0xffffffffu, suffix >= wanted));
    const int above_slice = __shfl_sync(0xffffffffu, suffix - sum, slice);
    const int own = histogram[slice * 32 + lane];
    suffix = suffix_sum(own, lane);
    const int chosen = 31 - __clz(__ballot_sync(0xffffffffu, above_slice + suffix >= wanted));
    bin = slice * 32 + chosen;
    above = above_slice + __shfl_sync(0xffffffffu, suffix - own, chosen);
    inside = __shfl_sync(0xffffffffu, own, chosen);
}

// scores: `count` > BUDGET_BLOCKS of them. histogram: BINS words of shared memory of this warp, 16-byte aligned.
__device__ __forceinline__ Threshold find_threshold(const float* scores, int count, uint32_t* histogram, int lane) {
    uint32_t low = 0xffffffffu, high = 0;
    for_quads(scores, count, lane, [&](int, const uint32_t (&keys)[4], int valid) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            low = i < valid ? min(low, keys[i]) : low;
            high = i < valid ? max(high, keys[i]) : high;
        }
    });
    low = __reduce_min_sync(0xffffffffu, low);
    high = __reduce_max_sync(0xffffffffu, high);
    int wanted = BUDGET_BLOCKS;
#pragma unroll 1
    while (low < high) {
        // the lowest bin takes what lies far below the maximum, be it zero or NaN
        const uint32_t floor = high - low >> SPAN_BITS ? high - ((1u << SPAN_BITS) - 1u) : low;
        const int shift = max(0, 32 - __clz(high - floor) - BIN_BITS);
        for (int i = lane * 4; i < BINS; i += 128) *reinterpret_cast<uint4*>(histogram + i) = make_uint4(0, 0, 0, 0);
        __syncwarp();
        for_quads(scores, count, lane, [&](int, const uint32_t (&keys)[4], int valid) {
            uint32_t bins[4];
            bool inside[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                inside[i] = i < valid && keys[i] >= low && keys[i] <= high;
                bins[i] = keys[i] > floor ? (keys[i] - floor) >> shift : 0u;
            }
            count_bins(histogram, bins, inside, lane);
        });
        __syncwarp();
        int bin, above, inside;
        find_bin(histogram, wanted, lane, bin, above, inside);
        __syncwarp();
        wanted -= above;
        const uint32_t slice = floor + (static_cast<uint32_t>(bin) << shift);
        // the slice's last key, which may not leave the range it came from (nor wrap)
        high = min(high - slice, (1u << shift) - 1u) + slice;
        if (bin > 0) low = slice;
        if (wanted == inside) return {low - 1u, 0};  // the whole slice; low > 0, or all `count` would be wanted
    }
    return {low, wanted};
}

// Writes the selected ids in ascending order and -1 after them. list: [BUDGET_BLOCKS].
__device__ __forceinline__ void select_row(const float* scores, int count, uint32_t* histogram, int* list, int lane) {
    if (count <= BUDGET_BLOCKS) {
        for (int i = lane; i < BUDGET_BLOCKS; i += 32) list[i] = i < count ? i : -1;
        return;
    }
    const Threshold threshold = find_threshold(scores, count, histogram, lane);
    const uint32_t lower_lanes = (1u << lane) - 1u;
    int taken = 0, ties_left = threshold.ties;
    for_quads(scores, count, lane, [&](int first, const uint32_t (&keys)[4], int valid) {
        bool take[4], tie[4];
        bool any_tie = false;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            take[i] = i < valid && keys[i] > threshold.key;
            tie[i] = i < valid && keys[i] == threshold.key;
            any_tie |= tie[i];
        }
        if (ties_left > 0 && __any_sync(0xffffffffu, any_tie)) {
            int before = 0, here = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t mask = __ballot_sync(0xffffffffu, tie[i]);
                before += __popc(mask & lower_lanes);
                here += __popc(mask);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                take[i] |= tie[i] && before < ties_left;
                before += tie[i];
            }
            ties_left = max(0, ties_left - here);
        }
        int before = 0, here = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t mask = __ballot_sync(0xffffffffu, take[i]);
            before += __popc(mask & lower_lanes);
            here += __popc(mask);
        }
        if (here == 0) return;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (take[i]) list[taken + before++] = first + i;
        taken += here;
    });
}
