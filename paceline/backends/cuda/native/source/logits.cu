// The LM head: normed rows times the vocabulary's matrix, through the same pipeline: the weights of the next tiles are
// loaded while results are written.

struct Logits {  // in the order of logits.py
    Product product;
    const float* squares;
    float* output;
    int stride, columns, row_count, tiles;  // of the output; tiles of the residual stream
    float size, eps;
};

// In a warp's store eight columns of a row are contiguous: 32 bytes, a memory sector.
__device__ inline void finish_logits(const Shared& s, const Logits& own, const float (&sums)[2][ROWS / 2], int first) {
    int line = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
#pragma unroll
    for (int tile = 0; tile < 2; tile++)
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) {
            int row = i / 4 * 8 + pair + i % 2, column = (first + tile) * 64 + line + i / 2 % 2 * 8;
            if (row < own.row_count && column < own.columns)
                own.output[(long)row * own.stride + column] = __fmul_rn(sums[tile][i], s.factors[row]);
        }
}

extern "C" __global__ void __launch_bounds__(MMA_THREADS + 128, 1) all_logits(const __grid_constant__ Logits own) {
    extern __shared__ __align__(1024) char raw[];
    Shared& s = *(Shared*)raw;
    if (threadIdx.x == 0) init_mbarriers(s);
    __syncthreads();
    if (blockIdx.x >= own.product.units) return;
    Part part(own.product, true, false);
    RingPosition at;
    if (threadIdx.x >= MMA_THREADS) {
        decrease_registers<40>();
        if (threadIdx.x >= ROW_LOADER) wait_dependencies();
        for (int unit = blockIdx.x; unit < own.product.units; unit += gridDim.x) {
            if (warp_number() == WEIGHT_LOADER / 32) load_weights<4, 4>(s, at, own.product, unit, part);
            if (warp_number() == ROW_LOADER / 32) load_rows(s, at, own.product, part, {});
        }
        if (threadIdx.x >= FIRST_NORM_THREAD) compute_norm_factors(s, own.squares, own.tiles, own.size, own.eps);
    } else {
        increase_registers<232>();
        wait_dependencies();
        int group = threadIdx.x / 128;
        for (int unit = blockIdx.x; unit < own.product.units; unit += gridDim.x) {
            float sums[2][ROWS / 2];
            multiply_stages<2>(s, at, sums, part.count, group, 4, 1, false);
            if (unit == blockIdx.x) sync_factors();
            finish_logits(s, own, sums, unit * 4 + group * 2);
        }
    }
}
