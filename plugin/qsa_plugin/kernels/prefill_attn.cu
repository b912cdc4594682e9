// Stage 6 of prefill: grouped-query attention of a tile of neighbouring rows over the paged pool, on tensor cores, fp32
// online softmax. One CTA a (tile, KV head): the GROUP query heads of ROWS rows are the MROWS rows of the left operand,
// so that each key and value is loaded once for all of them.
//
// QSA_DENSE 1: rows t < LIST_WIDTH, plain causal over consecutive tokens.
// QSA_DENSE 0: sparse rows, over the entries of prefill_union.cu, each block's rows masked by its membership bits.
//
// Each warp owns 16 rows of the left operand and all D columns of their result. K and V of a step of NT tokens have one
// buffer each: V arrives while the logits are computed, the next K during softmax and the product with V.
#include "prefill.cuh"

constexpr bool DENSE = QSA_DENSE;
constexpr int WARPS = QSA_WARPS;
constexpr int NT = QSA_NT;  // tokens a step
constexpr int THREADS = WARPS * 32;
constexpr int MROWS = WARPS * 16;
constexpr int ROWS = DENSE ? MROWS / GROUP : UNION_ROWS;
constexpr int CHUNKS = D / 8;  // 16-byte chunks of a head's row
static_assert(ROWS >= 1 && ROWS * GROUP <= MROWS, "the heads of a row stay together");
static_assert(!UNION_SPLIT, "one class of entries");
static_assert(NT % 16 == 0 && NT % R == 0 && NT % WARPS == 0, "steps hold whole mma tiles and whole blocks");

struct AttnParams {
    const surf_t* q;            // [batch, seq_len, HQ, D], normed and roped; may be `out`
    const surf_t* pool;         // [2*N, PAGE, HKV, POOL_WIDTH]
    surf_t* out;                // [batch, seq_len, HQ, D]
    const int* page_table;      // [batch, 2, pages_per_seq]
    const int* live;            // [batch]
    const int* past;            // [batch], or null: 0
    const uint32_t* entries;    // sparse: [batch, tiles, UNION_CLASSES, UNION_REGION], one class
    const int* counts;          // sparse: [batch, tiles, UNION_COUNTS]
    int seq_len;
    int pages_per_seq;
    int row_begin;              // sparse: tile i starts at row max(first_sparse, row_begin) + i * ROWS; dense: 0
    int rows;                   // rows of the range from row_begin
    int tiles;                  // tiles a sequence
    float scale_log2;           // softmax scale * log2(e)
};

// What one step reads: pool row of each token in both planes, and the rows of the tile that may attend to it.
struct Step {
    uint32_t k_row[NT];  // page id * PAGE + row in page, or NOTHING
    uint32_t v_row[NT];
    uint32_t rows[NT];   // bit r: row r of the tile (sparse only; dense compares positions)
};
constexpr uint32_t NOTHING = 0xffffffffu;

struct Shared {
    surf_t q[MROWS * D];  // later the result
    surf_t k[NT * D];
    surf_t v[NT * D];
    Step step[2];
};

// Element offset of a 16-byte chunk: chunks of a row are permuted so that the 8 rows of an ldmatrix hit 8 bank groups.
__device__ __forceinline__ int swizzled(int row, int chunk) {
    constexpr int PERIOD = CHUNKS < 8 ? 8 / CHUNKS : 1;  // rows that 128 bytes hold
    constexpr int MASK = CHUNKS < 8 ? CHUNKS - 1 : 7;
    return row * D + ((chunk ^ (row / PERIOD & MASK)) << 3);
}

// Copies one plane of a step; tokens that are NOTHING become zeros, so that no stale NaN meets a zero weight.
__device__ __forceinline__ void load_plane(surf_t* tile, const surf_t* pool, const uint32_t* pool_rows, int kv_head) {
#pragma unroll 8  // copies in flight; more would not fit the registers
    for (int i = threadIdx.x; i < NT * CHUNKS; i += THREADS) {
        const int token = i / CHUNKS, chunk = i % CHUNKS;
        const uint32_t pool_row = pool_rows[token];
        const bool valid = pool_row != NOTHING;
        const int64_t head_row = static_cast<int64_t>(valid ? pool_row : 0) * HKV + kv_head;
        const surf_t* source = pool + head_row * POOL_WIDTH + chunk * 8;
        cp_async_16(tile + swizzled(token, chunk), source, valid);
    }
}

struct Tile {
    int b;
    int position;          // of the tile's first row
    int count;             // real rows
    const int* page_table; // [2, pages_per_seq] of the sequence
    const uint32_t* entries;
    int entry_count;
};

// Threads 0 .. NT-1 (in turns, if there are fewer) describe one token each.
__device__ __forceinline__ void describe_step(Step& step, const Tile& tile, int index, int pages_per_seq) {
    const int end = tile.position + tile.count;  // tokens that any row attends to lie before it
    for (int i = threadIdx.x; i < NT; i += THREADS) {
        int token = index * NT + i;
        uint32_t rows = 0;
        if (!DENSE) {
            const int entry = token / R;
            const uint32_t packed = entry < tile.entry_count ? tile.entries[entry] : 0u;
            token = entry < tile.entry_count ? static_cast<int>(packed >> MEMBER_BITS) * R + i % R : end;
            // rows at positions >= token: no block but a tail reaches past a member's own position
            const int first = max(0, token - tile.position);
            rows = first < MEMBER_BITS ? (packed & ((1u << MEMBER_BITS) - 1u)) >> first << first : 0u;
        }
        const bool valid = token < end;
        const int page = token / PAGE, row = token % PAGE;
        step.k_row[i] = valid ? static_cast<uint32_t>(tile.page_table[page]) * PAGE + row : NOTHING;
        step.v_row[i] = valid ? static_cast<uint32_t>(tile.page_table[pages_per_seq + page]) * PAGE + row : NOTHING;
        if (!DENSE) step.rows[i] = rows;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, QSA_CTAS) qsa_prefill_attn(const __grid_constant__ AttnParams p) {
    extern __shared__ __align__(128) unsigned char raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, quad = lane % 4;
    const int kv_head = blockIdx.x % HKV, work = blockIdx.x / HKV;
    const int b = work % (gridDim.x / HKV / p.tiles), index = p.tiles - 1 - work / (gridDim.x / HKV / p.tiles);
    const Sequence sequence = sequence_of(p.live, p.past, b, p.seq_len);
    const int start = (DENSE ? 0 : max(sequence.first_sparse, p.row_begin)) + index * ROWS;
    const int end = min(DENSE ? min(sequence.live, sequence.first_sparse) : sequence.live, p.row_begin + p.rows);
    if (start >= end) return;

    Tile tile;
    tile.b = b;
    tile.position = sequence.past + start;
    tile.count = min(ROWS, end - start);
    tile.page_table = p.page_table + static_cast<int64_t>(b) * 2 * p.pages_per_seq;
    const int64_t list = static_cast<int64_t>(b) * p.tiles + index;
    tile.entries = DENSE ? nullptr : p.entries + list * UNION_REGION;
    tile.entry_count = DENSE ? 0 : p.counts[list * UNION_COUNTS];
    const int tokens = DENSE ? tile.position + tile.count : tile.entry_count * R;
    const int steps = (tokens + NT - 1) / NT;

    // the rows of the left operand: m = row * GROUP + head in group
    const int64_t first_head = ((static_cast<int64_t>(b) * p.seq_len + start) * HQ + kv_head * GROUP) * D;
    auto head_offset = [&](int m) { return first_head + (static_cast<int64_t>(m / GROUP) * HQ + m % GROUP) * D; };
    describe_step(shared.step[0], tile, 0, p.pages_per_seq);
    for (int i = threadIdx.x; i < MROWS * CHUNKS; i += THREADS) {
        const int m = i / CHUNKS, chunk = i % CHUNKS;
        const bool valid = m < tile.count * GROUP;
        cp_async_16(shared.q + swizzled(m, chunk), p.q + (valid ? head_offset(m) + chunk * 8 : first_head), valid);
    }
    __syncthreads();
    load_plane(shared.k, p.pool, shared.step[0].k_row, kv_head);
    cp_async_commit();

    const int row_of[2] = {(warp * 16 + g) / GROUP, (warp * 16 + g + 8) / GROUP};  // of this lane's two operand rows
    float result[D / 8][4] = {};
    float row_max[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY}, row_sum[2] = {0.f, 0.f};
    // ldmatrix addresses: lane l points at row l%8 of 8x8 matrix l/8
    const int matrix = lane / 8, matrix_row = lane % 8;

    for (int step_index = 0; step_index < steps; ++step_index) {
        const Step& step = shared.step[step_index & 1];
        cp_async_wait<0>();
        __syncthreads();  // K is here; everyone has left V and the step before
        load_plane(shared.v, p.pool, step.v_row, kv_head);
        cp_async_commit();
        if (step_index + 1 < steps) describe_step(shared.step[~step_index & 1], tile, step_index + 1, p.pages_per_seq);

        float logits[NT / 8][4] = {};
#pragma unroll
        for (int k = 0; k < D / 16; ++k) {
            uint32_t a[4];
            ldmatrix_x4(a, shared.q + swizzled(warp * 16 + (matrix & 1) * 8 + matrix_row, k * 2 + matrix / 2));
#pragma unroll
            for (int n = 0; n < NT / 16; ++n) {
                uint32_t keys[4];
                ldmatrix_x4(keys, shared.k + swizzled(n * 16 + matrix / 2 * 8 + matrix_row, k * 2 + (matrix & 1)));
                mma_16816(logits[2 * n], a, keys[0], keys[1]);
                mma_16816(logits[2 * n + 1], a, keys[2], keys[3]);
            }
        }
        __syncthreads();  // everyone has left K; the next step is described
        if (step_index + 1 < steps) load_plane(shared.k, p.pool, shared.step[~step_index & 1].k_row, kv_head);
        cp_async_commit();

        float new_max[2] = {row_max[0], row_max[1]};
#pragma unroll
        for (int n = 0; n < NT / 8; ++n) {
            bool allowed[4];
            if (DENSE) {
                const int token = step_index * NT + n * 8 + quad * 2 - tile.position;  // from the tile's first row on
#pragma unroll
                for (int i = 0; i < 4; ++i) allowed[i] = token + (i & 1) <= row_of[i / 2];
            } else {
                const uint2 rows = *reinterpret_cast<const uint2*>(step.rows + n * 8 + quad * 2);
#pragma unroll
                for (int i = 0; i < 4; ++i) allowed[i] = ((i & 1 ? rows.y : rows.x) >> row_of[i / 2] & 1u) != 0;
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                logits[n][i] = allowed[i] ? logits[n][i] * p.scale_log2 : NEGATIVE_INFINITY;
                new_max[i / 2] = fmaxf(new_max[i / 2], logits[n][i]);
            }
        }
        float correction[2], base[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            new_max[i] = fmaxf(new_max[i], __shfl_xor_sync(0xffffffffu, new_max[i], 1));
            new_max[i] = fmaxf(new_max[i], __shfl_xor_sync(0xffffffffu, new_max[i], 2));
            base[i] = new_max[i] == NEGATIVE_INFINITY ? 0.f : new_max[i];  // a row that has met no token yet
            correction[i] = exp2f(row_max[i] - base[i]);
            row_max[i] = new_max[i];
            row_sum[i] *= correction[i];
        }
        if (__any_sync(0xffffffffu, correction[0] != 1.f || correction[1] != 1.f)) {
#pragma unroll
            for (int n = 0; n < D / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) result[n][i] *= correction[i / 2];
        }
#pragma unroll
        for (int n = 0; n < NT / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                logits[n][i] = exp2f(logits[n][i] - base[i / 2]);
                row_sum[i / 2] += logits[n][i];
            }
        cp_async_wait<1>();
        __syncthreads();  // V is here
#pragma unroll
        for (int k = 0; k < NT / 16; ++k) {
            const uint32_t a[4] = {pack_surface(logits[2 * k][0], logits[2 * k][1]),
                                   pack_surface(logits[2 * k][2], logits[2 * k][3]),
                                   pack_surface(logits[2 * k + 1][0], logits[2 * k + 1][1]),
                                   pack_surface(logits[2 * k + 1][2], logits[2 * k + 1][3])};
#pragma unroll
            for (int n = 0; n < D / 16; ++n) {
                uint32_t values[4];
                const int row = k * 16 + (matrix & 1) * 8 + matrix_row;
                ldmatrix_x4_trans(values, shared.v + swizzled(row, n * 2 + matrix / 2));
                mma_16816(result[2 * n], a, values[0], values[1]);
                mma_16816(result[2 * n + 1], a, values[2], values[3]);
            }
        }
    }

    float inverse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        row_sum[i] += __shfl_xor_sync(0xffffffffu, row_sum[i], 1);
        row_sum[i] += __shfl_xor_sync(0xffffffffu, row_sum[i], 2);
        inverse[i] = row_sum[i] == 0.f ? 0.f : 1.f / row_sum[i];
    }
    // through this warp's own rows of q, for whole-row stores
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
            *reinterpret_cast<uint32_t*>(shared.q + swizzled(warp * 16 + g + i * 8, n) + quad * 2) =
                pack_surface(result[n][2 * i] * inverse[i], result[n][2 * i + 1] * inverse[i]);
    __syncwarp();
    for (int i = lane; i < 16 * CHUNKS; i += 32) {
        const int m = warp * 16 + i / CHUNKS, chunk = i % CHUNKS;
        if (m < tile.count * GROUP)
            *reinterpret_cast<uint4*>(p.out + head_offset(m) + chunk * 8) =
                *reinterpret_cast<const uint4*>(shared.q + swizzled(m, chunk));
    }
}
