// Decode, kernel 2: the score of every complete block of every row, from the block keys in the pool's V tails.
// A warp takes tiles of 16 blocks, which always lie in one page. Nothing to do while every block is selected anyway.
#include "decode.cuh"

constexpr int WARPS = 8;
constexpr int TILE = 16;
constexpr int PIECES = ID / 32;  // 16-byte pieces of a row that one lane holds
static_assert(TILE * R <= PAGE, "a tile lies in one page");

extern "C" __global__ void __launch_bounds__(WARPS * 32) decode_score(const __grid_constant__ DecodeParams p) {
    const int row = blockIdx.x / p.score_ctas, cta = blockIdx.x % p.score_ctas;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;
    grid_dependency_wait();
    grid_dependency_launch();
    const int blocks = complete_blocks(p.live[row]);
    if (blocks <= BUDGET_BLOCKS) return;

    uint4 query[PIECES];  // column g of the mma: indexer head g
#pragma unroll
    for (int j = 0; j < PIECES; ++j) query[j] = make_uint4(0, 0, 0, 0);
    if (g < IH) {
        const surf_t* head = p.index_q + (static_cast<int64_t>(row) * IH + g) * ID + 8 * t;
#pragma unroll
        for (int j = 0; j < PIECES; ++j) query[j] = *reinterpret_cast<const uint4*>(head + 32 * j);
    }

    const int* v_pages = p.page_table + (static_cast<int64_t>(row) * 2 + 1) * p.pages_per_seq;
    float* scores = p.scores + static_cast<int64_t>(row) * p.score_stride;
    const int tiles = (blocks + TILE - 1) / TILE;
    for (int tile = cta + warp * p.score_ctas; tile < tiles; tile += WARPS * p.score_ctas) {
        const int first = tile * TILE * R;  // token
        const surf_t* page = p.pool + pool_offset(v_pages[first / PAGE], first % PAGE, 0) + D;
        uint4 key[2][PIECES];  // block rows g and g + 8
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int block = g + 8 * half;
            const bool exists = tile * TILE + block < blocks;
            const surf_t* source = page + static_cast<int64_t>(block) * R * HKV * POOL_WIDTH + 8 * t;
#pragma unroll
            for (int j = 0; j < PIECES; ++j)
                key[half][j] = exists ? __ldcg(reinterpret_cast<const uint4*>(source + 32 * j)) : make_uint4(0, 0, 0, 0);
        }
        float dots[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int j = 0; j < PIECES; ++j) score_mma(dots, key[0][j], key[1][j], query[j]);
        const float low = score_of_quad(dots[0], dots[1], t), high = score_of_quad(dots[2], dots[3], t);
        const int block = tile * TILE + g + 8 * (t & 1);
        if (t < 2 && block < blocks) scores[block] = t == 0 ? low : high;
    }
}
