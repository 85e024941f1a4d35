// The grid barrier, and the epilogues of products.

// A grid barrier. Between arrive and wait a block does work that does not depend on the others.
struct GridBarrier {
    u32* arrivals;
    u32 target = 0;
    __device__ void arrive() {  // this block's writes are visible after the others' wait
        sync();
        target += PROGRAMS;
        if (thread() == 0) add_release(arrivals);
    }
    // Results of other blocks are loaded past L1, by loads that are issued after this has returned.
    __device__ void wait() {
        if (thread() == 0) {
            for (int tries = 0; load_relaxed(arrivals) < target; tries++)
                if (tries == 1 << 22) __trap();  // after seconds: an error is better than a hang
        }
        sync();
    }
};

// RoPE: thread (unit, row, column) rotates the same two columns of a head in all layers.
struct Rope {
    int row, number, head, part, kv_slot;
    bool mine;
    float cosine, sine;
    __device__ Rope(const Pass& pass) {
        int unit = first_unit<Heads::units>(blockIdx.x);
        int own = first_unit<Heads::units>(blockIdx.x + 1) - unit;
        row = thread() / 8 % 8, number = thread() / 64;
        static_assert(Cut<Heads>::groups <= WARPS / 2, "");
        mine = row < ROWS && number < own;
        head = (unit + number) / (DIM / 16), part = (unit + number) % (DIM / 16) * 8 + thread() % 8;
        kv_slot = mine ? pass.slot_mapping[row] : -1;
        int angle = mine ? pass.positions[row] * HALF + part : 0;
        cosine = pass.cosines[angle], sine = pass.sines[angle];
    }
    __device__ ushort2 bias(const Layer& layer) const {
        if (!HEADS_BIAS || !mine) return make_ushort2(0, 0);
        const u16* at = layer.heads_bias + head * DIM + part;
        return make_ushort2(at[0], at[HALF]);
    }
    // A norm needs the sum of squares of a head, which several blocks have: attention norms and rotates it.
    __device__ void store_unnormed(const Pass& pass, float one, float two) const {
        float squares[2] = {__fmul_rn(one, one), __fmul_rn(two, two)};
#pragma unroll
        for (int offset = 1; offset < 8; offset *= 2)
#pragma unroll
            for (int i = 0; i < 2; i++)
                squares[i] = __fadd_rn(squares[i], __shfl_xor_sync(0xffffffff, squares[i], offset));
        if (!mine || head >= HEADS + KV_HEADS) return;
        int line = row * (HEADS + KV_HEADS) + head;
        float* to = pass.heads + line * DIM + part;
        to[0] = one, to[HALF] = two;
        float* sums = pass.head_squares + line * (DIM / 8) + part / 8;
        if (thread() % 8 == 0) sums[0] = squares[0], sums[HALF / 8] = squares[1];
    }
    __device__ void end(Shared& s, const Pass& pass, const Layer& layer, ushort2 bias) const {
        float one = 0.0f, two = 0.0f;
        if (mine) {
            int lane = thread() % 8;
            float factor = s.factors[row];
            one = __fmul_rn(total<Heads>(s, number * 16 + lane, row), factor);
            two = __fmul_rn(total<Heads>(s, number * 16 + lane + 8, row), factor);
            if (HEADS_BIAS) one = __fadd_rn(one, unpack(bias.x)), two = __fadd_rn(two, unpack(bias.y));
        }
        if (HEAD_NORMS) store_unnormed(pass, one, two);
        if (!mine || (HEAD_NORMS && head < HEADS + KV_HEADS)) return;
        if (head < HEADS + KV_HEADS) {
            float rotated = __fsub_rn(__fmul_rn(one, cosine), __fmul_rn(two, sine));
            two = __fadd_rn(__fmul_rn(two, cosine), __fmul_rn(one, sine));
            one = rotated;
        }
        u16* to = pass.query + (row * HEADS + head) * DIM;
        if (head >= HEADS) {
            bool is_key = head < HEADS + KV_HEADS;
            int qkv_head = is_key ? head - HEADS : head - HEADS - KV_HEADS;
            to = (is_key ? layer.keys : layer.values) + ((long)kv_slot * KV_HEADS + qkv_head) * DIM;
            if (kv_slot < 0) return;
        }
        u32 both = pack(one, two);
        to[part] = (u16)both;
        to[part + HALF] = (u16)(both >> 16);
    }
};

__device__ inline float exponential(float x) { return exp2_unflushed(__fmul_rn(x, 1.4426950216293335f)); }
__device__ inline float silu(float x) {
    return divide(x, __fadd_rn(exponential(-x), 1.0f));
}

// SwiGLU: a thread's first two sums are gate, the other two up.
__device__ inline void finish_gate_up(Shared& s, const Pass& pass, const float (&sums)[JOBS][4]) {
    u32 first = first_unit<GateUp::units>(blockIdx.x);
    u32 own = first_unit<GateUp::units>(blockIdx.x + 1) - first;
    int warp = thread() / 32, lane = thread() % 32;
#pragma unroll
    for (int j = 0; j < Cut<GateUp>::jobs_of_warp; j++) {
        u32 line = (warp + j * WARPS) * 16 + lane / 4, unit = GateUp::unit(line);
        if (unit < own) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int row = lane % 4 * 2 + i;
                if (row < ROWS) {
                    float factor = s.factors[row];
                    float gate = __fmul_rn(sums[j][i], factor), up = __fmul_rn(sums[j][i + 2], factor);
                    pass.activated[(long)row * INTERMEDIATE + (first + unit) * 4 + line % 4] =
                        (u16)pack(__fmul_rn(silu(gate), up), 0.0f);
                }
            }
        }
    }
}

// Thread (quad, row) has the same four columns of the residual stream from the first layer to the last.
struct ResidualStream {
    int row, unit, quad;
    bool mine;
    float4 hidden;
    __device__ ResidualStream(const Pass& pass) {
        unit = first_unit<Down::units>(blockIdx.x);
        int own = first_unit<Down::units>(blockIdx.x + 1) - unit;
        row = thread() % 8, quad = thread() / 8;
        static_assert(Cut<Down>::columns / 4 <= THREADS / 8, "");
        mine = row < ROWS && quad < own;
        hidden = mine ? *(const float4*)(pass.hidden + column()) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    __device__ int column() const { return row * HIDDEN + (unit + quad) * 4; }
    __device__ uint2 weights(const u16* norm) const {
        return mine ? *(const uint2*)(norm + (unit + quad) * 4) : make_uint2(0, 0);
    }
    __device__ void keep(float* features, u64 width) const {
        if (features && mine) *(float4*)(features + row * width + (unit + quad) * 4) = hidden;
    }
    template <class P> __device__ void add(const Shared& s, uint2 weight, u16* normed, float* quads) {
        if (!mine) return;
        auto added = [&](int i) { return P::weighted ? mixed<P>(s, quad * 4 + i, row) : total<P>(s, quad * 4 + i, row); };
        hidden.x = __fadd_rn(hidden.x, added(0));
        hidden.y = __fadd_rn(hidden.y, added(1));
        hidden.z = __fadd_rn(hidden.z, added(2));
        hidden.w = __fadd_rn(hidden.w, added(3));
        uint2 packed;
        packed.x = pack(__fmul_rn(hidden.x, unpack((u16)weight.x)),
                        __fmul_rn(hidden.y, unpack((u16)(weight.x >> 16))));
        packed.y = pack(__fmul_rn(hidden.z, unpack((u16)weight.y)),
                        __fmul_rn(hidden.w, unpack((u16)(weight.y >> 16))));
        *(uint2*)(normed + column()) = packed;
        quads[row * (HIDDEN / 4) + unit + quad] =
            __fadd_rn(__fadd_rn(__fmul_rn(hidden.x, hidden.x), __fmul_rn(hidden.y, hidden.y)),
                      __fadd_rn(__fmul_rn(hidden.z, hidden.z), __fmul_rn(hidden.w, hidden.w)));
    }
};
