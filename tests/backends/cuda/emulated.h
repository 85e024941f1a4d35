// Kernels of CUDA C++ on the host: what they ask of the language, and in place of source/instructions.cu what its
// instructions do. A thread is a context of its own; all threads of a program take turns, and wait for each other by
// leaving their turn. Programs run one after the other, or by turns if they wait for each other. Copies arrive at once
// or when a thread awaits their flag and not before, as `at_once` says; sums are those of float32.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <setjmp.h>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
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
template <class T> inline void __stcg(T* to, T x) { *to = x; }
inline u32 atomicAdd(u32* to, u32 x) { return (*to += x) - x; }
inline int __ffs(u32 x) { return __builtin_ffs(x); }
inline void __trap() { abort(); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline u32 __byte_perm(u32 x, u32 y, u32 which) {
    u64 bytes = (u64)y << 32 | x;
    u32 chosen = 0;
    for (int i = 0; i < 4; i++) chosen |= (u32)(bytes >> (which >> 4 * i & 7) * 8 & 255) << 8 * i;
    return chosen;
}
inline float __int_as_float(int bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline int __float_as_int(float x) {
    int bits;
    memcpy(&bits, &x, 4);
    return bits;
}

// Threads and their turns.
struct Three { int x, y, z; } threadIdx, blockIdx, gridDim;
alignas(1024) char raw[SHARED_BYTES];  // of the program whose turn it is
constexpr int STACK = 1 << 16, WARPS_OF_PROGRAM = THREADS_OF_PROGRAM / 32;
static jmp_buf in_scheduler;

struct Copy {
    u32 to;
    char bytes[16];
};
// What a thread waits for: until `turn` changes, or copies are on their way to it, a turn would change nothing.
struct Wait {
    const int* turn = nullptr;
    int value = 0;
    const std::vector<Copy>* copies = nullptr;
    bool goes_on() const { return turn && *turn == value && (!copies || copies->empty()); }
};
void leave_turn(Wait wait = {});
struct Barrier {
    int count = 0, turn = 0;
    void wait(int threads) {
        int own = turn;
        if (++count == threads) count = 0, turn++;
        else while (turn == own) leave_turn({&turn, own});
    }
};
struct Flag {  // of which a number in shared memory tells nothing
    int count = 0, left = 0, bytes = 0, turn = 0;
    std::vector<Copy> on_their_way;
    void settle() {
        if (left || bytes) return;
        left = count, turn++;
    }
    void arrive(char* shared) {
        for (const Copy& own : on_their_way) memcpy(shared + own.to, own.bytes, 16), bytes -= 16;
        on_their_way.clear();
    }
};
struct Program {
    Three block;
    std::vector<char> shared, ended;
    std::vector<ucontext_t> contexts;
    std::unique_ptr<jmp_buf[]> places;  // where threads are that have begun
    std::vector<char> begun;
    std::unique_ptr<char[]> stacks;
    Barrier of_all, of_kernels, numbered[16], of_warp[WARPS_OF_PROGRAM];
    u64 slots[WARPS_OF_PROGRAM][2][32][8];  // what threads of a warp show each other, by turns
    int turns[THREADS_OF_PROGRAM] = {}, multiplied[THREADS_OF_PROGRAM] = {}, commits = 0;
    Wait waits[THREADS_OF_PROGRAM];
    std::map<u32, Flag> flags;
    bool has_waited = false;
};
static std::vector<Program> programs;
static Program* now;  // whose turn it is
inline void leave_turn(Wait wait) {
    int own = threadIdx.x;
    now->waits[own] = wait;
    if (!_setjmp(now->places[own])) _longjmp(in_scheduler, 1);  // a context would ask the system each time
    threadIdx.x = own;
}
inline int lane_number() { return threadIdx.x % 32; }
// Shows others what this thread has, and returns what all have.
inline u64 (*shown(const void* own, int bytes))[8] {
    int warp = threadIdx.x / 32, turn = now->turns[threadIdx.x]++ % 2;
    memcpy(now->slots[warp][turn][lane_number()], own, bytes);
    now->of_warp[warp].wait(32);
    return now->slots[warp][turn];
}
inline void __syncwarp() { now->of_warp[threadIdx.x / 32].wait(32); }
inline void __syncthreads() { now->of_all.wait(THREADS_OF_PROGRAM); }
template <class T> inline T __shfl_sync(u32, T x, int from) {
    T y;
    memcpy(&y, shown(&x, sizeof x)[from % 32], sizeof y);
    return y;
}
template <class T> inline T __shfl_xor_sync(u32 all, T x, int apart) {
    return __shfl_sync(all, x, lane_number() ^ apart);
}
template <class Choose> inline int reduced(int x, const Choose& choose) {
    u64(*all)[8] = shown(&x, sizeof x);
    for (int i = 0; i < 32; i++) x = choose(x, (int)all[i][0]);
    return x;
}
inline u32 __ballot_sync(u32, bool x) {
    u64(*all)[8] = shown(&x, sizeof x);
    u32 bits = 0;
    for (int i = 0; i < 32; i++) bits |= (u32)(*(bool*)all[i]) << i;
    return bits;
}
inline int __reduce_max_sync(u32, int x) { return reduced(x, [](int a, int b) { return max(a, b); }); }
inline int __reduce_min_sync(u32, int x) { return reduced(x, [](int a, int b) { return min(a, b); }); }

// Instructions.
inline u32 shared_address(const void* at) { return (u32)((const char*)at - raw); }
static bool at_once = false;
inline Flag& flag_of(u64* mbarrier) { return now->flags.at(shared_address(mbarrier)); }
inline void init_mbarrier(u64* mbarrier, int count) {
    Flag& own = now->flags[shared_address(mbarrier)];
    own.count = own.left = count;
}
inline void fence_mbarrier_init() {}
inline void expect_bytes(u64* mbarrier, int bytes) {
    Flag& own = flag_of(mbarrier);
    own.left--, own.bytes += bytes;
    own.settle();
}
inline void arrive_mbarrier(u64* mbarrier) { expect_bytes(mbarrier, 0); }
inline void wait_mbarrier(u64* mbarrier, int parity) {
    Flag& own = flag_of(mbarrier);
    for (int turn = own.turn; turn % 2 == parity; turn = own.turn) {
        if (!own.on_their_way.empty()) own.arrive(raw), own.settle();
        leave_turn({&own.turn, turn, &own.on_their_way});
    }
}
struct __align__(64) Map {  // as long as that of the driver
    u16* numbers;
    int rank, sizes[5], box[5];
    long strides[4];  // in numbers, of all dimensions but the first
    char rest[128 - 88];
};
// A box of a tensor as lines of 128 bytes, swizzled in eights; what lies beyond it is zero.
inline void copy_box(void* to, const Map& map, const int (&from)[5], u64* mbarrier, Program& program = *now) {
    Flag& own = program.flags.at(shared_address(mbarrier));
    int boxes = 1, each = 8;  // 16 bytes each
    for (int d = 1; d < map.rank; d++) boxes *= map.box[d];
    for (int i = 0; i < boxes * each; i++) {
        u32 at = shared_address(to) + i * 16;
        Copy copy = {at ^ (at >> 3 & 0x70), {}};
        long number = from[0] + i % each * 8;
        bool there = number < map.sizes[0];
        for (int d = 1, left = i / each; d < map.rank; left /= map.box[d], d++) {
            int own = from[d] + left % map.box[d];
            there &= own < map.sizes[d], number += own * map.strides[d - 1];
        }
        if (there) memcpy(copy.bytes, map.numbers + number, 16);
        own.on_their_way.push_back(copy);
    }
    if (at_once) own.arrive(&program == now ? raw : program.shared.data()), own.settle();
}
inline void copy_kv_lines(void* to, const Map& map, int column, int head, int kv_slot, u64* mbarrier) {
    copy_box(to, map, {column, head, kv_slot}, mbarrier);
}
inline void copy_weights(void* to, const Map& map, int deep, int group, int block, u64* mbarrier) {
    copy_box(to, map, {deep, 0, 0, group, block}, mbarrier);
}
inline void copy_rows(void* to, const Map& map, int deep, u64* mbarrier) { copy_box(to, map, {deep, 0}, mbarrier); }
inline void copy_row_box(void* to, const Map& map, int deep, int row, u64* mbarrier) {
    copy_box(to, map, {deep, row}, mbarrier);
}
inline void copy_tile_box(void* to, const Map& map, int deep, int step, int tile, u64* mbarrier) {
    copy_box(to, map, {deep, 0, step, tile}, mbarrier);
}
inline void copy_half_tile(void* to, const Map& map, int deep, int half, int block, u64* mbarrier) {
    copy_box(to, map, {deep, 0, half, 0, block}, mbarrier);
}
inline bool is_elected() {
    __syncwarp();
    return lane_number() == 0;
}
inline void copy_bytes(void* to, const void* from, int bytes, u64* mbarrier) {
    Flag& own = flag_of(mbarrier);
    for (int i = 0; i < bytes; i += 16) {
        Copy copy = {shared_address(to) + i, {}};
        memcpy(copy.bytes, (const char*)from + i, 16);
        own.on_their_way.push_back(copy);
    }
    if (at_once) own.arrive(raw), own.settle();
}
inline void fence_async_shared() {}
void begin_program(), end_kernels_before();  // what others have written is seen when all threads have waited for it
#ifndef WAITING_THREADS
#define WAITING_THREADS THREADS_OF_PROGRAM
#endif
inline void wait_dependencies() {
    if (now->has_waited) return;
    now->of_kernels.wait(WAITING_THREADS);
    if (!now->has_waited) end_kernels_before();
    now->has_waited = true;
}
inline void launch_dependents() {}
inline void sync_warpgroup(int number) { now->numbered[number].wait(128); }
template <int NUMBER, int THREADS> inline void sync_named_barrier() { now->numbered[NUMBER].wait(THREADS); }
inline void fence_async_global() {}
inline void add_release(u32* counter) { ++*counter; }
inline u32 load_acquire(const u32* counter) {
    leave_turn();  // who asks again and again lets others work
    return *counter;
}
template <int> inline void decrease_registers() {}
template <int> inline void increase_registers() {}
// Programs of a cluster of two: places have the program's number in front.
static std::map<int, Barrier> of_clusters;
inline void sync_cluster() { of_clusters[blockIdx.x / 2].wait(2 * THREADS_OF_PROGRAM); }
inline u32 cluster_address(const void* here, int number) { return (u32)number << 24 | shared_address(here); }
inline void store_async(u32 to, float a, float b, float c, float d, u32 mbarrier) {
    Program& other = programs[blockIdx.x / 2 * 2 + (to >> 24)];
    Flag& own = other.flags.at(mbarrier & 0xffffff);
    float numbers[4] = {a, b, c, d};
    Copy copy = {to & 0xffffff, {}};
    memcpy(copy.bytes, numbers, 16);
    own.on_their_way.push_back(copy);
    if (at_once) own.arrive(other.shared.data()), own.settle();
}
inline void copy_box_to_both(void* to, const Map& map, const int (&from)[5], u64* mbarrier) {
    for (int i = 0; i < 2; i++) copy_box(to, map, from, mbarrier, programs[blockIdx.x / 2 * 2 + i]);
}
inline void copy_tile_box_to_both(void* to, const Map& map, int deep, int step, int tile, u64* mbarrier) {
    copy_box_to_both(to, map, {deep, 0, step, tile}, mbarrier);
}
inline void copy_half_tile_to_both(void* to, const Map& map, int deep, int half, int block, u64* mbarrier) {
    copy_box_to_both(to, map, {deep, 0, half, 0, block}, mbarrier);
}
inline void arrive_at(u32 mbarrier) {
    Flag& own = programs[blockIdx.x / 2 * 2 + (mbarrier >> 24)].flags.at(mbarrier & 0xffffff);
    own.left--, own.settle();
}
inline void meet_cluster() { sync_cluster(); }
inline float4 received(const float* at) { return *(const float4*)at; }
inline u32 add_acq_rel(u32* counter) { return (*counter)++; }
inline float negative_infinity() { return -std::numeric_limits<float>::infinity(); }
inline float unpack(u16 bits) { return __int_as_float((int)((u32)bits << 16)); }
inline u16 rounded_16(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline u32 pack(float low, float high) { return rounded_16(low) | (u32)rounded_16(high) << 16; }
// An e4m3 number as a float, and the nearest to a float: ties to even.
inline float unpack_fp8(unsigned char bits) {
    int exponent = bits >> 3 & 15, mantissa = bits & 7;
    float x = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp((float)mantissa, -9);
    return bits & 128 ? -x : x;
}
inline unsigned char rounded_8(float x) {
    float size = std::min(std::fabs(x), 448.0f);
    int exponent = std::max(size ? std::ilogb(size) : -6, -6);
    int units = (int)std::nearbyint(std::ldexp(size, 3 - exponent));  // 8 to 16, or fewer below the least exponent
    return (std::signbit(x) ? 128 : 0) | (units + (exponent + 6) * 8);
}
inline u32 int4_numbers(u32 words) {
    u32 both = words & 0x000f000f | 0x43004300;
    return pack(unpack((u16)both) - 136.0f, unpack((u16)(both >> 16)) - 136.0f);
}
inline float half_to_float(u32 bits) {
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float x = exponent ? std::ldexp(1024.0f + mantissa, exponent - 25) : std::ldexp((float)mantissa, -24);
    return bits & 0x8000 ? -x : x;
}
inline u16 pack_fp8(float low, float high) { return rounded_8(low) | rounded_8(high) << 8; }
inline float power_of_two(float x) { return std::exp2(x); }
inline float inverse(float x) { return 1.0f / x; }
inline float inverse_root(float x) { return 1.0f / std::sqrt(x); }
inline float divide(float x, float y) { return x / y; }

inline u16 half_of(u32 two, int which) { return (u16)(two >> 16 * which); }
inline u16 shared_16(u32 at) {
    u16 x;
    memcpy(&x, raw + at, 2);
    return x;
}
// Four tiles of 8 by 8 numbers; lines of tile m are where threads 8 m to 8 m + 7 say.
inline void load_tiles(u32 (&r)[4], u32 at, bool rotated) {
    u64(*all)[8] = shown(&at, sizeof at);
    int g = lane_number() / 4, pair = lane_number() % 4 * 2;
    for (int m = 0; m < 4; m++) {
        u32 two = 0;
        for (int i = 0; i < 2; i++) {
            int line = rotated ? pair + i : g, column = rotated ? g : pair + i;
            two |= (u32)shared_16((u32)all[m * 8 + line][0] + column * 2) << 16 * i;
        }
        r[m] = two;
    }
}
inline void load_fragments(u32 (&r)[4], u32 at) { load_tiles(r, at, false); }
inline void load_fragments_transposed(u32 (&r)[4], u32 at) { load_tiles(r, at, true); }
inline void store_fragments_transposed(u32 to, const u32 (&r)[4]) {
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
inline u64 smem_descriptor(const void* at) { return shared_address(at) >> 4; }
inline void wgmma_fence() {}
inline void wgmma_commit() { now->multiplied[threadIdx.x]++, now->commits++; }
// A product has ended when it has for all four warps.
template <int LEFT> inline void wgmma_wait() {
    int *four = now->multiplied + threadIdx.x / 128 * 128, ended = now->multiplied[threadIdx.x] - LEFT;
    while (*std::min_element(four, four + 128) < ended) leave_turn({&now->commits, now->commits});
}
inline float at_swizzled(u32 at) { return unpack(shared_16(at ^ (at >> 3 & 0x70))); }
inline float fp8_at_swizzled(u32 at) { return unpack_fp8(raw[at ^ (at >> 3 & 0x70)]); }
#ifndef E4M3
#define E4M3 0
#endif
template <int N> inline void multiply_64(float (&d)[N], u64 left, u64 right, int adds, bool rotated) {
    int first = threadIdx.x % 128 / 32 * 16 + lane_number() / 4, pair = lane_number() % 4 * 2;
    for (int i = 0; i < N; i++) {
        int m = first + i / 2 % 2 * 8, n = i / 4 * 8 + pair + i % 2;
        float sum = adds ? d[i] : 0.0f;
        for (int k = 0; k < 16 && !E4M3; k++)
            sum += at_swizzled((u32)(left << 4) + (rotated ? k * 128 + m * 2 : m * 128 + k * 2)) *
                   at_swizzled((u32)(right << 4) + n * 128 + k * 2);
        for (int k = 0; k < 32 && E4M3; k++)
            sum += fp8_at_swizzled((u32)(left << 4) + m * 128 + k) *
                   fp8_at_swizzled((u32)(right << 4) + n * 128 + k);
        d[i] = sum;
    }
}
template <int N> inline void multiply(float (&d)[N], u64 left, u64 right, int adds) {
    multiply_64(d, left, right, adds, false);
}
// The left operand is in registers: a warp has 16 lines, as for the product of 16 by 8.
template <int N>
inline void multiply_16_lines(float (&d)[N], const u32 (&a)[4], u64 right, int adds, bool rotated) {
    u64(*all)[8] = shown(a, sizeof a);
    int g = lane_number() / 4, pair = lane_number() % 4 * 2;
    for (int i = 0; i < N; i++) {
        int line = g + i / 2 % 2 * 8, n = i / 4 * 8 + pair + i % 2;
        float sum = adds ? d[i] : 0.0f;
        for (int k = 0; k < 16; k++) {
            u32 words[4];
            memcpy(words, all[line % 8 * 4 + k % 8 / 2], sizeof words);
            sum += unpack(half_of(words[line / 8 + k / 8 * 2], k % 2)) *
                   at_swizzled((u32)(right << 4) + (rotated ? k * 128 + n * 2 : n * 128 + k * 2));
        }
        d[i] = sum;
    }
}
template <int N> inline void multiply_from_registers(float (&d)[N], const u32 (&a)[4], u64 right, int adds) {
    multiply_16_lines(d, a, right, adds, false);
}
template <int N> inline void multiply_weights(float (&d)[N], const u32 (&a)[4], u64 right, int adds) {
    multiply_16_lines(d, a, right, adds, true);
}
template <int N> inline void multiply_transposed(float (&d)[N], u64 left, u64 right, int adds) {
    multiply_64(d, left, right, adds, true);
}

static void (*work)();
static void begin_thread() {
    int own = threadIdx.x;
    work();
    threadIdx.x = own, now->ended[own] = 1;
    _longjmp(in_scheduler, 1);
}
static void give_turn(int thread) {
    threadIdx.x = thread;
    if (_setjmp(in_scheduler)) return;
    if (now->begun[thread]) _longjmp(now->places[thread], 1);
    now->begun[thread] = 1;
    setcontext(&now->contexts[thread]);
}
static void begin(Program& own, Three block) {
    own.block = block;
    own.shared.assign(SHARED_BYTES, (char)0xff);  // no number
    own.ended.assign(THREADS_OF_PROGRAM, 0), own.begun.assign(THREADS_OF_PROGRAM, 0);
    own.places.reset(new jmp_buf[THREADS_OF_PROGRAM]);
    own.contexts.resize(THREADS_OF_PROGRAM);
    own.stacks.reset(new char[(size_t)THREADS_OF_PROGRAM * STACK]);
    for (int i = 0; i < THREADS_OF_PROGRAM; i++) {
        ucontext_t& context = own.contexts[i];
        getcontext(&context);
        context.uc_stack.ss_sp = &own.stacks[(size_t)i * STACK];
        context.uc_stack.ss_size = STACK;
        context.uc_link = nullptr;
        makecontext(&context, begin_thread, 0);
    }
}
// Where programs wait for each other, warps miss turns for a while, each at its own time, and one program often more
// than all others: by `seed`.
static int seed = 0;
static bool rests(int round, int program, int warp) {
    u32 x = (round >> 4 + seed % 3) * 2654435761u + program * 40503u + warp * 2246822519u + seed * 3266489917u;
    x = (x ^ x >> 15) * 2246822519u;
    bool is_slow = seed % 2 == 0 && program == (2 + 3 * seed) % 8;
    return (x >> 16) % 3 == 0 || (is_slow && round % 8);
}
// Turns of all threads of these programs until all have ended; false if they never do.
constexpr int MOST_ROUNDS = 50000;  // ten times what any takes
static bool run_programs() {
    int left = 1;
    for (int round = 0; left && round < MOST_ROUNDS; round++) {
        left = 0;
        for (Program& own : programs) {
            bool is_here = programs.size() == 1 && round;  // its shared memory
            now = &own, blockIdx = own.block;
            for (int i = 0; i < THREADS_OF_PROGRAM; i++) {
                if (own.ended[i]) continue;
                bool turn = programs.size() == 1 || !rests(round, blockIdx.x, i / 32);
                if (turn && !own.waits[i].goes_on()) {
                    if (!is_here) memcpy(raw, own.shared.data(), SHARED_BYTES);
                    is_here = true;
                    give_turn(i);
                }
                left += !own.ended[i];
            }
            if (is_here && programs.size() > 1) memcpy(own.shared.data(), raw, SHARED_BYTES);
        }
    }
    return !left;
}
// Runs a program for each of a grid: one after the other, or all of a line by turns.
static bool run_grid(Three grid, void (*kernel)(), bool by_turns = false) {
    work = kernel, gridDim = grid;
    if (by_turns) {
        programs = std::vector<Program>(grid.x);
        of_clusters.clear();
        for (int x = 0; x < grid.x; x++) begin(programs[x], {x, 0, 0});
        return run_programs();
    }
    for (int z = grid.z - 1; z >= 0; z--)
        for (int y = 0; y < grid.y; y++)
            for (int x = 0; x < grid.x; x++) {
                programs = std::vector<Program>(1);
                begin(programs[0], {x, y, z});
                begin_program();
                if (!run_programs()) return false;
            }
    return true;
}
