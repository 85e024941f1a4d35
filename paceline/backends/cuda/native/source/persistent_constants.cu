// The persistent megakernel: all layers of a pass over few rows, one thread block per multiprocessor.
//
// A block has a share of the columns of every matrix, over their whole depth. Some of its warps only load weights,
// in the order of use, into a ring in shared memory, whatever phase or layer they belong to: while the others wait
// at a grid barrier, the weights of the next phases are loaded.
//
// The files are concatenated in the order of SOURCES in persistent.py, which defines the constants that they are
// compiled for, such as ROWS and HIDDEN, before them.
//
// This file: constants.

constexpr int WARPS = 8, THREADS = WARPS * 32;  // computing warps and threads
constexpr int FETCHERS = 128;  // loading threads
constexpr int IN_FLIGHT = EXPERTS ? 4 : 3;  // stages in flight: with more, all other loads would queue behind them
constexpr int L2_PREFETCH_STEPS = 6;       // steps of gate and up prefetched into L2 while the ring is full
constexpr int ROW_SLOTS = 10;  // pieces of rows in flight or in use, per warp
constexpr int BYTES_A_CYCLE = 20;  // memory bandwidth of a multiprocessor, rounded up
constexpr int PIECE = 64;      // depth of one iteration of a warp
constexpr int STEP = 128;  // depth of a step in the layout of weights
constexpr int HALF = DIM / 2;
constexpr int BLOCK = 64, MERGE_FAN_IN = 8, LANES = 16;  // of attention, as in paged_attention.py
constexpr int MAX_ROWS = 8;
constexpr int LINES = HAS_TREES ? BLOCK + MAX_ROWS : BLOCK;  // KV indices that a block of positions reads
constexpr int TILES = HIDDEN / 64;  // column tiles of the residual stream, with separate sums of squares
constexpr int WIDEST = HEADS * DIM > HIDDEN ? HEADS * DIM : HIDDEN;  // widest input that shared memory holds whole

__device__ constexpr int most(int a, int b) { return a > b ? a : b; }
__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
