// Synchronization between programs, and the epilogues of products.

// Barriers of the first warpgroup, and of all that use norm factors.
__device__ inline void sync_first() { sync_named_barrier<2, 128>(); }
__device__ inline void sync_factors() { sync_named_barrier<3, MMA_THREADS + NORM_THREADS>(); }

// Signals a unit as ready: earlier writes of all threads of this program are visible to who sees it.
__device__ inline void signal_ready(Shared& s, u32* unit, int product) {
    fence_async_global(), fence_async_shared();
    sync();
    if (threadIdx.x) return;
    add_release(unit);
    arrive_mbarrier(&s.ended[product]);
}

// The RMSNorm factor of each row, one warp each; sums of squares are added in pairs. Separate warps compute it, when
// all programs have written their sums of squares.
__device__ inline void compute_norm_factors(Shared& s, const float* squares, int tiles, float size, float eps) {
    int lane = threadIdx.x % 32, warp = (threadIdx.x - FIRST_NORM_THREAD) / 32;
    constexpr int warps = NORM_THREADS / 32, each = ROWS / warps, together = each < 8 ? each : 8;
#pragma unroll 1
    for (int first = 0; first < each; first += together) {
        float sums[together][2];
#pragma unroll
        for (int i = 0; i < together; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int tile = half * 32 + lane, row = warp + (first + i) * warps;
                sums[i][half] = tile < tiles ? __ldcg(squares + row * tiles + tile) : 0.0f;
            }
#pragma unroll
        for (int i = 0; i < together; i++) {
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int lanes = 1; lanes < 32; lanes *= 2)
                    sums[i][half] = in_pairs(sums[i][half], lanes);
            float mean = __fadd_rn(divide(__fadd_rn(sums[i][0], sums[i][1]), size), eps);
            float root = inverse_root(mean);
            if (lane == 0) s.factors[warp + (first + i) * warps] = root;
        }
    }
    sync_factors();
}

// A thread's sums: two rows of its first line, two of its second, and the same of the next eight rows.
typedef float Sums[1][ROWS / 2];

// Split-K reduction in a cluster: each program sends its sums of the other's half of the rows, and adds what it
// receives.
__device__ inline void reduce_split_k(Shared& s, const Sums& sums, float (&kept)[HALF_SUMS], int group, int round) {
    int thread = threadIdx.x % 128;
    bool second = split();
    u32 to = cluster_address(s.received[group][0][thread], 1 - split());
    u32 mbarrier = cluster_address(&s.exchanged, 1 - split());
#pragma unroll
    for (int i = 0; i < HALF_SUMS; i += 4) {
        float own[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float low = sums[0][i + j], high = sums[0][HALF_SUMS + i + j];
            kept[i + j] = second ? high : low, own[j] = second ? low : high;
        }
        store_async(to + i / 4 * (128 * 16), own[0], own[1], own[2], own[3], mbarrier);
    }
    wait_mbarrier(&s.exchanged, round);
#pragma unroll
    for (int i = 0; i < HALF_SUMS; i += 4) {  // the sum of two does not depend on the order
        float4 other = received(s.received[group][i / 4][thread]);
        kept[i] = __fadd_rn(kept[i], other.x), kept[i + 1] = __fadd_rn(kept[i + 1], other.y);
        kept[i + 2] = __fadd_rn(kept[i + 2], other.z), kept[i + 3] = __fadd_rn(kept[i + 3], other.w);
    }
}

// Threads hold results by column, but stores need lines of a row. They are transposed in the row stages, which are free
// when a product ends, and not refilled before it has.
__device__ inline int swizzled(int row, int eight) { return row * 128 + (eight ^ row / 2 % 8) * 8; }  // of 16 eights

// The power-of-two scale of a group of 64 numbers with this largest one, and its inverse: see kernels/products/fp8.py.
struct Fp8Scale {
    float scale, inverse;
    __device__ Fp8Scale(float peak) {
        int exponent = max((__float_as_int(peak) >> 23) - 7, 1);
        scale = __int_as_float(exponent << 23), inverse = __int_as_float((254 - exponent) << 23);
    }
    __device__ u32 four(float a, float b, float c, float d) const {
        u32 low = pack_fp8(__fmul_rn(a, inverse), __fmul_rn(b, inverse));
        return low | (u32)pack_fp8(__fmul_rn(c, inverse), __fmul_rn(d, inverse)) << 16;
    }
};
__device__ inline float peak_of_lanes(float peak, int lanes) {
#pragma unroll
    for (int apart = 1; apart < lanes; apart *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, apart));
    return peak;
}
__device__ inline float& scale_of(const Fp8Rows& to, int row, int group, int groups) {
    return to.scales[(row / 16 * groups + group) * 16 + row % 16];
}

// The residual stream and norm weights of a product that is added to it. Loaded before the product, since they may come
// from memory. Every 16 threads have every eighth row.
struct Added {
    float4 hidden[HALF / 8];
    float norm[4];
    float4 scales = {};  // of the columns, with e4m3
    u16* rows;
    Fp8Rows fp8;
    float* squares;
    int first, column;
    __device__ Added(const Arguments& own, bool of_down)
        : rows(of_down ? own.attention_rows : own.feed_rows), fp8(of_down ? own.attention_fp8 : own.feed_fp8),
          squares(of_down ? own.attention_squares : own.feed_squares),
          first(split() * HALF + threadIdx.x % 128 / 16), column(cluster() * 64 + threadIdx.x % 16 * 4) {
        const u16* weights = of_down ? own.attention_norm : own.feed_norm;
#pragma unroll
        for (int i = 0; i < 4; i++) norm[i] = unpack(weights[column + i]);
#pragma unroll
        for (int i = 0; i < HALF / 8; i++)
            hidden[i] = __ldcg((const float4*)(own.hidden + (first + i * 8) * own.width + column));
        if (E4M3) scales = *(const float4*)((of_down ? own.down : own.output).scales + column);
    }
};

__device__ inline void finish_residual(Shared& s, const Arguments& own, const Sums& sums, const Added& to, int round) {
    constexpr int stride = 68;  // lines of 64 numbers, padded against bank conflicts
    int warp = threadIdx.x / 32, line = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2, four = threadIdx.x % 16 * 4;
    float* room = (float*)s.rows[0];
    float kept[HALF_SUMS];
    reduce_split_k(s, sums, kept, 0, round);
    sync_first();  // all warps have finished multiplying
#pragma unroll
    for (int i = 0; i < HALF_SUMS; i++)
        room[(i / 4 * 8 + pair + i % 2) * stride + warp * 16 + i / 2 % 2 * 8 + line] = kept[i];
    sync_first();
#pragma unroll
    for (int i = 0; i < HALF / 8; i++) {
        int row = to.first + i * 8;
        float4 sum = *(const float4*)(room + (threadIdx.x / 16 + i * 8) * stride + four);
        if (E4M3) {
            sum.x = __fmul_rn(sum.x, to.scales.x), sum.y = __fmul_rn(sum.y, to.scales.y);
            sum.z = __fmul_rn(sum.z, to.scales.z), sum.w = __fmul_rn(sum.w, to.scales.w);
        }
        sum.x = __fadd_rn(to.hidden[i].x, sum.x), sum.y = __fadd_rn(to.hidden[i].y, sum.y);
        sum.z = __fadd_rn(to.hidden[i].z, sum.z), sum.w = __fadd_rn(to.hidden[i].w, sum.w);
        __stcg((float4*)(own.hidden + row * own.width + to.column), sum);
        if (round && own.features && row < own.row_count)
            *(float4*)(own.features + (long)row * own.feature_stride + to.column) = sum;
        float a = __fmul_rn(sum.x, to.norm[0]), b = __fmul_rn(sum.y, to.norm[1]);
        float c = __fmul_rn(sum.z, to.norm[2]), d = __fmul_rn(sum.w, to.norm[3]);
        *(uint2*)(to.rows + row * own.width + to.column) = make_uint2(pack(a, b), pack(c, d));
        if (E4M3) {
            Fp8Scale group(peak_of_lanes(fmaxf(fmaxf(fabsf(a), fabsf(b)), fmaxf(fabsf(c), fabsf(d))), 16));
            *(u32*)(to.fp8.rows + row * own.width + to.column) = group.four(a, b, c, d);
            if (four == 0) scale_of(to.fp8, row, cluster(), own.width / 64) = group.scale;
        }
        float squares = __fadd_rn(__fadd_rn(__fmul_rn(sum.x, sum.x), __fmul_rn(sum.y, sum.y)),
                                  __fadd_rn(__fmul_rn(sum.z, sum.z), __fmul_rn(sum.w, sum.w)));
#pragma unroll
        for (int lanes = 1; lanes < 16; lanes *= 2) squares = in_pairs(squares, lanes);
        if (four == 0) __stcg(to.squares + row * (own.width / 64) + cluster(), squares);
    }
}

// The scales of a thread's columns of gate and up, in tiles of 128 columns: two cells of a warpgroup are a tile.
struct GateUpScales {
    float gate[2], up[2];
    __device__ GateUpScales(const Arguments& own, int group) {
        if (!E4M3) return;
        const float* from = own.gate_up.scales + (blockIdx.x * 2 + group) * 128;
        from += threadIdx.x / 32 % 4 * 8 + threadIdx.x % 32 / 4;
#pragma unroll
        for (int tile = 0; tile < 2; tile++) gate[tile] = from[tile * 32], up[tile] = from[64 + tile * 32];
    }
};

__device__ inline void finish_gate_up_fp8(Shared& s, const Arguments& own, const float (&sums)[2][ROWS / 2],
                                          const GateUpScales& scales, int group) {
    constexpr int stride = 132;  // lines of 128 numbers, padded against bank conflicts
    int warp = threadIdx.x / 32 % 4, line = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
    int four = threadIdx.x % 16 * 4;
    float* room = (float*)s.rows[0];
    static_assert(!E4M3 || sizeof(s.rows) >= ROWS * stride * 4, "results are transposed in the row stages");
#pragma unroll
    for (int tile = 0; tile < 2; tile++)
#pragma unroll
        for (int i = 0; i < ROWS / 4; i++) {
            int row = i / 2 * 8 + pair + i % 2;
            float gate = __fmul_rn(sums[tile][i / 2 * 4 + i % 2], scales.gate[tile]);
            float up = __fmul_rn(sums[tile][i / 2 * 4 + 2 + i % 2], scales.up[tile]);
            room[row * stride + group * 64 + tile * 32 + warp * 8 + line] = gated(gate, up, s.factors[row]);
        }
    sync();
#pragma unroll
    for (int i = 0; i < ROWS / 8; i++) {  // 16 threads have a group of a row
        int row = threadIdx.x / 32 + i * 8, number = blockIdx.x * 2 + threadIdx.x / 16 % 2;
        float4 x = *(const float4*)(room + row * stride + threadIdx.x / 16 % 2 * 64 + four);
        Fp8Scale own_scale(peak_of_lanes(fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w))), 16));
        *(u32*)(own.activated_fp8.rows + row * own.intermediate + number * 64 + four) =
            own_scale.four(x.x, x.y, x.z, x.w);
        if (four == 0) scale_of(own.activated_fp8, row, number, own.intermediate / 64) = own_scale.scale;
    }
}

__device__ inline void finish_gate_up(Shared& s, const Arguments& own, const float (&sums)[2][ROWS / 2], int group) {
    int warp = threadIdx.x / 32 % 4, line = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
    u16* room = (u16*)s.rows[0];
    float factors[ROWS / 4];  // read before the writes, so that they do not wait for them
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) factors[i] = s.factors[i / 2 * 8 + pair + i % 2];
#pragma unroll
    for (int tile = 0; tile < 2; tile++)
#pragma unroll
        for (int i = 0; i < ROWS / 4; i++) {
            int row = i / 2 * 8 + pair + i % 2;
            float gate = sums[tile][i / 2 * 4 + i % 2], up = sums[tile][i / 2 * 4 + 2 + i % 2];
            room[swizzled(row, (group * 2 + tile) * 4 + warp) + line] = rounded(gated(gate, up, factors[i]));
        }
    sync();
    int eight = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < ROWS / 16; i++) {
        int row = threadIdx.x / 16 + i * 16;
        uint4 numbers = *(const uint4*)(room + swizzled(row, eight));
        *(uint4*)(own.activated + row * own.intermediate + blockIdx.x * 128 + eight * 8) = numbers;
    }
}

// Destinations and RoPE factors of QKV: loaded before the product, all at once, since a branch around each would
// serialize the loads.
struct RopeTable {
    static constexpr int ROWS_PER_THREAD = (HALF + 15) / 16;
    float cosines[HALF / 4], sines[HALF / 4], bias[2], scales[2];  // scales: of the columns, with e4m3
    int slot_mapping[ROWS_PER_THREAD];  // destination of the rows that this thread writes
    __device__ RopeTable(const Arguments& own, int part) {
#pragma unroll
        for (int i = 0; i < HALF / 4; i++) {
            int row = split() * HALF + threadIdx.x % 4 * 2 + i / 2 * 8 + i % 2;
            int angle = own.positions[min(row, own.row_count - 1)] * 64 + part;
            cosines[i] = own.cosines[angle], sines[i] = own.sines[angle];
        }
#pragma unroll
        for (int i = 0; i < ROWS_PER_THREAD; i++) {
            int in_half = threadIdx.x / 16 + i * 16, row = split() * HALF + in_half;
            int kv_slot = own.slot_mapping[min(row, own.row_count - 1)];
            bool is_query = qkv_head() < own.query_heads;
            slot_mapping[i] = in_half >= HALF ? -1 : is_query ? row : row < own.row_count ? kv_slot : -1;
        }
        // any address, if there is no bias
        const u16* from = own.bias ? own.bias + qkv_head() * 128 + part : own.attention_norm;
        bias[0] = unpack(from[0]), bias[1] = unpack(from[64]);
#pragma unroll
        for (int half = 0; half < 2; half++)
            scales[half] = E4M3 ? own.heads.scales[qkv_head() * 128 + half * 64 + part] : 1.0f;
    }
};

// A thread's second line is half a head after its first: RoPE's pair.
__device__ inline void finish_qkv(Shared& s, const Arguments& own, const Sums& sums, const RopeTable& rope_table,
                                  int part) {
    float kept[HALF_SUMS];
    reduce_split_k(s, sums, kept, part / 32, 0);
    int head = qkv_head();
    bool is_query = head < own.query_heads, is_key = !is_query && head < own.query_heads + own.kv_heads;
    u16* room = (u16*)s.rows[0];
    float factors[HALF / 4];
#pragma unroll
    for (int i = 0; i < HALF / 4; i++)
        factors[i] = s.factors[split() * HALF + threadIdx.x % 4 * 2 + i / 2 * 8 + i % 2];
#pragma unroll
    for (int i = 0; i < HALF / 4; i++) {
        int row = threadIdx.x % 4 * 2 + i / 2 * 8 + i % 2;
        float one = kept[i / 2 * 4 + i % 2], two = kept[i / 2 * 4 + 2 + i % 2];
        if (E4M3) one = __fmul_rn(one, rope_table.scales[0]), two = __fmul_rn(two, rope_table.scales[1]);
        one = __fmul_rn(one, factors[i]), two = __fmul_rn(two, factors[i]);
        if (own.bias) one = __fadd_rn(one, rope_table.bias[0]), two = __fadd_rn(two, rope_table.bias[1]);
        float cosine = rope_table.cosines[i], sine = rope_table.sines[i];
        float rotated = __fsub_rn(__fmul_rn(one, cosine), __fmul_rn(two, sine));
        float other = __fadd_rn(__fmul_rn(two, cosine), __fmul_rn(one, sine));
        bool rotates = is_query || is_key;
        room[swizzled(row, part / 8) + part % 8] = rounded(rotates ? rotated : one);
        room[swizzled(row, part / 8 + 8) + part % 8] = rounded(rotates ? other : two);
    }
    sync();
    int number = is_query ? head : is_key ? head - own.query_heads : head - own.query_heads - own.kv_heads;
    u16* to = is_query ? own.query : is_key ? own.keys : own.values;
    int each = is_query ? own.query_heads : own.kv_heads, eight = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < RopeTable::ROWS_PER_THREAD; i++) {
        if (rope_table.slot_mapping[i] < 0) continue;
        uint4 numbers = *(const uint4*)(room + swizzled(threadIdx.x / 16 + i * 16, eight));
        *(uint4*)(to + ((long)rope_table.slot_mapping[i] * each + number) * 128 + eight * 8) = numbers;
    }
}

