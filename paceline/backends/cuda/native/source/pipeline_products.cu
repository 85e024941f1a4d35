// The products of pipeline stages: weights in bfloat16, in e4m3, and in 4 bits. Sums have the order of ../kernels.

// EACH cells times a slot of rows, added to the sums. The products may end later.
template <int EACH>
__device__ inline void multiply_bf16(const Shared& s, float (&sums)[EACH][ROWS / 2], const int (&cells)[EACH], int slot,
                                     bool is_first) {
    u64 right = smem_descriptor(s.rows[slot]), left[EACH];
#pragma unroll
    for (int tile = 0; tile < EACH; tile++) left[tile] = smem_descriptor(s.weights[cells[tile]]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int tile = 0; tile < EACH; tile++)
            multiply(sums[tile], left[tile] + k * 2, right + k * 2, !is_first || k);
    wgmma_commit();
}

// Each group of 64 of a row has a scale, and the tensor core sums no more than a group: see kernels/products/fp8.py.
template <int EACH>
__device__ inline void multiply_fp8(const Shared& s, float (&sums)[EACH][ROWS / 2], const int (&cells)[EACH], int slot) {
    constexpr int in_flight = EACH * ROWS > 64 ? 1 : 2;  // groups; registers hold no more
    u64 right = smem_descriptor(s.rows[slot]);
    float some[in_flight][EACH][ROWS / 2];
    auto add_scaled = [&](int group) {
#pragma unroll
        for (int i = 0; i < ROWS / 8; i++) {
            float2 scale = *(const float2*)&s.row_scales[slot][i / 2][group][i % 2 * 8 + threadIdx.x % 4 * 2];
#pragma unroll
            for (int tile = 0; tile < EACH; tile++)
#pragma unroll
                for (int j = i * 4; j < i * 4 + 4; j++)
                    sums[tile][j] =
                        __fmaf_rn(some[group % in_flight][tile][j], j % 2 ? scale.y : scale.x, sums[tile][j]);
        }
    };
#pragma unroll
    for (int group = 0; group < 2; group++) {
        wgmma_fence();
#pragma unroll
        for (int k = group * 2; k < group * 2 + 2; k++)
#pragma unroll
            for (int tile = 0; tile < EACH; tile++)
                multiply(some[group % in_flight][tile], smem_descriptor(s.weights[cells[tile]]) + k * 2, right + k * 2,
                         k % 2);
        wgmma_commit();
        if (in_flight == 1) wgmma_wait<0>(), add_scaled(group);
    }
    if (in_flight == 1) return;
    wgmma_wait<1>(), add_scaled(0);
    wgmma_wait<0>(), add_scaled(1);
}

// A thread's words of half of a cell's groups: of its two lines, the elements 8 m + 2 t and the next one, for m from 0
// to 3. A word has one element of eight groups; here the words of two elements are combined.
struct Int4Words {
    u32 words[2][4];
    __device__ Int4Words(const char* cell, int first_line, int half) {
#pragma unroll
        for (int line = 0; line < 2; line++)
#pragma unroll
            for (int m = 0; m < 4; m++) {
                int number = first_line + line * 8, byte = (m * 32 + threadIdx.x % 4 * 8) ^ number % 8 * 16;
                uint2 two = *(const uint2*)(cell + number * 128 + byte);
                words[line][m] = __byte_perm(two.x, two.y, half ? 0x7632 : 0x5410);
            }
    }
    // The numbers of a group, one of four, as the left operand of two products.
    __device__ void unpack(u32 (&left)[2][4], int group) const {
#pragma unroll
        for (int i = 0; i < 8; i++) left[i / 4][i % 4] = int4_numbers(words[i % 2][i / 2] >> group * 4);
    }
};

// The scales of a thread's two columns of a cell.
struct Int4Scales {
    const u32* pairs;  // of groups, in float16
    int second;
    __device__ Int4Scales(const Shared& s, int cell, bool in_halves) : second(in_halves ? 32 : 8) {
        int warp = threadIdx.x % 128 / 32, line = threadIdx.x % 32 / 4;
        pairs = s.weight_scales[cell][0] + warp * (in_halves ? 8 : 16) + line;
    }
    __device__ void load(float (&scale)[2], int group) const {
#pragma unroll
        for (int i = 0; i < 2; i++) scale[i] = half_to_float(pairs[group / 2 * 64 + i * second] >> group % 2 * 16);
    }
};

// Groups of 32 are multiplied as integers, then scaled: see kernels/products/unpacking.py. A warp multiplies its 16 columns
// alone (MMA), so that unpacking overlaps with products.
template <int EACH>
__device__ inline void multiply_int4(const Shared& s, float (&sums)[EACH][ROWS / 2], const int (&cells)[EACH], int slot,
                                     bool in_halves) {
    int lane = threadIdx.x % 32, first_line = threadIdx.x % 128 / 32 * 16 + lane / 4;
    u32 rows = shared_address(s.rows[slot]) + lane % 8 * 128;
#pragma unroll
    for (int tile = 0; tile < EACH; tile++) {
        Int4Words words[2] = {{s.weights[cells[tile]], first_line, 0}, {s.weights[cells[tile]], first_line, 1}};
        Int4Scales scales(s, cells[tile], in_halves);
#pragma unroll
        for (int group = 0; group < 8; group++) {
            u32 left[2][4];
            words[group / 4].unpack(left, group % 4);
            float scale[2];
            scales.load(scale, group);
#pragma unroll
            for (int eight = 0; eight < LOADED / 8; eight++) {
                u32 right[4];
                float some[4] = {};
                int chunk = (group % 2 * 4 + lane / 8) ^ lane % 8;
                load_fragments(right, rows + group / 2 * (ROWS * 128) + eight * 1024 + chunk * 16);
                multiply(some, left[0], right[0], right[1]);
                multiply(some, left[1], right[2], right[3]);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float& sum = sums[tile][eight * 4 + i];
                    sum = __fmaf_rn(some[i], scale[i / 2], sum);
                }
            }
        }
    }
}

// The same for many rows (WGMMA): a group is unpacked while the group before it is multiplied.
template <int EACH>
__device__ inline void multiply_int4_many(const Shared& s, float (&sums)[EACH][ROWS / 2], const int (&cells)[EACH],
                                          int slot, bool in_halves) {
    int first_line = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int tile = 0; tile < EACH; tile++) {
        Int4Scales scales(s, cells[tile], in_halves);
        u64 right = smem_descriptor(s.rows[slot]);
#pragma unroll 1
        for (int half = 0; half < 2; half++, scales.pairs += 128, right += 2 * ROWS * 8) {
            Int4Words words(s.weights[cells[tile]], first_line, half);
            float some[2][ROWS / 2], scale[2][2];
            u32 left[2][2][4];
            auto add_scaled = [&](int group) {
#pragma unroll
                for (int i = 0; i < ROWS / 2; i++)
                    sums[tile][i] = __fmaf_rn(some[group % 2][i], scale[group % 2][i / 2 % 2], sums[tile][i]);
            };
#pragma unroll
            for (int group = 0; group < 4; group++) {
                words.unpack(left[group % 2], group);
                scales.load(scale[group % 2], group);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < 2; k++)
                    multiply_from_registers(some[group % 2], left[group % 2][k],
                                            right + group / 2 * (ROWS * 8) + group % 2 * 4 + k * 2, k);
                wgmma_commit();
                if (group) wgmma_wait<1>(), add_scaled(group - 1);
            }
            wgmma_wait<0>(), add_scaled(3);
        }
    }
}

// EACH tiles of this warpgroup, of the `cells_each` cells per CELL_DEPTH of the depth, times `count` slots of rows.
// `slots_each`: 2 if each warpgroup has its own slots. `in_halves`: as in weight_pipeline.py.
template <int EACH>
__device__ inline void multiply_stages(Shared& s, RingPosition& at, float (&sums)[EACH][ROWS / 2], int count, int group,
                                       int cells_each, int slots_each, bool in_halves) {
    constexpr bool ends_at_once = PACKED;
    int last_cells[EACH], last_slot;
#pragma unroll
    for (int i = PACKED ? 0 : LOADED / 2; i < ROWS / 2; i++)
#pragma unroll
        for (int tile = 0; tile < EACH; tile++) sums[tile][i] = 0.0f;
    auto release = [&]() {  // the stages that were multiplied
        if (PACKED) __syncwarp();
        if (threadIdx.x % (128 / RELEASES)) return;
#pragma unroll
        for (int tile = 0; tile < EACH; tile++) arrive_mbarrier(&s.used[last_cells[tile]]);
        for (int i = 0; i < slots_each; i++) arrive_mbarrier(&s.used_rows[last_slot]);  // a slot has two readers
    };
#pragma unroll 1
    for (int number = 0; number < count; number++) {
        int cells[EACH];
        RingPosition own = at;
        own.next_slots(slots_each == 2 ? group : 0), own.next_cells(group * EACH);
#pragma unroll
        for (int tile = 0; tile < EACH; tile++, own.next_cells(1)) {
            cells[tile] = own.cell;
            wait_mbarrier(&s.full[own.cell], own.cell_turn);
        }
        wait_mbarrier(&s.full_rows[own.slot], own.slot_turn);
        if constexpr (INT4 && ROWS > 16) multiply_int4_many(s, sums, cells, own.slot, in_halves);
        else if constexpr (INT4) multiply_int4(s, sums, cells, own.slot, in_halves);
        else if constexpr (E4M3) multiply_fp8(s, sums, cells, own.slot);
        else multiply_bf16(s, sums, cells, own.slot, number == 0);
        if (!ends_at_once) wgmma_wait<1>();
        if (!ends_at_once && number > 0) release();
#pragma unroll
        for (int tile = 0; tile < EACH; tile++) last_cells[tile] = cells[tile];
        last_slot = own.slot;
        at.next_slots(slots_each), at.next_cells(cells_each);
        if (ends_at_once) release();
    }
    if (!ends_at_once) wgmma_wait<0>(), release();
}

// All splits of this program, of a tile or of both warpgroups' halves of a head. Their sums are added in order; if the
// warpgroups share the tile, by the first, which gets those of the second's one or two splits through `room`.
__device__ inline void multiply_splits(Shared& s, RingPosition& at, float (&sums)[1][ROWS / 2], const Product& own,
                                       int group, int cells_each, bool in_halves) {
    bool is_shared = PACKED && own.is_shared, adds = !is_shared || group == 0;
    int half = PACKED ? own.splits / 2 : 1, each = is_shared ? half / 2 : half;
    int first = split() * half + (adds ? 0 : each);
    float more[1][ROWS / 2];
#pragma unroll 1
    for (int number = first; number < first + each; number++) {
        int count = Part(own, number, number + 1).count;
        multiply_stages<1>(s, at, more, count, group, is_shared ? 2 : cells_each, is_shared ? 2 : 1, in_halves);
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++)
            if (number == first) sums[0][i] = more[0][i];
            else if (adds) sums[0][i] = __fadd_rn(sums[0][i], more[0][i]);
    }
    if (!is_shared) return;
    float4* room = (float4*)s.rows[0] + threadIdx.x % 128;
    constexpr int fours = ROWS / 8;
    static_assert(!PACKED || sizeof(s.rows) >= 2 * fours * 128 * 16, "sums are passed in the row stages");
    sync();  // both have read their rows
    if (!adds)
#pragma unroll
        for (int i = 0; i < ROWS / 2; i += 4) {
            const float *one = &sums[0][i], *two = &more[0][i];
            room[i / 4 * 128] = make_float4(one[0], one[1], one[2], one[3]);
            if (each == 2) room[(fours + i / 4) * 128] = make_float4(two[0], two[1], two[2], two[3]);
        }
    sync();
    if (adds)
#pragma unroll 1
        for (int number = 0; number < each; number++)
#pragma unroll
            for (int i = 0; i < ROWS / 2; i += 4) {
                float4 other = room[(number * fours + i / 4) * 128];
                sums[0][i] = __fadd_rn(sums[0][i], other.x), sums[0][i + 1] = __fadd_rn(sums[0][i + 1], other.y);
                sums[0][i + 2] = __fadd_rn(sums[0][i + 2], other.z), sums[0][i + 3] = __fadd_rn(sums[0][i + 3], other.w);
            }
}

// What the second warpgroup does while the first multiplies alone: a stage of rows is released by both. Only the thread
// that releases it waits for it: nothing would keep the others from falling behind, and an mbarrier that has completed
// two phases meanwhile looks as if it had completed none.
__device__ inline void skip_rows(Shared& s, RingPosition& at, Part part) {
    for (int number = 0; number < part.count; number++, at.next_slots(1), at.next_cells(1))
        if (threadIdx.x % (128 / RELEASES) == 0)
            wait_mbarrier(&s.full_rows[at.slot], at.slot_turn), arrive_mbarrier(&s.used_rows[at.slot]);
}
