// Stage 5 of prefill: the BUDGET_BLOCKS best blocks of a row, exactly, by one warp, on sort keys (score_key).
//
// A histogram of BINS equal slices of the top 2^SPAN_BITS keys (the rest joins the lowest slice) finds the slice that
// holds the last block to take. Where that is not exact enough, the few keys of a narrow slice are ranked by counting; a
// crowded slice is the range of the next histogram, until it is one key or is taken whole; blocks of a crowd with one key
// are told apart by their ids in the same way. So the threshold is exact in every distribution, no step can overflow,
// and cost is much the same for spread and for concentrated scores.
//   A warp a row, not a CTA a row: passes are short, barriers would cost more than they share.
#pragma once

#include "prefill_score.cuh"

constexpr int BINS = 1024;
constexpr int BIN_BITS = 10;
constexpr int SPAN_BITS = 26;  // keys that the first histogram spreads out: eight octaves of scores
constexpr int QUADS = 4;       // of blocks whose keys are on their way to a lane
constexpr int WINDOW = 128 * QUADS;  // blocks a warp
constexpr int SAMPLE = 512;    // blocks
constexpr int FEW = 32;        // keys that are ranked by counting, one a lane

// Take every block whose key is larger, and those that equal it up to id `last`.
struct Threshold {
    uint32_t key;
    int last;
    __device__ __forceinline__ bool takes(uint32_t other, int id) const {
        return other > key || (other == key && id <= last);
    }
};
constexpr Threshold EVERYTHING = {0u, 0x7fffffff};
__device__ __forceinline__ Threshold from_key(uint32_t low) {  // that and all larger ones
    return low > 0 ? Threshold{low - 1u, -1} : EVERYTHING;
}

struct Candidate {
    uint32_t key;
    int id;
};
struct Four {
    uint32_t key[4];
    int id[4];
};

// Blocks with their keys: those of a chunk or row, in order, or a list. 16-byte aligned, and may be read up to the next
// multiple of four. load gives what four makes four blocks of.
struct Keys {
    struct Raw {
        uint4 first, second;
    };
    const uint32_t* keys;
    const Candidate* list;  // not null: in place of the keys
    __device__ __forceinline__ Raw load(int at) const {
        const uint4* from = list == nullptr ? reinterpret_cast<const uint4*>(keys + at)
                                            : reinterpret_cast<const uint4*>(list + at);
        return {from[0], list == nullptr ? uint4{} : from[1]};
    }
    __device__ __forceinline__ Four four(const Raw& raw, int at) const {
        const uint4 &x = raw.first, &y = raw.second;
        if (list == nullptr) return {{x.x, x.y, x.z, x.w}, {at, at + 1, at + 2, at + 3}};
        return {{x.x, x.z, y.x, y.z},
                {static_cast<int>(x.y), static_cast<int>(x.w), static_cast<int>(y.y), static_cast<int>(y.w)}};
    }
};
// The same of a row of scores.
struct Scores {
    typedef float4 Raw;
    const float* scores;
    __device__ __forceinline__ Raw load(int at) const { return *reinterpret_cast<const float4*>(scores + at); }
    __device__ __forceinline__ Four four(const Raw& x, int at) const {
        return {{score_key(x.x), score_key(x.y), score_key(x.z), score_key(x.w)}, {at, at + 1, at + 2, at + 3}};
    }
};

// What a histogram is made of: keys, or, to tell blocks with one key apart, numbers that are larger for lower ids of
// those blocks and 0 for all others.
template <class Blocks>
struct View {
    typedef typename Blocks::Raw Raw;
    Blocks blocks;
    uint32_t tied;
    bool by_id;
    __device__ __forceinline__ Raw load(int at) const { return blocks.load(at); }
    __device__ __forceinline__ Four four(const Raw& raw, int at) const {
        Four x = blocks.four(raw, at);
        if (by_id)
#pragma unroll
            for (int i = 0; i < 4; ++i) x.key[i] = x.key[i] == tied ? ~static_cast<uint32_t>(x.id[i]) : 0u;
        return x;
    }
};

// Calls f(four, valid) for every four neighbouring blocks; only the first `valid` (which may be none) exist. The calls
// of a WINDOW come after all its loads.
template <class Blocks, class F>
__device__ __forceinline__ void for_quads(const Blocks& blocks, int count, int lane, const F& f) {
#pragma unroll 1
    for (int base = lane * 4; base - lane * 4 < count; base += WINDOW) {
        typename Blocks::Raw raw[QUADS];
        if (base - lane * 4 + WINDOW <= count) {
#pragma unroll
            for (int i = 0; i < QUADS; ++i) raw[i] = blocks.load(base + i * 128);
#pragma unroll
            for (int i = 0; i < QUADS; ++i) f(blocks.four(raw[i], base + i * 128), 4);
        } else {
#pragma unroll
            for (int i = 0; i < QUADS; ++i) {
                const int at = base + i * 128;
                raw[i] = at < count ? blocks.load(at) : typename Blocks::Raw{};
            }
#pragma unroll 1
            for (int at = base; at - lane * 4 < count; at += 128) {
                f(blocks.four(raw[0], at), count - at);
#pragma unroll
                for (int i = 1; i < QUADS; ++i) raw[i - 1] = raw[i];
            }
        }
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
    for_quads(row, count, lane, [&](const Four& four, int valid) {
        const uint32_t(&keys)[4] = four.key;
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

// The slice of `count` keys that holds the last of the `wanted` largest, wanted < count. low: no key is much below it,
// or 0.
template <class Row>
__device__ __forceinline__ Slice first_slice(
    const Row& row, int count, int wanted, uint32_t low, uint32_t* histogram, int lane) {
    uint32_t top = low;
    for_quads(row, min(count, SAMPLE), lane, [&](const Four& four, int valid) {
#pragma unroll
        for (int i = 0; i < 4; ++i) top = i < valid ? max(top, four.key[i]) : top;
    });
    top = __reduce_max_sync(0xffffffffu, top);
    const uint32_t span = top - low;
    int shift = max(0, 32 - __clz(span + span / 4) - BIN_BITS);  // and a quarter above the largest of this sample
    if (low == 0) {  // seven octaves below it, and one above
        top = min(top, 0xff000000u) + (1u << 23);
        low = max(top, 1u << SPAN_BITS) - ((1u << SPAN_BITS) - 1u);
        shift = SPAN_BITS - BIN_BITS;
    }
    Slice slice = {0u, 0xffffffffu, wanted, count};
    narrow<true>(slice, row, count, low, shift, histogram, lane);
    return slice;
}

// Narrows a slice of FEW keys at most to the last one to take. few: FEW + 1 words of shared memory of this warp.
template <class Row>
__device__ __forceinline__ void rank_few(Slice& slice, const Row& row, int count, uint32_t* few, int lane) {
    if (lane == 0) few[FEW] = 0;
    __syncwarp();
    for_quads(row, count, lane, [&](const Four& four, int valid) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i < valid && four.key[i] - slice.low <= slice.high - slice.low)
                few[atomicAdd(few + FEW, 1u)] = four.key[i];
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
    slice.low = slice.high = __shfl_sync(0xffffffffu, mine, from);
    slice.wanted -= __shfl_sync(0xffffffffu, above, from);
    slice.inside = __shfl_sync(0xffffffffu, equal, from);
}

// A threshold that takes at least `wanted` of more keys: `room` of them at most if the first histogram can tell, else
// exactly `wanted`, lowest ids first among equal keys. low: as for first_slice.
template <class Blocks>
__device__ __forceinline__ Threshold find_threshold(
    const Blocks& blocks, int count, int wanted, uint32_t low, int room, uint32_t* histogram, int lane) {
    View<Blocks> view = {blocks, 0u, false};
#pragma unroll 1
    while (true) {
        Slice slice = first_slice(view, count, wanted, low, histogram, lane);
        if (!view.by_id && wanted - slice.wanted + slice.inside <= room) return from_key(slice.low);
#pragma unroll 1
        while (slice.wanted < slice.inside && slice.low < slice.high) {
            if (slice.inside <= FEW) {
                rank_few(slice, view, count, histogram, lane);
                break;
            }
            const int shift = max(0, 32 - __clz(slice.high - slice.low) - BIN_BITS);
            narrow<false>(slice, view, count, slice.low, shift, histogram, lane);
        }
        if (view.by_id) return {view.tied, static_cast<int>(~slice.low)};
        if (slice.wanted == slice.inside) return from_key(slice.low);
        view.tied = slice.low;  // so many of one key, then
        view.by_id = true;
        wanted = slice.wanted;
        low = 0;
    }
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

// Calls store(place, key, id) for the blocks that a threshold takes, with places in their order; returns how many. The
// places may be those that are read: nothing is stored ahead of what was read.
template <class Blocks, class Store>
__device__ __forceinline__ int gather(
    const Blocks& blocks, int count, Threshold threshold, int lane, const Store& store) {
    const uint32_t below = (1u << lane) - 1u;
    int taken = 0;
    __syncwarp();
    for_quads(blocks, count, lane, [&](const Four& four, int valid) {
        bool take[4];
        int place = taken;
        __syncwarp();  // all have read
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            take[i] = i < valid && threshold.takes(four.key[i], four.id[i]);
            const uint32_t takers = __ballot_sync(0xffffffffu, take[i]);
            place += __popc(takers & below);
            taken += __popc(takers);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (take[i]) store(place++, four.key[i], four.id[i]);
    });
    __syncwarp();
    return taken;
}

// Writes the ids of the blocks that a threshold takes in ascending order, whatever the order of the blocks; they are
// below `end`. ids: [BUDGET_BLOCKS]. bits: BINS words of shared memory of this warp, one bit a block.
__device__ __forceinline__ void store_in_order(const Keys& blocks, int count, Threshold threshold, int end, uint32_t* bits,
                                               int* ids, int lane) {
    int taken = 0;
#pragma unroll 1
    for (int first = 0; first < end; first += 32 * BINS) {
        const int words = min(BINS, (end - first + 31) / 32);
        __syncwarp();
        for (int i = lane; i < words; i += 32) bits[i] = 0;
        __syncwarp();
        for_quads(blocks, count, lane, [&](const Four& four, int valid) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const unsigned bit = four.id[i] - first;
                if (i < valid && bit < 32 * BINS && threshold.takes(four.key[i], four.id[i]))
                    atomicOr(bits + bit / 32, 1u << bit % 32);
            }
        });
        __syncwarp();
#pragma unroll 1
        for (int i = lane; i - lane < words; i += 32) {
            uint32_t left = i < words ? bits[i] : 0u;
            int all, *to = ids + taken + lanes_below(__popc(left), lane, all);
            for (; left != 0; left &= left - 1) *to++ = first + i * 32 + __ffs(left) - 1;
            taken += all;
        }
    }
    __syncwarp();
}
