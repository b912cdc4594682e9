// The end of decode attention: partial results of the splits become one row, in the order of the splits, so that the
// result is bitwise repeatable. With clusters each block sends every other block its share of the columns through
// distributed shared memory; without, the last block of a (row, KV head) to finish reads all of them back from the
// workspace. Included by decode_attend.cu alone, behind its constants and structs.
#pragma once

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
