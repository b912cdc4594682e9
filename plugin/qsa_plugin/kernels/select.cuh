// Exact selection of the `count` largest of n scores by (score descending, id ascending), by one thread block.
// Radix select on the sort keys: three passes of 11, 11 and 10 bits find the class of keys that the last place falls in;
// above it everything is selected, inside it the lowest ids. No candidate buffer, so nothing can overflow.
#pragma once

#include "common.cuh"

constexpr int RADIX_BINS = 2048;

struct SelectScratch {
    int histogram[RADIX_BINS];
    int warp_sums[32];
    int warp_ties[32];
    uint32_t prefix;  // bits found so far, in place
    int remaining;    // places left for the class of `prefix`
    int class_size;
};

// Where the selection ends: keys with (key >> shift) above `bound` are in; of those equal to it, the first `ties` ids.
struct Threshold {
    uint32_t bound;
    int shift;
    int ties;
};

// One radix pass. Thread i owns bins 2i and 2i+1 counted from the top; needs blockDim.x == RADIX_BINS / 2.
__device__ inline void pick_bin(SelectScratch& s, int shift) {
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int high = s.histogram[RADIX_BINS - 1 - 2 * thread], low = s.histogram[RADIX_BINS - 2 - 2 * thread];
    const int remaining = s.remaining;
    int inclusive = high + low;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const int other = __shfl_up_sync(0xffffffffu, inclusive, step);
        if (lane >= step) inclusive += other;
    }
    if (lane == 31) s.warp_sums[warp] = inclusive;
    __syncthreads();
    int before = lane < warp ? s.warp_sums[lane] : 0;
    before = __reduce_add_sync(0xffffffffu, before);
    const int above_high = before + inclusive - high - low, above_low = above_high + high;
    const bool in_high = above_high < remaining && remaining <= above_high + high;
    const bool in_low = above_low < remaining && remaining <= above_low + low;
    if (in_high || in_low) {  // exactly one thread
        const int bin = RADIX_BINS - 1 - 2 * thread - (in_low ? 1 : 0);
        s.prefix |= static_cast<uint32_t>(bin) << shift;
        s.remaining = remaining - (in_low ? above_low : above_high);
        s.class_size = in_low ? low : high;
    }
    __syncthreads();
}

// keys(i) gives the sort key of block i; 0 < count < n; blockDim.x == RADIX_BINS / 2.
template <class Keys>
__device__ Threshold find_threshold(const Keys& keys, int n, int count, SelectScratch& s) {
    if (threadIdx.x == 0) {
        s.prefix = 0;
        s.remaining = count;
    }
    int shift = 32;
#pragma unroll 1
    for (int pass = 0; pass < 3; ++pass) {
        const int bits = pass < 2 ? 11 : 10;
        for (int i = threadIdx.x; i < RADIX_BINS; i += blockDim.x) s.histogram[i] = 0;
        __syncthreads();
        const uint32_t prefix = s.prefix;
        const int class_shift = shift;
        shift -= bits;
#pragma unroll 4
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            const uint32_t key = keys(i);
            if (pass == 0 || key >> class_shift == prefix >> class_shift)
                atomicAdd(&s.histogram[(key >> shift) & ((1 << bits) - 1)], 1);
        }
        __syncthreads();
        pick_bin(s, shift);
        if (s.class_size == s.remaining) break;  // the whole class is selected: its order does not matter
    }
    return {s.prefix >> shift, shift, s.remaining};
}

// Exclusive sum over the block of one int a thread; `total` gets the sum of all. blockDim.x == 1024.
__device__ inline int block_exclusive_sum(int value, int* warp_sums, int& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int inclusive = value;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const int other = __shfl_up_sync(0xffffffffu, inclusive, step);
        if (lane >= step) inclusive += other;
    }
    __syncthreads();  // the last call's readers are done
    if (lane == 31) warp_sums[warp] = inclusive;
    __syncthreads();
    const int sum = warp_sums[lane];
    total = __reduce_add_sync(0xffffffffu, sum);
    return __reduce_add_sync(0xffffffffu, lane < warp ? sum : 0) + inclusive - value;
}

// Writes the selected ids, ascending, to `ids`. blockDim.x == 1024. Works on bitmaps: a warp's vote on 32 consecutive
// keys is one word, and thread i then ranks word i.
template <class Keys>
__device__ void write_selected(const Keys& keys, int n, const Threshold& threshold, SelectScratch& s, int* ids) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t* above_words = reinterpret_cast<uint32_t*>(s.histogram);  // [1024]
    uint32_t* tied_words = above_words + RADIX_BINS / 2;               // [1024]
    int places = 0, ties_left = threshold.ties;
    for (int base = 0; base < n; base += 32 * RADIX_BINS / 2) {
        const int words = min((n - base + 31) / 32, RADIX_BINS / 2);
        __syncthreads();  // the histogram, or the words of the round before, have been read
#pragma unroll 4
        for (int word = warp; word < words; word += 32) {
            const int i = base + word * 32 + lane;
            const uint32_t leading = i < n ? keys(i) >> threshold.shift : 0u;
            const unsigned above = __ballot_sync(0xffffffffu, i < n && leading > threshold.bound);
            const unsigned tied = __ballot_sync(0xffffffffu, i < n && leading == threshold.bound);
            if (lane == 0) {
                above_words[word] = above;
                tied_words[word] = tied;
            }
        }
        __syncthreads();
        const int word = threadIdx.x;
        uint32_t chosen = word < words ? above_words[word] : 0u;
        const uint32_t tied = word < words ? tied_words[word] : 0u;
        int all_tied, all_chosen;
        int take = ties_left - block_exclusive_sum(__popc(tied), s.warp_ties, all_tied);
        for (uint32_t rest = tied; rest != 0u && take > 0; rest &= rest - 1, --take) chosen |= rest & -rest;
        int place = places + block_exclusive_sum(__popc(chosen), s.warp_sums, all_chosen);
        for (uint32_t rest = chosen; rest != 0u; rest &= rest - 1)
            ids[place++] = base + word * 32 + __ffs(static_cast<int>(rest)) - 1;
        places += all_chosen;
        ties_left = max(ties_left - all_tied, 0);
    }
}
