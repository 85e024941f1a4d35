// Kernels of CUDA C++ on the host: what they ask of the language, and in place of source/instructions.cu what its
// instructions do. A thread is a context of its own; all threads of a program take turns, and wait for each other by
// leaving their turn. Programs run one after the other. Copies arrive at once or when a thread awaits their flag and not
// before, as `at_once` says; sums are those of float32.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __align__(bytes)
#define __launch_bounds__(...)

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
using std::max;
using std::min;
inline u32 max(u32 a, int b) { return a > (u32)b ? a : (u32)b; }

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
template <class T> inline T __ldcg(const T* from) { return *from; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __int_as_float(int bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// Threads and their turns.
struct Three { int x, y, z; } threadIdx, blockIdx, gridDim;
alignas(1024) char raw[SHARED_BYTES];
constexpr int STACK = 1 << 16;
static std::vector<ucontext_t> contexts;
static std::vector<char> ended;
static ucontext_t scheduler;

inline void leave_turn() {
    int own = threadIdx.x;
    swapcontext(&contexts[own], &scheduler);
    threadIdx.x = own;
}
struct Barrier {
    int count = 0, turn = 0;
    void wait(int threads) {
        int own = turn;
        if (++count == threads) count = 0, turn++;
        else while (turn == own) leave_turn();
    }
};
static Barrier of_all, of_four[16], of_warp[64];
inline int lane_number() { return threadIdx.x % 32; }
static u64 slots[64][2][32][8];  // what threads of a warp show each other, by turns
static int turns[64 * 32];
// Shows others what this thread has, and returns what all have.
inline u64 (*shown(const void* own, int bytes))[8] {
    int warp = threadIdx.x / 32, turn = turns[threadIdx.x]++ % 2;
    memcpy(slots[warp][turn][lane_number()], own, bytes);
    of_warp[warp].wait(32);
    return slots[warp][turn];
}
inline void __syncwarp() { of_warp[threadIdx.x / 32].wait(32); }
inline void __syncthreads() { of_all.wait(THREADS_OF_PROGRAM); }
template <class T> inline T __shfl_sync(u32, T x, int from) {
    T y;
    memcpy(&y, shown(&x, sizeof x)[from % 32], sizeof y);
    return y;
}
template <class T> inline T __shfl_xor_sync(u32 all, T x, int apart) { return __shfl_sync(all, x, lane_number() ^ apart); }
template <class Choose> inline int reduced(int x, const Choose& choose) {
    u64(*all)[8] = shown(&x, sizeof x);
    for (int i = 0; i < 32; i++) x = choose(x, (int)all[i][0]);
    return x;
}
inline int __reduce_max_sync(u32, int x) { return reduced(x, [](int a, int b) { return max(a, b); }); }
inline int __reduce_min_sync(u32, int x) { return reduced(x, [](int a, int b) { return min(a, b); }); }

// Instructions.
inline u32 shared_address(const void* at) { return (u32)((const char*)at - raw); }
struct Copy {
    u32 to;
    char bytes[16];
};
struct Flag {  // of which a number in shared memory tells nothing
    int count = 0, left = 0, bytes = 0, turn = 0;
    std::vector<Copy> on_their_way;
    void settle() {
        if (left || bytes) return;
        left = count, turn++;
    }
    void arrive() {
        for (const Copy& own : on_their_way) memcpy(raw + own.to, own.bytes, 16), bytes -= 16;
        on_their_way.clear();
    }
};
static std::map<u64*, Flag> flags;
static bool at_once = false;
inline void make_flag(u64* flag, int count) { flags[flag].count = flags[flag].left = count; }
inline void show_flags() {}
inline void expect_bytes(u64* flag, int bytes) {
    Flag& own = flags.at(flag);
    own.left--, own.bytes += bytes;
    own.settle();
}
inline void await_flag(u64* flag, int parity) {
    Flag& own = flags.at(flag);
    for (; own.turn % 2 == parity; leave_turn())
        if (!own.on_their_way.empty()) own.arrive(), own.settle();
}
struct Map {
    const u16* numbers;
    int columns, heads, lines;  // of a line; of a place; of a copy
};
// Lines of 128 bytes, swizzled in eights.
inline void copy_lines(void* to, const Map& map, int column, int head, int place, u64* flag) {
    Flag& own = flags.at(flag);
    for (int i = 0; i < map.lines * 8; i++) {
        u32 at = shared_address(to) + i * 16;
        Copy copy = {at ^ (at >> 3 & 0x70), {}};
        u64 line = (u64)(place + i / 8) * map.heads + head;
        memcpy(copy.bytes, map.numbers + line * map.columns + column + i % 8 * 8, 16);
        own.on_their_way.push_back(copy);
    }
    if (at_once) own.arrive(), own.settle();
}
inline void share_written() {}
void begin_program(), end_kernels_before();  // what others have written is seen when all threads have waited for it
static Barrier of_kernels;
static bool has_waited;
inline void await_kernels_before() {
    of_kernels.wait(THREADS_OF_PROGRAM);
    if (!has_waited) end_kernels_before();
    has_waited = true;
}
inline void let_next_kernel_start() {}
inline void await_four_warps(int number) { of_four[number].wait(128); }
inline u32 count_one(u32* counter) { return (*counter)++; }
inline float nothing() { return -std::numeric_limits<float>::infinity(); }
inline float unpack(u16 bits) { return __int_as_float((int)((u32)bits << 16)); }
inline u16 rounded_16(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline u32 pack(float low, float high) { return rounded_16(low) | (u32)rounded_16(high) << 16; }
inline float power_of_two(float x) { return std::exp2(x); }
inline float inverse(float x) { return 1.0f / x; }
inline float divide(float x, float y) { return x / y; }

inline u16 half_of(u32 two, int which) { return (u16)(two >> 16 * which); }
inline u16 shared_16(u32 at) {
    u16 x;
    memcpy(&x, raw + at, 2);
    return x;
}
// Four tiles of 8 by 8 numbers; lines of tile m are where threads 8 m to 8 m + 7 say.
inline void load_tiles(u32 (&r)[4], u32 at, bool turned) {
    u64(*all)[8] = shown(&at, sizeof at);
    int g = lane_number() / 4, pair = lane_number() % 4 * 2;
    for (int m = 0; m < 4; m++) {
        u32 two = 0;
        for (int i = 0; i < 2; i++) {
            int line = turned ? pair + i : g, column = turned ? g : pair + i;
            two |= (u32)shared_16((u32)all[m * 8 + line][0] + column * 2) << 16 * i;
        }
        r[m] = two;
    }
}
inline void load_fragments(u32 (&r)[4], u32 at) { load_tiles(r, at, false); }
inline void load_turned_fragments(u32 (&r)[4], u32 at) { load_tiles(r, at, true); }
inline void store_turned_fragments(u32 to, const u32 (&r)[4]) {
    u64(*all)[8] = shown(&to, sizeof to);
    int g = lane_number() / 4, pair = lane_number() % 4 * 2;
    for (int m = 0; m < 4; m++)
        for (int i = 0; i < 2; i++) {
            u16 x = half_of(r[m], i);
            memcpy(raw + (u32)all[m * 8 + pair + i][0] + g * 2, &x, 2);
        }
}
// d [16, 8] += a [16, 16] b [16, 8]
inline void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    u32 own[6] = {a[0], a[1], a[2], a[3], b0, b1};
    u64(*all)[8] = shown(own, sizeof own);
    auto number = [&](int thread, int which, int half) {
        u32 words[6];
        memcpy(words, all[thread], sizeof words);
        return unpack(half_of(words[which], half));
    };
    int g = lane_number() / 4, pair = lane_number() % 4 * 2;
    for (int i = 0; i < 4; i++) {
        int line = g + i / 2 * 8, column = pair + i % 2;
        for (int k = 0; k < 16; k++)
            d[i] += number(line % 8 * 4 + k % 8 / 2, line / 8 + k / 8 * 2, k % 2) *
                    number(column * 4 + k % 8 / 2, 4 + k / 8, k % 2);
    }
}
// Products of the matrix unit, whose operands lie in lines of 128 bytes, swizzled in eights.
inline u64 described(const void* at) { return shared_address(at) >> 4; }
inline void begin_multiplying() {}
inline void end_multiplying() {}
template <int> inline void await_multiplying() {}
inline float at_swizzled(u32 at) { return unpack(shared_16(at ^ (at >> 3 & 0x70))); }
template <int N> inline void multiply_64(float (&d)[N], u64 left, u64 right, int adds, bool turned) {
    int first = threadIdx.x % 128 / 32 * 16 + lane_number() / 4, pair = lane_number() % 4 * 2;
    for (int i = 0; i < N; i++) {
        int m = first + i / 2 % 2 * 8, n = i / 4 * 8 + pair + i % 2;
        float sum = adds ? d[i] : 0.0f;
        for (int k = 0; k < 16; k++)
            sum += at_swizzled((u32)(left << 4) + (turned ? k * 128 + m * 2 : m * 128 + k * 2)) *
                   at_swizzled((u32)(right << 4) + n * 128 + k * 2);
        d[i] = sum;
    }
}
template <int N> inline void multiply(float (&d)[N], u64 left, u64 right, int adds) {
    multiply_64(d, left, right, adds, false);
}
template <int N> inline void multiply_turned(float (&d)[N], u64 left, u64 right, int adds) {
    multiply_64(d, left, right, adds, true);
}

// Runs a program for each of a grid.
template <class Kernel> inline void run_grid(Three grid, const Kernel& kernel) {
    static const Kernel* work;
    work = &kernel;
    gridDim = grid;
    std::vector<char> stacks((size_t)THREADS_OF_PROGRAM * STACK);
    for (int z = grid.z - 1; z >= 0; z--)
        for (int y = 0; y < grid.y; y++)
            for (int x = 0; x < grid.x; x++) {
                blockIdx = {x, y, z}, has_waited = false;
                begin_program();
                memset(raw, 0xff, sizeof raw);  // no number
                contexts.assign(THREADS_OF_PROGRAM, ucontext_t());
                ended.assign(THREADS_OF_PROGRAM, 0);
                flags.clear();
                for (int i = 0; i < THREADS_OF_PROGRAM; i++) {
                    getcontext(&contexts[i]);
                    contexts[i].uc_stack.ss_sp = &stacks[(size_t)i * STACK];
                    contexts[i].uc_stack.ss_size = STACK;
                    contexts[i].uc_link = &scheduler;
                    makecontext(&contexts[i], (void (*)())+[]() {
                        int own = threadIdx.x;
                        (*work)();
                        threadIdx.x = own, ended[own] = 1;
                    }, 0);
                }
                for (int left = THREADS_OF_PROGRAM; left;) {
                    left = 0;
                    for (int i = 0; i < THREADS_OF_PROGRAM; i++)
                        if (!ended[i]) threadIdx.x = i, swapcontext(&scheduler, &contexts[i]), left += !ended[i];
                }
            }
}
