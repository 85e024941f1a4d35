// Attention, as in kernels/attention/paged_attention.py and kernels/attention/softmax.py: blocks of positions, merged in order. Keys and values are
// in shared memory by KV index. In a tree block a row's positions may be at other KV indices, of the block or up to
// MAX_ROWS behind it: each row picks its scores and values.

typedef SoftmaxOf<AttentionTile::halves, DIM / 64> Softmax;  // a warp has an eighth of the columns of values

// Copies 16 bytes of a key and of a value to a line of a block, or zeros if it is not visible.
__device__ inline void copy_kv_slot(Shared& s, const Layer& layer, const AttentionTile& attn, int line, int chunk,
                                  int kv_slot, bool seen) {
    long at = ((long)kv_slot * KV_HEADS + attn.head) * DIM + chunk * 8;
    u32 to = line * (DIM * 2) + (chunk ^ line % 8) * 16;
    copy_16_or_zero(shared_address(s.attention.keys) + to, layer.keys + at, seen);
    copy_16_or_zero(shared_address(s.attention.values) + to, layer.values + at, seen);
}

// Copies keys and values of a block to shared memory. In the first block that this program reads, those of this
// pass are left to `load_fresh`; with HEAD_NORMS, in any, to `load_normed_keys`.
__device__ inline void load_block(Shared& s, const Layer& layer, const AttentionTile& attn, int block) {
    constexpr int chunks = DIM / 8;
    bool first = block == attn.kv_split * attn.each;
#pragma unroll
    for (int i = 0; i < ceil_div(LINES * chunks, THREADS); i++) {
        int number = i * THREADS + thread(), line = number / chunks, chunk = number % chunks;
        int index = block * BLOCK + line;
        bool seen = index <= attn.last;
        if (LINES > BLOCK && line >= LINES) break;
        if ((first || HEAD_NORMS) && seen && index >= attn.fresh) continue;
        int kv_slot = !seen ? 0 : first ? s.kv_slots[line] : attn.kv_slot(index);
        copy_kv_slot(s, layer, attn, line, chunk, kv_slot, seen);
    }
}
__device__ inline void load_fresh(Shared& s, const Layer& layer, const AttentionTile& attn) {
    constexpr int chunks = DIM / 8;
    static_assert(ROWS * chunks <= THREADS, "");
    int begin = attn.kv_split * attn.each * BLOCK, line = max(attn.fresh - begin, 0) + thread() / chunks;
    if (line < LINES && begin + line <= attn.last)
        copy_kv_slot(s, layer, attn, line, thread() % chunks, s.kv_slots[line], true);
}

__device__ inline void load_8(float (&to)[8], const float* from) {
    float4 a = __ldcg((const float4*)from), b = __ldcg((const float4*)(from + 4));
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

// Eight columns of a head of the first half and their RoPE partners of the second, normed and rotated: see
// kernels/attention/heads.py.
struct NormedHead {
    uint4 first, second;
    __device__ NormedHead(const Pass& pass, int row, int head, const u16* norm, int position, int chunk) {
        constexpr int groups = DIM / 8;
        int line = row * (HEADS + KV_HEADS) + head;
        float one[8], two[8], cosine[8], sine[8], sums[groups];
        load_8(one, pass.heads + line * DIM + chunk * 8);
        load_8(two, pass.heads + line * DIM + chunk * 8 + HALF);
        load_8(cosine, pass.cosines + position * HALF + chunk * 8);
        load_8(sine, pass.sines + position * HALF + chunk * 8);
#pragma unroll
        for (int i = 0; i < groups; i += 8) load_8((float(&)[8])sums[i], pass.head_squares + line * groups + i);
        uint4 low = *(const uint4*)(norm + chunk * 8), high = *(const uint4*)(norm + chunk * 8 + HALF);
        u32 weights[2][4] = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
#pragma unroll
        for (int apart = 1; apart < groups; apart *= 2)  // in pairs
#pragma unroll
            for (int i = 0; i < groups; i += 2 * apart) sums[i] = __fadd_rn(sums[i], sums[i + apart]);
        float factor = inverse_root(__fadd_rn(divide(sums[0], (float)DIM), __int_as_float(EPS_BITS)));
#pragma unroll
        for (int e = 0; e < 8; e++) {
            float weight[2] = {unpack((u16)(weights[0][e / 2] >> e % 2 * 16)),
                               unpack((u16)(weights[1][e / 2] >> e % 2 * 16))};
            float x = __fmul_rn(one[e], __fmul_rn(factor, weight[0]));
            float y = __fmul_rn(two[e], __fmul_rn(factor, weight[1]));
            one[e] = __fsub_rn(__fmul_rn(x, cosine[e]), __fmul_rn(y, sine[e]));
            two[e] = __fadd_rn(__fmul_rn(y, cosine[e]), __fmul_rn(x, sine[e]));
        }
        first = make_uint4(pack(one[0], one[1]), pack(one[2], one[3]), pack(one[4], one[5]), pack(one[6], one[7]));
        second = make_uint4(pack(two[0], two[1]), pack(two[2], two[3]), pack(two[4], two[5]), pack(two[6], two[7]));
    }
};
__device__ inline void store_chunk(u16* lines, int line, int chunk, uint4 what) {
    *(uint4*)&lines[line * DIM + (chunk ^ line % 8) * 8] = what;
}

// The queries of a tile, to shared memory, as `load_query` has them.
__device__ inline void load_normed_query(Shared& s, const Pass& pass, const Layer& layer, const AttentionTile& attn) {
    constexpr int pairs = DIM / 16;
    for (int number = thread(); number < LANES * pairs; number += THREADS) {
        int lane = number / pairs, chunk = number % pairs;
        int row = attn.first + lane / AttentionTile::wide, own = lane % AttentionTile::wide;
        uint4 first = make_uint4(0, 0, 0, 0), second = first;
        if (row < attn.first + attn.count && own < AttentionTile::group) {
            int head = attn.head * AttentionTile::group + own;
            NormedHead normed(pass, row, head, layer.query_norm, s.row_position[row], chunk);
            first = normed.first, second = normed.second;
        }
        store_chunk(s.attention.query, lane, chunk, first);
        store_chunk(s.attention.query, lane, chunk + pairs, second);
    }
}
// Keys and values of this pass in a block, to shared memory; keys to their KV slots, too. By the second half of the
// threads: the first loads queries. Blocks that see the same key store the same bits.
__device__ inline void load_normed_keys(Shared& s, const Pass& pass, const Layer& layer, const AttentionTile& attn,
                                        int block) {
    constexpr int pairs = DIM / 16, chunks = DIM / 8, step = THREADS / 2;
    int begin = max(attn.fresh, block * BLOCK), count = min(attn.last + 1, block * BLOCK + LINES) - begin;
    int number = thread() - step;
    if (number < 0) return;
    auto offset = [&](int index) { return ((long)attn.kv_slot(index) * KV_HEADS + attn.head) * DIM; };
    for (int n = number; n < count * chunks; n += step) {
        int index = begin + n / chunks, line = index - block * BLOCK, chunk = n % chunks;
        copy_16(shared_address(s.attention.values) + line * (DIM * 2) + (chunk ^ line % 8) * 16,
                layer.values + offset(index) + chunk * 8);
    }
    for (int n = number; n < count * pairs; n += step) {
        int index = begin + n / pairs, line = index - block * BLOCK, chunk = n % pairs;
        int row = attn.fresh_row + index - attn.fresh;
        NormedHead normed(pass, row, HEADS + attn.head, layer.key_norm, s.row_position[row], chunk);
        store_chunk(s.attention.keys, line, chunk, normed.first);
        store_chunk(s.attention.keys, line, chunk + pairs, normed.second);
        if (s.row_slot[row] >= 0) {
            u16* to = layer.keys + offset(index) + chunk * 8;
            *(uint4*)to = normed.first;
            *(uint4*)(to + HALF) = normed.second;
        }
    }
}

// Copies the queries of a tile to shared memory: lanes are its rows' heads that share the KV head.
__device__ inline void load_query(Shared& s, const Pass& pass, const AttentionTile& attn) {
    constexpr int chunks = DIM / 8;
    for (int number = thread(); number < LANES * chunks; number += THREADS) {
        int lane = number / chunks, chunk = number % chunks;
        int row = lane / AttentionTile::wide, own = lane % AttentionTile::wide;
        bool used = row < attn.count && own < AttentionTile::group;
        int line = used ? (attn.first + row) * HEADS + attn.head * AttentionTile::group + own : 0;
        copy_16_or_zero(shared_address(s.attention.query) + lane * (DIM * 2) + (chunk ^ lane % 8) * 16,
                        pass.query + line * DIM + chunk * 8, used);
    }
}

// The line of a position of this block for a row. Positions that the row does not see have any line.
__device__ inline int picked_line(const Shared& s, int block, int row, int position) {
    int step = position - s.row_until[row];
    return (step < 0 || position > s.row_position[row] ? position : s.row_path[row][step]) - block * BLOCK;
}

// The scores of all lanes and the eight lines from `first` on.
__device__ inline void score_lines(Shared& s, int first) {
    int lane = thread() % 32, g = lane / 4, q = lane % 4, key = first + lane % 8;
    u32 keys = shared_address(s.attention.keys), query = shared_address(s.attention.query);
    float scores[4] = {0.0f, 0.0f, 0.0f, 0.0f};
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
    *(float2*)&s.attention.scores[g][first + q * 2] = make_float2(scores[0], scores[1]);
    if (Softmax::halves > 1)
        *(float2*)&s.attention.scores[g + 8][first + q * 2] = make_float2(scores[2], scores[3]);
}

// The partial result of the block in shared memory: a warp has eight positions of the scores, then all weights,
// then an eighth of the columns of values.
__device__ inline Softmax look_at_block(Shared& s, const AttentionTile& attn, int block) {
    int warp = thread() / 32, lane = thread() % 32, g = lane / 4, q = lane % 4;
    u32 values = shared_address(s.attention.values);
    bool is_tree = attn.is_tree_block(block);
    score_lines(s, warp * 8);
    if (is_tree && warp == 0) score_lines(s, BLOCK);
    sync();
    Softmax part;
    float weights[Softmax::halves][BLOCK / 8][2];  // of its lanes, two positions of each eight
#pragma unroll
    for (int i = 0; i < Softmax::halves; i++) {
        int row = attn.first + min((g + i * 8) / AttentionTile::wide, attn.count - 1);
        int position = s.row_position[row];
        const float* scores = s.attention.scores[g + i * 8];
#pragma unroll
        for (int j = 0; j < BLOCK / 8; j++) {
            int column = block * BLOCK + j * 8 + q * 2;
            float2 two = *(const float2*)&scores[j * 8 + q * 2];
            if (is_tree)
                two = make_float2(scores[picked_line(s, block, row, column)],
                                  scores[picked_line(s, block, row, column + 1)]);
            float scale = __int_as_float(SCALE_BITS);
            weights[i][j][0] = column <= position ? __fmul_rn(two.x, scale) : negative_infinity();
            weights[i][j][1] = column + 1 <= position ? __fmul_rn(two.y, scale) : negative_infinity();
            part.highest[i] = fmaxf(part.highest[i], fmaxf(weights[i][j][0], weights[i][j][1]));
        }
        part.highest[i] = fmaxf(part.highest[i], __shfl_xor_sync(0xffffffff, part.highest[i], 2));
        part.highest[i] = fmaxf(part.highest[i], __shfl_xor_sync(0xffffffff, part.highest[i], 1));
        float zero = safe(part.highest[i]), sums[4];
#pragma unroll
        for (int j = 0; j < BLOCK / 8; j++)
            for (int k = 0; k < 2; k++) weights[i][j][k] = power_of_two(__fsub_rn(weights[i][j][k], zero));
        // in the order of Triton's four warps
#pragma unroll
        for (int j = 0; j < 4; j++) {
            sums[j] = __fadd_rn(__fadd_rn(weights[i][j][0], weights[i][j][1]), weights[i][j + 4][0]);
            sums[j] = __fadd_rn(sums[j], weights[i][j + 4][1]);
            sums[j] = __fadd_rn(sums[j], __shfl_xor_sync(0xffffffff, sums[j], 2));
            sums[j] = __fadd_rn(sums[j], __shfl_xor_sync(0xffffffff, sums[j], 1));
        }
        part.total[i] = __fadd_rn(__fadd_rn(sums[0], sums[2]), __fadd_rn(sums[1], sums[3]));
    }
    // adds the weighted values of all lanes, which are in these lines; the thread says which line its position has
    auto add_values = [&](float (&acc)[Softmax::wide][4], int line, int half) {
#pragma unroll
        for (int n = 0; n < Softmax::wide; n++) {
            u32 v[4];
            int chunk = warp * Softmax::wide + n;
            load_fragments_transposed(v, values + line * (DIM * 2) + (chunk ^ line % 8) * 16);
#pragma unroll
            for (int t = 0; t < 2; t++) {
                int j = half * 4 + t * 2;
                u32 a[4];
#pragma unroll
                for (int k = 0; k < 4; k++)
                    if (k % 2 < Softmax::halves)
                        a[k] = pack(weights[k % 2][j + k / 2][0], weights[k % 2][j + k / 2][1]);
                    else a[k] = 0;
                multiply(acc[n], a, v[t * 2], v[t * 2 + 1]);
            }
        }
    };
    if (!is_tree) {
#pragma unroll
        for (int half = 0; half < 2; half++) add_values(part.acc[0], half * 32 + lane, half);
        return part;
    }
    for (int row = 0; row < attn.count; row++) {  // of which its own lanes are taken
        float own[Softmax::wide][4] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int position = block * BLOCK + half * 32 + lane;
            add_values(own, picked_line(s, block, attn.first + row, position), half);
        }
#pragma unroll
        for (int n = 0; n < Softmax::wide; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if ((g + i / 2 * 8) / AttentionTile::wide == row) part.acc[0][n][i] = own[n][i];
    }
    return part;
}

struct PartialAddress {  // of a partial in memory, for this thread's lanes and columns
    float *values, *totals;
    __device__ PartialAddress(const Pass& pass, const AttentionTile& attn, int number) {
        int warp = thread() / 32, lane = thread() % 32;
        long line = ((long)(attn.tile * KV_HEADS + attn.head) * PARTS + number) * LANES + lane / 4;
        values = pass.part_values + line * DIM + warp * (Softmax::wide * 8) + lane % 4 * 2;
        totals = pass.part_totals + line * 2;
    }
    __device__ void store(const Softmax& part) const {
#pragma unroll
        for (int i = 0; i < Softmax::halves; i++) {
#pragma unroll
            for (int n = 0; n < Softmax::wide; n++)
                *(float2*)(values + i * 8 * DIM + n * 8) =
                    make_float2(part.acc[0][n][2 * i], part.acc[0][n][2 * i + 1]);
            if (thread() < 32 && thread() % 4 == 0)
                *(float2*)(totals + i * 16) = make_float2(part.highest[i], part.total[i]);
        }
    }
    __device__ Softmax load() const {
        Softmax part;
#pragma unroll
        for (int i = 0; i < Softmax::halves; i++) {
#pragma unroll
            for (int n = 0; n < Softmax::wide; n++) {
                float2 v = __ldcg((const float2*)(values + i * 8 * DIM + n * 8));
                part.acc[0][n][2 * i] = v.x, part.acc[0][n][2 * i + 1] = v.y;
            }
            float2 t = __ldcg((const float2*)(totals + i * 16));
            part.highest[i] = t.x, part.total[i] = t.y;
        }
        return part;
    }
};

// Eight columns of a head, merged from at most MERGED_BY_ALL partials at `values` and `totals`.
__device__ inline uint4 merge_columns(const float* values, const float* totals, int parts) {
    float highest = negative_infinity(), total = 0.0f, acc[8] = {};
    for (int first = 0; first < parts; first += 4) {
        float v[4][8] = {};  // loads in flight
        float2 t[4] = {};
#pragma unroll
        for (int p = 0; p < 4; p++)
            if (first + p < parts) {
                load_8(v[p], values + (first + p) * (LANES * DIM));
                t[p] = __ldcg((const float2*)(totals + (first + p) * (LANES * 2)));
            }
#pragma unroll
        for (int p = 0; p < 4; p++)
            if (first + p < parts) {
                float higher = fmaxf(highest, t[p].x), zero = safe(higher);
                float rescale = power_of_two(__fsub_rn(highest, zero));
                float other_rescale = power_of_two(__fsub_rn(t[p].x, zero));
                highest = higher;
                total = __fmaf_rn(total, rescale, __fmul_rn(t[p].y, other_rescale));
#pragma unroll
                for (int e = 0; e < 8; e++)
                    acc[e] = __fmaf_rn(acc[e], rescale, __fmul_rn(v[p][e], other_rescale));
            }
    }
#pragma unroll
    for (int e = 0; e < 8; e++) acc[e] = divide(acc[e], total);
    return make_uint4(pack(acc[0], acc[1]), pack(acc[2], acc[3]), pack(acc[4], acc[5]),
                      pack(acc[6], acc[7]));
}

// The attention output, to shared memory. Few partials are merged by every block, since all need the result: that
// is faster than waiting for one block to merge them.
__device__ inline void load_attention(Shared& s, const Pass& pass) {
    constexpr int line = HEADS * DIM / 8, chunks = ROWS * line, each = ceil_div(chunks, THREADS);
    auto by_all = [&](int row) { return s.row_parts[row] > 0 && s.row_parts[row] <= MERGED_BY_ALL; };
    auto store = [&](int number, uint4 chunk) {
        int row = number / line;
        *(uint4*)&s.product.rows[row * (HEADS * DIM) + (number % line ^ row % 8) * 8] = chunk;
    };
    uint4 taken[each];
#pragma unroll
    for (int i = 0; i < each; i++) {
        int number = i * THREADS + thread();
        bool wanted = number < chunks && !by_all(number / line);
        taken[i] = wanted ? load_cg_16(pass.attention_output + number * 8) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < each; i++) {
        int number = i * THREADS + thread();
        if (number < chunks && !by_all(number / line)) store(number, taken[i]);
    }
#pragma unroll 1
    for (int number = thread(); number < chunks; number += THREADS) {
        int row = number / line, column = number % line * 8, head = column / DIM;
        if (!by_all(row)) continue;
        long at = s.row_line[row] + head / AttentionTile::group * (PARTS * LANES) + head % AttentionTile::group;
        const float* values = pass.part_values + at * DIM + column % DIM;
        store(number, merge_columns(values, pass.part_totals + at * 2, s.row_parts[row]));
    }
}

__device__ inline void store_attention(const Pass& pass, const AttentionTile& attn, const Softmax& whole) {
    int warp = thread() / 32, lane = thread() % 32;
#pragma unroll
    for (int i = 0; i < Softmax::halves; i++) {
        int row = (lane / 4 + i * 8) / AttentionTile::wide, own = (lane / 4 + i * 8) % AttentionTile::wide;
        if (row < attn.count && own < AttentionTile::group) {
            long head = (long)(attn.first + row) * HEADS + attn.head * AttentionTile::group + own;
            u16* to = pass.attention_output + head * DIM;
#pragma unroll
            for (int n = 0; n < Softmax::wide; n++) {
                float one = divide(whole.acc[0][n][2 * i], whole.total[i]);
                float two = divide(whole.acc[0][n][2 * i + 1], whole.total[i]);
                *(u32*)(to + (warp * Softmax::wide + n) * 8 + lane % 4 * 2) = pack(one, two);
            }
        }
    }
}

// This block's partials. Keys and values before this pass are in shared memory, or in flight, when it begins.
__device__ inline void attention(Shared& s, const Pass& pass, const Layer& layer, const AttentionTile& attn) {
    if (!attn.active()) return;
    if (HEAD_NORMS) load_normed_query(s, pass, layer, attn);
    else load_query(s, pass, attn), load_fresh(s, layer, attn);
    Softmax whole;
    for (int number = attn.kv_split; number < attn.end; number += AttentionTile::kv_splits) {
        int begin = number * attn.each;
        for (int block = begin; block < min(begin + attn.each, attn.blocks); block++) {
            if (block != attn.kv_split * attn.each) {
                sync();  // all warps have read the block before
                load_block(s, layer, attn, block);
            }
            if (HEAD_NORMS) load_normed_keys(s, pass, layer, attn, block);
            commit_copies();
            wait_copies<0>();
            sync();
            Softmax part = look_at_block(s, attn, block);
            if (block == begin) whole = part;
            else merge(whole, part);
        }
        PartialAddress(pass, attn, number).store(whole);
    }
    if (attn.end > MERGED_BY_ALL) {  // the last block to arrive merges them
        sync();
        u32* counter = pass.counters + 2 + attn.tile * KV_HEADS + attn.head;
        if (thread() == 0) s.last = is_last_arrival(counter, min(AttentionTile::kv_splits, attn.end));
        sync();
        auto load = [&](int number) { return PartialAddress(pass, attn, number).load(); };
        if (s.last) store_attention(pass, attn, merge_partials<Softmax, MERGE_FAN_IN, 4>(attn.end, load));
    }
}
