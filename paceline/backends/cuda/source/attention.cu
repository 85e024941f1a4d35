// Attention, as kernels/attention.py and kernels/softmax.py have it: blocks of positions, merged in order.

typedef SoftmaxOf<Look::halves, DIM / 64> Softmax;  // a warp has an eighth of the columns of values

// Copies 16 bytes of a key and of a value to row `row` of a block, or zeros if nothing is seen there.
__device__ inline void take_place(Shared& s, const Layer& layer, const Look& look, int row, int chunk,
                                  int place, bool seen) {
    long at = ((long)place * KV_HEADS + look.head) * DIM + chunk * 8;
    u32 to = row * (DIM * 2) + (chunk ^ row % 8) * 16;
    copy_16_or_zero(shared_address(s.attention.keys) + to, layer.keys + at, seen);
    copy_16_or_zero(shared_address(s.attention.values) + to, layer.values + at, seen);
}

// Copies keys and values of a block to shared memory: those of this pass are left to `take_fresh` in the
// block that this program reads first.
__device__ inline void take_block(Shared& s, const Layer& layer, const Look& look, int block) {
    constexpr int chunks = DIM / 8;
    bool first = block == look.taker * look.each;
#pragma unroll
    for (int i = 0; i < BLOCK * chunks / THREADS; i++) {
        int number = i * THREADS + thread(), row = number / chunks, chunk = number % chunks;
        int position = block * BLOCK + row;
        bool seen = position <= look.newest;
        if (first && seen && position >= look.fresh) continue;
        int place = !seen ? 0 : first ? s.places[row] : look.place(position);
        take_place(s, layer, look, row, chunk, place, seen);
    }
}
__device__ inline void take_fresh(Shared& s, const Layer& layer, const Look& look) {
    constexpr int chunks = DIM / 8;
    static_assert(ROWS * chunks <= THREADS, "");
    int begin = look.taker * look.each * BLOCK, row = max(look.fresh - begin, 0) + thread() / chunks;
    if (row < BLOCK && begin + row <= look.newest)
        take_place(s, layer, look, row, thread() % chunks, s.places[row], true);
}

// Copies the queries of a tile to shared memory: lanes are its rows' heads that share the key head.
__device__ inline void take_query(Shared& s, const Pass& pass, const Look& look) {
    constexpr int chunks = DIM / 8;
    for (int number = thread(); number < LANES * chunks; number += THREADS) {
        int lane = number / chunks, chunk = number % chunks, row = lane / Look::wide, own = lane % Look::wide;
        bool used = row < look.count && own < Look::group;
        int line = used ? (look.first + row) * HEADS + look.head * Look::group + own : 0;
        copy_16_or_zero(shared_address(s.attention.query) + lane * (DIM * 2) + (chunk ^ lane % 8) * 16,
                        pass.query + line * DIM + chunk * 8, used);
    }
}

// The softmax of the block that lies in shared memory: a warp has eight positions of the scores, then all
// weights, then an eighth of the columns of values.
__device__ inline Softmax look_at_block(Shared& s, const Look& look, int block) {
    int warp = thread() / 32, lane = thread() % 32, g = lane / 4, q = lane % 4;
    u32 keys = shared_address(s.attention.keys), values = shared_address(s.attention.values);
    u32 query = shared_address(s.attention.query);
    float scores[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    int key = warp * 8 + lane % 8;
#pragma unroll
    for (int c = 0; c < DIM / 8; c += 4) {
        u32 a[2][4], b[4];
        load_fragments(b, keys + key * (DIM * 2) + ((c + lane / 8) ^ lane % 8) * 16);
#pragma unroll
        for (int i = 0; i < 2; i++)
            load_fragments(a[i], query + lane % 16 * (DIM * 2) + ((c + i * 2 + lane / 16) ^ lane % 8) * 16);
        multiply(scores, a[0], b[0], b[1]);
        multiply(scores, a[1], b[2], b[3]);
    }
    *(float2*)&s.attention.scores[g][warp * 8 + q * 2] = make_float2(scores[0], scores[1]);
    if (Softmax::halves > 1)
        *(float2*)&s.attention.scores[g + 8][warp * 8 + q * 2] = make_float2(scores[2], scores[3]);
    sync();
    Softmax part;
    float weights[Softmax::halves][BLOCK / 8][2];  // of its lanes, two positions of each eight
#pragma unroll
    for (int i = 0; i < Softmax::halves; i++) {
        int position = s.row_position[look.first + min((g + i * 8) / Look::wide, look.count - 1)];
#pragma unroll
        for (int j = 0; j < BLOCK / 8; j++) {
            float2 two = *(float2*)&s.attention.scores[g + i * 8][j * 8 + q * 2];
            int column = block * BLOCK + j * 8 + q * 2;
            float scale = __int_as_float(SCALE_BITS);
            weights[i][j][0] = column <= position ? __fmul_rn(two.x, scale) : nothing();
            weights[i][j][1] = column + 1 <= position ? __fmul_rn(two.y, scale) : nothing();
            part.highest[i] = fmaxf(part.highest[i], fmaxf(weights[i][j][0], weights[i][j][1]));
        }
        part.highest[i] = fmaxf(part.highest[i], __shfl_xor_sync(0xffffffff, part.highest[i], 2));
        part.highest[i] = fmaxf(part.highest[i], __shfl_xor_sync(0xffffffff, part.highest[i], 1));
        float zero = safe(part.highest[i]), sums[4];
#pragma unroll
        for (int j = 0; j < BLOCK / 8; j++)
            for (int k = 0; k < 2; k++) weights[i][j][k] = power_of_two(__fsub_rn(weights[i][j][k], zero));
        // in the order in which Triton's four warps add up
#pragma unroll
        for (int j = 0; j < 4; j++) {
            sums[j] = __fadd_rn(__fadd_rn(weights[i][j][0], weights[i][j][1]), weights[i][j + 4][0]);
            sums[j] = __fadd_rn(sums[j], weights[i][j + 4][1]);
            sums[j] = __fadd_rn(sums[j], __shfl_xor_sync(0xffffffff, sums[j], 2));
            sums[j] = __fadd_rn(sums[j], __shfl_xor_sync(0xffffffff, sums[j], 1));
        }
        part.total[i] = __fadd_rn(__fadd_rn(sums[0], sums[2]), __fadd_rn(sums[1], sums[3]));
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int n = 0; n < Softmax::wide; n++) {
            u32 v[4];
            int chunk = warp * Softmax::wide + n, row = half * 32 + lane;
            load_turned_fragments(v, values + row * (DIM * 2) + (chunk ^ row % 8) * 16);
#pragma unroll
            for (int t = 0; t < 2; t++) {
                int j = half * 4 + t * 2;
                u32 a[4];
#pragma unroll
                for (int k = 0; k < 4; k++)
                    if (k % 2 < Softmax::halves)
                        a[k] = pack(weights[k % 2][j + k / 2][0], weights[k % 2][j + k / 2][1]);
                    else a[k] = 0;
                multiply(part.mixed[0][n], a, v[t * 2], v[t * 2 + 1]);
            }
        }
    }
    return part;
}

struct PartPlace {  // of a part in memory, for this thread's lanes and columns
    float *values, *totals;
    __device__ PartPlace(const Pass& pass, const Look& look, int number) {
        int warp = thread() / 32, lane = thread() % 32;
        long line = ((long)(look.tile * KV_HEADS + look.head) * PARTS + number) * LANES + lane / 4;
        values = pass.part_values + line * DIM + warp * (Softmax::wide * 8) + lane % 4 * 2;
        totals = pass.part_totals + line * 2;
    }
    __device__ void leave(const Softmax& part) const {
#pragma unroll
        for (int i = 0; i < Softmax::halves; i++) {
#pragma unroll
            for (int n = 0; n < Softmax::wide; n++)
                *(float2*)(values + i * 8 * DIM + n * 8) =
                    make_float2(part.mixed[0][n][2 * i], part.mixed[0][n][2 * i + 1]);
            if (thread() < 32 && thread() % 4 == 0)
                *(float2*)(totals + i * 16) = make_float2(part.highest[i], part.total[i]);
        }
    }
    __device__ Softmax take() const {
        Softmax part;
#pragma unroll
        for (int i = 0; i < Softmax::halves; i++) {
#pragma unroll
            for (int n = 0; n < Softmax::wide; n++) {
                float2 v = __ldcg((const float2*)(values + i * 8 * DIM + n * 8));
                part.mixed[0][n][2 * i] = v.x, part.mixed[0][n][2 * i + 1] = v.y;
            }
            float2 t = __ldcg((const float2*)(totals + i * 16));
            part.highest[i] = t.x, part.total[i] = t.y;
        }
        return part;
    }
};

__device__ inline void take_8(float (&to)[8], const float* from) {
    float4 a = __ldcg((const float4*)from), b = __ldcg((const float4*)(from + 4));
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

// Eight columns of a head, merged from at most BY_ALL parts, which lie at `values` and `totals`.
__device__ inline uint4 merge_parts(const float* values, const float* totals, int parts) {
    float highest = nothing(), total = 0.0f, mixed[8] = {};
    for (int first = 0; first < parts; first += 4) {
        float v[4][8] = {};  // that are on their way at once
        float2 t[4] = {};
#pragma unroll
        for (int p = 0; p < 4; p++)
            if (first + p < parts) {
                take_8(v[p], values + (first + p) * (LANES * DIM));
                t[p] = __ldcg((const float2*)(totals + (first + p) * (LANES * 2)));
            }
#pragma unroll
        for (int p = 0; p < 4; p++)
            if (first + p < parts) {
                float higher = fmaxf(highest, t[p].x), zero = safe(higher);
                float shrink = power_of_two(__fsub_rn(highest, zero));
                float other_shrink = power_of_two(__fsub_rn(t[p].x, zero));
                highest = higher;
                total = __fmaf_rn(total, shrink, __fmul_rn(t[p].y, other_shrink));
#pragma unroll
                for (int e = 0; e < 8; e++)
                    mixed[e] = __fmaf_rn(mixed[e], shrink, __fmul_rn(v[p][e], other_shrink));
            }
    }
#pragma unroll
    for (int e = 0; e < 8; e++) mixed[e] = divide(mixed[e], total);
    return make_uint4(pack(mixed[0], mixed[1]), pack(mixed[2], mixed[3]), pack(mixed[4], mixed[5]),
                      pack(mixed[6], mixed[7]));
}

// What attention has mixed, to shared memory. Few parts are merged by every block, since all need them: that
// is sooner than to wait for one who merges them.
__device__ inline void take_mixed(Shared& s, const Pass& pass) {
    constexpr int line = HEADS * DIM / 8, chunks = ROWS * line, each = upwards(chunks, THREADS);
    auto by_all = [&](int row) { return s.row_parts[row] > 0 && s.row_parts[row] <= BY_ALL; };
    auto leave = [&](int number, uint4 chunk) {
        int row = number / line;
        *(uint4*)&s.product.rows[row * (HEADS * DIM) + (number % line ^ row % 8) * 8] = chunk;
    };
    uint4 taken[each];
#pragma unroll
    for (int i = 0; i < each; i++) {
        int number = i * THREADS + thread();
        bool wanted = number < chunks && !by_all(number / line);
        taken[i] = wanted ? fresh_16(pass.mixed + number * 8) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < each; i++) {
        int number = i * THREADS + thread();
        if (number < chunks && !by_all(number / line)) leave(number, taken[i]);
    }
#pragma unroll 1
    for (int number = thread(); number < chunks; number += THREADS) {
        int row = number / line, column = number % line * 8, head = column / DIM;
        if (!by_all(row)) continue;
        long at = s.row_line[row] + head / Look::group * (PARTS * LANES) + head % Look::group;
        const float* values = pass.part_values + at * DIM + column % DIM;
        leave(number, merge_parts(values, pass.part_totals + at * 2, s.row_parts[row]));
    }
}

__device__ inline void leave_mixed(const Pass& pass, const Look& look, const Softmax& whole) {
    int warp = thread() / 32, lane = thread() % 32;
#pragma unroll
    for (int i = 0; i < Softmax::halves; i++) {
        int row = (lane / 4 + i * 8) / Look::wide, own = (lane / 4 + i * 8) % Look::wide;
        if (row < look.count && own < Look::group) {
            u16* to = pass.mixed + ((long)(look.first + row) * HEADS + look.head * Look::group + own) * DIM;
#pragma unroll
            for (int n = 0; n < Softmax::wide; n++) {
                float one = divide(whole.mixed[0][n][2 * i], whole.total[i]);
                float two = divide(whole.mixed[0][n][2 * i + 1], whole.total[i]);
                *(u32*)(to + (warp * Softmax::wide + n) * 8 + lane % 4 * 2) = pack(one, two);
            }
        }
    }
}

// This block's parts. Positions before this pass are in shared memory, or on their way, when it begins.
__device__ inline void attention(Shared& s, const Pass& pass, const Layer& layer, const Look& look) {
    if (!look.active()) return;
    take_query(s, pass, look);
    take_fresh(s, layer, look);
    Softmax whole;
    for (int number = look.taker; number < look.end; number += Look::takers) {
        int begin = number * look.each;
        for (int block = begin; block < min(begin + look.each, look.blocks); block++) {
            if (block != look.taker * look.each) {
                sync();  // everybody has read the block before
                take_block(s, layer, look, block);
            }
            end_copies();
            await_copies<0>();
            sync();
            Softmax part = look_at_block(s, look, block);
            if (block == begin) whole = part;
            else merge(whole, part);
        }
        PartPlace(pass, look, number).leave(whole);
    }
    if (look.end > BY_ALL) {  // who comes last merges them
        sync();
        u32* counter = pass.counters + 2 + look.tile * KV_HEADS + look.head;
        if (thread() == 0) s.last = comes_last(counter, min(Look::takers, look.end));
        sync();
        auto take = [&](int number) { return PartPlace(pass, look, number).take(); };
        if (s.last) leave_mixed(pass, look, gather<Softmax, MERGED, 4>(look.end, take));
    }
}
