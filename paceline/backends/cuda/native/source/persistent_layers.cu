// The megakernel: the phases of a pass in order.

// Loads what attention needs of pages and positions, once for all layers.
__device__ inline void prepare_attention(Shared& s, const Pass& pass) {
    const AttentionTile& attn = s.attn;
    if (thread() == 0) s.attn.find(pass, blockIdx.x / (AttentionTile::kv_splits * KV_HEADS));
    if (thread() < ROWS) s.row_parts[thread()] = 0, s.row_position[thread()] = pass.positions[thread()];
    if (thread() < ROWS) s.row_slot[thread()] = pass.slot_mapping[thread()];
    if (HAS_TREES && thread() < ROWS * MAX_ROWS) {
        int row = thread() / MAX_ROWS, step = thread() % MAX_ROWS;
        s.row_until[row] = pass.contiguous_until[row], s.row_path[row][step] = pass.paths[row * PATH + step];
    }
    sync();
    if (attn.active() && thread() < LINES) {
        int index = attn.kv_split * attn.each * BLOCK + thread();
        s.kv_slots[thread()] = index <= attn.last ? attn.kv_slot(index) : 0;
    }
    for (int tile = thread(); tile < ATTENTION_TILES; tile += THREADS) {
        AttentionTile own;
        own.find(pass, tile);
        for (int row = 0; row < own.count; row++) {
            s.row_line[own.first + row] = tile * (KV_HEADS * PARTS * LANES) + row * AttentionTile::wide;
            s.row_parts[own.first + row] = own.end;
        }
    }
}

__device__ inline void compute_all(Shared& s, const Pass& pass) {
    RingPosition ring_position;
    GridBarrier barrier{pass.counters};
    ResidualStream residual(pass);
    Rope rope(pass);
    const AttentionTile& attn = s.attn;
    float sums[JOBS][4];
    prepare_attention(s, pass);
    for (int number = 0; number < LAYERS; number++) {
        const Layer& layer = s.layers[number];
        ushort2 bias = rope.bias(layer);
        uint2 feed_forward_norm = residual.weights(layer.feed_forward_norm);
        uint2 next_norm = residual.weights(layer.next_norm);
        residual.keep(layer.features, pass.features_width);
        if (number) barrier.wait();
        {
            NormFactors factors(pass.quads[0]);
            if (!Heads::streamed) load_input_rows(s, pass.attention_input), sync();
            factors.store(s, number ? nullptr : pass.squares);
        }
        product<Heads>(s, ring_position, sums);
        store_partials<Heads>(s, sums);
        rope.end(s, pass, layer, bias);
        barrier.arrive();
        if (attn.active()) load_block(s, layer, attn, attn.kv_split * attn.each);
        barrier.wait();
        attention(s, pass, layer, attn);
        barrier.arrive();
        barrier.wait();
        if (!Output::streamed) load_attention(s, pass), sync();
        product<Output>(s, ring_position, sums);
        store_partials<Output>(s, sums);
        residual.add<Output>(s, feed_forward_norm, pass.feed_forward_input, pass.quads[1]);
        barrier.arrive();
#if EXPERTS
        Router router(layer.router);
#endif
        barrier.wait();
        {
            NormFactors factors(pass.quads[1]);
            load_input_rows(s, pass.feed_forward_input);
            sync();
            factors.store(s, nullptr);
        }
#if EXPERTS
        router.store_scores(s, pass);
        barrier.arrive();
        barrier.wait();
        choose_experts(s, pass);
#endif
        product<GateUp>(s, ring_position, sums);
        sync();
        finish_gate_up(s, pass, sums);
        barrier.arrive();
        barrier.wait();
        product<Down>(s, ring_position, sums);
        store_partials<Down>(s, sums);
        residual.add<Down>(s, next_norm, pass.attention_input, pass.quads[0]);
        barrier.arrive();
    }
    residual.keep(pass.hidden, HIDDEN);
    residual.keep(pass.features, pass.features_width);
    barrier.wait();
    // The LM head reads sums of squares by tile.
    int line = thread() + blockIdx.x * THREADS;
    if (line < ROWS * TILES) {
        uint4 quads[4];
        load_quads(quads, pass.quads[0], line / TILES, line % TILES);
        pass.squares[line] = tile_squares(quads);
    }
    if (thread() == 0) {
        u32 before = atomicAdd(pass.counters + 1, 1);
        if (before == PROGRAMS - 1) pass.counters[0] = 0, pass.counters[1] = 0;  // no block waits any more
    }
}

// The loading warps: the same products in the same order; each side counts the ring's slots itself.
__device__ inline void fetch_all(Shared& s) {
    RingPosition ring_position;
    for (int number = 0; number < LAYERS; number++) {
        const Layer& layer = s.layers[number];
        fetch<Heads>(s, ring_position, layer.heads);
        fetch<Output>(s, ring_position, layer.output);
        if (EXPERTS) wait_mbarrier(shared_address(&s.routed), number % 2);  // which ones, is known
        fetch<GateUp>(s, ring_position, layer.gate_up);
        fetch<Down>(s, ring_position, layer.down);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + FETCHERS, 1) persistent_layers(const Pass* argument) {
    extern __shared__ __align__(1024) char raw[];
    Shared& s = *(Shared*)raw;
    for (int i = thread(); i < (sizeof(Pass) + sizeof(s.layers)) / 8; i += THREADS + FETCHERS)
        ((u64*)&s.pass)[i] = ((const u64*)argument)[i];
    if (thread() < PIECE / 8) s.zeros[thread()] = make_uint4(0, 0, 0, 0);
    if (thread() == 0) {
        for (int i = 0; i < SLOTS; i++) {
            init_mbarrier(shared_address(&s.full[i]), FETCHERS);
            init_mbarrier(shared_address(&s.empty[i]), WARPS);
        }
        init_mbarrier(shared_address(&s.routed), 1);
    }
    __syncthreads();
    if (thread() < THREADS) compute_all(s, s.pass);
    else fetch_all(s);
}
