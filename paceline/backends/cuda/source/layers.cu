// The pass: its phases in order.

// What attention reads of pages and positions, once for all layers.
__device__ inline void prepare_attention(Shared& s, const Pass& pass) {
    const Look& look = s.look;
    if (thread() == 0) s.look.find(pass, blockIdx.x / (Look::takers * KV_HEADS));
    if (thread() < ROWS) s.row_parts[thread()] = 0, s.row_position[thread()] = pass.positions[thread()];
    sync();
    if (look.active() && thread() < BLOCK) {
        int position = look.taker * look.each * BLOCK + thread();
        s.places[thread()] = position <= look.newest ? look.place(position) : 0;
    }
    for (int tile = thread(); tile < ATTENTION_TILES; tile += THREADS) {
        Look own;
        own.find(pass, tile);
        for (int row = 0; row < own.count; row++) {
            s.row_line[own.first + row] = tile * (KV_HEADS * PARTS * LANES) + row * Look::wide;
            s.row_parts[own.first + row] = own.end;
        }
    }
}

__device__ inline void compute_all(Shared& s, const Pass& pass) {
    Place place;
    Barrier barrier{pass.counters};
    Stream stream(pass);
    Turner turner(pass);
    const Look& look = s.look;
    float sums[JOBS][4];
    prepare_attention(s, pass);
    for (int number = 0; number < LAYERS; number++) {
        const Layer& layer = s.layers[number];
        ushort2 bias = turner.bias(layer);
        uint2 feed_forward_norm = stream.weights(layer.feed_forward_norm);
        uint2 next_norm = stream.weights(layer.next_norm);
        stream.keep(layer.features, pass.features_width);
        if (number) barrier.wait();
        {
            Factors factors(pass.quads[0]);
            if (!Heads::streamed) take_rows(s, pass.attention_input), sync();
            factors.leave(s, number ? nullptr : pass.squares);
        }
        product<Heads>(s, place, sums);
        leave_parts<Heads>(s, sums);
        turner.end(s, pass, layer, bias);
        barrier.arrive();
        if (look.active()) take_block(s, layer, look, look.taker * look.each);
        barrier.wait();
        attention(s, pass, layer, look);
        barrier.arrive();
        barrier.wait();
        if (!Output::streamed) take_mixed(s, pass), sync();
        product<Output>(s, place, sums);
        leave_parts<Output>(s, sums);
        stream.add<Output>(s, feed_forward_norm, pass.feed_forward_input, pass.quads[1]);
        barrier.arrive();
        barrier.wait();
        {
            Factors factors(pass.quads[1]);
            take_rows(s, pass.feed_forward_input);
            sync();
            factors.leave(s, nullptr);
        }
        product<GateUp>(s, place, sums);
        sync();
        end_gate_up(s, pass, sums);
        barrier.arrive();
        barrier.wait();
        product<Down>(s, place, sums);
        leave_parts<Down>(s, sums);
        stream.add<Down>(s, next_norm, pass.attention_input, pass.quads[0]);
        barrier.arrive();
    }
    stream.keep(pass.hidden, HIDDEN);
    stream.keep(pass.features, pass.features_width);
    barrier.wait();
    // The head reads sums of squares by tile.
    int line = thread() + blockIdx.x * THREADS;
    if (line < ROWS * TILES) {
        uint4 quads[4];
        take_quads(quads, pass.quads[0], line / TILES, line % TILES);
        pass.squares[line] = tile_squares(quads);
    }
    if (thread() == 0) {
        u32 before = atomicAdd(pass.counters + 1, 1);
        if (before == PROGRAMS - 1) pass.counters[0] = 0, pass.counters[1] = 0;  // nobody waits any more
    }
}

// The same products in the same order: each side counts the slots of the ring for itself.
__device__ inline void fetch_all(Shared& s) {
    Place place;
    for (int number = 0; number < LAYERS; number++) {
        const Layer& layer = s.layers[number];
        fetch<Heads>(s, place, layer.heads);
        fetch<Output>(s, place, layer.output);
        fetch<GateUp>(s, place, layer.gate_up);
        fetch<Down>(s, place, layer.down);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + FETCHERS, 1) persistent_pass(const Pass* given) {
    extern __shared__ __align__(128) unsigned char memory[];
    Shared& s = *(Shared*)memory;
    for (int i = thread(); i < (sizeof(Pass) + sizeof(s.layers)) / 8; i += THREADS + FETCHERS)
        ((u64*)&s.pass)[i] = ((const u64*)given)[i];
    if (thread() < PIECE / 8) s.zeros[thread()] = make_uint4(0, 0, 0, 0);
    if (thread() == 0) {
        for (int i = 0; i < SLOTS; i++) {
            make_flag(shared_address(&s.full[i]), FETCHERS);
            make_flag(shared_address(&s.empty[i]), WARPS);
        }
    }
    __syncthreads();
    if (thread() < THREADS) compute_all(s, s.pass);
    else fetch_all(s);
}
