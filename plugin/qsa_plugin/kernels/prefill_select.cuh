// Stage 5 of prefill: the BUDGET_BLOCKS best blocks of a row, exactly, by one warp, on sort keys (score_key).
//
// A histogram of BINS equal slices of the top 2^SPAN_BITS keys (the rest joins the lowest slice) finds the slice that
// holds the last block to take. Where a row ends in its first chunk, the few keys of a narrow slice are ranked by
// counting; a crowded slice is the range of the next histogram, until it is one key or is taken whole; keys of a crowd
// of equal ones are told apart by their ids in the same way. So the cut is exact in every distribution, no step can
// overflow, and cost is much the same for spread and for concentrated scores.
//   Of a longer row the first chunk gives a bound that BUDGET_BLOCKS keys and few more reach: what reaches it is a
// candidate. Scores of later chunks are compared with the bound where they are made (keep_candidates), and only
// candidates leave the registers, in no order. When their list grows long, a histogram of it gives a higher bound and
// the list is thinned out; only what cannot be selected leaves it. At the end the cut of the list is as exact as that of
// a row, and a bit for every block brings the selected ids in order.
//   A warp a row, not a CTA a row: passes are short, barriers would cost more than they share.
#pragma once

#include "prefill_score.cuh"

constexpr int BINS = 1024;
constexpr int BIN_BITS = 10;
constexpr int SPAN_BITS = 26;  // keys that the first histogram spreads out: eight octaves of scores
constexpr int QUADS = 4;       // vector loads in flight a lane
constexpr int WINDOW = 128 * QUADS;  // keys a warp
constexpr int FEW = 32;        // keys that are ranked by counting, one a lane
// Longest list of candidates that is kept as it is; a longer one is thinned out. It is longer by a chunk at most.
constexpr int MAX_CANDIDATES = 2 * BUDGET_BLOCKS > 1024 ? 2 * BUDGET_BLOCKS : 1024;

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

// A row or list as keys, or, to tell its blocks with one key apart, as numbers that are larger for lower ids of those
// blocks and 0 for all others.
template <class Row>
struct View {
    Row row;
    const int* ids;  // null where key i has id i
    uint32_t tied;
    bool by_id;
    __device__ __forceinline__ int id(int at) const { return ids == nullptr ? at : ids[at]; }
    __device__ __forceinline__ uint32_t rank(uint32_t key, int at) const {
        return key == tied ? ~static_cast<uint32_t>(id(at)) : 0u;
    }
    __device__ __forceinline__ uint4 four(int at) const {
        const uint4 keys = row.four(at);
        if (!by_id) return keys;
        return make_uint4(rank(keys.x, at), rank(keys.y, at + 1), rank(keys.z, at + 2), rank(keys.w, at + 3));
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

// The slice of `count` keys that holds the last of the `wanted` largest, wanted < count.
template <class Row>
__device__ __forceinline__ Slice first_slice(const Row& row, int count, int wanted, uint32_t* histogram, int lane) {
    uint32_t top = 0;
    for_quads(row, min(count, WINDOW), lane, [&](const uint32_t (&keys)[4], int valid) {
#pragma unroll
        for (int i = 0; i < 4; ++i) top = i < valid ? max(top, keys[i]) : top;
    });
    // seven octaves below the largest of this sample, and one above it
    top = min(__reduce_max_sync(0xffffffffu, top), 0xff000000u) + (1u << 23);
    Slice slice = {0u, 0xffffffffu, wanted, count};
    narrow<true>(slice, row, count, max(top, 1u << SPAN_BITS) - ((1u << SPAN_BITS) - 1u), SPAN_BITS - BIN_BITS,
                 histogram, lane);
    return slice;
}

// Narrows a slice of FEW keys at most to the last one to take. few: FEW + 1 words of shared memory of this warp.
template <class Row>
__device__ __forceinline__ void rank_few(Slice& slice, const Row& row, int count, uint32_t* few, int lane) {
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
    slice.low = slice.high = __shfl_sync(0xffffffffu, mine, from);
    slice.wanted -= __shfl_sync(0xffffffffu, above, from);
    slice.inside = __shfl_sync(0xffffffffu, equal, from);
}

// A threshold that takes at least BUDGET_BLOCKS of `count` > BUDGET_BLOCKS keys: `room` of them at most if the first
// histogram can tell, else exactly BUDGET_BLOCKS, lowest ids first among equal keys.
template <class Row>
__device__ __forceinline__ Threshold find_threshold(
    const Row& row, const int* ids, int count, int room, uint32_t* histogram, int lane) {
    View<Row> view = {row, ids, 0u, false};
    int wanted = BUDGET_BLOCKS;
#pragma unroll 1
    while (true) {
        Slice slice = first_slice(view, count, wanted, histogram, lane);
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

// Appends the keys that a threshold takes, and their ids, to a list of `taken`, in their order; returns its length.
// ids: null where key i has id i. to_keys: may be null, then only ids are stored. The list may be the one that is read:
// nothing is written ahead of what was read. buffer: 2 * WINDOW words of shared memory of this warp.
template <class Row>
__device__ __forceinline__ int append(const Row& row, const int* ids, int count, Threshold threshold, uint32_t* to_keys,
                                      int* to_ids, int taken, uint32_t* buffer, int lane) {
    static_assert(2 * WINDOW <= BINS, "the buffer takes the place of a histogram");
#pragma unroll 1
    for (int base = 0; base < count; base += WINDOW) {
        const int at = base + lane * (4 * QUADS), left = count - at;  // neighbours, so that one sum orders them
        uint4 key[QUADS];
        int4 id[QUADS];
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            const int from = at + 4 * i;
            key[i] = 4 * i < left ? row.four(from) : make_uint4(0, 0, 0, 0);
            id[i] = make_int4(from, from + 1, from + 2, from + 3);
            if (ids != nullptr && 4 * i < left) id[i] = *reinterpret_cast<const int4*>(ids + from);
        }
        uint32_t take = 0;  // a bit a key
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            const uint32_t keys[4] = {key[i].x, key[i].y, key[i].z, key[i].w};
            const int own[4] = {id[i].x, id[i].y, id[i].z, id[i].w};
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (4 * i + j < left && threshold.takes(keys[j], own[j])) take |= 1u << (4 * i + j);
        }
        int all;
        int place = lanes_below(__popc(take), lane, all);
        __syncwarp();  // the buffer is free
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            const uint32_t keys[4] = {key[i].x, key[i].y, key[i].z, key[i].w};
            const int own[4] = {id[i].x, id[i].y, id[i].z, id[i].w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (!(take >> (4 * i + j) & 1u)) continue;
                buffer[place] = keys[j];
                buffer[WINDOW + place++] = own[j];
            }
        }
        __syncwarp();
        for (int i = lane; i < all; i += 32) {
            if (to_keys != nullptr) to_keys[taken + i] = buffer[i];
            to_ids[taken + i] = buffer[WINDOW + i];
        }
        taken += all;
    }
    __syncwarp();
    return taken;
}

// What is known of a row of several chunks, in shared memory.
struct RowState {
    uint32_t low;    // lowest key of a candidate among blocks to come
    float limit;     // no head sum below it has such a key
    int candidates;
    int blocks;      // complete ones of the row; 0: not a sparse row
    __device__ __forceinline__ void bound(uint32_t key) {
        low = key;
        // of the smallest score with that key, less more than rounding can make up for
        limit = key < 0x80000000u ? 0.f : __uint_as_float(key & 0x7fffffffu) * (SQRT_ID * 0.999999f);
    }
};

// The candidates of a row, in no order: MAX_CANDIDATES and a chunk more of each.
struct Candidates {
    uint32_t* keys;
    int* ids;
};

// Writes the ids that a threshold takes from a list in no order in ascending order, and -1 after them. They are below
// `blocks`. list: [BUDGET_BLOCKS]. bits: BINS words of shared memory of this warp.
__device__ __forceinline__ void store_in_order(const Candidates& from, int count, int blocks, Threshold threshold,
                                               uint32_t* bits, int* list, int lane) {
    // a bit a block; lane l reads words [32 l, 32 l + 32), which lie in different banks
    const auto word = [&](int i) { return bits + (i & ~31) + ((i ^ i / 32) & 31); };
    int taken = 0;
#pragma unroll 1
    for (int first = 0; first < blocks; first += 32 * BINS) {
        __syncwarp();
        for (int i = lane * 4; i < BINS; i += 128) *reinterpret_cast<uint4*>(bits + i) = make_uint4(0, 0, 0, 0);
        __syncwarp();
        for (int i = lane; i < count; i += 32) {
            const int id = from.ids[i], bit = id - first;
            if (threshold.takes(from.keys[i], id) && bit >= 0 && bit < 32 * BINS)
                atomicOr(word(bit / 32), 1u << bit % 32);
        }
        __syncwarp();
        int own = 0, all;
#pragma unroll 8
        for (int i = 0; i < 32; ++i) own += __popc(*word(lane * 32 + i));
        int* to = list + taken + lanes_below(own, lane, all);
#pragma unroll 1
        for (int i = 0; i < 32; ++i)
            for (uint32_t left = *word(lane * 32 + i); left != 0; left &= left - 1)
                *to++ = first + (lane * 32 + i) * 32 + __ffs(left) - 1;
        taken += all;
    }
    for (int i = taken + lane; i < BUDGET_BLOCKS; i += 32) list[i] = -1;
    __syncwarp();
}

// What a warp does for a row when a chunk has been scored. chunk: keys of the first one, `size` of them at most;
// candidates: those so far, if it is not the first. `last`: the row ends, and its list [BUDGET_BLOCKS] is written.
__device__ __forceinline__ void select_from_chunk(const uint32_t* chunk, int size, bool first, bool last,
                                                  const Candidates& candidates, RowState& state, uint32_t* histogram,
                                                  int* list, int lane) {
    const int count = first ? min(size, state.blocks) : state.candidates;
    if (!first && !last && count <= MAX_CANDIDATES) return;
    const Keys keys = {first ? chunk : candidates.keys};
    const int* ids = first ? nullptr : candidates.ids;
    Threshold threshold = EVERYTHING;
    if (count > BUDGET_BLOCKS) threshold = find_threshold(keys, ids, count, last ? 0 : MAX_CANDIDATES, histogram, lane);
    if (last && !first) {
        store_in_order(candidates, count, state.blocks, threshold, histogram, list, lane);
        return;
    }
    const int taken = append(keys, ids, count, threshold, last ? nullptr : candidates.keys,
                             last ? list : candidates.ids, 0, histogram, lane);
    if (last || lane != 0) return;
    state.candidates = taken;
    state.bound(threshold.last == EVERYTHING.last ? 0u : threshold.key + 1u);  // later blocks lose against equal ones
}

// Called by a warp with head sums as score_blocks gives them: adds candidates to their rows' lists.
// list_of(row): the row's Candidates. buffer: an entry a sum in shared memory of this warp.
template <class ListOf>
__device__ __forceinline__ void keep_candidates(const Sums& sums, int first, int first_row, RowState* states,
                                                const ListOf& list_of, float2* buffer) {
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
    int all, place = lanes_below(__popc(reached), lane, all);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < SUM_ROWS; ++i)
#pragma unroll
        for (int j = 0; j < SUM_KEYS; ++j)
            if (reached >> (i * SUM_KEYS + j) & 1u)
                buffer[place++] = make_float2(sums[i][j], __int_as_float(first + g + 8 * j << 5 | row_of(i, t)));
    __syncwarp();
    for (int i = lane; i < all; i += 32) {
        const float2 one = buffer[i];
        const uint32_t key = key_of_sum(one.x);
        const int id = __float_as_int(one.y) >> 5, r = first_row + (__float_as_int(one.y) & 31);
        RowState& state = states[r];
        if (key < state.low || id >= state.blocks) continue;
        const int at = atomicAdd(&state.candidates, 1);
        const Candidates list = list_of(r);
        list.keys[at] = key;
        list.ids[at] = id;
    }
    __syncwarp();
}
