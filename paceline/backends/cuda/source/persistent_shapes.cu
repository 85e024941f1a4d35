// What a pass reads and writes, and how blocks share it.

// Layer and Pass are lists of addresses, filled by persistent.py in this order. Weights lie in tiles of
// columns and steps of 128 of the depth, as kernels/matrix.py has them.
struct Layer {
    const u16 *heads, *heads_bias, *output, *feed_forward_norm, *gate_up, *down;
    const u16* next_norm;  // of the next layer's attention, or the last one ahead of the head
    u16 *keys, *values;    // [places, KV_HEADS, DIM]
    float* features;       // where the residual stream ahead of this layer is wanted, or null
};

struct Pass {  // LAYERS of Layer follow it
    float* hidden;            // [ROWS, HIDDEN] the residual stream
    u16* attention_input;     // [ROWS, HIDDEN] times the norm's weights; its factor comes after the product
    float* squares;           // [ROWS, TILES] of the residual stream: given, and left for the head
    u16* feed_forward_input;  // [ROWS, HIDDEN]
    float* quads[2];          // [ROWS, HIDDEN / 4] sums of squares of four columns: after down, after output
    u16 *query, *attention_output; // [ROWS, HEADS, DIM]
    u16* activated;           // [ROWS, INTERMEDIATE]
    const int *positions, *slot_mapping;                  // [ROWS], a place of -1: nothing is kept
    const int *tile_rows, *tile_counts, *tile_pages;  // [ATTENTION_TILES] first row, rows, first page
    const int* pages;
    const float *cosines, *sines;  // [positions, HALF]
    float* part_values;            // [ATTENTION_TILES, KV_HEADS, PARTS, LANES, DIM] of attention
    float* part_totals;            // [ATTENTION_TILES, KV_HEADS, PARTS, LANES, 2] highest, total
    u32* counters;                 // arrivals, ends, then of each tile and key head: zero between passes
    float* features;               // as of a layer, behind the last one
    u64 features_width;            // of a row of all features
};

constexpr bool FEW = ROWS <= 2;
constexpr int MERGED_BY_ALL = FEW ? MERGE_FAN_IN : 0;  // parts of a row's attention that all blocks merge, each for itself

// What attention of this block looks at: the same in all layers. A tile's positions are cut into parts, which
// the `kv_splits` of a tile and key head, one block each, take by turns.
struct AttentionTile {
    static constexpr int share = PROGRAMS / (ATTENTION_TILES * KV_HEADS);
    static constexpr int kv_splits = most(1, share < 64 ? share : 64);
    static constexpr int wide = LANES / HEIGHT;      // lanes of a row: one for each of its heads
    static constexpr int group = HEADS / KV_HEADS;   // heads that share keys
    static constexpr int used = ((ROWS < HEIGHT ? ROWS : HEIGHT) - 1) * wide + group;  // lanes, at most
    static constexpr int halves = used > 8 ? 2 : 1;  // of the lanes of an instruction that mean something
    int tile, head, kv_split;    // of this block
    int first, count;         // rows of the tile
    int newest;               // the last position that they see
    int fresh;                // the first position whose key is made in this pass
    int blocks, each, end;    // of positions; blocks of a part; parts
    const int* pages;
    __device__ void find(const Pass& pass, int own_tile) {
        tile = own_tile;
        kv_split = blockIdx.x % kv_splits, head = blockIdx.x / kv_splits % KV_HEADS;
        if (tile >= ATTENTION_TILES) {
            count = 0, end = 0;
            return;
        }
        first = pass.tile_rows[tile], count = pass.tile_counts[tile];
        newest = count ? pass.positions[first + count - 1] : -1;
        fresh = newest + 1;
        for (int t = 0; t < ATTENTION_TILES; t++)
            if (pass.tile_counts[t] && pass.tile_pages[t] == pass.tile_pages[tile])
                fresh = min(fresh, pass.positions[pass.tile_rows[t]]);
        pages = pass.pages + pass.tile_pages[tile];
        blocks = count ? newest / BLOCK + 1 : 0;
        each = blocks <= kv_splits && blocks <= MERGE_FAN_IN * MERGE_FAN_IN ? 1 : MERGE_FAN_IN;
        end = ceil_div(blocks, each);
    }
    __device__ bool active() const { return kv_split < end; }
    __device__ int kv_slot(int position) const { return pages[position / PAGE] * PAGE + position % PAGE; }
};

struct ProductRoom {
    union {  // the input; chunks of 16 bytes are exchanged, for the banks' sake
        u16 rows[ROWS * WIDEST];
        u16 streamed[STREAMERS][ROW_SLOTS][ROWS * PIECE];  // of warps that bring it for themselves
    };
    float parts[SPLIT_JOBS][16][8];  // sums by job, column and row
};
struct AttentionRoom {
    u16 keys[BLOCK * DIM], values[BLOCK * DIM], query[LANES * DIM];
    float scores[LANES][BLOCK + 8];
};
struct Shared {
    u16 ring[SLOTS][SLOT / 2];
    union {
        ProductRoom product;
        AttentionRoom attention;
    };
    Pass pass;             // here since in memory it leaves the caches while weights pass through them
    Layer layers[LAYERS];
    uint4 zeros[PIECE / 8];         // a piece of a row that is not there
    u64 full[SLOTS], empty[SLOTS];  // flags of the ring: weights are there, weights were read
    float factors[8];               // of each row: one over the root mean square
    int kv_slots[BLOCK];  // of the first block that attention reads here
    int row_line[8], row_parts[8];  // where the parts of each row's attention begin, and how many they are
    int row_position[8];
    AttentionTile attn;
    bool last;
};

// Columns are shared out in units, those that one thread needs together.
template <int UNITS> __device__ inline u32 first_unit(u32 block) { return block * UNITS / PROGRAMS; }

struct Heads {  // a unit is 8 columns of a head's first half and those of its second that turn with them
    static constexpr int depth = HIDDEN, splits = HEADS_SPLITS, slab = HEADS_SLAB, each = 16, tile = DIM;
    static constexpr int units = (HEADS + 2 * KV_HEADS) * DIM / 16;
    static constexpr bool prefetches_l2 = false, streamed = !FEW && splits > 1;
    __device__ static const u16* input(const Pass& pass) { return pass.attention_input; }
    __device__ static u32 unit(u32 line) { return line / 16; }
    __device__ static u32 column(u32 unit, u32 line) {
        return unit / (DIM / 16) * DIM + unit % (DIM / 16) * 8 + line % 8 + (line % 16 >= 8 ? HALF : 0);
    }
};
struct GateUp {  // 4 columns of gates, and those of what they let through: lines 8 further
    static constexpr int depth = HIDDEN, splits = 1, slab = GATE_SLAB, each = 8, tile = 64;
    static constexpr int units = INTERMEDIATE / 4;
    static constexpr bool prefetches_l2 = true, streamed = false;
    __device__ static u32 unit(u32 line) { return line / 16 * 2 + line % 8 / 4; }
    __device__ static u32 column(u32 unit, u32 line) {
        return unit / 8 * 64 + unit % 8 * 4 + line % 4 + (line % 16 >= 8 ? 32 : 0);
    }
};
struct Added {  // 4 columns, whose squares are added up
    static constexpr int each = 4, tile = 64, units = HIDDEN / 4;
    static constexpr bool prefetches_l2 = false;
    __device__ static u32 unit(u32 line) { return line / 4; }
    __device__ static u32 column(u32 unit, u32 line) { return unit * 4 + line % 4; }
};
struct Output : Added {
    static constexpr int depth = HEADS * DIM, splits = OUTPUT_SPLITS, slab = OUTPUT_SLAB;
    static constexpr bool streamed = !FEW && splits > 1;
    __device__ static const u16* input(const Pass& pass) { return pass.attention_output; }
};
struct Down : Added {
    static constexpr int depth = INTERMEDIATE, splits = DOWN_SPLITS, slab = DOWN_SLAB;
    static constexpr bool streamed = true;
    __device__ static const u16* input(const Pass& pass) { return pass.activated; }
};

// How a block cuts its share of a product: jobs of 16 columns and one split of the depth, and stages of a
// slab of the depth of every split, each of which fills a slot of the ring.
template <class P> struct Cut {
    static constexpr int most_columns = ceil_div(P::units, PROGRAMS) * P::each;  // of a block
    static constexpr int groups = ceil_div(most_columns, 16);
    static constexpr int columns = P::each == 8 ? groups * 16 : most_columns;  // that have room in a slot
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
