"""The job: all arguments of a compiled pass in one int64 array, and how threads share a phase's tasks."""

from __future__ import annotations

from numba import types

from paceline.backends.cpu.primitives.atomics import atomic_add
from paceline.backends.cpu.primitives.compiled import compiled
from paceline.backends.cpu.primitives.simd import load_float, load_int64, operation, read_at

# The job: index of each field. Sizes are counts; names in *_AT are addresses.
(
    # model, constant
    LAYERS, HIDDEN, HIDDEN_PADDED, HEADS, SHAPES_AT, QUANTIZED, HALF_KV, EPSILON_AT,
    FIRST_INDEX, MATRICES_AT, NORMS_AT, HEAD_NORMS_AT, HEAD_NORMS_WIDTH, QKV_BIAS_AT, OUTPUT_BIAS_AT,
    ROPES_AT,
    # sliding window of each layer, in positions; negative: size of attention chunks; 0: full attention
    WINDOWS_AT,
    # beyond llama (0 or address 0 for llama): output norms of attention and MLP, two per layer; attention
    # sinks; LayerNorm instead of RMSNorm; attention and MLP in parallel; QK norm over all heads at once;
    # weights of one for norms without weights (of queries and keys after RoPE, of values); the MLP's
    # activation, of rows.ACTIVATIONS
    OUTPUT_NORMS_AT, SINKS_AT, CENTERED, PARALLEL, JOINT_QK_NORM, UNIT_QK_AT, UNIT_VALUES_AT,
    ACTIVATION,
    SCALES_AT,
    # whether a gate for the attention output follows q, k and v; the scale of each layer's output
    ATTENTION_GATE, LAYER_SCALES_AT,
    # per-layer embeddings, see layer_inputs.py: size per layer (0: none), matrices, norms, buffers
    INPUT_SIZE, INPUT_MATRICES_AT, INPUT_NORMS_AT, LAYER_INPUTS_AT, LAYER_INPUTS_STRIDE, INPUT_GATES_AT,
    # latent attention, see latent.py: sizes (LATENT_PADDED 0: none), matrices, norms, and the buffer of the
    # per-head matrices' inputs and outputs
    LATENT_RANK, LATENT_PADDED, QUERY_RANK, ROPE_WIDTH, NOPE_WIDTH, VALUE_WIDTH, LATENT_MATRICES_AT,
    LATENT_NORMS_AT, HEAD_ROWS_AT, HEAD_ROWS_STRIDE,
    # recurrent layers, see recurrent.py: kind (0: none), index of each layer's state (-1: not recurrent),
    # sizes, columns of a projected row, parameters, buffers
    RECURRENCE, STATE_LAYERS_AT, NUM_STATE_LAYERS, CONV_KERNEL, CHANNELS, KEY_HEADS, VALUE_HEADS, KEY_DIM,
    VALUE_DIM, TILED_VALUES, NORM_GROUPS, GATED_NORM, CONV_COLUMN, GATE_COLUMN, RATE_COLUMN, STRENGTH_COLUMN,
    CONV_WEIGHTS_AT, CONV_BIASES_AT, RATES_AT, RATE_BIASES_AT, PASSED_AT, MIXER_NORMS_AT,
    KEPT_ROWS_AT, KEPT_STRIDE, KEPT_LAYER, CONVOLVED_AT, READS_AT, MIXED_AT, MIXED_PADDED, NODES_AT,
    NODES_BYTES,
    # buffers, constant
    STATE_AT, BRANCH_AT, QKV_AT, QKV_STRIDE, QUERIES_AT, QUERIES_STRIDE, ATTENTION_AT, ATTENTION_PADDED,
    RECORDS_AT, WIDE_RECORDS_AT, SCRATCH_AT, SCRATCH_BYTES, COUNTERS_AT,
    # experts: sizes, tables and buffers; EXPERTS is 0 in a dense model
    EXPERTS, EXPERTS_PER_TOKEN, EXPERT_HIDDEN, EXPERT_WIDTH, NORMALIZE_SHARES, HAS_EXPERTS_AT, ROUTERS_AT,
    EXPERT_MATRICES_AT, CHOICES_AT, SHARES_AT, SPANS_AT, EXPERT_RECORDS_AT, EXPERT_WIDE_RECORDS_AT,
    PAIR_OUTPUTS_AT,
    # experts in a latent space: the matrices to it and from it, two per layer (0: none); latents of rows
    EXPERT_LATENT_MATRICES_AT, EXPERT_LATENTS_AT, EXPERT_LATENT_RECORDS_AT,
    # gate of the shared expert: its weights, and the gate of each row; 0: none
    SHARED_GATES_AT, SHARED_SHARES_AT,
    # variants of routing, else 0: sigmoid scores; score-correction biases, used for the choice only; groups
    # of experts, how many groups are chosen, by how many of their best experts; biases of routers and of
    # experts; routing weights scale the experts' input; norms of OWN_NORMS below; scales of routing weights
    SIGMOID_SCORES, CORRECTIONS_AT, EXPERT_GROUPS, CHOSEN_GROUPS, GROUP_EXPERTS, ROUTER_BIASES_AT,
    EXPERT_BIASES_AT, SCALED_INPUTS, OWN_NORMS_AT, EXPERT_SCALES_AT,
    # input stage of a draft head, see entry.py; a model's only inputs are tokens
    FEATURES, FEATURE_WIDTH, FEATURE_PADDED, FEATURE_NORMS_AT, INPUT_NORM_AT, INPUT_EPSILON_AT, REDUCE_AT,
    MIX_AT, ENTRY_BIAS_AT, JOIN_NORMS_AT, NORMED_RESIDUAL, NORMED_STATES,
    # an assistant, whose rows attend to the target's keys and values: the target's embedding
    TARGET_EMBEDDING_AT,
    # a parallel head: the norm of the context states that all layers read; for each layer, the rows of a
    # block with bidirectional attention (0 in the table, or no table: causal); the embedding of MASK, 0:
    # that of the token MASK_TOKEN
    CONTEXT_NORM_AT, BLOCK_ROWS_AT, MASK_TOKEN, MASK_EMBEDDING_AT,
    # DFlash2's convolutions, see slot_convolutions.py: matrices and kernels of each sublayer (0: none), slots
    # of a block, channels that share a correction, buffers
    SLOT_MATRICES_AT, SLOT_KERNELS_AT, SLOTS, SLOT_GROUP, SLOT_INPUTS_AT, SLOT_CORRECTIONS_AT,
    SLOT_CORRECTIONS_STRIDE,
    # addresses of kernels that are called by address
    RUN_TILE, RUN_PRODUCTS, RUN_GUMBEL_ARGMAX, RUN_COUPLED,
    # batch, set for every pass
    ROWS, TOKENS_AT, POSITIONS_AT, PARENTS_AT, REQUEST_AT, ROW_START_AT, CONTEXT_AT, PAGES_AT, MAX_PAGES,
    CHAIN_AT, OUTPUTS, LOGIT_ROWS_AT, LOGITS_AT, LOGITS_STRIDE, KV_LAYERS_AT, FEATURE_SLOT_AT,
    FEATURES_AT, FEATURES_STRIDE, KEPT, KEPT_AT, INPUTS_AT, FROM_TARGET, STATES_AT,
    # LoRA adapters, see low_rank.py: the table of each row's adapter (0: no row has one), that of each row of
    # experts, the results of `down` for all rows, the largest rank, lines of a table for each layer
    ROW_ADAPTERS_AT, PAIR_ADAPTERS_AT, LOW_AT, LOW_RANK, LAYER_LINES,
    # scans of recurrent layers: the pool of states, bytes of a state and of a layer's part; tables by
    # row and by scan; ADVANCING 1: advance states along rows of the last pass, run no pass
    POOL_AT, STATE_BYTES, STATE_LAYER_BYTES, SCANS, SCAN_LENGTH, SCAN_ROWS_AT, SCAN_PREVIOUS_AT,
    SCAN_SLOTS_AT, SCAN_BEFORE_AT, SCAN_AFTER_AT, SCAN_BEGINS_AT, SCAN_COUNTS_AT, ADVANCING,
    # the last NUM_CHOSEN outputs are sampled, see sampling.py; seeds and temperatures are by output, in a
    # draft head by request
    NUM_CHOSEN, VOCABULARY, SEEDS_AT, TEMPERATURES_AT, CHOSEN_TOKENS_AT,
    # chains that a draft head drafts after the pass, see draft_chains.py
    DRAFTING, MORE_DRAFTS, NUM_COUNTERS, DRAFT_VOCABULARY, TARGET_IDS_AT, CANDIDATE_IDS_AT,
    NUM_CANDIDATE_IDS, LEAST_CHANCES_AT,
    MAX_DRAFTS, DRAFTS_WANTED_AT, DRAFTS_AT, CHANCES_AT, NUM_DRAFTS_AT, CHOSEN_AT, CHOSEN_CHANCES_AT,
    NEXT_ROWS_AT, NEXT_ROWS_STRIDE,
    JOB_SIZE,
) = range(209)  # fmt: skip

# Matrices of a layer, in the order of the descriptor table; after all layers: the embedding and the LM head.
# The first INPUTS read the norm before the mixer: Q, K, V and attention's gate, or a recurrence's inputs.
INPUTS = 4
OUTPUT, RECURRENT_OUTPUT, GATE, UP, DOWN, LAYER_MATRICES = range(INPUTS, INPUTS + 6)
# Matrices of a layer with latent attention (LATENT_MATRICES): query latent to queries, and per head W_uk
# (queries to latents) and W_uv (latents to values)
QUERY_MATRIX, TO_LATENTS, TO_VALUES, LATENT_MATRICES = range(4)
# Lines of an adapter's table for each layer: its matrices, those of latent attention, three of each expert
LATENT_LINES = LAYER_MATRICES
EXPERT_LINES = LATENT_LINES + LATENT_MATRICES
COUNTERS_PER_LAYER = 38
ENTRY_COUNTERS = 8
LAST_COUNTERS = 5
# A layer's line of SHAPES: its layer of the KV pool, KV heads, numbers of a key, bytes of a page and KV head,
# and where keys and values come from
KV_LAYER, KV_HEADS, HEAD_WIDTH, BLOCK_BYTES, KV_SOURCE, SHAPE = range(6)
# Bytes of a line of KV_LAYERS, one for each layer of a KV pool: the address of its keys and values, and that
# of the window page of each page (int32), 0 for layers that are not in the window group
KV_LINE = 16
OWN, VALUES_ARE_KEYS, SHARED = range(3)
# Additional norms of a mixture layer (Gemma 4): router input, experts' input and output, shared MLP's output
ROUTER_NORM, EXPERTS_NORM, EXPERTS_OUTPUT_NORM, SHARED_OUTPUT_NORM, OWN_NORMS = range(5)
# The floats at SCALES_AT: scale and soft cap of attention scores, scale of embeddings, of additions to the
# residual stream, scale and soft cap of logits, scale of routing weights. A cap of 0: none.
SCORE_SCALE, SCORE_CAP, EMBEDDING_SCALE, RESIDUAL_SCALE, LOGITS_SCALE, LOGITS_CAP, SHARE_SCALE = range(7)
# Bytes of a layer's line in ROPES: addresses of cosines and sines, rotated pairs of a head (0: no RoPE), and
# the address of query scales by position (0: none)
ROPE = 32


@operation(types.int64, types.int64, types.int64)
def field(builder, job, index):  # type: ignore[no-untyped-def]
    """A field of the job. An intrinsic, because a call takes numba longer to compile, and there are 500."""
    address = builder.add(job, builder.mul(index, index.type(8)))
    return read_at(builder, address, index.type, 8)


@compiled
def shape_of(job, layer, index):  # type: ignore[no-untyped-def]
    """A number of a layer's line of SHAPES."""
    return load_int64(field(job, SHAPES_AT) + 8 * (SHAPE * layer + index))


@compiled
def own_norm(job, layer, index):  # type: ignore[no-untyped-def]
    """The address of one of a layer's OWN_NORMS; 0 if the model has none."""
    table = field(job, OWN_NORMS_AT)
    return load_int64(table + 8 * (OWN_NORMS * layer + index)) if table != 0 else 0


@compiled
def scale_of(job, index):  # type: ignore[no-untyped-def]
    """One of the model's scales and caps at SCALES_AT."""
    return load_float(field(job, SCALES_AT) + 4 * index)


@compiled
def take(tasks, counters, count, chunk):  # type: ignore[no-untyped-def]
    """The next tasks (first, last) of `count` for this thread; (count, count) when none is left.

    `tasks` is (thread, threads). Work stealing: each thread first takes its own contiguous share in order, so
    that it streams weights from memory sequentially, then tasks from the shares of other threads.
    """
    thread, threads = tasks
    for step in range(threads):
        owner = (thread + step) % threads
        end = count * (owner + 1) // threads
        begin = count * owner // threads
        first = begin + atomic_add(counters + 64 * owner, chunk)
        if first < end:
            return first, min(first + chunk, end)
    return count, count
