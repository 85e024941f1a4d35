// What becomes of the sums of a unit. A row is in four threads, which have two of every eight columns.

// Adds numbers up in pairs; the sum is the first of them.
template <int COUNT> __device__ inline void add_pairs(float (&numbers)[COUNT]) {
#pragma unroll
    for (int apart = 1; apart < COUNT; apart *= 2)
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (i % (2 * apart) == 0) numbers[i] = __fadd_rn(numbers[i], numbers[i + apart]);
}

// The RMSNorm factor of a row, the same in its four threads; squares are added in pairs.
__device__ inline float norm_factor(const Arguments& own, int row) {
    constexpr int each = 32;  // of at most 128 groups
    float sums[each];
#pragma unroll
    for (int i = 0; i < each; i += 4) {
        int group = threadIdx.x % 4 * each + i;
        float4 four = make_float4(0, 0, 0, 0);
        if (group < own.groups) four = __ldcg((const float4*)(own.squares + (long)row * own.groups + group));
        sums[i] = four.x, sums[i + 1] = four.y, sums[i + 2] = four.z, sums[i + 3] = four.w;
    }
    add_pairs(sums);
    float sum = in_pairs(in_pairs(sums[0], 1), 2);
    return inverse_root(__fadd_rn(divide(sum, own.size), own.eps));
}

// SwiGLU of eights of a tile's columns, or of half a tile's: first those of gate, then as many of up.
template <int EIGHTS>
__device__ inline void store_gated_tile(const Arguments& own, int row, int column, const float* sums, float factor) {
    u32 words[4] = {};
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight++) {
        const float *gate = sums + eight * 4, *up = gate + EIGHTS * 4;
        words[eight] = pack(gated(gate[0], up[0], factor), gated(gate[1], up[1], factor));
    }
    store_eights(own.output + (long)row * own.width + column, words, threadIdx.x % 4 < EIGHTS);
}

__device__ inline void store_gated(const Arguments& own, const Unit& unit, int row, const Sums& sums,
                                   const float (&factors)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int line = row + half * 8;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            store_gated_tile<4>(own, line, (unit.first_tile() + tile) * (TILE / 2), &sums[tile * (TILE / 2) + half * 2],
                                factors[half]);
        if constexpr (HAS_HALF)
            store_gated_tile<2>(own, line, unit.half_tile() * (TILE / 2) + unit.half() * (TILE / 4),
                                &sums[TILES * (TILE / 2) + half * 2], factors[half]);
    }
}

// Lets the next stage be loaded into a slab that this warpgroup has read.
__device__ inline void release_slab(Shared& s, RingPosition& at) {
    sync_warpgroup(2 + threadIdx.x / 128);
    release(s, at.stage);
    at.next();
}

// Those of this thread's two rows: of every eight columns two.
__device__ inline void take_slab(Shared& s, RingPosition& at, float2 (&hidden)[2][SLAB / 8]) {
    wait_mbarrier(&s.full[at.stage], at.turn);
    int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 8;  // bytes
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int eight = 0; eight < SLAB / 8; eight++) {
            int at_byte = eight * 32 + pair, line = row + half * 8;  // in WGMMA's 128-byte swizzle
            hidden[half][eight] = *(const float2*)(s.rows[at.stage] + line * 128 + (at_byte ^ line % 8 * 16));
        }
    release_slab(s, at);
}

__device__ inline void skip_slabs(Shared& s, RingPosition& at) {
    for (int slab = 0; slab < SLABS; slab++) {
        wait_mbarrier(&s.full[at.stage], at.turn);
        release_slab(s, at);
    }
}

// The weights of the norm after the residual stream, for this thread's columns of a tile.
__device__ inline void load_norm(const Arguments& own, int column, u32 (&norm)[TILE / 8]) {
#pragma unroll
    for (int eight = 0; eight < TILE / 8; eight++)
        norm[eight] = *(const u32*)(own.norm + column + eight * 8 + threadIdx.x % 4 * 2);
}

// Adds sums to a slab of a row; stores it, and it times the norm's weights; returns squares of four threads' pairs.
__device__ inline void add_slab(const Arguments& own, int row, int column, const float2* hidden, const float* sums,
                                const u32* norm, float* squares) {
    float* to = own.hidden + (long)row * own.width + column + threadIdx.x % 4 * 2;
    u32 words[4];
#pragma unroll
    for (int eight = 0; eight < SLAB / 8; eight++) {
        float one = __fadd_rn(hidden[eight].x, sums[eight * 4]), two = __fadd_rn(hidden[eight].y, sums[eight * 4 + 1]);
        if (row < own.row_limit) __stcg((float2*)(to + eight * 8), make_float2(one, two));
        words[eight] =
            pack(__fmul_rn(one, unpack((u16)norm[eight])), __fmul_rn(two, unpack((u16)(norm[eight] >> 16))));
        squares[eight] = in_pairs(in_pairs(__fadd_rn(__fmul_rn(one, one), __fmul_rn(two, two)), 1), 2);
    }
    store_eights(own.output + (long)row * own.width + column, words, row < own.row_limit);
}

__device__ inline void add_to_hidden(Shared& s, RingPosition& at, const Arguments& own, const Unit& unit, int row,
                                     const Sums& sums) {
    constexpr int tiles = COLUMNS / TILE, each = TILE / SLAB;
    u32 norms[2][TILE / 8];  // loaded a tile ahead
    load_norm(own, unit.group * COLUMNS, norms[0]);
#pragma unroll
    for (int tile = 0; tile < tiles; tile++) {
        int first = unit.group * COLUMNS + tile * TILE;
        float squares[2][TILE / 8];
        if (tile + 1 < tiles) load_norm(own, first + TILE, norms[(tile + 1) % 2]);
#pragma unroll
        for (int slab = 0; slab < each; slab++) {
            float2 hidden[2][SLAB / 8];
            take_slab(s, at, hidden);
#pragma unroll
            for (int half = 0; half < 2; half++)
                add_slab(own, row + half * 8, first + slab * SLAB, hidden[half],
                         &sums[(tile * each + slab) * (SLAB / 2) + half * 2], norms[tile % 2] + slab * (SLAB / 8),
                         squares[half] + slab * (SLAB / 8));
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            add_pairs(squares[half]);
            long to = (long)(row + half * 8) * (own.width / TILE) + first / TILE;
            if (threadIdx.x % 4 == 0 && row + half * 8 < own.row_limit) own.written_squares[to] = squares[half][0];
        }
    }
}

// A head of a row, whose second half is RoPE's pair of its first.
struct Head {
    const float* sums;  // of every eight columns two
    const u16* bias;  // or null
    float factor;
    // The numbers `part` and `part` + 1 of a half, `part` less this thread's pair.
    __device__ float2 two(int half, int part) const {
        const float* own = sums + half * 32 + part / 2;
        float2 numbers = make_float2(__fmul_rn(own[0], factor), __fmul_rn(own[1], factor));
        if (bias) {
            u32 both = *(const u32*)(bias + half * 64 + part + threadIdx.x % 4 * 2);
            numbers.x = __fadd_rn(numbers.x, unpack((u16)both));
            numbers.y = __fadd_rn(numbers.y, unpack((u16)(both >> 16)));
        }
        return numbers;
    }
    // The factor of its own norm; squares are added in pairs.
    __device__ float norm_factor(float eps) const {
        float squares[16];
#pragma unroll
        for (int eight = 0; eight < 16; eight++) {
            float2 own = two(eight / 8, eight % 8 * 8);
            squares[eight] = in_pairs(in_pairs(__fadd_rn(__fmul_rn(own.x, own.x), __fmul_rn(own.y, own.y)), 1), 2);
        }
        add_pairs(squares);
        return inverse_root(__fadd_rn(divide(squares[0], 128.0f), eps));
    }
};

// RoPE's factors of a row.
struct Angles {
    float2 cosines[8], sines[8];
    __device__ Angles(const Arguments& own, int row) {
        int first = own.positions[min(row, own.row_count - 1)] * 64 + threadIdx.x % 4 * 2;
#pragma unroll
        for (int eight = 0; eight < 8; eight++) {
            cosines[eight] = *(const float2*)(own.cosines + first + eight * 8);
            sines[eight] = *(const float2*)(own.sines + first + eight * 8);
        }
    }
};

__device__ inline void store_head(const Arguments& own, int row, int number, const Head& head, const Angles& angles) {
    int pair = threadIdx.x % 4 * 2, real = min(row, own.row_count - 1);
    bool is_query = number < own.query_heads, is_key = !is_query && number < own.query_heads + own.kv_heads;
    int slot = is_query ? row : row < own.row_count ? own.slot_mapping[real] : -1;
    int each = is_query ? own.query_heads : own.kv_heads;
    long line = (long)slot * each + (is_query ? number : (number - own.query_heads) % own.kv_heads);
    u16* to = (is_query ? own.output : is_key ? own.keys : own.values) + line * 128;
    const u16* norm = is_query ? own.query_norm : is_key ? own.key_norm : nullptr;
    float factor = norm ? head.norm_factor(own.head_eps) : 1.0f;
#pragma unroll
    for (int four = 0; four < 2; four++) {  // eights of each half
        u32 words[2][4];
#pragma unroll
        for (int eight = 0; eight < 4; eight++) {
            int part = (four * 4 + eight) * 8;
            float2 halves[2] = {head.two(0, part), head.two(1, part)};
            if (norm)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u32 both = *(const u32*)(norm + half * 64 + part + pair);
                    halves[half].x = __fmul_rn(halves[half].x, __fmul_rn(factor, unpack((u16)both)));
                    halves[half].y = __fmul_rn(halves[half].y, __fmul_rn(factor, unpack((u16)(both >> 16))));
                }
            if (is_query || is_key) {
                float2 cosine = angles.cosines[part / 8], sine = angles.sines[part / 8];
                rotate(halves[0].x, halves[1].x, cosine.x, sine.x), rotate(halves[0].y, halves[1].y, cosine.y, sine.y);
            }
            words[0][eight] = pack(halves[0].x, halves[0].y), words[1][eight] = pack(halves[1].x, halves[1].y);
        }
        store_eights(to + four * 32, words[0], slot >= 0);
        store_eights(to + 64 + four * 32, words[1], slot >= 0);
    }
}

__device__ inline void store_heads(const Arguments& own, const Unit& unit, int row, const Sums& sums,
                                   const float (&factors)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        Angles angles(own, row + half * 8);
#pragma unroll
        for (int i = 0; i < COLUMNS / 128; i++) {
            int number = unit.group * (COLUMNS / 128) + i;
            const u16* bias = own.bias ? own.bias + number * 128 : nullptr;
            store_head(own, row + half * 8, number, {&sums[i * 64 + half * 2], bias, factors[half]}, angles);
        }
    }
}

// Logits of rows and columns that are not padding.
__device__ inline void store_logits(const Arguments& own, const Unit& unit, int row, const Sums& sums,
                                    const float (&factors)[2]) {
    int first = unit.group * COLUMNS + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i += 2) {
        int half = i / 2 % 2, line = row + half * 8, column = first + i / 4 * 8;
        float2 two = make_float2(__fmul_rn(sums[i], factors[half]), __fmul_rn(sums[i + 1], factors[half]));
        if (line < own.row_count && column < own.columns)
            *(float2*)(own.hidden + (long)line * own.width + column) = two;
    }
}
