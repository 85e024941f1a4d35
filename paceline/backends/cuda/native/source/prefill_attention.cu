// Attention of prefill chunks on Hopper: the bits of ../../kernels/attention/prefill_attention.py. A program has a tile of 64 lanes,
// rows of a request times the query heads of a KV head, and reads all blocks of 64 positions that they see. A warp
// loads keys and values by TMA, and a warpgroup computes scores, softmax and weighted values (WGMMA). Two programs
// share a multiprocessor, so that one's softmax runs beside the other's products.
//
// Blocks are merged into their KV chunk in registers, KV chunks into their group in shared memory, groups in memory.
//
// The files are concatenated in the order instructions, activations, softmax, prefill_attention. prefill_attention.py
// defines before them HEADS, KV_HEADS, PAGE, STAGES, SCALE_BITS, and `multiply` and `multiply_weights` for 64 columns.

constexpr int DIM = 128, PARTS = DIM / 64, BLOCK = 64, LANES = 64;
constexpr int MERGE_FAN_IN = 8, BLOCKS_OF_GROUP = MERGE_FAN_IN * MERGE_FAN_IN;
constexpr int GROUP = HEADS / KV_HEADS, WIDE = GROUP <= 1 ? 1 : GROUP <= 2 ? 2 : GROUP <= 4 ? 4 : GROUP <= 8 ? 8 : 16;
constexpr int MMA_THREADS = 128, THREADS = MMA_THREADS + 32;
constexpr int LINES = PAGE < BLOCK ? PAGE : BLOCK, COPIES = BLOCK / LINES;  // lines of a TMA copy; copies of a block
constexpr int PART_BYTES = BLOCK * 128, BLOCK_BYTES = PARTS * PART_BYTES;

struct Arguments {  // in the order of prefill_attention.py
    Map keys, values;
    const u16* query;
    u16* output;
    const int *positions, *tile_rows, *tile_counts, *tile_pages, *pages;
    float* partial_acc;  // a line for each row and head
    int stride, earliest;
};

struct __align__(1024) Shared {
    char keys[STAGES][BLOCK_BYTES], values[STAGES][BLOCK_BYTES], query[BLOCK_BYTES];
    float4 group_acc[DIM / 8][MMA_THREADS];  // of each thread
    u64 keys_there[STAGES], values_there[STAGES], keys_used[STAGES], values_used[STAGES];  // mbarriers
};

__device__ inline void sync() { sync_named_barrier<1, MMA_THREADS>(); }

struct Tile {
    int head, first, count, newest, oldest, blocks;
    const int* pages;
    __device__ Tile(const Arguments& a) {
        int number = gridDim.y - 1 - blockIdx.y;  // the last tiles of a request see most: they start first
        head = blockIdx.x, first = a.tile_rows[number], count = a.tile_counts[number];
        pages = a.pages + a.tile_pages[number];
        oldest = a.positions[first], newest = a.positions[first + max(count, 1) - 1];  // in order
        blocks = newest / BLOCK + 1;
    }
    // The line of a lane among those of all rows and heads, -1 if the lane is unused.
    __device__ int line_of(int lane) const {
        int row = lane / WIDE, own = lane % WIDE;
        return row < count && own < GROUP ? (first + row) * HEADS + head * GROUP + own : -1;
    }
};

// Called by a warp, whose threads hold the pages of the next blocks.
__device__ inline void load_blocks(Shared& s, const Arguments& a, const Tile& tile) {
    constexpr int ahead = 32 / COPIES;  // blocks
    int slot = 0;
#pragma unroll 1
    for (int block = 0; block < tile.blocks; block++) {
        int stage = block % STAGES, turn = block / STAGES % 2;
        if (block % ahead == 0) {
            int index = (block * COPIES + threadIdx.x % 32) * LINES;
            slot = index <= tile.newest ? tile.pages[index / PAGE] * PAGE + index % PAGE : 0;
        }
        int slots[COPIES], seen = min((tile.newest - block * BLOCK) / LINES + 1, COPIES);
#pragma unroll
        for (int i = 0; i < COPIES; i++) slots[i] = __shfl_sync(~0u, slot, block % ahead * COPIES + i);
#pragma unroll
        for (int of_values = 0; of_values < 2; of_values++) {
            u64* there = of_values ? &s.values_there[stage] : &s.keys_there[stage];
            char* to = of_values ? s.values[stage] : s.keys[stage];
            const Map& map = of_values ? a.values : a.keys;
            wait_mbarrier(of_values ? &s.values_used[stage] : &s.keys_used[stage], turn ^ 1);
            if (!is_elected()) continue;
            expect_bytes(there, seen * LINES * DIM * 2);
#pragma unroll
            for (int i = 0; i < COPIES; i++)
                if (i < seen)
#pragma unroll
                    for (int part = 0; part < PARTS; part++)
                        copy_kv_lines(to + part * PART_BYTES + i * LINES * 128, map, part * 64, tile.head, slots[i],
                                      there);
        }
    }
}

// The offset of a 16-byte chunk of a line of 64 lines, in WGMMA's 128-byte swizzle.
__device__ inline u32 swizzled_offset(int line, int chunk) {
    return chunk / 8 * PART_BYTES + line * 128 + (chunk % 8 ^ line % 8) * 16;
}

__device__ inline void load_query(Shared& s, const Arguments& a, const Tile& tile) {
    constexpr int chunks = DIM / 8, each = LANES * chunks / MMA_THREADS;
    uint4 taken[each];
#pragma unroll
    for (int i = 0; i < each; i++) {
        int line = tile.line_of((i * MMA_THREADS + threadIdx.x) / chunks);
        taken[i] = __ldcg((const uint4*)(a.query + (long)max(line, 0) * DIM) + threadIdx.x % chunks);
        if (line < 0) taken[i] = make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < each; i++)
        *(uint4*)(s.query + swizzled_offset((i * MMA_THREADS + threadIdx.x) / chunks, threadIdx.x % chunks)) = taken[i];
    fence_async_shared();
    sync();
}

// Zeroes values of the last block that no row sees: they might be NaN.
__device__ inline void clear_unseen(Shared& s, const Tile& tile, int block) {
    int seen = tile.newest + 1 - block * BLOCK;
    if (seen >= BLOCK) return;
    for (int i = seen * (DIM / 8) + threadIdx.x; i < BLOCK * (DIM / 8); i += MMA_THREADS)
        *(uint4*)(s.values[block % STAGES] + swizzled_offset(i / (DIM / 8), i % (DIM / 8))) = make_uint4(0, 0, 0, 0);
    fence_async_shared();
    sync();
}

typedef SoftmaxOf<2, DIM / 8> Part;  // a thread's: of lanes g and g + 8 of its warp's 16

__device__ inline float quad_sum(float x) {  // in the order of Triton's reduction
    x = __fadd_rn(x, __shfl_xor_sync(~0u, x, 2));
    return __fadd_rn(x, __shfl_xor_sync(~0u, x, 1));
}

// Scores of a block, then their weights, as the left operand of products with values.
struct Scores {
    float numbers[BLOCK / 2];  // of every eight positions, two of the first lane and two of the second
    __device__ void multiply_keys(Shared& s, int block) {
        int stage = block % STAGES;
        wait_mbarrier(&s.keys_there[stage], block / STAGES % 2);
        u64 query = smem_descriptor(s.query), keys = smem_descriptor(s.keys[stage]);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < DIM / 16; k++) {
            int at = k / 4 * (PART_BYTES / 16) + k % 4 * 2;
            multiply(numbers, query + at, keys + at, k);
        }
        wgmma_commit();
        wgmma_wait<0>();
        if (threadIdx.x == 0) arrive_mbarrier(&s.keys_used[stage]);
    }
    // Lanes see positions from `earliest` up to their own.
    __device__ void mask(const int (&positions)[2], int block, int earliest) {
#pragma unroll
        for (int i = 0; i < BLOCK / 2; i++) {
            int column = block * BLOCK + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
            if (column > positions[i / 2 % 2] || column < earliest) numbers[i] = negative_infinity();
        }
    }
    __device__ void compute_weights(float (&highest)[2], float (&total)[2]) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float own = negative_infinity();
#pragma unroll
            for (int i = 0; i < BLOCK / 4; i++) own = fmaxf(own, numbers[i / 2 * 4 + half * 2 + i % 2]);
            own = fmaxf(own, __shfl_xor_sync(~0u, own, 2));
            own = fmaxf(own, __shfl_xor_sync(~0u, own, 1));
            float zero = safe(own), sums[4];
#pragma unroll
            for (int i = 0; i < BLOCK / 4; i++) {
                float& x = numbers[i / 2 * 4 + half * 2 + i % 2];
                x = power_of_two(__fsub_rn(x, zero));
            }
#pragma unroll
            for (int eight = 0; eight < 4; eight++) {  // see sum_of_weights in ../../kernels/attention/softmax.py
                const float *low = &numbers[eight * 4 + half * 2], *high = low + 16;
                sums[eight] = quad_sum(__fadd_rn(__fadd_rn(__fadd_rn(low[0], low[1]), high[0]), high[1]));
            }
            highest[half] = own;
            total[half] = __fadd_rn(__fadd_rn(sums[0], sums[2]), __fadd_rn(sums[1], sums[3]));
        }
    }
    __device__ void left_operand(u32 (&left)[4], int k) const {
#pragma unroll
        for (int i = 0; i < 4; i++) left[i] = pack(numbers[k * 8 + i * 2], numbers[k * 8 + i * 2 + 1]);
    }
};

__device__ inline void multiply_values(Shared& s, const Scores& weights, Part& part, int block) {
    int stage = block % STAGES;
    u64 values = smem_descriptor(s.values[stage]);
    u32 left[BLOCK / 16][4];
    float(&acc)[2][DIM / 4] = *(float(*)[2][DIM / 4])part.acc;
#pragma unroll
    for (int k = 0; k < BLOCK / 16; k++) weights.left_operand(left[k], k);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK / 16; k++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            multiply_weights(acc[half], left[k], values + half * (PART_BYTES / 16) + k * 128, k);
    wgmma_commit();
    wgmma_wait<0>();
    if (threadIdx.x == 0) arrive_mbarrier(&s.values_used[stage]);
}

// What is kept of a group, and of the groups before it; their weighted values are in memory of this thread's own.
struct Kept {
    float highest[2], total[2];
    __device__ void keep(const Part& part) {
#pragma unroll
        for (int i = 0; i < 2; i++) highest[i] = part.highest[i], total[i] = part.total[i];
    }
    // `part` merged into what is kept, whose values `load` reads four at a time.
    template <class Load> __device__ void merge_into(Part& part, const Load& load) const {
        Part before;
#pragma unroll
        for (int i = 0; i < 2; i++) before.highest[i] = highest[i], before.total[i] = total[i];
#pragma unroll
        for (int n = 0; n < DIM / 8; n++) {
            float4 four = load(n);
            before.acc[0][n][0] = four.x, before.acc[0][n][1] = four.y;
            before.acc[0][n][2] = four.z, before.acc[0][n][3] = four.w;
        }
        merge(before, part);
        part = before;
    }
};

__device__ inline float4 four_of(const Part& part, int n) {
    const float(&own)[4] = part.acc[0][n];
    return make_float4(own[0], own[1], own[2], own[3]);
}

// Weighted values of the groups before, in the lines of this thread's lanes.
__device__ inline float* kept_at(const Arguments& a, const Tile& tile, int half, int n) {
    int line = tile.line_of(threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + half * 8);
    return line < 0 ? nullptr : a.partial_acc + (long)line * DIM + n * 8 + threadIdx.x % 4 * 2;
}
__device__ inline float4 load_kept(const Arguments& a, const Tile& tile, int n) {
    const float *one = kept_at(a, tile, 0, n), *two = kept_at(a, tile, 1, n);
    float2 none = make_float2(0, 0), first = one ? *(const float2*)one : none, second = two ? *(const float2*)two : none;
    return make_float4(first.x, first.y, second.x, second.y);
}
__device__ inline void store_kept(const Arguments& a, const Tile& tile, int n, float4 four) {
    float *one = kept_at(a, tile, 0, n), *two = kept_at(a, tile, 1, n);
    if (one) *(float2*)one = make_float2(four.x, four.y);
    if (two) *(float2*)two = make_float2(four.z, four.w);
}

__device__ inline void write_output(const Arguments& a, const Tile& tile, const Part& part) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int line = tile.line_of(threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + half * 8);
        u16* to = a.output + (long)(max(line, 0) / HEADS) * a.stride + max(line, 0) % HEADS * DIM;
#pragma unroll
        for (int four = 0; four < DIM / 32; four++) {
            u32 words[4];
#pragma unroll
            for (int eight = 0; eight < 4; eight++) {
                const float* two = &part.acc[0][four * 4 + eight][half * 2];
                words[eight] = pack(divide(two[0], part.total[half]), divide(two[1], part.total[half]));
            }
            store_eights(to + four * 32, words, line >= 0);
        }
    }
}

__device__ inline void attend(Shared& s, const Arguments& a, const Tile& tile) {
    int lane = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, positions[2];
#pragma unroll
    for (int half = 0; half < 2; half++)
        positions[half] = a.positions[tile.first + min((lane + half * 8) / WIDE, tile.count - 1)];
    Part chunk;
    Kept group = {}, before = {};  // of the group, and of those before it
    float scale = __int_as_float(SCALE_BITS);
#pragma unroll 1
    for (int block = 0; block < tile.blocks; block++) {
        Part own;
        Scores scores;
        scores.multiply_keys(s, block);
#pragma unroll
        for (int i = 0; i < BLOCK / 2; i++) scores.numbers[i] = __fmul_rn(scores.numbers[i], scale);
        if ((block + 1) * BLOCK > tile.oldest + 1 || block * BLOCK < a.earliest)
            scores.mask(positions, block, a.earliest);
        scores.compute_weights(own.highest, own.total);
        wait_mbarrier(&s.values_there[block % STAGES], block / STAGES % 2);
        clear_unseen(s, tile, block);
        multiply_values(s, scores, own, block);
        merge(chunk, own);
        bool ends = block + 1 == tile.blocks;
        if (block % MERGE_FAN_IN != MERGE_FAN_IN - 1 && !ends) continue;
        if (block / MERGE_FAN_IN % MERGE_FAN_IN)
            group.merge_into(chunk, [&](int n) { return s.group_acc[n][threadIdx.x]; });
        bool ends_group = block % BLOCKS_OF_GROUP == BLOCKS_OF_GROUP - 1;
        if ((ends || ends_group) && block >= BLOCKS_OF_GROUP)
            before.merge_into(chunk, [&](int n) { return load_kept(a, tile, n); });
        if (ends) break;
        (ends_group ? before : group).keep(chunk);
#pragma unroll
        for (int n = 0; n < DIM / 8; n++)
            if (ends_group) store_kept(a, tile, n, four_of(chunk, n));
            else s.group_acc[n][threadIdx.x] = four_of(chunk, n);
        chunk = Part();
    }
    write_output(a, tile, chunk);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) prefill_attention(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) char raw[];
    Shared& s = *(Shared*)raw;
    launch_dependents();
    wait_dependencies();
    Tile tile(a);
    if (tile.count == 0) return;  // padding
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            init_mbarrier(&s.keys_there[i], 1), init_mbarrier(&s.values_there[i], 1);
            init_mbarrier(&s.keys_used[i], 1), init_mbarrier(&s.values_used[i], 1);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x >= MMA_THREADS) load_blocks(s, a, tile);
    else load_query(s, a, tile), attend(s, a, tile);
}
