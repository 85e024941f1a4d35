// Partial results of an online softmax in a warp's registers, and their merge: see ../../kernels/attention/softmax.py.

// row_max, row_sum and acc of an online softmax in base 2. HALVES times eight lanes are the 16-row operand of products,
// so a thread has lanes g, g + 8, g + 16 ..., where g is its quad, and WIDE tiles of 8 columns of the values.
template <int HALVES, int WIDE> struct SoftmaxOf {
    static constexpr int halves = HALVES, wide = WIDE, tiles = (HALVES + 1) / 2;
    float highest[halves], total[halves], acc[tiles][wide][4];
    __device__ SoftmaxOf() {
        for (int i = 0; i < halves; i++) highest[i] = negative_infinity(), total[i] = 0.0f;
        for (int m = 0; m < tiles; m++)
            for (int n = 0; n < wide; n++)
                for (int i = 0; i < 4; i++) acc[m][n][i] = 0.0f;
    }
};

// What is subtracted from scores: infinity minus itself would be NaN.
__device__ inline float safe(float highest) { return highest == negative_infinity() ? 0.0f : highest; }

// Merging into an empty one changes no bit.
template <class Part> __device__ inline void merge(Part& whole, const Part& other) {
#pragma unroll
    for (int i = 0; i < Part::halves; i++) {
        float higher = fmaxf(whole.highest[i], other.highest[i]), zero = safe(higher);
        float rescale = power_of_two(__fsub_rn(whole.highest[i], zero));
        float other_rescale = power_of_two(__fsub_rn(other.highest[i], zero));
        whole.highest[i] = higher;
        whole.total[i] = __fmaf_rn(whole.total[i], rescale, __fmul_rn(other.total[i], other_rescale));
#pragma unroll
        for (int n = 0; n < Part::wide; n++)
#pragma unroll
            for (int j = i % 2 * 2; j < i % 2 * 2 + 2; j++) {
                float& acc = whole.acc[i / 2][n][j];
                acc = __fmaf_rn(acc, rescale, __fmul_rn(other.acc[i / 2][n][j], other_rescale));
            }
    }
}

// Merges partials in groups of MERGE_FAN_IN, then the groups, always in order; `load` reads one from memory.
template <class Part, int MERGE_FAN_IN, int AT_ONCE, class Take>
__device__ inline Part merge_partials(int parts, const Take& load) {
    Part whole;
    for (int first = 0; first < parts; first += MERGE_FAN_IN) {
        Part inner;
        for (int next = first; next < min(first + MERGE_FAN_IN, parts); next += AT_ONCE) {
            Part some[AT_ONCE];  // loads in flight
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                if (next + i < parts) some[i] = load(next + i);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                if (next + i < parts) merge(inner, some[i]);
        }
        merge(whole, inner);
    }
    return whole;
}

// Whether this program is the last of `programs` to arrive; then the counter is reset to zero.
__device__ inline bool is_last_arrival(u32* counter, u32 programs) {
    u32 before = add_acq_rel(counter);
    if (before == programs - 1) *counter = 0;
    return before == programs - 1;
}
