// Attention of chains and trees that all have as many rows: what ../kernels/attention.py does for any rows, and its
// bits. A program has one or two tiles of rows of a request, the lanes of which share a key head, and blocks of 64
// positions. What was there before the step is on its way to shared memory before kernels ahead have ended.
//
// Four warps score a block while eight weigh the scores of the one before, and four for each 64 columns mix the values
// of the one before that. Keys and values are on the side of 64 of products, lanes on the other.
//
// Keys lie in windows of 64 KV indices, one for each block of positions. Where paths part, a row's positions lie at
// indices of its own, of the block's window or the next: each row picks its scores, and its values, there.
//
// Stretches of blocks are merged in memory by who comes last, if there are several. Some may be there already.
//
// The files are one source, put together in the order instructions, softmax, attend. attend.py defines ahead of them
// HEADS, KV_HEADS, DIM, PAGE, HEIGHT (rows of a tile), TOGETHER (tiles), STAGES (windows on their way or at hand),
// CROOKS (whether paths may part), SCALE_BITS, SHARED_BYTES, and `multiply` and `multiply_turned` for these lanes.

constexpr int BLOCK = 64, MERGED = 8, MOST_PATH = 64;
enum { SCORES, WEIGHS, MIXES };
constexpr int FOUR_WARPS = 128, FIRST_TO_WEIGH = FOUR_WARPS, FIRST_TO_MIX = 3 * FOUR_WARPS;
constexpr int PARTS = DIM / 64;  // of lines: 64 numbers, 128 bytes, are as much as the matrix unit takes of a line
constexpr int THREADS = FIRST_TO_MIX + PARTS * FOUR_WARPS;
constexpr int GROUP = HEADS / KV_HEADS, WIDE = 16 / HEIGHT;  // heads that share keys, and lanes that they have
constexpr int LANES = 16 * TOGETHER, MOST_ROWS = HEIGHT * TOGETHER;
constexpr int COLUMNS = CROOKS ? 2 * BLOCK : BLOCK;  // scores of a lane
constexpr int CHUNKS = DIM / 8;  // of 16 bytes
constexpr int LINES = PAGE < BLOCK ? PAGE : BLOCK, COPIES = BLOCK / LINES;  // of a copy; for a window
constexpr int FAR = 1 << 30;

// Where a chunk lies among so many lines, as the matrix unit wants it.
template <int LINES> __device__ inline u32 place_of(int line, int chunk) {
    return (chunk / 8 * LINES + line) * 128 + (chunk % 8 ^ line % 8) * 16;
}

struct Arguments {  // attend.py has them in the same order
    Map keys, values;
    const u16* query;
    u16* output;
    const int *positions, *straight, *paths, *tile_counts, *tile_pages, *pages;
    const int* skipped;  // stretches of each tile whose parts are there, from the first on; null: none
    float *mixed, *totals;  // where parts meet
    u32* counters;
    int rows_each, tiles_each;  // of a request
    int most_parts, stride;     // of a softmax; of the output
    int earliest;               // the first position that is seen
    int settled;                // whether what lies before a request's rows was there before the step
};

struct Shared {
    u16 keys[STAGES][BLOCK * DIM], values[STAGES][BLOCK * DIM];
    u16 query[LANES * DIM];  // and, when it is not needed any more, what is written
    u16 weights[2][LANES * BLOCK];
    float scores[2][LANES][COLUMNS + 4];
    float2 shrinks[2][LANES];  // what was mixed before, and what the block brings
    float totals[LANES];       // of the whole
    u64 keys_there[STAGES], values_there[STAGES];  // flags
    unsigned char picked[2][MOST_ROWS][BLOCK];  // of every other crooked block: where positions lie, from its window on
    bool last;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "attend.py counts them");

// What this program looks at. Every warp finds it for itself: its first threads have a row each.
struct Look {
    int tile, head, taker, takers;
    int first, count;         // rows
    int position, straight;   // of this thread's row
    int newest, furthest;     // position, and KV index
    int crooked, fresh;       // the first position that lies elsewhere; the first index that this pass writes
    int blocks, parts;        // of positions; stretches of them
    int skipped;              // of these, from the first on: kernels/common.py has summed them
    int own, windows;         // blocks of this program, and what it reads for them
    const int* pages;
    __device__ Look(const Arguments& a) {
        int groups = (a.tiles_each + TOGETHER - 1) / TOGETHER, request = blockIdx.x / groups;
        int of_request = blockIdx.x % groups * TOGETHER, lane = threadIdx.x % 32;
        head = blockIdx.y, taker = blockIdx.z, takers = gridDim.z;
        tile = request * a.tiles_each + of_request, first = request * a.rows_each + of_request * HEIGHT;
        int begin = a.tile_pages[tile], root = a.positions[request * a.rows_each];
        count = a.tile_counts[tile];
        if (TOGETHER > 1 && of_request + 1 < a.tiles_each) count += a.tile_counts[tile + 1];
        bool is_row = lane < MOST_ROWS && of_request * HEIGHT + lane < a.rows_each;
        position = is_row ? a.positions[first + lane] : 0, straight = is_row && CROOKS ? a.straight[first + lane] : FAR;
        bool there = lane < count;
        newest = furthest = __reduce_max_sync(~0u, there ? position : -1);
        crooked = FAR;
        if (CROOKS) {
            bool bends = there && straight <= position;
            crooked = __reduce_min_sync(~0u, bends ? straight : FAR);
            int index = bends ? a.paths[(first + lane) * MOST_PATH + position - straight] : position;
            furthest = __reduce_max_sync(~0u, there ? index : -1);
        }
        fresh = a.settled ? root : FAR;
        pages = a.pages + begin;
        blocks = (newest + BLOCK) / BLOCK;
        parts = (blocks + MERGED - 1) / MERGED;
        skipped = a.skipped ? min(a.skipped[tile], parts) : 0;
        int rest = parts - skipped;
        own = (rest / takers + (taker < rest % takers)) * MERGED;  // they go round
        if (own && (rest - 1) % takers == taker) own -= parts * MERGED - blocks;
        windows = own + (own && is_crooked(block(own - 1)));
    }
    __device__ int block(int number) const {
        return (skipped + number / MERGED * takers + taker) * MERGED + number % MERGED;
    }
    __device__ bool begins_part(int number) const { return number % MERGED == 0; }
    __device__ bool ends_part(int number) const { return number + 1 == own || begins_part(number + 1); }
    __device__ bool is_crooked(int block) const { return CROOKS && (block + 1) * BLOCK > crooked; }
    // A block that is crooked is followed by the next one here, if that has a window.
    __device__ int window(int number) const { return number < own ? block(number) : block(own - 1) + 1; }
    __device__ int row_of(int lane) const { return min(lane / WIDE, count - 1); }
    // Of a lane: its line among those of all rows and heads, -1 if it means nothing.
    __device__ int line_of(int lane) const {
        int row = lane / WIDE, own = lane % WIDE;
        return row < count && own < GROUP ? (first + row) * HEADS + head * GROUP + own : -1;
    }
    __device__ long part_of(const Arguments& a, int lane, int part) const {  // its number among those in memory
        return (long)line_of(lane) * a.most_parts + part;
    }
    __device__ u16* output(const Arguments& a, int lane) const {
        int line = line_of(lane);
        return a.output + (long)(line / HEADS) * a.stride + line % HEADS * DIM;
    }
};

// Lines of a window on their way to shared memory, of one page: a thread asks for them.
struct Lines {
    int number, index, place;  // of the window, in the order of this program; KV index, and where it lies: -1 if unseen
    __device__ void find(const Look& look, int own, int copy) {
        number = own, index = look.window(own) * BLOCK + copy * LINES;
        bool seen = own < look.windows && index <= look.furthest;
        place = seen ? look.pages[index / PAGE] * PAGE + index % PAGE : -1;
    }
    // The first of a window says how much will come.
    __device__ void announce(Shared& s, const Look& look) const {
        if (number >= look.windows || index % BLOCK) return;
        int lines = max(min(look.furthest + 1 - index, BLOCK), 0);
        int bytes = (lines + LINES - 1) / LINES * LINES * DIM * 2;
        expect_bytes(&s.keys_there[number % STAGES], bytes), expect_bytes(&s.values_there[number % STAGES], bytes);
    }
    __device__ void ask(Shared& s, const Arguments& a, const Look& look) const {
        int stage = number % STAGES, first = index % BLOCK * 64;
        if (place < 0) return;
#pragma unroll
        for (int part = 0; part < PARTS; part++)
            copy_lines(s.keys[stage] + part * BLOCK * 64 + first, a.keys, part * 64, look.head, place,
                       &s.keys_there[stage]);
#pragma unroll
        for (int part = 0; part < PARTS; part++)
            copy_lines(s.values[stage] + part * BLOCK * 64 + first, a.values, part * 64, look.head, place,
                       &s.values_there[stage]);
    }
};
__device__ inline void await_window(u64 (&flags)[STAGES], int number) {
    await_flag(&flags[number % STAGES], number / STAGES % 2);
}

__device__ inline void take_query(Shared& s, const Arguments& a, const Look& look) {
    constexpr int each = (LANES * CHUNKS + THREADS - 1) / THREADS;
    uint4 taken[each];
#pragma unroll
    for (int i = 0; i < each; i++) {
        int line = look.line_of((i * THREADS + threadIdx.x) / CHUNKS);
        taken[i] = __ldcg((const uint4*)(a.query + (long)max(line, 0) * DIM) + threadIdx.x % CHUNKS);
        if (line < 0) taken[i] = make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < each; i++) {
        int lane = (i * THREADS + threadIdx.x) / CHUNKS;
        if (lane < LANES) *(uint4*)((char*)s.query + place_of<LANES>(lane, threadIdx.x % CHUNKS)) = taken[i];
    }
}

// Where the positions of a crooked block lie for each row, from the block's window on.
__device__ inline void pick(Shared& s, const Arguments& a, const Look& look, int number, int block) {
    for (int each = threadIdx.x; each < MOST_ROWS * BLOCK; each += THREADS) {
        int row = each / BLOCK, column = each % BLOCK, at = block * BLOCK + column;
        int straight = __shfl_sync(~0u, look.straight, row), position = __shfl_sync(~0u, look.position, row);
        bool apart = row < look.count && at <= position && at >= straight;
        s.picked[number % 2][row][column] =
            apart ? a.paths[(look.first + row) * MOST_PATH + at - straight] - block * BLOCK : column;
    }
}

// Of those who score: scores of a window; a thread has positions g and g + 8 of its warp's 16, where g is its
// quad, and two of every eight lanes.
struct Scorer {
    float sums[LANES / 2];
    __device__ void ask(Shared& s, int window) {
        await_window(s.keys_there, window);
        u64 keys = described(s.keys[window % STAGES]), query = described(s.query);
        begin_multiplying();
#pragma unroll
        for (int k = 0; k < DIM / 16; k++)
            multiply(sums, keys + k / 4 * (BLOCK * 8) + k % 4 * 2, query + k / 4 * (LANES * 8) + k % 4 * 2, k);
        end_multiplying();
    }
    // Leaves them for a block, from `column` on.
    __device__ void leave(Shared& s, int number, int column) {
        int line = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
        float scale = __int_as_float(SCALE_BITS);
        await_multiplying<0>();
#pragma unroll
        for (int i = 0; i < LANES / 2; i++)
            s.scores[number % 2][i / 4 * 8 + pair + i % 2][column + line + i / 2 % 2 * 8] = __fmul_rn(sums[i], scale);
    }
};

// Values of the last block that nobody sees become zero: what lies there might be no number. Done by those who score.
__device__ inline void clear(Shared& s, const Look& look, int number, int block) {
    int seen = look.furthest + 1 - block * BLOCK;
    if (seen >= BLOCK) return;
    await_window(s.values_there, number);
    for (int i = seen * CHUNKS + threadIdx.x; i < BLOCK * CHUNKS; i += FOUR_WARPS)
        *(uint4*)((char*)s.values[number % STAGES] + place_of<BLOCK>(i / CHUNKS, i % CHUNKS)) = make_uint4(0, 0, 0, 0);
    share_written();
}

__device__ inline float with_other(float x, int apart) { return __fadd_rn(x, __shfl_xor_sync(~0u, x, apart)); }

// Of those who weigh: what a lane has seen of a part so far. Eight threads have a lane.
struct Weigher {
    int lane, row;
    u32 seen;  // positions, from the earliest on
    float highest, total;
    __device__ Weigher(const Arguments& a, const Look& look) {
        lane = (threadIdx.x - FIRST_TO_WEIGH) / 8, row = look.row_of(lane);
        seen = max(__shfl_sync(~0u, look.position, row) - a.earliest + 1, 0);
    }
    // The weights of a block, in the order in which Triton's four warps add them up: a thread has two positions of
    // every other eight.
    __device__ void weigh(Shared& s, const Arguments& a, const Look& look, int number, int block) {
        if ((threadIdx.x - FIRST_TO_WEIGH) / 32 * 4 / WIDE >= look.count) return;  // warps whose lanes mean nothing
        int q = threadIdx.x % 4, odd = threadIdx.x % 8 / 4, first = block * BLOCK - a.earliest;
        const float* scores = s.scores[number % 2][lane];
        const unsigned char* picked = s.picked[number % 2][row];
        float weights[4][2], sums[2];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int column = (j * 2 + odd) * 8 + q * 2;
            float2 two = look.is_crooked(block) ? make_float2(scores[picked[column]], scores[picked[column + 1]])
                                                : *(const float2*)&scores[column];
            weights[j][0] = two.x, weights[j][1] = two.y;
        }
        if (first < 0 || first + BLOCK > seen)
#pragma unroll
            for (int i = 0; i < 8; i++)
                if ((u32)(first + (i / 2 * 2 + odd) * 8 + q * 2 + i % 2) >= seen) weights[i / 2][i % 2] = nothing();
        float own = fmaxf(fmaxf(fmaxf(weights[0][0], weights[0][1]), fmaxf(weights[1][0], weights[1][1])),
                          fmaxf(fmaxf(weights[2][0], weights[2][1]), fmaxf(weights[3][0], weights[3][1])));
#pragma unroll
        for (int apart = 4; apart > 0; apart /= 2) own = fmaxf(own, __shfl_xor_sync(~0u, own, apart));
        float zero = safe(own);
#pragma unroll
        for (int j = 0; j < 4; j++) {
#pragma unroll
            for (int i = 0; i < 2; i++) weights[j][i] = power_of_two(__fsub_rn(weights[j][i], zero));
            u32 place = place_of<LANES>(lane, j * 2 + odd) + q * 4;
            *(u32*)((char*)s.weights[number % 2] + place) = pack(weights[j][0], weights[j][1]);
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            sums[j] = __fadd_rn(__fadd_rn(weights[j][0], weights[j][1]), weights[j + 2][0]);
            sums[j] = with_other(with_other(__fadd_rn(sums[j], weights[j + 2][1]), 2), 1);
        }
        add(s, a, look, number, block, own, with_other(__fadd_rn(sums[0], sums[1]), 4));
    }
    // Merges a block's highest score and sum of weights, as softmax.cu does, and says by what values are to shrink.
    __device__ void add(Shared& s, const Arguments& a, const Look& look, int number, int block, float own,
                        float sum) {
        if (look.begins_part(number)) highest = nothing(), total = 0.0f;
        float higher = fmaxf(highest, own), zero = safe(higher);
        float2 shrinks = make_float2(power_of_two(__fsub_rn(highest, zero)), power_of_two(__fsub_rn(own, zero)));
        highest = higher, total = __fmaf_rn(total, shrinks.x, __fmul_rn(sum, shrinks.y));
        if (threadIdx.x % 8) return;
        s.shrinks[number % 2][lane] = shrinks;
        if (look.parts == 1) s.totals[lane] = total;
        else if (look.ends_part(number) && look.line_of(lane) >= 0)
            *((float2*)a.totals + look.part_of(a, lane, block / MERGED)) = make_float2(highest, total);
    }
};

// Of those who mix: values, weighted, of a part so far. Four warps have 64 columns; a thread has columns g and g + 8 of
// its warp's 16, where g is its quad, and two of every eight lanes.
struct Mixer {
    float mixed[LANES / 2], part[LANES / 2];
    __device__ static int columns() { return (threadIdx.x - FIRST_TO_MIX) / FOUR_WARPS; }  // which 64
    __device__ static int chunk() { return columns() * 8 + threadIdx.x % FOUR_WARPS / 32 * 2; }  // the warp's first
    __device__ static int lane(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }
    __device__ void mix(Shared& s, const Look& look, int number, int block) {
        await_window(s.values_there, number);
        if (look.is_crooked(block)) {
            await_window(s.values_there, number + 1);
            mix_picked(s, number);
        } else {
            u64 values = described(s.values[number % STAGES]) + columns() * (BLOCK * 8);
            u64 weights = described(s.weights[number % 2]);
            begin_multiplying();
#pragma unroll
            for (int k = 0; k < BLOCK / 16; k++) multiply_turned(part, values + k * 128, weights + k * 2, k);
            end_multiplying();
            await_multiplying<0>();
        }
        if (look.begins_part(number))
#pragma unroll
            for (int i = 0; i < LANES / 2; i++) mixed[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < LANES / 2; j += 4) {
            float4 shrinks = *(const float4*)&s.shrinks[number % 2][lane(j)];  // of two lanes
#pragma unroll
            for (int i = j; i < j + 4; i++) {
                float before = i % 2 ? shrinks.z : shrinks.x, own = i % 2 ? shrinks.w : shrinks.y;
                mixed[i] = __fmaf_rn(mixed[i], before, __fmul_rn(part[i], own));
            }
        }
    }
    // Each row's own values, of the block's window or the next: eight lanes at a time, and of them those of a row.
    __device__ void mix_picked(const Shared& s, int number) {
        int thread = threadIdx.x % 32, own_chunk = chunk() + thread / 8 % 2;
        u32 window = shared_address(s.values[number % STAGES]), next = shared_address(s.values[(number + 1) % STAGES]);
#pragma unroll
        for (int j = 0; j < LANES / 8; j++) {
            u32 weights[2][4];
#pragma unroll
            for (int half = 0; half < 2; half++)
                load_fragments(weights[half], shared_address(s.weights[number % 2]) +
                                                  place_of<LANES>(j * 8 + thread % 8, half * 4 + thread / 8));
#pragma unroll
            for (int row = j * 8 / WIDE; row <= (j * 8 + 7) / WIDE; row++) {
                float sums[4] = {};
#pragma unroll
                for (int k = 0; k < BLOCK / 16; k++) {
                    int line = s.picked[number % 2][row][k * 16 + thread / 16 * 8 + thread % 8];
                    u32 own[4];
                    u32 values = line < BLOCK ? window : next;
                    load_turned_fragments(own, values + place_of<BLOCK>(line % BLOCK, own_chunk));
                    multiply(sums, own, weights[k / 2][k % 2 * 2], weights[k / 2][k % 2 * 2 + 1]);
                }
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (lane(j * 4 + i) / WIDE == row) part[j * 4 + i] = sums[i];
            }
        }
    }
    __device__ void leave(const Arguments& a, const Look& look, int stretch) const {
#pragma unroll
        for (int i = 0; i < LANES / 2; i++)
            if (look.line_of(lane(i)) >= 0) {
                int column = chunk() * 8 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
                a.mixed[look.part_of(a, lane(i), stretch) * DIM + column] = mixed[i];
            }
    }
    // What is mixed, by way of shared memory, where lanes become lines. Sums of weights are at least one, so `divide`
    // does nothing but to multiply by the inverse.
    __device__ void write(Shared& s, const Arguments& a, const Look& look) const {
        int thread = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < LANES / 8; j += 2) {
            u32 rounded[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int one = j * 4 + i * 2, two = one + 1;
                rounded[i] = pack(over(mixed[one], s.totals[lane(one)]), over(mixed[two], s.totals[lane(two)]));
            }
            int line = (j + thread / 16) * 8 + thread % 8;
            store_turned_fragments(shared_address(s.query) + place_of<LANES>(line, chunk() + thread / 8 % 2), rounded);
        }
        await_four_warps(1 + columns());
#pragma unroll
        for (int i = threadIdx.x % FOUR_WARPS; i < LANES * 8; i += FOUR_WARPS) {
            int lane = i / 8, chunk = columns() * 8 + i % 8;
            if (look.line_of(lane) >= 0)
                *((uint4*)look.output(a, lane) + chunk) = *(uint4*)((char*)s.query + place_of<LANES>(lane, chunk));
        }
    }
    __device__ static float over(float x, float total) { return __fmul_rn(x, inverse(total)); }
};

typedef SoftmaxOf<1, 2> Slice;  // four columns of a lane
__device__ inline Slice slice(float2 totals, float4 values) {
    Slice own;
    own.highest[0] = totals.x, own.total[0] = totals.y;
    own.mixed[0][0][0] = values.x, own.mixed[0][0][1] = values.y;
    own.mixed[0][1][0] = values.z, own.mixed[0][1][1] = values.w;
    return own;
}

// Who comes last merges what all have left, slice by slice.
__device__ inline void meet(Shared& s, const Arguments& a, const Look& look) {
    u32* counter = a.counters + blockIdx.x * KV_HEADS + look.head;
    if (threadIdx.x == 0) s.last = comes_last(counter, min(look.takers, look.parts - look.skipped));
    __syncthreads();
    if (!s.last) return;
#pragma unroll
    for (int i = threadIdx.x; i < LANES * DIM / 4; i += THREADS) {
        int lane = i / (DIM / 4), column = i % (DIM / 4) * 4;
        if (look.line_of(lane) < 0) continue;
        Slice own = gather<Slice, MERGED, 8>(look.parts, [&](int part) {
            long at = look.part_of(a, lane, part);
            return slice(__ldcg((const float2*)a.totals + at), __ldcg((const float4*)(a.mixed + at * DIM + column)));
        });
        const float(&m)[2][4] = own.mixed[0];
        float total = own.total[0];
        *(uint2*)(look.output(a, lane) + column) = make_uint2(pack(divide(m[0][0], total), divide(m[0][1], total)),
                                                              pack(divide(m[1][0], total), divide(m[1][1], total)));
    }
}

// All blocks of this program, whose first windows are on their way. In a phase each role has a block of its own. When
// it has ended, a window is not needed any more: the first threads ask for the next there.
template <int ROLE, class Work>
__device__ inline void look_at_blocks(Shared& s, const Arguments& a, const Look& look, const Work& work) {
    Lines next;
    bool asks = ROLE == SCORES && threadIdx.x < COPIES;
    if (asks) next.find(look, STAGES, threadIdx.x);
    for (int phase = 0; phase < look.own + 2; phase++) {
        int own = phase - ROLE;
        if (own >= 0 && own < look.own) work(own, look.block(own));
        if (ROLE == WEIGHS) share_written();
        __syncthreads();
        if (asks && phase >= MIXES && next.number < look.windows) {
            next.announce(s, look), next.ask(s, a, look);
            next.find(look, next.number + 1, threadIdx.x);
        }
        __syncwarp();
    }
}

__device__ inline void look_at_blocks(Shared& s, const Arguments& a, const Look& look) {
    if (threadIdx.x < FIRST_TO_WEIGH) {
        look_at_blocks<SCORES>(s, a, look, [&](int number, int block) {
            Scorer own;
            own.ask(s, number), own.leave(s, number, 0);
            if (look.is_crooked(block)) own.ask(s, number + 1), own.leave(s, number, BLOCK);
            clear(s, look, number, block);
        });
    } else if (threadIdx.x < FIRST_TO_MIX) {
        Weigher own(a, look);
        look_at_blocks<WEIGHS>(s, a, look, [&](int number, int block) { own.weigh(s, a, look, number, block); });
    } else {
        Mixer own;
        look_at_blocks<MIXES>(s, a, look, [&](int number, int block) {
            own.mix(s, look, number, block);
            if (look.parts == 1 && number + 1 == look.own) own.write(s, a, look);
            if (look.parts > 1 && look.ends_part(number)) own.leave(a, look, block / MERGED);
        });
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) char raw[];
    Shared& s = *(Shared*)raw;
    let_next_kernel_start();  // its programs find room where those of this kernel have ended
    if (threadIdx.x < STAGES) make_flag(&s.keys_there[threadIdx.x], 1), make_flag(&s.values_there[threadIdx.x], 1);
    if (threadIdx.x < 32) show_flags();
    // tables were written before this pass began: no kernel of it has to be waited for
    Look look(a);
    if (look.own == 0) {
        if (look.taker == 0) await_kernels_before();  // not all programs may end before what came before
        return;
    }
    __syncthreads();
    if (!a.settled) await_kernels_before();
    // The first thread of a warp asks for some lines: for those of earlier steps at once.
    constexpr int WARPS = THREADS / 32, EACH = (STAGES * COPIES + WARPS - 1) / WARPS;
    Lines lines[EACH];
    if (threadIdx.x % 32 == 0)
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int each = i * WARPS + threadIdx.x / 32;
            lines[i].find(look, each < STAGES * COPIES ? each / COPIES : look.windows, each % COPIES);
            lines[i].announce(s, look);
            if (lines[i].index + LINES <= look.fresh) lines[i].ask(s, a, look);
        }
    for (int number = max(look.own - 2, 0); number < look.own; number++)
        if (look.is_crooked(look.block(number))) pick(s, a, look, number, look.block(number));
    if (a.settled) await_kernels_before();
    take_query(s, a, look);
    share_written();
    if (threadIdx.x % 32 == 0)
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (lines[i].index + LINES > look.fresh) lines[i].ask(s, a, look);
    __syncthreads();
    look_at_blocks(s, a, look);
    if (look.parts > 1) meet(s, a, look);
}
