// Stage 0 of prefill: how many rows of each sequence are real. A sequence that the contract calls inactive (length 0 or
// less, longer than the tables can hold, a live page id out of range) gets 0, and every later stage skips it, so that
// no other kernel checks a page id.
#include "prefill.cuh"

struct PlanParams {
    const int* context_lengths;  // [batch], total live length
    const int* page_table;       // [batch, 2, pages_per_seq]
    const int* past_lengths;     // [batch], or null: 0
    int* live;                   // [batch] out
    int* past;                   // [batch] out
    int seq_len;
    int pages_per_seq;
    int num_pages;
    int max_kv_len;              // what the page table and the rope table hold
};

extern "C" __global__ void __launch_bounds__(128) qsa_prefill_plan(const __grid_constant__ PlanParams p) {
    const int b = blockIdx.x;
    const int past = p.past_lengths == nullptr ? 0 : max(p.past_lengths[b], 0);
    // padded activations end at seq_len; min() before the sum so that a huge length cannot wrap
    const int fresh = min(p.context_lengths[b] - past, p.seq_len);
    const bool fits = fresh > 0 && past <= p.max_kv_len - fresh;
    const int pages = fits ? (past + fresh + PAGE - 1) / PAGE : 0;
    bool good = fits;
    for (int slot = threadIdx.x; slot < pages; slot += blockDim.x) {
        const int k_page = page_of(p.page_table, p.pages_per_seq, b, 0, slot * PAGE);
        const int v_page = page_of(p.page_table, p.pages_per_seq, b, 1, slot * PAGE);
        good &= k_page >= 0 && k_page < p.num_pages && v_page >= p.num_pages && v_page < 2 * p.num_pages;
    }
    good = __syncthreads_and(good);
    if (threadIdx.x == 0) {
        p.live[b] = good ? fresh : 0;
        p.past[b] = past;
    }
}
