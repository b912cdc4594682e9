// Stage 6 of prefill on compute capability 9.0: what prefill_attn.cu computes, with wgmma and a warpgroup that only
// loads.
//
// One CTA a (tile, KV head). Two warpgroups compute: each has ROWS_A_GROUP neighbouring rows, whose heads fill the 64
// rows of its left operand. Both read the keys and values that the third warpgroup brings, so that all those rows share
// a load; blocks that only the rows of one selected come in steps that the other skips. Keys and values take turns in a
// ring of four slots of NT tokens.
//
// A slot is slabs of 64 columns; in a slab a token is 128 bytes, its 16-byte chunks permuted by token % 8, which is the
// 128-byte swizzle that wgmma reads, for keys (columns along K) and values (columns along N) alike.
#include "prefill.cuh"
#include "wgmma.cuh"

constexpr bool DENSE = QSA_DENSE;
constexpr int ROWS_A_GROUP = QSA_ROWS_A_GROUP;
constexpr int ROWS = 2 * ROWS_A_GROUP;
constexpr int NT = 64;          // tokens a slot
constexpr int SLABS = D / 64;
constexpr int SLAB_BYTES = NT * 128;
constexpr int SLOT_BYTES = SLABS * SLAB_BYTES;
constexpr int SLOTS = 4;        // K, V, K, V
constexpr int THREADS = 384;
constexpr uint32_t NOTHING = 0xffffffffu;  // in place of a pool row
constexpr int TOKENS_A_WARP = NT / 4;  // of the loading warpgroup
static_assert(ROWS_A_GROUP * GROUP <= 64, "the heads of a row stay together");
static_assert(TOKENS_A_WARP == 16 && TOKENS_A_WARP % R == 0, "lanes 0-15 look up keys, lanes 16-31 values");
static_assert(D % 64 == 0, "whole slabs");
static_assert(DENSE || (UNION_SPLIT && UNION_ROWS == ROWS && UNION_STEP * R == NT), "a class for each warpgroup");
static_assert(UNION_STEP <= 32, "a lane an entry");
static_assert(GROUP >= 8, "the 16 operand rows of a warp belong to three rows at most");

// as in prefill_attn.cu
struct AttnParams {
    const surf_t* q;
    const surf_t* pool;
    surf_t* out;
    const int* page_table;
    const int* live;
    const int* past;
    const uint32_t* entries;
    const int* counts;
    int seq_len;
    int pages_per_seq;
    int row_begin;
    int rows;
    int tiles;
    float scale_log2;
};

struct Shared {
    unsigned char q[2][SLABS * 64 * 128];  // of each computing warpgroup; later its result
    unsigned char slots[SLOTS][SLOT_BYTES];
    uint64_t full[SLOTS];
    uint64_t empty[SLOTS];
};

__device__ __forceinline__ void barrier_init(uint64_t& barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t& barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t& barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@done bra ready;\nbra again;\nready:\n}" ::"r"(
            shared_address(&barrier)),
        "r"(parity)
        : "memory");
}
// Arrives when all copies that this thread has issued are there.
__device__ __forceinline__ void barrier_arrive_after_copies(uint64_t& barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}
template <int COUNT>
__device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
__device__ __forceinline__ void warpgroup_sync(int group) {
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

// Byte offset of a 16-byte chunk in slabs of `tokens` rows.
__device__ __forceinline__ int swizzled(int tokens, int row, int chunk) {
    return (chunk / 8 * tokens + row) * 128 + ((chunk % 8 ^ row % 8) << 4);
}

struct Tile {
    int position;           // of the tile's first row
    int count;              // real rows
    int steps;              // of all classes
    int class_steps[3];     // sparse: steps for both computing warpgroups, for the first alone, for the second alone
    int kv_head;
    const int* page_table;  // [2, pages_per_seq] of the sequence
    const uint32_t* entries;  // [UNION_CLASSES, UNION_REGION]
};

// Steps come in this order: those for both, then those for one in turns, then what is left of the longer class.
struct Place {
    int reader;  // 0: both computing warpgroups, 1 or 2: one of them alone
    int index;   // in its class
};
__device__ __forceinline__ Place place_of(const Tile& tile, int step) {
    if (DENSE || step < tile.class_steps[0]) return {0, step};
    const int rest = step - tile.class_steps[0], turns = min(tile.class_steps[1], tile.class_steps[2]);
    if (rest < 2 * turns) return {1 + rest % 2, rest / 2};
    return {tile.class_steps[1] > turns ? 1 : 2, rest - turns};
}

// Entry i of a step; 0, which has no members, past the last step.
__device__ __forceinline__ uint32_t entry_of(const Tile& tile, int step, int i) {
    if (DENSE || step >= tile.steps) return 0u;
    const Place place = place_of(tile, step);
    return tile.entries[place.reader * UNION_REGION + place.index * UNION_STEP + i];
}

// The loading warpgroup. Lane l of a warp knows one token of the warp's 16 in one plane: lanes 0-15 keys, 16-31 values.
// Lookups run ahead of the copies (entry two steps, page one), because each waits for the one before.
__device__ __forceinline__ void load(const AttnParams& p, const Tile& tile, Shared& shared, int warp, int lane) {
    constexpr int CHUNKS = D / 8, TOKENS_A_COPY = 32 / CHUNKS < 1 ? 1 : 32 / CHUNKS;
    const int end = tile.position + tile.count;  // tokens that any row attends to lie before it
    const int own = warp * TOKENS_A_WARP + lane % TOKENS_A_WARP;
    const int* pages = tile.page_table + (lane < 16 ? 0 : p.pages_per_seq);
    const int chunk = lane % CHUNKS;
    const surf_t* head = p.pool + tile.kv_head * POOL_WIDTH + chunk * 8;

    auto token_at = [&](int step, uint32_t entry) {
        if (DENSE) return step * NT + own;
        return entry == 0 ? end : static_cast<int>(entry >> MEMBER_BITS) * R + own % R;
    };
    auto page_at = [&](int token) { return token < end ? pages[token / PAGE] : 0; };

    uint32_t entry = entry_of(tile, 0, own / R), next_entry = entry_of(tile, 1, own / R);
    int page = page_at(token_at(0, entry));
    int item = 0;  // slots filled so far
    for (int step = 0; step < tile.steps; ++step) {
        const int token = token_at(step, entry);
        const uint32_t row = token < end ? static_cast<uint32_t>(page) * PAGE + token % PAGE : NOTHING;
        entry = next_entry;
        page = page_at(token_at(step + 1, entry));
        next_entry = entry_of(tile, step + 2, own / R);
#pragma unroll
        for (int plane = 0; plane < 2; ++plane, ++item) {
            const int slot = item % SLOTS;
            if (item >= SLOTS) barrier_wait(shared.empty[slot], (item / SLOTS - 1) & 1);
#pragma unroll
            for (int i = 0; i < TOKENS_A_WARP; i += TOKENS_A_COPY) {
                const int mine = i + lane / CHUNKS;
                const uint32_t source = __shfl_sync(0xffffffffu, row, plane * 16 + mine);
                const bool valid = source != NOTHING;  // else zeros, so that no stale NaN meets a zero weight
                const surf_t* from = head + static_cast<int64_t>(valid ? source : 0) * (HKV * POOL_WIDTH);
                cp_async_16(shared.slots[slot] + swizzled(NT, warp * TOKENS_A_WARP + mine, chunk), from, valid);
            }
            barrier_arrive_after_copies(shared.full[slot]);
        }
    }
    cp_async_wait<0>();  // no thread leaves before its copies
}

__device__ __forceinline__ float exp2_fast(float x) {
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}

// -inf where a row does not attend. row_of: the rows of this lane's two operand rows. entry: sparse, entry `lane` of
// the step. first_row: the row of the warp's first operand row.
__device__ __forceinline__ void mask(const Tile& tile, int step, uint32_t entry, int first_row, const int (&row_of)[2],
                                     int quad, float (&logits)[NT / 8][4]) {
    if constexpr (DENSE) {
        const int first = step * NT - tile.position;  // relative to the tile's first row
        if (first + NT - 1 <= 0) return;
#pragma unroll
        for (int n = 0; n < NT / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (first + n * 8 + quad * 2 + (i & 1) > row_of[i / 2]) logits[n][i] = NEGATIVE_INFINITY;
    } else {
        const uint32_t members = entry >> first_row;
        // of each row, a bit an entry
        const uint32_t first_blocks = __ballot_sync(0xffffffffu, members & 1u);
        const uint32_t second_blocks = __ballot_sync(0xffffffffu, members & 2u);
        const uint32_t third_blocks = __ballot_sync(0xffffffffu, members & 4u);
        const int first = static_cast<int>(entry >> MEMBER_BITS) * R - tile.position;  // of the entry, as above
        // a tail block reaches past some members' own positions
        const bool tails = __any_sync(0xffffffffu, entry != 0 && first + R - 1 > 0);
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // of the operand rows
            uint32_t own = row_of[half] == first_row ? first_blocks : second_blocks;
            own = (row_of[half] == first_row + 2 ? third_blocks : own) >> quad * 2 / R;
#pragma unroll
            for (int n = 0; n < NT / 8; ++n)
                if (!(own & 1u << n * 8 / R))
                    logits[n][half * 2] = logits[n][half * 2 + 1] = NEGATIVE_INFINITY;
        }
        if (!tails) return;
#pragma unroll
        for (int n = 0; n < NT / 8; ++n) {
            const int token = __shfl_sync(0xffffffffu, first, (n * 8 + quad * 2) / R) + quad * 2 % R;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (token + (i & 1) > row_of[i / 2]) logits[n][i] = NEGATIVE_INFINITY;
        }
    }
}

// Logits become weights, exp2 relative to `base`, and are added to `row_sum`. The base follows the maximum only when
// that runs ahead by 2^8: weights up to 256 are as exact as those below 1. Returns whether earlier results must be
// multiplied by `correction` (any row of this warp).
__device__ __forceinline__ bool softmax(
    float (&logits)[NT / 8][4], float (&base)[2], float (&row_sum)[2], float (&correction)[2], float scale_log2) {
    constexpr float AHEAD = 8.f;
    float top[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY};
#pragma unroll
    for (int n = 0; n < NT / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) top[i / 2] = fmaxf(top[i / 2], logits[n][i]);
    bool moved = false;
    float shift[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], 1));
        top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], 2)) * scale_log2;
        const bool move = top[i] > base[i] + AHEAD;
        correction[i] = move ? exp2_fast(base[i] - top[i]) : 1.f;
        base[i] = move ? top[i] : base[i];
        row_sum[i] *= correction[i];
        shift[i] = base[i] == NEGATIVE_INFINITY ? 0.f : base[i];  // a row that has met no token yet
        moved |= move;
    }
#pragma unroll
    for (int n = 0; n < NT / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            logits[n][i] = exp2_fast(fmaf(logits[n][i], scale_log2, -shift[i / 2]));
            row_sum[i / 2] += logits[n][i];
        }
    return __any_sync(0xffffffffu, moved);
}

// One of the two computing warpgroups.
__device__ __forceinline__ void compute(
    const AttnParams& p, const Tile& tile, Shared& shared, int64_t first_head, int group, int warp, int lane) {
    const int g = lane / 4, quad = lane % 4, thread = warp * 32 + lane;
    constexpr int CHUNKS = D / 8;
    const int first_row = group * ROWS_A_GROUP, real = min(ROWS_A_GROUP, tile.count - first_row);
    // the rows of the left operand: m = row * GROUP + head in group
    auto head_offset = [&](int m) {
        return first_head + (static_cast<int64_t>(first_row + m / GROUP) * HQ + m % GROUP) * D;
    };
    unsigned char* q = shared.q[group];
    for (int i = thread; i < 64 * CHUNKS; i += 128) {
        const int m = i / CHUNKS, chunk = i % CHUNKS;
        const bool valid = m < real * GROUP;
        cp_async_16(q + swizzled(64, m, chunk), p.q + (valid ? head_offset(m) : first_head) + chunk * 8, valid);
    }
    cp_async_commit();
    cp_async_wait<0>();
    fence_for_wgmma();
    warpgroup_sync(group);

    // of this lane's two operand rows; those past the last row repeat it and are not stored
    const int row_of[2] = {min(first_row + (warp * 16 + g) / GROUP, ROWS - 1),
                           min(first_row + (warp * 16 + g + 8) / GROUP, ROWS - 1)};
    const int warp_row = first_row + warp * 16 / GROUP;
    const uint64_t q_operand = wgmma_descriptor(shared_address(q), 0);
    const uint64_t slot_operand = wgmma_descriptor(shared_address(shared.slots[0]), SLAB_BYTES);
    float result[D / 8][4] = {};
    float base[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY};  // what the exponents of a row are relative to, in log2
    float row_sum[2] = {0.f, 0.f};
    float logits[NT / 8][4];
    uint32_t weights[NT / 16][4];

    float correction[2];  // of a row's earlier result
    auto issue_keys = [&](int step) {
        const int slot = step * 2 % SLOTS;
        barrier_wait(shared.full[slot], step * 2 / SLOTS & 1);
        const uint64_t keys = slot_operand + slot * (SLOT_BYTES / 16);
        fence_for_wgmma();
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < D / 16; ++k)
            wgmma_ss(logits, q_operand + (k / 4 * (64 * 128) + k % 4 * 32) / 16,
                     keys + (k / 4 * SLAB_BYTES + k % 4 * 32) / 16, k > 0);
        wgmma_commit();
    };
    auto issue_values = [&](int step) {
        const int slot = step * 2 % SLOTS + 1;
        barrier_wait(shared.full[slot], step * 2 / SLOTS & 1);
        const uint64_t values = slot_operand + slot * (SLOT_BYTES / 16);
        fence_for_wgmma();
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < NT / 16; ++k) wgmma_rs(result, weights[k], values + k * 16 * 128 / 16);
        wgmma_commit();
    };
    auto release = [&](int slot) {
        __syncwarp();
        if (lane == 0) barrier_arrive(shared.empty[slot]);
    };
    auto rescale_result = [&] {
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) result[n][i] *= correction[i / 2];
    };
    auto pack = [&] {
#pragma unroll
        for (int n = 0; n < NT / 8; ++n) {
            weights[n / 2][n % 2 * 2] = pack_surface(logits[n][0], logits[n][1]);
            weights[n / 2][n % 2 * 2 + 1] = pack_surface(logits[n][2], logits[n][3]);
        }
    };
    auto is_own = [&](int step) {
        const int reader = place_of(tile, step).reader;
        return reader == 0 || reader == 1 + group;
    };
    // Hands back the slots of steps that are not for this warpgroup; returns the first that is.
    auto skip = [&](int step) {
        for (; step < tile.steps && !is_own(step); ++step)
            for (int slot = step * 2 % SLOTS, end = slot + 2; slot < end; ++slot) {
                barrier_wait(shared.full[slot], step * 2 / SLOTS & 1);  // or this would count for the load before
                release(slot);
            }
        return step;
    };
    // loaded before the products that it masks
    auto own_entry = [&](int step) { return lane < UNION_STEP ? entry_of(tile, step, lane) : 0u; };
    int step = skip(0);
    if (step < tile.steps) {
        const uint32_t entry = own_entry(step);
        issue_keys(step);
        wgmma_wait<0>();
        release(step * 2 % SLOTS);
        mask(tile, step, entry, warp_row, row_of, quad, logits);
        softmax(logits, base, row_sum, correction, p.scale_log2);
        pack();
    }
    // the next step's softmax runs while this step's values are multiplied
    while (step + 1 < tile.steps && is_own(step + 1)) {
        const uint32_t entry = own_entry(step + 1);
        issue_keys(step + 1);
        issue_values(step);
        wgmma_wait<1>();
        release((step + 1) * 2 % SLOTS);
        mask(tile, step + 1, entry, warp_row, row_of, quad, logits);
        const bool rescale = softmax(logits, base, row_sum, correction, p.scale_log2);
        wgmma_wait<0>();
        release(step * 2 % SLOTS + 1);
        if (rescale) rescale_result();
        pack();
        ++step;
    }
    // where steps for one warpgroup take turns, the other one's products fill the gaps
    while (step < tile.steps) {
        issue_values(step);
        wgmma_wait<0>();
        release(step * 2 % SLOTS + 1);
        step = skip(step + 1);
        if (step == tile.steps) break;
        const uint32_t entry = own_entry(step);
        issue_keys(step);
        wgmma_wait<0>();
        release(step * 2 % SLOTS);
        mask(tile, step, entry, warp_row, row_of, quad, logits);
        if (softmax(logits, base, row_sum, correction, p.scale_log2)) rescale_result();
        pack();
    }

    float inverse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        row_sum[i] += __shfl_xor_sync(0xffffffffu, row_sum[i], 1);
        row_sum[i] += __shfl_xor_sync(0xffffffffu, row_sum[i], 2);
        inverse[i] = row_sum[i] == 0.f ? 0.f : 1.f / row_sum[i];
    }
    warpgroup_sync(group);  // everyone has left q; it becomes the buffer for whole-row stores
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
            *reinterpret_cast<uint32_t*>(q + swizzled(64, warp * 16 + g + i * 8, n) + quad * 4) =
                pack_surface(result[n][2 * i] * inverse[i], result[n][2 * i + 1] * inverse[i]);
    __syncwarp();
    for (int i = lane; i < 16 * CHUNKS; i += 32) {
        const int m = warp * 16 + i / CHUNKS, chunk = i % CHUNKS;
        if (m < real * GROUP)
            *reinterpret_cast<uint4*>(p.out + head_offset(m) + chunk * 8) =
                *reinterpret_cast<const uint4*>(q + swizzled(64, m, chunk));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) qsa_prefill_attn(const __grid_constant__ AttnParams p) {
    extern __shared__ __align__(1024) unsigned char raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int batch = gridDim.x / HKV / p.tiles, work = blockIdx.x / HKV;
    const int b = work % batch, index = p.tiles - 1 - work / batch;  // the longest tiles first
    const Sequence sequence = sequence_of(p.live, p.past, b, p.seq_len);
    const int start = (DENSE ? 0 : max(sequence.first_sparse, p.row_begin)) + index * ROWS;
    const int end = min(DENSE ? min(sequence.live, sequence.first_sparse) : sequence.live, p.row_begin + p.rows);
    if (start >= end) return;

    Tile tile;
    tile.position = sequence.past + start;
    tile.count = min(ROWS, end - start);
    tile.kv_head = blockIdx.x % HKV;
    tile.page_table = p.page_table + static_cast<int64_t>(b) * 2 * p.pages_per_seq;
    const int64_t list = static_cast<int64_t>(b) * p.tiles + index;
    tile.entries = DENSE ? nullptr : p.entries + list * (UNION_CLASSES * UNION_REGION);
    tile.steps = DENSE ? (tile.position + tile.count + NT - 1) / NT : 0;
#pragma unroll
    for (int c = 0; c < 3; ++c) {
        tile.class_steps[c] = DENSE ? 0 : (p.counts[list * UNION_COUNTS + c] + UNION_STEP - 1) / UNION_STEP;
        tile.steps += tile.class_steps[c];
    }

    if (threadIdx.x == 0) {
        for (int slot = 0; slot < SLOTS; ++slot) {
            barrier_init(shared.full[slot], 128);  // every loading thread
            barrier_init(shared.empty[slot], 8);   // every computing warp
        }
    }
    __syncthreads();
    if (warpgroup == 0) {
        fewer_registers<40>();
        load(p, tile, shared, warp, lane);
    } else {
        more_registers<232>();
        const int64_t first_head =
            ((static_cast<int64_t>(b) * p.seq_len + start) * HQ + tile.kv_head * GROUP) * D;
        compute(p, tile, shared, first_head, warpgroup - 1, warp, lane);
    }
}
