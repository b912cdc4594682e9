// Exact selection of the `count` best of n sort keys by (key descending, place ascending), by one thread block: short
// enough that every block of attention does it for itself. Code is kept small, since each instruction runs a few times
// only and comes from a cold cache.
//   A histogram of the top 2^SPAN_BITS keys (the rest joins its lowest bin) finds the bin of the count-th largest key; a
// crowded bin is the range of the next one, until it is one key or is taken whole, or has so few that they are ranked.
//   Of a long row only groups are looked at first: the `count` groups with the best maxima, ties by place, hold the
//   `count` best scores. What does not fit shared memory is selected from piece by piece, beside the best so far.
// Needs WARPS and THREADS of the including file.
#pragma once

#include "decode.cuh"

constexpr int MAX_QUADS = 32 * THREADS >= 2 * BUDGET_BLOCKS ? 8 : 16;  // of keys a thread
constexpr int MAX_KEYS = 4 * MAX_QUADS * THREADS;
constexpr int QUAD_PITCH = THREADS + 1;  // spreads both the writes and the reads of the keys over all banks
constexpr int CANDIDATES = 64;
constexpr int BIN_BITS = 11;
constexpr int BINS = 1 << BIN_BITS;
constexpr int SPAN_BITS = 26;  // eight octaves of scores
constexpr unsigned ALL_LANES = 0xffffffffu;
static_assert(MAX_KEYS >= 2 * BUDGET_BLOCKS, "room for the best so far and as many more");

template <int QUADS>
struct MarksOf {
    typedef uint32_t type;
};
template <>
struct MarksOf<16> {
    typedef uint64_t type;
};
typedef MarksOf<MAX_QUADS>::type Marks;  // one bit for each key of a thread
__device__ __forceinline__ int count_marks(uint32_t marks) { return __popc(marks); }
__device__ __forceinline__ int count_marks(uint64_t marks) { return __popcll(marks); }
__device__ __forceinline__ int lowest_mark(uint32_t marks) { return __ffs(static_cast<int>(marks)) - 1; }
__device__ __forceinline__ int lowest_mark(uint64_t marks) { return __ffsll(static_cast<int64_t>(marks)) - 1; }

struct SelectScratch {
    uint4 quads[MAX_QUADS * QUAD_PITCH];
    int lists[2][BUDGET_BLOCKS];
    int totals[WARPS];
    uint32_t lowest[WARPS], highest[WARPS];
    int bin, above_bin, in_bin;
    int candidates_found;
    uint32_t candidates[CANDIDATES];
    uint32_t last_key;  // of those selected
    int above, equal;   // candidates above it and equal to it
};
typedef uint4 Histogram[BINS / 4];  // in shared memory as well; free before anything is emitted

// Sort keys in places [0, n), in the order of their ids: first those of the listed units, then those from id `start` on.
struct KeySource {
    const uint32_t* values;  // [limit], then 0 up to a multiple of 4; in global memory, 16-byte aligned
    const int* units;        // [listed / unit] in shared memory, ascending
    int unit;                // 1 or SCORE_TILE keys
    int listed;
    int start;
    int limit;
    int n;
    __device__ __forceinline__ int id(int place) const {
        if (place >= listed) return start + place - listed;
        return unit == 1 ? units[place] : units[place / SCORE_TILE] * SCORE_TILE + place % SCORE_TILE;
    }
};

struct Extremes {
    uint32_t lowest, highest;
};

// The keys in shared memory: thread i owns places [4 * quads * i, +4 * quads). Past the end they are 0, as of NaN.
struct Keys {
    SelectScratch& s;
    int shift;  // quads = 1 << shift
    __device__ __forceinline__ Keys(SelectScratch& s, int n) : s(s), shift(0) {
        while (4 * THREADS << shift < n) ++shift;
    }
    __device__ __forceinline__ int first_place() const { return 4 * threadIdx.x << shift; }

    // Reads all keys; returns the extremes of those that this thread has seen.
    __device__ __forceinline__ Extremes load(const KeySource& source) const {
        const int quads = 1 << shift;
        const bool whole = source.listed == 0, scattered = source.unit == 1 && !whole;
        Extremes seen = {ALL_LANES, 0u};
        const auto see = [&](uint32_t key) {
            seen.lowest = min(seen.lowest, key);
            seen.highest = max(seen.highest, key);
        };
#pragma unroll 1
        for (int i = 0; i < quads; i += 8) {
            uint4 eight[8];
            unsigned there = 0u;
#pragma unroll
            for (int b = 0; b < 8; ++b) {  // eight loads before the first use
                const int place = 4 * ((i + b) * THREADS + static_cast<int>(threadIdx.x));
                const int unit = source.units[min(place / SCORE_TILE, BUDGET_BLOCKS - 1)];  // not set where all are read
                const int id = whole ? source.start + place : unit * SCORE_TILE + place % SCORE_TILE;
                const bool exists = i + b < quads && place < source.n && id < source.limit && !scattered;
                eight[b] = make_uint4(0u, 0u, 0u, 0u);
                if (exists) eight[b] = __ldcg(reinterpret_cast<const uint4*>(source.values + id));
                there |= static_cast<unsigned>(exists) << b;
            }
#pragma unroll
            for (int b = 0; b < 8; ++b) {
                const int quad = (i + b) * THREADS + threadIdx.x;
                if (i + b < quads) s.quads[(quad & (quads - 1)) * QUAD_PITCH + (quad >> shift)] = eight[b];
                if (there >> b & 1u) {
                    see(min(min(eight[b].x, eight[b].y), min(eight[b].z, eight[b].w)));
                    see(max(max(eight[b].x, eight[b].y), max(eight[b].z, eight[b].w)));
                }
            }
        }
        if (!scattered) return seen;
        __syncthreads();
#pragma unroll 1
        for (int place = threadIdx.x; place < source.n; place += THREADS) {
            const int quad = place / 4;
            const uint32_t key = __ldcg(source.values + source.id(place));
            reinterpret_cast<uint32_t*>(s.quads + (quad & (quads - 1)) * QUAD_PITCH + (quad >> shift))[place % 4] = key;
            see(key);
        }
        return seen;
    }
    __device__ __forceinline__ uint32_t at(int i) const {  // of this thread's keys
        return reinterpret_cast<const uint32_t*>(s.quads + i / 4 * QUAD_PITCH + threadIdx.x)[i % 4];
    }
    // Marks this thread's keys in [from, to].
    __device__ __forceinline__ Marks mark(uint32_t from, uint32_t to) const {
        Marks marks = 0u;
        int place = 0;
        visit_quads([&](const uint4& four) {
            const unsigned here = (four.x >= from && four.x <= to) | (four.y >= from && four.y <= to) << 1 |
                                  (four.z >= from && four.z <= to) << 2 | (four.w >= from && four.w <= to) << 3;
            marks |= static_cast<Marks>(here) << place;
            place += 4;
        });
        return marks;
    }
    template <class Visit>
    __device__ __forceinline__ void visit_quads(const Visit& visit) const {
#pragma unroll 2
        for (int j = 0; j < 1 << shift; ++j) visit(s.quads[j * QUAD_PITCH + threadIdx.x]);
    }
};

// What is selected: all keys from `above` on, and the first `ties` places of the keys in [tied, above).
struct Cut {
    uint32_t above, tied;
    int ties;
};

// Exclusive sum over the block of one int a thread. totals: [WARPS], not in use.
__device__ __forceinline__ int sum_before(int value, int* totals) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int inclusive = value;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const int other = __shfl_up_sync(ALL_LANES, inclusive, step);
        if (lane >= step) inclusive += other;
    }
    if (lane == 31) totals[warp] = inclusive;
    __syncthreads();
    return __reduce_add_sync(ALL_LANES, lane < warp ? totals[lane] : 0) + inclusive - value;
}

// The extremes over the block, `mine` being those of what this thread has seen. Has a barrier in it.
__device__ __forceinline__ Extremes all_extremes(const Extremes& mine, SelectScratch& s) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t lowest = __reduce_min_sync(ALL_LANES, mine.lowest), highest = __reduce_max_sync(ALL_LANES, mine.highest);
    if (lane == 0) {
        s.lowest[warp] = lowest;
        s.highest[warp] = highest;
    }
    __syncthreads();
    lowest = __reduce_min_sync(ALL_LANES, lane < WARPS ? s.lowest[lane] : ALL_LANES);
    highest = __reduce_max_sync(ALL_LANES, lane < WARPS ? s.highest[lane] : 0u);
    return {lowest, highest};
}

// The cut that takes `count` of the keys, all of which but padding are in [low, high], or so many of those that are.
__device__ __forceinline__ Cut find_cut(const Keys& keys, Histogram& histogram, uint32_t low, uint32_t high, int count) {
    SelectScratch& s = keys.s;
    constexpr int QUADS = BINS / 4 / THREADS;  // of bins, a thread
    static_assert(QUADS >= 1, "a quad of bins a thread");
    const uint32_t top = high > (1u << SPAN_BITS) ? high - ((1u << SPAN_BITS) - 1u) : 0u;
    uint32_t floor = max(low, top);  // bins of equal width start here; what is lower joins bin 0
    int wanted = count, inside = CANDIDATES + 1;
    bool crowd = false;
#pragma unroll 1
    while (low < high && inside > CANDIDATES) {
        if (crowd) {  // often of one key
            Extremes seen = {ALL_LANES, 0u};
            keys.visit_quads([&](const uint4& four) {
                const uint32_t key[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const bool in_range = key[i] >= low && key[i] <= high;
                    seen.lowest = min(seen.lowest, in_range ? key[i] : ALL_LANES);
                    seen.highest = max(seen.highest, in_range ? key[i] : 0u);
                }
            });
            seen = all_extremes(seen, s);
            floor = low = seen.lowest;
            high = seen.highest;
            if (low == high) break;
        }
        crowd = true;
        const int shift = max(0, 32 - __clz(high - floor) - BIN_BITS);
        keys.visit_quads([&](const uint4& four) {
            const uint32_t key[4] = {four.x, four.y, four.z, four.w};
            uint32_t bins[4];
            bool in_range[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                in_range[i] = key[i] >= low && key[i] <= high;
                bins[i] = max(key[i], floor) - floor >> shift;
            }
            count_bins(reinterpret_cast<uint32_t*>(histogram), bins, in_range, threadIdx.x % 32);
        });
        __syncthreads();
        uint4 own[QUADS];  // descending: thread 0 has the top bins
        int sum = 0;
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            own[i] = histogram[BINS / 4 - 1 - (static_cast<int>(threadIdx.x) * QUADS + i)];
            sum += (own[i].x + own[i].y) + (own[i].z + own[i].w);
            histogram[BINS / 4 - 1 - (static_cast<int>(threadIdx.x) * QUADS + i)] = make_uint4(0, 0, 0, 0);
        }
        int above = sum_before(sum, s.totals);
        if (above < wanted && wanted <= above + sum) {
            int bin = BINS - 1 - static_cast<int>(threadIdx.x) * QUADS * 4, found = -1, in_found = 0;
#pragma unroll
            for (int i = 0; i < QUADS * 4; ++i) {
                const uint4& four = own[i / 4];
                const int here = i % 4 == 0 ? four.w : i % 4 == 1 ? four.z : i % 4 == 2 ? four.y : four.x;
                if (found >= 0) continue;
                if (above + here >= wanted) found = bin - i, in_found = here;
                else above += here;
            }
            s.bin = found;
            s.above_bin = above;
            s.in_bin = in_found;
        }
        __syncthreads();
        const uint32_t from = floor + (static_cast<uint32_t>(s.bin) << shift);
        high = min(high - from, (1u << shift) - 1u) + from;  // and never wraps
        if (s.bin > 0) low = from;
        floor = low;
        wanted -= s.above_bin;
        inside = s.in_bin;
        if (wanted == inside) return {low, low, 0};
    }
    if (low == high) return {high + 1u, low, wanted};

#pragma unroll 1
    for (Marks marks = keys.mark(low, high); marks != 0u; marks &= marks - 1)
        s.candidates[atomicAdd(&s.candidates_found, 1)] = keys.at(lowest_mark(marks));
    __syncthreads();
    // Each candidate is ranked by THREADS / CANDIDATES neighbouring threads. The places that are left over hold 0: they
    // are above nothing, and equal to keys of 0 alone, which come last.
    constexpr int SHARE = THREADS / CANDIDATES;
    const int candidate = threadIdx.x / SHARE;
    const uint32_t mine = s.candidates[candidate];
    int ranked = 0;  // above * 2^16 + equal
#pragma unroll 4
    for (int i = threadIdx.x % SHARE; i < CANDIDATES; i += SHARE) {
        const uint32_t other = s.candidates[i];
        ranked += other > mine ? 1 << 16 : other == mine ? 1 : 0;
    }
#pragma unroll
    for (int step = SHARE / 2; step > 0; step >>= 1) ranked += __shfl_xor_sync(ALL_LANES, ranked, step);
    const int above = ranked >> 16, equal = ranked & 0xffff;
    if (candidate < inside && above < wanted && wanted <= above + equal) {  // equal candidates write the same
        s.last_key = mine;
        s.above = above;
        s.equal = equal;
    }
    __syncthreads();
    const uint32_t key = s.last_key;
    return wanted == s.above + s.equal ? Cut{key, key, 0} : Cut{key + 1u, key, wanted - s.above};
}

// Calls emit(rank, place) for the selected places, at least those of ranks [from, to); ranks ascend with the places.
// Called by the whole block. Returns a key that `count` keys reach; hint: such a key, or 0. 0 < count < n.
template <class Emit>
__device__ __forceinline__ uint32_t select_best(const KeySource& source, int count, uint32_t hint, SelectScratch& s,
                                                Histogram& histogram, int from, int to, const Emit& emit) {
    const Keys keys(s, source.n);
    for (int i = threadIdx.x; i < BINS / 4; i += THREADS) histogram[i] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x < CANDIDATES) s.candidates[threadIdx.x] = 0u;
    if (threadIdx.x == 0) s.candidates_found = 0;
    const Extremes all = all_extremes(keys.load(source), s);  // its barrier makes all of that visible
    const Cut cut = find_cut(keys, histogram, max(all.lowest, hint), all.highest, count);
    Marks chosen = keys.mark(cut.above, ALL_LANES), tied = cut.ties > 0 ? keys.mark(cut.tied, cut.above - 1u) : 0u;
    const int before = sum_before(count_marks(chosen) << 16 | count_marks(tied), s.totals);
    const int tied_before = min(before & 0xffff, cut.ties);
    int rank = (before >> 16) + tied_before, take = cut.ties - tied_before;
    if (take >= count_marks(tied)) {
        chosen |= tied;
    } else {
        for (; take > 0; tied &= tied - 1, --take) chosen |= tied & (~tied + 1u);
    }
    // Where few threads have many, their whole warp serves them, a mark a lane.
    const int lane = threadIdx.x % 32;
    uint32_t heavy = __ballot_sync(ALL_LANES, count_marks(chosen) > 4);
    if (__popc(heavy) >= __reduce_max_sync(ALL_LANES, count_marks(chosen))) heavy = 0u;
#pragma unroll 1
    for (; heavy != 0u; heavy &= heavy - 1) {
        const int owner = lowest_mark(heavy), first = __shfl_sync(ALL_LANES, keys.first_place(), owner);
        int next = __shfl_sync(ALL_LANES, rank, owner);
#pragma unroll
        for (int word = 0; word < static_cast<int>(sizeof(Marks)) / 4; ++word) {
            const uint32_t marks = __shfl_sync(ALL_LANES, static_cast<uint32_t>(chosen >> 32 * word), owner);
            const int own = next + __popc(marks & ((1u << lane) - 1u));
            if ((marks >> lane & 1u) && own >= from && own < to) emit(own, first + 32 * word + lane);
            next += __popc(marks);
        }
        if (lane == owner) chosen = 0u;
    }
    if (rank < to)
#pragma unroll 1
        for (; chosen != 0u; chosen &= chosen - 1, ++rank)
            if (rank >= from) emit(rank, keys.first_place() + lowest_mark(chosen));
    return cut.ties > 0 ? cut.tied : cut.above;
}

// Calls emit(rank, id) for the `count` best of a row's n keys, at least for ranks [from, to); ranks ascend with the ids.
// Called by the whole block; ends without a barrier.
template <class Emit>
__device__ __forceinline__ void select_blocks(const uint32_t* scores, const uint32_t* maxima, int n, int count,
                                              SelectScratch& s, Histogram& histogram, int from, int to,
                                              const Emit& emit) {
    const int groups = (n + SCORE_TILE - 1) / SCORE_TILE;
    bool grouped = n > MAX_KEYS && count * SCORE_TILE <= MAX_KEYS;  // more groups than `count`, then
    KeySource source = {grouped ? maxima : scores, s.lists[0], 1, 0, 0, grouped ? groups : n, 0};
    uint32_t reached = 0u;
#pragma unroll 1
    for (int turn = 1;; turn ^= 1) {
        const int left = source.limit - source.start, room = MAX_KEYS - source.listed;
        const int more = left <= room ? left : room & ~3;
        source.n = source.listed + more;
        const bool last = more == left && !grouped;
        reached = select_best(source, count, reached, s, histogram, last ? from : 0, last ? to : count, [&](int rank, int place) {
            const int id = source.id(place);
            if (last) emit(rank, id);
            else s.lists[turn][rank] = id;
        });
        if (last) return;
        __syncthreads();
        source.units = s.lists[turn];
        if (more < left) {
            source.listed = count;
            source.start += more;
        } else {  // from the best groups to their scores
            grouped = false;
            source = {scores, s.lists[turn], SCORE_TILE, count * SCORE_TILE, n, n, 0};
        }
    }
}
