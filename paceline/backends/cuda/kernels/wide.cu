// A product of many rows, with the ends of `project` and `gate_up` (linear.py).
//
// A block of threads has some columns of the matrix, 64 for each of its groups of four warps. Two more warps
// do nothing but ask, one for weights, one for rows, which come by pieces of 64 of the depth into a ring of
// shared memory. The first weights need nothing of the kernels before, so they are asked for at once.
//
// The bits are those of product.py: the depth is summed in steps of the instruction, and what comes behind is
// spelled __fadd_rn and __fmul_rn, so that the compiler fuses nothing.
//
// wide.py defines the sizes ahead of it: KIND, ROWS of a block, GROUPS, STAGES, STEP, HALF (of a tile's
// columns), SQUARE_WORDS, and the text of the matrix instruction.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

constexpr int PROJECT = 0, GATE_UP = 1;
constexpr int THREADS = GROUPS * 128;  // that compute
constexpr int PIECE = 64, PIECES = STEP / PIECE;  // of the depth, of a step
constexpr int BLOCK = 64;  // columns of a group
constexpr int SUMS = ROWS / 2;  // of a thread
constexpr int BATCH = 8;  // rows whose squares a warp loads at once
constexpr u32 WEIGHT_BYTES = BLOCK * PIECE * 2, ROW_BYTES = ROWS * PIECE * 2;
constexpr u32 STAGE_BYTES = GROUPS * WEIGHT_BYTES + ROW_BYTES;

struct alignas(64) TensorMap {
    char bytes[128];
};

struct Product {
    void* output;  // float32 of PROJECT, bfloat16 of GATE_UP
    const u16* bias;
    const float* squares;  // of rows read, by group
    long stride;  // of the output's rows
    int width;  // columns without padding
    int blocks;  // of columns
    int depth;
    int rows;
    int groups;  // of squares
    float size, eps;  // of the norm
};

__device__ inline u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }
__device__ inline void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ inline void await_kernels_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void sync_threads(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ inline void make_flag(u32 flag, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(flag), "r"(count) : "memory");
}
__device__ inline void expect_bytes(u32 flag, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(flag), "r"(bytes) : "memory");
}
__device__ inline void raise_flag(u32 flag) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(flag) : "memory");
}
__device__ inline void await_flag(u32 flag, u32 parity) {
    asm volatile("{ .reg .pred done; again%=: "
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; "
                 "@!done bra again%=; }" ::"r"(flag), "r"(parity) : "memory");
}

// Policies of the cache.
__device__ inline u64 read_once() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ inline u64 read_soon() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ inline u64 read_again() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// 64 columns: eight of the first half of a tile, eight of the second, and so on.
__device__ inline void fetch_weights(u32 to, const TensorMap& map, u32 flag, int along, int part, int step,
                                     u64 policy) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%3, %4, %4, %5, %6}], [%2], %7;" ::"r"(to), "l"(&map), "r"(flag), "r"(along),
                 "r"(0), "r"(part), "r"(step), "l"(policy) : "memory");
}
__device__ inline void fetch_rows(u32 to, const TensorMap& map, u32 flag, int along, int row, u64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(&map), "r"(flag), "r"(along), "r"(row),
                 "l"(policy) : "memory");
}

// Lines of 128 bytes, swizzled, in groups of eight.
__device__ inline u64 operand(u32 at) {
    return (u64)(at >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
__device__ inline void begin_multiplying() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void end_multiplying() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ inline void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
__device__ inline void multiply(float (&d)[SUMS], u64 a, u64 b) {
    asm volatile(MULTIPLY : OUTPUTS : "l"(a), "l"(b));
}

__device__ inline u16 rounded(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
__device__ inline float unpack(u16 bits) { return __uint_as_float((u32)bits << 16); }
__device__ inline float divide(float x, float y) {
    float r;
    asm("div.full.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
    return r;
}
__device__ inline float silu(float x) {
    float power;
    asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(-x, 1.4426950216293335f)));
    return divide(x, __fadd_rn(power, 1.0f));
}

// What a block of threads works at.
struct Work {
    int first, count, passes;  // blocks of columns; passes over the depth with GROUPS of them each
    int steps, first_row;
    __device__ Work(const Product& product) {
        int parts = gridDim.x, part = blockIdx.x;
        steps = product.depth / STEP;
        first = (long)part * product.blocks / parts;
        count = (long)(part + 1) * product.blocks / parts - first;
        passes = (count + GROUPS - 1) / GROUPS;
        first_row = blockIdx.y * ROWS;
    }
    __device__ int blocks_of(int pass) const { return max(0, min(GROUPS, count - pass * GROUPS)); }
};

// A place of the ring, and whether it was come to an even number of times.
struct Turn {
    u32 stage = 0, parity = 0;
    __device__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

struct Shared {
    u32 ring, full, empty;  // addresses
    float* factors;  // [ROWS] of the norm
};

// Both pieces of a step are asked for at once: they lie side by side in memory.
__device__ inline void ask_weights(const Work& work, const Shared& s, const TensorMap& weights) {
    u64 policy = gridDim.y > 1 ? read_soon() : read_once();
    Turn turn;
    for (int pass = 0; pass < work.passes; pass++) {
        int count = work.blocks_of(pass), first = work.first + pass * GROUPS;
        u32 bytes = count * WEIGHT_BYTES + ROW_BYTES;
        for (int step = 0; step < work.steps; step++) {
            u32 flags[PIECES], to[PIECES];
#pragma unroll
            for (int piece = 0; piece < PIECES; piece++) {
                await_flag(s.empty + turn.stage * 8, turn.parity ^ 1);
                flags[piece] = s.full + turn.stage * 8, to[piece] = s.ring + turn.stage * STAGE_BYTES;
                expect_bytes(flags[piece], bytes);
                turn.advance();
            }
#pragma unroll
            for (int i = 0; i < GROUPS; i++) {
                if (i >= count) break;
                int block = first + i, part = block % (HALF / 32) * 4;
                int line = block / (HALF / 32) * work.steps + step;
#pragma unroll
                for (int piece = 0; piece < PIECES; piece++) {
                    u32 at = to[piece] + i * WEIGHT_BYTES;
                    fetch_weights(at, weights, flags[piece], piece * PIECE, part, line, policy);
                }
            }
        }
    }
}

__device__ inline void ask_rows(const Work& work, const Shared& s, const TensorMap& rows) {
    u32 to = s.ring + GROUPS * WEIGHT_BYTES;
    u64 policy = read_again();
    Turn turn;
    await_kernels_before();
    for (int pass = 0; pass < work.passes; pass++)
        for (int at = 0; at < work.steps * STEP; at += PIECE) {
            u32 flag = s.full + turn.stage * 8;
            await_flag(s.empty + turn.stage * 8, turn.parity ^ 1);
            fetch_rows(to + turn.stage * STAGE_BYTES, rows, flag, at, work.first_row, policy);
            turn.advance();
        }
}

// The sums of one block of columns, as Place has them.
__device__ inline void sum_up(float (&sums)[SUMS], Turn& turn, const Work& work, const Shared& s, int group,
                              bool has_block) {
    int lane = threadIdx.x % 32, pieces = work.steps * PIECES;
    u64 a = operand(s.ring + group * WEIGHT_BYTES), b = operand(s.ring + GROUPS * WEIGHT_BYTES);
#pragma unroll
    for (int i = 0; i < SUMS; i++) sums[i] = 0.0f;
    auto release = [&](u32 stage) {
        if (lane == 0) raise_flag(s.empty + stage * 8);
    };
    if (!has_block) {
        for (int i = 0; i < pieces; i++) {
            await_flag(s.full + turn.stage * 8, turn.parity);
            release(turn.stage);
            turn.advance();
        }
        return;
    }
    u32 before = 0;
    for (int i = 0; i < pieces; i++) {
        u64 offset = turn.stage * (STAGE_BYTES / 16);
        await_flag(s.full + turn.stage * 8, turn.parity);
        begin_multiplying();
#pragma unroll
        for (int k = 0; k < PIECE / 16; k++) multiply(sums, a + offset + 2 * k, b + offset + 2 * k);
        end_multiplying();
        await_products<1>();  // those of the piece before
        if (i > 0) release(before);
        before = turn.stage;
        turn.advance();
    }
    await_products<0>();
    release(before);
}

__device__ inline void add_other(float& sum, int offset) {  // of the lane at this offset
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffff, sum, offset));
}

// One over the root mean square of each row. A warp loads several rows before it adds up the first.
__device__ inline void make_factors(const Product& product, const Work& work, const Shared& s) {
    constexpr int warps = THREADS / 32;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int first = warp; first < ROWS; first += warps * BATCH) {
        float sums[BATCH][SQUARE_WORDS];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            long row = min(work.first_row + first + i * warps, product.rows - 1);
            const float* from = product.squares + row * product.groups;
#pragma unroll
            for (int word = 0; word < SQUARE_WORDS; word++) {
                int group = lane + word * 32;
                sums[i][word] = group < product.groups ? __ldcg(from + group) : 0.0f;
            }
        }
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2)
#pragma unroll
            for (int i = 0; i < BATCH; i++)
#pragma unroll
                for (int word = 0; word < SQUARE_WORDS; word++) add_other(sums[i][word], offset);
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
#pragma unroll
            for (int word = 1; word < SQUARE_WORDS; word *= 2)
#pragma unroll
                for (int pair = 0; pair + word < SQUARE_WORDS; pair += 2 * word)
                    sums[i][pair] = __fadd_rn(sums[i][pair], sums[i][pair + word]);
            float mean = __fadd_rn(divide(sums[i][0], product.size), product.eps), root;
            asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(mean));
            int row = first + i * warps;
            if (lane == 0 && row < ROWS) s.factors[row] = root;
        }
    }
    sync_threads(9, THREADS);
}

// A thread has columns `part` of both halves of a tile, and rows row(0), row(1), ... of the block.
struct Place {
    int tile, part;
    __device__ Place(int block) {
        tile = block / (HALF / 32);
        part = block % (HALF / 32) * 32 + threadIdx.x / 32 % 4 * 8 + threadIdx.x % 32 / 4;
    }
    __device__ int column(int half) const { return tile * 2 * HALF + half * HALF + part; }
    __device__ static int row(int i) { return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2; }
    __device__ static int sum(int i, int half) { return i / 2 * 4 + half * 2 + i % 2; }
};

__device__ inline void end_project(const float (&sums)[SUMS], const Product& product, const Work& work,
                                   const Shared& s, int block) {
    Place place(block);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int column = place.column(half);
        float bias = product.bias ? unpack(product.bias[column]) : 0.0f;
        float* to = (float*)product.output + work.first_row * product.stride + column;
#pragma unroll
        for (int i = 0; i < SUMS / 2; i++) {
            int row = place.row(i);
            float value = __fmul_rn(sums[place.sum(i, half)], s.factors[row]);
            if (product.bias) value = __fadd_rn(value, bias);
            bool is_there = column < product.width && work.first_row + row < product.rows;
            if (is_there) to[row * product.stride] = value;
        }
    }
}

__device__ inline void end_gate_up(const float (&sums)[SUMS], const Product& product, const Work& work,
                                   const Shared& s, int block) {
    Place place(block);
    u16* to = (u16*)product.output + work.first_row * product.stride + place.tile * HALF + place.part;
#pragma unroll
    for (int i = 0; i < SUMS / 2; i++) {
        int row = place.row(i);
        float gate = __fmul_rn(sums[place.sum(i, 0)], s.factors[row]);
        float up = __fmul_rn(sums[place.sum(i, 1)], s.factors[row]);
        u16 mixed = rounded(__fmul_rn(silu(gate), up));
        if (work.first_row + row < product.rows) to[row * product.stride] = mixed;
    }
}

__device__ inline void compute(const Work& work, const Shared& s, const Product& product) {
    int group = threadIdx.x / 128;
    Turn turn;
    await_kernels_before();
    make_factors(product, work, s);
    for (int pass = 0; pass < work.passes; pass++) {
        int block = work.first + pass * GROUPS + group;
        bool has_block = group < work.blocks_of(pass);
        float sums[SUMS];
        sum_up(sums, turn, work, s, group, has_block);
        if (!has_block) continue;
        if constexpr (KIND == PROJECT) end_project(sums, product, work, s, block);
        if constexpr (KIND == GATE_UP) end_gate_up(sums, product, work, s, block);
        __syncwarp();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + 64, 1)
wide_product(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap rows,
             const __grid_constant__ Product product) {
    extern __shared__ char shared[];
    __shared__ alignas(8) u64 flags[2 * STAGES];
    __shared__ float factors[ROWS];
    Shared s;
    s.ring = (shared_address(shared) + 1023) / 1024 * 1024;  // as the swizzle wants it
    s.full = shared_address(flags), s.empty = s.full + STAGES * 8, s.factors = factors;
    let_next_start();
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            make_flag(s.full + stage * 8, 1);
            make_flag(s.empty + stage * 8, GROUPS * 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    Work work(product);
    if (threadIdx.x >= THREADS) {
        if (threadIdx.x == THREADS) ask_weights(work, s, weights);
        if (threadIdx.x == THREADS + 32) ask_rows(work, s, rows);
        __syncwarp();
    } else {
        compute(work, s, product);
    }
}
