// Decode, kernel 4: attention of one row's query heads over its listed tokens, split over the tokens (split-K).
//   A thread block takes one KV head of one row and a contiguous range of tiles of 8 tokens a warp. The warps share the
//   work of a tile twice: each computes the scores and probabilities of its own 8 tokens for all 16 head rows, then each
//   multiplies the whole tile's probabilities with its share of the value columns. Softmax in fp32, base 2.
//   The partial results are merged in the order of the splits, so that the result is bitwise repeatable: with clusters
//   each block sends every other block its share of the columns through distributed shared memory; without, the last
//   block of a (row, KV head) to finish reads all of them back from the workspace.
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
constexpr int LOAD_LANES = CHUNKS < 8 ? CHUNKS : 8;     // lanes that load one token's rows, 128 bytes at a time
constexpr int LOADS = CHUNKS / LOAD_LANES;
constexpr int TOKENS_A_PASS = THREADS / LOAD_LANES;
constexpr int PASSES = TILE / TOKENS_A_PASS;
constexpr int PROB_PITCH = TILE + 8;           // surface elements: rows 16 bytes apart modulo 128
static_assert(COLUMN_TILES >= 1 && PASSES >= 1, "too many warps for this head size");

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
    Stage stages[STAGES];
    Reused reused;
    surf_t prob[ROWS][PROB_PITCH];
    float maximum[WARPS][ROWS];   // of the warps' tokens
    float sum[WARPS][ROWS];
    float weights[MAX_SPLITS][ROWS];  // of the splits in the merge, divided by the sum of all
    int last;
};
static_assert(sizeof(Shared) <= ATTEND_SHARED, "the launch reserves too little shared memory");

// Index of a 16-byte chunk in a [tokens, D] tile: rows are permuted so that 8 tokens' equal columns hit 8 bank groups.
__device__ __forceinline__ int swizzled(int token, int chunk) {
    const int key = CHUNKS >= 8 ? token & 7 : (token >> 1) & 3;
    return (token * CHUNKS + (chunk ^ key)) * 8;
}

// Where this thread's tokens of one tile lie. Read well before the tile is loaded, so that the lookup is off the path.
struct Lookup {
    int4 block[PASSES];
};

__device__ __forceinline__ void look_up(Lookup& lookup, const Block* list, int tile, int tokens) {
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const int i = tile * TILE + pass * TOKENS_A_PASS + threadIdx.x / LOAD_LANES;
        if (i < tokens) lookup.block[pass] = __ldcg(reinterpret_cast<const int4*>(list + i / R));
    }
}

__device__ __forceinline__ void load_tile(Stage& stage, const Lookup& lookup, const surf_t* pool, int head, int tile,
                                          int tokens) {
    const int lane = threadIdx.x % LOAD_LANES;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const int token = pass * TOKENS_A_PASS + threadIdx.x / LOAD_LANES, i = tile * TILE + token;
        const bool exists = i < tokens;  // missing tokens become zeros: their probability is 0, and 0 * NaN is not
        const int4 block = lookup.block[pass];
        const int page_row = (block.x + i % R) % PAGE;
        const surf_t* k = pool + (exists ? pool_offset(block.y, page_row, head) + lane * 8 : 0);
        const surf_t* v = pool + (exists ? pool_offset(block.z, page_row, head) + lane * 8 : 0);
        const int to = swizzled(token, lane);  // further chunks are 8 * LOAD_LANES elements on: the swizzle keeps them
#pragma unroll
        for (int j = 0; j < LOADS; ++j) cp_async_16(stage.k + to + j * 64, k + (exists ? j * 64 : 0), exists);
#pragma unroll
        for (int j = 0; j < LOADS; ++j) cp_async_16(stage.v + to + j * 64, v + (exists ? j * 64 : 0), exists);
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

__device__ void store_zeros(const DecodeParams& p, int row, int head) {
    surf_t* out = p.output + (static_cast<int64_t>(row) * HQ + head * GROUP) * D;
    for (int i = threadIdx.x; i < GROUP * D / 2; i += THREADS) reinterpret_cast<uint32_t*>(out)[i] = 0u;
}

__device__ __forceinline__ void store_pair(const DecodeParams& p, int row, int head, int r, int column, float low,
                                           float high) {
    surf_t* out = p.output + (static_cast<int64_t>(row) * HQ + head * GROUP + r) * D + column;
    *reinterpret_cast<uint32_t*>(out) = pack_surface(low, high);
}

// The sum of each row over all warps, in the order of the warps; ends behind a barrier, in shared.sum[0].
__device__ __forceinline__ void sum_rows(Softmax& state, Shared& shared, int warp, int g, int t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = state.sum[half];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (t == 0) shared.sum[warp][g + 8 * half] = sum;
        if (t == 0 && warp == 0) shared.maximum[0][g + 8 * half] = state.maximum[half];
    }
    __syncthreads();
    if (threadIdx.x < ROWS) {
        float sum = shared.sum[0][threadIdx.x];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) sum += shared.sum[w][threadIdx.x];
        shared.sum[0][threadIdx.x] = sum;
    }
    __syncthreads();
}

// The merged row = sum_s 2^(m_s - m) acc_s / sum_s 2^(m_s - m) l_s. Fills shared.weights with 2^(m_s - m) / (the lower
// sum), one row a half warp, one split a lane; stats(s, r) gives (m_s, l_s). Ends behind a barrier.
template <class Stats>
__device__ __forceinline__ void weigh_splits(Shared& shared, int active, const Stats& stats) {
    const int s = threadIdx.x % 16;
    for (int r = threadIdx.x / 16; r < ROWS; r += THREADS / 16) {
        const float2 mine = s < active && r < GROUP ? stats(s, r) : make_float2(minus_infinity(), 0.f);
        float maximum = mine.x;
#pragma unroll
        for (int step = 8; step > 0; step >>= 1) maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, step));
        const float weight = s < active && r < GROUP ? exp2f(mine.x - maximum) : 0.f;
        float sum = weight * mine.y;
#pragma unroll
        for (int step = 8; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        shared.weights[s][r] = weight * __frcp_rn(sum);
    }
    __syncthreads();
}

#if ATTEND_CLUSTER
__device__ __forceinline__ void send(Shared& shared, const float (&acc)[COLUMN_TILES][4], int split, int splits, int warp,
                                     int g, int t) {
    const int tiles_a_block = (ALL_COLUMN_TILES + splits - 1) / splits;
#pragma unroll
    for (int column = 0; column < COLUMN_TILES; ++column) {
        const int tile = warp * COLUMN_TILES + column;
        const int slot = (split * tiles_a_block + tile / splits) * GROUP * 4 + t;
        const uint32_t to = cluster_address(shared.reused.received.parts + slot, tile % splits);
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (g + 8 * half < GROUP)
                st_cluster(to + (g + 8 * half) * 4 * sizeof(float2), acc[column][2 * half], acc[column][2 * half + 1]);
    }
    for (int i = threadIdx.x; i < splits * ROWS; i += THREADS) {
        const int r = i % ROWS;
        st_cluster(cluster_address(&shared.reused.received.stats[split][r], i / ROWS), shared.maximum[0][r],
                   shared.sum[0][r]);
    }
}

__device__ __forceinline__ void merge_received(const DecodeParams& p, Shared& shared, int row, int head, int rank,
                                               int active) {
    const Received& received = shared.reused.received;
    weigh_splits(shared, active, [&](int s, int r) { return received.stats[s][r]; });
    const int tiles_a_block = (ALL_COLUMN_TILES + p.splits - 1) / p.splits;
    for (int i = threadIdx.x; i < tiles_a_block * GROUP * 4; i += THREADS) {
        const int r = i / 4 % GROUP, tile = i / (GROUP * 4) * p.splits + rank;
        if (tile >= ALL_COLUMN_TILES) continue;
        float low = 0.f, high = 0.f;
#pragma unroll 8
        for (int s = 0; s < active; ++s) {
            const float2 part = received.parts[s * tiles_a_block * GROUP * 4 + i];
            low = fmaf(shared.weights[s][r], part.x, low);
            high = fmaf(shared.weights[s][r], part.y, high);
        }
        store_pair(p, row, head, r, tile * 8 + i % 4 * 2, low, high);
    }
}
#else
// Partial results and statistics to the workspace; true in the block that came last.
__device__ __forceinline__ bool leave_partial(const DecodeParams& p, Shared& shared, const float (&acc)[COLUMN_TILES][4],
                                              int row, int head, int split, int active, int warp, int g, int t) {
    const int64_t slice = (static_cast<int64_t>(row) * HKV + head) * p.splits + split;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = g + 8 * half;
        if (r >= GROUP) continue;
#pragma unroll
        for (int column = 0; column < COLUMN_TILES; ++column)
            *reinterpret_cast<float2*>(p.partials + (slice * ROWS + r) * D + (warp * COLUMN_TILES + column) * 8 + 2 * t) =
                make_float2(acc[column][2 * half], acc[column][2 * half + 1]);
    }
    if (threadIdx.x < GROUP) {
        p.stats[slice * 2 * ROWS + threadIdx.x] = shared.maximum[0][threadIdx.x];
        p.stats[slice * 2 * ROWS + ROWS + threadIdx.x] = shared.sum[0][threadIdx.x];
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
    const float* stats = p.stats + first * 2 * ROWS;
    weigh_splits(shared, active, [&](int s, int r) {
        return make_float2(__ldcg(stats + s * 2 * ROWS + r), __ldcg(stats + s * 2 * ROWS + ROWS + r));
    });
    float4 total[ITEMS] = {};
#pragma unroll 2
    for (int s = 0; s < active; ++s) {
        const float4* parts = reinterpret_cast<const float4*>(p.partials + (first + s) * ROWS * D);
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            const int i = item * THREADS + threadIdx.x;
            if (i >= QUADS) continue;
            const float weight = shared.weights[s][i / (D / 4)];
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
        store_pair(p, row, head, r, column, total[item].x, total[item].y);
        store_pair(p, row, head, r, column + 2, total[item].z, total[item].w);
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_attend(const __grid_constant__ DecodeParams p) {
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int split = blockIdx.x % p.splits, head = blockIdx.x / p.splits % HKV, row = blockIdx.x / p.splits / HKV;
    const int length = length_in_reach(p, row);
    const int tokens = listed_tokens(length), tiles = (tokens + TILE - 1) / TILE, active = min(p.splits, tiles);
    const int begin = split < active ? tiles * split / active : 0;  // never empty for an active split
    const int end = split < active ? tiles * (split + 1) / active : 0;
    const Block* list = p.blocks + static_cast<int64_t>(row) * (BUDGET_BLOCKS + 1);
    grid_dependency_wait();
    const int live = __ldcg(p.live + row);  // read beside the first look-up, not before it

    // prologue: queries and the first STAGES - 1 tiles on their way
    Lookup lookup[STAGES];
#pragma unroll
    for (int s = 0; s < STAGES; ++s) look_up(lookup[s], list, begin + s, begin + s < end ? tokens : 0);
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
        if (begin + s < end) load_tile(shared.stages[s], lookup[s], p.pool, head, begin + s, tokens);
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
        if (coming < end) load_tile(shared.stages[(slot + STAGES - 1) % STAGES], next, p.pool, head, coming, tokens);
        cp_async_commit();
        if (coming + 1 < end) look_up(next, list, coming + 1, tokens);

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
