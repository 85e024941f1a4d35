// All layers of a pass over few rows, in one kernel that stays on every multiprocessor.
//
// A block has a share of the columns of every matrix, over their whole depth. Some of its warps do nothing
// but fetch weights, in the order of use, into a ring in shared memory, whatever phase or layer they belong
// to: while the others wait for other blocks, the weights of the next phases are on their way.
//
// The files are one source, put together in the order memory, shapes, products, ends, attention, layers. The
// sizes that they are compiled for, such as ROWS and HIDDEN, are defined ahead of them by persistent.py.
// bfloat16 numbers are u16 here: what is done with them is done by instructions, not by C++.
//
// Sums and products are spelled __fadd_rn and __fmul_rn, so that the compiler fuses nothing: the bits are to
// be those of the kernels in ../kernels.
//
// This file: instructions that C++ has no words for.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

constexpr int WARPS = 8, THREADS = WARPS * 32;  // that compute
constexpr int FETCHERS = 128;  // threads that fetch
constexpr int IN_FLIGHT = 3;   // stages: with more on their way everything else waits behind them
constexpr int AHEAD = 6;       // steps of gate and up that are asked for while the ring is full
constexpr int ROW_SLOTS = 10;  // pieces of rows that a warp has on their way or at hand
constexpr int BYTES_A_CYCLE = 20;  // that a multiprocessor gets of memory, or a little more
constexpr int PIECE = 64;      // of the depth: what a warp multiplies at a time
constexpr int STEP = 128;  // of the depth, as weights lie in memory
constexpr int HALF = DIM / 2;
constexpr int BLOCK = 64, MERGED = 8, LANES = 16;  // of attention, as in attention.py
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
__device__ constexpr int upwards(int a, int b) { return (a + b - 1) / b; }

__device__ inline u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

__device__ inline void copy_16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ inline void copy_16_or_zero(u32 to, const void* from, bool there) {
    int bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most so many of the groups that this thread has ended are on their way.
template <int GROUPS> __device__ inline void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

// Of the threads that compute: those that fetch never wait here.
__device__ inline void sync() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

__device__ inline void make_flag(u32 flag, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(flag), "r"(count) : "memory");
}
__device__ inline void raise_flag(u32 flag) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(flag) : "memory");
}
__device__ inline void raise_flag_after_copies(u32 flag) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(flag) : "memory");
}
__device__ inline void await_flag(u32 flag, int parity) {
    asm volatile("{ .reg .pred done; again%=: mbarrier.try_wait.parity.shared.b64 done, [%0], %1; "
                 "@!done bra again%=; }" ::"r"(flag), "r"(parity) : "memory");
}

__device__ inline bool is_raised(u32 flag, int parity) {
    u32 raised;
    asm volatile("{ .reg .pred done; mbarrier.test_wait.parity.shared.b64 done, [%1], %2; "
                 "selp.u32 %0, 1, 0, done; }" : "=r"(raised) : "r"(flag), "r"(parity) : "memory");
    return raised;
}
// Brings weights to the cache of all multiprocessors.
template <int BYTES> __device__ inline void ask_for(const void* from) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "n"(BYTES) : "memory");
}

// Loads of what other blocks have written in this kernel: the multiprocessor's own cache may be behind. So
// everything of that kind is loaded past it, here, by __ldcg, and by copies.
__device__ inline uint4 fresh_16(const void* from) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}

constexpr u32 INFINITY_BITS = 0x7f800000;
__device__ inline float nothing() { return -__int_as_float(INFINITY_BITS); }  // the score of what is not seen

// Four tiles of 8 by 8 numbers, as `multiply` wants them in the registers of a warp.
__device__ inline void load_fragments(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

__device__ inline void load_turned_fragments(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

// d [16, 8] += a [16, 16] b [16, 8]: weights are on the side of 16, rows on that of 8.
__device__ inline void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline u32 pack(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ inline float divide(float x, float y) {
    float r;
    asm("div.full.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
    return r;
}
__device__ inline float unpack(u16 bits) { return __uint_as_float((u32)bits << 16); }
