// What the epilogues of products compute of a number or two.

__device__ inline u16 rounded(float x) { return (u16)pack(x, 0.0f); }
// x / below has the bits of `divide`, without its handling of divisors below 1. Flushing the power of two to zero
// changes nothing: one is added to it.
__device__ inline float silu(float x) {
    float below = __fadd_rn(power_of_two(__fmul_rn(-x, 1.4426950216293335f)), 1.0f);
    if (below > 8.507059173023462e+37f) below = __fmul_rn(below, 0.25f), x = __fmul_rn(x, 0.25f);
    return __fmul_rn(x, inverse(below));
}

__device__ inline float in_pairs(float x, int lanes) {
    return __fadd_rn(x, __shfl_xor_sync(0xffffffff, x, lanes));
}

// SwiGLU of products that lack their norm's factor.
__device__ inline float gated(float gate, float up, float factor) {
    return __fmul_rn(silu(__fmul_rn(gate, factor)), __fmul_rn(up, factor));
}

// A pair of numbers, rotated by RoPE.
__device__ inline void rotate(float& one, float& two, float cosine, float sine) {
    float rotated = __fsub_rn(__fmul_rn(one, cosine), __fmul_rn(two, sine));
    two = __fadd_rn(__fmul_rn(two, cosine), __fmul_rn(one, sine)), one = rotated;
}

// Four threads have two numbers each of four eights of columns; then each has one eight.
__device__ inline void store_eights(u16* to, u32 (&words)[4], bool is_kept = true) {
    int thread = threadIdx.x % 4;
#pragma unroll
    for (int apart = 1; apart < 4; apart *= 2)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & apart) continue;
            bool is_second = thread & apart;
            u32 other = __shfl_xor_sync(~0u, is_second ? words[i] : words[i + apart], apart);
            if (is_second) words[i] = other;
            else words[i + apart] = other;
        }
    if (is_kept) *(uint4*)(to + thread * 8) = make_uint4(words[0], words[1], words[2], words[3]);
}
