// Decode, kernel 2: the score of every complete block of every row, from the block keys in the pool's V tails.
// A warp takes tiles of 16 blocks, which always lie in one page. Nothing to do while every block is selected anyway.
// Block keys of earlier steps are loaded before this kernel waits for the one in front, which writes the last one only.
#include "decode.cuh"

#ifndef SCORE_ALWAYS
#define SCORE_ALWAYS 0  // 1: also where every block is selected anyway
#endif
constexpr int WARPS = 8;
constexpr int TILE = 16;
constexpr int PIECES = ID / 32;  // 16-byte pieces of a row that one lane holds
static_assert(TILE * R <= PAGE, "a tile lies in one page");

struct Keys {
    uint4 piece[2][PIECES];  // of block rows g and g + 8 of a tile
};

// This lane's pieces of one tile; zeros for blocks that do not exist and pages that are not V pages.
__device__ __forceinline__ void load_keys(Keys& keys, const DecodeParams& p, const int* v_pages, int tile, int blocks,
                                          int g, int t) {
    const int first = tile * TILE * R;  // token
    const int page = tile * TILE < blocks ? v_pages[first / PAGE] : 0;
    const bool page_exists = page >= p.num_pages && page - p.num_pages < p.num_pages;
    const surf_t* source = p.pool + pool_offset(page, first % PAGE, 0) + D + 8 * t;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int block = g + 8 * half;
        const bool exists = page_exists && tile * TILE + block < blocks;
        const surf_t* row = source + static_cast<int64_t>(block) * R * HKV * POOL_WIDTH;
#pragma unroll
        for (int j = 0; j < PIECES; ++j)
            keys.piece[half][j] = exists ? __ldcg(reinterpret_cast<const uint4*>(row + 32 * j)) : make_uint4(0, 0, 0, 0);
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) decode_score(const __grid_constant__ DecodeParams p) {
    const int row = blockIdx.x / p.score_ctas, cta = blockIdx.x % p.score_ctas;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;
    const int step = WARPS * p.score_ctas;  // tiles
    const int blocks = complete_blocks(length_in_reach(p, row)), tiles = (blocks + TILE - 1) / TILE;
    const int* v_pages = p.page_table + (static_cast<int64_t>(row) * 2 + 1) * p.pages_per_seq;
    const bool needed = blocks > (SCORE_ALWAYS ? 0 : BUDGET_BLOCKS);

    int tile = cta + warp * p.score_ctas;
    Keys keys;
    const bool early = needed && tile < tiles - 1;  // the last tile holds the block that this token may complete
    if (early) load_keys(keys, p, v_pages, tile, blocks, g, t);
    grid_dependency_wait();
    grid_dependency_launch();
    if (!needed || tile >= tiles) return;
    if (!early) load_keys(keys, p, v_pages, tile, blocks, g, t);
    const int live = p.live[row];

    uint4 query[PIECES];  // column g of the mma: indexer head g; through L1, since every warp of the row reads it
#pragma unroll
    for (int j = 0; j < PIECES; ++j) query[j] = make_uint4(0, 0, 0, 0);
    if (g < IH) {
        const surf_t* head = p.index_q + (static_cast<int64_t>(row) * IH + g) * ID + 8 * t;
#pragma unroll
        for (int j = 0; j < PIECES; ++j) query[j] = *reinterpret_cast<const uint4*>(head + 32 * j);
    }

    if (live == 0) return;
    float* scores = p.scores + static_cast<int64_t>(row) * p.score_stride;
    while (true) {
        Keys next;
        if (tile + step < tiles) load_keys(next, p, v_pages, tile + step, blocks, g, t);
        float dots[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int j = 0; j < PIECES; ++j) score_mma(dots, keys.piece[0][j], keys.piece[1][j], query[j]);
        const float low = score_of_quad(dots[0], dots[1], t), high = score_of_quad(dots[2], dots[3], t);
        const int block = tile * TILE + g + 8 * (t & 1);
        if (t < 2 && block < blocks) scores[block] = t == 0 ? low : high;
        tile += step;
        if (tile >= tiles) return;
        keys = next;
    }
}
