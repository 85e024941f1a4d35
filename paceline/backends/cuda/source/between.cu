// All of it: which thread does what, in which order.

// What a program has of each product.
struct Parts {
    bool has_tile, has_four, has_head;
    Part output, gate_up, down, heads;
    __device__ Parts(const Arguments& own)
        : has_tile(cluster() < own.output.units), has_four(blockIdx.x < own.gate_up.units),
          has_head(own_head() < own.heads.units), output(own.output, has_tile, true),
          gate_up(own.gate_up, has_four, false), down(own.down, has_tile, true), heads(own.heads, has_head, true) {}
};

__device__ inline void ask_all_weights(Shared& s, Place& at, const Arguments& own, const Parts& parts) {
    ask_weights<1, 1>(s, at, own.output, cluster(), parts.output);
    ask_weights<4, 4>(s, at, own.gate_up, blockIdx.x, parts.gate_up);
    ask_weights<1, 1>(s, at, own.down, cluster(), parts.down);
    ask_weights<2, 1>(s, at, own.heads, own_head(), parts.heads);
}

enum { OUTPUT, GATE_UP, DOWN };
// Both programs of a cluster write half of the rows of a tile.
__device__ inline Told told_by(const Arguments& own, int product) {
    if (product == OUTPUT) return {own.told, own.output.units, 2, 1};
    if (product == DOWN) return {own.told + own.output.units, own.down.units, 2, 1};
    return {own.told + own.output.units + own.down.units, own.gate_up.units, 1, 2};
}

__device__ inline void ask_all_rows(Shared& s, Place& at, const Arguments& own, const Parts& parts) {
    ask_rows(s, at, own.output, parts.output, {});
    if (parts.has_tile) await_flag(&s.ended[OUTPUT], 0);
    ask_rows(s, at, own.gate_up, parts.gate_up, told_by(own, OUTPUT));
    if (parts.has_four) await_flag(&s.ended[GATE_UP], 0);
    ask_rows(s, at, own.down, parts.down, told_by(own, GATE_UP));
    if (parts.has_tile) await_flag(&s.ended[DOWN], 0);
    ask_rows(s, at, own.heads, parts.heads, told_by(own, DOWN));
}

// Warps that find the factors of norms, when all have told what they have squared.
__device__ inline void find_all_factors(Shared& s, const Arguments& own, const Parts& parts) {
#pragma unroll 1
    for (int product = OUTPUT; product <= DOWN; product += DOWN) {
        if (!(product == OUTPUT ? parts.has_four : parts.has_head)) continue;
        if (parts.has_tile) await_flag(&s.ended[product], 0);  // until then there is nothing to look for
        told_by(own, product).await_all();
        const float* squares = product == OUTPUT ? own.feed_squares : own.attention_squares;
        find_factors(s, squares, own.width / 64, own.size, own.eps);
    }
}

__device__ inline void multiply_parts(Shared& s, const Arguments& own, const Parts& parts) {
    int group = threadIdx.x / 128;
    Place at;
    await_kernels_before();
#pragma unroll 1  // there are no registers for two copies
    for (int round = 0; round < 2; round++) {
        Part part = round ? parts.down : parts.output;
        if (group == 0 && parts.has_tile) {
            Sums sums;
            Added added(own, round);
            if (threadIdx.x == 0) expect_bytes(&s.met, sizeof(s.given[0]));
            multiply_all<1, 1>(s, at, sums, part, 0);
            end_add(s, own, sums, added, round);
        } else {
            pass_rows(s, at, part);
        }
        int product = round ? DOWN : OUTPUT;
        if (parts.has_tile) tell(s, told_by(own, product).units + cluster(), product);
        if (round) break;
        if (parts.has_four) {
            float sums[2][ROWS / 2];
            multiply_all<2, 4>(s, at, sums, parts.gate_up, group);
            sync_factors();
            end_gate_up(s, own, sums, group);
            tell(s, told_by(own, GATE_UP).units + blockIdx.x, GATE_UP);
        }
    }
    if (own.early) let_next_start();
    if (parts.has_head) {
        Sums sums;
        int part = threadIdx.x / 32 * 8 + threadIdx.x % 32 / 4;  // of half a head
        Turns turns(own, part);
        if (threadIdx.x == 0) expect_bytes(&s.met, sizeof(s.given));
        multiply_all<1, 2>(s, at, sums, parts.heads, group);
        let_next_start();
        sync_factors();
        end_heads(s, own, sums, turns, part);
    }
    sync();
    if (threadIdx.x >= 32) return;
    int units = own.output.units + own.down.units + own.gate_up.units;  // and behind them programs that have ended
    u32 before = threadIdx.x ? 0 : atomicAdd(own.told + units, 1);
    if (__shfl_sync(~0u, before, 0) != gridDim.x - 1) return;
    for (int unit = threadIdx.x; unit <= units; unit += 32) own.told[unit] = 0;  // nobody looks at them any more
}

extern "C" __global__ void __launch_bounds__(MULTIPLIERS + 128, 1)
    between_attentions(const __grid_constant__ Arguments own) {
    extern __shared__ __align__(1024) char raw[];
    Shared& s = *(Shared*)raw;
    if (threadIdx.x == 0) make_flags(s);
    __syncthreads();
    await_other();  // its flags must be there before anything is given to it
    Parts parts(own);
    if (threadIdx.x >= MULTIPLIERS) {
        keep_registers<40>();  // the others need them
        Place at;
        if (threadIdx.x == ASKS_WEIGHTS) ask_all_weights(s, at, own, parts);
        if (threadIdx.x >= ASKS_ROWS) {
            await_kernels_before();
            if (threadIdx.x < FIRST_FINDER) ask_all_rows(s, at, own, parts);
            else find_all_factors(s, own, parts);
        }
    } else {
        take_registers<232>();
        multiply_parts(s, own, parts);
    }
    // Who ends while something given to it is still to be confirmed leaves the giver waiting, or with an error. And
    // all warps must be here: where some had ended before, the barrier was seen to wait for ever.
    __syncwarp();
    await_other();
}
