// Exact selection of the `count` best of n sort keys by (key descending, place ascending), by one thread block: short
// enough that every block of attention does it for itself. Code is kept small, since each instruction runs a few times
// only and comes from a cold cache.
//   The count-th largest key is searched between two bounds, one count of the whole block a step: the first steps guess
//   from mean and deviation and interpolate, later ones also halve the interval of keys and draw the bound to the nearest
//   key that exists, so that ties end the search; the last 64 candidates are ranked at once.
//   Of a long row only groups are looked at first: the `count` groups with the best maxima, ties by place, hold the
//   `count` best scores. What does not fit shared memory is selected from piece by piece, beside the best so far.
// Needs WARPS and THREADS of the including file.
#pragma once

#include "decode.cuh"

constexpr int MAX_QUADS = 32 * THREADS >= 2 * BUDGET_BLOCKS ? 8 : 16;  // of keys a thread
constexpr int MAX_KEYS = 4 * MAX_QUADS * THREADS;
constexpr int QUAD_PITCH = THREADS + 1;  // spreads both the writes and the reads of the keys over all banks
constexpr int CANDIDATES = 64;
constexpr float AIM = 12.f;  // places
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
    int counts[2][WARPS], totals[WARPS];
    uint32_t smallest[2][WARPS], largest[2][WARPS];
    float sums[WARPS], squares[WARPS];
    uint32_t lowest[WARPS], highest[WARPS];
    int candidates_found;
    uint32_t candidates[CANDIDATES];
    uint32_t last_key;  // of those selected
    int above, equal;   // candidates above it and equal to it
};

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

// Of scores from 0 on; NaN counts as 0. The sums may be anything for others: they steer the search and never decide.
struct Moments {
    float sum, squares;
    uint32_t lowest, highest;  // no key is outside
};

// The keys in shared memory: thread i owns places [4 * quads * i, +4 * quads). Past the end they are 0, as of NaN.
struct Keys {
    SelectScratch& s;
    int shift;  // quads = 1 << shift
    __device__ __forceinline__ Keys(SelectScratch& s, int n) : s(s), shift(0) {
        while (4 * THREADS << shift < n) ++shift;
    }
    __device__ __forceinline__ int first_place() const { return 4 * threadIdx.x << shift; }

    // Reads all keys; returns what this thread has seen.
    __device__ __forceinline__ Moments load(const KeySource& source) const {
        const int quads = 1 << shift;
        const bool whole = source.listed == 0, scattered = source.unit == 1 && !whole;
        Moments seen = {0.f, 0.f, ALL_LANES, 0u};
#pragma unroll 1
        for (int i = 0; i < quads; i += 4) {
            uint4 four[4];
            unsigned there = 0u;
#pragma unroll
            for (int b = 0; b < 4; ++b) {  // four loads before the first use
                const int place = 4 * ((i + b) * THREADS + static_cast<int>(threadIdx.x));
                const int unit = source.units[min(place / SCORE_TILE, BUDGET_BLOCKS - 1)];  // not set where all are read
                const int id = whole ? source.start + place : unit * SCORE_TILE + place % SCORE_TILE;
                const bool exists = i + b < quads && place < source.n && id < source.limit && !scattered;
                four[b] = make_uint4(0u, 0u, 0u, 0u);
                if (exists) four[b] = __ldcg(reinterpret_cast<const uint4*>(source.values + id));
                there |= static_cast<unsigned>(exists) << b;
            }
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                const int quad = (i + b) * THREADS + threadIdx.x;
                if (i + b < quads) s.quads[(quad & (quads - 1)) * QUAD_PITCH + (quad >> shift)] = four[b];
                const float x = __uint_as_float(four[b].x ^ 0x80000000u), y = __uint_as_float(four[b].y ^ 0x80000000u);
                const float z = __uint_as_float(four[b].z ^ 0x80000000u), w = __uint_as_float(four[b].w ^ 0x80000000u);
                seen.sum += (x + y) + (z + w);
                seen.squares += fmaf(x, x, y * y) + fmaf(z, z, w * w);
                const uint32_t low = min(min(four[b].x, four[b].y), min(four[b].z, four[b].w));
                const uint32_t high = max(max(four[b].x, four[b].y), max(four[b].z, four[b].w));
                if (there >> b & 1u) seen.lowest = min(seen.lowest, low);
                seen.highest = max(seen.highest, high);
            }
        }
        if (!scattered) return seen;
        __syncthreads();
#pragma unroll 1
        for (int place = threadIdx.x; place < source.n; place += THREADS) {
            const int quad = place / 4;
            reinterpret_cast<uint32_t*>(s.quads + (quad & (quads - 1)) * QUAD_PITCH + (quad >> shift))[place % 4] =
                __ldcg(source.values + source.id(place));
        }
        return {0.f, 0.f, 0u, ALL_LANES - 1u};
    }
    __device__ __forceinline__ uint32_t at(int i) const {  // of this thread's keys
        return reinterpret_cast<const uint32_t*>(s.quads + i / 4 * QUAD_PITCH + threadIdx.x)[i % 4];
    }
    // Marks this thread's keys in [from, to].
    __device__ __forceinline__ Marks mark(uint32_t from, uint32_t to) const {
        Marks marks = 0u;
        visit([&](uint32_t key, int i) { marks |= static_cast<Marks>(key >= from && key <= to) << i; });
        return marks;
    }
    // visit(key, place - first_place()) for this thread's keys, in order.
    template <class Visit>
    __device__ __forceinline__ void visit(const Visit& visit) const {
#pragma unroll 4
        for (int j = 0; j < 1 << shift; ++j) {
            const uint4 four = s.quads[j * QUAD_PITCH + threadIdx.x];
            visit(four.x, 4 * j);
            visit(four.y, 4 * j + 1);
            visit(four.z, 4 * j + 2);
            visit(four.w, 4 * j + 3);
        }
    }
};

// What is selected: all keys from `above` on, and the first `ties` places of the keys in [tied, above).
struct Cut {
    uint32_t above, tied;
    int ties;
};

// The standard normal value that a share `upper` of a distribution exceeds (Abramowitz and Stegun 26.2.23).
__device__ __forceinline__ float normal_quantile(float upper) {
    const float tail = fminf(upper, 1.f - upper), x = sqrtf(-2.f * __logf(tail));
    const float z = x - __fdividef(2.515517f + x * (0.802853f + x * 0.010328f),
                                   1.f + x * (1.432788f + x * (0.189269f + x * 0.001308f)));
    return upper < 0.5f ? z : -z;
}

// Where the count-th largest of n scores lies: guesses, but for the bounds.
struct Guess {
    float first;          // mean and deviation say so
    float score_a_place;  // how far scores of neighbouring ranks are apart there
    uint32_t lowest, highest;
};

// mine: of this thread's scores. Ends behind the barrier that makes the keys visible.
__device__ __forceinline__ Guess guess_from_moments(const Moments& mine, int n, int count, SelectScratch& s) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sum = warp_sum(mine.sum), squares = warp_sum(mine.squares);
    uint32_t lowest = __reduce_min_sync(ALL_LANES, mine.lowest), highest = __reduce_max_sync(ALL_LANES, mine.highest);
    if (lane == 0) {
        s.sums[warp] = sum;
        s.squares[warp] = squares;
        s.lowest[warp] = lowest;
        s.highest[warp] = highest;
    }
    if (threadIdx.x < CANDIDATES) s.candidates[threadIdx.x] = 0u;
    if (threadIdx.x == 0) s.candidates_found = 0;
    __syncthreads();
    sum = warp_sum(lane < WARPS ? s.sums[lane] : 0.f);
    squares = warp_sum(lane < WARPS ? s.squares[lane] : 0.f);
    lowest = __reduce_min_sync(ALL_LANES, lane < WARPS ? s.lowest[lane] : ALL_LANES);
    highest = __reduce_max_sync(ALL_LANES, lane < WARPS ? s.highest[lane] : 0u);
    const float z = normal_quantile(__fdividef(static_cast<float>(count), static_cast<float>(n)));
    const float mean = __fdividef(sum, static_cast<float>(n));
    const float deviation = sqrtf(fmaxf(__fdividef(squares, static_cast<float>(n)) - mean * mean, 0.f));
    const float density = n * 0.39894228f * __expf(-0.5f * z * z);  // places a deviation
    return {mean + z * deviation, __fdividef(deviation, density), lowest, highest};
}

// 0 < count < n. hint: a key that `count` keys reach, likely few more, or 0.
__device__ __forceinline__ Cut find_cut(const Keys& keys, const Guess& guess, int count, uint32_t hint) {
    SelectScratch& s = keys.s;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // The cut is in [low, high): at least `count` keys reach low, fewer reach high. Padding counts as long as low is the
    // lowest key, which only keeps the search going.
    const int all = 4 * THREADS << keys.shift;
    uint32_t low = guess.lowest, high = guess.highest + 1u;
    int from_low = all, from_high = 0;
    uint32_t pivot = hint == 0u ? score_key(guess.first) : hint;
#pragma unroll 1
    for (int step = 0; from_low != count && from_low - from_high > CANDIDATES && high - low > 1; ++step) {
        if (pivot <= low || pivot >= high || (step > 3 && step % 2 == 1)) pivot = low + (high - low) / 2;
        const bool bracketed = from_low != all && from_high != 0;
        const bool draw = step >= 3 || (step == 2 && !bracketed);  // to the nearest keys
        int reach = 0;
        uint32_t smallest = ALL_LANES, largest = 0u;  // key from pivot on; key in [low, pivot)
        keys.visit([&](uint32_t key, int) { reach += key >= pivot; });
        reach = __reduce_add_sync(ALL_LANES, reach);
        if (draw) {
            keys.visit([&](uint32_t key, int) {
                smallest = min(smallest, key >= pivot ? key : ALL_LANES);
                largest = max(largest, key >= pivot ? 0u : key);
            });
            smallest = __reduce_min_sync(ALL_LANES, smallest);
            largest = __reduce_max_sync(ALL_LANES, largest);
        }
        if (lane == 0) {
            s.counts[step & 1][warp] = reach;
            s.smallest[step & 1][warp] = smallest;
            s.largest[step & 1][warp] = largest;
        }
        __syncthreads();
        reach = __reduce_add_sync(ALL_LANES, lane < WARPS ? s.counts[step & 1][lane] : 0);
        if (draw) {
            smallest = __reduce_min_sync(ALL_LANES, lane < WARPS ? s.smallest[step & 1][lane] : ALL_LANES);
            largest = __reduce_max_sync(ALL_LANES, lane < WARPS ? s.largest[step & 1][lane] : 0u);
        }
        if (reach >= count) {
            low = draw ? smallest : pivot;
            from_low = reach;
        } else {
            high = draw ? largest + 1u : pivot;
            from_high = reach;
        }
        const float off = static_cast<float>(reach - count);
        if (step > 0 || (from_low != all && from_high != 0)) {  // a little past the place on the other side, so that both bounds close in
            const float share = __fdividef(static_cast<float>(from_low - count) + (off >= 0.f ? AIM : -AIM),
                                           static_cast<float>(from_low - from_high));
            pivot = low + static_cast<uint32_t>(static_cast<float>(high - low) * fminf(fmaxf(share, 0.01f), 0.99f));
        } else {  // beyond the place, where the other bound is expected
            pivot = score_key(score_of_key(pivot) + 1.5f * guess.score_a_place * off);
        }
    }
    if (from_low == count) return {low, low, 0};
    if (high - low <= 1) return {high, low, count - from_high};

#pragma unroll 1
    for (Marks marks = keys.mark(low, high - 1u); marks != 0u; marks &= marks - 1)
        s.candidates[atomicAdd(&s.candidates_found, 1)] = keys.at(lowest_mark(marks));
    __syncthreads();
    // Each candidate is ranked by THREADS / CANDIDATES neighbouring threads. The places that are left over hold 0: they
    // are above nothing, and equal to keys of 0 alone, which come last.
    constexpr int SHARE = THREADS / CANDIDATES;
    const int found = from_low - from_high, wanted = count - from_high, candidate = threadIdx.x / SHARE;
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
    if (candidate < found && above < wanted && wanted <= above + equal) {  // equal candidates write the same
        s.last_key = mine;
        s.above = above;
        s.equal = equal;
    }
    __syncthreads();
    const uint32_t key = s.last_key;
    return wanted == s.above + s.equal ? Cut{key, key, 0} : Cut{key + 1u, key, wanted - s.above};
}

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

// Calls emit(rank, place) for the selected places, at least those of ranks [from, to); ranks ascend with the places.
// Called by the whole block. Returns a key that `count` keys reach; hint: as in find_cut.
template <class Emit>
__device__ __forceinline__ uint32_t select_best(const KeySource& source, int count, uint32_t hint, SelectScratch& s,
                                                int from, int to, const Emit& emit) {
    const Keys keys(s, source.n);
    const Moments seen = keys.load(source);
    const Cut cut = find_cut(keys, guess_from_moments(seen, source.n, count, s), count, hint);
    Marks chosen = keys.mark(cut.above, ALL_LANES), tied = cut.ties > 0 ? keys.mark(cut.tied, cut.above - 1u) : 0u;
    const int before = sum_before(count_marks(chosen) << 16 | count_marks(tied), s.totals);
    const int tied_before = min(before & 0xffff, cut.ties);
    int rank = (before >> 16) + tied_before, take = cut.ties - tied_before;
    for (; tied != 0u && take > 0; tied &= tied - 1, --take) chosen |= tied & (~tied + 1u);
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
                                              SelectScratch& s, int from, int to, const Emit& emit) {
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
        reached = select_best(source, count, reached, s, last ? from : 0, last ? to : count, [&](int rank, int place) {
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
