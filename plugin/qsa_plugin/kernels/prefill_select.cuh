// Stage 5 of prefill: the BUDGET_BLOCKS best blocks of a row, exactly, by one warp, on sort keys (score_key).
//
// Keys come in chunks of a row, or all at once. A histogram of BINS equal slices of the top 2^SPAN_BITS keys (the rest
// joins the lowest slice) finds the slice that holds the last block to take. For the first of several chunks that is
// a bound which BUDGET_BLOCKS keys and few more reach: what reaches it is a candidate, and later chunks need only be
// compared with it. When the list of candidates grows long, a histogram of it gives a higher bound. Lists stay in the
// order of their ids, and only what cannot be selected leaves them, so that the last step, on a list or on a whole row,
// is exact: the few keys of a narrow slice are ranked by counting; a crowded slice is the range of the next histogram,
// until it is one key or is taken whole. No step can overflow, and cost is much the same for spread and for
// concentrated scores. A warp a row, not a CTA a row: passes are short, barriers would cost more than they share.
#pragma once

#include "prefill.cuh"

constexpr int BINS = 1024;
constexpr int BIN_BITS = 10;
constexpr int SPAN_BITS = 26;  // keys that the first histogram spreads out: eight octaves of scores
constexpr int QUADS = 4;       // vector loads in flight a lane
constexpr int WINDOW = 128 * QUADS;  // keys a warp
constexpr int FEW = 32;        // keys that are ranked by counting, one a lane
// Longest list of candidates that is kept as it is; a longer one is thinned out. It is longer by a chunk at most.
constexpr int MAX_CANDIDATES = 2 * BUDGET_BLOCKS > 1024 ? 2 * BUDGET_BLOCKS : 1024;

struct Threshold {
    uint32_t key;  // take every block whose key is larger
    int ties;      // and so many of those that equal it, lowest ids first
};
constexpr Threshold EVERYTHING = {0u, 0x7fffffff};

// A row's keys, or its scores, which become keys when they are loaded. 16-byte aligned, and may be read up to the next
// multiple of four.
struct Keys {
    const uint32_t* keys;
    __device__ __forceinline__ uint32_t one(int at) const { return keys[at]; }
    __device__ __forceinline__ uint4 four(int at) const { return *reinterpret_cast<const uint4*>(keys + at); }
};
struct Scores {
    const float* scores;
    __device__ __forceinline__ uint32_t one(int at) const { return score_key(scores[at]); }
    __device__ __forceinline__ uint4 four(int at) const {
        const float4 four = *reinterpret_cast<const float4*>(scores + at);
        return make_uint4(score_key(four.x), score_key(four.y), score_key(four.z), score_key(four.w));
    }
};

// Calls f(keys, valid) for every four neighbouring keys of a row; only the first `valid` (which may be none) exist.
template <class Row, class F>
__device__ __forceinline__ void for_quads(const Row& row, int count, int lane, const F& f) {
#pragma unroll 1
    for (int base = lane * 4; base - lane * 4 < count; base += WINDOW) {
        uint4 raw[QUADS];
        if (base - lane * 4 + WINDOW <= count) {
#pragma unroll
            for (int i = 0; i < QUADS; ++i) raw[i] = row.four(base + i * 128);
#pragma unroll
            for (int i = 0; i < QUADS; ++i) {
                const uint32_t keys[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
                f(keys, 4);
            }
        } else {
#pragma unroll 1
            for (int at = base; at - lane * 4 < count; at += 128) {
                raw[0] = at < count ? row.four(at) : make_uint4(0, 0, 0, 0);
                const uint32_t keys[4] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w};
                f(keys, count - at);
            }
        }
    }
}

// Counts four keys a lane. A warp of one mind adds once: many equal scores cost no more than others.
__device__ __forceinline__ void count_bins(
    uint32_t* histogram, const uint32_t (&bins)[4], const bool (&inside)[4], int lane) {
    const uint32_t first = __shfl_sync(0xffffffffu, bins[0], 0);
    if (__all_sync(0xffffffffu, inside[0] && bins[0] == first)) {
        bool same = true;
#pragma unroll
        for (int i = 1; i < 4; ++i) same &= inside[i] && bins[i] == first;
        if (__all_sync(0xffffffffu, same)) {
            if (lane == 0) atomicAdd(histogram + first, 128u);
            return;
        }
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

// The keys [low, high], of which `inside` exist and `wanted` are to be taken, besides all larger ones.
struct Slice {
    uint32_t low, high;
    int wanted, inside;
};

// Narrows a slice to one of BINS: 1 << shift keys each from `floor` on; the end bins take what lies beyond. WHOLE: all
// keys are in the slice. histogram: BINS words of shared memory of this warp, 16-byte aligned.
template <bool WHOLE, class Row>
__device__ __forceinline__ void narrow(
    Slice& slice, const Row& row, int count, uint32_t floor, int shift, uint32_t* histogram, int lane) {
    for (int i = lane * 4; i < BINS; i += 128) *reinterpret_cast<uint4*>(histogram + i) = make_uint4(0, 0, 0, 0);
    __syncwarp();
    for_quads(row, count, lane, [&](const uint32_t (&keys)[4], int valid) {
        uint32_t bins[4];
        bool inside[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            inside[i] = i < valid && (WHOLE || (keys[i] >= slice.low && keys[i] <= slice.high));
            bins[i] = min(max(keys[i], floor) - floor >> shift, BINS - 1u);
        }
        count_bins(histogram, bins, inside, lane);
    });
    __syncwarp();
    int bin, above;
    find_bin(histogram, slice.wanted, lane, bin, above, slice.inside);
    __syncwarp();
    slice.wanted -= above;
    const uint32_t first = floor + (static_cast<uint32_t>(bin) << shift);
    if (bin < BINS - 1) slice.high = min(slice.high - first, (1u << shift) - 1u) + first;  // and never wraps
    if (bin > 0) slice.low = first;
}

// The slice of `count` > BUDGET_BLOCKS keys that holds the last one to take.
template <class Row>
__device__ __forceinline__ Slice first_slice(const Row& row, int count, uint32_t* histogram, int lane) {
    uint32_t top = 0;
    for_quads(row, min(count, WINDOW), lane, [&](const uint32_t (&keys)[4], int valid) {
#pragma unroll
        for (int i = 0; i < 4; ++i) top = i < valid ? max(top, keys[i]) : top;
    });
    // seven octaves below the largest of this sample, and one above it
    top = min(__reduce_max_sync(0xffffffffu, top), 0xff000000u) + (1u << 23);
    Slice slice = {0u, 0xffffffffu, BUDGET_BLOCKS, count};
    narrow<true>(slice, row, count, max(top, 1u << SPAN_BITS) - ((1u << SPAN_BITS) - 1u), SPAN_BITS - BIN_BITS,
                 histogram, lane);
    return slice;
}

// The threshold that takes `wanted` of the keys of a slice, which are FEW at most.
// few: FEW + 1 words of shared memory of this warp.
template <class Row>
__device__ __forceinline__ Threshold rank_few(const Slice& slice, const Row& row, int count, uint32_t* few, int lane) {
    if (lane == 0) few[FEW] = 0;
    __syncwarp();
    for_quads(row, count, lane, [&](const uint32_t (&keys)[4], int valid) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i < valid && keys[i] - slice.low <= slice.high - slice.low) few[atomicAdd(few + FEW, 1u)] = keys[i];
    });
    __syncwarp();
    const uint32_t mine = lane < slice.inside ? few[lane] : 0u;
    int above = 0, equal = 0;
    for (int other = 0; other < slice.inside; ++other) {
        above += few[other] > mine;
        equal += few[other] == mine;
    }
    const bool last = lane < slice.inside && above < slice.wanted && slice.wanted <= above + equal;
    const int from = __ffs(__ballot_sync(0xffffffffu, last)) - 1;
    __syncwarp();
    return {__shfl_sync(0xffffffffu, mine, from), slice.wanted - __shfl_sync(0xffffffffu, above, from)};
}

// The threshold that takes BUDGET_BLOCKS of `count` > BUDGET_BLOCKS keys.
template <class Row>
__device__ __forceinline__ Threshold find_threshold(const Row& row, int count, uint32_t* histogram, int lane) {
    Slice slice = first_slice(row, count, histogram, lane);
#pragma unroll 1
    while (slice.wanted < slice.inside && slice.low < slice.high) {
        if (slice.inside <= FEW) return rank_few(slice, row, count, histogram, lane);
        const int shift = max(0, 32 - __clz(slice.high - slice.low) - BIN_BITS);
        narrow<false>(slice, row, count, slice.low, shift, histogram, lane);
    }
    // the whole slice, where its lowest key is not 0, or so many of equal keys
    return slice.wanted == slice.inside && slice.low > 0 ? Threshold{slice.low - 1u, 0}
                                                         : Threshold{slice.low, slice.wanted};
}

// Sum over the lanes below this one, and over all.
__device__ __forceinline__ int lanes_below(int x, int lane, int& all) {
    int sum = x;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const int other = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += other;
    }
    all = __shfl_sync(0xffffffffu, sum, 31);
    return sum - x;
}

// Appends the keys that a threshold takes, and their ids, to a list of `taken`, in their order; returns its length.
// ids: [count] if LISTED, else key i has id first_id + i. to_keys: may be null, then only ids are stored. The list may be
// the one that is read: nothing is written ahead of what was read. places: WINDOW words of shared memory of this warp.
template <bool LISTED, class Row>
__device__ __forceinline__ int append(const Row& row, const int* ids, int first_id, int count, Threshold threshold,
                                      uint32_t* to_keys, int* to_ids, int taken, uint32_t* places, int lane) {
    int ties_left = threshold.ties;
#pragma unroll 1
    for (int base = 0; base < count; base += WINDOW) {
        const int at = base + lane * (4 * QUADS), left = count - at;  // neighbours, so that one sum orders them
        uint32_t take = 0, tied = 0;  // a bit a key
        uint4 raw[QUADS];
#pragma unroll
        for (int i = 0; i < QUADS; ++i) raw[i] = 4 * i < left ? row.four(at + 4 * i) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            const uint32_t keys[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (keys[j] > threshold.key) take |= 1u << (4 * i + j);
                if (keys[j] == threshold.key) tied |= 1u << (4 * i + j);
            }
        }
        const uint32_t valid = left >= 4 * QUADS ? 0xffffffffu : left > 0 ? (1u << left) - 1u : 0u;
        take &= valid;
        tied &= valid;
        int all;
        if (ties_left > 0 && __any_sync(0xffffffffu, tied != 0)) {
            const int before = lanes_below(__popc(tied), lane, all);
            for (int n = ties_left - before; __any_sync(0xffffffffu, n > 0 && tied != 0); --n, tied &= tied - 1)
                if (n > 0) take |= tied & -tied;
            ties_left = max(0, ties_left - all);
        }
        int place = lanes_below(__popc(take), lane, all);
        for (; __any_sync(0xffffffffu, take != 0); take &= take - 1)  // as one, which is cheaper than apart
            if (take != 0) places[place++] = at + __ffs(take) - 1;
        __syncwarp();
        for (int i = lane; i - lane < all; i += 32) {
            const int from = i < all ? places[i] : 0;
            const uint32_t key = row.one(from);
            const int id = LISTED ? ids[from] : first_id + from;
            __syncwarp();  // all have read
            if (to_keys != nullptr && i < all) to_keys[taken + i] = key;
            if (i < all) to_ids[taken + i] = id;
        }
        taken += all;
        __syncwarp();
    }
    return taken;
}

// Writes the selected ids in ascending order and -1 after them. list: [BUDGET_BLOCKS]. ids as for append.
template <bool LISTED, class Row>
__device__ __forceinline__ void select_row(
    const Row& row, const int* ids, int count, uint32_t* histogram, int* list, int lane) {
    if (count <= BUDGET_BLOCKS) {
        for (int i = lane; i < BUDGET_BLOCKS; i += 32) list[i] = i < count ? (LISTED ? ids[i] : i) : -1;
        return;
    }
    const Threshold threshold = find_threshold(row, count, histogram, lane);
    append<LISTED>(row, ids, 0, count, threshold, nullptr, list, 0, histogram, lane);
}

// What is known of a row between two chunks.
struct RowState {
    Threshold bound;
    int candidates;
};

// The next chunk of a row: blocks [first, first + count); count may be 0. `last`: ends the row and stores its list.
// keys, ids: the row's candidates, room for MAX_CANDIDATES and a chunk; not touched where one chunk is the row.
__device__ __forceinline__ void select_chunk(const uint32_t* chunk, int first, int count, bool last, uint32_t* keys,
                                             int* ids, RowState& state, uint32_t* histogram, int* list, int lane) {
    if (first == 0 && last) {
        select_row<false>(Keys{chunk}, nullptr, count, histogram, list, lane);
        return;
    }
    Threshold bound = EVERYTHING;
    int candidates = 0;
    if (first > 0) {
        bound = state.bound;
        candidates = state.candidates;
    } else if (count > BUDGET_BLOCKS) {
        const uint32_t low = first_slice(Keys{chunk}, count, histogram, lane).low;
        if (low > 0) bound = {low - 1u, 0};
    }
    candidates = append<false>(Keys{chunk}, nullptr, first, count, bound, keys, ids, candidates, histogram, lane);
    if (last) {
        select_row<true>(Keys{keys}, ids, candidates, histogram, list, lane);
        return;
    }
    if (candidates > MAX_CANDIDATES) {
        const Slice slice = first_slice(Keys{keys}, candidates, histogram, lane);
        if (slice.low > 0 && BUDGET_BLOCKS - slice.wanted + slice.inside <= MAX_CANDIDATES) bound = {slice.low - 1u, 0};
        else bound = find_threshold(Keys{keys}, candidates, histogram, lane);  // crowded
        candidates = append<true>(Keys{keys}, ids, 0, candidates, bound, keys, ids, 0, histogram, lane);
        bound.ties = 0;  // later blocks lose against those
    }
    __syncwarp();
    if (lane == 0) state = {bound, candidates};
}
