// Decode attention for uniform batches on Hopper: the bits of ../../kernels/attention/paged_attention.py, which takes any rows. A unit of
// work has one or two tiles of rows of a request, whose lanes share a KV head, and blocks of 64 positions. Programs are
// persistent, one per multiprocessor, and take one unit after the other.
//
// It is warp-specialized and pipelined, as FlashAttention-3 is. A warp loads keys and values by TMA, as far ahead as
// there is room, the next unit's too. One warpgroup computes the scores of a block (QK) while two compute the softmax of
// the block before, and one for each 64 columns accumulates the values of the one before that (PV). Keys and values are
// the 64-row operand of products, lanes the other.
//
// Keys are loaded in windows of 64 KV indices, one per block of positions. In a tree block a row's positions may be at
// other KV indices, of the block's window or the next: each row picks its scores and values from both.
//
// Partial results of KV chunks (8 blocks) are merged by the last program to arrive, if there are several. The first
// ones may come from the shared-prefix kernel.
//
// The files are concatenated in the order instructions, softmax, decode_attention_loads, decode_attention.
// decode_attention.py defines before them HEADS, KV_HEADS, DIM, PAGE, HEIGHT (rows of a tile), TILES_PER_UNIT,
// KEY_STAGES and VALUE_STAGES (of the pipeline: windows), HAS_TREES, SCALE_BITS, SHARED_BYTES, and `multiply` and
// `multiply_transposed` for these lanes.
//
// This file: units of work, and the warp that loads.

constexpr int BLOCK = 64, MERGE_FAN_IN = 8, MAX_PATH = 64;
enum { QK, SOFTMAX, PV };
constexpr int WARPGROUP = 128, FIRST_SOFTMAX_THREAD = WARPGROUP, FIRST_PV_THREAD = 3 * WARPGROUP;
constexpr int PARTS = DIM / 64;  // of a line: WGMMA takes 64 numbers, 128 bytes, of a line
constexpr int MMA_THREADS = FIRST_PV_THREAD + PARTS * WARPGROUP, THREADS = MMA_THREADS + WARPGROUP;
// Registers of a thread, where it has others than at its start: 80 then, or 96 if there are fewer threads.
constexpr int PV_REGISTERS = 96, LOADER_REGISTERS = 48;
constexpr int GROUP = HEADS / KV_HEADS, WIDE = 16 / HEIGHT;  // query heads per KV head, and their lanes
constexpr int LANES = 16 * TILES_PER_UNIT, MAX_ROWS = HEIGHT * TILES_PER_UNIT;
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
    int groups, kv_splits;      // of a pass: tiles that share a unit; of a KV head
    int max_partials, stride;     // of a softmax; of the output
    int earliest;               // the first visible position
    int settled;                // whether the context before a request's rows was written before the step
};

struct Shared {
    u16 keys[KEY_STAGES][BLOCK * DIM], values[VALUE_STAGES][BLOCK * DIM];
    u16 query[LANES * DIM];  // later the output
    u16 weights[2][LANES * BLOCK];
    float scores[2][LANES][COLUMNS + 4];
    float2 rescales[2][LANES];  // factors of what was accumulated before, and of the block
    float4 merges[2][LANES];    // of a group before and of its KV chunk; of the groups before and of the group
    float row_sums[LANES];       // of the merged softmax
    u64 keys_there[KEY_STAGES], keys_used[KEY_STAGES];  // mbarriers
    u64 values_there[VALUE_STAGES], values_used[VALUE_STAGES];
    // of every other tree block: KV index of each position, relative to its window
    unsigned char picked[2][MAX_ROWS][BLOCK];
    bool last;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "decode_attention.py counts them");

__device__ inline int num_units(const Arguments& a) { return a.groups * KV_HEADS * a.kv_splits; }

// Which rows, KV head and share of the KV positions a unit has. Neighbours have a request's KV heads, which lie in the
// same pages.
struct Unit {
    int group, head, kv_split;
    int of_request, tile, first;  // the number of its first tile in the request and in the pass; its first row
    __device__ Unit(const Arguments& a, int number) {
        int each = (a.tiles_each + TILES_PER_UNIT - 1) / TILES_PER_UNIT;
        head = number % KV_HEADS, group = number / KV_HEADS % a.groups, kv_split = number / KV_HEADS / a.groups;
        int request = group / each;
        of_request = group % each * TILES_PER_UNIT;
        tile = request * a.tiles_each + of_request, first = request * a.rows_each + of_request * HEIGHT;
    }
    // The line of a lane among those of all rows and heads, -1 if the lane has none.
    __device__ int line_of(int lane, int count) const {
        int row = lane / WIDE, own = lane % WIDE;
        return row < count && own < GROUP ? (first + row) * HEADS + head * GROUP + own : -1;
    }
    __device__ int max_rows(const Arguments& a) const { return min(MAX_ROWS, a.rows_each - of_request * HEIGHT); }
};

// What the tables tell of a unit. They were written before this pass, so they can be read before wait_dependencies.
// A thread of a warp has a row.
struct UnitTables {
    int begin, root, count, shared_chunks, position, contiguous_until;
    __device__ UnitTables(const Arguments& a, const Unit& unit) {
        int lane = threadIdx.x % 32;
        bool is_row = lane < unit.max_rows(a);
        begin = a.tile_pages[unit.tile], root = a.positions[unit.first - unit.of_request * HEIGHT];
        count = a.tile_counts[unit.tile];
        if (TILES_PER_UNIT > 1 && unit.of_request + 1 < a.tiles_each) count += a.tile_counts[unit.tile + 1];
        shared_chunks = a.shared_chunks ? a.shared_chunks[unit.tile] : 0;
        position = is_row ? a.positions[unit.first + lane] : 0;
        contiguous_until = is_row && HAS_TREES ? a.contiguous_until[unit.first + lane] : FAR;
    }
};

// The work of a unit. Every warp computes it: its first threads have a row each.
struct AttentionTile : Unit {
    int kv_splits, count;     // `count`: rows
    int position, contiguous_until;   // of this thread's row
    int newest, furthest;     // last position, and last KV index
    int tree_begin, fresh;       // first non-contiguous position; first KV index that may not be read before this pass
    int blocks, partials;        // of positions; KV chunks of them
    int shared_chunks;              // of these, from the first: computed by kernels/attention/shared_prefix.py
    int own, windows;         // blocks of this unit, and windows that are loaded
    bool is_alone;            // no other unit, and no other kernel, has KV chunks of these rows
    int turn;                 // windows that this program has loaded before
    const int* pages;
    __device__ AttentionTile(const Arguments& a, const Unit& unit, const UnitTables& tables, int turn)
        : Unit(unit), kv_splits(a.kv_splits), count(tables.count), position(tables.position),
          contiguous_until(tables.contiguous_until), turn(turn) {
        bool there = threadIdx.x % 32 < count;
        newest = furthest = __reduce_max_sync(~0u, there ? position : -1);
        tree_begin = FAR;
        if (HAS_TREES) {
            bool diverges = there && contiguous_until <= position;
            tree_begin = __reduce_min_sync(~0u, diverges ? contiguous_until : FAR);
            int row = first + threadIdx.x % 32;
            int index = diverges ? a.paths[row * MAX_PATH + position - contiguous_until] : position;
            furthest = __reduce_max_sync(~0u, there ? index : -1);
        }
        fresh = a.settled ? tables.root : 0;
        pages = a.pages + tables.begin;
        blocks = (newest + BLOCK) / BLOCK;
        partials = (blocks + MERGE_FAN_IN - 1) / MERGE_FAN_IN;
        shared_chunks = min(tables.shared_chunks, partials);
        is_alone = partials == 1 || (kv_splits == 1 && shared_chunks == 0);
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
    __device__ bool ends_group(int number) const {
        return number + 1 == own || (number + 1) % (MERGE_FAN_IN * MERGE_FAN_IN) == 0;
    }
    __device__ bool is_tree_block(int block) const { return HAS_TREES && (block + 1) * BLOCK > tree_begin; }
    // The window after a tree block is loaded too, if there is one.
    __device__ int window(int number) const { return number < own ? block(number) : block(own - 1) + 1; }
    // The KV slot of a copy's first line; 0 if none of its lines is visible.
    __device__ int kv_slot(int number, int copy) const {
        int index = number < windows ? window(number) * BLOCK + copy * LINES : FAR;
        return index <= furthest ? pages[index / PAGE] * PAGE + index % PAGE : 0;
    }
    __device__ int row_of(int lane) const { return min(lane / WIDE, count - 1); }
    __device__ int line_of(int lane) const { return Unit::line_of(lane, count); }
    __device__ long partial_index(const Arguments& a, int lane, int part) const {  // its index in memory
        return (long)line_of(lane) * a.max_partials + part;
    }
    __device__ u16* output(const Arguments& a, int lane) const {
        int line = line_of(lane);
        return a.output + (long)(line / HEADS) * a.stride + line % HEADS * DIM;
    }
};

// Copies of a window, from `begin` to `end`, by TMA. The first ones announce the bytes of all that have visible lines.
struct Copies {
    int turn, begin, end, all;
    bool are_first;
    int slots[COPIES];
    // Of keys or values. Called by a warp.
    template <int STAGES>
    __device__ void load(u16 (&to)[STAGES][BLOCK * DIM], u64 (&there)[STAGES], u64 (&used)[STAGES], const Map& map,
                         int head) const {
        int stage = turn % STAGES;
        if (are_first) wait_mbarrier(&used[stage], turn / STAGES % 2 ^ 1);  // new mbarriers count as used
        if (!is_elected()) return;
        if (are_first) expect_bytes(&there[stage], all * LINES * DIM * 2);
#pragma unroll
        for (int i = 0; i < COPIES; i++)
            if (i >= begin && i < end)
#pragma unroll
                for (int part = 0; part < PARTS; part++)
                    copy_kv_lines(to[stage] + (part * BLOCK + i * LINES) * 64, map, part * 64, head, slots[i],
                                  &there[stage]);
    }
    __device__ void load(Shared& s, const Arguments& a, int head) const {
        load(s.keys, s.keys_there, s.keys_used, a.keys, head);
        load(s.values, s.values_there, s.values_used, a.values, head);
    }
};

// Called by a warp: loads all windows of this program's units. Lines that this pass writes are loaded when the kernels
// before have ended.
__device__ inline void load_units(Shared& s, const Arguments& a) {
    constexpr int AHEAD = 32 / COPIES;  // windows whose KV slots the threads have
    bool has_waited = false;
    int turn = 0;
    for (int number = blockIdx.x; number < num_units(a); number += gridDim.x) {
        Unit unit(a, number);
        AttentionTile attn(a, unit, UnitTables(a, unit), turn);
        int slot = 0;
#pragma unroll 1
        for (int window = 0; window < attn.windows; window++, turn++) {
            if (window % AHEAD == 0) slot = attn.kv_slot(window + threadIdx.x % 32 / COPIES, threadIdx.x % COPIES);
            int index = attn.window(window) * BLOCK;
            int all = min((max(attn.furthest + 1 - index, 0) + LINES - 1) / LINES, COPIES);
            int early = has_waited ? all : min(max(attn.fresh - index, 0) / LINES, all);
            Copies copies = {turn, 0, early, all, true};
#pragma unroll
            for (int i = 0; i < COPIES; i++) copies.slots[i] = __shfl_sync(~0u, slot, window % AHEAD * COPIES + i);
            copies.load(s, a, attn.head);
            if (early == all) continue;
            if (!has_waited) wait_dependencies();
            has_waited = true;
            copies.begin = early, copies.end = all, copies.are_first = false;
            copies.load(s, a, attn.head);
        }
    }
}

// The chunk of the queries that a thread moves to shared memory, padding rows included.
static_assert(LANES * CHUNKS <= MMA_THREADS, "a thread moves one chunk at most");
__device__ inline uint4 load_query(const Arguments& a, const Unit& unit) {
    int lane = threadIdx.x / CHUNKS, line = lane < LANES ? unit.line_of(lane, unit.max_rows(a)) : -1;
    if (line < 0) return make_uint4(0, 0, 0, 0);
    return __ldcg((const uint4*)(a.query + (long)line * DIM) + threadIdx.x % CHUNKS);
}
__device__ inline void store_query(Shared& s, uint4 query) {
    int lane = threadIdx.x / CHUNKS;
    if (lane < LANES) *(uint4*)((char*)s.query + swizzled_offset<LANES>(lane, threadIdx.x % CHUNKS)) = query;
}

// The KV indices of a tree block's positions for each row, relative to the block's window.
__device__ inline void pick(Shared& s, const Arguments& a, const AttentionTile& attn, int number, int block) {
    for (int each = threadIdx.x; each < MAX_ROWS * BLOCK; each += MMA_THREADS) {
        int row = each / BLOCK, column = each % BLOCK, at = block * BLOCK + column;
        int contiguous_until = __shfl_sync(~0u, attn.contiguous_until, row);
        int position = __shfl_sync(~0u, attn.position, row);
        bool apart = row < attn.count && at <= position && at >= contiguous_until;
        s.picked[number % 2][row][column] =
            apart ? a.paths[(attn.first + row) * MAX_PATH + at - contiguous_until] - block * BLOCK : column;
    }
}

