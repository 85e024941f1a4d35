// The weight pipeline of fused_layer.cu and logits.cu: persistent, warp-specialized kernels on every multiprocessor.
//
// Weights stream by TMA through a ring of shared memory (pipeline stages), whatever product they belong to: while
// programs wait for each other's results, the weights of the next product are loaded. A cluster is two programs, one
// for each split of a tile (split-K). Two warpgroups multiply (WGMMA), one thread loads weights and one loads rows.
//
// The files are concatenated in the order instructions, pipeline, pipeline_epilogues, and fused_layer or logits.
// weight_pipeline.py defines before them ROWS, CELLS (stages of weights), ROW_SLOTS (stages of rows), and `multiply`
// for this many rows.
//
// This file: the ring.

constexpr int MMA_THREADS = 256, NORM_THREADS = 64;  // threads that multiply, and that compute norm factors
constexpr int WEIGHT_LOADER = MMA_THREADS, ROW_LOADER = MMA_THREADS + 32, FIRST_NORM_THREAD = MMA_THREADS + 64;
constexpr int DEEP = 64;  // depth of a cell, of one tile of 64 columns
constexpr int CELL_BYTES = 64 * DEEP * 2, ROW_BYTES = ROWS * DEEP * 2;
constexpr int HALF = ROWS / 2, HALF_SUMS = HALF / 2;  // rows of a program's epilogue, and a thread's sums of them

struct Product {
    Map weights, rows;
    int steps, units;  // of 128 of the depth; programs or clusters with a part of it
};

struct Arguments {  // in the order of fused_layer.py
    Product output, gate_up, down, heads;
    float* hidden;
    const u16 *attention_norm, *feed_norm;  // of the next layer, and of this
    u16* feed_rows;
    float* feed_squares;
    u16 *activated, *attention_rows;
    float* attention_squares;
    u16* query;
    const u16* bias;
    const int *positions, *slot_mapping;
    const float *cosines, *sines;
    u16 *keys, *values;
    u32* ready;  // counters of finished programs per unit of a product; zero between kernels
    float* features;  // a copy of the residual stream, or null
    int width, intermediate, row_count, query_heads, kv_heads;
    int feature_stride;
    int early;  // whether attention may start during the QKV product, not only after it
    float size, eps;
};

struct __align__(1024) Shared {
    char weights[CELLS][CELL_BYTES];
    char rows[ROW_SLOTS][ROW_BYTES];
    float received[2][HALF_SUMS / 4][128][4];  // partial sums of the other program: [group][four][thread]
    u64 full[CELLS], used[CELLS], full_rows[ROW_SLOTS], used_rows[ROW_SLOTS], exchanged, ended[3];  // mbarriers
    float factors[ROWS];
};

__device__ inline void init_mbarriers(Shared& s) {
    for (int slot = 0; slot < CELLS; slot++) init_mbarrier(&s.full[slot], 1), init_mbarrier(&s.used[slot], 1);
    for (int slot = 0; slot < ROW_SLOTS; slot++)
        init_mbarrier(&s.full_rows[slot], 1), init_mbarrier(&s.used_rows[slot], 2);
    init_mbarrier(&s.exchanged, 1);
    for (int product = 0; product < 3; product++) init_mbarrier(&s.ended[product], 1);
    fence_mbarrier_init();
}

// The next kernel's programs start where programs of this kernel have ended.
__device__ inline void launch_dependents_once() {
    if (threadIdx.x == 0) launch_dependents();
}

__device__ inline u16 rounded(float x) { return (u16)pack(x, 0.0f); }
// x / below has the bits of `divide`, without its handling of divisors below 1. Flushing the power of two to zero
// changes nothing: one is added to it.
__device__ inline float silu(float x) {
    float below = __fadd_rn(power_of_two(__fmul_rn(-x, 1.4426950216293335f)), 1.0f);
    if (below > 8.507059173023462e+37f) below = __fmul_rn(below, 0.25f), x = __fmul_rn(x, 0.25f);
    return __fmul_rn(x, inverse(below));
}

__device__ inline int cluster() { return blockIdx.x / 2; }
__device__ inline int split() { return blockIdx.x % 2; }
// QKV heads are assigned from the last program on: those have no share of gate and up.
__device__ inline int qkv_head() { return gridDim.x / 2 - 1 - cluster(); }

// The depth range of a product that a program has, in cells.
struct Part {
    int begin, count;
    __device__ Part(const Product& own, bool mine, bool is_split) {
        int splits = is_split ? 2 : 1, number = is_split ? split() : 0;
        begin = number * own.steps / splits * 2;
        count = mine ? (number + 1) * own.steps / splits * 2 - begin : 0;
    }
};

struct RingPosition {  // a thread's position: cell of weights, slot of rows, and mbarrier phases
    int cell = 0, cell_turn = 0, slot = 0, slot_turn = 0;
    __device__ void next_cells(int count) {
        if ((cell += count) >= CELLS) cell -= CELLS, cell_turn ^= 1;
    }
    __device__ void next_slot() {
        if (++slot == ROW_SLOTS) slot = 0, slot_turn ^= 1;
    }
};

// CELLS_EACH cells for each 64 of the depth: TILES tiles, or parts of one.
template <int CELLS_EACH, int TILES>
__device__ inline void load_weights(Shared& s, RingPosition& at, const Product& own, int unit, Part part) {
    for (int number = part.begin; number < part.begin + part.count; number++)
#pragma unroll
        for (int cell = 0; cell < CELLS_EACH; cell++, at.next_cells(1)) {
            int block = (unit * TILES + (TILES > 1 ? cell : 0)) * own.steps + number / 2;
            int group = TILES > 1 ? 0 : cell * 4, deep = number % 2 * DEEP;
            wait_mbarrier(&s.used[at.cell], at.cell_turn ^ 1);  // new mbarriers count as released
            expect_bytes(&s.full[at.cell], CELL_BYTES);
            copy_weights(s.weights[at.cell], own.weights, deep, group, block, &s.full[at.cell]);
        }
}

// Readiness of a product's units: each counts up to `all` when its rows, of `slots` row stages, are written.
struct ReadyCounters {
    u32* units;
    int count, all, slots;
    // Waits for this unit; returns how many from it on are ready. Their writes are visible. Called by a warp.
    __device__ int await(int unit) const {
        for (int tries = 0;; tries++) {
            u32 seen = all;
            if (unit + threadIdx.x % 32 < count)
                seen = load_acquire(units + unit + threadIdx.x % 32);
            u32 missing = __ballot_sync(~0u, seen < all);
            __syncwarp();
            if (!(missing & 1)) return missing ? __ffs(missing) - 1 : 32;
            if (tries == 1 << 22) __trap();  // after seconds: an error is better than a hang
        }
    }
    __device__ void await_all() const {
        for (int unit = 0; unit < count;) unit += await(unit);
    }
};

// A warp loads rows as soon as the units that write them are ready; its first thread issues the copies.
__device__ inline void load_rows(Shared& s, RingPosition& at, const Product& own, Part part,
                                 const ReadyCounters& ready) {
    int end = part.begin + part.count;
    for (int number = part.begin, until = end; number < end; number = until) {
        if (ready.count) {
            int unit = number / ready.slots;
            until = min((unit + ready.await(unit)) * ready.slots, end);
            fence_async_global();  // rows are loaded by TMA
        }
        if (threadIdx.x % 32) continue;
        for (; number < until; number++, at.next_slot()) {
            wait_mbarrier(&s.used_rows[at.slot], at.slot_turn ^ 1);
            expect_bytes(&s.full_rows[at.slot], ROW_BYTES);
            copy_rows(s.rows[at.slot], own.rows, number * DEEP, &s.full_rows[at.slot]);
        }
    }
}

// EACH tiles of this warpgroup, of the CELLS_EACH cells per 64 of the depth.
template <int EACH, int CELLS_EACH>
__device__ inline void multiply_stages(Shared& s, RingPosition& at, float (&sums)[EACH][ROWS / 2], Part part,
                                       int group) {
    int last_cells[EACH], last_slot;
    auto release = [&]() {  // the stages that were multiplied
        if (threadIdx.x % 128) return;
#pragma unroll
        for (int tile = 0; tile < EACH; tile++) arrive_mbarrier(&s.used[last_cells[tile]]);
        arrive_mbarrier(&s.used_rows[last_slot]);
    };
#pragma unroll 1
    for (int number = 0; number < part.count; number++) {
        u64 left[EACH], right = smem_descriptor(s.rows[at.slot]);
        int cells[EACH];
#pragma unroll
        for (int tile = 0; tile < EACH; tile++) {
            RingPosition own = at;
            own.next_cells(group * EACH + tile);
            cells[tile] = own.cell, left[tile] = smem_descriptor(s.weights[own.cell]);
            wait_mbarrier(&s.full[own.cell], own.cell_turn);
        }
        wait_mbarrier(&s.full_rows[at.slot], at.slot_turn);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < DEEP / 16; k++)
#pragma unroll
            for (int tile = 0; tile < EACH; tile++)
                multiply(sums[tile], left[tile] + k * 2, right + k * 2, number + k);
        wgmma_commit();
        wgmma_wait<1>();
        if (number > 0) release();
#pragma unroll
        for (int tile = 0; tile < EACH; tile++) last_cells[tile] = cells[tile];
        last_slot = at.slot;
        at.next_slot(), at.next_cells(CELLS_EACH);
    }
    wgmma_wait<0>();
    release();
}

// What the second warpgroup does while the first multiplies alone: a stage of rows is released by both. Only the thread
// that releases it waits for it: nothing would keep the others from falling behind, and an mbarrier that has completed
// two phases meanwhile looks as if it had completed none.
__device__ inline void skip_rows(Shared& s, RingPosition& at, Part part) {
    for (int number = 0; number < part.count; number++, at.next_slot(), at.next_cells(1))
        if (threadIdx.x % 128 == 0)
            wait_mbarrier(&s.full_rows[at.slot], at.slot_turn), arrive_mbarrier(&s.used_rows[at.slot]);
}
