// Hopper's warpgroup products (sm_90a) with fp32 accumulators, as far as prefill needs them.
//
// Accumulator of m64nN: warp w of the warpgroup has rows [16w, 16w + 16), in them d[4j .. 4j+3] are those of an m16n8
// fragment (mma_16816) of columns [8j, 8j + 8). A left operand in registers is the fragment of mma_16816 as well.
#pragma once

#include "common.cuh"

#if QSA_BF16
#define WGMMA_TYPES ".f32.bf16.bf16"
#else
#define WGMMA_TYPES ".f32.f16.f16"
#endif

// Between writes to shared memory that this thread has made or waited for, and the products' reads of them.
__device__ __forceinline__ void fence_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Orders register and generic-proxy writes of this warpgroup before its products.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// After a wait: no use of the accumulators is moved ahead of it.
template <int N>
__device__ __forceinline__ void wgmma_results(float (&d)[N][4]) {
#pragma unroll
    for (int i = 0; i < 4 * N; ++i) asm volatile("" : "+f"(d[i / 4][i % 4])::"memory");
}

// Descriptor of an operand in shared memory: slabs of 64 elements (128 bytes) a row, rows of a slab contiguous, 16-byte
// chunk c of row r at chunk c ^ (r % 8). Slabs start at multiples of 1024 bytes. `slab_bytes` is the distance of two
// slabs; it matters only where the 64 elements run along M or N, not along K.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, uint32_t slab_bytes) {
    return (address & 0x3ffffu) >> 4 | static_cast<uint64_t>(slab_bytes >> 4) << 16 |
           static_cast<uint64_t>(1024 >> 4) << 32 | 1ull << 62;
}

#define WGMMA_TILE(t) "+f"((t)[0]), "+f"((t)[1]), "+f"((t)[2]), "+f"((t)[3])

// d (+)= a b, both in shared memory and K-major: [64, 16] x [64, 16]^T. `add` 0 starts from zero.
__device__ __forceinline__ void wgmma_ss(float (&d)[8][4], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16" WGMMA_TYPES " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
        "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, p, 1, 1, 0, 0;\n}"
        : WGMMA_TILE(d[0]), WGMMA_TILE(d[1]), WGMMA_TILE(d[2]), WGMMA_TILE(d[3]), WGMMA_TILE(d[4]),
          WGMMA_TILE(d[5]), WGMMA_TILE(d[6]), WGMMA_TILE(d[7])
        : "l"(a), "l"(b), "r"(add));
}

// d += a b: a [64, 16] in registers, b [16, 64] in shared memory, K-major.
__device__ __forceinline__ void wgmma_rs_64(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16" WGMMA_TYPES " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
        "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
        : WGMMA_TILE(d[0]), WGMMA_TILE(d[1]), WGMMA_TILE(d[2]), WGMMA_TILE(d[3]), WGMMA_TILE(d[4]),
          WGMMA_TILE(d[5]), WGMMA_TILE(d[6]), WGMMA_TILE(d[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#if QSA_D == 64
// d += a b: a [64, 16] in registers, b [16, 64] in shared memory, N-major.
__device__ __forceinline__ void wgmma_rs(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16" WGMMA_TYPES " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
        "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"
        : WGMMA_TILE(d[0]), WGMMA_TILE(d[1]), WGMMA_TILE(d[2]), WGMMA_TILE(d[3]), WGMMA_TILE(d[4]),
          WGMMA_TILE(d[5]), WGMMA_TILE(d[6]), WGMMA_TILE(d[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#endif

#if QSA_D == 128
// d += a b: a [64, 16] in registers, b [16, 128] in shared memory, N-major.
__device__ __forceinline__ void wgmma_rs(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16" WGMMA_TYPES " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
        "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
        "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "
        "%59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"
        : WGMMA_TILE(d[0]), WGMMA_TILE(d[1]), WGMMA_TILE(d[2]), WGMMA_TILE(d[3]), WGMMA_TILE(d[4]),
          WGMMA_TILE(d[5]), WGMMA_TILE(d[6]), WGMMA_TILE(d[7]), WGMMA_TILE(d[8]), WGMMA_TILE(d[9]),
          WGMMA_TILE(d[10]), WGMMA_TILE(d[11]), WGMMA_TILE(d[12]), WGMMA_TILE(d[13]), WGMMA_TILE(d[14]),
          WGMMA_TILE(d[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#endif

#if QSA_D == 256
// d += a b: a [64, 16] in registers, b [16, 256] in shared memory, N-major.
__device__ __forceinline__ void wgmma_rs(float (&d)[32][4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16" WGMMA_TYPES " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
        "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
        "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "
        "%59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, "
        "%78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, "
        "%97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, "
        "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, {%128, %129, %130, %131}, %132, p, 1, 1, 1;\n}"
        : WGMMA_TILE(d[0]), WGMMA_TILE(d[1]), WGMMA_TILE(d[2]), WGMMA_TILE(d[3]), WGMMA_TILE(d[4]),
          WGMMA_TILE(d[5]), WGMMA_TILE(d[6]), WGMMA_TILE(d[7]), WGMMA_TILE(d[8]), WGMMA_TILE(d[9]),
          WGMMA_TILE(d[10]), WGMMA_TILE(d[11]), WGMMA_TILE(d[12]), WGMMA_TILE(d[13]), WGMMA_TILE(d[14]),
          WGMMA_TILE(d[15]), WGMMA_TILE(d[16]), WGMMA_TILE(d[17]), WGMMA_TILE(d[18]), WGMMA_TILE(d[19]),
          WGMMA_TILE(d[20]), WGMMA_TILE(d[21]), WGMMA_TILE(d[22]), WGMMA_TILE(d[23]), WGMMA_TILE(d[24]),
          WGMMA_TILE(d[25]), WGMMA_TILE(d[26]), WGMMA_TILE(d[27]), WGMMA_TILE(d[28]), WGMMA_TILE(d[29]),
          WGMMA_TILE(d[30]), WGMMA_TILE(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#endif
