// Shared by the prefill kernels: where a sequence's rows stand, and which of them are sparse.
//
// A row is one token of this call: row s of sequence b has position t = past[b] + s. `live[b]` rows are real, the rest
// is padding on the right. Both are device values, written by prefill_plan.cu; no grid depends on them.
// Rows with t < LIST_WIDTH select every complete block, and their tail fills up the rest: plain causal attention.
#pragma once

#include "common.cuh"

// Union of the blocks of a tile of neighbouring sparse rows: an entry is block << MEMBER_BITS | the rows that attend to
// it.
constexpr int MEMBER_BITS = 10;
#ifdef QSA_UNION_ROWS  // of the kernels that make or read unions
constexpr int UNION_ROWS = QSA_UNION_ROWS;
static_assert(UNION_ROWS <= MEMBER_BITS, "a bit a row");
// A tile's entries are parted into classes, each ascending in a region of its own and padded with zeros to a whole step
// of UNION_STEP entries. Two classes' worth of rows (QSA_UNION_SPLIT 1) give three: blocks that both halves of the rows
// attend to, the first half alone, the second half alone. Without a split all entries are of class 0.
constexpr bool UNION_SPLIT = QSA_UNION_SPLIT;
constexpr int UNION_CLASSES = UNION_SPLIT ? 3 : 1;
constexpr int UNION_STEP = 64 / R;
constexpr int UNION_REGION = (UNION_SPLIT ? UNION_ROWS / 2 : UNION_ROWS) * (BUDGET_BLOCKS + 1) + UNION_STEP;
constexpr int UNION_COUNTS = 4;  // a tile: entries of each class without padding; the last is not used
#endif

#define NEGATIVE_INFINITY __int_as_float(0xff800000)  // NVRTC has no INFINITY

struct Sequence {
    int live;          // rows of this call that are real
    int past;          // tokens in the pool before this call
    int first_sparse;  // first row that has more complete blocks than the budget
};

__device__ __forceinline__ Sequence sequence_of(const int* live, const int* past, int b, int seq_len) {
    Sequence sequence;
    sequence.live = min(live[b], seq_len);
    sequence.past = past == nullptr ? 0 : past[b];
    sequence.first_sparse = max(0, LIST_WIDTH - sequence.past);
    return sequence;
}

// Complete blocks that the token at position t may select.
__device__ __forceinline__ int visible_blocks(int t) { return (t + 1) / R; }

// Page id of a token: plane 0 is K, 1 is V (its ids already hold the +N).
__device__ __forceinline__ int page_of(const int* page_table, int pages_per_seq, int b, int plane, int token) {
    return page_table[(static_cast<int64_t>(b) * 2 + plane) * pages_per_seq + token / PAGE];
}
