// Stage 5 of prefill: the BUDGET_BLOCKS best blocks of a row, exactly, by one warp.
//
// The sort keys of a row (score_key) lie in a range [low, high]. A histogram of BINS equal slices of that range finds the
// slice that holds the last block to take; the range shrinks to that slice and the pass repeats, at most four times for
// 32 key bits, until the slice is one key or is taken whole. Nothing is buffered, so nothing can overflow; a range that
// follows the row's own minimum and maximum makes the cost the same for spread and for concentrated scores.
#pragma once

#include "prefill.cuh"

constexpr int BINS = 1024;
constexpr int BIN_BITS = 10;

struct Threshold {
    uint32_t key;  // take every block whose key is larger
    int ties;      // and so many of those that equal it, lowest ids first
};

// Four consecutive keys of a lane; `valid` counts those that exist. scores is 16-byte aligned, its stride a multiple of 4.
struct KeyQuad {
    uint32_t key[4];
    int valid;
};

__device__ __forceinline__ KeyQuad load_keys(const float* scores, int first, int count) {
    KeyQuad quad;
    quad.valid = min(4, count - first);
    const float4 raw = quad.valid > 0 ? *reinterpret_cast<const float4*>(scores + first) : make_float4(0, 0, 0, 0);
    quad.key[0] = score_key(raw.x);
    quad.key[1] = score_key(raw.y);
    quad.key[2] = score_key(raw.z);
    quad.key[3] = score_key(raw.w);
    return quad;
}

__device__ __forceinline__ uint32_t warp_min_key(uint32_t x) { return __reduce_min_sync(0xffffffffu, x); }
__device__ __forceinline__ uint32_t warp_max_key(uint32_t x) { return __reduce_max_sync(0xffffffffu, x); }

// Adds one to the bin of every lane with `inside`. Lanes that agree add once together: equal scores cost no more.
__device__ __forceinline__ void count_bin(uint32_t* histogram, uint32_t bin, bool inside, int lane) {
    const uint32_t mask = __ballot_sync(0xffffffffu, inside);
    if (mask == 0) return;
    const int leader = __ffs(mask) - 1;
    const uint32_t leading_bin = __shfl_sync(0xffffffffu, bin, leader);
    const bool same = __all_sync(0xffffffffu, !inside || bin == leading_bin);
    if (same) {
        if (lane == leader) atomicAdd(histogram + bin, __popc(mask));
    } else if (inside) {
        atomicAdd(histogram + bin, 1u);
    }
}

// The bin, counted from the top, in which the running count reaches `wanted`, and what lies above it.
__device__ __forceinline__ void find_bin(
    const uint32_t* histogram, int wanted, int lane, int& bin, int& above, int& inside) {
    // lane l sums bins [l*32, l*32+32), starting at another bank than its neighbours
    int sum = 0;
#pragma unroll 8
    for (int i = 0; i < 32; ++i) sum += histogram[lane * 32 + (i + lane) % 32];
    int suffix = sum;  // of lanes >= this one
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const int other = __shfl_down_sync(0xffffffffu, suffix, step);
        if (lane + step < 32) suffix += other;
    }
    const int slice = 31 - __clz(__ballot_sync(0xffffffffu, suffix >= wanted));
    const int above_slice = __shfl_sync(0xffffffffu, suffix - sum, slice);
    const int own = histogram[slice * 32 + lane];
    suffix = own;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const int other = __shfl_down_sync(0xffffffffu, suffix, step);
        if (lane + step < 32) suffix += other;
    }
    const int chosen = 31 - __clz(__ballot_sync(0xffffffffu, above_slice + suffix >= wanted));
    bin = slice * 32 + chosen;
    above = above_slice + __shfl_sync(0xffffffffu, suffix - own, chosen);
    inside = __shfl_sync(0xffffffffu, own, chosen);
}

// scores: `count` > BUDGET_BLOCKS of them. histogram: BINS words of shared memory of this warp.
__device__ __forceinline__ Threshold find_threshold(const float* scores, int count, uint32_t* histogram, int lane) {
    uint32_t low = 0xffffffffu, high = 0;
#pragma unroll 2
    for (int base = 0; base < count; base += 128) {
        const KeyQuad quad = load_keys(scores, base + lane * 4, count);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i >= quad.valid) continue;
            low = min(low, quad.key[i]);
            high = max(high, quad.key[i]);
        }
    }
    low = warp_min_key(low);
    high = warp_max_key(high);
    int wanted = BUDGET_BLOCKS;
#pragma unroll 1
    while (low < high) {
        const int shift = max(0, 32 - __clz(high - low) - BIN_BITS);
        for (int i = lane * 4; i < BINS; i += 128) *reinterpret_cast<uint4*>(histogram + i) = make_uint4(0, 0, 0, 0);
        __syncwarp();
#pragma unroll 2
        for (int base = 0; base < count; base += 128) {
            const KeyQuad quad = load_keys(scores, base + lane * 4, count);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const bool inside = i < quad.valid && quad.key[i] >= low && quad.key[i] <= high;
                count_bin(histogram, inside ? (quad.key[i] - low) >> shift : 0u, inside, lane);
            }
        }
        __syncwarp();
        int bin, above, inside;
        find_bin(histogram, wanted, lane, bin, above, inside);
        __syncwarp();
        wanted -= above;
        low += static_cast<uint32_t>(bin) << shift;
        // the slice's last key, which may not leave the range it came from (nor wrap)
        high = min(high - low, (1u << shift) - 1u) + low;
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
    for (int base = 0; base < count && taken < BUDGET_BLOCKS; base += 128) {
        const KeyQuad quad = load_keys(scores, base + lane * 4, count);
        bool take[4], tie[4];
        int ties_before = 0, ties_here = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            take[i] = i < quad.valid && quad.key[i] > threshold.key;
            tie[i] = i < quad.valid && quad.key[i] == threshold.key;
            const uint32_t mask = __ballot_sync(0xffffffffu, tie[i]);
            ties_before += __popc(mask & lower_lanes);
            ties_here += __popc(mask);
        }
        int takes_before = 0, takes_here = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            take[i] |= tie[i] && ties_before < ties_left;
            ties_before += tie[i];
            const uint32_t mask = __ballot_sync(0xffffffffu, take[i]);
            takes_before += __popc(mask & lower_lanes);
            takes_here += __popc(mask);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (take[i]) list[taken + takes_before++] = base + lane * 4 + i;
        taken += takes_here;
        ties_left = max(0, ties_left - ties_here);
    }
}
