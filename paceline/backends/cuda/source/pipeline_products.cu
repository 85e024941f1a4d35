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

// Each group of 64 of a row has a scale, and the tensor core sums no more than a group: see kernels/fp8.py.
template <int EACH>
__device__ inline void multiply_fp8(const Shared& s, float (&sums)[EACH][ROWS / 2], const int (&cells)[EACH], int slot,
                                    bool is_first) {
    u64 right = smem_descriptor(s.rows[slot]);
#pragma unroll
    for (int group = 0; group < 2; group++) {
        float2 scales[ROWS / 8];  // read before the products: when these have ended, the slot is released
#pragma unroll
        for (int i = 0; i < ROWS / 8; i++)
            scales[i] = *(const float2*)&s.row_scales[slot][i / 2][group][i % 2 * 8 + threadIdx.x % 4 * 2];
        float some[EACH][ROWS / 2];
        wgmma_fence();
#pragma unroll
        for (int k = group * 2; k < group * 2 + 2; k++)
#pragma unroll
            for (int tile = 0; tile < EACH; tile++)
                multiply(some[tile], short_descriptor(s.weights[cells[tile]] + group * STEP_BYTES) + k % 2 * 2,
                         right + k * 2, k % 2);
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) {
            float scale = i % 2 ? scales[i / 4].y : scales[i / 4].x;
#pragma unroll
            for (int tile = 0; tile < EACH; tile++)
                sums[tile][i] = __fmaf_rn(some[tile][i], scale, is_first && !group ? 0.0f : sums[tile][i]);
        }
    }
}

// A thread's words of a cell: of its two lines, the elements 8 m + 2 t and the next one, for m from 0 to 3. A word has
// one element of eight groups; here the words of two elements are combined, groups 0 to 3 and 4 to 7.
struct Int4Words {
    u32 low[2][4], high[2][4];
    __device__ Int4Words(const char* cell, int first_line) {
#pragma unroll
        for (int line = 0; line < 2; line++)
#pragma unroll
            for (int m = 0; m < 4; m++) {
                int number = first_line + line * 8, byte = (m * 32 + threadIdx.x % 4 * 8) ^ number % 8 * 16;
                uint2 words = *(const uint2*)(cell + number * 128 + byte);
                low[line][m] = __byte_perm(words.x, words.y, 0x5410);
                high[line][m] = __byte_perm(words.x, words.y, 0x7632);
            }
    }
    // The numbers of a group, one of four, as the left operand of two products.
    __device__ static void unpack(u32 (&left)[2][4], const u32 (&words)[2][4], int group) {
#pragma unroll
        for (int i = 0; i < 8; i++) left[i / 4][i % 4] = int4_numbers(words[i % 2][i / 2] >> group * 4);
    }
};

// Groups of 32 are multiplied as integers, then scaled: see kernels/unpacking.py. A warp multiplies its 16 columns
// alone (MMA), so that unpacking overlaps with products.
template <int EACH>
__device__ inline void multiply_int4(const Shared& s, float (&sums)[EACH][ROWS / 2], const int (&cells)[EACH], int slot,
                                     bool is_first, bool in_halves) {
    int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, line = lane / 4;
    int first_column = in_halves ? warp * 8 + line : warp * 16 + line, second = in_halves ? 32 : 8;
    u32 rows = shared_address(s.rows[slot]) + lane % 8 * 128;
#pragma unroll
    for (int tile = 0; tile < EACH; tile++) {
        Int4Words words(s.weights[cells[tile]], warp * 16 + line);
        const u32* scales = s.weight_scales[cells[tile]][0] + first_column;
#pragma unroll
        for (int four = 0; four < 8; four += 4)
#pragma unroll
        for (int group = four; group < four + 4; group++) {
            u32 left[2][4];
            Int4Words::unpack(left, four ? words.high : words.low, group % 4);
            float scale[2];
#pragma unroll
            for (int i = 0; i < 2; i++) scale[i] = half_to_float(scales[group / 2 * 64 + i * second] >> group % 2 * 16);
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
                    sum = __fmaf_rn(some[i], scale[i / 2], is_first && !group ? 0.0f : sum);
                }
            }
        }
    }
}

// EACH tiles of this warpgroup, of the CELLS_EACH cells per CELL_DEPTH of the depth. `in_halves`: as in
// weight_pipeline.py.
template <int EACH, int CELLS_EACH>
__device__ inline void multiply_stages(Shared& s, RingPosition& at, float (&sums)[EACH][ROWS / 2], Part part, int group,
                                       bool in_halves) {
    constexpr bool ends_at_once = E4M3 || INT4;
    int last_cells[EACH], last_slot;
#pragma unroll
    for (int i = LOADED / 2; i < ROWS / 2; i++)
#pragma unroll
        for (int tile = 0; tile < EACH; tile++) sums[tile][i] = 0.0f;
    auto release = [&]() {  // the stages that were multiplied
        if (INT4) __syncwarp();
        if (threadIdx.x % (128 / RELEASES)) return;
#pragma unroll
        for (int tile = 0; tile < EACH; tile++) arrive_mbarrier(&s.used[last_cells[tile]]);
        arrive_mbarrier(&s.used_rows[last_slot]);
    };
#pragma unroll 1
    for (int number = 0; number < part.count; number++) {
        int cells[EACH];
#pragma unroll
        for (int tile = 0; tile < EACH; tile++) {
            RingPosition own = at;
            own.next_cells(group * EACH + tile);
            cells[tile] = own.cell;
            wait_mbarrier(&s.full[own.cell], own.cell_turn);
        }
        wait_mbarrier(&s.full_rows[at.slot], at.slot_turn);
        if constexpr (INT4) multiply_int4(s, sums, cells, at.slot, number == 0, in_halves);
        else if constexpr (E4M3) multiply_fp8(s, sums, cells, at.slot, number == 0);
        else multiply_bf16(s, sums, cells, at.slot, number == 0);
        if (!ends_at_once) wgmma_wait<1>();
        if (!ends_at_once && number > 0) release();
#pragma unroll
        for (int tile = 0; tile < EACH; tile++) last_cells[tile] = cells[tile];
        last_slot = at.slot;
        at.next_slot(), at.next_cells(CELLS_EACH);
        if (ends_at_once) release();
    }
    if (!ends_at_once) wgmma_wait<0>(), release();
}

// All splits of this program, the first warpgroup's share of a tile or both warpgroups' of a head: their sums are added
// in order.
template <int CELLS_EACH>
__device__ inline void multiply_splits(Shared& s, RingPosition& at, float (&sums)[1][ROWS / 2], const Product& own,
                                       int group, bool in_halves) {
    int half = E4M3 || INT4 ? own.splits / 2 : 1, first = split() * half;
#pragma unroll 1
    for (int number = first; number < first + half; number++) {
        float more[1][ROWS / 2];
        multiply_stages<1, CELLS_EACH>(s, at, more, Part(own, number, number + 1), group, in_halves);
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) sums[0][i] = number == first ? more[0][i] : __fadd_rn(sums[0][i], more[0][i]);
    }
}

// What the second warpgroup does while the first multiplies alone: a stage of rows is released by both. Only the thread
// that releases it waits for it: nothing would keep the others from falling behind, and an mbarrier that has completed
// two phases meanwhile looks as if it had completed none.
__device__ inline void skip_rows(Shared& s, RingPosition& at, Part part) {
    for (int number = 0; number < part.count; number++, at.next_slot(), at.next_cells(1))
        if (threadIdx.x % (128 / RELEASES) == 0)
            wait_mbarrier(&s.full_rows[at.slot], at.slot_turn), arrive_mbarrier(&s.used_rows[at.slot]);
}
