// How programs wait for each other, and what products end with.

// Of the threads that multiply, of the first group of them, and of all that have to do with factors.
__device__ inline void sync() { asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLIERS) : "memory"); }
__device__ inline void sync_first() { asm volatile("bar.sync 2, 128;" ::: "memory"); }
__device__ inline void sync_factors() {
    asm volatile("bar.sync 3, %0;" ::"n"(MULTIPLIERS + FINDERS) : "memory");
}

// What all programs have written before is there; asked by one thread of each.
__device__ inline void await_programs(const u32* counter) {
    u32 seen = 0;
    for (int tries = 0; seen < gridDim.x; tries++) {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
        if (tries == 1 << 22) __trap();  // seconds: rather an error than a device that hangs
    }
    asm volatile("fence.proxy.async;" ::: "memory");  // rows are fetched by the copy engine
}
__device__ inline void tell_programs(u32* counter) {
    asm volatile("fence.proxy.async;" ::: "memory");
    __threadfence();
    sync();
    if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ inline float in_pairs(float x, int lanes) {
    return __fadd_rn(x, __shfl_xor_sync(0xffffffff, x, lanes));
}

// One over the root mean square of each row, by one warp each; squares are added up in pairs. Warps of their
// own do it, when all programs have written their squares.
__device__ inline void find_factors(Shared& s, int round, const Arguments& own, const float* squares) {
    int lane = threadIdx.x % 32, warp = (threadIdx.x - FIRST_FINDER) / 32, tiles = own.width / 64;
    await_flag(&s.ready, round);
    constexpr int warps = FINDERS / 32, each = ROWS / warps, together = each < 8 ? each : 8;
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
            float root;
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int lanes = 1; lanes < 32; lanes *= 2)
                    sums[i][half] = in_pairs(sums[i][half], lanes);
            float mean = __fadd_rn(divide(__fadd_rn(sums[i][0], sums[i][1]), own.size), own.eps);
            asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(mean));
            if (lane == 0) s.factors[warp + (first + i) * warps] = root;
        }
    }
    sync_factors();
}

// Until all threads of both programs of the cluster that have not ended are here.
__device__ inline void await_other() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The place of the other program that is this one here.
__device__ inline u32 of_other(const void* here) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(here)), "r"(1 - split()));
    return there;
}
__device__ inline void give(u32 to, float a, float b, float c, float d, u32 flag) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
                 "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d), "r"(flag) : "memory");
}
__device__ inline float4 given(const float* at) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(shared_address(at)) : "memory");
    return v;
}

// Of a thread: two rows of its first line, two of its second, and the same of the next eight rows.
typedef float Sums[1][ROWS / 2];

// Each program of a cluster gives the other its sums of half of the rows, and gets those of its own half.
__device__ inline void meet(Shared& s, const Sums& sums, float (&kept)[HALF_SUMS], int group, int round) {
    int thread = threadIdx.x % 128;
    bool second = split();
    u32 to = of_other(s.given[group][0][thread]), flag = of_other(&s.met);
#pragma unroll
    for (int i = 0; i < HALF_SUMS; i += 4) {
        float own[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float low = sums[0][i + j], high = sums[0][HALF_SUMS + i + j];
            kept[i + j] = second ? high : low, own[j] = second ? low : high;
        }
        give(to + i / 4 * (128 * 16), own[0], own[1], own[2], own[3], flag);
    }
    await_flag(&s.met, round);
#pragma unroll
    for (int i = 0; i < HALF_SUMS; i += 4) {  // of two sums there is no order
        float4 other = given(s.given[group][i / 4][thread]);
        kept[i] = __fadd_rn(kept[i], other.x), kept[i + 1] = __fadd_rn(kept[i + 1], other.y);
        kept[i + 2] = __fadd_rn(kept[i + 2], other.z), kept[i + 3] = __fadd_rn(kept[i + 3], other.w);
    }
}

// What a product that is added to the residual stream leaves for the next norm.
struct Next {
    const u16* norm;
    u16* rows;
    float* squares;
};

__device__ inline void end_add(Shared& s, const Arguments& own, const Sums& sums, Next next, int round) {
    int warp = threadIdx.x / 32, line = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
    int column = cluster() * 64 + warp * 16 + line, first_row = split() * HALF;
    int first = (first_row + pair) * own.width + column;
    auto place = [&](int i) { return first + (i / 2 * 8 + i % 2) * own.width; };
    float hidden[HALF / 4][2], weight[2], kept[HALF_SUMS];
#pragma unroll
    for (int i = 0; i < HALF / 4; i++)  // asked for now, used when splits have met
        hidden[i][0] = __ldcg(own.hidden + place(i)), hidden[i][1] = __ldcg(own.hidden + place(i) + 8);
    weight[0] = unpack(next.norm[column]), weight[1] = unpack(next.norm[column + 8]);
    meet(s, sums, kept, 0, round);
#pragma unroll
    for (int i = 0; i < HALF / 4; i++) {
        float squares[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = __fadd_rn(hidden[i][half], kept[i / 2 * 4 + half * 2 + i % 2]);
            __stcg(own.hidden + place(i) + half * 8, sum);
            next.rows[place(i) + half * 8] = rounded(__fmul_rn(sum, weight[half]));
            squares[half] = __fmul_rn(sum, sum);
#pragma unroll
            for (int lanes = 4; lanes < 32; lanes *= 2)  // in pairs: of lines, of eights, of warps
                squares[half] = in_pairs(squares[half], lanes);
        }
        if (line == 0) s.squares[warp][i / 2 * 8 + pair + i % 2] = __fadd_rn(squares[0], squares[1]);
    }
    sync_first();
    int row = threadIdx.x;
    if (row >= HALF) return;
    float low = __fadd_rn(s.squares[0][row], s.squares[1][row]);
    float high = __fadd_rn(s.squares[2][row], s.squares[3][row]);
    __stcg(next.squares + (first_row + row) * (own.width / 64) + cluster(), __fadd_rn(low, high));
}

// A thread's first line is a gate, its second what it lets through.
__device__ inline void end_gate_up(const Shared& s, const Arguments& own, const float (&sums)[2][ROWS / 2],
                                   int group) {
    int warp = threadIdx.x / 32 % 4, line = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
        int column = ((blockIdx.x * 4 + group * 2 + tile) * 4 + warp) * 8 + line;
#pragma unroll
        for (int i = 0; i < ROWS / 4; i++) {
            int row = i / 2 * 8 + pair + i % 2;
            float gate = __fmul_rn(sums[tile][i / 2 * 4 + i % 2], s.factors[row]);
            float up = __fmul_rn(sums[tile][i / 2 * 4 + 2 + i % 2], s.factors[row]);
            own.activated[row * own.intermediate + column] = rounded(__fmul_rn(silu(gate), up));
        }
    }
}

// A thread's second line is half a head behind its first.
__device__ inline void end_heads(Shared& s, const Arguments& own, const Sums& sums, int group) {
    float kept[HALF_SUMS];
    meet(s, sums, kept, group, 0);
    constexpr int dim = 128, half = 64;
    int head = own_head(), warp = threadIdx.x / 32 % 4, line = threadIdx.x % 32 / 4;
    int first_row = split() * HALF + threadIdx.x % 4 * 2, part = (group * 4 + warp) * 8 + line;
    bool is_query = head < own.query_heads, is_key = !is_query && head < own.query_heads + own.kv_heads;
    int number = is_query ? head : is_key ? head - own.query_heads : head - own.query_heads - own.kv_heads;
    u16* to = is_query ? own.query : is_key ? own.keys : own.values;
    int each = is_query ? own.query_heads : own.kv_heads;
    const u16* bias = own.bias + head * dim + part;
#pragma unroll
    for (int i = 0; i < HALF / 4; i++) {
        int row = first_row + i / 2 * 8 + i % 2;
        bool real = row < own.row_count;
        int place = is_query ? row : real ? own.places[row] : -1, position = real ? own.positions[row] : 0;
        float one = __fmul_rn(kept[i / 2 * 4 + i % 2], s.factors[row]);
        float two = __fmul_rn(kept[i / 2 * 4 + 2 + i % 2], s.factors[row]);
        if (own.bias) one = __fadd_rn(one, unpack(bias[0])), two = __fadd_rn(two, unpack(bias[half]));
        if (is_query || is_key) {
            float cosine = own.cosines[position * half + part], sine = own.sines[position * half + part];
            float turned = __fsub_rn(__fmul_rn(one, cosine), __fmul_rn(two, sine));
            two = __fadd_rn(__fmul_rn(two, cosine), __fmul_rn(one, sine));
            one = turned;
        }
        if (place < 0) continue;
        u16* line_of = to + ((long)place * each + number) * dim;
        line_of[part] = rounded(one), line_of[part + half] = rounded(two);
    }
}

