// The kernel of products of hundreds of rows: which thread does what. See many_rows_products.cu.

__device__ inline void run_units(Shared& s, const Arguments& own) {
    RingPosition at;
    wait_dependencies();
    for (int number = Unit::first(); number < Unit::count(own); number += Unit::step()) {
        Unit unit(own, number);
        int row = unit.row_tile * ROWS + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
        float factors[2] = {};
        Sums sums;
        multiply_splits(s, at, own, unit, sums, [&]() {
            if constexpr (KIND != ADD) factors[0] = norm_factor(own, row), factors[1] = norm_factor(own, row + 8);
        });
        if (own.is_parallel && !is_last_split(s, own, unit, sums)) {
            skip_slabs(s, at);
            continue;
        }
        if constexpr (KIND == GATE_UP) store_gated(own, unit, row, sums, factors);
        else if constexpr (KIND == ADD) add_to_hidden(s, at, own, unit, row, sums);
        else if constexpr (KIND == HEADS) store_heads(own, unit, row, sums, factors);
        else store_logits(own, unit, row, sums, factors);
    }
}

extern "C" __global__ void __launch_bounds__(MMA_THREADS + 128, 1) many_rows(const __grid_constant__ Arguments own) {
    extern __shared__ __align__(1024) char raw[];
    Shared& s = *(Shared*)raw;
    launch_dependents();
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++)
            init_mbarrier(&s.full[stage], 2), init_mbarrier(&s.used[stage], WARPGROUPS * PROGRAMS);
        fence_mbarrier_init();
    }
    __syncthreads();
    if constexpr (PROGRAMS == 2) meet_cluster();  // the other program's mbarriers are there
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the compiler sees that it is the same in all threads
    if (warp >= WEIGHT_LOADER) {
        decrease_registers<WARPGROUPS == 2 ? 40 : 32>();
        if (warp == WEIGHT_LOADER) load_stages(s, own, false);
        if (warp == ROW_LOADER) {
            wait_dependencies();
            load_stages(s, own, true);
        }
    } else {
        increase_registers<WARPGROUPS == 2 ? 232 : 160>();
        run_units(s, own);
    }
    if constexpr (PROGRAMS == 2) {
        __syncwarp();
        meet_cluster();  // no program ends while the other writes to its shared memory
    }
}
