// All of it: which thread does what, in which order.

__device__ inline void make_flags(Shared& s) {
    for (int slot = 0; slot < CELLS; slot++) make_flag(&s.full[slot], 1), make_flag(&s.used[slot], 1);
    for (int slot = 0; slot < ROW_SLOTS; slot++)
        make_flag(&s.full_rows[slot], 1), make_flag(&s.used_rows[slot], 2);
    make_flag(&s.met, 1), make_flag(&s.ready, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(MULTIPLIERS + 128, 1)
    between_attentions(const __grid_constant__ Arguments own) {
    extern __shared__ char raw[];
    Shared& s = *(Shared*)(((u64)raw + 1023) / 1024 * 1024);
    if (threadIdx.x == 0) make_flags(s);
    __syncthreads();
    await_other();  // its flags must be there before anything is given to it
    let_next_start();
    bool has_tile = cluster() < own.output.units, has_four = blockIdx.x < own.gate_up.units;
    bool has_head = own_head() < own.heads.units;
    Part output(own.output, has_tile, true), gate_up(own.gate_up, has_four, false);
    Part down(own.down, has_tile, true), heads(own.heads, has_head, true);
    Place at;
    if (threadIdx.x >= MULTIPLIERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");  // the others need them
        if (threadIdx.x == ASKS_WEIGHTS) {
            ask_weights<1, 1>(s, at, own.output, cluster(), output);
            ask_weights<4, 4>(s, at, own.gate_up, blockIdx.x, gate_up);
            ask_weights<1, 1>(s, at, own.down, cluster(), down);
            ask_weights<2, 1>(s, at, own.heads, own_head(), heads);
            if (own.ahead) ask_ahead(own, output);
        } else if (threadIdx.x == ASKS_ROWS) {
            await_kernels_before();
            ask_rows(s, at, own.output, output);
            if (has_four) await_programs(own.counters), raise_flag(&s.ready);
            ask_rows(s, at, own.gate_up, gate_up);
            if (has_tile) await_programs(own.counters + 1);
            ask_rows(s, at, own.down, down);
            if (has_head) await_programs(own.counters + 2), raise_flag(&s.ready);
            ask_rows(s, at, own.heads, heads);
        } else if (threadIdx.x >= FIRST_FINDER) {
            if (has_four) find_factors(s, 0, own, own.feed_squares);
            if (has_head) find_factors(s, has_four, own, own.attention_squares);
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    int group = threadIdx.x / 128;
    Next feed{own.feed_norm, own.feed_rows, own.feed_squares};
    Next attention{own.attention_norm, own.attention_rows, own.attention_squares};
    await_kernels_before();
#pragma unroll 1  // there are no registers for two copies
    for (int round = 0; round < 2; round++) {
        Part part = round ? down : output;
        if (group == 0 && has_tile) {
            Sums sums;
            if (threadIdx.x == 0) expect_bytes(&s.met, sizeof(s.given[0]));
            multiply_all<1, 1>(s, at, sums, part, 0);
            end_add(s, own, sums, round ? attention : feed, round);
        } else {
            pass_rows(s, at, part);
        }
        tell_programs(own.counters + 2 * round);
        if (round) break;
        if (has_four) {
            float sums[2][ROWS / 2];
            multiply_all<2, 4>(s, at, sums, gate_up, group);
            sync_factors();
            end_gate_up(s, own, sums, group);
        }
        tell_programs(own.counters + 1);
    }
    if (has_head) {
        Sums sums;
        if (threadIdx.x == 0) expect_bytes(&s.met, sizeof(s.given));
        multiply_all<1, 2>(s, at, sums, heads, group);
        sync_factors();
        end_heads(s, own, sums, group);
    }
    __threadfence();
    sync();
    if (threadIdx.x == 0 && atomicAdd(own.counters + 3, 1) == gridDim.x - 1)  // nobody looks at them any more
        own.counters[0] = own.counters[1] = own.counters[2] = own.counters[3] = 0;
    // Who ends while something given to it is still to be confirmed leaves the giver waiting, or with an error.
    await_other();
}
