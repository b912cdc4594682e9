// Stage 5 of prefill: the BUDGET_BLOCKS best blocks of a row, exactly, by one CTA of SELECT_THREADS threads.
//
// A row's sort keys live in registers, SEGMENT of them at a time; longer rows are read again for every pass. The keys lie
// in a range [low, high]. A histogram of BINS equal slices of that range finds the slice that holds the last block to
// take; the range shrinks to it and the pass repeats, at most four times for 32 key bits, until the slice is one key or is
// taken whole. No candidates are buffered, so nothing can overflow; a range that follows the row's own minimum and maximum
// makes the cost the same for spread and for concentrated scores.
#pragma once

#include "prefill.cuh"

constexpr int SELECT_THREADS = 256;
constexpr int SELECT_WARPS = SELECT_THREADS / 32;
constexpr int BINS = 1024;
constexpr int BIN_BITS = 10;
constexpr int KEYS = 32;  // a thread; key i of thread t is score i * SELECT_THREADS + t of the segment
constexpr int SEGMENT = KEYS * SELECT_THREADS;
static_assert(KEYS == 32, "a lane keeps one word of a bit map, a thread writes one out");
constexpr int KEY_GROUP = 8;  // keys whose absence is tested at once

struct SelectShared {
    uint32_t histogram[BINS];
    uint32_t larger[SEGMENT / 32];  // bit maps of a segment: above the threshold, equal to it
    uint32_t equal[SEGMENT / 32];
    uint32_t warp_low[SELECT_WARPS];
    uint32_t warp_high[SELECT_WARPS];
    uint32_t warp_counts[SELECT_WARPS];
    int bin, above, inside;
};

// Keys of a segment: 0 where there is no score, 1 for NaN, else score_key.
__device__ __forceinline__ void load_keys(uint32_t (&keys)[KEYS], const float* scores, int count) {
    const float* own = scores + threadIdx.x;
    const int left = count - static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < KEYS; ++i)
        keys[i] = i * SELECT_THREADS < left ? max(1u, score_key(own[i * SELECT_THREADS])) : 0u;
}

// f(i) for every i with any key of a segment of `count` scores
template <class F>
__device__ __forceinline__ void for_keys(int count, const F& f) {
#pragma unroll
    for (int group = 0; group < KEYS; group += KEY_GROUP)
        if (group * SELECT_THREADS < count) {
#pragma unroll
            for (int i = group; i < group + KEY_GROUP; ++i) f(i);
        }
}

// Adds one to the bin of every lane with `inside`. A warp of one mind adds once: equal scores cost no more than others.
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

// Sum over this lane and those above it.
__device__ __forceinline__ int suffix_sum(int x, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const int other = __shfl_down_sync(0xffffffffu, x, step);
        if (lane + step < 32) x += other;
    }
    return x;
}

// One warp: the bin, counted from the top, in which the running count reaches `wanted`, and what lies above it.
__device__ __forceinline__ void find_bin(SelectShared& shared, int wanted, int lane) {
    // lane l sums bins [l*32, l*32+32), starting at another bank than its neighbours
    int sum = 0;
#pragma unroll 8
    for (int i = 0; i < 32; ++i) sum += shared.histogram[lane * 32 + (i + lane) % 32];
    int suffix = suffix_sum(sum, lane);
    const int slice = 31 - __clz(__ballot_sync(0xffffffffu, suffix >= wanted));
    const int above_slice = __shfl_sync(0xffffffffu, suffix - sum, slice);
    const int own = shared.histogram[slice * 32 + lane];
    suffix = suffix_sum(own, lane);
    const int chosen = 31 - __clz(__ballot_sync(0xffffffffu, above_slice + suffix >= wanted));
    if (lane != chosen) return;
    shared.bin = slice * 32 + chosen;
    shared.above = above_slice + suffix - own;
    shared.inside = own;
}

struct Threshold {
    uint32_t key;  // take every block whose key is larger
    int ties;      // and so many of those that equal it, lowest ids first
};

// scores: `count` > BUDGET_BLOCKS of them; keys: those of the first segment.
__device__ __forceinline__ Threshold find_threshold(
    const float* scores, int count, uint32_t (&keys)[KEYS], SelectShared& shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t low = 0xffffffffu, high = 0;
    for (int start = 0; start < count; start += SEGMENT) {
        if (count > SEGMENT) load_keys(keys, scores + start, count - start);
        for_keys(count - start, [&](int i) {
            low = min(low, keys[i] - 1u);  // a key that is not there wraps round
            high = max(high, keys[i]);
        });
    }
    low = __reduce_min_sync(0xffffffffu, low);
    high = __reduce_max_sync(0xffffffffu, high);
    if (lane == 0) {
        shared.warp_low[warp] = low;
        shared.warp_high[warp] = high;
    }
    __syncthreads();
#pragma unroll
    for (int w = 0; w < SELECT_WARPS; ++w) {
        low = min(low, shared.warp_low[w]);
        high = max(high, shared.warp_high[w]);
    }
    low += 1u;
    int wanted = BUDGET_BLOCKS;
#pragma unroll 1
    while (low < high) {
        const int shift = max(0, 32 - __clz(high - low) - BIN_BITS);
        for (int i = threadIdx.x; i < BINS; i += SELECT_THREADS) shared.histogram[i] = 0;
        __syncthreads();
        for (int start = 0; start < count; start += SEGMENT) {
            if (count > SEGMENT) load_keys(keys, scores + start, count - start);
            for_keys(count - start, [&](int i) {
                const bool inside = keys[i] >= low && keys[i] <= high;
                count_bin(shared.histogram, inside ? (keys[i] - low) >> shift : 0u, inside, lane);
            });
        }
        __syncthreads();
        if (warp == 0) find_bin(shared, wanted, lane);
        __syncthreads();
        wanted -= shared.above;
        low += static_cast<uint32_t>(shared.bin) << shift;
        // the slice's last key, which may not leave the range it came from (nor wrap)
        high = min(high - low, (1u << shift) - 1u) + low;
        if (wanted == shared.inside) return {low - 1u, 0};  // the whole slice
    }
    return {low, wanted};
}

// Writes the selected ids in ascending order and -1 after them. list: [BUDGET_BLOCKS]. All threads of the CTA; begins and
// ends without a barrier, so the caller separates two rows.
__device__ __forceinline__ void select_row(const float* scores, int count, int* list, SelectShared& shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (count <= BUDGET_BLOCKS) {
        for (int i = threadIdx.x; i < BUDGET_BLOCKS; i += SELECT_THREADS) list[i] = i < count ? i : -1;
        return;
    }
    uint32_t keys[KEYS];
    // always, or the compiler keeps registers for them across the caller's loop
    load_keys(keys, scores, count);
    const Threshold threshold = find_threshold(scores, count, keys, shared);
    int taken = 0, tied = 0;  // above the threshold, and equal to it, in the segments before this one
    for (int start = 0; start < count; start += SEGMENT) {
        if (count > SEGMENT) load_keys(keys, scores + start, count - start);
        uint32_t larger = 0, equal = 0;  // lane l keeps the words of key l
        for_keys(count - start, [&](int i) {
            const uint32_t above = __ballot_sync(0xffffffffu, keys[i] > threshold.key);
            const uint32_t same = __ballot_sync(0xffffffffu, keys[i] == threshold.key);
            if (lane == i) {
                larger = above;
                equal = same;
            }
        });
        __syncthreads();  // the segment before has been written out
        shared.larger[lane * SELECT_WARPS + warp] = larger;
        shared.equal[lane * SELECT_WARPS + warp] = equal;
        __syncthreads();
        // each thread writes out one word: 32 blocks
        const uint32_t take = shared.larger[threadIdx.x];
        uint32_t tie = shared.equal[threadIdx.x];
        const uint32_t own = __popc(take) << 16 | __popc(tie);
        uint32_t before = own;
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            const uint32_t other = __shfl_up_sync(0xffffffffu, before, step);
            if (lane >= step) before += other;
        }
        if (lane == 31) shared.warp_counts[warp] = before;
        __syncthreads();
        before -= own;
        uint32_t all = 0;
#pragma unroll
        for (int w = 0; w < SELECT_WARPS; ++w) {
            if (w < warp) before += shared.warp_counts[w];
            all += shared.warp_counts[w];
        }
        const int ties_before = tied + static_cast<int>(before & 0xffffu);
        const int quota = max(0, threshold.ties - ties_before);
        while (__popc(tie) > quota) tie &= ~(0x80000000u >> __clz(tie));  // the highest id goes
        int at = taken + static_cast<int>(before >> 16) + min(ties_before, threshold.ties);
        for (uint32_t left = take | tie; left != 0; left &= left - 1)
            list[at++] = start + threadIdx.x * 32 + __ffs(left) - 1;
        taken += all >> 16;
        tied += all & 0xffffu;
    }
}
