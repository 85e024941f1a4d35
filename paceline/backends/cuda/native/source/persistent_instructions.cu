// PTX instructions of the megakernel: synchronization of its threads, and loads.

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
// A grid barrier's counter. Not by ld.acquire, which invalidates L1 at every try.
__device__ inline u32 load_relaxed(const u32* counter) {
    u32 seen;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    return seen;
}
// Two to the power of x, as Triton has it: results below the normal numbers are not flushed to zero.
__device__ inline float exp2_unflushed(float x) {
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
