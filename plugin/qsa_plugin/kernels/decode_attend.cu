// Decode, kernel 2: attention of one row's query heads over its listed tokens, split over the tokens (split-K).
//   A thread block takes one KV head of one row and a contiguous range of tiles of 8 tokens a warp. The warps share the
//   work of a tile twice: each computes the scores and probabilities of its own 8 tokens for all 16 head rows, then each
//   multiplies the whole tile's probabilities with its share of the value columns. Softmax in fp32, base 2.
//   Before that, each block prepares its query heads and selects the row's best blocks for itself: a selection is shorter
//   than a kernel of its own with the list in global memory, and what depends on inputs alone runs beside kernel 1.
#include "decode.cuh"

#ifndef ATTEND_WARPS
#define ATTEND_WARPS 4
#endif
#ifndef ATTEND_STAGES
#define ATTEND_STAGES 2
#endif
#ifndef ATTEND_CLUSTER
#define ATTEND_CLUSTER 0  // 1: the splits of a (row, KV head) are one cluster
#endif
constexpr int WARPS = ATTEND_WARPS;
constexpr int THREADS = WARPS * 32;
constexpr int TILE = WARPS * 8;                // tokens
constexpr int ROWS = 16;                       // head rows of the mma; the first GROUP are real
constexpr int STAGES = ATTEND_STAGES;
constexpr int MAX_SPLITS = 16;
constexpr int CHUNKS = D / 8;                  // 16-byte chunks of a token's K or V row
constexpr int STEPS = D / 16;                  // mma steps of q . k
constexpr int ALL_COLUMN_TILES = D / 8;        // value column tiles of 8
constexpr int COLUMN_TILES = ALL_COLUMN_TILES / WARPS;  // of one warp
constexpr int LOAD_LANES = CHUNKS < 32 ? CHUNKS : 32;   // lanes that load one token's row: as much of it at a time as
constexpr int LOADS = CHUNKS / LOAD_LANES;              // a warp can, for DRAM gives whole rows faster than parts of several
constexpr int TOKENS_A_LOAD = 32 / LOAD_LANES;
constexpr int PROB_PITCH = TILE + 8;           // surface elements: rows 16 bytes apart modulo 128
static_assert(COLUMN_TILES >= 1, "too many warps for this head size");

#include "decode_select.cuh"

struct Stage {
    surf_t k[TILE * D];
    surf_t v[TILE * D];
};

#if ATTEND_CLUSTER
// What the blocks of the cluster send to this one, split by split: the statistics of all rows, and the column tiles
// that this block merges: tile c goes to block c % splits. The number of splits is a power of two.
struct Received {
    float2 stats[MAX_SPLITS][ROWS];  // maximum (base 2), sum
    float2 parts[(ALL_COLUMN_TILES > MAX_SPLITS ? ALL_COLUMN_TILES : MAX_SPLITS) * GROUP * 4];
};
#endif
union Reused {
    surf_t q[ROWS * D];  // until the fragments are loaded
#if ATTEND_CLUSTER
    Received received;   // from then on
#endif
};
struct Shared {
    union {
        Stage stages[STAGES];
        SelectScratch select;  // before the first tile
    };
    Reused reused;
    surf_t prob[ROWS][PROB_PITCH];
    float maximum[WARPS][ROWS];   // of the warps' tokens
    float sum[WARPS][ROWS];
    float weights[MAX_SPLITS][ROWS];  // of the splits in the merge, divided by the sum of all
    int last;
    union {
        Histogram histogram;          // of selection
        int list[BUDGET_BLOCKS + 1];  // ids of this thread block's listed blocks, where they were selected
    };
};
static_assert(sizeof(Shared) <= ATTEND_SHARED, "the launch reserves too little shared memory");

// Index of a 16-byte chunk in a [tokens, D] tile: rows are permuted so that 8 tokens' equal columns hit 8 bank groups.
__device__ __forceinline__ int swizzled(int token, int chunk) {
    const int key = CHUNKS >= 8 ? token & 7 : (token >> 1) & 3;
    return (token * CHUNKS + (chunk ^ key)) * 8;
}

// What of the queries does not depend on the row's length: this warp's next two heads, raw, and the norm's weights.
struct QueryInputs {
    RawRow<D / 32> head[2], gamma;
};
__device__ __forceinline__ void load_queries(QueryInputs& inputs, const surf_t* heads, const surf_t* q_gamma, int warp,
                                             int lane) {
    load_row(heads + (warp < GROUP ? warp : 0) * D, lane, inputs.head[0]);
    load_row(heads + (warp + WARPS < GROUP ? warp + WARPS : 0) * D, lane, inputs.head[1]);
    load_row(q_gamma, lane, inputs.gamma);
}

// The query heads of this KV head, normed and roped, into shared memory; zeros in the rows past GROUP.
__device__ __forceinline__ void prepare_queries(QueryInputs& inputs, const surf_t* heads, const DecodeParams& p,
                                                Shared& shared, int position, int warp, int lane) {
    constexpr int E = D / 32;
    static_assert(sizeof(Stage) >= WARPS * ROTARY * sizeof(float), "a stage serves as the buffer of RoPE");
    float* buffer = reinterpret_cast<float*>(shared.stages + STAGES - 1) + warp * ROTARY;
    float gamma[E];
    Rope<E> rope;
    load_rope(rope, p.cos_sin + static_cast<int64_t>(position) * ROTARY, lane);
    to_floats(inputs.gamma, gamma);
#pragma unroll 1
    for (int r = warp; r < ROWS; r += WARPS) {
        float x[E] = {};
        if (r < GROUP) {
            to_floats(inputs.head[0], x);
            inputs.head[0] = inputs.head[1];
            if (r + 2 * WARPS < GROUP) load_row(heads + (r + 2 * WARPS) * D, lane, inputs.head[1]);
            warp_norm_main(x, gamma, p.eps);
            warp_rope(x, rope, buffer, lane);
        }
        store_row(shared.reused.q + swizzled(r, lane * E / 8) + lane * E % 8 - lane * E, lane, x);
    }
}

// Where a warp's 8 tokens of one tile lie, one in each lane and four times over: rows of one head of the pool. Read well
// before the tile is loaded, so that the lookup is off the path.
struct Lookup {
    int k, v;  // or -1: no such token
};

// list: ids of the listed blocks from `first` on; null: every block is listed.
__device__ __forceinline__ void look_up(Lookup& lookup, const DecodeParams& p, int row, const int* list, int first,
                                        int tile, int tokens) {
    const int i = tile * TILE + threadIdx.x / 32 * 8 + threadIdx.x % 8;
    lookup = {-1, -1};
    if (i >= tokens) return;
    const int token = (list == nullptr ? i / R : list[i / R - first]) * R + i % R;
    const Pages pages = pages_in_range(p, row, token / PAGE);
    lookup = {pages.k * PAGE + token % PAGE, pages.v * PAGE + token % PAGE};
}

// A warp brings its own 8 tokens. Missing ones become zeros: their probability is 0, and 0 * NaN is not.
__device__ __forceinline__ void load_tile(Stage& stage, const Lookup& lookup, const surf_t* pool, int head) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunk = lane % LOAD_LANES;
    const surf_t* from = pool + head * POOL_WIDTH + chunk * 8;
#pragma unroll
    for (int i = 0; i < 8; i += TOKENS_A_LOAD) {
        const int token = i + lane / LOAD_LANES;
        const int k = __shfl_sync(0xffffffffu, lookup.k, token), v = __shfl_sync(0xffffffffu, lookup.v, token);
        const bool exists = k >= 0;
        const surf_t* k_row = from + static_cast<int64_t>(exists ? k : 0) * (HKV * POOL_WIDTH);
        const surf_t* v_row = from + static_cast<int64_t>(exists ? v : 0) * (HKV * POOL_WIDTH);
        const int to = swizzled(warp * 8 + token, chunk);  // further chunks are multiples of 8 on: the swizzle keeps them
#pragma unroll
        for (int j = 0; j < LOADS; ++j) cp_async_16(stage.k + to + j * LOAD_LANES * 8, k_row + j * LOAD_LANES * 8, exists);
#pragma unroll
        for (int j = 0; j < LOADS; ++j) cp_async_16(stage.v + to + j * LOAD_LANES * 8, v_row + j * LOAD_LANES * 8, exists);
    }
}

// q . k of this warp's 8 tokens: fragment (rows g, g+8; tokens 2t, 2t+1). Up to four chains hide the mma's latency.
__device__ __forceinline__ void score_tile(float (&s)[4], const uint32_t (&q)[STEPS][4], const surf_t* k, int warp,
                                           int lane) {
    constexpr int CHAINS = STEPS < 4 ? STEPS : 4;
    float chain[CHAINS][4] = {};
    const int token = warp * 8 + lane % 8;
#pragma unroll
    for (int step = 0; step < STEPS; step += 2) {
        uint32_t b[4];  // chunks 2*step .. 2*step+3 of 8 tokens
        ldmatrix_x4(b, k + swizzled(token, 2 * step + lane / 8));
        mma_16816(chain[step % CHAINS], q[step], b[0], b[1]);
        mma_16816(chain[(step + 1) % CHAINS], q[step + 1], b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        s[i] = chain[0][i] + chain[1][i];
        if constexpr (CHAINS == 4) s[i] += chain[2][i] + chain[3][i];
    }
}

struct Softmax {
    float maximum[2];  // of rows g and g+8, base 2; the same in all warps
    float sum[2];      // of this lane's tokens alone
};

// Turns this warp's scores into probabilities in shared memory, updates the running state, and returns the factors for
// what was accumulated before. Ends behind a barrier: the tile's probabilities are there.
__device__ __forceinline__ void softmax_tile(float (&s)[4], float (&factor)[2], Softmax& state, Shared& shared, int warp,
                                             int g, int t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float maximum = fmaxf(s[2 * half], s[2 * half + 1]);
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 1));
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 2));
        if (t == 0) shared.maximum[warp][g + 8 * half] = maximum;
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float maximum = state.maximum[half];
#pragma unroll
        for (int w = 0; w < WARPS; ++w) maximum = fmaxf(maximum, shared.maximum[w][g + 8 * half]);
        const float base = maximum == minus_infinity() ? 0.f : maximum;  // a row with no finite score yet
        factor[half] = exp2f(state.maximum[half] - base);
        const float low = exp2f(s[2 * half] - base), high = exp2f(s[2 * half + 1] - base);
        *reinterpret_cast<uint32_t*>(&shared.prob[g + 8 * half][warp * 8 + 2 * t]) = pack_surface(low, high);
        state.maximum[half] = maximum;
        state.sum[half] = state.sum[half] * factor[half] + (low + high);
    }
    __syncthreads();
}

// accumulator += probabilities . v for this warp's columns, 32 tokens at a time.
__device__ __forceinline__ void value_tile(float (&acc)[COLUMN_TILES][4], const Shared& shared, const surf_t* v, int warp,
                                           int lane) {
#pragma unroll
    for (int token = 0; token < TILE; token += 32) {
        uint32_t prob[2][4];
        ldmatrix_x4(prob[0], &shared.prob[lane % 16][token + lane / 16 * 8]);
        ldmatrix_x4(prob[1], &shared.prob[lane % 16][token + 16 + lane / 16 * 8]);
#pragma unroll
        for (int column = 0; column < COLUMN_TILES; ++column) {
            uint32_t b[4];  // tokens 0-7, 8-15, 16-23, 24-31 of 8 columns, transposed
            ldmatrix_x4_trans(b, v + swizzled(token + lane, warp * COLUMN_TILES + column));
            mma_16816(acc[column], prob[0], b[0], b[1]);
            mma_16816(acc[column], prob[1], b[2], b[3]);
        }
    }
}

#include "decode_merge.cuh"

// The ids of the listed blocks [first, first + own) of a row that has more than the budget, into shared memory.
__device__ __forceinline__ void list_blocks(const DecodeParams& p, Shared& shared, int row, int length, int first,
                                            int own) {
    const int n = complete_blocks(length);
    const auto put = [&](int rank, int id) {
        if (static_cast<unsigned>(rank - first) < static_cast<unsigned>(own)) shared.list[rank - first] = id;
    };
    select_blocks(p.scores + static_cast<int64_t>(row) * p.score_stride,
                  p.maxima + static_cast<int64_t>(row) * maxima_stride(p), n, BUDGET_BLOCKS, shared.select,
                  shared.histogram, first, first + own, put);
    if (threadIdx.x == 0 && length % R != 0) put(BUDGET_BLOCKS, n);  // not before: the list is where the histogram was
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_attend(const __grid_constant__ DecodeParams p) {
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int split = blockIdx.x % p.splits, head = blockIdx.x / p.splits % HKV, row = blockIdx.x / p.splits / HKV;
    const surf_t* heads = p.qkv + static_cast<int64_t>(row) * QKV_WIDTH + head * GROUP * D;
    QueryInputs inputs;
    load_queries(inputs, heads, p.q_gamma, warp, lane);  // on their way beside the length
    const int length = length_in_reach(p, row);
    const int tokens = listed_tokens(length), tiles = (tokens + TILE - 1) / TILE, active = min(p.splits, tiles);
    const int begin = split < active ? tiles * split / active : 0;  // never empty for an active split
    const int end = split < active ? tiles * (split + 1) / active : 0;
    const int first = begin * TILE / R, own = min(end * TILE / R, listed_blocks(length)) - first;
    const bool selecting = complete_blocks(length) > BUDGET_BLOCKS;

    // What depends on inputs and earlier steps alone comes before the wait for kernel 1: the queries, and the first tiles
    // where nothing is selected and they do not hold the new token.
    if (length > 0) prepare_queries(inputs, heads, p, shared, length - 1, warp, lane);
    __syncthreads();
    const bool early = !selecting && min(begin + STAGES - 1, end) < tiles;
    if (selecting)  // the row's page table through L1, so that later look-ups are short
        for (int i = threadIdx.x * 32; i * PAGE < length; i += THREADS * 32) {
            const Pages pages = pages_in_range(p, row, i);
            asm volatile("" ::"r"(pages.k), "r"(pages.v));
        }
    if (!early) {
        grid_dependency_wait();
        if (selecting && split < active) list_blocks(p, shared, row, length, first, own);
    }
    const int* list = selecting ? shared.list : nullptr;
    Lookup next;
    if (begin < end) look_up(next, p, row, list, first, begin, tokens);
#pragma unroll 1
    for (int s = 0; s < STAGES - 1; ++s) {
        if (begin + s < end) load_tile(shared.stages[s], next, p.pool, head);
        cp_async_commit();
        if (begin + s + 1 < end) look_up(next, p, row, list, first, begin + s + 1, tokens);
    }
    if (early) grid_dependency_wait();
    grid_dependency_launch();
    if (__ldcg(p.live + row) == 0) {  // the same in all blocks of the row
        cp_async_wait<0>();
        if (split == 0) store_zeros(p, row, head);
        return;
    }
#if !ATTEND_CLUSTER
    if (split >= active) return;
#endif
    uint32_t q_fragment[STEPS][4];
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
        ldmatrix_x4(q_fragment[step], shared.reused.q + swizzled(lane % 16, 2 * step + lane / 16));
#if ATTEND_CLUSTER
    cluster_arrive();  // q is in registers: its memory may receive
#endif

    if (head == 0)  // for whoever wants to see what was selected
        for (int i = threadIdx.x; i < own; i += THREADS)
            p.blocks[static_cast<int64_t>(row) * (BUDGET_BLOCKS + 1) + first + i] = selecting ? list[i] : first + i;

    float acc[COLUMN_TILES][4] = {};
    Softmax state = {{minus_infinity(), minus_infinity()}, {0.f, 0.f}};
    const float scale = p.scale * LOG2_E;  // softmax in base 2
    int slot = 0;
    for (int tile = begin; tile < end; ++tile) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // the tile is here for everybody; the slot that is filled next is free
        const int coming = tile + STAGES - 1;
        if (coming < end) load_tile(shared.stages[(slot + STAGES - 1) % STAGES], next, p.pool, head);
        cp_async_commit();
        if (coming + 1 < end) look_up(next, p, row, list, first, coming + 1, tokens);

        float s[4], factor[2];
        score_tile(s, q_fragment, shared.stages[slot].k, warp, lane);
        const int token = tile * TILE + warp * 8 + 2 * t;
#pragma unroll
        for (int i = 0; i < 4; ++i) s[i] = token + i % 2 < tokens ? s[i] * scale : minus_infinity();
        softmax_tile(s, factor, state, shared, warp, g, t);
#pragma unroll
        for (int column = 0; column < COLUMN_TILES; ++column)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[column][i] *= factor[i / 2];
        value_tile(acc, shared, shared.stages[slot].v, warp, lane);
        slot = slot + 1 == STAGES ? 0 : slot + 1;
    }

    sum_rows(state, shared, warp, g, t);
#if ATTEND_CLUSTER
    cluster_wait();
    if (split < active) send(shared, acc, split, p.splits, warp, g, t);
    cluster_arrive();
    cluster_wait();
    merge_received(p, shared, row, head, split, active);
#else
    if (active == 1) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (g + 8 * half >= GROUP) continue;
            const float inv = __frcp_rn(shared.sum[0][g + 8 * half]);
#pragma unroll
            for (int column = 0; column < COLUMN_TILES; ++column)
                store_pair(p, row, head, g + 8 * half, (warp * COLUMN_TILES + column) * 8 + 2 * t,
                           acc[column][2 * half] * inv, acc[column][2 * half + 1] * inv);
        }
    } else if (leave_partial(p, shared, acc, row, head, split, active, warp, g, t)) {
        merge_partials(p, shared, row, head, active);
    }
#endif
}
