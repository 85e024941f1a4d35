// Decode attention: what the warps do that compute. See decode_attention_loads.cu.

// Barrier of these warps.
__device__ inline void sync() { sync_named_barrier<3, MMA_THREADS>(); }

template <int STAGES> __device__ inline void await_window(u64 (&flags)[STAGES], int turn) {
    wait_mbarrier(&flags[turn % STAGES], turn / STAGES % 2);
}

// QK warpgroup: the scores of a window. A thread has positions g and g + 8 of its warp's 16, where g is its quad, and
// two of every eight lanes.
struct ScoreWarps {
    float sums[LANES / 2];
    __device__ void load(Shared& s, int turn) {
        await_window(s.keys_there, turn);
        u64 keys = smem_descriptor(s.keys[turn % KEY_STAGES]), query = smem_descriptor(s.query);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < DIM / 16; k++)
            multiply(sums, keys + k / 4 * (BLOCK * 8) + k % 4 * 2, query + k / 4 * (LANES * 8) + k % 4 * 2, k);
        wgmma_commit();
    }
    // Stores them for a block, from `column` on.
    __device__ void store(Shared& s, int number, int column) {
        int line = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
        float scale = __int_as_float(SCALE_BITS);
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < LANES / 2; i++)
            s.scores[number % 2][i / 4 * 8 + pair + i % 2][column + line + i / 2 % 2 * 8] = __fmul_rn(sums[i], scale);
    }
};

// Zeroes values of the last block that no row sees: they might be NaN. Done by the QK warpgroup.
__device__ inline void clear(Shared& s, const AttentionTile& attn, int number, int block) {
    int seen = attn.furthest + 1 - block * BLOCK;
    if (seen >= BLOCK) return;
    int turn = attn.turn + number;
    await_window(s.values_there, turn);
    for (int i = seen * CHUNKS + threadIdx.x; i < BLOCK * CHUNKS; i += WARPGROUP)
        *(uint4*)((char*)s.values[turn % VALUE_STAGES] + swizzled_offset<BLOCK>(i / CHUNKS, i % CHUNKS)) =
            make_uint4(0, 0, 0, 0);
    fence_async_shared();
}

__device__ inline float with_other(float x, int apart) { return __fadd_rn(x, __shfl_xor_sync(~0u, x, apart)); }

// row_max and row_sum of an online softmax.
struct Totals {
    float highest = negative_infinity(), total = 0.0f;
    // Merges others, as softmax.cu does. Returns the rescale factors of what was there before, and of the others.
    __device__ float2 merge(const Totals& others) {
        float higher = fmaxf(highest, others.highest), zero = safe(higher);
        float2 rescales = make_float2(power_of_two(__fsub_rn(highest, zero)), power_of_two(__fsub_rn(others.highest, zero)));
        highest = higher, total = __fmaf_rn(total, rescales.x, __fmul_rn(others.total, rescales.y));
        return rescales;
    }
};

// Softmax warpgroups: the totals of a lane's KV chunk so far, of its group, and of all groups. Eight threads have a lane.
struct SoftmaxWarps {
    int lane, row;
    u32 seen;  // visible positions
    Totals chunk, group, whole;
    __device__ SoftmaxWarps(const Arguments& a, const AttentionTile& attn) {
        lane = (threadIdx.x - FIRST_SOFTMAX_THREAD) / 8, row = attn.row_of(lane);
        seen = max(__shfl_sync(~0u, attn.position, row) - a.earliest + 1, 0);
    }
    // The weights of a block, summed in the order of Triton's four warps: a thread has two positions of every other
    // eight.
    __device__ void compute_weights(Shared& s, const Arguments& a, const AttentionTile& attn, int number, int block) {
        if ((threadIdx.x - FIRST_SOFTMAX_THREAD) / 32 * 4 / WIDE >= attn.count) return;  // unused lanes
        int q = threadIdx.x % 4, odd = threadIdx.x % 8 / 4, first = block * BLOCK - a.earliest;
        const float* scores = s.scores[number % 2][lane];
        const unsigned char* picked = s.picked[number % 2][row];
        float weights[4][2], sums[2];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int column = (j * 2 + odd) * 8 + q * 2;
            float2 two = attn.is_tree_block(block) ? make_float2(scores[picked[column]], scores[picked[column + 1]])
                                                : *(const float2*)&scores[column];
            weights[j][0] = two.x, weights[j][1] = two.y;
        }
        if (first < 0 || first + BLOCK > seen)
#pragma unroll
            for (int i = 0; i < 8; i++)
                if ((u32)(first + (i / 2 * 2 + odd) * 8 + q * 2 + i % 2) >= seen)
                    weights[i / 2][i % 2] = negative_infinity();
        float own = fmaxf(fmaxf(fmaxf(weights[0][0], weights[0][1]), fmaxf(weights[1][0], weights[1][1])),
                          fmaxf(fmaxf(weights[2][0], weights[2][1]), fmaxf(weights[3][0], weights[3][1])));
#pragma unroll
        for (int apart = 4; apart > 0; apart /= 2) own = fmaxf(own, __shfl_xor_sync(~0u, own, apart));
        float zero = safe(own);
#pragma unroll
        for (int j = 0; j < 4; j++) {
#pragma unroll
            for (int i = 0; i < 2; i++) weights[j][i] = power_of_two(__fsub_rn(weights[j][i], zero));
            u32 offset = swizzled_offset<LANES>(lane, j * 2 + odd) + q * 4;
            *(u32*)((char*)s.weights[number % 2] + offset) = pack(weights[j][0], weights[j][1]);
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            sums[j] = __fadd_rn(__fadd_rn(weights[j][0], weights[j][1]), weights[j + 2][0]);
            sums[j] = with_other(with_other(__fadd_rn(sums[j], weights[j + 2][1]), 2), 1);
        }
        Totals of_block;
        of_block.highest = own, of_block.total = with_other(__fadd_rn(sums[0], sums[1]), 4);
        add(s, a, attn, number, block, of_block);
    }
    // Merges the totals of a block, and stores the rescale factors of the values.
    __device__ void add(Shared& s, const Arguments& a, const AttentionTile& attn, int number, int block,
                        const Totals& of_block) {
        if (attn.begins_chunk(number)) chunk = Totals();
        float2 rescales = chunk.merge(of_block);
        bool is_first = threadIdx.x % 8 == 0;
        if (is_first) s.rescales[number % 2][lane] = rescales;
        if (!attn.ends_chunk(number)) return;
        if (!attn.is_alone) {
            if (is_first && attn.line_of(lane) >= 0)
                *((float2*)a.partial_stats + attn.partial_index(a, lane, block / MERGE_FAN_IN)) =
                    make_float2(chunk.highest, chunk.total);
            return;
        }
        float2 of_chunk = group.merge(chunk), of_group = make_float2(1.0f, 0.0f);
        if (attn.ends_group(number)) of_group = whole.merge(group), group = Totals();
        if (!is_first) return;
        s.merges[number % 2][lane] = make_float4(of_chunk.x, of_chunk.y, of_group.x, of_group.y);
        s.row_sums[lane] = whole.total;
    }
};

// PV warpgroups: the weighted values of a KV chunk so far, and of its group; those of the groups before are in memory. A warpgroup has 64 columns; a thread has columns g and g + 8
// of its warp's 16, where g is its quad, and two of every eight lanes.
struct ValueWarps {
    float acc[LANES / 2], part[LANES / 2], group[LANES / 2] = {};
    __device__ static int columns() { return (threadIdx.x - FIRST_PV_THREAD) / WARPGROUP; }  // which 64
    __device__ static int chunk() { return columns() * 8 + threadIdx.x % WARPGROUP / 32 * 2; }  // the warp's first
    __device__ static int lane(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }
    __device__ void accumulate(Shared& s, const AttentionTile& attn, int number, int block) {
        int turn = attn.turn + number;
        await_window(s.values_there, turn);
        if (attn.is_tree_block(block)) {
            await_window(s.values_there, turn + 1);
            accumulate_picked(s, number, turn);
        } else {
            u64 values = smem_descriptor(s.values[turn % VALUE_STAGES]) + columns() * (BLOCK * 8);
            u64 weights = smem_descriptor(s.weights[number % 2]);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < BLOCK / 16; k++) multiply_transposed(part, values + k * 128, weights + k * 2, k);
            wgmma_commit();
            wgmma_wait<0>();
        }
        if (attn.begins_chunk(number))
#pragma unroll
            for (int i = 0; i < LANES / 2; i++) acc[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < LANES / 2; j += 4) {
            float4 rescales = *(const float4*)&s.rescales[number % 2][lane(j)];  // of two lanes
#pragma unroll
            for (int i = j; i < j + 4; i++) {
                float before = i % 2 ? rescales.z : rescales.x, own = i % 2 ? rescales.w : rescales.y;
                acc[i] = __fmaf_rn(acc[i], before, __fmul_rn(part[i], own));
            }
        }
    }
    // Each row's own values, of the block's window or the next: eight lanes at a time, and of them those of a row.
    __device__ void accumulate_picked(const Shared& s, int number, int turn) {
        int thread = threadIdx.x % 32, own_chunk = chunk() + thread / 8 % 2;
        u32 window = shared_address(s.values[turn % VALUE_STAGES]);
        u32 next = shared_address(s.values[(turn + 1) % VALUE_STAGES]);
#pragma unroll
        for (int j = 0; j < LANES / 8; j++) {
            u32 weights[2][4];
#pragma unroll
            for (int half = 0; half < 2; half++)
                load_fragments(weights[half], shared_address(s.weights[number % 2]) +
                                                  swizzled_offset<LANES>(j * 8 + thread % 8, half * 4 + thread / 8));
#pragma unroll
            for (int row = j * 8 / WIDE; row <= (j * 8 + 7) / WIDE; row++) {
                float sums[4] = {};
#pragma unroll
                for (int k = 0; k < BLOCK / 16; k++) {
                    int line = s.picked[number % 2][row][k * 16 + thread / 16 * 8 + thread % 8];
                    u32 own[4];
                    u32 values = line < BLOCK ? window : next;
                    load_fragments_transposed(own, values + swizzled_offset<BLOCK>(line % BLOCK, own_chunk));
                    multiply(sums, own, weights[k / 2][k % 2 * 2], weights[k / 2][k % 2 * 2 + 1]);
                }
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (lane(j * 4 + i) / WIDE == row) part[j * 4 + i] = sums[i];
            }
        }
    }
    // Merges a KV chunk into its group.
    __device__ void merge_chunk(const Shared& s, int number) {
#pragma unroll
        for (int i = 0; i < LANES / 2; i++) {
            float4 factors = s.merges[number % 2][lane(i)];
            group[i] = __fmaf_rn(group[i], factors.x, __fmul_rn(acc[i], factors.y));
        }
    }
    // Merges a group into those before, if there are any.
    __device__ void merge_group(const Shared& s, const Arguments& a, const AttentionTile& attn, int number) {
        if (number >= MERGE_FAN_IN * MERGE_FAN_IN)
#pragma unroll
            for (int i = 0; i < LANES / 2; i++) {
                float4 factors = s.merges[number % 2][lane(i)];
                float before = attn.line_of(lane(i)) < 0 ? 0.0f : *partial(a, attn, i, 0);
                group[i] = __fmaf_rn(before, factors.z, __fmul_rn(group[i], factors.w));
            }
        if (number + 1 == attn.own) return write(s, a, attn);
        store(a, attn, group, 0);
#pragma unroll
        for (int i = 0; i < LANES / 2; i++) group[i] = 0.0f;
    }
    __device__ static float* partial(const Arguments& a, const AttentionTile& attn, int i, int kv_chunk) {
        int column = chunk() * 8 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
        return a.partial_acc + attn.partial_index(a, lane(i), kv_chunk) * DIM + column;
    }
    __device__ static void store(const Arguments& a, const AttentionTile& attn, const float (&values)[LANES / 2],
                                 int kv_chunk) {
#pragma unroll
        for (int i = 0; i < LANES / 2; i++)
            if (attn.line_of(lane(i)) >= 0) *partial(a, attn, i, kv_chunk) = values[i];
    }
    // Writes the normalized output through shared memory, where lanes become lines. Sums of weights are at least one,
    // where `divide` is a multiplication by the inverse.
    __device__ void write(const Shared& s, const Arguments& a, const AttentionTile& attn) const {
        int thread = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < LANES / 8; j += 2) {
            u32 rounded[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int one = j * 4 + i * 2, two = one + 1;
                rounded[i] = pack(over(group[one], s.row_sums[lane(one)]), over(group[two], s.row_sums[lane(two)]));
            }
            int line = (j + thread / 16) * 8 + thread % 8;
            store_fragments_transposed(
                shared_address(s.query) + swizzled_offset<LANES>(line, chunk() + thread / 8 % 2), rounded);
        }
        sync_warpgroup(1 + columns());
#pragma unroll
        for (int i = threadIdx.x % WARPGROUP; i < LANES * 8; i += WARPGROUP) {
            int lane = i / 8, chunk = columns() * 8 + i % 8;
            if (attn.line_of(lane) >= 0)
                *((uint4*)attn.output(a, lane) + chunk) =
                    *(uint4*)((char*)s.query + swizzled_offset<LANES>(lane, chunk));
        }
    }
    __device__ static float over(float x, float total) { return __fmul_rn(x, inverse(total)); }
};

typedef SoftmaxOf<1, 2> Slice;  // four columns of a lane
__device__ inline Slice slice(float2 totals, float4 values) {
    Slice own;
    own.highest[0] = totals.x, own.total[0] = totals.y;
    own.acc[0][0][0] = values.x, own.acc[0][0][1] = values.y;
    own.acc[0][1][0] = values.z, own.acc[0][1][1] = values.w;
    return own;
}

// The last program to arrive merges all partials, slice by slice.
__device__ inline void merge_if_last(Shared& s, const Arguments& a, const AttentionTile& attn) {
    u32* counter = a.counters + attn.group * KV_HEADS + attn.head;
    if (threadIdx.x == 0) s.last = is_last_arrival(counter, min(attn.kv_splits, attn.partials - attn.shared_chunks));
    sync();
    if (!s.last) return;
#pragma unroll
    for (int i = threadIdx.x; i < LANES * DIM / 4; i += MMA_THREADS) {
        int lane = i / (DIM / 4), column = i % (DIM / 4) * 4;
        if (attn.line_of(lane) < 0) continue;
        Slice own = merge_partials<Slice, MERGE_FAN_IN, 8>(attn.partials, [&](int part) {
            long at = attn.partial_index(a, lane, part);
            return slice(__ldcg((const float2*)a.partial_stats + at),
                         __ldcg((const float4*)(a.partial_acc + at * DIM + column)));
        });
        const float(&m)[2][4] = own.acc[0];
        float total = own.total[0];
        *(uint2*)(attn.output(a, lane) + column) = make_uint2(pack(divide(m[0][0], total), divide(m[0][1], total)),
                                                              pack(divide(m[1][0], total), divide(m[1][1], total)));
    }
}

// The keys of the phase's block and the values of that two before may be overwritten, and what follows a tree block.
__device__ inline void release_windows(Shared& s, const AttentionTile& attn, int phase) {
    auto keys = [&](int number) { arrive_mbarrier(&s.keys_used[(attn.turn + number) % KEY_STAGES]); };
    auto values = [&](int number) { arrive_mbarrier(&s.values_used[(attn.turn + number) % VALUE_STAGES]); };
    if (phase < attn.own) keys(phase);
    if (phase >= PV) values(phase - PV);
    if (phase + 1 == attn.own + PV && attn.windows > attn.own) keys(attn.own), values(attn.own);
}

// All blocks of a unit. In a phase each role works on a different block.
template <int ROLE, class Work>
__device__ inline void run_phases(Shared& s, const AttentionTile& attn, const Work& work) {
    for (int phase = 0; phase < attn.own + PV; phase++) {
        int own = phase - ROLE;
        if (own >= 0 && own < attn.own) work(own, attn.block(own));
        if (ROLE == SOFTMAX) fence_async_shared();
        sync();
        if (ROLE == QK && threadIdx.x == 0) release_windows(s, attn, phase);
        __syncwarp();
    }
}

template <int ROLE> __device__ inline void run_blocks(Shared& s, const Arguments& a, const AttentionTile& attn) {
    if constexpr (ROLE == QK) {
        run_phases<QK>(s, attn, [&](int number, int block) {
            ScoreWarps own;
            own.load(s, attn.turn + number), own.store(s, number, 0);
            if (attn.is_tree_block(block)) own.load(s, attn.turn + number + 1), own.store(s, number, BLOCK);
            clear(s, attn, number, block);
        });
    } else if constexpr (ROLE == SOFTMAX) {
        SoftmaxWarps own(a, attn);
        run_phases<SOFTMAX>(s, attn, [&](int number, int block) { own.compute_weights(s, a, attn, number, block); });
    } else {
        ValueWarps own;
        run_phases<PV>(s, attn, [&](int number, int block) {
            own.accumulate(s, attn, number, block);
            if (!attn.ends_chunk(number)) return;
            if (!attn.is_alone) return own.store(a, attn, own.acc, block / MERGE_FAN_IN);
            own.merge_chunk(s, number);
            if (attn.ends_group(number)) own.merge_group(s, a, attn, number);
        });
    }
}

// All units of this program. Tables and queries of the next one are loaded meanwhile.
template <int ROLE> __device__ inline void run_units(Shared& s, const Arguments& a) {
    int units = num_units(a), turn = 0;
    UnitTables tables(a, Unit(a, blockIdx.x));
    uint4 query;
    bool has_waited = false;  // programs without work end at once: the next kernel's start in their place
    for (int number = blockIdx.x; number < units; number += gridDim.x) {
        AttentionTile attn(a, Unit(a, number), tables, turn);
        if (attn.own && !has_waited) {
            wait_dependencies();
            query = load_query(a, attn), has_waited = true;
        }
        if (attn.own) store_query(s, query);
        if (number + gridDim.x < units) {
            Unit next(a, number + gridDim.x);
            tables = UnitTables(a, next);
            if (has_waited) query = load_query(a, next);
        }
        if (attn.own == 0) continue;
        for (int i = max(attn.own - 2, 0); i < attn.own; i++)
            if (attn.is_tree_block(attn.block(i))) pick(s, a, attn, i, attn.block(i));
        fence_async_shared();
        sync();
        run_blocks<ROLE>(s, a, attn);
        if (!attn.is_alone) merge_if_last(s, a, attn);
        turn += attn.windows;
    }
    if (blockIdx.x == 0 && !has_waited) wait_dependencies();  // the kernel must not end before the previous ones
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_attention(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) char raw[];
    Shared& s = *(Shared*)raw;
    launch_dependents();  // the next kernel's programs start where those of this one have ended
    if (threadIdx.x == 0) {
        for (int i = 0; i < KEY_STAGES; i++) init_mbarrier(&s.keys_there[i], 1), init_mbarrier(&s.keys_used[i], 1);
        for (int i = 0; i < VALUE_STAGES; i++) init_mbarrier(&s.values_there[i], 1), init_mbarrier(&s.values_used[i], 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the compiler sees that it is the same in all threads
    if (warp >= MMA_THREADS / 32) {
        decrease_registers<LOADER_REGISTERS>();
        if (warp == MMA_THREADS / 32) load_units(s, a);
    } else if (warp >= FIRST_PV_THREAD / 32) {
        if constexpr (PARTS == 2) increase_registers<PV_REGISTERS>();
        run_units<PV>(s, a);
    } else if (warp >= FIRST_SOFTMAX_THREAD / 32) {
        run_units<SOFTMAX>(s, a);
    } else {
        run_units<QK>(s, a);
    }
}
