// The fused output-projection/MLP/QKV kernel: which thread does what, in which order.

// A program's part of each product.
struct Parts {
    bool has_tile, has_four, has_head;
    Part output, gate_up, down, heads;
    __device__ Parts(const Arguments& own)
        : has_tile(cluster() < own.output.units), has_four(blockIdx.x < own.gate_up.units),
          has_head(qkv_head() < own.heads.units), output(own.output, has_tile, true),
          gate_up(own.gate_up, has_four, false), down(own.down, has_tile, true), heads(own.heads, has_head, true) {}
};

__device__ inline void load_all_weights(Shared& s, RingPosition& at, const Arguments& own, const Parts& parts) {
    load_weights<1, 1>(s, at, own.output, cluster(), parts.output);
    load_weights<4, E4M3 ? 2 : 4>(s, at, own.gate_up, blockIdx.x, parts.gate_up);
    load_weights<1, 1>(s, at, own.down, cluster(), parts.down);
    load_weights<2, 1>(s, at, own.heads, qkv_head(), parts.heads);
}

enum { OUTPUT, GATE_UP, DOWN };
// Both programs of a cluster write half of the rows of a tile.
__device__ inline ReadyCounters ready_counters(const Arguments& own, int product) {
    if (product == OUTPUT) return {own.ready, own.output.units, 2, 64};
    if (product == DOWN) return {own.ready + own.output.units, own.down.units, 2, 64};
    return {own.ready + own.output.units + own.down.units, own.gate_up.units, 1, 128};
}

__device__ inline void load_all_rows(Shared& s, RingPosition& at, const Arguments& own, const Parts& parts) {
    load_rows(s, at, own.output, parts.output, {});
    if (parts.has_tile) wait_mbarrier(&s.ended[OUTPUT], 0);
    load_rows(s, at, own.gate_up, parts.gate_up, ready_counters(own, OUTPUT));
    if (parts.has_four) wait_mbarrier(&s.ended[GATE_UP], 0);
    load_rows(s, at, own.down, parts.down, ready_counters(own, GATE_UP));
    if (parts.has_tile) wait_mbarrier(&s.ended[DOWN], 0);
    load_rows(s, at, own.heads, parts.heads, ready_counters(own, DOWN));
}

// The warps that compute norm factors, when all units have written their sums of squares.
__device__ inline void compute_all_norm_factors(Shared& s, const Arguments& own, const Parts& parts) {
#pragma unroll 1
    for (int product = OUTPUT; product <= DOWN; product += DOWN) {
        if (!(product == OUTPUT ? parts.has_four : parts.has_head)) continue;
        if (parts.has_tile) wait_mbarrier(&s.ended[product], 0);  // nothing can be ready before
        ready_counters(own, product).await_all();
        const float* squares = product == OUTPUT ? own.feed_squares : own.attention_squares;
        compute_norm_factors(s, squares, own.width / 64, own.size, own.eps);
    }
}

__device__ inline void run_products(Shared& s, const Arguments& own, const Parts& parts) {
    int group = threadIdx.x / 128;
    RingPosition at;
    wait_dependencies();
#pragma unroll 1  // unrolled, it would need too many registers
    for (int round = 0; round < 2; round++) {
        const Product& product_of = round ? own.down : own.output;
        if (parts.has_tile && (group == 0 || product_of.is_shared)) {
            Sums sums;
            Added added(own, round);
            if (threadIdx.x == 0) expect_bytes(&s.exchanged, sizeof(s.received[0]));
            multiply_splits(s, at, sums, product_of, group, 1, false);
            if (group == 0) finish_residual(s, own, sums, added, round);
        } else {
            skip_rows(s, at, round ? parts.down : parts.output);
        }
        int product = round ? DOWN : OUTPUT;
        if (parts.has_tile) signal_ready(s, ready_counters(own, product).units + cluster(), product);
        if (round) break;
        if (parts.has_four) {
            float sums[2][ROWS / 2];
            GateUpScales scales(own, group);
            multiply_stages<2>(s, at, sums, parts.gate_up.count, group, 4, 1, true);
            sync_factors();
            if constexpr (E4M3) finish_gate_up_fp8(s, own, sums, scales, group);
            else finish_gate_up(s, own, sums, group);
            signal_ready(s, ready_counters(own, GATE_UP).units + blockIdx.x, GATE_UP);
        }
    }
    if (own.early) launch_dependents_once();
    if (parts.has_head) {
        Sums sums;
        int part = threadIdx.x / 32 * 8 + threadIdx.x % 32 / 4;  // index within half a head
        RopeTable rope_table(own, part);
        if (threadIdx.x == 0) expect_bytes(&s.exchanged, sizeof(s.received));
        multiply_splits(s, at, sums, own.heads, group, 2, true);
        launch_dependents_once();
        sync_factors();
        finish_qkv(s, own, sums, rope_table, part);
    }
    sync();
    if (threadIdx.x >= 32) return;
    int units = own.output.units + own.down.units + own.gate_up.units;  // followed by the counter of finished programs
    u32 before = threadIdx.x ? 0 : atomicAdd(own.ready + units, 1);
    if (__shfl_sync(~0u, before, 0) != gridDim.x - 1) return;
    for (int unit = threadIdx.x; unit <= units; unit += 32) own.ready[unit] = 0;  // reset for the next kernel
}

extern "C" __global__ void __launch_bounds__(MMA_THREADS + 128, 1)
    fused_layer(const __grid_constant__ Arguments own) {
    extern __shared__ __align__(1024) char raw[];
    Shared& s = *(Shared*)raw;
    if (threadIdx.x == 0) init_mbarriers(s);
    __syncthreads();
    sync_cluster();  // the other program's mbarriers must exist before the first store_async
    Parts parts(own);
    if (threadIdx.x >= MMA_THREADS) {
        decrease_registers<40>();  // for the multiplying warpgroups
        RingPosition at;
        if (warp_number() == WEIGHT_LOADER / 32) load_all_weights(s, at, own, parts);
        else {
            wait_dependencies();
            if (warp_number() == ROW_LOADER / 32) load_all_rows(s, at, own, parts);
            else compute_all_norm_factors(s, own, parts);
        }
    } else {
        increase_registers<232>();
        run_products(s, own, parts);
    }
    // A program must not end while a store_async to it is unconfirmed: the sender would hang or fail. And all warps
    // must be here: where some had ended before, the cluster barrier was seen to deadlock.
    __syncwarp();
    sync_cluster();
}
