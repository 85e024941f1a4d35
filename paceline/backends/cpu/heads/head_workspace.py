"""Workspaces of draft heads and assistants: a model of their layers, and the input stage of entry.py."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import numpy.typing as npt

from paceline.backends.cpu import job as fields
from paceline.backends.cpu.tiles.weight_tile import GROUP
from paceline.backends.cpu.weights.model_weights import round_up
from paceline.backends.cpu.weights.packing import PackedMatrix, pack
from paceline.backends.cpu.workspace import Workspace
from paceline.models.checkpoint import Checkpoint, Tensor
from paceline.models.config import ModelConfig
from paceline.models.files.safetensors_writer import encode
from paceline.models.heads.assistant import PRE, AssistantCheckpoint
from paceline.models.heads.checkpoint import HeadCheckpoint
from paceline.models.heads.config import BlockConfig

Float32Array = npt.NDArray[np.float32]

# Prefixes of tensor names in a head, and in a model
_NAMES = {
    "midlayer.": "model.layers.0.",
    "layers.": "model.layers.",
    "norm.": "model.norm.",
    "lm_head.": "lm_head.",
    "embed_tokens.": "model.embed_tokens.",
}


class DraftWorkspace(Workspace):
    """A workspace whose passes begin with matrices that read several concatenated vectors."""

    def _fused(self, tensor: Tensor, parts: int, quantization: str) -> int:
        """The address of the descriptor of a matrix that reads `parts` concatenated, padded vectors."""
        matrix = pack(encode(_padded(tensor, parts)), quantization)
        self._keep(matrix.data)
        return self._keep(np.array(matrix.descriptor(), dtype=np.int64))


class AssistantWorkspace(DraftWorkspace):
    """Everything a pass of an assistant reads and writes, except the batch, its states and the KV pool."""

    def __init__(
        self, assistant: AssistantCheckpoint, target: Workspace, quantization: str, rows: int
    ) -> None:
        """`target` has the embedding that the assistant reads, and the shapes of the KV pool."""
        self._target = target  # keeps its weights alive
        self.feature_padded = round_up(assistant.target_hidden_size, GROUP)
        own = target.config
        config = replace(
            assistant.beside(own),
            max_position=own.max_position,
            embedding_scale=own.embedding_scale,
            logits_softcap=0.0,  # assistants have none, although their config may name one
        )
        checkpoint = Checkpoint(config, assistant.tensors, assistant.source)
        super().__init__(checkpoint, quantization, target.threads, rows, entry_width=2 * self.feature_padded)
        job = self.job
        job[fields.FEATURE_PADDED], job[fields.NORMED_STATES] = self.feature_padded, True
        job[fields.REDUCE_AT] = self._fused(assistant.tensors[PRE], 2, quantization)
        embedding = np.array(target.embedding.descriptor(), dtype=np.int64)
        job[fields.TARGET_EMBEDDING_AT] = self._keep(embedding)

    def kv_shapes(self) -> list[tuple[int, int, int]]:
        """The target's: an assistant reads the target's pool."""
        return self._target.kv_shapes()


class HeadWorkspace(DraftWorkspace):
    """Everything a pass of a head reads and writes, except the batch, its states and the KV pool."""

    def __init__(self, head: HeadCheckpoint, target: Workspace, quantization: str, rows: int) -> None:
        """`target` has the weights that the head shares with it."""
        config = head.config
        self.feature_padded = round_up(config.target_hidden_size, GROUP)
        self._target = target  # keeps the shared weights alive
        packed: dict[str, PackedMatrix] = {}
        if not config.own_embedding:
            packed["model.embed_tokens.weight"] = target.embedding
        if not config.own_lm_head:
            packed["lm_head.weight"] = target.lm_head
        joined = 2 * round_up(config.hidden_size, GROUP)
        super().__init__(
            _as_model(head, target.config.max_position + (config.block.size if config.block else 0)),
            quantization,
            target.threads,
            rows,
            packed=packed,
            entry_width=max(joined, config.num_features * self.feature_padded),
        )
        job = self.job
        job[fields.FIRST_INDEX] = 0 if config.block else 1
        job[fields.FEATURES], job[fields.FEATURE_WIDTH] = config.num_features, config.target_hidden_size
        job[fields.FEATURE_PADDED] = self.feature_padded
        if config.fc_bias:
            job[fields.ENTRY_BIAS_AT] = self._keep(_padded(head.tensors["fc.bias"]))
        enter = {
            "eagle3": self._enter_eagle3,
            "eagle": self._enter_eagle,
            "mtp": self._enter_mtp,
            "dflash": self._enter_block,
            "dspark": self._enter_block,
        }
        enter[config.kind](head, quantization)

    def _enter_eagle3(self, head: HeadCheckpoint, quantization: str) -> None:
        config, job, tensors = head.config, self.job, head.tensors
        self._read_features(head, quantization)
        if config.norm_before_fc:
            job[fields.INPUT_NORM_AT] = self._keep(_padded(tensors["input_norm.weight"], config.num_features))
        norms = [_padded(tensors[f"midlayer.{name}.weight"]) for name in ("input_layernorm", "hidden_norm")]
        job[fields.JOIN_NORMS_AT] = self._keep(np.concatenate(norms))
        job[fields.NORMED_RESIDUAL] = config.norm_before_residual
        job[fields.NORMED_STATES] = config.norm_output

    def _enter_eagle(self, head: HeadCheckpoint, quantization: str) -> None:
        self.job[fields.MIX_AT] = self._fused(head.tensors["fc.weight"], 2, quantization)
        self._read_last_state(normed=True)

    def _enter_mtp(self, head: HeadCheckpoint, quantization: str) -> None:
        job, tensors = self.job, head.tensors
        job[fields.MIX_AT] = self._fused(tensors["fc.weight"], 2, quantization)
        norms = [_padded(tensors[f"{name}_norm.weight"]) for name in ("embedding", "state")]
        job[fields.JOIN_NORMS_AT] = self._keep(np.concatenate(norms))
        job[fields.NORMED_STATES] = head.config.norm_output
        self._read_last_state(head.config.norm_features)

    def _enter_block(self, head: HeadCheckpoint, quantization: str) -> None:
        job, block = self.job, head.config.block
        assert block is not None, "the head is a parallel one"
        self._read_features(head, quantization)
        job[fields.CONTEXT_NORM_AT] = self._keep(_padded(head.tensors["hidden_norm.weight"]))
        job[fields.NORMED_STATES] = True
        both_ways = [0 if layer.causal else block.size for layer in block.layers]
        job[fields.BLOCK_ROWS_AT] = self._table(both_ways) if any(both_ways) else 0
        if block.mask_embedding:
            job[fields.MASK_TOKEN] = block.mask_token_id
            job[fields.MASK_EMBEDDING_AT] = self._keep(_padded(head.tensors["mask_embedding"]))
        if block.convolution_group:
            self._convolve_slots(head, block)

    def _convolve_slots(self, head: HeadCheckpoint, block: BlockConfig) -> None:
        """The convolutions around attention and MLP of each layer, and their buffers."""
        job, sublayers = self.job, product(range(len(block.layers)), ("attention_conv", "mlp_conv"))
        names = [f"layers.{layer}.{sublayer}." for layer, sublayer in sublayers]
        job[fields.SLOTS], job[fields.SLOT_GROUP] = block.size, block.convolution_group
        job[fields.SLOT_KERNELS_AT] = self._keep(
            np.stack([_padded(head.tensors[f"{name}base_kernel"]) for name in names])
        )
        # always 8 bits: the matrices are small
        matrices = [
            pack(head.tensors[f"{name}kernel_projection.weight"], "int8" if self.quantized else "none")
            for name in names
        ]
        self._kept += [matrix.data for matrix in matrices]
        descriptors = [matrix.descriptor() for matrix in matrices]
        job[fields.SLOT_MATRICES_AT] = self._keep(np.array(descriptors, dtype=np.int64))
        width = round_up(matrices[0].rows, GROUP)
        job[fields.SLOT_CORRECTIONS_AT] = self._buffer(self.rows, width)
        job[fields.SLOT_CORRECTIONS_STRIDE] = 4 * width
        job[fields.SLOT_INPUTS_AT] = self._buffer(self.rows, self.hidden)
        job[fields.BRANCH_AT] = self._buffer(self.rows, self.hidden)

    def _read_features(self, head: HeadCheckpoint, quantization: str) -> None:
        """Load `fc`, which reduces the target's hidden states, and the norms before it if the head has them.

        `fc` has 8 bits even in 4-bit heads: the scales of its columns differ a hundredfold, and it is read
        once per committed token, not in every drafting pass.
        """
        job, count = self.job, head.config.num_features
        bits = "int8" if quantization == "int4" else quantization
        job[fields.REDUCE_AT] = self._fused(head.tensors["fc.weight"], count, bits)
        job[fields.INPUT_EPSILON_AT] = job[fields.EPSILON_AT]
        if head.config.fc_norm:
            norms = [_padded(head.tensors[f"fc_norm.{i}.weight"]) for i in range(count)]
            job[fields.FEATURE_NORMS_AT] = self._keep(np.concatenate(norms))

    def _read_last_state(self, normed: bool) -> None:
        """Use the target's last hidden state as it is, or after the target's final norm."""
        epsilon = np.array([self._target.config.rms_norm_eps], dtype=np.float32)
        self.job[fields.INPUT_EPSILON_AT] = self._keep(epsilon)
        self.job[fields.INPUT_NORM_AT] = self._target.last_norm if normed else 0


def _as_model(head: HeadCheckpoint, max_position: int) -> Checkpoint:
    """A head's layers, norm and LM head as the checkpoint of a small model."""
    config = head.config
    num_layers = len(config.block.layers) if config.block else config.num_layers
    tensors = {
        theirs + name.removeprefix(ours): tensor
        for name, tensor in head.tensors.items()
        for ours, theirs in _NAMES.items()
        if name.startswith(ours)
    }
    if config.layer is not None:
        one_layer = replace(config.layer, max_position=max_position, tie_embeddings=False)
        return Checkpoint(one_layer, tensors, head.source)
    for layer, part in product(range(num_layers), "qkv"):
        name = f"model.layers.{layer}.self_attn.{part}_proj.weight"
        parts = tensors[name].shape[1] // config.hidden_size  # the state alone, or the embedding before it
        tensors[name] = encode(_padded(tensors[name], parts))
    as_model = ModelConfig(
        family=config.kind,
        vocab_size=config.draft_vocab_size,
        hidden_size=config.hidden_size,
        num_layers=num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        rms_norm_eps=config.rms_norm_eps,
        rope=config.rope,
        max_position=max_position,
        tie_embeddings=False,
        qkv_bias=config.qkv_bias,
        qk_norm=config.qk_norm,
        sliding_windows=tuple(layer.window for layer in config.block.layers) if config.block else (),
    )
    return Checkpoint(as_model, tensors, head.source)


def _padded(tensor: Tensor, parts: int = 1) -> Float32Array:
    """The values of a tensor, its last axis split into parts, each zero-padded to whole groups."""
    values = tensor.float32()
    width = values.shape[-1] // parts
    apart = values.reshape(-1, parts, width)
    padded = np.pad(apart, ((0, 0), (0, 0), (0, -width % GROUP)))
    return padded.reshape(*values.shape[:-1], -1)
