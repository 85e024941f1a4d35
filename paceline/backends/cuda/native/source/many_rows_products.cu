// Products of hundreds of rows, bound by tensor cores, not by memory: gate and up with SwiGLU, products that are
// added to the residual stream, QKV, and logits. Sums have the order of ../../kernels/products/matmul.py, and so have the bits.
//
// A program has ROWS rows and COLUMNS columns (a unit), and takes one unit after the other. One warp loads weights and
// one loads rows by TMA; each of two or three warpgroups multiplies 64 of the rows (WGMMA). Rows are the left operand:
// then both halves of a gated tile, and of a head, are in one thread, and a row is in four. The residual stream, to which
// sums are added, comes through the pipeline, behind a unit's stages.
//
// The files are concatenated in the order instructions, activations, many_rows_products, many_rows_epilogues,
// many_rows.
// many_rows.py defines before them ROWS, COLUMNS, STAGES, KIND (one of those below), PROGRAMS (of a cluster), and
// `multiply` for these columns. Two programs of a cluster have neighbouring rows and the same columns: each loads half
// of the weights for both (TMA multicast). That halves what is read from L2 for them, and with it the energy it takes.
// Units of gate and up with 224 columns have three tiles and half of one, so that fewer multiprocessors are idle.

constexpr int GATE_UP = 0, ADD = 1, HEADS = 2, PROJECT = 3;
constexpr int WARPGROUPS = ROWS / 64, MMA_THREADS = WARPGROUPS * 128;
constexpr int WEIGHT_LOADER = MMA_THREADS / 32, ROW_LOADER = WEIGHT_LOADER + 1;
constexpr int DEPTH = 64, STEP = 128;  // of a stage, and of a step in the layout of weights
constexpr int ROW_BYTES = ROWS * 128, WEIGHT_BYTES = COLUMNS * 128;
constexpr int TILE = 64;  // columns whose squares are summed together
constexpr int TILES = COLUMNS / TILE;  // whole ones
constexpr bool HAS_HALF = COLUMNS % TILE;  // two neighbouring units of gate and up have halves of a tile between them
constexpr int SLAB = 32, SLABS = KIND == ADD ? COLUMNS / SLAB : 0;  // columns of the residual stream in a stage

struct Arguments {  // in the order of many_rows.py
    Map weights, rows;
    Map other;  // the residual stream as pairs of bfloat16, or the weights in halves of tiles
    float* partial;  // sums of splits: [four][thread][4] of each program, or of each unit and split
    u32* counters;  // of finished splits per unit, zero between kernels
    const float* squares;  // of the rows, by tile; and of the residual stream, where they are written
    float* written_squares;
    u16* output;  // activated, or normed rows, or queries
    float* hidden;  // the residual stream, or logits
    const u16 *norm, *bias, *query_norm, *key_norm;  // the last two: of heads, or null
    const int *positions, *slot_mapping;
    const float *cosines, *sines;
    u16 *keys, *values;
    int steps, splits, tile_columns, row_tiles, column_groups;
    int is_parallel;  // whether each split is a unit of its own
    int width, groups, row_count;  // `width`: of a line of the output
    int query_heads, kv_heads, columns;  // `columns`: of logits, without padding
    int row_limit;  // of the residual stream and its norm: the last tile may have more rows than buffers
    float size, eps, head_eps;
};

struct __align__(1024) Shared {
    char weights[STAGES][WEIGHT_BYTES];
    char rows[STAGES][ROW_BYTES];
    u64 full[STAGES], used[STAGES];  // mbarriers
    u32 arrived;
};

__device__ inline int rank() { return blockIdx.x % PROGRAMS; }
// Barrier of the multiplying threads.
__device__ inline void sync() { sync_named_barrier<1, MMA_THREADS>(); }

struct Unit {
    int row_tile, group, begin, end;  // of columns, and its splits
    __device__ Unit(const Arguments& own, int number) {
        int tiles = own.row_tiles / PROGRAMS;
        row_tile = number % tiles * PROGRAMS + rank(), group = number / tiles % own.column_groups;
        begin = number / tiles / own.column_groups, end = own.is_parallel ? begin + 1 : own.splits;
    }
    // Of a cluster, which takes every `step`-th, from `first` on.
    __device__ static int count(const Arguments& own) {
        return own.row_tiles / PROGRAMS * own.column_groups * (own.is_parallel ? own.splits : 1);
    }
    __device__ static int first() { return blockIdx.x / PROGRAMS; }
    __device__ static int step() { return gridDim.x / PROGRAMS; }
    __device__ int number(const Arguments& own) const { return group * own.row_tiles + row_tile; }
    // The first whole tile; and the tile that two units halve, and which half is this one's.
    __device__ int first_tile() const { return HAS_HALF ? half_tile() + (half() ? 1 : -TILES) : group * TILES; }
    __device__ int half_tile() const { return group / 2 * (2 * TILES + 1) + TILES; }
    __device__ int half() const { return group % 2; }
};

// The stages of a product before a split.
__device__ inline int stages_before(const Arguments& own, int split) {
    return split * own.steps / own.splits * (STEP / DEPTH);
}

struct RingPosition {
    int stage = 0, turn = 0;
    __device__ void next() {
        if (++stage == STAGES) stage = 0, turn ^= 1;
    }
};

// The weights of a stage of whole tiles and a half: the programs of a cluster take them in turn.
__device__ inline void load_tiles_and_half(Shared& s, const Arguments& own, const Unit& unit, int number, int stage) {
    u64* full = &s.full[stage];
    int deep = number * DEPTH % STEP, step = number * DEPTH / STEP;
#pragma unroll
    for (int i = 0; i <= TILES; i++) {
        if (i % PROGRAMS != rank()) continue;
        char* to = s.weights[stage] + i * TILE * 128;
        int tile = unit.first_tile() + i, block = unit.half_tile() * own.steps + step;
        if constexpr (PROGRAMS == 2) {
            if (i < TILES) copy_tile_box_to_both(to, own.weights, deep, step, tile, full);
            else copy_half_tile_to_both(to, own.other, deep, unit.half(), block, full);
        } else if (i < TILES) copy_tile_box(to, own.weights, deep, step, tile, full);
        else copy_half_tile(to, own.other, deep, unit.half(), block, full);
    }
}

__device__ inline void load_weights(Shared& s, const Arguments& own, const Unit& unit, int number, int stage) {
    constexpr int share = COLUMNS / PROGRAMS;
    int deep = number * DEPTH % STEP, step = number * DEPTH / STEP;
    int tile = (unit.group * COLUMNS + rank() * share) / own.tile_columns;
    char* to = s.weights[stage] + rank() * share * 128;
    if constexpr (PROGRAMS == 2) copy_tile_box_to_both(to, own.weights, deep, step, tile, &s.full[stage]);
    else copy_tile_box(to, own.weights, deep, step, tile, &s.full[stage]);
}

// Called by a warp.
__device__ inline void load_stage(Shared& s, const Arguments& own, const Unit& unit, int number, int stage,
                                  bool of_rows) {
    expect_bytes(&s.full[stage], of_rows ? ROW_BYTES : WEIGHT_BYTES);
    if (of_rows) copy_row_box(s.rows[stage], own.rows, number * DEPTH, unit.row_tile * ROWS, &s.full[stage]);
    else if constexpr (HAS_HALF) load_tiles_and_half(s, own, unit, number, stage);
    else load_weights(s, own, unit, number, stage);
}

__device__ inline void load_slab(Shared& s, const Arguments& own, const Unit& unit, int slab, int stage, bool of_rows) {
    u64* full = &s.full[stage];
    if (!of_rows) return arrive_mbarrier(full);
    expect_bytes(full, ROW_BYTES);
    copy_row_box(s.rows[stage], own.other, (unit.group * COLUMNS + slab * SLAB) * 2, unit.row_tile * ROWS, full);
}

__device__ inline void load_stages(Shared& s, const Arguments& own, bool of_rows) {
    RingPosition at;
    for (int number = Unit::first(); number < Unit::count(own); number += Unit::step()) {
        Unit unit(own, number);
        int end = stages_before(own, unit.end);
#pragma unroll 1
        for (int i = stages_before(own, unit.begin); i < end + SLABS; i++, at.next()) {
            wait_mbarrier(&s.used[at.stage], at.turn ^ 1);  // new mbarriers count as released
            if (!is_elected()) continue;
            if (SLABS && i >= end) load_slab(s, own, unit, i - end, at.stage, of_rows);
            else load_stage(s, own, unit, i, at.stage, of_rows);
        }
    }
}

// Both programs load into a stage, so both wait for its release.
__device__ inline void release(Shared& s, int stage) {
    if (threadIdx.x % 128) return;
    if constexpr (PROGRAMS == 1) arrive_mbarrier(&s.used[stage]);
    else
#pragma unroll
        for (int program = 0; program < PROGRAMS; program++) arrive_at(cluster_address(&s.used[stage], program));
}

// A thread's sums: of every eight columns two of its first row, and two of its second, eight rows further.
typedef float Sums[COLUMNS / 2];

// The products of a stage; they may end later.
__device__ inline void multiply_stage(Shared& s, const RingPosition& at, Sums& sums, bool is_first) {
    wait_mbarrier(&s.full[at.stage], at.turn);
    u64 left = smem_descriptor(s.rows[at.stage] + threadIdx.x / 128 * (64 * 128));
    u64 right = smem_descriptor(s.weights[at.stage]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) multiply(sums, left + k * 2, right + k * 2, !is_first || k);
    wgmma_commit();
}

// The first stage is apart: the compiler serializes products whose sums may have been written otherwise. `meanwhile` runs
// beside it.
template <class Work>
__device__ inline void multiply_split(Shared& s, RingPosition& at, Sums& sums, int count, const Work& meanwhile) {
    multiply_stage(s, at, sums, true);
    meanwhile();
    int last = at.stage;
    at.next();
#pragma unroll 1
    for (int number = 1; number < count; number++, at.next()) {
        multiply_stage(s, at, sums, false);
        wgmma_wait<1>();
        release(s, last);
        last = at.stage;
    }
    wgmma_wait<0>();
    release(s, last);
}

__device__ inline float4* partial_at(const Arguments& own, const Unit& unit, int split) {
    long number = own.is_parallel ? (long)unit.number(own) * own.splits + split : blockIdx.x;
    return (float4*)own.partial + number * (ROWS * COLUMNS / 4) + threadIdx.x;
}
__device__ inline void store_partial(float4* to, const Sums& sums) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i += 4)
        __stcg(to + i / 4 * MMA_THREADS, make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]));
}
__device__ inline void add_partial(const float4* from, Sums& sums) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i += 4) {
        float4 other = __ldcg(from + i / 4 * MMA_THREADS);
        sums[i] = __fadd_rn(sums[i], other.x), sums[i + 1] = __fadd_rn(sums[i + 1], other.y);
        sums[i + 2] = __fadd_rn(sums[i + 2], other.z), sums[i + 3] = __fadd_rn(sums[i + 3], other.w);
    }
}

__device__ inline int stages_of(const Arguments& own, int split) {
    return stages_before(own, split + 1) - stages_before(own, split);
}

// A unit's splits, added up in order. With 256 columns registers hold one split: the sum waits in memory.
template <class Work>
__device__ inline void multiply_splits(Shared& s, RingPosition& at, const Arguments& own, const Unit& unit,
                                       Sums& sums, const Work& meanwhile) {
    auto nothing = []() {};
    multiply_split(s, at, sums, stages_of(own, unit.begin), meanwhile);
#pragma unroll 1
    for (int split = unit.begin + 1; split < unit.end; split++) {
        if constexpr (COLUMNS > 128) {
            store_partial(partial_at(own, unit, unit.begin), sums);
            multiply_split(s, at, sums, stages_of(own, split), nothing);
            add_partial(partial_at(own, unit, unit.begin), sums);
        } else {
            Sums more;
            multiply_split(s, at, more, stages_of(own, split), nothing);
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; i++) sums[i] = __fadd_rn(sums[i], more[i]);
        }
    }
}

// Of two splits in programs of their own: true, with the sum of both, in the one that ends last.
__device__ inline bool is_last_split(Shared& s, const Arguments& own, const Unit& unit, Sums& sums) {
    store_partial(partial_at(own, unit, unit.begin), sums);
    sync();
    if (threadIdx.x == 0) {
        u32* counter = own.counters + unit.number(own);
        s.arrived = add_acq_rel(counter);
        if (s.arrived) *counter = 0;
    }
    sync();
    if (!s.arrived) return false;
    add_partial(partial_at(own, unit, 1 - unit.begin), sums);  // the sum of two does not depend on the order
    return true;
}
