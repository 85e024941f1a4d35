// The instructions of the megakernel on the host, in place of source/persistent_instructions.cu: see emulated.h. Its
// copies arrive at once.

struct ushort2 { u16 x, y; };
inline ushort2 make_ushort2(u16 x, u16 y) { return {x, y}; }
inline float __uint_as_float(u32 bits) { return __int_as_float((int)bits); }

inline int thread() { return threadIdx.x; }
inline u32 cycles() { return 0; }
inline void sync() { now->numbered[1].wait(THREADS); }
inline u64* at_address(u32 mbarrier) { return (u64*)(raw + mbarrier); }
inline void init_mbarrier(u32 mbarrier, int count) { init_mbarrier(at_address(mbarrier), count); }
inline void arrive_mbarrier(u32 mbarrier) { arrive_mbarrier(at_address(mbarrier)); }
inline void arrive_after_copies(u32 mbarrier) { arrive_mbarrier(mbarrier); }
inline void wait_mbarrier(u32 mbarrier, int parity) { wait_mbarrier(at_address(mbarrier), parity); }
inline bool is_mbarrier_complete(u32 mbarrier, int parity) {
    leave_turn();
    return flag_of(at_address(mbarrier)).turn % 2 != parity;
}
template <int> inline void prefetch_to_l2(const void*) {}
inline uint4 load_cg_16(const void* from) { return *(const uint4*)from; }
inline u32 load_relaxed(const u32* counter) { return load_acquire(counter); }
inline float exp2_unflushed(float x) { return std::exp2(x); }
inline void copy_16(u32 to, const void* from) { memcpy(raw + to, from, 16); }
inline void copy_16_or_zero(u32 to, const void* from, bool there) {
    if (there) copy_16(to, from);
    else memset(raw + to, 0, 16);
}
inline void commit_copies() {}
template <int> inline void wait_copies() {}

struct Pass;
extern "C" void persistent_layers(const Pass*);
inline void run_persistent_layers(const Pass& pass) { persistent_layers(&pass); }
