// Launchers `expand` and `gather`: block lists as token lists of the contract's form, and the keys and values of such
// lists packed contiguous, for an attention kernel of somebody else's. The runners use neither.
#include "prefill.cuh"

struct ExpandParams {
    const int* lists;        // [batch, rows, BUDGET_BLOCKS]; rows of dense rows are not read
    const int* live;         // [batch]
    const int* past;         // [batch], or null: 0
    int* tokens;             // [batch, rows, LIST_WIDTH] out: selected tokens, causal tail, -1
    int batch;
    int seq_len;
    int row_begin;           // first row of the range
    int rows;
};

constexpr int THREADS = 128;

// One CTA a row.
extern "C" __global__ void __launch_bounds__(THREADS) qsa_expand(const __grid_constant__ ExpandParams p) {
    const int64_t row = blockIdx.x;
    const int b = static_cast<int>(row / p.rows), s = p.row_begin + static_cast<int>(row % p.rows);
    const Sequence sequence = sequence_of(p.live, p.past, b, p.seq_len);
    const int t = sequence.past + s;
    const bool real = s < sequence.live, dense = t < LIST_WIDTH;
    const int selected = min(visible_blocks(t), BUDGET_BLOCKS) * R;
    for (int i = threadIdx.x; i < LIST_WIDTH; i += THREADS) {
        int token = -1;
        if (real && i < selected)
            token = dense ? i : p.lists[row * BUDGET_BLOCKS + i / R] * R + i % R;
        else if (real && i < selected + (t + 1) % R)
            token = visible_blocks(t) * R + i - selected;
        p.tokens[row * LIST_WIDTH + i] = token;
    }
}

struct GatherParams {
    const int* tokens;       // [batch, rows, width], -1 where there is none
    const surf_t* pool;      // [2*N, PAGE, HKV, POOL_WIDTH]
    const int* page_table;   // [batch, 2, pages_per_seq]
    surf_t* keys;            // [batch, rows, width, HKV, D] out, zeros where there is no token
    surf_t* values;          // the same
    int batch;
    int rows;
    int width;
    int pages_per_seq;
};

// One warp a token of a list, both planes, all KV heads.
extern "C" __global__ void __launch_bounds__(THREADS) qsa_gather(const __grid_constant__ GatherParams p) {
    constexpr int CHUNKS = D / 8;
    const int64_t item = static_cast<int64_t>(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
    if (item >= static_cast<int64_t>(p.batch) * p.rows * p.width) return;
    const int token = p.tokens[item], b = static_cast<int>(item / p.width / p.rows);
    for (int i = threadIdx.x % 32; i < 2 * HKV * CHUNKS; i += 32) {
        const int plane = i / (HKV * CHUNKS), head = i / CHUNKS % HKV, chunk = i % CHUNKS;
        uint4 data = make_uint4(0, 0, 0, 0);
        if (token >= 0) {
            const int page = page_of(p.page_table, p.pages_per_seq, b, plane, token);
            data = *reinterpret_cast<const uint4*>(p.pool + pool_offset(page, token % PAGE, head) + chunk * 8);
        }
        surf_t* out = plane == 0 ? p.keys : p.values;
        *reinterpret_cast<uint4*>(out + (item * HKV + head) * D + chunk * 8) = data;
    }
}
