// A mixture of experts for one row: the scores of all experts, and the choice, as in kernels/experts/router.py and
// kernels/experts/routing.py. The products of the chosen ones are those of a layer without experts, with gathered weights.
#if EXPERTS

// This block's experts. Their lines of the router are in registers before the row is there.
struct Router {
    static constexpr int each = ceil_div(TILES, WARPS);  // tiles of the row per warp
    static_assert(ceil_div(EXPERTS, PROGRAMS) <= 8, "an expert for each of the first lines of an instruction");
    static_assert(TILES * 8 <= SPLIT_JOBS * 128, "parts of scores are where those of products are");
    u32 lines[each][4][2];
    __device__ static int first(int block) { return block * EXPERTS / PROGRAMS; }
    __device__ static int count() { return first(blockIdx.x + 1) - first(blockIdx.x); }
    __device__ static int column(int t, int c) {  // of the row: those of this thread
        return (thread() / 32 + t * WARPS) * 64 + c * 16 + thread() % 4 * 2;
    }
    __device__ Router(const u16* router) {
        int own = thread() % 32 / 4, expert = first(blockIdx.x) + own;
        const u16* line = router + expert / 64 * (64 * HIDDEN) + expert % 64 * STEP;
#pragma unroll
        for (int t = 0; t < each; t++)
#pragma unroll
            for (int c = 0; c < 4; c++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int deep = column(t, c) + half * 8;
                    bool mine = own < count() && deep < HIDDEN;
                    lines[t][c][half] = mine ? *(const u32*)(line + deep / STEP * (64 * STEP) + deep % STEP) : 0;
                }
    }
    // Of the row in shared memory: parts of 64 columns, added in order.
    __device__ void store_scores(Shared& s, const Pass& pass) const {
        float(*parts)[8] = (float(*)[8])s.product.parts;
        int own = thread() % 32 / 4;
#pragma unroll
        for (int t = 0; t < each; t++) {
            float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int c = 0; c < 4; c++) {
                u32 left[4] = {lines[t][c][0], 0, lines[t][c][1], 0}, right[2];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int deep = column(t, c) + half * 8;
                    right[half] = own == 0 && deep < HIDDEN ? *(const u32*)&s.product.rows[deep] : 0;
                }
                multiply(sums, left, right[0], right[1]);
            }
            int tile = thread() / 32 + t * WARPS;
            if (thread() % 4 == 0 && tile < TILES) parts[tile][own] = sums[0];
        }
        sync();
        if (thread() < count()) {
            float score = parts[0][thread()];
#pragma unroll
            for (int tile = 1; tile < TILES; tile++) score = __fadd_rn(score, parts[tile][thread()]);
            pass.scores[first(blockIdx.x) + thread()] = score;
        }
    }
};

constexpr int ALREADY_CHOSEN = -2147483647 - 1;  // below the integers of all scores
// Integers in the order of scores. NaN is the lowest, so that no expert is chosen twice.
__device__ inline int ordered(float score) {
    int bits = __float_as_int(__fadd_rn(score > -3.0e38f ? score : -3.0e38f, 0.0f));  // -0 equals 0
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}
__device__ inline float unordered(int bits) { return __int_as_float(bits < 0 ? bits ^ 0x7fffffff : bits); }

// The top experts of the row, ties to the lower, and their softmax, by one warp of every block.
__device__ inline void choose_experts(Shared& s, const Pass& pass) {
    constexpr int each = ceil_div(EXPERTS, 32);
    static_assert((CHOSEN & (CHOSEN - 1)) == 0, "weights are summed in pairs");
    if (thread() >= 32) return;
    int lane = thread(), left[each], own = 0, own_score = 0;
    float highest = negative_infinity(), scores[each];
#pragma unroll
    for (int i = 0; i < each; i++) scores[i] = lane + i * 32 < EXPERTS ? __ldcg(pass.scores + lane + i * 32) : 0.0f;
#pragma unroll
    for (int i = 0; i < each; i++) {
        float score = __fmul_rn(scores[i], s.factors[0]);
        bool there = lane + i * 32 < EXPERTS;
        left[i] = there ? ordered(score) : ALREADY_CHOSEN;
        highest = fmaxf(highest, there ? score : highest);
    }
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2)
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffff, highest, offset));
#pragma unroll
    for (int rank = 0; rank < CHOSEN; rank++) {
        int best = left[0], index = EXPERTS;
#pragma unroll
        for (int i = 1; i < each; i++) best = max(best, left[i]);
        best = __reduce_max_sync(0xffffffff, best);
#pragma unroll
        for (int i = each - 1; i >= 0; i--) index = left[i] == best ? lane + i * 32 : index;
        index = __reduce_min_sync(0xffffffff, index);
        if (lane == rank) own = index, own_score = best;
#pragma unroll
        for (int i = 0; i < each; i++) left[i] = lane + i * 32 == index ? ALREADY_CHOSEN : left[i];
    }
    float share = lane < CHOSEN ? exponential(__fsub_rn(unordered(own_score), highest)) : 0.0f, sum = share;
#pragma unroll
    for (int offset = 1; offset < CHOSEN; offset *= 2)
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffff, sum, offset));
    if (lane < CHOSEN) s.experts[lane] = own, s.shares[lane] = divide(share, sum);
    __syncwarp();
    if (lane == 0) arrive_mbarrier(shared_address(&s.routed));  // the loading warps wait for it
}
#endif
