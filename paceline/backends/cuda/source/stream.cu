// Everything of a layer between its attention and that of the next one, in one kernel that stays on every
// multiprocessor: output, gate and up, down, and the next queries, keys and values.
//
// Weights stream through a ring of shared memory whatever product they belong to: while programs wait for each
// other's results, the weights of the next product are on their way. Two programs are a cluster, for the two
// splits of a tile. Two groups of four warps multiply, one thread asks for weights and one for rows.
//
// The files are one source, put together in the order stream, stream_ends, between. The sizes that they are
// compiled for (ROWS, CELLS, ROW_SLOTS, AHEAD), and `multiply` for this many rows, are defined ahead of them by
// between.py. bfloat16 numbers are u16 here. Sums and products are spelled __fadd_rn and __fmul_rn, so that the
// compiler fuses nothing: the bits are those of the kernels in ../kernels.
//
// This file: instructions that C++ has no words for, and the ring.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

constexpr int MULTIPLIERS = 256, FINDERS = 64;  // threads that multiply, and that find the factors of norms
constexpr int ASKS_WEIGHTS = MULTIPLIERS, ASKS_ROWS = MULTIPLIERS + 32, FIRST_FINDER = MULTIPLIERS + 64;
constexpr int DEEP = 64;  // of the depth: what a cell of the ring holds, of one tile of 64 columns
constexpr int CELL_BYTES = 64 * DEEP * 2, ROW_BYTES = ROWS * DEEP * 2, STEP_BYTES = 2 * CELL_BYTES;
constexpr int HALF = ROWS / 2, HALF_SUMS = HALF / 2;  // rows that a split ends, and sums of a thread of them

struct __align__(64) Map {  // what the copy engine knows of a tensor
    u64 words[16];
};

struct Product {
    Map weights, rows;
    int steps, units;  // of 128 of the depth; how many programs or clusters have a part of it
};

struct Arguments {  // between.py has them in the same order
    Product output, gate_up, down, heads;
    float* hidden;
    const u16 *attention_norm, *feed_norm;  // of the next layer, and of this
    u16* feed_rows;
    float* feed_squares;
    u16 *activated, *attention_rows;
    float* attention_squares;
    u16* query;
    const u16* bias;
    const int *positions, *places;
    const float *cosines, *sines;
    u16 *keys, *values;
    const char* ahead;  // the output matrix of the next layer, which is of this one's size
    u32* counters;      // of programs that have ended their part of a product; zero between kernels
    int width, intermediate, row_count, query_heads, kv_heads;
    float size, eps;
};

struct __align__(1024) Shared {
    char weights[CELLS][CELL_BYTES];
    char rows[ROW_SLOTS][ROW_BYTES];
    float given[2][HALF_SUMS / 4][128][4];  // by the other program: [group][four][thread]
    u64 full[CELLS], used[CELLS], full_rows[ROW_SLOTS], used_rows[ROW_SLOTS], met, ready;  // flags
    float factors[ROWS];
    float squares[4][HALF];
};

__device__ inline u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

__device__ inline void make_flag(u64* flag, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(flag)), "r"(count) : "memory");
}
__device__ inline void raise_flag(u64* flag) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(flag)) : "memory");
}
__device__ inline void expect_bytes(u64* flag, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(flag)), "r"(bytes)
                 : "memory");
}
__device__ inline void await_flag(u64* flag, int parity) {
    asm volatile("{ .reg .pred done; again%=: mbarrier.try_wait.parity.shared.b64 done, [%0], %1; "
                 "@!done bra again%=; }" ::"r"(shared_address(flag)), "r"(parity) : "memory");
}

__device__ inline void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ inline void await_kernels_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Weights lie as [tile and step, group of lines, half, 8 lines, 128 of the depth]: see between.py.
__device__ inline void copy_weights(void* to, const Map& map, int deep, int group, int block, u64* flag) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, 0, 0, %3, %4}], [%5];" ::"r"(shared_address(to)), "l"(&map), "r"(deep),
                 "r"(group), "r"(block), "r"(shared_address(flag)) : "memory");
}
__device__ inline void copy_rows(void* to, const Map& map, int deep, u64* flag) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, 0}], [%3];" ::"r"(shared_address(to)), "l"(&map), "r"(deep),
                 "r"(shared_address(flag)) : "memory");
}

// What the matrix unit knows of lines of 128 bytes, swizzled in eights.
__device__ inline u64 described(const void* at) {
    return (u64)((shared_address(at) & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
__device__ inline void begin_multiplying() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void end_multiplying() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ inline void await_multiplying() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

__device__ inline u32 pack(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ inline u16 rounded(float x) { return (u16)pack(x, 0.0f); }
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

__device__ inline int cluster() { return blockIdx.x / 2; }
__device__ inline int split() { return blockIdx.x % 2; }
// Heads begin with the programs that have no share of gate and up.
__device__ inline int own_head() { return gridDim.x / 2 - 1 - cluster(); }

// Which part of a product a program has: of the depth, in cells.
struct Part {
    int begin, count;
    __device__ Part(const Product& own, bool mine, bool is_split) {
        int splits = is_split ? 2 : 1, number = is_split ? split() : 0;
        begin = number * own.steps / splits * 2;
        count = mine ? (number + 1) * own.steps / splits * 2 - begin : 0;
    }
};

struct Place {  // how far somebody is
    int weights = 0, rows = 0;
};

// CELLS_EACH cells for each 64 of the depth: TILES tiles, or parts of one.
template <int CELLS_EACH, int TILES>
__device__ inline void ask_weights(Shared& s, Place& at, const Product& own, int unit, Part part) {
    for (int number = part.begin; number < part.begin + part.count; number++)
#pragma unroll
        for (int cell = 0; cell < CELLS_EACH; cell++, at.weights++) {
            int slot = at.weights % CELLS;
            int block = (unit * TILES + (TILES > 1 ? cell : 0)) * own.steps + number / 2;
            int group = TILES > 1 ? 0 : cell * 4, deep = number % 2 * DEEP;
            if (at.weights >= CELLS) await_flag(&s.used[slot], (at.weights / CELLS - 1) % 2);
            expect_bytes(&s.full[slot], CELL_BYTES);
            copy_weights(s.weights[slot], own.weights, deep, group, block, &s.full[slot]);
        }
}

__device__ inline void ask_rows(Shared& s, Place& at, const Product& own, Part part) {
    for (int number = part.begin; number < part.begin + part.count; number++, at.rows++) {
        int slot = at.rows % ROW_SLOTS;
        if (at.rows >= ROW_SLOTS) await_flag(&s.used_rows[slot], (at.rows / ROW_SLOTS - 1) % 2);
        expect_bytes(&s.full_rows[slot], ROW_BYTES);
        copy_rows(s.rows[slot], own.rows, number * DEEP, &s.full_rows[slot]);
    }
}

// While attention runs memory has little to do: brings the first weights of the next layer to the cache.
__device__ inline void ask_ahead(const Arguments& own, Part part) {
    const char* from = own.ahead + ((long)cluster() * own.output.steps + part.begin / 2) * STEP_BYTES;
    for (int number = 0; number < min(AHEAD, part.count / 2); number++)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from + number * STEP_BYTES),
                     "n"(STEP_BYTES) : "memory");
}

// EACH tiles of this group, of the CELLS_EACH cells that there are for each 64 of the depth.
template <int EACH, int CELLS_EACH>
__device__ inline void multiply_all(Shared& s, Place& at, float (&sums)[EACH][ROWS / 2], Part part, int group) {
    int first = at.weights + group * EACH;
    auto leave = [&](int number) {  // what was multiplied
        if (threadIdx.x % 128 || number < 0) return;
#pragma unroll
        for (int tile = 0; tile < EACH; tile++)
            raise_flag(&s.used[(first + number * CELLS_EACH + tile) % CELLS]);
        raise_flag(&s.used_rows[(at.rows + number) % ROW_SLOTS]);
    };
#pragma unroll 1
    for (int number = 0; number < part.count; number++) {
        int rows = at.rows + number;
        u64 left[EACH], right = described(s.rows[rows % ROW_SLOTS]);
#pragma unroll
        for (int tile = 0; tile < EACH; tile++) {
            int cell = first + number * CELLS_EACH + tile;
            left[tile] = described(s.weights[cell % CELLS]);
            await_flag(&s.full[cell % CELLS], cell / CELLS % 2);
        }
        await_flag(&s.full_rows[rows % ROW_SLOTS], rows / ROW_SLOTS % 2);
        begin_multiplying();
#pragma unroll
        for (int k = 0; k < DEEP / 16; k++)
#pragma unroll
            for (int tile = 0; tile < EACH; tile++)
                multiply(sums[tile], left[tile] + k * 2, right + k * 2, number + k);
        end_multiplying();
        await_multiplying<1>();
        leave(number - 1);
    }
    await_multiplying<0>();
    leave(part.count - 1);
    at.weights += part.count * CELLS_EACH, at.rows += part.count;
}

// What the second group does while the first multiplies alone: rows are not left before both have done so.
__device__ inline void pass_rows(Shared& s, Place& at, Part part) {
    for (int number = 0; number < part.count; number++, at.rows++) {
        await_flag(&s.full_rows[at.rows % ROW_SLOTS], at.rows / ROW_SLOTS % 2);
        if (threadIdx.x % 128 == 0) raise_flag(&s.used_rows[at.rows % ROW_SLOTS]);
    }
    at.weights += part.count;
}
