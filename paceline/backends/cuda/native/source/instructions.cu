// PTX instructions of all kernels here. Python concatenates the files of a kernel to one source, after definitions of
// the constants that it is compiled for.
//
// bfloat16 numbers are u16: only instructions compute with them, not C++. Sums and products are spelled __fadd_rn and
// __fmul_rn, so that the compiler fuses nothing: the bits must be those of ../kernels.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

__device__ inline u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

__device__ inline void copy_16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ inline void copy_16_or_zero(u32 to, const void* from, bool there) {
    int bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most GROUPS committed groups of this thread are in flight.
template <int GROUPS> __device__ inline void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

struct __align__(64) Map {  // a TMA descriptor
    u64 words[16];
};

// mbarriers complete a phase when `count` threads have arrived and all expected bytes have come.
__device__ inline void init_mbarrier(u64* mbarrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(mbarrier)), "r"(count) : "memory");
}
__device__ inline void arrive_mbarrier(u64* mbarrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(mbarrier)) : "memory");
}
__device__ inline void expect_bytes(u64* mbarrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(mbarrier)), "r"(bytes)
                 : "memory");
}
__device__ inline void wait_mbarrier(u64* mbarrier, int parity) {
    asm volatile("{ .reg .pred done; again%=: mbarrier.try_wait.parity.shared.b64 done, [%0], %1; "
                 "@!done bra again%=; }" ::"r"(shared_address(mbarrier)), "r"(parity) : "memory");
}
// Makes new mbarriers visible to other programs and to TMA.
__device__ inline void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// TMA copy of lines of 64 columns of a head, from a KV slot on.
__device__ inline void copy_kv_lines(void* to, const Map& map, int column, int head, int kv_slot, u64* mbarrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(to)), "l"(&map), "r"(column), "r"(head),
                 "r"(kv_slot), "r"(shared_address(mbarrier)) : "memory");
}

// Weights are stored as [tile and step, group of lines, half, 8 lines, 128 of the depth]: see weight_pipeline.py. They
// are evicted from L2 first, since they are not read again before all other weights.
constexpr u64 EVICT_FIRST = 0x12f0000000000000;
__device__ inline void copy_weights(void* to, const Map& map, int deep, int group, int block, u64* mbarrier) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, 0, 0, %3, %4}], [%5], %6;" ::"r"(shared_address(to)), "l"(&map), "r"(deep),
                 "r"(group), "r"(block), "r"(shared_address(mbarrier)), "l"(EVICT_FIRST) : "memory");
}
__device__ inline void copy_rows(void* to, const Map& map, int deep, u64* mbarrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, 0}], [%3];" ::"r"(shared_address(to)), "l"(&map), "r"(deep),
                 "r"(shared_address(mbarrier)) : "memory");
}

// Lines of 64 of the depth, of as many rows as the map's box has.
__device__ inline void copy_row_box(void* to, const Map& map, int deep, int row, u64* mbarrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(to)), "l"(&map), "r"(deep), "r"(row),
                 "r"(shared_address(mbarrier)) : "memory");
}
// The same of all columns of some tiles, [tile, step, column, 128 of the depth], from a tile on.
__device__ inline void copy_tile_box(void* to, const Map& map, int deep, int step, int tile, u64* mbarrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, 0, %3, %4}], [%5];" ::"r"(shared_address(to)), "l"(&map), "r"(deep), "r"(step),
                 "r"(tile), "r"(shared_address(mbarrier)) : "memory");
}
// The same to both programs of a cluster, at the same address; the mbarrier of each is told (TMA multicast).
__device__ inline void copy_tile_box_to_both(void* to, const Map& map, int deep, int step, int tile, u64* mbarrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, 0, %3, %4}], [%5], %6;" ::"r"(shared_address(to)), "l"(&map), "r"(deep), "r"(step),
                 "r"(tile), "r"(shared_address(mbarrier)), "h"((u16)3) : "memory");
}
// Half of a tile of gate and up, of each 16 columns: [block of tile and step, gate or up, half, 16 columns, depth].
__device__ inline void copy_half_tile(void* to, const Map& map, int deep, int half, int block, u64* mbarrier) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, 0, %3, 0, %4}], [%5];" ::"r"(shared_address(to)), "l"(&map), "r"(deep), "r"(half),
                 "r"(block), "r"(shared_address(mbarrier)) : "memory");
}
__device__ inline void copy_half_tile_to_both(void* to, const Map& map, int deep, int half, int block, u64* mbarrier) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, 0, %3, 0, %4}], [%5], %6;" ::"r"(shared_address(to)), "l"(&map), "r"(deep), "r"(half),
                 "r"(block), "r"(shared_address(mbarrier)), "h"((u16)3) : "memory");
}
__device__ inline void copy_bytes(void* to, const void* from, int bytes, u64* mbarrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
                 "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(mbarrier)) : "memory");
}

// Makes this thread's writes to shared memory visible to WGMMA and TMA.
__device__ inline void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ inline void wait_dependencies() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
// Named barriers of a warpgroup.
__device__ inline void sync_warpgroup(int number) { asm volatile("bar.sync %0, 128;" ::"r"(number) : "memory"); }
template <int NUMBER, int THREADS> __device__ inline void sync_named_barrier() {
    asm volatile("bar.sync %0, %1;" ::"n"(NUMBER), "n"(THREADS) : "memory");
}
// Makes writes to global memory visible to TMA.
__device__ inline void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// Adds one with release semantics: earlier writes are visible to a load_acquire that sees it.
__device__ inline void add_release(u32* counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ inline u32 load_acquire(const u32* counter) {
    u32 seen;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    return seen;
}
// Gives registers of a warpgroup back, for others to take.
template <int COUNT> __device__ inline void decrease_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ inline void increase_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Barrier of all threads of both programs of the cluster.
__device__ inline void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The distributed shared-memory address of `here` in a program of the cluster.
__device__ inline u32 cluster_address(const void* here, int number) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(here)), "r"(number));
    return there;
}
// Arrives at an mbarrier of a program of the cluster. Not as a release of the cluster, which would wait for all stores
// of this thread to global memory: what is told is that a stage was read.
__device__ inline void arrive_at(u32 mbarrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mbarrier) : "memory");
}
// The barrier of a cluster, without waiting for stores.
__device__ inline void meet_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
__device__ inline void store_async(u32 to, float a, float b, float c, float d, u32 mbarrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
                 "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d), "r"(mbarrier) : "memory");
}
__device__ inline float4 received(const float* at) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(shared_address(at)) : "memory");
    return v;
}

// True in one thread of a warp, all of whose threads are here. The compiler then knows that what this thread issues has
// one set of operands: under a condition on threadIdx it loops over threads.
__device__ inline bool is_elected() {
    u32 yes;
    asm volatile("{ .reg .pred own; elect.sync _|own, 0xffffffff; selp.u32 %0, 1, 0, own; }" : "=r"(yes)::"memory");
    return yes;
}

// Adds one; returns the value before.
__device__ inline u32 add_acq_rel(u32* counter) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

constexpr u32 INFINITY_BITS = 0x7f800000;
// the score of invisible positions
__device__ inline float negative_infinity() { return -__int_as_float(INFINITY_BITS); }

// Four 8 by 8 tiles in the register layout of `multiply`.
__device__ inline void load_fragments(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

__device__ inline void load_fragments_transposed(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

__device__ inline void store_fragments_transposed(u32 to, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3]) : "memory");
}

// d [16, 8] += a [16, 16] b [16, 8]: weights are the 16-row operand, rows the 8-column one.
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
// The lowest 4 bits of both halves, less 8, as bfloat16: they become the lowest mantissa bits of 128.
__device__ inline u32 int4_numbers(u32 words) {
    u32 r;  // (words & 0xf of both halves) | 128, as one instruction
    asm("{ .reg .b32 both; lop3.b32 both, %1, %2, %3, 0xEA; fma.rn.bf16x2 %0, both, %4, %5; }"
        : "=r"(r) : "r"(words), "r"(0x000f000f), "r"(0x43004300), "r"(0x3f803f80), "r"(0xc308c308));
    return r;
}
// The float16 in the lower half.
__device__ inline float half_to_float(u32 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)bits));
    return x;
}
// Two e4m3 numbers.
__device__ inline u16 pack_fp8(float low, float high) {
    u16 r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    return r;
}
__device__ inline float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float inverse(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float inverse_root(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float divide(float x, float y) {
    float r;
    asm("div.full.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
    return r;
}
__device__ inline float unpack(u16 bits) { return __uint_as_float((u32)bits << 16); }

// The WGMMA descriptor of lines of 128 bytes in the 128-byte swizzle.
__device__ inline u64 smem_descriptor(const void* at) {
    return (u64)((shared_address(at) & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
