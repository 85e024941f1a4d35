// The weight pipeline of fused_layer.cu and logits.cu: persistent, warp-specialized kernels on every multiprocessor.
//
// Weights stream by TMA through a ring of shared memory (pipeline stages), whatever product they belong to: while
// programs wait for each other's results, the weights of the next product are loaded. A cluster is two programs, one
// for each split of a tile (split-K). Two warpgroups multiply (WGMMA), one warp loads weights and one loads rows.
//
// The files are concatenated in the order instructions, activations, pipeline, pipeline_products, pipeline_epilogues,
// and fused_layer or logits.
// weight_pipeline.py defines before them ROWS, CELLS (stages of weights), ROW_SLOTS (stages of rows), E4M3 (whether
// weights and rows are e4m3, not bfloat16), INT4 (whether weights have 4 bits), LOADED (rows
// that are loaded, if not all), and `multiply` for this many rows.
//
// This file: the ring.

constexpr int MMA_THREADS = 256, NORM_THREADS = 64;  // threads that multiply, and that compute norm factors
constexpr int WEIGHT_LOADER = MMA_THREADS, ROW_LOADER = MMA_THREADS + 32, FIRST_NORM_THREAD = MMA_THREADS + 64;
// A cell has 128 bytes of each of 64 columns, a slot of rows the same depth of each row: ROW_LINES lines of 128 bytes.
// TMA sees both as 2-byte numbers. A step is that of the layout of weights: a cell, or two (bfloat16).
constexpr int LINE = 64, ROW_LINES = INT4 ? 4 : 1, CELL_BYTES = 64 * 128, ROW_BYTES = ROWS * 128 * ROW_LINES;
constexpr int STEP = INT4 ? 256 : 128, CELL_DEPTH = INT4 ? 256 : E4M3 ? 128 : 64;
constexpr int ROW_SCALE_BYTES = E4M3 ? ROWS * 8 : 0;  // of a slot of rows: two groups of 64
constexpr int SCALE_BYTES = INT4 ? 64 * 16 : 0;  // of a cell: eight groups of 32
constexpr bool PACKED = E4M3 || INT4;
constexpr int RELEASES = PACKED ? 4 : 1;  // arrivals that release a stage, of a warpgroup: of its warps, which read scales, or of WGMMA's end
constexpr int HALF = ROWS / 2, HALF_SUMS = HALF / 2;  // rows of a program's epilogue, and a thread's sums of them

struct Product {
    Map weights, rows;
    int steps, units, splits;  // of the depth; programs or clusters with a part of it
    int is_shared;  // whether each warpgroup has half of a program's splits, not the first all of them
    // e4m3: of columns, and of every 64 numbers of rows: [16 rows][group][row]. 4 bits: [block][4 pairs][column].
    const float *scales, *row_scales;
};

struct Fp8Rows {  // rows in e4m3, null otherwise
    unsigned char* rows;
    float* scales;
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
    Fp8Rows feed_fp8, activated_fp8, attention_fp8;
    int width, intermediate, row_count, query_heads, kv_heads;
    int feature_stride;
    int early;  // whether attention may start during the QKV product, not only after it
    float size, eps;
};

struct __align__(1024) Shared {
    char weights[CELLS][CELL_BYTES];
    char rows[ROW_SLOTS][ROW_BYTES];
    float row_scales[E4M3 ? ROW_SLOTS : 1][ROWS / 16][2][16];  // of two groups
    u32 weight_scales[INT4 ? CELLS : 1][4][64];  // of two groups each, in float16
    float received[2][HALF_SUMS / 4][128][4];  // partial sums of the other program: [group][four][thread]
    u64 full[CELLS], used[CELLS], full_rows[ROW_SLOTS], used_rows[ROW_SLOTS], exchanged, ended[3];  // mbarriers
    float factors[ROWS];
};

__device__ inline void init_mbarriers(Shared& s) {
    for (int slot = 0; slot < CELLS; slot++)
        init_mbarrier(&s.full[slot], 1), init_mbarrier(&s.used[slot], RELEASES);
    for (int slot = 0; slot < ROW_SLOTS; slot++)
        init_mbarrier(&s.full_rows[slot], 1), init_mbarrier(&s.used_rows[slot], 2 * RELEASES);
    init_mbarrier(&s.exchanged, 1);
    for (int product = 0; product < 3; product++) init_mbarrier(&s.ended[product], 1);
    fence_mbarrier_init();
}

// Barrier of the multiplying threads.
__device__ inline void sync() { sync_named_barrier<1, MMA_THREADS>(); }

// The next kernel's programs start where programs of this kernel have ended.
__device__ inline void launch_dependents_once() {
    if (threadIdx.x == 0) launch_dependents();
}

// The number of this warp, which the compiler sees to be the same in all its threads.
__device__ inline int warp_number() { return __shfl_sync(~0u, threadIdx.x / 32, 0); }
__device__ inline int cluster() { return blockIdx.x / 2; }
__device__ inline int split() { return blockIdx.x % 2; }
// QKV heads are assigned from the last program on: those have no share of gate and up.
__device__ inline int qkv_head() { return gridDim.x / 2 - 1 - cluster(); }

// A depth range of a product, in cells: that of a program, half of the splits, or of one of them.
struct Part {
    int begin, count;
    bool is_shared;
    __device__ Part(const Product& own, int first, int end)
        : begin(first * own.steps / own.splits * STEP / CELL_DEPTH),
          count(end * own.steps / own.splits * STEP / CELL_DEPTH - begin), is_shared(PACKED && own.is_shared) {}
    __device__ Part(const Product& own, bool mine, bool is_split)
        : Part(own, is_split ? split() * own.splits / 2 : 0, is_split ? (split() + 1) * own.splits / 2 : own.splits) {
        if (!mine) count = 0;
    }
    // The i-th cell that is loaded: of each warpgroup in turn, if they share the product.
    __device__ int cell(int i) const { return begin + (is_shared ? i / 2 + i % 2 * (count / 2) : i); }
};

struct RingPosition {  // a thread's position: cell of weights, slot of rows, and mbarrier phases
    int cell = 0, cell_turn = 0, slot = 0, slot_turn = 0;
    __device__ void next_cells(int count) {
        if ((cell += count) >= CELLS) cell -= CELLS, cell_turn ^= 1;
    }
    __device__ void next_slots(int count) {
        if ((slot += count) >= ROW_SLOTS) slot -= ROW_SLOTS, slot_turn ^= 1;
    }
};

// The scales of a cell, one of PARTS parts of a tile: [4 pairs of groups][64 columns], two halves of the tile.
template <int PARTS>
__device__ inline void load_scales(Shared& s, int cell, const Product& own, int block, int part) {
    const float* from = own.scales + (block * PARTS * 8 + part) * 32;
    if constexpr (PARTS == 1) copy_bytes(s.weight_scales[cell], from, SCALE_BYTES, &s.full[cell]);
    else
#pragma unroll
        for (int i = 0; i < 8; i++)
            copy_bytes(&s.weight_scales[cell][i / 2][i % 2 * 32], from + i * 64, 128, &s.full[cell]);
}

// Called by a warp: CELLS_EACH cells for each CELL_DEPTH of the depth, of TILES tiles, or of parts of tiles.
template <int CELLS_EACH, int TILES>
__device__ inline void load_weights(Shared& s, RingPosition& at, const Product& own, int unit, Part part) {
    for (int i = 0; i < part.count; i++)
#pragma unroll
        for (int cell = 0; cell < CELLS_EACH; cell++, at.next_cells(1)) {
            constexpr int parts = CELLS_EACH / TILES;
            int number = part.cell(i);
            int block = (unit * TILES + cell / parts) * own.steps + number * CELL_DEPTH / STEP;
            int group = cell % parts * 4, deep = number * CELL_DEPTH % STEP;
            wait_mbarrier(&s.used[at.cell], at.cell_turn ^ 1);  // new mbarriers count as released
            if (!is_elected()) continue;
            expect_bytes(&s.full[at.cell], CELL_BYTES + SCALE_BYTES);
            copy_weights(s.weights[at.cell], own.weights, deep, group, block, &s.full[at.cell]);
            if constexpr (INT4) load_scales<parts>(s, at.cell, own, block, cell % parts);
        }
}

// Readiness of a product's units: each counts up to `all` when its `width` columns of all rows are written.
struct ReadyCounters {
    u32* units;
    int count, all, width;
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
    // Waits for the units of this slot of rows; returns up to which slot all are ready.
    __device__ int await_slot(int number) const {
        int ready = number * CELL_DEPTH / width;
        do ready += await(ready);
        while (ready * width < (number + 1) * CELL_DEPTH);
        return ready * width / CELL_DEPTH;
    }
    __device__ void await_all() const {
        for (int unit = 0; unit < count;) unit += await(unit);
    }
};

// A warp loads rows as soon as the units that write them are ready.
__device__ inline void load_rows(Shared& s, RingPosition& at, const Product& own, Part part,
                                 const ReadyCounters& ready) {
    int until = 0, other_until = 0;  // of this warpgroup's cells, and of the other's, if they share the product
    for (int i = 0; i < part.count; i++, at.next_slots(1)) {
        int number = part.cell(i);
        if (ready.count && number >= until) {
            until = ready.await_slot(number);
            fence_async_global();  // rows are loaded by TMA
        }
        if (part.is_shared) {
            int own_until = until;
            until = other_until, other_until = own_until;
        }
        wait_mbarrier(&s.used_rows[at.slot], at.slot_turn ^ 1);
        if (!is_elected()) continue;
        expect_bytes(&s.full_rows[at.slot], LOADED * 128 * ROW_LINES + ROW_SCALE_BYTES);
#pragma unroll
        for (int line = 0; line < ROW_LINES; line++)
            copy_rows(s.rows[at.slot] + line * (ROWS * 128), own.rows, (number * ROW_LINES + line) * LINE,
                      &s.full_rows[at.slot]);
        if constexpr (E4M3)
#pragma unroll
            for (int block = 0; block < ROWS / 16; block++)
                copy_bytes(s.row_scales[at.slot][block], own.row_scales + (block * own.steps + number) * 32, 128,
                           &s.full_rows[at.slot]);
    }
}
