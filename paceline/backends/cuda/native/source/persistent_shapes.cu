// The buffers of a pass, and how blocks divide the work.

// Layer and Pass are lists of addresses, filled by persistent.py in this order. Weights are stored in tiles of
// columns and steps of 128 of the depth, as kernels/products/matrix.py has them.
struct Layer {
    const u16 *heads, *heads_bias, *output, *feed_forward_norm, *gate_up, *down;
    const u16* next_norm;  // of the next layer's attention, or the last one before the LM head
    u16 *keys, *values;    // [slots, KV_HEADS, DIM]
    float* features;       // where the residual stream before this layer goes, or null
    const u16 *query_norm, *key_norm;  // [DIM] of HEAD_NORMS, or null
    const u16* router;                 // of a mixture of EXPERTS, or null
};

struct Pass {  // LAYERS of Layer follow it
    float* hidden;            // [ROWS, HIDDEN] the residual stream
    u16* attention_input;     // [ROWS, HIDDEN] times the norm's weights; its factor is applied after the product
    float* squares;           // [ROWS, TILES] sums of the residual stream: input, and output for the LM head
    u16* feed_forward_input;  // [ROWS, HIDDEN]
    float* quads[2];          // [ROWS, HIDDEN / 4] sums of squares of four columns: after down, after output
    u16 *query, *attention_output; // [ROWS, HEADS, DIM]
    u16* activated;           // [ROWS, INTERMEDIATE] of a mixture, the chosen experts one after the other
    const int *positions, *slot_mapping;                  // [ROWS], slot -1: not stored
    const int *tile_rows, *tile_counts, *tile_pages;  // [ATTENTION_TILES] first row, rows, first page
    const int* pages;
    const float *cosines, *sines;  // [positions, HALF]
    float* part_values;            // [ATTENTION_TILES, KV_HEADS, PARTS, LANES, DIM] of attention
    float* part_totals;            // [ATTENTION_TILES, KV_HEADS, PARTS, LANES, 2] highest, total
    u32* counters;                 // arrivals, finished blocks, then of each tile and KV head: zero between passes
    float* features;               // as of a layer, after the last one
    u64 features_width;            // of a row of all features
    float* heads;                  // [ROWS, HEADS + KV_HEADS, DIM] queries and keys before HEAD_NORMS
    float* head_squares;           // [ROWS, HEADS + KV_HEADS, DIM / 8] sums of squares of eight columns
    float* scores;                 // [EXPERTS] of the row, before the norm's factor
    const int *contiguous_until, *paths;  // [ROWS], [ROWS, PATH] of HAS_TREES, as in kernels/attention/paged_attention.py, or null
};

constexpr bool FEW = ROWS <= 2;
constexpr int EXPERT_SIZE = INTERMEDIATE / CHOSEN;  // a layer without experts is one that all rows have chosen
static_assert(ROWS == 1 || !EXPERTS, "rows choose experts of their own");
constexpr int MERGED_BY_ALL = FEW ? MERGE_FAN_IN : 0;  // partials of a row that every block merges itself

// This block's part of attention: the same in all layers. A tile's positions are cut into partials, which the
// `kv_splits` blocks of a tile and KV head take by turns (split-KV). Rows of a tree are at successive KV indices from
// their root's on, which are at most MAX_ROWS - 1 higher than their positions.
struct AttentionTile {
    static constexpr int share = PROGRAMS / (ATTENTION_TILES * KV_HEADS);
    static constexpr int kv_splits = most(1, share < 64 ? share : 64);
    static constexpr int wide = LANES / HEIGHT;      // lanes of a row: one for each of its heads
    static constexpr int group = HEADS / KV_HEADS;   // query heads per KV head
    static constexpr int used = ((ROWS < HEIGHT ? ROWS : HEIGHT) - 1) * wide + group;  // lanes, at most
    static constexpr int halves = used > 8 ? 2 : 1;  // used halves of an instruction's lanes
    int tile, head, kv_split;    // of this block
    int first, count;         // rows of the tile
    int newest, last;         // the last position that they see, and the last KV index
    int fresh, fresh_row;     // the first KV index whose key is computed in this pass, and its row
    int tree_begin;           // the first position whose KV index differs between rows
    int blocks, each, end;    // of positions; blocks of a partial; partials
    const int* pages;
    __device__ void find(const Pass& pass, int own_tile) {
        tile = own_tile;
        kv_split = blockIdx.x % kv_splits, head = blockIdx.x / kv_splits % KV_HEADS;
        if (tile >= ATTENTION_TILES) {
            count = 0, end = 0;
            return;
        }
        first = pass.tile_rows[tile], count = pass.tile_counts[tile];
        newest = -1, tree_begin = 1 << 30;
        for (int row = first; row < first + count; row++) {
            newest = max(newest, pass.positions[row]);
            if (HAS_TREES && pass.contiguous_until[row] <= pass.positions[row])
                tree_begin = min(tree_begin, pass.contiguous_until[row]);
        }
        fresh = newest + 1, fresh_row = 0;
        int rows = 0;  // of the request
        for (int t = 0; t < ATTENTION_TILES; t++)
            if (pass.tile_counts[t] && pass.tile_pages[t] == pass.tile_pages[tile]) {
                int row = pass.tile_rows[t], position = pass.positions[row];
                rows += pass.tile_counts[t];
                if (position < fresh) fresh = position, fresh_row = row;
            }
        last = HAS_TREES ? fresh + rows - 1 : newest;
        pages = pass.pages + pass.tile_pages[tile];
        blocks = count ? newest / BLOCK + 1 : 0;
        each = blocks <= kv_splits && blocks <= MERGE_FAN_IN * MERGE_FAN_IN ? 1 : MERGE_FAN_IN;
        end = ceil_div(blocks, each);
    }
    __device__ bool active() const { return kv_split < end; }
    __device__ bool is_tree_block(int block) const { return HAS_TREES && (block + 1) * BLOCK > tree_begin; }
    __device__ int kv_slot(int index) const { return pages[index / PAGE] * PAGE + index % PAGE; }
};

struct ProductRoom {
    union {  // the input; 16-byte chunks are swizzled against bank conflicts
        u16 rows[ROWS * WIDEST];
        u16 streamed[STREAMERS][ROW_SLOTS][ROWS * PIECE];  // of warps that load their own input
    };
    float parts[SPLIT_JOBS][16][8];  // sums by job, column and row
};
struct AttentionRoom {
    u16 keys[LINES * DIM], values[LINES * DIM], query[LANES * DIM];
    float scores[LANES][BLOCK + MAX_ROWS];
};
struct Shared {
    u16 ring[SLOTS][SLOT / 2];
    union {
        ProductRoom product;
        AttentionRoom attention;
    };
    Pass pass;             // copied here: in global memory, weights would evict it from the caches
    Layer layers[LAYERS];
    uint4 zeros[PIECE / 8];         // a piece of a missing row
    u64 full[SLOTS], empty[SLOTS];  // mbarriers of the ring: weights loaded, weights read
    float factors[MAX_ROWS];        // RMSNorm factor of each row
    int kv_slots[LINES];  // of the first block that attention reads here
    int row_line[MAX_ROWS], row_parts[MAX_ROWS];  // first partial of each row's attention, and their number
    int row_position[MAX_ROWS];
    int row_slot[MAX_ROWS];         // KV slot of each row
    int row_until[MAX_ROWS];        // positions below it are their own KV index
    int row_path[HAS_TREES ? MAX_ROWS : 1][MAX_ROWS];  // KV indices of those from there on
    int experts[CHOSEN];            // of the row
    float shares[CHOSEN];           // their weights
    u64 routed;                     // mbarrier: they are known
    AttentionTile attn;
    bool last;
};

// Columns are divided in units: those that one thread needs together.
template <int UNITS> __device__ inline u32 first_unit(u32 block) { return block * UNITS / PROGRAMS; }

// A matrix of a product: `depth` is that of the product, `line` that of a column in memory. `column` is the column of a
// line of this block's weights, and `first` the offset of the matrix of a split.
struct Heads {  // a unit is 8 columns of a head's first half and their RoPE partners of the second
    static constexpr int depth = HIDDEN, line = depth, splits = HEADS_SPLITS, slab = HEADS_SLAB, each = 16, tile = DIM;
    static constexpr int units = (HEADS + 2 * KV_HEADS) * DIM / 16;
    static constexpr bool prefetches_l2 = false, streamed = !FEW && splits > 1;
    __device__ static const u16* input(const Pass& pass) { return pass.attention_input; }
    __device__ static u32 unit(u32 line) { return line / 16; }
    __device__ static u32 first(const Shared&, int) { return 0; }
    __device__ static u32 column(const Shared&, u32 unit, u32 line) {
        return unit / (DIM / 16) * DIM + unit % (DIM / 16) * 8 + line % 8 + (line % 16 >= 8 ? HALF : 0);
    }
};
struct GateUp {  // 4 columns of gate, and those of up: 8 lines further
    static constexpr int depth = HIDDEN, line = depth, splits = 1, slab = GATE_SLAB, each = 8, tile = 64;
    static constexpr int units = INTERMEDIATE / 4;
    static constexpr bool prefetches_l2 = true, streamed = false;
    __device__ static u32 unit(u32 line) { return line / 16 * 2 + line % 8 / 4; }
    __device__ static u32 first(const Shared&, int) { return 0; }
    __device__ static u32 column(const Shared& s, u32 unit, u32 line) {
        u32 of_expert = EXPERT_SIZE / 4, rank = min(unit / of_expert, CHOSEN - 1u);
        u32 begin = EXPERTS ? s.experts[rank] * (EXPERT_SIZE * 2) : 0;
        unit -= rank * of_expert;
        return begin + unit / 8 * 64 + unit % 8 * 4 + line % 4 + (line % 16 >= 8 ? 32 : 0);
    }
};
struct Added {  // 4 columns, whose squares are summed
    static constexpr int each = 4, tile = 64, units = HIDDEN / 4;
    static constexpr bool prefetches_l2 = false;
    __device__ static u32 unit(u32 line) { return line / 4; }
    __device__ static u32 column(const Shared&, u32 unit, u32 line) { return unit * 4 + line % 4; }
};
struct Output : Added {
    static constexpr int depth = HEADS * DIM, line = depth, splits = OUTPUT_SPLITS, slab = OUTPUT_SLAB;
    static constexpr bool streamed = !FEW && splits > 1, weighted = false;
    __device__ static u32 first(const Shared&, int) { return 0; }
    __device__ static const u16* input(const Pass& pass) { return pass.attention_output; }
};
struct Down : Added {  // of a mixture, a split is an expert
    static constexpr int depth = INTERMEDIATE, line = EXPERT_SIZE, splits = DOWN_SPLITS, slab = DOWN_SLAB;
    static constexpr bool streamed = true, weighted = EXPERTS > 0;
    static_assert(!weighted || splits == CHOSEN, "");
    // Less what comes before the expert in the depth of the product.
    __device__ static u32 first(const Shared& s, int split) {
        return EXPERTS ? (u32)s.experts[split] * (HIDDEN * EXPERT_SIZE) - (u32)split * (EXPERT_SIZE * tile) : 0;
    }
    __device__ static const u16* input(const Pass& pass) { return pass.activated; }
};

// How a block divides its share of a product: jobs of 16 columns and one split of the depth, and stages of a slab
// of the depth of every split, each of which fills a slot of the ring.
template <class P> struct Cut {
    static constexpr int most_columns = ceil_div(P::units, PROGRAMS) * P::each;  // of a block
    static constexpr int groups = ceil_div(most_columns, 16);
    static constexpr int columns = P::each == 8 ? groups * 16 : most_columns;  // that fit a slot
    static constexpr int jobs = groups * P::splits;
    static constexpr int jobs_of_warp = ceil_div(jobs, WARPS);
    static constexpr int steps = P::depth / STEP;
    __device__ static constexpr int begin(int split) { return split * steps / P::splits * STEP; }
    static constexpr int longest = ceil_div(steps, P::splits) * STEP;
    static constexpr int stages = ceil_div(longest, P::slab);
    static constexpr int pieces = P::slab / PIECE;  // of a stage
    static constexpr bool even = steps % P::splits == 0 && longest % P::slab == 0;  // all stages are full
    static_assert(columns * P::splits * P::slab * 2 <= SLOT, "a stage does not fit its slot");
    static_assert(P::slab % PIECE == 0 && STEP % (2 * PIECE) == 0, "a split has pairs of pieces");
    static_assert(jobs_of_warp <= JOBS, "");
    static_assert((long)P::units * P::each * P::depth < (1l << 31), "offsets are of 32 bits");
};
