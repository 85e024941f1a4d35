"""ModelWeights: a model's weights in the layout of the compiled pass, and their addresses in the job."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal

import numpy as np
import numpy.typing as npt

from paceline.backends.cpu import job as fields
from paceline.backends.cpu.phases.recurrent import KINDS
from paceline.backends.cpu.primitives.rows import ACTIVATIONS
from paceline.backends.cpu.primitives.simd import LANES
from paceline.backends.cpu.tiles.weight_tile import GROUP
from paceline.backends.cpu.weights.latent_weights import latent_names, norm_names, with_head_matrices
from paceline.backends.cpu.weights.matrix_names import (
    LAYER,
    bias_name,
    expert_latent_names,
    expert_names,
    layer_input_names,
    matrix_names,
    mixer_names,
)
from paceline.backends.cpu.weights.packing import PackedMatrix, address_of, aligned_zeros, pack_matrices
from paceline.models.checkpoint import Checkpoint
from paceline.models.config import (
    MIXER,
    LatentConfig,
    MoeConfig,
    PerLayerInput,
    RecurrentConfig,
    RopeConfig,
)
from paceline.models.files.layout import RECURRENT_MATRICES
from paceline.models.transformer.rope import query_factor_table, rope_tables

_FIRST_NORM = "input_layernorm"


def round_up(value: int, multiple: int) -> int:
    """`value` rounded up to a multiple."""
    return -(-value // multiple) * multiple


class ModelWeights:
    """Packed matrices and tables of a model, and the job with their addresses."""

    def __init__(
        self, checkpoint: Checkpoint, quantization: str, threads: int, packed: Mapping[str, PackedMatrix]
    ) -> None:
        """`packed`: matrices that another model has packed already, by their names in this one."""
        self.config = checkpoint.config
        self._tensors = checkpoint.tensors
        self._kept: list[npt.NDArray[np.generic]] = []  # keeps alive the memory at the job's addresses
        self.job = np.zeros(fields.JOB_SIZE, dtype=np.int64)
        self.buffer_bytes = 0  # of buffers that passes write; the OS allocates their memory on first write
        self.hidden = round_up(self.config.hidden_size, GROUP)
        self._matrices = _pack_matrices(checkpoint, quantization, threads, packed)
        self._norms = [self._norm(name) for name in self._norm_names()]  # addresses, the LM head's last
        self._set_weights()
        self._set_blocks()
        self.job[fields.HAS_EXPERTS_AT] = self._buffer(self.config.num_layers, dtype=np.int64)
        if self.config.moe is not None:
            self._set_experts(self.config.moe)
        if self.config.latent is not None:
            self._set_latents(self.config.latent)
        if self.config.recurrent is not None:
            self._set_recurrence(self.config.recurrent)
        del self._tensors

    @property
    def last_norm(self) -> int:
        """The address of the weights of the norm before the LM head."""
        return self._norms[-1]

    @property
    def embedding(self) -> PackedMatrix:
        return self._matrices["model.embed_tokens.weight"]

    @property
    def lm_head(self) -> PackedMatrix:
        return self.embedding if self.config.tie_embeddings else self._matrices["lm_head.weight"]

    def packed_matrix(self, name: str) -> PackedMatrix:
        """A matrix by the name of its tensor."""
        return self._matrices[name]

    def _keep(self, array: npt.NDArray[np.generic]) -> int:
        self._kept.append(array)
        return address_of(array)

    def _buffer(self, *shape: int, dtype: npt.DTypeLike = np.float32) -> int:
        buffer = aligned_zeros(shape, dtype)
        self.buffer_bytes += buffer.nbytes
        return self._keep(buffer)

    def _vectors(self, names: list[str], width: int) -> npt.NDArray[np.float32]:
        """The named vectors (or rows of matrices) stacked and zero-padded to `width`.

        A tensor that the model lacks gives a vector of zeros.
        """
        known = self._tensors
        rows = [np.atleast_2d(known[name].float32()) if name in known else np.zeros((1, 0)) for name in names]
        padded = [np.pad(row, ((0, 0), (0, width - row.shape[1]))) for row in rows]
        return np.concatenate(padded).astype(np.float32, copy=False)

    def _norm(self, name: str, width: int = 0) -> int:
        """The address of a norm's weights, of the residual stream by default; 0 if the model lacks it."""
        known = name in self._tensors
        return self._keep(self._vectors([name], width or self.hidden)) if known else 0

    def _layer_names(self, *suffixes: str) -> list[str]:
        return [LAYER.format(i) + name for i in range(self.config.num_layers) for name in suffixes]

    def _set_weights(self) -> None:
        config, job, layers = self.config, self.job, range(self.config.num_layers)
        job[fields.EPSILON_AT] = self._keep(np.array([config.rms_norm_eps], dtype=np.float32))
        job[fields.NORMS_AT] = self._keep(np.array(self._norms, dtype=np.int64))
        job[fields.ROPES_AT] = self._keep(self._ropes())
        reaches = map(config.reach, layers)
        job[fields.WINDOWS_AT] = self._table([reach.window or -(reach.chunk or 0) for reach in reaches])
        job[fields.MATRICES_AT] = self._descriptors(matrix_names(config))
        job[fields.ATTENTION_GATE] = config.attention_gate
        if config.qk_norm or config.joint_qk_norm:
            names = self._layer_names("self_attn.q_norm.weight", "self_attn.k_norm.weight")
            queries = round_up(config.num_heads * config.head_dim, GROUP)
            width = queries if config.joint_qk_norm else self.widest_head
            job[fields.HEAD_NORMS_AT] = self._keep(self._vectors(names, width))
            job[fields.HEAD_NORMS_WIDTH] = width
        if any(bias_name(name) in self._tensors for layer in layers for name in mixer_names(config, layer)):
            job[fields.QKV_BIAS_AT], job[fields.OUTPUT_BIAS_AT] = self._mixer_biases()

    def _norm_names(self) -> list[str]:
        """The norms before the mixer and before the feed-forward block of each layer, and the last one."""
        names = list[str]()
        for layer in range(self.config.num_layers):
            has_mixer = self.config.has_part(layer, MIXER)
            before_mlp = "post_attention_layernorm" if has_mixer and not self._is_parallel else _FIRST_NORM
            names += [LAYER.format(layer) + f"{name}.weight" for name in (_FIRST_NORM, before_mlp)]
        return [*names, "model.norm.weight"]

    def _mixer_biases(self) -> tuple[int, int]:
        """The addresses of the biases of the mixers' input and output projections, a line for each layer."""
        layers = range(self.config.num_layers)
        inputs = np.zeros((len(layers), self.inputs_width), dtype=np.float32)
        outputs = np.zeros((len(layers), self.hidden), dtype=np.float32)
        for layer in layers:
            names, column = mixer_names(self.config, layer), 0
            for name, width in zip(names, self._input_widths(layer), strict=False):
                inputs[layer, column : column + width] = self._vectors([bias_name(name)], width)
                column += width
            for name in names[fields.INPUTS :]:
                outputs[layer] += self._vectors([bias_name(name)], self.hidden)[0]
        return self._keep(inputs), self._keep(outputs)

    def _input_widths(self, layer: int) -> list[int]:
        """The padded output widths of a layer's mixer projections, in the order of the pass's buffer."""
        names = mixer_names(self.config, layer)[: fields.INPUTS]
        return [round_up(self._matrices[name].rows, GROUP) if name else 0 for name in names]

    @property
    def inputs_width(self) -> int:
        """Columns of that buffer: the widest layer's, plus the rest of a recurrence's last vector load."""
        slack = GROUP if self.config.recurrent else 0
        widths = [self._input_widths(layer) for layer in range(self.config.num_layers)]
        for layer, shape in enumerate(self.config.layer_shapes):
            if shape.values_are_keys:  # a copy of the keys
                widths[layer][2] = widths[layer][1]
        return max(map(sum, widths)) + slack

    @property
    def widest_head(self) -> int:
        """The most numbers of a head in any layer."""
        return max([self.config.head_dim, *(shape.head_dim for shape in self.config.layer_shapes)])

    def _table(self, values: list[int]) -> int:
        """The address of a table with one number per layer."""
        return self._keep(np.array(values, dtype=np.int64))

    @property
    def _is_parallel(self) -> bool:
        """Whether attention and MLP read the same norm."""
        return self.config.norm_placement == "parallel"

    def _set_blocks(self) -> None:
        """Set what differs from llama: scales, caps, output norms of attention and MLP, attention sinks."""
        config, job = self.config, self.job
        scales = {
            fields.SCORE_SCALE: config.attention_scale or 1.0 / math.sqrt(config.head_dim),
            fields.SCORE_CAP: config.attention_softcap,
            fields.EMBEDDING_SCALE: config.embedding_scale,
            fields.RESIDUAL_SCALE: config.residual_scale,
            fields.LOGITS_SCALE: config.logits_scale,
            fields.LOGITS_CAP: config.logits_softcap,
            fields.SHARE_SCALE: config.moe.weight_scale if config.moe else 1.0,
        }
        ordered = [scales[index] for index in range(len(scales))]
        job[fields.SCALES_AT] = self._keep(np.array(ordered, dtype=np.float32))
        job[fields.ACTIVATION], job[fields.CENTERED] = ACTIVATIONS[config.activation], config.norm == "layer"
        job[fields.PARALLEL], job[fields.JOINT_QK_NORM] = self._is_parallel, config.joint_qk_norm
        names = self._layer_names("attention_output_norm.weight", "feed_forward_output_norm.weight")
        norms = np.array([self._norm(name) for name in names], dtype=np.int64)
        if norms.any() or self._is_parallel or config.residual_scale != 1:
            job[fields.OUTPUT_NORMS_AT] = self._keep(norms)
        ones = self._keep(np.ones(self.widest_head, dtype=np.float32))
        job[fields.UNIT_QK_AT], job[fields.UNIT_VALUES_AT] = ones * config.unit_qk, ones * config.value_norm
        if config.layer_scales:
            job[fields.LAYER_SCALES_AT] = self._keep(self._vectors(self._layer_names("layer_scalar"), 1))
        if config.per_layer_input is not None:
            self._set_layer_inputs(config.per_layer_input)
        if config.attention_sinks:
            sinks = self._vectors(self._layer_names("self_attn.sinks"), config.num_heads)
            job[fields.SINKS_AT] = self._keep(sinks)

    def _set_layer_inputs(self, inputs: PerLayerInput) -> None:
        """Set the norms and matrices of per-layer embeddings."""
        first = self._norm("model.per_layer_projection_norm.weight", inputs.size)
        norms = [self._norm(name) for name in self._layer_names("post_per_layer_input_norm.weight")]
        self.job[fields.INPUT_SIZE], self.job[fields.INPUT_NORMS_AT] = (
            inputs.size,
            self._table([first, *norms]),
        )
        self.job[fields.INPUT_MATRICES_AT] = self._descriptors([*layer_input_names(self.config)])

    def _ropes(self) -> npt.NDArray[np.int64]:
        """A line for each layer, see ROPE of job.py."""
        config = self.config
        ropes = [config.rope_of(layer) for layer in range(config.num_layers)]
        known: dict[RopeConfig | None, tuple[int, int, int]] = {None: (0, 0, 0)}
        for rope in ropes:
            if rope is not None and rope not in known:
                cosines, sines = rope_tables(rope, config.head_dim, config.max_position)
                known[rope] = self._keep(cosines), self._keep(sines), cosines.shape[1]
        temperature, factors = config.temperature, 0
        if temperature is not None:
            factors = self._keep(query_factor_table(temperature, config.max_position))
        scaled = [temperature is not None and temperature.with_rope == (rope is not None) for rope in ropes]
        lines = [(*known[rope], factors * own) for rope, own in zip(ropes, scaled, strict=True)]
        return np.array(lines, dtype=np.int64)

    def _set_experts(self, moe: MoeConfig) -> None:
        """Set the routers and experts of the layers that have them; zeros for the others."""
        job, layers = self.job, range(self.config.num_layers)
        job[fields.EXPERTS], job[fields.EXPERTS_PER_TOKEN] = moe.num_experts, moe.experts_per_token
        job[fields.EXPERT_WIDTH] = round_up(moe.intermediate_size, GROUP)
        job[fields.EXPERT_HIDDEN] = round_up(self.config.expert_hidden, GROUP)
        if moe.latent_size:
            job[fields.EXPERT_LATENT_MATRICES_AT] = self._descriptors(expert_latent_names(self.config))
        job[fields.NORMALIZE_SHARES] = moe.normalize_weights
        job[fields.SIGMOID_SCORES] = moe.scoring == "sigmoid"
        job[fields.EXPERT_GROUPS], job[fields.CHOSEN_GROUPS] = moe.groups, moe.chosen_groups
        job[fields.GROUP_EXPERTS], job[fields.SCALED_INPUTS] = moe.group_experts, moe.scaled_inputs
        has_experts = np.array([layer in moe.layers for layer in layers], dtype=np.int64)
        job[fields.HAS_EXPERTS_AT] = self._keep(has_experts)
        job[fields.ROUTERS_AT] = self._of_experts(moe, "mlp.gate.weight", (moe.num_experts, self.hidden))
        job[fields.EXPERT_MATRICES_AT] = self._descriptors(
            [
                name if layer in moe.layers else None
                for layer in layers
                for name in expert_names(self.config, moe, layer)
            ]
        )
        if moe.shared_gate:
            name = "mlp.shared_expert_gate.weight"
            job[fields.SHARED_GATES_AT] = self._of_experts(moe, name, (1, self.hidden))
        if moe.correction_bias:
            name = "mlp.gate.e_score_correction_bias"
            job[fields.CORRECTIONS_AT] = self._of_experts(moe, name, (1, moe.num_experts))
        if moe.own_norms:
            name = "mlp.gate.per_expert_scale"
            job[fields.EXPERT_SCALES_AT] = self._of_experts(moe, name, (1, moe.num_experts))
            job[fields.OWN_NORMS_AT] = self._own_norms(moe)
        if moe.biases:
            job[fields.ROUTER_BIASES_AT] = self._of_experts(moe, "mlp.gate.bias", (1, moe.num_experts))
            job[fields.EXPERT_BIASES_AT] = self._expert_biases(moe)

    def _own_norms(self, moe: MoeConfig) -> int:
        """The address of a table of OWN_NORMS norms per layer, zeros in layers without experts."""
        names = ("mlp.experts_norm", "mlp.experts_output_norm", "mlp.shared_output_norm")
        table = np.zeros((self.config.num_layers, fields.OWN_NORMS), dtype=np.int64)
        for layer in moe.layers:
            prefix = LAYER.format(layer)
            router = self._vectors([f"{prefix}mlp.gate.scale"], self.hidden)
            factor = np.float32(self.config.hidden_size**-0.5)
            table[layer] = (
                self._keep(router * factor),
                *(self._norm(f"{prefix}{name}.weight") for name in names),
            )
        return self._keep(table)

    def _of_experts(self, moe: MoeConfig, name: str, shape: tuple[int, int]) -> int:
        """The address of the named tensor of all layers, padded to this shape; zeros without experts."""
        table = np.zeros((self.config.num_layers, *shape), dtype=np.float32)
        for layer in moe.layers:
            table[layer] = self._vectors([LAYER.format(layer) + name], shape[1])
        return self._keep(table)

    def _expert_biases(self, moe: MoeConfig) -> int:
        """The address of every expert's biases of gate, up and down, padded as their matrices are."""
        width = round_up(moe.intermediate_size, GROUP)
        table = np.zeros((self.config.num_layers, moe.num_experts, 2 * width + self.hidden), dtype=np.float32)
        for layer in moe.layers:
            names = [bias_name(name) for name in expert_names(self.config, moe, layer)]
            for part, size in enumerate((width, width, self.hidden)):
                table[layer, :, part * width : part * width + size] = self._vectors(names[part::3], size)
        return self._keep(table)

    def _descriptors(self, names: list[str | None]) -> int:
        """The address of the descriptors of these matrices; a line of zeros for None."""
        lines = [self._matrices[name].descriptor() if name else [0] * 5 for name in names]
        return self._keep(np.array(lines, dtype=np.int64))

    def _set_latents(self, latent: LatentConfig) -> None:
        """Set the sizes, matrices and norms of latent attention."""
        job, padded = self.job, round_up(latent.rank, GROUP)
        job[fields.LATENT_RANK], job[fields.LATENT_PADDED] = latent.rank, padded
        job[fields.QUERY_RANK], job[fields.ROPE_WIDTH] = latent.query_rank, latent.rope_dim
        job[fields.NOPE_WIDTH], job[fields.VALUE_WIDTH] = latent.nope_dim, latent.value_dim
        job[fields.LATENT_MATRICES_AT] = self._descriptors(latent_names(self.config))
        widest = round_up(max(latent.rank, latent.query_rank), GROUP)
        job[fields.LATENT_NORMS_AT] = self._table(
            [self._norm(name, widest) for name in norm_names(self.config)]
        )

    def _set_recurrence(self, recurrent: RecurrentConfig) -> None:
        """Set the sizes and parameters of recurrent layers, and the columns of a projected row."""
        config, job, layers = self.config, self.job, self.config.recurrent_layers
        job[fields.RECURRENCE], job[fields.CONV_KERNEL] = KINDS[recurrent.kind], recurrent.conv_kernel
        numbers = [layers.index(layer) if layer in layers else -1 for layer in range(config.num_layers)]
        job[fields.STATE_LAYERS_AT], job[fields.NUM_STATE_LAYERS] = self._table(numbers), len(layers)
        job[fields.KEY_HEADS], job[fields.VALUE_HEADS] = recurrent.key_heads, recurrent.value_heads
        job[fields.KEY_DIM], job[fields.VALUE_DIM] = recurrent.key_dim, recurrent.value_dim
        job[fields.TILED_VALUES] = recurrent.tiled_values
        channels = round_up(recurrent.conv_size or config.hidden_size, LANES)
        heads, job[fields.CHANNELS] = round_up(recurrent.value_heads, LANES), channels
        place, _, _ = RECURRENT_MATRICES[recurrent.kind]
        names = [f"{LAYER.format(layer)}{place}." for layer in layers]
        convolution = "conv" if recurrent.kind == "short_conv" else "conv1d"
        weights = [self._tensors[f"{name}{convolution}.weight"].float32()[:, 0].T for name in names]
        padded = [np.pad(weight, ((0, 0), (0, channels - weight.shape[1]))) for weight in weights]
        job[fields.CONV_WEIGHTS_AT] = self._keep(np.ascontiguousarray(np.stack(padded)))
        if recurrent.conv_bias:
            biases = self._vectors([f"{name}{convolution}.bias" for name in names], channels)
            job[fields.CONV_BIASES_AT] = self._keep(biases)
        if recurrent.kind == "short_conv":
            return
        rates = self._vectors([f"{name}A_log" for name in names], heads)
        # in decimal arithmetic, because numpy and C libraries differ in the last bit
        rates[:] = [[float(Decimal(float(rate)).exp()) for rate in line] for line in rates]
        job[fields.RATES_AT] = self._keep(rates)
        job[fields.RATE_BIASES_AT] = self._keep(self._vectors([f"{name}dt_bias" for name in names], heads))
        self._set_memory(recurrent, names)

    def _set_memory(self, recurrent: RecurrentConfig, names: list[str]) -> None:
        """Set what only the delta rule and Mamba2 have; `names` are the prefixes of the layers' tensors."""
        job, values = self.job, recurrent.value_heads * recurrent.value_dim
        layer = self.config.recurrent_layers[0]
        widths = self._input_widths(layer)
        first = sum(widths[:3]) if layer in self.config.attending_layers else 0
        if recurrent.kind == "gated_delta":
            columns = (first, *(first + sum(widths[:part]) for part in (1, 2, 3)))
            norms, groups = np.tile(self._norm_weights(names), recurrent.value_heads), recurrent.value_heads
        else:
            job[fields.PASSED_AT] = self._keep(
                self._vectors([f"{name}D" for name in names], recurrent.value_heads)
            )
            columns = (first + values, first, first + values + recurrent.conv_size, 0)
            norms, groups = self._norm_weights(names), recurrent.norm_groups
            job[fields.GATED_NORM] = recurrent.gated_norm
        job[fields.CONV_COLUMN], job[fields.GATE_COLUMN] = columns[:2]
        job[fields.RATE_COLUMN], job[fields.STRENGTH_COLUMN] = columns[2:]
        job[fields.NORM_GROUPS], job[fields.MIXER_NORMS_AT] = groups, self._keep(norms)

    def _norm_weights(self, names: list[str]) -> npt.NDArray[np.float32]:
        """The weights of the norms of recurrent layers' outputs; empty if there are none."""
        tensors = [
            self._tensors[f"{name}norm.weight"].float32()
            for name in names
            if f"{name}norm.weight" in self._tensors
        ]
        return np.stack(tensors) if tensors else np.zeros((1, 1), dtype=np.float32)


def _pack_matrices(
    checkpoint: Checkpoint, quantization: str, threads: int, packed: Mapping[str, PackedMatrix]
) -> dict[str, PackedMatrix]:
    """All matrices by name: those in `packed`, and the others, packed now by several threads."""
    config, moe = checkpoint.config, checkpoint.config.moe
    names = [name for name in matrix_names(config) if name] + layer_input_names(config)
    if moe is not None:
        names += [name for layer in sorted(moe.layers) for name in expert_names(config, moe, layer)]
        names += [name for name in expert_latent_names(config) if name]
    if config.latent is not None:
        names += [name for name in latent_names(config) if name]
    made = with_head_matrices(config, checkpoint.tensors)
    tensors = {name: made[name] for name in names if name not in packed}
    return {**packed, **pack_matrices(tensors, quantization, threads)}
