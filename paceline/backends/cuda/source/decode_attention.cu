// Decode attention for uniform batches on Hopper: the bits of ../kernels/attention.py, which takes any rows. A program
// has one or two tiles of rows of a request, whose lanes share a KV head, and blocks of 64 positions. Keys and values
// of earlier steps are loaded into shared memory before the previous kernels have ended.
//
// It is warp-specialized and pipelined, as FlashAttention-3 is: one warpgroup computes the scores of a block (QK) while
// two compute the softmax of the block before, and one for each 64 columns accumulates the values of the one before
// that (PV). Keys and values are the 64-row operand of products, lanes the other.
//
// Keys are loaded in windows of 64 KV indices, one per block of positions. In a tree block a row's positions may be at
// other KV indices, of the block's window or the next: each row picks its scores and values from both.
//
// Partial results of KV chunks (8 blocks) are merged by the last program to arrive, if there are several. The first
// ones may come from the shared-prefix kernel.
//
// The files are concatenated in the order instructions, softmax, decode_attention. decode_attention.py defines before
// them HEADS, KV_HEADS, DIM, PAGE, HEIGHT (rows of a tile), TILES_PER_PROGRAM, STAGES (pipeline stages: windows),
// HAS_TREES, SCALE_BITS, SHARED_BYTES, and `multiply` and `multiply_transposed` for these lanes.

constexpr int BLOCK = 64, MERGE_FAN_IN = 8, MAX_PATH = 64;
enum { QK, SOFTMAX, PV };
constexpr int WARPGROUP = 128, FIRST_SOFTMAX_THREAD = WARPGROUP, FIRST_PV_THREAD = 3 * WARPGROUP;
constexpr int PARTS = DIM / 64;  // of a line: WGMMA takes 64 numbers, 128 bytes, of a line
constexpr int THREADS = FIRST_PV_THREAD + PARTS * WARPGROUP;
constexpr int GROUP = HEADS / KV_HEADS, WIDE = 16 / HEIGHT;  // query heads per KV head, and their lanes
constexpr int LANES = 16 * TILES_PER_PROGRAM, MAX_ROWS = HEIGHT * TILES_PER_PROGRAM;
constexpr int COLUMNS = HAS_TREES ? 2 * BLOCK : BLOCK;  // scores of a lane
constexpr int CHUNKS = DIM / 8;  // of 16 bytes
constexpr int LINES = PAGE < BLOCK ? PAGE : BLOCK, COPIES = BLOCK / LINES;  // lines of a TMA copy; copies of a window
constexpr int FAR = 1 << 30;

// The offset of a 16-byte chunk among LINES lines, in WGMMA's 128-byte swizzle.
template <int LINES> __device__ inline u32 swizzled_offset(int line, int chunk) {
    return (chunk / 8 * LINES + line) * 128 + (chunk % 8 ^ line % 8) * 16;
}

struct Arguments {  // in the order of decode_attention.py
    Map keys, values;
    const u16* query;
    u16* output;
    const int *positions, *contiguous_until, *paths, *tile_counts, *tile_pages, *pages;
    const int* shared_chunks;  // KV chunks of each tile, from the first, whose partials are there; null: none
    float *partial_acc, *partial_stats;  // of the split-KV reduction
    u32* counters;
    int rows_each, tiles_each;  // of a request
    int max_partials, stride;     // of a softmax; of the output
    int earliest;               // the first visible position
    int settled;                // whether the context before a request's rows was written before the step
};

struct Shared {
    u16 keys[STAGES][BLOCK * DIM], values[STAGES][BLOCK * DIM];
    u16 query[LANES * DIM];  // later the output
    u16 weights[2][LANES * BLOCK];
    float scores[2][LANES][COLUMNS + 4];
    float2 rescales[2][LANES];  // factors of what was accumulated before, and of the block
    float row_sums[LANES];       // of the merged softmax
    u64 keys_there[STAGES], values_there[STAGES];  // mbarriers
    // of every other tree block: KV index of each position, relative to its window
    unsigned char picked[2][MAX_ROWS][BLOCK];
    bool last;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "decode_attention.py counts them");

// The work of this program. Every warp computes it: its first threads have a row each.
struct AttentionTile {
    int tile, head, kv_split, kv_splits;
    int first, count;         // rows
    int position, contiguous_until;   // of this thread's row
    int newest, furthest;     // last position, and last KV index
    int tree_begin, fresh;       // first non-contiguous position; first KV index that this pass writes
    int blocks, partials;        // of positions; KV chunks of them
    int shared_chunks;              // of these, from the first: computed by kernels/shared_prefix.py
    int own, windows;         // blocks of this program, and windows that it loads
    const int* pages;
    __device__ AttentionTile(const Arguments& a) {
        int groups = (a.tiles_each + TILES_PER_PROGRAM - 1) / TILES_PER_PROGRAM, request = blockIdx.x / groups;
        int of_request = blockIdx.x % groups * TILES_PER_PROGRAM, lane = threadIdx.x % 32;
        head = blockIdx.y, kv_split = blockIdx.z, kv_splits = gridDim.z;
        tile = request * a.tiles_each + of_request, first = request * a.rows_each + of_request * HEIGHT;
        int begin = a.tile_pages[tile], root = a.positions[request * a.rows_each];
        count = a.tile_counts[tile];
        if (TILES_PER_PROGRAM > 1 && of_request + 1 < a.tiles_each) count += a.tile_counts[tile + 1];
        bool is_row = lane < MAX_ROWS && of_request * HEIGHT + lane < a.rows_each;
        position = is_row ? a.positions[first + lane] : 0;
        contiguous_until = is_row && HAS_TREES ? a.contiguous_until[first + lane] : FAR;
        bool there = lane < count;
        newest = furthest = __reduce_max_sync(~0u, there ? position : -1);
        tree_begin = FAR;
        if (HAS_TREES) {
            bool diverges = there && contiguous_until <= position;
            tree_begin = __reduce_min_sync(~0u, diverges ? contiguous_until : FAR);
            int index = diverges ? a.paths[(first + lane) * MAX_PATH + position - contiguous_until] : position;
            furthest = __reduce_max_sync(~0u, there ? index : -1);
        }
        fresh = a.settled ? root : FAR;
        pages = a.pages + begin;
        blocks = (newest + BLOCK) / BLOCK;
        partials = (blocks + MERGE_FAN_IN - 1) / MERGE_FAN_IN;
        shared_chunks = a.shared_chunks ? min(a.shared_chunks[tile], partials) : 0;
        int rest = partials - shared_chunks;
        own = (rest / kv_splits + (kv_split < rest % kv_splits)) * MERGE_FAN_IN;  // round-robin
        if (own && (rest - 1) % kv_splits == kv_split) own -= partials * MERGE_FAN_IN - blocks;
        windows = own + (own && is_tree_block(block(own - 1)));
    }
    __device__ int block(int number) const {
        return (shared_chunks + number / MERGE_FAN_IN * kv_splits + kv_split) * MERGE_FAN_IN + number % MERGE_FAN_IN;
    }
    __device__ bool begins_chunk(int number) const { return number % MERGE_FAN_IN == 0; }
    __device__ bool ends_chunk(int number) const { return number + 1 == own || begins_chunk(number + 1); }
    __device__ bool is_tree_block(int block) const { return HAS_TREES && (block + 1) * BLOCK > tree_begin; }
    // The window after a tree block is loaded too, if there is one.
    __device__ int window(int number) const { return number < own ? block(number) : block(own - 1) + 1; }
    __device__ int row_of(int lane) const { return min(lane / WIDE, count - 1); }
    // The line of a lane among those of all rows and heads, -1 if the lane is unused.
    __device__ int line_of(int lane) const {
        int row = lane / WIDE, own = lane % WIDE;
        return row < count && own < GROUP ? (first + row) * HEADS + head * GROUP + own : -1;
    }
    __device__ long partial_index(const Arguments& a, int lane, int part) const {  // its index in memory
        return (long)line_of(lane) * a.max_partials + part;
    }
    __device__ u16* output(const Arguments& a, int lane) const {
        int line = line_of(lane);
        return a.output + (long)(line / HEADS) * a.stride + line % HEADS * DIM;
    }
};

// A TMA copy of lines of a window, of one page: one thread issues it.
struct KvCopy {
    int number, index, kv_slot;  // window, in the order of this program; KV index; -1: not visible
    __device__ void find(const AttentionTile& attn, int own, int copy) {
        number = own, index = attn.window(own) * BLOCK + copy * LINES;
        bool seen = own < attn.windows && index <= attn.furthest;
        kv_slot = seen ? attn.pages[index / PAGE] * PAGE + index % PAGE : -1;
    }
    // The first copy of a window announces its bytes.
    __device__ void announce(Shared& s, const AttentionTile& attn) const {
        if (number >= attn.windows || index % BLOCK) return;
        int lines = max(min(attn.furthest + 1 - index, BLOCK), 0);
        int bytes = (lines + LINES - 1) / LINES * LINES * DIM * 2;
        expect_bytes(&s.keys_there[number % STAGES], bytes), expect_bytes(&s.values_there[number % STAGES], bytes);
    }
    __device__ void load(Shared& s, const Arguments& a, const AttentionTile& attn) const {
        int stage = number % STAGES, first = index % BLOCK * 64;
        if (kv_slot < 0) return;
#pragma unroll
        for (int part = 0; part < PARTS; part++)
            copy_kv_lines(s.keys[stage] + part * BLOCK * 64 + first, a.keys, part * 64, attn.head, kv_slot,
                       &s.keys_there[stage]);
#pragma unroll
        for (int part = 0; part < PARTS; part++)
            copy_kv_lines(s.values[stage] + part * BLOCK * 64 + first, a.values, part * 64, attn.head, kv_slot,
                       &s.values_there[stage]);
    }
};
__device__ inline void await_window(u64 (&flags)[STAGES], int number) {
    wait_mbarrier(&flags[number % STAGES], number / STAGES % 2);
}

__device__ inline void load_query(Shared& s, const Arguments& a, const AttentionTile& attn) {
    constexpr int each = (LANES * CHUNKS + THREADS - 1) / THREADS;
    uint4 taken[each];
#pragma unroll
    for (int i = 0; i < each; i++) {
        int line = attn.line_of((i * THREADS + threadIdx.x) / CHUNKS);
        taken[i] = __ldcg((const uint4*)(a.query + (long)max(line, 0) * DIM) + threadIdx.x % CHUNKS);
        if (line < 0) taken[i] = make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < each; i++) {
        int lane = (i * THREADS + threadIdx.x) / CHUNKS;
        if (lane < LANES) *(uint4*)((char*)s.query + swizzled_offset<LANES>(lane, threadIdx.x % CHUNKS)) = taken[i];
    }
}

// The KV indices of a tree block's positions for each row, relative to the block's window.
__device__ inline void pick(Shared& s, const Arguments& a, const AttentionTile& attn, int number, int block) {
    for (int each = threadIdx.x; each < MAX_ROWS * BLOCK; each += THREADS) {
        int row = each / BLOCK, column = each % BLOCK, at = block * BLOCK + column;
        int contiguous_until = __shfl_sync(~0u, attn.contiguous_until, row);
        int position = __shfl_sync(~0u, attn.position, row);
        bool apart = row < attn.count && at <= position && at >= contiguous_until;
        s.picked[number % 2][row][column] =
            apart ? a.paths[(attn.first + row) * MAX_PATH + at - contiguous_until] - block * BLOCK : column;
    }
}

// QK warpgroup: the scores of a window. A thread has positions g and g + 8 of its warp's 16, where g is its quad, and
// two of every eight lanes.
struct ScoreWarps {
    float sums[LANES / 2];
    __device__ void load(Shared& s, int window) {
        await_window(s.keys_there, window);
        u64 keys = smem_descriptor(s.keys[window % STAGES]), query = smem_descriptor(s.query);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < DIM / 16; k++)
            multiply(sums, keys + k / 4 * (BLOCK * 8) + k % 4 * 2, query + k / 4 * (LANES * 8) + k % 4 * 2, k);
        wgmma_commit();
    }
    // Stores them for a block, from `column` on.
    __device__ void store(Shared& s, int number, int column) {
        int line = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
        float scale = __int_as_float(SCALE_BITS);
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < LANES / 2; i++)
            s.scores[number % 2][i / 4 * 8 + pair + i % 2][column + line + i / 2 % 2 * 8] = __fmul_rn(sums[i], scale);
    }
};

// Zeroes values of the last block that no row sees: they might be NaN. Done by the QK warpgroup.
__device__ inline void clear(Shared& s, const AttentionTile& attn, int number, int block) {
    int seen = attn.furthest + 1 - block * BLOCK;
    if (seen >= BLOCK) return;
    await_window(s.values_there, number);
    for (int i = seen * CHUNKS + threadIdx.x; i < BLOCK * CHUNKS; i += WARPGROUP)
        *(uint4*)((char*)s.values[number % STAGES] + swizzled_offset<BLOCK>(i / CHUNKS, i % CHUNKS)) =
            make_uint4(0, 0, 0, 0);
    fence_async_shared();
}

__device__ inline float with_other(float x, int apart) { return __fadd_rn(x, __shfl_xor_sync(~0u, x, apart)); }

// Softmax warpgroups: row_max and row_sum of a lane's KV chunk so far. Eight threads have a lane.
struct SoftmaxWarps {
    int lane, row;
    u32 seen;  // visible positions
    float highest, total;
    __device__ SoftmaxWarps(const Arguments& a, const AttentionTile& attn) {
        lane = (threadIdx.x - FIRST_SOFTMAX_THREAD) / 8, row = attn.row_of(lane);
        seen = max(__shfl_sync(~0u, attn.position, row) - a.earliest + 1, 0);
    }
    // The weights of a block, summed in the order of Triton's four warps: a thread has two positions of every other
    // eight.
    __device__ void compute_weights(Shared& s, const Arguments& a, const AttentionTile& attn, int number, int block) {
        if ((threadIdx.x - FIRST_SOFTMAX_THREAD) / 32 * 4 / WIDE >= attn.count) return;  // unused lanes
        int q = threadIdx.x % 4, odd = threadIdx.x % 8 / 4, first = block * BLOCK - a.earliest;
        const float* scores = s.scores[number % 2][lane];
        const unsigned char* picked = s.picked[number % 2][row];
        float weights[4][2], sums[2];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int column = (j * 2 + odd) * 8 + q * 2;
            float2 two = attn.is_tree_block(block) ? make_float2(scores[picked[column]], scores[picked[column + 1]])
                                                : *(const float2*)&scores[column];
            weights[j][0] = two.x, weights[j][1] = two.y;
        }
        if (first < 0 || first + BLOCK > seen)
#pragma unroll
            for (int i = 0; i < 8; i++)
                if ((u32)(first + (i / 2 * 2 + odd) * 8 + q * 2 + i % 2) >= seen)
                    weights[i / 2][i % 2] = negative_infinity();
        float own = fmaxf(fmaxf(fmaxf(weights[0][0], weights[0][1]), fmaxf(weights[1][0], weights[1][1])),
                          fmaxf(fmaxf(weights[2][0], weights[2][1]), fmaxf(weights[3][0], weights[3][1])));
#pragma unroll
        for (int apart = 4; apart > 0; apart /= 2) own = fmaxf(own, __shfl_xor_sync(~0u, own, apart));
        float zero = safe(own);
#pragma unroll
        for (int j = 0; j < 4; j++) {
#pragma unroll
            for (int i = 0; i < 2; i++) weights[j][i] = power_of_two(__fsub_rn(weights[j][i], zero));
            u32 offset = swizzled_offset<LANES>(lane, j * 2 + odd) + q * 4;
            *(u32*)((char*)s.weights[number % 2] + offset) = pack(weights[j][0], weights[j][1]);
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            sums[j] = __fadd_rn(__fadd_rn(weights[j][0], weights[j][1]), weights[j + 2][0]);
            sums[j] = with_other(with_other(__fadd_rn(sums[j], weights[j + 2][1]), 2), 1);
        }
        add(s, a, attn, number, block, own, with_other(__fadd_rn(sums[0], sums[1]), 4));
    }
    // Merges a block's row_max and row_sum, as softmax.cu does, and stores the rescale factors of the values.
    __device__ void add(Shared& s, const Arguments& a, const AttentionTile& attn, int number, int block, float own,
                        float sum) {
        if (attn.begins_chunk(number)) highest = negative_infinity(), total = 0.0f;
        float higher = fmaxf(highest, own), zero = safe(higher);
        float2 rescales = make_float2(power_of_two(__fsub_rn(highest, zero)), power_of_two(__fsub_rn(own, zero)));
        highest = higher, total = __fmaf_rn(total, rescales.x, __fmul_rn(sum, rescales.y));
        if (threadIdx.x % 8) return;
        s.rescales[number % 2][lane] = rescales;
        if (attn.partials == 1) s.row_sums[lane] = total;
        else if (attn.ends_chunk(number) && attn.line_of(lane) >= 0)
            *((float2*)a.partial_stats + attn.partial_index(a, lane, block / MERGE_FAN_IN)) =
                make_float2(highest, total);
    }
};

// PV warpgroups: the weighted values of a KV chunk so far. A warpgroup has 64 columns; a thread has columns g and g + 8
// of its warp's 16, where g is its quad, and two of every eight lanes.
struct ValueWarps {
    float acc[LANES / 2], part[LANES / 2];
    __device__ static int columns() { return (threadIdx.x - FIRST_PV_THREAD) / WARPGROUP; }  // which 64
    __device__ static int chunk() { return columns() * 8 + threadIdx.x % WARPGROUP / 32 * 2; }  // the warp's first
    __device__ static int lane(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }
    __device__ void accumulate(Shared& s, const AttentionTile& attn, int number, int block) {
        await_window(s.values_there, number);
        if (attn.is_tree_block(block)) {
            await_window(s.values_there, number + 1);
            accumulate_picked(s, number);
        } else {
            u64 values = smem_descriptor(s.values[number % STAGES]) + columns() * (BLOCK * 8);
            u64 weights = smem_descriptor(s.weights[number % 2]);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < BLOCK / 16; k++) multiply_transposed(part, values + k * 128, weights + k * 2, k);
            wgmma_commit();
            wgmma_wait<0>();
        }
        if (attn.begins_chunk(number))
#pragma unroll
            for (int i = 0; i < LANES / 2; i++) acc[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < LANES / 2; j += 4) {
            float4 rescales = *(const float4*)&s.rescales[number % 2][lane(j)];  // of two lanes
#pragma unroll
            for (int i = j; i < j + 4; i++) {
                float before = i % 2 ? rescales.z : rescales.x, own = i % 2 ? rescales.w : rescales.y;
                acc[i] = __fmaf_rn(acc[i], before, __fmul_rn(part[i], own));
            }
        }
    }
    // Each row's own values, of the block's window or the next: eight lanes at a time, and of them those of a row.
    __device__ void accumulate_picked(const Shared& s, int number) {
        int thread = threadIdx.x % 32, own_chunk = chunk() + thread / 8 % 2;
        u32 window = shared_address(s.values[number % STAGES]), next = shared_address(s.values[(number + 1) % STAGES]);
#pragma unroll
        for (int j = 0; j < LANES / 8; j++) {
            u32 weights[2][4];
#pragma unroll
            for (int half = 0; half < 2; half++)
                load_fragments(weights[half], shared_address(s.weights[number % 2]) +
                                                  swizzled_offset<LANES>(j * 8 + thread % 8, half * 4 + thread / 8));
#pragma unroll
            for (int row = j * 8 / WIDE; row <= (j * 8 + 7) / WIDE; row++) {
                float sums[4] = {};
#pragma unroll
                for (int k = 0; k < BLOCK / 16; k++) {
                    int line = s.picked[number % 2][row][k * 16 + thread / 16 * 8 + thread % 8];
                    u32 own[4];
                    u32 values = line < BLOCK ? window : next;
                    load_fragments_transposed(own, values + swizzled_offset<BLOCK>(line % BLOCK, own_chunk));
                    multiply(sums, own, weights[k / 2][k % 2 * 2], weights[k / 2][k % 2 * 2 + 1]);
                }
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (lane(j * 4 + i) / WIDE == row) part[j * 4 + i] = sums[i];
            }
        }
    }
    __device__ void store(const Arguments& a, const AttentionTile& attn, int kv_chunk) const {
#pragma unroll
        for (int i = 0; i < LANES / 2; i++)
            if (attn.line_of(lane(i)) >= 0) {
                int column = chunk() * 8 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
                a.partial_acc[attn.partial_index(a, lane(i), kv_chunk) * DIM + column] = acc[i];
            }
    }
    // Writes the normalized output through shared memory, where lanes become lines. Sums of weights are at least one,
    // where `divide` is a multiplication by the inverse.
    __device__ void write(Shared& s, const Arguments& a, const AttentionTile& attn) const {
        int thread = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < LANES / 8; j += 2) {
            u32 rounded[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int one = j * 4 + i * 2, two = one + 1;
                rounded[i] = pack(over(acc[one], s.row_sums[lane(one)]), over(acc[two], s.row_sums[lane(two)]));
            }
            int line = (j + thread / 16) * 8 + thread % 8;
            store_fragments_transposed(
                shared_address(s.query) + swizzled_offset<LANES>(line, chunk() + thread / 8 % 2), rounded);
        }
        sync_warpgroup(1 + columns());
#pragma unroll
        for (int i = threadIdx.x % WARPGROUP; i < LANES * 8; i += WARPGROUP) {
            int lane = i / 8, chunk = columns() * 8 + i % 8;
            if (attn.line_of(lane) >= 0)
                *((uint4*)attn.output(a, lane) + chunk) =
                    *(uint4*)((char*)s.query + swizzled_offset<LANES>(lane, chunk));
        }
    }
    __device__ static float over(float x, float total) { return __fmul_rn(x, inverse(total)); }
};

typedef SoftmaxOf<1, 2> Slice;  // four columns of a lane
__device__ inline Slice slice(float2 totals, float4 values) {
    Slice own;
    own.highest[0] = totals.x, own.total[0] = totals.y;
    own.acc[0][0][0] = values.x, own.acc[0][0][1] = values.y;
    own.acc[0][1][0] = values.z, own.acc[0][1][1] = values.w;
    return own;
}

// The last program to arrive merges all partials, slice by slice.
__device__ inline void merge_if_last(Shared& s, const Arguments& a, const AttentionTile& attn) {
    u32* counter = a.counters + blockIdx.x * KV_HEADS + attn.head;
    if (threadIdx.x == 0) s.last = is_last_arrival(counter, min(attn.kv_splits, attn.partials - attn.shared_chunks));
    __syncthreads();
    if (!s.last) return;
#pragma unroll
    for (int i = threadIdx.x; i < LANES * DIM / 4; i += THREADS) {
        int lane = i / (DIM / 4), column = i % (DIM / 4) * 4;
        if (attn.line_of(lane) < 0) continue;
        Slice own = merge_partials<Slice, MERGE_FAN_IN, 8>(attn.partials, [&](int part) {
            long at = attn.partial_index(a, lane, part);
            return slice(__ldcg((const float2*)a.partial_stats + at),
                         __ldcg((const float4*)(a.partial_acc + at * DIM + column)));
        });
        const float(&m)[2][4] = own.acc[0];
        float total = own.total[0];
        *(uint2*)(attn.output(a, lane) + column) = make_uint2(pack(divide(m[0][0], total), divide(m[0][1], total)),
                                                              pack(divide(m[1][0], total), divide(m[1][1], total)));
    }
}

// All blocks of this program, whose first windows are in flight. In a phase each role works on a different block. At
// its end one window is free: the first threads load the next one into it.
template <int ROLE, class Work>
__device__ inline void run_blocks(Shared& s, const Arguments& a, const AttentionTile& attn, const Work& work) {
    KvCopy next;
    bool asks = ROLE == QK && threadIdx.x < COPIES;
    if (asks) next.find(attn, STAGES, threadIdx.x);
    for (int phase = 0; phase < attn.own + 2; phase++) {
        int own = phase - ROLE;
        if (own >= 0 && own < attn.own) work(own, attn.block(own));
        if (ROLE == SOFTMAX) fence_async_shared();
        __syncthreads();
        if (asks && phase >= PV && next.number < attn.windows) {
            next.announce(s, attn), next.load(s, a, attn);
            next.find(attn, next.number + 1, threadIdx.x);
        }
        __syncwarp();
    }
}

__device__ inline void run_blocks(Shared& s, const Arguments& a, const AttentionTile& attn) {
    if (threadIdx.x < FIRST_SOFTMAX_THREAD) {
        run_blocks<QK>(s, a, attn, [&](int number, int block) {
            ScoreWarps own;
            own.load(s, number), own.store(s, number, 0);
            if (attn.is_tree_block(block)) own.load(s, number + 1), own.store(s, number, BLOCK);
            clear(s, attn, number, block);
        });
    } else if (threadIdx.x < FIRST_PV_THREAD) {
        SoftmaxWarps own(a, attn);
        run_blocks<SOFTMAX>(s, a, attn, [&](int number, int block) { own.compute_weights(s, a, attn, number, block); });
    } else {
        ValueWarps own;
        run_blocks<PV>(s, a, attn, [&](int number, int block) {
            own.accumulate(s, attn, number, block);
            if (attn.partials == 1 && number + 1 == attn.own) own.write(s, a, attn);
            if (attn.partials > 1 && attn.ends_chunk(number)) own.store(a, attn, block / MERGE_FAN_IN);
        });
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_attention(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) char raw[];
    Shared& s = *(Shared*)raw;
    launch_dependents();  // the next kernel's programs start where those of this one have ended
    if (threadIdx.x < STAGES)
        init_mbarrier(&s.keys_there[threadIdx.x], 1), init_mbarrier(&s.values_there[threadIdx.x], 1);
    if (threadIdx.x < 32) fence_mbarrier_init();
    // tables were written before this pass: they can be read before wait_dependencies
    AttentionTile attn(a);
    if (attn.own == 0) {
        if (attn.kv_split == 0) wait_dependencies();  // the kernel must not end before the previous ones
        return;
    }
    __syncthreads();
    if (!a.settled) wait_dependencies();
    // The first thread of a warp issues some copies: those of earlier steps at once.
    constexpr int WARPS = THREADS / 32, EACH = (STAGES * COPIES + WARPS - 1) / WARPS;
    KvCopy lines[EACH];
    if (threadIdx.x % 32 == 0)
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int each = i * WARPS + threadIdx.x / 32;
            lines[i].find(attn, each < STAGES * COPIES ? each / COPIES : attn.windows, each % COPIES);
            lines[i].announce(s, attn);
            if (lines[i].index + LINES <= attn.fresh) lines[i].load(s, a, attn);
        }
    for (int number = max(attn.own - 2, 0); number < attn.own; number++)
        if (attn.is_tree_block(attn.block(number))) pick(s, a, attn, number, attn.block(number));
    if (a.settled) wait_dependencies();
    load_query(s, a, attn);
    fence_async_shared();
    if (threadIdx.x % 32 == 0)
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (lines[i].index + LINES > attn.fresh) lines[i].load(s, a, attn);
    __syncthreads();
    run_blocks(s, a, attn);
    if (attn.partials > 1) merge_if_last(s, a, attn);
}
