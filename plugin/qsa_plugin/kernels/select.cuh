// Exact selection of the `count` largest of n scores by (score descending, id ascending), by one block of 1024 threads.
//   One histogram of 2048 bins of equal width between the smallest and the largest score finds the class that the last
//   place falls in; its few members are ranked by counting. Where scores crowd in one bin, or are not finite, radix
//   passes over the bits of the sort keys do the same in three steps. Both are exact; nothing can overflow.
//   Of a long row most scores are set aside first, by a bound that enough scores reach.
#pragma once

#include "common.cuh"

#ifndef SELECT_QUADS
#define SELECT_QUADS 4  // quads of scores that a thread holds at most: 4, or 8 where shared memory is larger
#endif
constexpr int SELECT_THREADS = 1024;
constexpr int SELECT_BINS = 2 * SELECT_THREADS;
constexpr int MAX_CANDIDATES = SELECT_THREADS;    // one a thread
constexpr int MAX_SURVIVORS = 2 * SELECT_THREADS;
constexpr int QUAD_PITCH = SELECT_THREADS + 1;    // quads; spreads both the writes and the reads below over all banks

struct SelectScratch {
    int histogram[SELECT_BINS];
    uint32_t candidate_keys[MAX_CANDIDATES];
    int candidates;
    int warp_sums[32];
    uint32_t warp_lowest[32];   // sort keys
    uint32_t warp_highest[32];
    uint32_t prefix;  // the bin; in the radix passes, the leading bits found so far
    int remaining;    // places left for the class
    int class_size;
    int ties;
    uint32_t last_key;
    int round_total;
};

// The scores of one row. They are worked on in rounds of as many as shared memory holds; in a round thread i owns
// 4 * quads consecutive scores, its word. A row of one round is read from global memory once; of a longer row every
// sweep reads its words again.
struct ScoreRow {
    const float* scores;  // [n], 16-byte aligned
    float4* shared;       // [SELECT_QUADS * QUAD_PITCH]
    int n;
    int quads;            // a power of two
    __device__ ScoreRow(const float* scores, float4* shared, int n) : scores(scores), shared(shared), n(n), quads(1) {
        while (quads < SELECT_QUADS && quads * 4 * SELECT_THREADS < n) quads *= 2;
    }
    __device__ int round() const { return 4 * quads * SELECT_THREADS; }
    __device__ int word(int base) const { return base + 4 * quads * threadIdx.x; }

    // Scores i .. i+3; nothing is read past n.
    __device__ float4 quad(int i) const {
        if (i + 3 < n) return __ldcg(reinterpret_cast<const float4*>(scores + i));
        return make_float4(i < n ? scores[i] : 0.f, i + 1 < n ? scores[i + 1] : 0.f, i + 2 < n ? scores[i + 2] : 0.f, 0.f);
    }

    // Reads a row of one round, coalesced; returns the largest score that this thread has read, or more where it has
    // read the row's end. Ends without a barrier.
    __device__ float load() const {
        float highest = minus_infinity();
        if (n > round()) return highest;
#pragma unroll 4
        for (int i = 4 * threadIdx.x; i < n; i += 4 * SELECT_THREADS) {
            const float4 four = quad(i);
            shared[(i / 4 & (quads - 1)) * QUAD_PITCH + i / 4 / quads] = four;
            highest = fmaxf(fmaxf(highest, fmaxf(four.x, four.y)), fmaxf(four.z, four.w));
        }
        return highest;
    }

    // One score of this thread's word, in a row of one round.
    __device__ float at(int place) const {
        return reinterpret_cast<const float*>(shared + (place / 4) * QUAD_PITCH + threadIdx.x)[place % 4];
    }

    // visit(score, place in the word) for this thread's word of one round.
    template <class Visit>
    __device__ void visit_word(int base, const Visit& visit) const {
        const int first = word(base), here = min(n - first, 4 * quads);
        const bool one_round = n <= round();
#pragma unroll 1
        for (int j = 0; 4 * j < here; ++j) {
            const float4 four = one_round ? shared[j * QUAD_PITCH + threadIdx.x] : quad(first + 4 * j);
            visit(four.x, 4 * j);
            if (4 * j + 1 < here) visit(four.y, 4 * j + 1);
            if (4 * j + 2 < here) visit(four.z, 4 * j + 2);
            if (4 * j + 3 < here) visit(four.w, 4 * j + 3);
        }
    }
    template <class Visit>
    __device__ void visit_all(const Visit& visit) const {
#pragma unroll 1
        for (int base = 0; base < n; base += round()) visit_word(base, [&](float score, int) { visit(score); });
    }
};

// Where the selection ends: scores above `score` are in, and the first `ties` ids of those equal to it. NaN is lowest.
struct Threshold {
    float score;
    int ties;
};

// Exclusive sum over the block of one int a thread. Callers have a barrier between two uses.
__device__ __forceinline__ int block_exclusive_sum(int value, int* warp_sums) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int inclusive = value;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const int other = __shfl_up_sync(0xffffffffu, inclusive, step);
        if (lane >= step) inclusive += other;
    }
    if (lane == 31) warp_sums[warp] = inclusive;
    __syncthreads();
    return __reduce_add_sync(0xffffffffu, lane < warp ? warp_sums[lane] : 0) + inclusive - value;
}

// Adds this thread's score to its bin. Where many threads of the warp meet in one bin, they add up first: atomics on
// one address run one after the other, and tied scores would cost ten times what spread ones do.
__device__ __forceinline__ void count_in_bin(int* histogram, int bin) {
    const int lane = threadIdx.x % 32;
    const unsigned active = __activemask();
    unsigned left = active;
    for (int group = 0; group < 6; ++group) {
        const int leader = __ffs(static_cast<int>(left)) - 1;
        const unsigned same = __ballot_sync(active, bin == __shfl_sync(active, bin, leader)) & left;
        if (group == 0 && __popc(same) < 4) break;  // not crowded
        if (lane == leader) atomicAdd(&histogram[bin], __popc(same));
        left &= ~same;
        if (left == 0) return;
    }
    if (left >> lane & 1) atomicAdd(&histogram[bin], 1);
}

// Finds the bin that holds place `remaining` counted from the top. Thread i owns bins 2i and 2i+1 from the top.
__device__ inline void pick_bin(SelectScratch& s, int shift) {
    const int top = SELECT_BINS - 1 - 2 * threadIdx.x;
    const int high = s.histogram[top], low = s.histogram[top - 1], remaining = s.remaining;
    const int above_high = block_exclusive_sum(high + low, s.warp_sums), above_low = above_high + high;
    const bool in_high = above_high < remaining && remaining <= above_high + high;
    const bool in_low = above_low < remaining && remaining <= above_low + low;
    if (in_high || in_low) {  // exactly one thread
        s.prefix |= static_cast<uint32_t>(in_low ? top - 1 : top) << shift;
        s.remaining = remaining - (in_low ? above_low : above_high);
        s.class_size = in_low ? low : high;
    }
    __syncthreads();
}

// Three radix passes over the sort keys, of 11, 11 and 10 bits.
__device__ inline Threshold radix_threshold(const ScoreRow& row, int count, SelectScratch& s) {
    __syncthreads();
    if (threadIdx.x == 0) {
        s.prefix = 0;
        s.remaining = count;
    }
    int shift = 32;
#pragma unroll 1
    for (int pass = 0; pass < 3; ++pass) {
        const int bits = pass < 2 ? 11 : 10;
        for (int i = threadIdx.x; i < SELECT_BINS; i += SELECT_THREADS) s.histogram[i] = 0;
        __syncthreads();
        const uint32_t prefix = s.prefix;
        const int class_shift = shift;
        shift -= bits;
        row.visit_all([&](float score) {
            const uint32_t key = score_key(score);
            if (pass == 0 || key >> class_shift == prefix >> class_shift)
                count_in_bin(s.histogram, (key >> shift) & ((1 << bits) - 1));
        });
        __syncthreads();
        pick_bin(s, shift);
    }
    return {score_of_key(s.prefix), s.remaining};
}

// 0 < count < n. row.load() was called, and a barrier since.
__device__ inline Threshold find_threshold(const ScoreRow& row, int count, SelectScratch& s) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float lowest = -minus_infinity(), highest = minus_infinity();
    row.visit_all([&](float score) {  // fminf and fmaxf pass over NaN
        lowest = fminf(lowest, score);
        highest = fmaxf(highest, score);
    });
    const uint32_t lowest_key = __reduce_min_sync(0xffffffffu, score_key(lowest));
    const uint32_t highest_key = __reduce_max_sync(0xffffffffu, score_key(highest));
    if (lane == 0) {
        s.warp_lowest[warp] = lowest_key;
        s.warp_highest[warp] = highest_key;
    }
    for (int i = threadIdx.x; i < SELECT_BINS; i += SELECT_THREADS) s.histogram[i] = 0;
    if (threadIdx.x == 0) {
        s.prefix = 0;
        s.remaining = count;
        s.candidates = 0;
    }
    __syncthreads();
    lowest = score_of_key(__reduce_min_sync(0xffffffffu, s.warp_lowest[lane]));
    highest = score_of_key(__reduce_max_sync(0xffffffffu, s.warp_highest[lane]));
    const float per_unit = (SELECT_BINS - 1) / (highest - lowest);
    // bins must be finite numbers; a range so small that its inverse is infinite goes the other way too
    if (!(per_unit > 0.f && per_unit < 1e38f && highest - lowest < 1e38f)) return radix_threshold(row, count, s);

    // A score's bin never falls as the score rises: every step of it is monotone, rounding included. NaN: bin 0.
    const auto bin_of = [&](float score) { return min(static_cast<int>((score - lowest) * per_unit), SELECT_BINS - 1); };
    row.visit_all([&](float score) { count_in_bin(s.histogram, bin_of(score)); });
    __syncthreads();
    pick_bin(s, 0);
    const int class_size = s.class_size;
    if (class_size > MAX_CANDIDATES) return radix_threshold(row, count, s);

    const int bin = static_cast<int>(s.prefix);
    row.visit_all([&](float score) {
        if (bin_of(score) == bin) s.candidate_keys[atomicAdd(&s.candidates, 1)] = score_key(score);
    });
    __syncthreads();
    if (threadIdx.x < class_size) {
        const uint32_t mine = s.candidate_keys[threadIdx.x];
        int above = 0, equal = 0;
        for (int i = 0; i < class_size; ++i) {
            const uint32_t other = s.candidate_keys[i];
            above += other > mine;
            equal += other == mine;
        }
        if (above < s.remaining && s.remaining <= above + equal) {  // all that get here write the same
            s.last_key = mine;
            s.ties = s.remaining - above;
        }
    }
    __syncthreads();
    return {score_of_key(s.last_key), s.ties};
}

// Calls emit(place, id) for the selected ids, places ascending with the ids; ids of a word by the thread that owns it.
template <class Emit>
__device__ void emit_selected(const ScoreRow& row, const Threshold& threshold, SelectScratch& s, const Emit& emit) {
    const bool nan_is_last = threshold.score != threshold.score;
    int places = 0, ties_left = threshold.ties;
    for (int base = 0; base < row.n; base += row.round()) {
        uint32_t chosen = 0, tied = 0;
        row.visit_word(base, [&](float score, int place) {
            const bool nan = score != score;
            if (score > threshold.score || (nan_is_last && !nan)) chosen |= 1u << place;
            if (score == threshold.score || (nan_is_last && nan)) tied |= 1u << place;
        });
        const int mine = __popc(chosen) << 16 | __popc(tied);  // at most 32,768 of each in a round
        const int before = block_exclusive_sum(mine, s.warp_sums);
        const int tied_before = min(before & 0xffff, ties_left);
        int place = places + (before >> 16 & 0xffff) + tied_before, take = ties_left - tied_before;
        for (uint32_t rest = tied; rest != 0u && take > 0; rest &= rest - 1, --take) chosen |= rest & -rest;
        for (uint32_t rest = chosen; rest != 0u; rest &= rest - 1)
            emit(place++, row.word(base) + __ffs(static_cast<int>(rest)) - 1);
        if (base + row.round() >= row.n) return;
        if (threadIdx.x == SELECT_THREADS - 1) s.round_total = before + mine;
        __syncthreads();  // warp_sums was read, too
        const int tied_here = min(s.round_total & 0xffff, ties_left);
        places += (s.round_total >> 16 & 0xffff) + tied_here;
        ties_left -= tied_here;
    }
}

// The best scores of a long row, in the order of their ids.
struct Survivors {
    alignas(16) float scores[MAX_SURVIVORS];
    int ids[MAX_SURVIVORS];
};

// What is left to select from. `known`: the threshold is found. `mapped`: ids are places in the list of survivors.
struct Reduced {
    ScoreRow row;
    Threshold threshold;
    bool known, mapped;
};

// Sets most of a long row of one round aside: of the threads' largest scores (`mine`, each of a part of the row) the
// count-th largest bounds the selection from below, and few scores reach it. If too many or too few do, all stay.
__device__ inline Reduced reduce_row(const ScoreRow& row, float mine, int count, SelectScratch& s, Survivors& survivors) {
    const Reduced all = {row, {}, false, false};
    if (count >= SELECT_THREADS) return all;
    float4* list = reinterpret_cast<float4*>(survivors.scores);
    survivors.scores[threadIdx.x] = mine;
    __syncthreads();
    const float bound = find_threshold(ScoreRow(nullptr, list, SELECT_THREADS), count, s).score;
    uint32_t best = 0;
    int above = 0;
    row.visit_word(0, [&](float score, int place) {
        best |= score >= bound ? 1u << place : 0u;
        above += score > bound;
    });
    const int packed = above << 16 | __popc(best), before = block_exclusive_sum(packed, s.warp_sums);
    if (threadIdx.x == SELECT_THREADS - 1) s.round_total = before + packed;
    __syncthreads();
    const int all_above = s.round_total >> 16 & 0xffff, reached = s.round_total & 0xffff;
    if (all_above < count && count <= reached) return {row, {bound, count - all_above}, true, false};  // ties
    if (reached <= count || reached > MAX_SURVIVORS) return all;
    for (int place = before & 0xffff; best != 0u; best &= best - 1, ++place) {
        const int i = __ffs(static_cast<int>(best)) - 1;
        survivors.scores[place] = row.at(i);
        survivors.ids[place] = row.word(0) + i;
    }
    __syncthreads();
    return {ScoreRow(nullptr, list, reached), {}, false, true};
}
