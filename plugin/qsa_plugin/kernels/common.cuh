// Shared by every kernel file: the specialisation's constants, surface conversion, pool addressing, the contract's
// rounding chain (RMSNorm, RoPE), and short wrappers of the PTX instructions that sm_80 and later have.
//
// h() below means: round to the surface dtype (round to nearest even).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef long long int64_t;

// ------------------------------------------------------------------------------------------------ specialisation
constexpr int HQ = QSA_HQ;            // query heads
constexpr int HKV = QSA_HKV;          // KV heads
constexpr int GROUP = HQ / HKV;       // query heads a KV head
constexpr int D = QSA_D;              // head size
constexpr int IH = QSA_IH;            // indexer query heads
constexpr int ID = QSA_ID;            // indexer head dim
constexpr int R = QSA_R;              // tokens a block
constexpr int BUDGET_BLOCKS = QSA_BUDGET / QSA_R;
constexpr int LIST_WIDTH = QSA_BUDGET + QSA_R - 1;
constexpr int ROTARY = QSA_ROTARY;
constexpr int PAGE = QSA_PAGE;        // tokens a page
constexpr int POOL_WIDTH = D + ID;    // elements of one head's row in the pool
constexpr int QKV_WIDTH = (HQ + 2 * HKV) * D;
constexpr int INDEX_WIDTH = (IH + 1) * ID;

#if QSA_BF16
typedef __nv_bfloat16 surf_t;
#else
typedef __half surf_t;
#endif

constexpr float LOG2_E = 1.44269504f;
__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

__device__ __forceinline__ float to_float(surf_t x) {
#if QSA_BF16
    return __bfloat162float(x);
#else
    return __half2float(x);
#endif
}

// h() as a storage value
__device__ __forceinline__ surf_t to_surface(float x) {
#if QSA_BF16
    return __float2bfloat16_rn(x);
#else
    return __float2half_rn(x);
#endif
}

// h() as a number
__device__ __forceinline__ float h(float x) { return to_float(to_surface(x)); }

// two h() packed in one register; `low` is the element at the lower address
__device__ __forceinline__ uint32_t pack_surface(float low, float high) {
#if QSA_BF16
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
#else
    __half2 pair = __floats2half2_rn(low, high);
#endif
    return *reinterpret_cast<uint32_t*>(&pair);
}

// ------------------------------------------------------------------------------------------------ pool
// Element offset of one head's row: pool is [2*N pages, PAGE, HKV, POOL_WIDTH]; V page ids already hold the +N.
__device__ __forceinline__ int64_t pool_offset(int page_id, int row, int head) {
    return ((static_cast<int64_t>(page_id) * PAGE + row) * HKV + head) * POOL_WIDTH;
}

// ------------------------------------------------------------------------------------------------ reductions
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane >>= 1) x += __shfl_xor_sync(0xffffffffu, x, lane);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lane));
    return x;
}

// Counts four keys a lane. A warp of one mind adds once: many equal scores cost no more than others.
__device__ __forceinline__ void count_bins(uint32_t* histogram, const uint32_t (&bins)[4], const bool (&inside)[4],
                                           int lane) {
    const uint32_t first = __shfl_sync(0xffffffffu, bins[0], 0);
    if (__all_sync(0xffffffffu, inside[0] && bins[0] == first)) {
        bool same = true;
#pragma unroll
        for (int i = 1; i < 4; ++i) same &= inside[i] && bins[i] == first;
        if (__all_sync(0xffffffffu, same)) {
            if (lane == 0) atomicAdd(histogram + first, 128u);
            return;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (inside[i]) atomicAdd(histogram + bins[i], 1u);
}

// ------------------------------------------------------------------------------------------------ rows in a warp
// A warp holds a row of DIM elements: lane l has elements [l*E, (l+1)*E), E = DIM/32, one vector access a lane.
template <int E>
struct RawRow {
    alignas(16) surf_t x[E];
};
template <int E>
__device__ __forceinline__ void load_row(const surf_t* row, int lane, RawRow<E>& raw) {
    if constexpr (E == 8) *reinterpret_cast<uint4*>(raw.x) = *reinterpret_cast<const uint4*>(row + lane * E);
    else if constexpr (E == 4) *reinterpret_cast<uint2*>(raw.x) = *reinterpret_cast<const uint2*>(row + lane * E);
    else if constexpr (E == 2) *reinterpret_cast<uint32_t*>(raw.x) = *reinterpret_cast<const uint32_t*>(row + lane * E);
    else raw.x[0] = row[lane];
}
template <int E>
__device__ __forceinline__ void to_floats(const RawRow<E>& raw, float (&x)[E]) {
#pragma unroll
    for (int e = 0; e < E; ++e) x[e] = to_float(raw.x[e]);
}
template <int E>
__device__ __forceinline__ void load_row(const surf_t* row, int lane, float (&x)[E]) {
    RawRow<E> raw;
    load_row(row, lane, raw);
    to_floats(raw, x);
}

// stores h() of each element
template <int E>
__device__ __forceinline__ void store_row(surf_t* row, int lane, const float (&x)[E]) {
    alignas(16) surf_t raw[E];
#pragma unroll
    for (int e = 0; e < E; ++e) raw[e] = to_surface(x[e]);
    if constexpr (E == 8) *reinterpret_cast<uint4*>(row + lane * E) = *reinterpret_cast<const uint4*>(raw);
    else if constexpr (E == 4) *reinterpret_cast<uint2*>(row + lane * E) = *reinterpret_cast<const uint2*>(raw);
    else if constexpr (E == 2) *reinterpret_cast<uint32_t*>(row + lane * E) = *reinterpret_cast<const uint32_t*>(raw);
    else row[lane] = raw[0];
}

template <int E>
__device__ __forceinline__ float warp_inverse_rms(const float (&x)[E], float eps) {
    float squares = 0.f;
#pragma unroll
    for (int e = 0; e < E; ++e) squares = fmaf(x[e], x[e], squares);
    return __frsqrt_rn(warp_sum(squares) * (1.f / (E * 32)) + eps);
}

// Main heads (contract, arithmetic 1): n = h(h(x * inv) * gamma), gamma already folded. gamma: this lane's elements.
template <int E>
__device__ __forceinline__ void warp_norm_main(float (&x)[E], const float (&gamma)[E], float eps) {
    const float inv = warp_inverse_rms(x, eps);
#pragma unroll
    for (int e = 0; e < E; ++e) x[e] = h(__fmul_rn(h(__fmul_rn(x[e], inv)), gamma[e]));
}
template <int E>
__device__ __forceinline__ void warp_norm_main(float (&x)[E], const surf_t* gamma, int lane, float eps) {
    float g[E];
    load_row(gamma, lane, g);
    warp_norm_main(x, g, eps);
}

// Indexer heads and block keys (arithmetic 2 and 3): x * inv * (1 + w), all fp32, no rounding.
template <int E>
__device__ __forceinline__ void warp_norm_indexer(float (&x)[E], const float (&weight)[E], float eps) {
    const float inv = warp_inverse_rms(x, eps);
#pragma unroll
    for (int e = 0; e < E; ++e) x[e] = __fmul_rn(__fmul_rn(x[e], inv), __fadd_rn(1.f, weight[e]));
}
template <int E>
__device__ __forceinline__ void warp_norm_indexer(float (&x)[E], const surf_t* weight, int lane, float eps) {
    float w[E];
    load_row(weight, lane, w);
    warp_norm_indexer(x, w, eps);
}

// One position's cosines and sines for this lane's elements; those past ROTARY are not set.
template <int E>
struct Rope {
    float c[E], s[E];
};
// cos_sin: the position's row of the table, [ROTARY] = cos | sin.
template <int E>
__device__ __forceinline__ void load_rope(Rope<E>& rope, const float* cos_sin, int lane) {
    constexpr int HALF = ROTARY / 2;
#pragma unroll
    for (int e = 0; e < E; ++e) {
        const int i = lane * E + e;
        if (i >= ROTARY) continue;
        const int j = i < HALF ? i : i - HALF;
        rope.c[e] = cos_sin[j];
        rope.s[e] = cos_sin[HALF + j];
    }
}

// RoPE on the first ROTARY elements in non-interleaved pairs (i, i + ROTARY/2), no rounding.
// buffer: ROTARY floats of shared memory of this warp. The whole warp calls it.
template <int E>
__device__ __forceinline__ void warp_rope(float (&x)[E], const Rope<E>& rope, float* buffer, int lane) {
    constexpr int HALF = ROTARY / 2, APART = HALF / E;
    if constexpr (HALF % E == 0 && (APART & (APART - 1)) == 0) {  // the pair lies in one other lane
#pragma unroll
        for (int e = 0; e < E; ++e) {
            const float other = __shfl_xor_sync(0xffffffffu, x[e], APART);
            if (lane * E >= ROTARY) continue;
            const float product = __fmul_rn(other, rope.s[e]);  // a - b and a + (-b) are one number
            x[e] = __fadd_rn(__fmul_rn(x[e], rope.c[e]), lane < APART ? -product : product);
        }
        return;
    }
    __syncwarp();
#pragma unroll
    for (int e = 0; e < E; ++e)
        if (lane * E + e < ROTARY) buffer[lane * E + e] = x[e];
    __syncwarp();
#pragma unroll
    for (int e = 0; e < E; ++e) {
        const int i = lane * E + e;
        if (i >= ROTARY) continue;
        // products rounded on their own, as the reference does; no fused multiply-add
        x[e] = i < HALF ? __fsub_rn(__fmul_rn(x[e], rope.c[e]), __fmul_rn(buffer[i + HALF], rope.s[e]))
                        : __fadd_rn(__fmul_rn(x[e], rope.c[e]), __fmul_rn(buffer[i - HALF], rope.s[e]));
    }
}
template <int E>
__device__ __forceinline__ void warp_rope(float (&x)[E], const float* cos_sin, float* buffer, int lane) {
    Rope<E> rope;
    load_rope(rope, cos_sin, lane);
    warp_rope(x, rope, buffer, lane);
}

// ------------------------------------------------------------------------------------------------ scores
// Sort key of a score: larger score, larger key; -0 equals +0; NaN lowest (key 0); any other value above 0.
__device__ __forceinline__ uint32_t score_key(float score) {
    if (score != score) return 0u;
    const uint32_t bits = __float_as_uint(score + 0.f);  // -0 + 0 = +0
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float score_of_key(uint32_t key) {  // inverse of score_key
    if (key == 0u) return __uint_as_float(0x7fffffffu);
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// ------------------------------------------------------------------------------------------------ PTX wrappers
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes global to shared, past L1; with `valid` false the 16 bytes become zero and nothing is read.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// d += a b: a [16, 16] row-major fragment, b [16, 8] column-major fragment, d [16, 8] fp32.
// Lane l, g = l/4, t = l%4: a = {(g, 2t..), (g+8, 2t..), (g, 2t+8..), (g+8, 2t+8..)}, b = {(2t.., g), (2t+8.., g)},
// d = {(g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1)}.
__device__ __forceinline__ void mma_16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if QSA_BF16
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(shared))
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(shared))
                 : "memory");
}

// Programmatic dependent launch: wait until the kernel before this one has finished / let the next one start early.
// Below compute capability 9.0 kernels of a stream run one after the other, and both are empty.
__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void grid_dependency_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Thread block clusters (compute capability 9.0 and later). Arrive and wait are apart so that work can go between.
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// The address of `shared` in another block of the cluster, for st_cluster.
__device__ __forceinline__ uint32_t cluster_address(const void* shared, int rank) {
    uint32_t address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(shared)), "r"(rank));
    return address;
}
__device__ __forceinline__ void st_cluster(uint32_t address, float x) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
__device__ __forceinline__ void st_cluster(uint32_t address, float x, float y) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}
#endif

// ------------------------------------------------------------------------------------------------ block scores
// score(q, g) = sum over heads of max(0, q_h . kbar_g), / sqrt(ID). One dot product is ID/16 chained mma's with the
// block keys as the rows of `a` and the queries as the columns of `b`, in ONE fixed order of elements, so that prefill
// and decode get the same bits for the same (query, block): mma number m = 2*j + p takes, from lane t of a quad,
// elements [32*j + 8*t + 4*p, +4). A lane therefore reads whole 16-byte pieces [32*j + 8*t, +8) of its row.
//
// keys: this lane's pieces of block rows g and g+8; query: this lane's pieces of query column g (lane l: g = l/4).
__device__ __forceinline__ void score_mma(float (&d)[4], const uint4& key_g, const uint4& key_g8, const uint4& query) {
    const uint32_t first[4] = {key_g.x, key_g8.x, key_g.y, key_g8.y};
    const uint32_t second[4] = {key_g.z, key_g8.z, key_g.w, key_g8.w};
    mma_16816(d, first, query.x, query.y);
    mma_16816(d, second, query.z, query.w);
}

constexpr float SQRT_ID = ID == 128 ? 11.3137085f : ID == 64 ? 8.f : 5.65685425f;  // fp32 square root of ID
constexpr float RSQRT_ID = 1.f / SQRT_ID;

// sum / SQRT_ID, correctly rounded as __fdiv_rn: one multiplication and one exact correction. __fdiv_rn itself takes a
// slow path for zero, the score of every block that no head likes.
__device__ __forceinline__ float divide_by_sqrt(float sum) {
    const float quotient = sum * RSQRT_ID;
    const float corrected = fmaf(fmaf(-quotient, SQRT_ID, sum), RSQRT_ID, quotient);
    return fabsf(quotient) <= 3.4e38f ? corrected : quotient;  // infinity and NaN stay
}

// The head sum has one fixed order: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). This is its innermost pair, of heads 2t
// and 2t + 1, after a relu that keeps NaN.
__device__ __forceinline__ float sum_of_heads(float even, float odd, int t) {
    even = 2 * t < IH && !(even < 0.f) ? even : 0.f;
    odd = 2 * t + 1 < IH && !(odd < 0.f) ? odd : 0.f;
    return even + odd;
}

// The score of one block from a quad's four lanes: this lane has the dots of heads 2t and 2t + 1. All four get it.
__device__ __forceinline__ float score_of_quad(float even, float odd, int t) {
    float sum = sum_of_heads(even, odd, t);
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    return divide_by_sqrt(sum);
}

// The score of block row g + 8 * (t & 1) from the dots of one mma; the same in lanes t and t + 2.
__device__ __forceinline__ float score_of_dots(const float (&dots)[4], int t) {
    const float low = sum_of_heads(dots[0], dots[1], t), high = sum_of_heads(dots[2], dots[3], t);
    const bool odd = t & 1;
    float sum = (odd ? high : low) + __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    return divide_by_sqrt(sum);
}
