// All layers of a pass over few rows, in one kernel that stays on every multiprocessor.
//
// A block has a share of the columns of every matrix, over their whole depth. Some of its warps do nothing
// but fetch weights, in the order of use, into a ring in shared memory, whatever phase or layer they belong
// to: while the others wait for other blocks, the weights of the next phases are on their way.
//
// The files are one source, put together in the order instructions, softmax, memory, shapes, products, ends,
// attention, layers. The sizes that they are compiled for, such as ROWS and HIDDEN, are defined ahead of them
// by persistent.py.
//
// This file: how threads wait for each other, and for memory.

constexpr int WARPS = 8, THREADS = WARPS * 32;  // that compute
constexpr int FETCHERS = 128;  // threads that fetch
constexpr int IN_FLIGHT = 3;   // stages: with more on their way everything else waits behind them
constexpr int L2_PREFETCH_STEPS = 6;       // steps of gate and up that are asked for while the ring is full
constexpr int ROW_SLOTS = 10;  // pieces of rows that a warp has on their way or at hand
constexpr int BYTES_A_CYCLE = 20;  // that a multiprocessor gets of memory, or a little more
constexpr int PIECE = 64;      // of the depth: what a warp multiplies at a time
constexpr int STEP = 128;  // of the depth, as weights lie in memory
constexpr int HALF = DIM / 2;
constexpr int BLOCK = 64, MERGE_FAN_IN = 8, LANES = 16;  // of attention, as in attention.py
constexpr int TILES = HIDDEN / 64;  // of columns of the residual stream: their squares are added up apart
constexpr int WIDEST = HEADS * DIM > HIDDEN ? HEADS * DIM : HIDDEN;  // input that shared memory has whole

// Asked for again in every phase: what follows from it is not worth a register all the while.
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

// Of the threads that compute: those that fetch never wait here.
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
// Brings weights to the cache of all multiprocessors.
template <int BYTES> __device__ inline void prefetch_to_l2(const void* from) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "n"(BYTES) : "memory");
}

// Loads of what other blocks have written in this kernel: the multiprocessor's own cache may be behind. So
// everything of that kind is loaded past it, here, by __ldcg, and by copies.
__device__ inline uint4 load_cg_16(const void* from) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}
