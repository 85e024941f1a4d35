// The ring of weights, and the products of what comes through it.

struct Place {  // in the ring
    int slot = 0, round = 0;
    __device__ void advance() {
        if (++slot == SLOTS) slot = 0, round ^= 1;
    }
};

// What those who fetch do for one matrix: thread (row, chunk) has one column of each group of 16, a row of
// the slot, and 16 of each 128 bytes of it.
template <class P> __device__ inline void fetch(Shared& s, Place& place, const u16* weight) {
    using C = Cut<P>;
    u32 unit = first_unit<P::units>(blockIdx.x), own = first_unit<P::units>(blockIdx.x + 1) - unit;
    u32 row = (u32)(thread() - THREADS) / 8, chunk = (u32)thread() % 8;
    u32 to = row * (P::slab * 2) + (chunk ^ row % 8) * 16;
    static_assert(FETCHERS == 16 * 8, "");
    u32 offsets[C::groups];
#pragma unroll
    for (int g = 0; g < C::groups; g++) {
        u32 column = P::column(unit + P::unit(g * 16 + row), row);
        offsets[g] = column / P::tile * (P::tile * P::depth) + column % P::tile * STEP + chunk * 8;
    }
#pragma unroll 1
    for (int stage = 0; stage < C::stages; stage++) {
        u32 slot = shared_address(s.ring[place.slot]) + to;
        await_flag(shared_address(&s.empty[place.slot]), place.round ^ 1);
#pragma unroll
        for (int split = 0; split < P::splits; split++)
#pragma unroll
            for (int piece = 0; piece < P::slab / 64; piece++) {
                u32 k = (u32)C::begin(split) + (u32)stage * P::slab + piece * 64;
                const u16* at = weight + (k / STEP * (P::tile * STEP) + k % STEP);
                if (C::even || k < (u32)C::begin(split + 1)) {
#pragma unroll
                    for (int g = 0; g < C::groups; g++)
                        if (P::unit(g * 16 + row) < own) {
                            u32 line = split * C::columns + g * 16;
                            copy_16(slot + line * (P::slab * 2) + piece * 128, at + offsets[g]);
                        }
                }
            }
        raise_flag_after_copies(shared_address(&s.full[place.slot]));
        place.advance();
    }
}

struct Operands {  // of one lane
    u32 left[JOBS], right;          // addresses in shared memory
    int turn[JOBS], right_turn;     // how their chunks are exchanged
};

// N jobs of a warp, which have the same split: all weights are in registers before it multiplies.
template <int N, int CHUNKS>
__device__ inline void multiply_chunks(float (&sums)[JOBS][4], const Operands& of) {
    u32 a[N][CHUNKS / 2][4], b[CHUNKS / 4][4];
    int lane = thread() % 32;
#pragma unroll
    for (int c = 0; c < CHUNKS / 4; c++)
        load_fragments(b[c], of.right + ((c * 4 + lane / 8) ^ of.right_turn) * 16);
#pragma unroll
    for (int c = 0; c < CHUNKS / 2; c++)
#pragma unroll
        for (int j = 0; j < N; j++)
            load_fragments(a[j][c], of.left[j] + ((c * 2 + lane / 16) ^ of.turn[j]) * 16);
#pragma unroll
    for (int c = 0; c < CHUNKS / 2; c++)
#pragma unroll
        for (int j = 0; j < N; j++) multiply(sums[j], a[j][c], b[c / 2][c % 2 * 2], b[c / 2][c % 2 * 2 + 1]);
}

// One stage, of which `rest` chunks of 8 numbers are left in the split: the last stage may be shorter.
template <int N, class C>
__device__ inline void multiply_stage(float (&sums)[JOBS][4], Operands of, int rest) {
    if (C::even || rest >= C::chunks) return multiply_chunks<N, C::chunks>(sums, of);
    for (; rest > 0; rest -= 8) {
        multiply_chunks<N, 8>(sums, of);
        of.right += 128;
#pragma unroll
        for (int j = 0; j < N; j++) of.left[j] += 128;
    }
}

// All sums of a block: jobs (group of 16 columns, split) by warp.
template <class P> __device__ inline void product(Shared& s, Place& place, float (&sums)[JOBS][4]) {
    using C = Cut<P>;
    constexpr int N = C::jobs_of_warp;
    static_assert(WARPS % P::splits == 0, "jobs of a warp have the same split");
    int warp = thread() / 32, lane = thread() % 32, split = warp % P::splits;
    int own = (first_unit<P::units>(blockIdx.x + 1) - first_unit<P::units>(blockIdx.x)) * P::each;
    int count = (upwards(own, 16) * P::splits - warp + WARPS - 1) / WARPS;  // jobs of this warp: N, or N - 1
    int right_row = lane % 8, offsets[N];
    bool there = right_row < ROWS;  // the other rows of an instruction are zeros
    Operands of;
    of.right = there ? shared_address(s.product.rows) + (right_row * P::depth + C::begin(split)) * 2
                     : shared_address(s.zeros);
    of.right_turn = there ? right_row : 0;
#pragma unroll
    for (int j = 0; j < N; j++) {
        int row = min((warp + j * WARPS) / P::splits * 16 + lane % 16, C::columns - 1);
        offsets[j] = (split * C::columns + row) * (P::slab * 2);
        of.turn[j] = row % 8;
        sums[j][0] = sums[j][1] = sums[j][2] = sums[j][3] = 0.0f;
    }
    for (int stage = 0; stage < C::stages; stage++) {
#pragma unroll
        for (int j = 0; j < N; j++) of.left[j] = shared_address(s.ring[place.slot]) + offsets[j];
        await_flag(shared_address(&s.full[place.slot]), place.round);
        int rest = (C::begin(split + 1) - C::begin(split) - stage * P::slab) / 8;
        if (count >= N) multiply_stage<N, C>(sums, of, rest);
        else if (N > 1) multiply_stage<most(N - 1, 1), C>(sums, of, rest);
        of.right += there ? P::slab * 2 : 0;
        __syncwarp();
        if (lane == 0) raise_flag(shared_address(&s.empty[place.slot]));
        place.advance();
    }
}

// The sums of all splits of a column and row, in order.
template <class P> __device__ inline float total(const Shared& s, int column, int row) {
    float sum = s.product.parts[column / 16 * P::splits][column % 16][row];
#pragma unroll
    for (int split = 1; split < P::splits; split++)
        sum = __fadd_rn(sum, s.product.parts[column / 16 * P::splits + split][column % 16][row]);
    return sum;
}

// Brings the sums of all warps together: those of a column are of several splits.
template <class P> __device__ inline void leave_parts(Shared& s, const float (&sums)[JOBS][4]) {
    int warp = thread() / 32, lane = thread() % 32;
#pragma unroll
    for (int j = 0; j < Cut<P>::jobs_of_warp; j++) {
        int job = warp + j * WARPS;
        if (job < Cut<P>::jobs) {
            *(float2*)&s.product.parts[job][lane / 4][lane % 4 * 2] = make_float2(sums[j][0], sums[j][1]);
            *(float2*)&s.product.parts[job][lane / 4 + 8][lane % 4 * 2] = make_float2(sums[j][2], sums[j][3]);
        }
    }
    sync();
}

// Rows [ROWS, depth] to shared memory.
template <int depth> __device__ inline void take_rows(Shared& s, const u16* from) {
    constexpr int chunks = depth / 8;
#pragma unroll
    for (int i = 0; i < upwards(ROWS * chunks, THREADS); i++) {
        int number = i * THREADS + thread(), row = number / chunks, chunk = number % chunks;
        if (number < ROWS * chunks) {
            uint4* to = (uint4*)&s.product.rows[row * depth + (chunk ^ row % 8) * 8];
            *to = fresh_16(from + (long)row * depth + chunk * 8);
        }
    }
}

// The sum of squares of a tile of 64 columns: of pairs, of pairs of pairs, and so on.
__device__ inline float tile_squares(const float* quads, int row, int tile) {
    float sums[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint4 v = fresh_16(quads + row * (HIDDEN / 4) + tile * 16 + i * 4);
        sums[i] = __fadd_rn(__fadd_rn(__uint_as_float(v.x), __uint_as_float(v.y)),
                            __fadd_rn(__uint_as_float(v.z), __uint_as_float(v.w)));
    }
    return __fadd_rn(__fadd_rn(sums[0], sums[1]), __fadd_rn(sums[2], sums[3]));
}

// One over the root mean square of every row: warp w has row w. Tiles are added up in pairs, too; in the
// first layer their squares are `given`.
__device__ inline void take_factors(Shared& s, const float* quads, const float* given) {
    int row = thread() / 32, lane = thread() % 32;
    if (row >= ROWS) return;
    static_assert(TILES <= 64, "");
    float sums[2] = {0.0f, 0.0f}, root;
#pragma unroll
    for (int t = 0; t < upwards(TILES, 32); t++) {
        int tile = lane + t * 32;
        if (tile < TILES) sums[t] = given ? given[row * TILES + tile] : tile_squares(quads, row, tile);
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2)
            sums[t] = __fadd_rn(sums[t], __shfl_xor_sync(0xffffffff, sums[t], offset));
    }
    float sum = TILES > 32 ? __fadd_rn(sums[0], sums[1]) : sums[0];
    float mean = __fadd_rn(divide(sum, (float)HIDDEN), __int_as_float(EPS_BITS));
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(mean));
    if (lane == 0) s.factors[row] = root;
}
