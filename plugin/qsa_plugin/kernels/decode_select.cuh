// Exact selection of the `count` best of n scores by (score descending, place ascending), by one thread block: short
// enough that every block of attention does it for itself.
//   The keys stay in registers. The count-th largest is searched between two bounds, one count of the whole block a
//   step: the first steps guess from mean and deviation and interpolate, later ones also halve the interval of keys and draw
//   the bound to the nearest key that exists, so that ties end the search; the last 32 candidates are ranked at once.
//   Of a long row only groups are looked at first: the `count` groups with the best maxima, ties by place, hold the
//   `count` best scores. What does not fit the registers is selected from piece by piece, beside the best so far.
// Needs WARPS and THREADS of the including file.
#pragma once

#include "decode.cuh"

constexpr int MAX_QUADS = 32 * THREADS >= 2 * BUDGET_BLOCKS ? 8 : 16;  // of keys a thread
constexpr int MAX_KEYS = 4 * MAX_QUADS * THREADS;
static_assert(MAX_KEYS >= 2 * BUDGET_BLOCKS, "room for the best so far and as many more");
constexpr int CANDIDATES = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

struct SelectScratch {
    int counts[2][WARPS], totals[2][WARPS];
    uint32_t smallest[2][WARPS], largest[2][WARPS];
    float sums[WARPS], squares[WARPS];
    int candidates_found;
    uint32_t candidates[CANDIDATES];
};

// Scores in places [0, n), in the order of their ids: first those of the listed units, then those from id `start` on.
struct ScoreSource {
    const float* values;  // [limit, rounded up to a multiple of 4] in global memory, 16-byte aligned
    const int* units;     // [listed / unit] in shared memory, ascending
    int unit;             // 1 or SCORE_TILE scores
    int listed;
    int start;
    int limit;
    int n;
    __device__ __forceinline__ int id(int place) const {
        return place >= listed ? start + place - listed : unit == 1 ? units[place]
                                                                    : units[place / SCORE_TILE] * SCORE_TILE + place % SCORE_TILE;
    }
};

// One thread's keys: quad j of lane l of warp w is at place ((w * quads + j) * 32 + l) * 4; 0, as of NaN, past the end.
struct Keys {
    uint32_t key[MAX_QUADS][4];
    int quads;
    float sum, squares;  // of this thread's scores; NaN counts as 0

    __device__ __forceinline__ explicit Keys(const ScoreSource& source)
        : quads((source.n + 4 * THREADS - 1) / (4 * THREADS)), sum(0.f), squares(0.f) {
        float4 four[MAX_QUADS];
        int valid[MAX_QUADS];
        const bool scattered = source.listed > 0 && source.unit == 1;
#pragma unroll
        for (int j = 0; j < MAX_QUADS; ++j) {  // all loads before the first use
            four[j] = make_float4(0.f, 0.f, 0.f, 0.f);
            valid[j] = 0;
            if (j >= quads || place(j) >= source.n) continue;
            const int first = source.id(place(j));
            valid[j] = min(scattered ? source.n - place(j) : source.limit - first, 4);
            if (!scattered) four[j] = __ldcg(reinterpret_cast<const float4*>(source.values + first));
        }
        if (scattered) {
#pragma unroll
            for (int j = 0; j < MAX_QUADS; ++j) {
                if (valid[j] > 0) four[j].x = __ldcg(source.values + source.id(place(j)));
                if (valid[j] > 1) four[j].y = __ldcg(source.values + source.id(place(j) + 1));
                if (valid[j] > 2) four[j].z = __ldcg(source.values + source.id(place(j) + 2));
                if (valid[j] > 3) four[j].w = __ldcg(source.values + source.id(place(j) + 3));
            }
        }
#pragma unroll
        for (int j = 0; j < MAX_QUADS; ++j) {
            if (j >= quads) break;
            const float scores[4] = {four[j].x, four[j].y, four[j].z, four[j].w};
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                key[j][e] = e < valid[j] ? score_key(scores[e]) : 0u;
                const float score = e < valid[j] ? fmaxf(scores[e], 0.f) : 0.f;
                sum += score;
                squares = fmaf(score, score, squares);
            }
        }
    }
    __device__ __forceinline__ int place(int j) const {
        return ((threadIdx.x / 32 * quads + j) * 32 + threadIdx.x % 32) * 4;
    }
    template <class Visit>
    __device__ __forceinline__ void visit(const Visit& visit) const {
#pragma unroll
        for (int j = 0; j < MAX_QUADS; ++j) {
            if (j >= quads) break;
#pragma unroll
            for (int e = 0; e < 4; ++e) visit(key[j][e], 4 * j + e);
        }
    }
    // Marks the keys in [from, to]: bit 4 * (j % 8) + e of word j / 8.
    __device__ __forceinline__ void mark(uint32_t (&marks)[MAX_QUADS / 8], uint32_t from, uint32_t to) const {
#pragma unroll
        for (int word = 0; word < MAX_QUADS / 8; ++word) marks[word] = 0u;
        visit([&](uint32_t key, int i) { marks[i / 32] |= (key >= from && key <= to ? 1u : 0u) << i % 32; });
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

// Guesses where the count-th largest of n scores lies. They steer the search and never decide.
struct Guess {
    float first;          // mean and deviation say so
    float score_a_place;  // how far scores of neighbouring ranks are apart there
};

__device__ __forceinline__ Guess guess_from_moments(const Keys& keys, const ScoreSource& source, int count,
                                                    SelectScratch& s) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sum = warp_sum(keys.sum), squares = warp_sum(keys.squares);
    if (lane == 0) {
        s.sums[warp] = sum;
        s.squares[warp] = squares;
    }
    if (threadIdx.x == 0) s.candidates_found = 0;
    const float n = static_cast<float>(source.n), z = normal_quantile(__fdividef(static_cast<float>(count), n));
    __syncthreads();
    sum = squares = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        sum += s.sums[w];
        squares += s.squares[w];
    }
    const float mean = __fdividef(sum, n), deviation = sqrtf(fmaxf(__fdividef(squares, n) - mean * mean, 0.f));
    const float density = n * 0.39894228f * __expf(-0.5f * z * z);  // places a deviation
    return {mean + z * deviation, __fdividef(deviation, density)};
}

// 0 < count < n. hint: a key that `count` keys reach, likely few more, or 0. Ends behind a barrier since the last use of the scratch but `candidates`.
__device__ __forceinline__ Cut find_cut(const Keys& keys, const ScoreSource& source, int count, uint32_t hint,
                                        SelectScratch& s) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Guess guess = guess_from_moments(keys, source, count, s);
    uint32_t low = 0u, high = ALL_LANES;                      // the cut is in [low, high): at least `count` keys reach low,
    int from_low = 4 * THREADS * keys.quads;                  // fewer reach high
    int from_high = 0;
    float pivot_score = hint == 0u ? guess.first : score_of_key(hint);
#pragma unroll 1
    for (int step = 0; from_low != count && from_low - from_high > CANDIDATES && high - low > 1; ++step) {
        uint32_t pivot = score_key(pivot_score);  // whatever the guess was, NaN too
        if (pivot <= low || pivot >= high || (step > 3 && step % 2 == 1)) pivot = low + (high - low) / 2;
        const bool draw = step >= 3;  // to the nearest keys
        int reach = 0;
        uint32_t smallest = ALL_LANES, largest = 0u;  // key from pivot on; key in [low, pivot)
        keys.visit([&](uint32_t key, int) { reach += key >= pivot; });
        reach = __reduce_add_sync(ALL_LANES, reach);
        if (draw) {
            keys.visit([&](uint32_t key, int) {
                if (key >= pivot) smallest = min(smallest, key);
                else largest = max(largest, key);
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
        const bool bracketed = low != 0u && from_high != 0;
        const float low_score = score_of_key(low), missing = static_cast<float>(from_low - count);
        if (bracketed) {
            pivot_score = low_score + (score_of_key(high) - low_score) *
                                          __fdividef(missing, static_cast<float>(from_low - from_high));
        } else {  // beyond the place where the other bound is expected
            const float off = static_cast<float>(reach - count);
            pivot_score = score_of_key(pivot) + (1.5f + step) * guess.score_a_place * off;
        }
    }
    if (from_low == count) return {low, low, 0};
    if (high - low <= 1) return {high, low, count - from_high};

    uint32_t marks[MAX_QUADS / 8];
    keys.mark(marks, low, high - 1u);
#pragma unroll
    for (int word = 0; word < MAX_QUADS / 8; ++word)
#pragma unroll 1
        for (uint32_t rest = marks[word]; rest != 0u; rest &= rest - 1) {
            const int wanted = 32 * word + __ffs(static_cast<int>(rest)) - 1;
            uint32_t mine = 0u;
            keys.visit([&](uint32_t key, int i) { mine = i == wanted ? key : mine; });
            s.candidates[atomicAdd(&s.candidates_found, 1)] = mine;
        }
    __syncthreads();
    const int found = from_low - from_high, wanted = count - from_high;
    const uint32_t mine = lane < found ? s.candidates[lane] : 0u;
    int above = 0, equal = 0;
#pragma unroll
    for (int i = 0; i < CANDIDATES; ++i) {
        const uint32_t other = __shfl_sync(ALL_LANES, mine, i);
        above += other > mine;
        equal += other == mine;  // too many where mine is 0, which changes nothing: then keys of 0 lie past `wanted`
    }
    const unsigned last = __ballot_sync(ALL_LANES, lane < found && above < wanted && wanted <= above + equal);
    const int leader = __ffs(static_cast<int>(last)) - 1;  // equal keys may give several
    const uint32_t key = __shfl_sync(ALL_LANES, mine, leader);
    above = __shfl_sync(ALL_LANES, above, leader);
    equal = __shfl_sync(ALL_LANES, equal, leader);
    return wanted == above + equal ? Cut{key, key, 0} : Cut{key + 1u, key, wanted - above};
}

// Counts marked keys in the order of their places.
struct Ranks {
    int before[MAX_QUADS];          // how many lie in front of this thread's quad
    int of_warp, of_next_warp;      // in front of this warp and of the next
};

// totals: [WARPS], not in use.
__device__ __forceinline__ void rank_marked(Ranks& ranks, const uint32_t (&marks)[MAX_QUADS / 8], int quads, int* totals) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int total = 0;
#pragma unroll
    for (int word = 0; word < MAX_QUADS / 4; ++word) {  // four quads at a time, 8 bits each: at most 128
        if (4 * word >= quads) break;
        uint32_t mine = 0u;
#pragma unroll
        for (int j = 0; j < 4; ++j) mine |= __popc(marks[word / 2] >> (16 * (word % 2) + 4 * j) & 15u) << 8 * j;
        uint32_t inclusive = mine;
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            const uint32_t other = __shfl_up_sync(ALL_LANES, inclusive, step);
            if (lane >= step) inclusive += other;
        }
        const uint32_t all = __shfl_sync(ALL_LANES, inclusive, 31);
        inclusive -= mine;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            ranks.before[4 * word + j] = total + (inclusive >> 8 * j & 0xff);
            total += all >> 8 * j & 0xff;
        }
    }
    if (lane == 0) totals[warp] = total;
    __syncthreads();
    ranks.of_warp = __reduce_add_sync(ALL_LANES, lane < warp ? totals[lane] : 0);
    ranks.of_next_warp = ranks.of_warp + total;
#pragma unroll
    for (int j = 0; j < MAX_QUADS; ++j) ranks.before[j] = j < quads ? ranks.before[j] + ranks.of_warp : 0;
}

// Calls emit(rank, place) for the selected places, at least those of ranks [from, to); ranks ascend with the places.
// Called by the whole block. Returns a key that `count` keys reach; hint: as in find_cut.
template <class Emit>
__device__ __forceinline__ uint32_t select_best(const ScoreSource& source, int count, uint32_t hint, SelectScratch& s,
                                                int from, int to, const Emit& emit) {
    const Keys keys(source);
    const Cut cut = find_cut(keys, source, count, hint, s);
    uint32_t chosen[MAX_QUADS / 8];
    Ranks ranks;
    keys.mark(chosen, cut.above, ALL_LANES);
    if (cut.ties > 0) {
        uint32_t tied[MAX_QUADS / 8];
        keys.mark(tied, cut.tied, cut.above - 1u);
        rank_marked(ranks, tied, keys.quads, s.totals[0]);
#pragma unroll
        for (int j = 0; j < MAX_QUADS; ++j) {
            uint32_t bits = tied[j / 8] >> j % 8 * 4 & 15u;
            for (int left = cut.ties - ranks.before[j]; bits != 0u && left > 0; --left, bits &= bits - 1)
                chosen[j / 8] |= (bits & -bits) << j % 8 * 4;
        }
    }
    rank_marked(ranks, chosen, keys.quads, s.totals[1]);
    const uint32_t reached = cut.ties > 0 ? cut.tied : cut.above;
    if (ranks.of_warp >= to || ranks.of_next_warp <= from) return reached;
#pragma unroll
    for (int word = 0; word < MAX_QUADS / 8; ++word)
#pragma unroll 1
        for (uint32_t rest = chosen[word]; rest != 0u; rest &= rest - 1) {
            const int bit = __ffs(static_cast<int>(rest)) - 1, quad = bit / 4;
            int rank = 0;
#pragma unroll
            for (int j = 0; j < 8; ++j) rank = j == quad ? ranks.before[8 * word + j] : rank;
            rank += __popc(chosen[word] & ((1u << bit) - 1u) & 15u << 4 * quad);
            emit(rank, keys.place(8 * word + quad) + bit % 4);
        }
    return reached;
}

// Calls emit(rank, id) for the `count` best of a row's n scores, at least for ranks [from, to); ranks ascend with the ids.
// lists: two of `count` ints in shared memory. Called by the whole block; ends without a barrier.
template <class Emit>
__device__ __forceinline__ void select_blocks(const float* scores, const float* maxima, int n, int count,
                                              int (*lists)[BUDGET_BLOCKS], SelectScratch& s, int from, int to,
                                              const Emit& emit) {
    const int groups = (n + SCORE_TILE - 1) / SCORE_TILE;
    bool grouped = n > MAX_KEYS && count * SCORE_TILE <= MAX_KEYS;  // more groups than `count`, then
    ScoreSource source = {grouped ? maxima : scores, lists[0], 1, 0, 0, grouped ? groups : n, 0};
    uint32_t reached = 0u;
#pragma unroll 1
    for (int turn = 1;; turn ^= 1) {
        const int left = source.limit - source.start, room = MAX_KEYS - source.listed;
        const int more = left <= room ? left : room & ~3;
        source.n = source.listed + more;
        const bool last = more == left && !grouped;
        reached = select_best(source, count, reached, s, last ? from : 0, last ? to : count, [&](int rank, int place) {
            if (last) emit(rank, source.id(place));
            else lists[turn][rank] = source.id(place);
        });
        if (last) return;
        __syncthreads();
        source.units = lists[turn];
        if (more < left) {
            source.listed = count;
            source.start += more;
        } else {  // from the best groups to their scores
            grouped = false;
            source = {scores, lists[turn], SCORE_TILE, count * SCORE_TILE, n, n, 0};
        }
    }
}
