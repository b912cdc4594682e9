// Decode, kernel 1: the new token, and the score of every complete block of every row.
//   block 0 of a row appends the token (decode_append.cuh); the others score, each with index queries that it prepares
//   for itself, so that neither waits for the other. The block key that this token completes is not in the pool yet: the
//   warp that scores its block computes it as well.
// A warp takes tiles of 16 blocks, which always lie in one page, with the block keys straight from the pool's V tails.
// Nothing is scored while every block is selected anyway.
#include "decode_append.cuh"

#ifndef SCORE_STAGE
#define SCORE_STAGE 0  // 1: the stage alone: queries come prepared, every row is scored, nothing is appended
#endif
constexpr int WARPS = APPEND_WARPS;
constexpr int PIECES = ID / 32;     // 16-byte pieces of a key or query that one lane of a product holds
constexpr int KEY_CHUNKS = ID / 8;  // 16-byte chunks of a key
constexpr int KEYS_A_LOAD = 32 / KEY_CHUNKS;  // whole keys of neighbouring lanes: DRAM gives them faster than parts of more
static_assert(SCORE_TILE * R <= PAGE, "a tile lies in one page");
static_assert(IH <= WARPS, "one warp an indexer head");

// The keys of a tile. Chunks of odd keys change places, so that the reads of a product hit all banks.
struct Tile {
    uint4 chunks[SCORE_TILE * KEY_CHUNKS];
    __device__ __forceinline__ uint4& at(int key, int chunk) {
        return chunks[key * KEY_CHUNKS + (KEY_CHUNKS >= 8 ? chunk ^ (key & 1) << 2 : chunk)];
    }
};

// The V page of a tile, or -1 where the pool holds none of its blocks or the table no V page. Read a tile ahead.
__device__ __forceinline__ int page_of_tile(const DecodeParams& p, const int* v_pages, int tile, int stored) {
    const int page = tile * SCORE_TILE < stored ? v_pages[tile * SCORE_TILE * R / PAGE] : -1;
    return page >= p.num_pages && page - p.num_pages < p.num_pages ? page : -1;
}

// Starts copies of this lane's share of a tile; zeros for blocks that the pool does not hold.
__device__ __forceinline__ void load_keys(Tile& keys, const DecodeParams& p, int page, int tile, int stored, int lane) {
    const int own = lane / KEY_CHUNKS, chunk = lane % KEY_CHUNKS, row = tile * SCORE_TILE * R % PAGE + own * R;
    const surf_t* source = page < 0 ? p.pool : p.pool + pool_offset(page, row, 0) + D + chunk * 8;
#pragma unroll
    for (int i = 0; i < SCORE_TILE; i += KEYS_A_LOAD) {
        const bool exists = page >= 0 && tile * SCORE_TILE + i + own < stored;
        cp_async_16(&keys.at(i + own, chunk), source + (exists ? i * R * HKV * POOL_WIDTH : 0), exists);
    }
    cp_async_commit();
}

// The block key that this token completes, as the pool will hold it. Called by a whole warp.
__device__ __forceinline__ void make_last_key(const DecodeParams& p, int row, int length, surf_t* key, float* buffer) {
    const int lane = threadIdx.x % 32;
    float x[INDEX_E], mean[INDEX_E];
    load_row(p.index_qk + static_cast<int64_t>(row) * INDEX_WIDTH + IH * ID, lane, x);
    complete_block_key(p, pages_in_range(p, row, (length - 1) / PAGE).k, length - 1, x, mean, buffer);
    store_row(key, lane, mean);
}

struct Shared {
    surf_t queries[IH][ID];
    alignas(16) surf_t last_key[ID];
    float buffers[WARPS][ROTARY];
};

extern "C" __global__ void __launch_bounds__(WARPS * 32) decode_score(const __grid_constant__ DecodeParams p) {
#if !SCORE_STAGE
    __shared__ __align__(16) Shared shared;
#endif
    __shared__ Tile tiles_of_warps[WARPS];
    const int parts = p.score_ctas + !SCORE_STAGE;
    const int row = blockIdx.x / parts, cta = static_cast<int>(blockIdx.x % parts) - !SCORE_STAGE;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    grid_dependency_wait();
    grid_dependency_launch();
    const int length = length_in_reach(p, row);  // the same in the whole block
#if !SCORE_STAGE
    if (cta < 0) {
        append_token(p, row, length, shared.buffers[warp]);
        return;
    }
#endif
    const int blocks = complete_blocks(length), tiles = (blocks + SCORE_TILE - 1) / SCORE_TILE;
    if (blocks <= (SCORE_STAGE ? 0 : BUDGET_BLOCKS) || cta >= tiles) return;
    const int* v_pages = p.page_table + (static_cast<int64_t>(row) * 2 + 1) * p.pages_per_seq;
    const int stored = SCORE_STAGE ? blocks : (length - 1) / R;  // block keys in the pool
    const int step = WARPS * p.score_ctas;                       // tiles
    int tile = cta + warp * p.score_ctas;
    Tile& keys = tiles_of_warps[warp];
    load_keys(keys, p, page_of_tile(p, v_pages, tile, stored), tile, stored, lane);
    int next_page = page_of_tile(p, v_pages, tile + step, stored);

#if SCORE_STAGE
    const surf_t* queries = p.queries + static_cast<int64_t>(row) * IH * ID;
#else
    const surf_t* queries = shared.queries[0];
    const bool completes = length % R == 0;  // in the last tile
    const int tiles_before = tiles - 1 - cta;
    if (completes && tiles_before % p.score_ctas == 0 && tiles_before / p.score_ctas % WARPS == warp)
        make_last_key(p, row, length, shared.last_key, shared.buffers[warp]);
    const int head = WARPS - 1 - warp;  // the last warps: the first ones may have the last key to make
    if (head < IH) {
        float x[INDEX_E], weight[INDEX_E];
        Rope<INDEX_E> rope;
        load_row(p.index_qk + static_cast<int64_t>(row) * INDEX_WIDTH + head * ID, lane, x);
        load_row(p.iq_weight, lane, weight);
        load_rope(rope, p.cos_sin + static_cast<int64_t>(length - 1) * ROTARY, lane);
        warp_norm_indexer(x, weight, p.eps);
        warp_rope(x, rope, shared.buffers[warp], lane);
        store_row(shared.queries[head], lane, x);
    }
    __syncthreads();
#endif
    for (; tile < tiles; tile += step) {
        cp_async_wait<0>();
        __syncwarp();
#if !SCORE_STAGE
        if (completes && tile == tiles - 1) {
            if (lane < KEY_CHUNKS)
                keys.at((blocks - 1) % SCORE_TILE, lane) = reinterpret_cast<const uint4*>(shared.last_key)[lane];
            __syncwarp();
        }
#endif
        float dots[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int j = 0; j < PIECES; ++j) {
            uint4 query = make_uint4(0, 0, 0, 0);  // column g of the product: indexer head g
            if (g < IH) query = *reinterpret_cast<const uint4*>(queries + g * ID + 32 * j + 8 * t);
            score_mma(dots, keys.at(g, 4 * j + t), keys.at(g + 8, 4 * j + t), query);
        }
        __syncwarp();  // the products have read the keys; other warps' loads fill the gap
        if (tile + step < tiles) load_keys(keys, p, next_page, tile + step, stored, lane);
        next_page = page_of_tile(p, v_pages, tile + 2 * step, stored);
        const int block = tile * SCORE_TILE + g + 8 * (t & 1);
        const float score = score_of_dots(dots, t);
        uint32_t* scores = p.scores + static_cast<int64_t>(row) * p.score_stride;
#if SCORE_STAGE
        if (t < 2 && block < blocks) scores[block] = __float_as_uint(score);
#else
        const uint32_t key = block < blocks ? score_key(score) : 0u;
        if (t < 2 && block < (blocks + 3) / 4 * 4) scores[block] = key;  // whole quads of keys, 0 at the end
        uint32_t* maxima = p.maxima + static_cast<int64_t>(row) * maxima_stride(p);
        const uint32_t highest = __reduce_max_sync(0xffffffffu, key);
        if (lane == 0) maxima[tile] = highest;
        if (tile == tiles - 1 && lane > 0 && tile + lane < (tiles + 3) / 4 * 4) maxima[tile + lane] = 0u;
#endif
    }
}
