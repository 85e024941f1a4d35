// The persistent megakernel: all layers of a pass over few rows, one thread block per multiprocessor.
//
// A block has a share of the columns of every matrix, over their whole depth. Some of its warps only load weights,
// in the order of use, into a ring in shared memory, whatever phase or layer they belong to: while the others wait
// at a grid barrier, the weights of the next phases are loaded.
//
// The files are concatenated in the order instructions, softmax, persistent_memory, persistent_shapes,
// persistent_products, persistent_epilogues, persistent_attention, persistent_layers. persistent.py defines the
// constants that they are compiled for, such as ROWS and HIDDEN, before them.
//
// This file: synchronization of threads, and loads.

constexpr int WARPS = 8, THREADS = WARPS * 32;  // computing warps and threads
constexpr int FETCHERS = 128;  // loading threads
constexpr int IN_FLIGHT = 3;   // stages in flight: with more, all other loads would queue behind them
constexpr int L2_PREFETCH_STEPS = 6;       // steps of gate and up prefetched into L2 while the ring is full
constexpr int ROW_SLOTS = 10;  // pieces of rows in flight or in use, per warp
constexpr int BYTES_A_CYCLE = 20;  // memory bandwidth of a multiprocessor, rounded up
constexpr int PIECE = 64;      // depth of one iteration of a warp
constexpr int STEP = 128;  // depth of a step in the layout of weights
constexpr int HALF = DIM / 2;
constexpr int BLOCK = 64, MERGE_FAN_IN = 8, LANES = 16;  // of attention, as in attention.py
constexpr int TILES = HIDDEN / 64;  // column tiles of the residual stream, with separate sums of squares
constexpr int WIDEST = HEADS * DIM > HIDDEN ? HEADS * DIM : HIDDEN;  // widest input that shared memory holds whole

// Read again in every phase: keeping it, and what is derived from it, would cost registers.
__device__ inline int thread() {
    int number;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
    return number;
}
__device__ inline u32 cycles() {
    u32 now;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
    return now;
}
__device__ constexpr int most(int a, int b) { return a > b ? a : b; }
__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Barrier of the computing threads; loading threads never take part.
__device__ inline void sync() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

__device__ inline void init_mbarrier(u32 mbarrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(mbarrier), "r"(count) : "memory");
}
__device__ inline void arrive_mbarrier(u32 mbarrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(mbarrier) : "memory");
}
__device__ inline void arrive_after_copies(u32 mbarrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(mbarrier) : "memory");
}
__device__ inline void wait_mbarrier(u32 mbarrier, int parity) {
    asm volatile("{ .reg .pred done; again%=: mbarrier.try_wait.parity.shared.b64 done, [%0], %1; "
                 "@!done bra again%=; }" ::"r"(mbarrier), "r"(parity) : "memory");
}

__device__ inline bool is_mbarrier_complete(u32 mbarrier, int parity) {
    u32 raised;
    asm volatile("{ .reg .pred done; mbarrier.test_wait.parity.shared.b64 done, [%1], %2; "
                 "selp.u32 %0, 1, 0, done; }" : "=r"(raised) : "r"(mbarrier), "r"(parity) : "memory");
    return raised;
}
// Prefetches weights into L2.
template <int BYTES> __device__ inline void prefetch_to_l2(const void* from) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "n"(BYTES) : "memory");
}

// Loads of what other blocks have written in this kernel: L1 may be stale, so all such loads go past it: here, by
// __ldcg, and by asynchronous copies.
__device__ inline uint4 load_cg_16(const void* from) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}
