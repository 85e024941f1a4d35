// The ring of weights, and the products of the weights that come through it.

struct RingPosition {  // in the ring
    int stage = 0, slot = 0, round = 0;
    __device__ void advance() {
        stage++;
        if (++slot == SLOTS) slot = 0, round ^= 1;
    }
};

// What the loading warps do while the ring is full: they prefetch the next steps of gate and up into L2, no faster
// than memory delivers them: all other loads would queue behind them.
struct L2Prefetch {
    static constexpr int stages = STEP / GateUp::slab;  // of a step
    static constexpr u32 pace = Cut<GateUp>::columns * STEP * 2 / BYTES_A_CYCLE;  // cycles of a step
    int step = 0;
    u32 since = cycles();
    // False if there is nothing left to prefetch.
    __device__ bool prefetch(const Shared& s, const u16* weight, int stage) {
        step = max(step, ceil_div(stage, stages));
        if (step >= min(stage / stages + L2_PREFETCH_STEPS, Cut<GateUp>::steps)) return false;
        if (cycles() - since < pace) return true;
        u32 unit = first_unit<GateUp::units>(blockIdx.x), end = first_unit<GateUp::units>(blockIdx.x + 1);
        for (u32 half = thread() - THREADS; half < (end - unit) * 2; half += FETCHERS) {
            u32 column = GateUp::column(s, unit + half / 2, half % 2 * 8), tile = GateUp::tile;
            prefetch_to_l2<4 * STEP * 2>(weight + column / tile * (tile * GateUp::line) + step * (tile * STEP) +
                                  column % tile * STEP);
        }
        step++, since = cycles();
        return true;
    }
};

// The loading warps' part of one matrix: thread (row, chunk) has one column of each group of 16, a row of the slot,
// and 16 of each 128 bytes of it.
template <class P> __device__ inline void fetch(Shared& s, RingPosition& ring_position, const u16* weight) {
    using C = Cut<P>;
    u32 unit = first_unit<P::units>(blockIdx.x), own = first_unit<P::units>(blockIdx.x + 1) - unit;
    u32 row = (u32)(thread() - THREADS) / 8, chunk = (u32)thread() % 8;
    u32 to = row * (P::slab * 2) + (chunk ^ row % 8) * 16;
    static_assert(FETCHERS == 16 * 8, "");
    u32 offsets[C::groups];
#pragma unroll
    for (int g = 0; g < C::groups; g++) {
        u32 column = P::column(s, unit + P::unit(g * 16 + row), row);
        offsets[g] = column / P::tile * (P::tile * P::line) + column % P::tile * STEP + chunk * 8;
    }
    L2Prefetch l2_prefetch;
#pragma unroll 1
    for (int stage = 0; stage < C::stages; stage++) {
        u32 slot = shared_address(s.ring[ring_position.slot]) + to;
        u32 empty = shared_address(&s.empty[ring_position.slot]);
        while (P::prefetches_l2 && !is_mbarrier_complete(empty, ring_position.round ^ 1) &&
               l2_prefetch.prefetch(s, weight, stage)) {}
        wait_mbarrier(empty, ring_position.round ^ 1);
#pragma unroll
        for (int split = 0; split < P::splits; split++)
#pragma unroll
            for (int piece = 0; piece < P::slab / 64; piece++) {
                u32 k = (u32)C::begin(split) + (u32)stage * P::slab + piece * 64;
                const u16* at = weight + (P::first(s, split) + k / STEP * (P::tile * STEP) + k % STEP);
                if (C::even || k < (u32)C::begin(split + 1)) {
#pragma unroll
                    for (int g = 0; g < C::groups; g++)
                        if (P::unit(g * 16 + row) < own) {
                            u32 line = split * C::columns + g * 16;
                            copy_16(slot + line * (P::slab * 2) + piece * 128, at + offsets[g]);
                        }
                }
            }
        arrive_after_copies(shared_address(&s.full[ring_position.slot]));
        commit_copies();
        wait_copies<IN_FLIGHT - 1>();
        ring_position.advance();
    }
}

// The registers of one iteration of a warp: N groups of 16 columns by all rows.
template <int N> struct Piece {
    u32 left[N][PIECE / 16][4], right[PIECE / 32][4];
};

// The rows of a product as a warp reads them, piece after piece. Here they are in shared memory.
template <class P, bool STREAMED = P::streamed> struct Rows {
    u32 at, step;
    __device__ Rows(Shared& s, int split, int row) {
        bool there = row < ROWS;  // the other rows of an instruction are zeros
        at = there ? shared_address(s.product.rows) + (row * P::depth + Cut<P>::begin(split)) * 2
                   : shared_address(s.zeros);
        step = there ? PIECE * 2 : 0;
    }
    __device__ void begin() {}
    __device__ u32 next() {  // the address of this lane's row of the next piece
        u32 now = at;
        at += step;
        return now;
    }
};

// The input of down would fill shared memory, and a warp needs only its own split of the depth. So it loads that
// itself, and multiplies when the first piece is there. With several rows other products do so, too.
template <class P> struct Rows<P, true> {
    static constexpr u32 piece = ROWS * PIECE * 2;  // bytes
    const u16* from;                                // what this lane loads next
    u32 ring, row_at, seen, asked = 0, taken = 0;   // offsets of slots in the ring
    int left;                                       // pieces not yet loaded
    __device__ Rows(Shared& s, int split, int row) {
        int lane = thread() % 32;
        from = P::input(s.pass) + lane / 8 * P::depth + Cut<P>::begin(split) + lane % 8 * 8;
        left = (Cut<P>::begin(split + 1) - Cut<P>::begin(split)) / PIECE;
        ring = shared_address(s.product.streamed[thread() / 32]);
        row_at = row < ROWS ? ring + row * (PIECE * 2) : shared_address(s.zeros);
        seen = row < ROWS ? ~0u : 0u;
    }
    __device__ static u32 after(u32 slot) { return slot == (ROW_SLOTS - 1) * piece ? 0 : slot + piece; }
    __device__ void prefetch() {
        int lane = thread() % 32, chunk = lane % 8;
#pragma unroll
        for (int i = 0; i < ceil_div(ROWS, 4); i++) {
            int row = lane / 8 + i * 4;
            u32 to = ring + asked + row * (PIECE * 2) + (chunk ^ row) * 16;
            if (left > 0 && row < ROWS) copy_16(to, from + i * 4 * P::depth);
        }
        commit_copies();
        asked = after(asked), from += PIECE, left--;
    }
    __device__ void begin() {
        for (int i = 0; i < ROW_SLOTS - 1; i++) prefetch();
    }
    __device__ u32 next() {
        wait_copies<ROW_SLOTS - 2>();
        __syncwarp();  // all lanes have their part of it, and have read the slot that is refilled now
        prefetch();
        u32 now = row_at + (taken & seen);
        taken = after(taken);
        return now;
    }
};

// N jobs of a warp, which have the same split: its addresses and registers. There are no branches between pieces of
// a round: a branch would wait for all loads in flight.
template <class P, int N> struct Multiplier {
    using C = Cut<P>;
    static constexpr int round = most(C::pieces, 2);  // pieces: those of a stage, or of two stages
    Shared& s;
    RingPosition& ring_position;
    Piece<N> held[round];
    Rows<P> rows;
    u32 left[N], right_chunk;  // addresses in shared memory: of weights, in the slot; of rows, in their piece
    bool speaks;  // whether this lane releases stages for its warp
    __device__ Multiplier(Shared& s, RingPosition& ring_position)
        : s(s), ring_position(ring_position), rows(s, thread() / 32 % P::splits, thread() % 8) {
        int warp = thread() / 32, lane = thread() % 32, split = warp % P::splits, row = lane % 8;
        speaks = lane == 0;
#pragma unroll
        for (int j = 0; j < N; j++) {
            int line = min((warp + j * WARPS) / P::splits * 16 + lane % 16, C::columns - 1);
            left[j] = (split * C::columns + line) * (P::slab * 2) + (lane / 16 ^ row) * 16;
        }
        right_chunk = (lane / 8 ^ row) * 16;
    }
    // The next piece, which is number `piece` of the stage at `from`.
    __device__ void load(Piece<N>& to, const RingPosition& from, int piece) {
        u32 slot = shared_address(s.ring[from.slot]) + piece * (PIECE * 2), right = rows.next();
#pragma unroll
        for (int c = 0; c < PIECE / 32; c++) load_fragments(to.right[c], right + (right_chunk ^ c * 64));
#pragma unroll
        for (int c = 0; c < PIECE / 16; c++)
#pragma unroll
            for (int j = 0; j < N; j++) load_fragments(to.left[j][c], slot + (left[j] ^ c * 32));
    }
    __device__ void await_stage(const RingPosition& at) { wait_mbarrier(shared_address(&s.full[at.slot]), at.round); }
    __device__ void release_stage() {
        __syncwarp();
        if (speaks) arrive_mbarrier(shared_address(&s.empty[ring_position.slot]));
        ring_position.advance();
    }
    // Multiplies the remaining pieces of a round. Each is loaded while the one before is multiplied, and the first
    // of the next round, unless this is the last, while the last one is.
    template <bool LAST> __device__ void multiply_round(float (&sums)[JOBS][4], int rest) {
#pragma unroll
        for (int i = 0; i < round; i++) {
            if (LAST && i >= rest) break;
            if (!LAST || i + 1 < rest) {
                RingPosition next = ring_position;
                if ((i + 1) % C::pieces == 0) next.advance(), await_stage(next);
                load(held[(i + 1) % round], next, (i + 1) % C::pieces);
            }
#pragma unroll
            for (int c = 0; c < PIECE / 16; c++)
#pragma unroll
                for (int j = 0; j < N; j++)
                    multiply(sums[j], held[i].left[j][c], held[i].right[c / 2][c % 2 * 2],
                             held[i].right[c / 2][c % 2 * 2 + 1]);
            if ((i + 1) % C::pieces == 0 || (LAST && i + 1 == rest)) release_stage();
        }
    }
    __device__ void run(float (&sums)[JOBS][4], int pieces) {
        rows.begin();
        await_stage(ring_position);
        load(held[0], ring_position, 0);
#pragma unroll 1
        for (; pieces > round; pieces -= round) multiply_round<false>(sums, round);
        multiply_round<true>(sums, pieces);
    }
};

// All sums of a block: jobs (group of 16 columns, split) by warp.
template <class P> __device__ inline void product(Shared& s, RingPosition& ring_position, float (&sums)[JOBS][4]) {
    using C = Cut<P>;
    constexpr int N = C::jobs_of_warp;
    static_assert(WARPS % P::splits == 0, "jobs of a warp have the same split");
    int warp = thread() / 32, end = ring_position.stage + C::stages;
    int own = (first_unit<P::units>(blockIdx.x + 1) - first_unit<P::units>(blockIdx.x)) * P::each;
    int count = (ceil_div(own, 16) * P::splits - warp + WARPS - 1) / WARPS;  // jobs of this warp: N, or N - 1
#pragma unroll
    for (int j = 0; j < N; j++) sums[j][0] = sums[j][1] = sums[j][2] = sums[j][3] = 0.0f;
    int split = warp % P::splits, pieces = (C::begin(split + 1) - C::begin(split)) / PIECE;
    if (count >= N) Multiplier<P, N>(s, ring_position).run(sums, pieces);
    else if (N > 1) Multiplier<P, most(N - 1, 1)>(s, ring_position).run(sums, pieces);
    while (ring_position.stage < end) {  // stages that this warp does not need
        wait_mbarrier(shared_address(&s.full[ring_position.slot]), ring_position.round);
        __syncwarp();
        if (thread() % 32 == 0) arrive_mbarrier(shared_address(&s.empty[ring_position.slot]));
        ring_position.advance();
    }
}

// Split-K reduction: the sum of all splits of a column and row, in order.
template <class P> __device__ inline float total(const Shared& s, int column, int row) {
    float sum = s.product.parts[column / 16 * P::splits][column % 16][row];
#pragma unroll
    for (int split = 1; split < P::splits; split++)
        sum = __fadd_rn(sum, s.product.parts[column / 16 * P::splits + split][column % 16][row]);
    return sum;
}

// The weighted sum of a row's experts, in the order of its choice.
template <class P> __device__ inline float mixed(const Shared& s, int column, int row) {
    float sum = 0.0f;
#pragma unroll
    for (int split = 0; split < P::splits; split++)
        sum = __fmaf_rn(s.product.parts[column / 16 * P::splits + split][column % 16][row], s.shares[split % CHOSEN],
                        sum);
    return sum;
}

// Stores the partial sums of all warps in shared memory.
template <class P> __device__ inline void store_partials(Shared& s, const float (&sums)[JOBS][4]) {
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

// Rows [ROWS, HIDDEN] to shared memory, all loads in flight at once.
__device__ inline void load_input_rows(Shared& s, const u16* from) {
    constexpr int line = HIDDEN / 8, chunks = ROWS * line, each = ceil_div(chunks, THREADS);
    uint4 taken[each];
#pragma unroll
    for (int i = 0; i < each; i++) {
        int number = i * THREADS + thread();
        taken[i] = number < chunks ? load_cg_16(from + number * 8) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < each; i++) {
        int number = i * THREADS + thread(), row = number / line, chunk = number % line;
        if (number < chunks) *(uint4*)&s.product.rows[row * HIDDEN + (chunk ^ row % 8) * 8] = taken[i];
    }
}

// The sum of squares of a tile of 64 columns, from its 16 sums of four, added in pairs.
__device__ inline float tile_squares(const uint4 (&quads)[4]) {
    float sums[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        sums[i] = __fadd_rn(__fadd_rn(__uint_as_float(quads[i].x), __uint_as_float(quads[i].y)),
                            __fadd_rn(__uint_as_float(quads[i].z), __uint_as_float(quads[i].w)));
    return __fadd_rn(__fadd_rn(sums[0], sums[1]), __fadd_rn(sums[2], sums[3]));
}
__device__ inline void load_quads(uint4 (&to)[4], const float* quads, int row, int tile) {
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = load_cg_16(quads + row * (HIDDEN / 4) + tile * 16 + i * 4);
}

// The RMSNorm factor of every row, by a warp each, the last ones: the first have more to do. Only the epilogues of
// products wait for it; its inputs are loaded together with the rows.
struct NormFactors {
    static constexpr int each = ceil_div(TILES, 32);  // tiles of a lane
    static_assert(each <= 2, "");
    uint4 quads[each][4];
    int row;
    __device__ NormFactors(const float* from) {
        row = WARPS - 1 - thread() / 32;
#pragma unroll
        for (int t = 0; t < each; t++) {
            int tile = thread() % 32 + t * 32;
            bool mine = row < ROWS && tile < TILES;
#pragma unroll
            for (int i = 0; i < 4; i++)
                quads[t][i] = mine ? load_cg_16(from + row * (HIDDEN / 4) + tile * 16 + i * 4)
                                   : make_uint4(0, 0, 0, 0);
        }
    }
    // Tiles are added in pairs, too; in the first layer their sums are `first_squares`.
    __device__ void store(Shared& s, const float* first_squares) const {
        if (row >= ROWS) return;
        int lane = thread() % 32;
        float sums[2] = {0.0f, 0.0f};
#pragma unroll
        for (int t = 0; t < each; t++) {
            int tile = lane + t * 32;
            if (tile < TILES) sums[t] = first_squares ? first_squares[row * TILES + tile] : tile_squares(quads[t]);
#pragma unroll
            for (int offset = 1; offset < 32; offset *= 2)
                sums[t] = __fadd_rn(sums[t], __shfl_xor_sync(0xffffffff, sums[t], offset));
        }
        float sum = TILES > 32 ? __fadd_rn(sums[0], sums[1]) : sums[0];
        float mean = __fadd_rn(divide(sum, (float)HIDDEN), __int_as_float(EPS_BITS));
        if (lane == 0) s.factors[row] = inverse_root(mean);
    }
};
