// Decode, kernel 4: attention of one row's query heads over its listed tokens, split over the tokens (split-K).
//   A thread block takes one KV head of one row and a contiguous range of tiles of 32 tokens. Its four warps share the
//   scores: each computes 8 of a tile's 32 tokens for all 16 head rows, then each multiplies the whole tile's
//   probabilities with its quarter of the value columns. Softmax in fp32, base 2.
//   The partial results are merged in the order of the splits, so that the result is bitwise repeatable: with clusters
//   each block sends every other block its share of the columns through distributed shared memory; without, the last
//   block of a (row, KV head) to finish reads all of them back from the workspace.
#include "decode.cuh"

#ifndef ATTEND_STAGES
#define ATTEND_STAGES 3
#endif
#ifndef ATTEND_CLUSTER
#define ATTEND_CLUSTER 0  // 1: the splits of a (row, KV head) are one cluster
#endif
constexpr int WARPS = 4;
constexpr int THREADS = WARPS * 32;
constexpr int TILE = 32;                       // tokens: one a lane
constexpr int ROWS = 16;                       // head rows of the mma; the first GROUP are real
constexpr int STAGES = ATTEND_STAGES;
constexpr int CHUNKS = D / 8;                  // 16-byte chunks of a token's K or V row
constexpr int STEPS = D / 16;                  // mma steps of q . k
constexpr int COLUMN_TILES = D / 8 / WARPS;    // value column tiles of 8 a warp
constexpr int TOKEN_LANES = CHUNKS;            // lanes that load one token's row
constexpr int TOKENS_A_PASS = THREADS / TOKEN_LANES;
constexpr int PASSES = TILE / TOKENS_A_PASS;
constexpr int SCORE_PITCH = TILE + 4;          // floats, keeps the score exchange free of bank conflicts

struct Stage {
    surf_t k[TILE * D];
    surf_t v[TILE * D];
};
constexpr int ALL_COLUMN_TILES = D / 8;
constexpr int MAX_SPLITS = 16;

#if ATTEND_CLUSTER
// What the blocks of the cluster send to this one, split by split: the statistics of all rows, and the column tiles
// that this block merges: tile c goes to block c % splits.
struct Received {
    float maximum[MAX_SPLITS][ROWS];
    float sum[MAX_SPLITS][ROWS];
    float2 parts[(ALL_COLUMN_TILES > MAX_SPLITS ? ALL_COLUMN_TILES : MAX_SPLITS) * GROUP * 4];
};
union Reused {
    surf_t q[ROWS * D];  // until the fragments are loaded
    Received received;   // from then on
};
#else
union Reused {
    surf_t q[ROWS * D];
    float weights[MAX_SPLITS][ROWS];  // of the splits, in the merge
};
#endif
struct Shared {
    Stage stages[STAGES];
    Reused reused;
    float scores[ROWS][SCORE_PITCH];
    float inverse_sum[ROWS];
    int last;
};
static_assert(sizeof(Shared) <= ATTEND_SHARED, "the launch reserves too little shared memory");

// Index of a 16-byte chunk in a [tokens, D] tile: rows are permuted so that 8 tokens' equal columns hit 8 bank groups.
__device__ __forceinline__ int swizzled(int token, int chunk) {
    const int key = CHUNKS >= 8 ? token & 7 : (token >> 1) & 3;
    return (token * CHUNKS + (chunk ^ key)) * 8;
}

// Where the tokens of one tile lie: lane l of every warp knows token l. Read well before the tile is loaded, so that the
// lookup is off the path. Tokens that do not exist have k_page -1.
struct Lookup {
    int k_page, v_page, page_row;
};

__device__ __forceinline__ Lookup look_up(const Block* list, int tile, int tokens, int lane) {
    const int i = tile * TILE + lane;
    if (i >= tokens) return {-1, -1, 0};
    const int4 block = *reinterpret_cast<const int4*>(list + i / R);
    return {block.y, block.z, (block.x + i % R) % PAGE};
}

__device__ __forceinline__ void load_tile(Stage& stage, const Lookup& lookup, const surf_t* pool, int head) {
    const int chunk = threadIdx.x % TOKEN_LANES;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const int token = pass * TOKENS_A_PASS + threadIdx.x / TOKEN_LANES;
        const int k_page = __shfl_sync(0xffffffffu, lookup.k_page, token);
        const int v_page = __shfl_sync(0xffffffffu, lookup.v_page, token);
        const int page_row = __shfl_sync(0xffffffffu, lookup.page_row, token);
        const bool exists = k_page >= 0;  // missing tokens become zeros: their probability is 0, and 0 * NaN is not
        const int64_t k = exists ? pool_offset(k_page, page_row, head) + chunk * 8 : 0;
        const int64_t v = exists ? pool_offset(v_page, page_row, head) + chunk * 8 : 0;
        cp_async_16(stage.k + swizzled(token, chunk), pool + k, exists);
        cp_async_16(stage.v + swizzled(token, chunk), pool + v, exists);
    }
}

// q . k of this warp's 8 tokens: fragment (rows g, g+8; tokens 2t, 2t+1).
__device__ __forceinline__ void score_tile(float (&s)[4], const uint32_t (&q)[STEPS][4], const surf_t* k, int warp,
                                           int lane) {
    float even[4] = {0.f, 0.f, 0.f, 0.f}, odd[4] = {0.f, 0.f, 0.f, 0.f};  // two chains: half the latency
    const int token = warp * 8 + lane % 8;
#pragma unroll
    for (int step = 0; step < STEPS; step += 2) {
        uint32_t b[4];  // chunks 2*step .. 2*step+3 of 8 tokens
        ldmatrix_x4(b, k + swizzled(token, 2 * step + lane / 8));
        mma_16816(even, q[step], b[0], b[1]);
        mma_16816(odd, q[step + 1], b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = even[i] + odd[i];
}

struct Softmax {
    float maximum[2];  // of rows g and g+8, base 2
    float sum[2];
};

// Probabilities of the whole tile as the two A fragments of the second product; updates the running maximum and sum and
// returns the factors for what was accumulated before.
__device__ __forceinline__ void softmax_tile(uint32_t (&prob)[2][4], float (&factor)[2], Softmax& state,
                                             const float (&scores)[ROWS][SCORE_PITCH], int g, int t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float2 x[TILE / 8];  // tokens 8i + 2t, 8i + 2t + 1
        float maximum = state.maximum[half];
#pragma unroll
        for (int i = 0; i < TILE / 8; ++i) {
            x[i] = *reinterpret_cast<const float2*>(&scores[g + 8 * half][8 * i + 2 * t]);
            maximum = fmaxf(maximum, fmaxf(x[i].x, x[i].y));
        }
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 1));
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 2));
        const float base = maximum == minus_infinity() ? 0.f : maximum;  // a row with no finite score yet
        factor[half] = exp2f(state.maximum[half] - base);
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < TILE / 8; ++i) {
            const float low = exp2f(x[i].x - base), high = exp2f(x[i].y - base);
            sum += low + high;
            prob[i / 2][half + 2 * (i % 2)] = pack_surface(low, high);
        }
        state.maximum[half] = maximum;
        state.sum[half] = state.sum[half] * factor[half] + sum;  // this lane's tokens only; summed over the quad at the end
    }
}

// accumulator += probabilities . v for this warp's columns.
__device__ __forceinline__ void value_tile(float (&acc)[COLUMN_TILES][4], const uint32_t (&prob)[2][4], const surf_t* v,
                                           int warp, int lane) {
#pragma unroll
    for (int column = 0; column < COLUMN_TILES; ++column) {
        uint32_t b[4];  // tokens 0-7, 8-15, 16-23, 24-31 of 8 columns, transposed
        ldmatrix_x4_trans(b, v + swizzled(lane, warp * COLUMN_TILES + column));
        mma_16816(acc[column], prob[0], b[0], b[1]);
        mma_16816(acc[column], prob[1], b[2], b[3]);
    }
}

__device__ void store_zeros(const DecodeParams& p, int row, int head) {
    surf_t* out = p.output + (static_cast<int64_t>(row) * HQ + head * GROUP) * D;
    for (int i = threadIdx.x; i < GROUP * D / 2; i += THREADS) reinterpret_cast<uint32_t*>(out)[i] = 0u;
}

__device__ __forceinline__ void store_pair(const DecodeParams& p, int row, int head, int r, int column, float low,
                                           float high) {
    surf_t* out = p.output + (static_cast<int64_t>(row) * HQ + head * GROUP + r) * D + column;
    *reinterpret_cast<uint32_t*>(out) = pack_surface(low, high);
}

// The merged row = sum_s 2^(m_s - m) acc_s / sum_s 2^(m_s - m) l_s, s ascending.
#if ATTEND_CLUSTER
__device__ __forceinline__ void send(Received& received, const float (&acc)[COLUMN_TILES][4], const Softmax& state,
                                     int split, int splits, int warp, int g, int t) {
    const int tiles_a_block = (ALL_COLUMN_TILES + splits - 1) / splits;
#pragma unroll
    for (int column = 0; column < COLUMN_TILES; ++column) {
        const int tile = warp * COLUMN_TILES + column;
        const int slot = (split * tiles_a_block + tile / splits) * GROUP * 4 + t;
        const uint32_t to = cluster_address(received.parts + slot, tile % splits);
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (g + 8 * half < GROUP)
                st_cluster(to + (g + 8 * half) * 4 * sizeof(float2), acc[column][2 * half], acc[column][2 * half + 1]);
    }
    for (int rank = warp; rank < splits; rank += WARPS) {
        if (t == 0) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                st_cluster(cluster_address(&received.maximum[split][g + 8 * half], rank), state.maximum[half]);
                st_cluster(cluster_address(&received.sum[split][g + 8 * half], rank), state.sum[half]);
            }
        }
    }
}

__device__ __forceinline__ void merge_received(const DecodeParams& p, const Received& received, int row, int head,
                                               int rank, int active) {
    const int tiles_a_block = (ALL_COLUMN_TILES + p.splits - 1) / p.splits;
    for (int i = threadIdx.x; i < tiles_a_block * GROUP * 4; i += THREADS) {
        const int r = i / 4 % GROUP, tile = i / (GROUP * 4) * p.splits + rank;
        if (tile >= ALL_COLUMN_TILES) continue;
        float maximum = minus_infinity();
        for (int s = 0; s < active; ++s) maximum = fmaxf(maximum, received.maximum[s][r]);
        float sum = 0.f, low = 0.f, high = 0.f;
        for (int s = 0; s < active; ++s) {
            const float weight = exp2f(received.maximum[s][r] - maximum);
            const float2 part = received.parts[s * tiles_a_block * GROUP * 4 + i];
            sum = fmaf(weight, received.sum[s][r], sum);
            low = fmaf(weight, part.x, low);
            high = fmaf(weight, part.y, high);
        }
        const float inv = __frcp_rn(sum);
        store_pair(p, row, head, r, tile * 8 + i % 4 * 2, low * inv, high * inv);
    }
}
#else
// Partial results and statistics to the workspace; true in the block that came last.
__device__ __forceinline__ bool leave_partial(const DecodeParams& p, Shared& shared, const float (&acc)[COLUMN_TILES][4],
                                              const Softmax& state, int row, int head, int split, int active, int warp,
                                              int g, int t) {
    const int64_t slice = (static_cast<int64_t>(row) * HKV + head) * p.splits + split;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = g + 8 * half;
        if (r >= GROUP) continue;
#pragma unroll
        for (int column = 0; column < COLUMN_TILES; ++column)
            *reinterpret_cast<float2*>(p.partials + (slice * ROWS + r) * D + (warp * COLUMN_TILES + column) * 8 + 2 * t) =
                make_float2(acc[column][2 * half], acc[column][2 * half + 1]);
        if (warp == 0 && t == 0) {
            p.stats[slice * 2 * ROWS + r] = state.maximum[half];
            p.stats[slice * 2 * ROWS + ROWS + r] = state.sum[half];
        }
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) shared.last = atomicAdd(p.counters + row * HKV + head, 1) == active - 1;
    __syncthreads();
    __threadfence();
    return shared.last;
}

__device__ __forceinline__ void merge_partials(const DecodeParams& p, Shared& shared, int row, int head, int active) {
    constexpr int QUADS = GROUP * D / 4;  // float4 of the result
    constexpr int ITEMS = (QUADS + THREADS - 1) / THREADS;
    const int64_t first = (static_cast<int64_t>(row) * HKV + head) * p.splits;
    if (threadIdx.x < GROUP) {
        const float* stats = p.stats + first * 2 * ROWS + threadIdx.x;
        float maximum = minus_infinity(), sum = 0.f;
        for (int s = 0; s < active; ++s) maximum = fmaxf(maximum, __ldcg(stats + s * 2 * ROWS));
        for (int s = 0; s < active; ++s) {
            const float weight = exp2f(__ldcg(stats + s * 2 * ROWS) - maximum);
            sum = fmaf(weight, __ldcg(stats + s * 2 * ROWS + ROWS), sum);
            shared.reused.weights[s][threadIdx.x] = weight;
        }
        shared.inverse_sum[threadIdx.x] = __frcp_rn(sum);
    }
    __syncthreads();
    float4 total[ITEMS] = {};
#pragma unroll 2
    for (int s = 0; s < active; ++s) {
        const float4* parts = reinterpret_cast<const float4*>(p.partials + (first + s) * ROWS * D);
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            const int i = item * THREADS + threadIdx.x;
            if (i >= QUADS) continue;
            const float weight = shared.reused.weights[s][i / (D / 4)];
            const float4 part = __ldcg(parts + i);
            total[item].x = fmaf(weight, part.x, total[item].x);
            total[item].y = fmaf(weight, part.y, total[item].y);
            total[item].z = fmaf(weight, part.z, total[item].z);
            total[item].w = fmaf(weight, part.w, total[item].w);
        }
    }
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const int i = item * THREADS + threadIdx.x;
        if (i >= QUADS) continue;
        const int r = i / (D / 4), column = i % (D / 4) * 4;
        const float inv = shared.inverse_sum[r];
        store_pair(p, row, head, r, column, total[item].x * inv, total[item].y * inv);
        store_pair(p, row, head, r, column + 2, total[item].z * inv, total[item].w * inv);
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS) decode_attend(const __grid_constant__ DecodeParams p) {
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int split = blockIdx.x % p.splits, head = blockIdx.x / p.splits % HKV, row = blockIdx.x / p.splits / HKV;
    const int length = length_in_reach(p, row);
    grid_dependency_wait();
    const int tokens = listed_tokens(length), tiles = (tokens + TILE - 1) / TILE, active = min(p.splits, tiles);
    const int begin = split < active ? tiles * split / active : 0;  // never empty for an active split
    const int end = split < active ? tiles * (split + 1) / active : 0;
    const Block* list = p.blocks + static_cast<int64_t>(row) * (BUDGET_BLOCKS + 1);
    const int live = p.live[row];  // read beside the first look-up, not before it

    // prologue: queries and the first STAGES - 1 tiles on their way
    Lookup lookup[STAGES];
#pragma unroll
    for (int s = 0; s < STAGES; ++s) lookup[s] = look_up(list, begin + s, begin + s < end ? tokens : 0, lane);
    if (live == 0) {  // the same in all blocks of the row
        if (split == 0) store_zeros(p, row, head);
        return;
    }
#if !ATTEND_CLUSTER
    if (split >= active) return;
#endif
    const surf_t* q = p.q + (static_cast<int64_t>(row) * HQ + head * GROUP) * D;
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS)
        cp_async_16(shared.reused.q + swizzled(i / CHUNKS, i % CHUNKS), i / CHUNKS < GROUP ? q + i * 8 : q,
                    i / CHUNKS < GROUP);
    cp_async_commit();
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
        if (begin + s < end) load_tile(shared.stages[s], lookup[s], p.pool, head);
        cp_async_commit();
    }
    cp_async_wait<STAGES - 1>();
    __syncthreads();
    uint32_t q_fragment[STEPS][4];
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
        ldmatrix_x4(q_fragment[step], shared.reused.q + swizzled(lane % 16, 2 * step + lane / 16));

#if ATTEND_CLUSTER
    cluster_arrive();  // q is in registers: its memory may receive
#endif

    float acc[COLUMN_TILES][4] = {};
    Softmax state = {{minus_infinity(), minus_infinity()}, {0.f, 0.f}};
    const float scale = p.scale * LOG2_E;  // softmax in base 2
    Lookup next = lookup[STAGES - 1];
    int slot = 0;
    for (int tile = begin; tile < end; ++tile) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // the tile is here for everybody; the slot that is filled next is free
        const int coming = tile + STAGES - 1;
        if (coming < end) load_tile(shared.stages[(slot + STAGES - 1) % STAGES], next, p.pool, head);
        cp_async_commit();
        if (coming + 1 < end) next = look_up(list, coming + 1, tokens, lane);

        float s[4];
        score_tile(s, q_fragment, shared.stages[slot].k, warp, lane);
        const int token = tile * TILE + warp * 8 + 2 * t;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float low = token < tokens ? s[2 * half] * scale : minus_infinity();
            const float high = token + 1 < tokens ? s[2 * half + 1] * scale : minus_infinity();
            *reinterpret_cast<float2*>(&shared.scores[g + 8 * half][warp * 8 + 2 * t]) = make_float2(low, high);
        }
        __syncthreads();
        uint32_t prob[2][4];
        float factor[2];
        softmax_tile(prob, factor, state, shared.scores, g, t);
#pragma unroll
        for (int column = 0; column < COLUMN_TILES; ++column)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[column][i] *= factor[i / 2];
        value_tile(acc, prob, shared.stages[slot].v, warp, lane);
        slot = slot + 1 == STAGES ? 0 : slot + 1;
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        state.sum[half] += __shfl_xor_sync(0xffffffffu, state.sum[half], 1);
        state.sum[half] += __shfl_xor_sync(0xffffffffu, state.sum[half], 2);
    }
#if ATTEND_CLUSTER
    cluster_wait();
    if (split < active) send(shared.reused.received, acc, state, split, p.splits, warp, g, t);
    cluster_arrive();
    cluster_wait();
    merge_received(p, shared.reused.received, row, head, split, active);
#else
    if (active == 1) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float inv = __frcp_rn(state.sum[half]);
#pragma unroll
            for (int column = 0; column < COLUMN_TILES; ++column)
                if (g + 8 * half < GROUP)
                    store_pair(p, row, head, g + 8 * half, (warp * COLUMN_TILES + column) * 8 + 2 * t,
                               acc[column][2 * half] * inv, acc[column][2 * half + 1] * inv);
        }
    } else if (leave_partial(p, shared, acc, state, row, head, split, active, warp, g, t)) {
        merge_partials(p, shared, row, head, active);
    }
#endif
}
