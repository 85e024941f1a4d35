"""How a family's safetensors differ from llama's: names, matrices stored as one, norms, order of rope pairs.

checkpoint.py has the names and the order of rows that backends read. A FileLayout says what a family's files
have instead, and `converted` gives their tensors as backends read them, still mapped and not yet converted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline.models.checkpoint import Tensor
from paceline.models.config import LatentConfig, ModelConfig, RecurrentConfig
from paceline.models.files.stacked_experts import experts_of_rows, single_experts
from paceline.models.files.tensor_views import Flattened, RowsOf, Scaled, Shifted

# mixtral's names of experts -> ours
MIXTRAL_EXPERT = re.compile(r"(.*)\.block_sparse_moe\.experts\.(\d+)\.w([123])\.(\w+)")
MIXTRAL_PARTS = {"1": "gate", "2": "down", "3": "up"}
# the language model of files that hold other models too, as transformers 5 and 4 name it
TEXT_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
OTHER_MODELS = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|mm_projector|audio_tower|embed_vision"
    r"|embed_audio)\..*"
)
# norms that are not in files under the names of checkpoint.py
SANDWICH_NORMS = {
    "post_attention_layernorm": "attention_output_norm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "feed_forward_output_norm",
}
GEMMA4_NAMES = SANDWICH_NORMS | {
    "mlp": "mlp.shared_experts",
    "experts": "mlp.experts",
    "router": "mlp.gate",
    "proj": "",
    "post_feedforward_layernorm_1": "mlp.shared_output_norm",
    "pre_feedforward_layernorm_2": "mlp.experts_norm",
    "post_feedforward_layernorm_2": "mlp.experts_output_norm",
}
POST_NORMS = {
    "post_attention_layernorm": "attention_output_norm",
    "post_feedforward_layernorm": "feed_forward_output_norm",
}
GLM_NORMS = {
    "post_self_attn_layernorm": "attention_output_norm",
    "post_mlp_layernorm": "feed_forward_output_norm",
}
LFM2_NAMES = {
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "embedding_norm": "norm",
    "q_layernorm": "q_norm",
    "k_layernorm": "k_norm",
    "out_proj": "o_proj",
    "feed_forward": "mlp",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}
GRANITE_HYBRID_NAMES = {
    "shared_mlp": "mlp.shared_experts",
    "block_sparse_moe": "mlp",
    "router": "gate",
    "layer": "",
    "input_linear": "gate_up_proj",
    "output_linear": "down_proj",
}
AFMOE_NAMES = {
    "post_attention_layernorm": "attention_output_norm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "feed_forward_output_norm",
    "router": "",
    "expert_bias": "gate.e_score_correction_bias",
}
FALCON_H1_NAMES = {
    "pre_ff_layernorm": "post_attention_layernorm",
    "feed_forward": "mlp",
    "final_layernorm": "norm",
}
NEMOTRON_H_NAMES = {
    "backbone.embeddings.": "model.embed_tokens.",
    "backbone.norm_f.": "model.norm.",
    "backbone.": "model.",
    ".norm.weight": ".input_layernorm.weight",
    ".mixer.input_layernorm.": ".mamba.norm.",
    "model.input_layernorm.": "model.norm.",
}
NEMOTRON_H_NAMES |= {f".mixer.{part}_proj.": f".self_attn.{part}_proj." for part in "qkvo"}
NEMOTRON_H_NAMES |= {
    f".mixer.{part}": f".mamba.{part}" for part in ("in_proj", "out_proj", "conv1d", "A_log", "D", "dt_bias")
}
NEMOTRON_H_NAMES[".mixer."] = ".mlp."  # what is left
NORM_ENDINGS = ("norm", "norm_embedding", "norm_hidden")  # the last two in blocks for multi-token prediction
WHOLE_NORM = ".linear_attn.norm."  # a norm that is stored whole, whatever `norm_offset` says


@dataclass(frozen=True)
class FileLayout:
    """What is different in a family's files."""

    renamed: Mapping[str, str] = field(default_factory=dict)  # parts of a layer -> ours
    replaced: Mapping[str, str] = field(default_factory=dict)  # pieces of names -> ours, before that
    norm_offset: float = 0.0  # what is missing in the stored weights of norms
    interleaved_rope: bool = False  # the two parts of a rotated pair are neighbours
    stacked_experts: str = ""  # "alternating" or "halves": see stacked_experts.single_experts
    gated_queries: bool = False  # q_proj has, for every head, its query's rows and then its gate's


LLAMA_FILES = FileLayout()


def scaled(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """The tensor, with the factors that the configuration has for it."""
    for scale in config.weight_scales:
        rows = scale.rows or (tensor.shape[0],)
        if name.endswith(scale.name) and sum(rows) == tensor.shape[0]:  # else the check of shapes reports it
            return Scaled(tensor, np.repeat(np.array(scale.factors, dtype=np.float32), rows))
    return tensor


def our_name(name: str, layout: FileLayout) -> str | None:
    """The name as in checkpoint.py of a tensor in a file; None: it belongs to a vision model beside ours."""
    if OTHER_MODELS.fullmatch(name):
        return None
    for prefix, ours in TEXT_PREFIXES:
        name = ours + name.removeprefix(prefix) if name.startswith(prefix) else name
    for theirs, ours in layout.replaced.items():
        name = name.replace(theirs, ours)
    if match := MIXTRAL_EXPERT.fullmatch(name):
        return f"{match[1]}.mlp.experts.{match[2]}.{MIXTRAL_PARTS[match[3]]}_proj.{match[4]}"
    parts = [layout.renamed.get(part, part) for part in name.split(".")]
    return ".".join(part for part in parts if part).replace(".block_sparse_moe.gate.", ".mlp.gate.")


def converted(
    tensors: Mapping[str, Tensor], layout: FileLayout, config: ModelConfig
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file, already under our names, as backends read them."""
    stacked = layout.stacked_experts
    single = (
        single_experts(tensors, stacked == "alternating") if stacked else experts_of_rows(tensors, config)
    )
    fused = fused_matrices(config, layout.gated_queries)
    for stored_name, tensor in single:
        # where there are no experts, the MLP beside them is the only one
        name = stored_name if config.moe else stored_name.replace(".mlp.shared_experts.", ".mlp.")
        for own_name, part in split_joined(name, tensor, fused):
            is_norm = own_name.rsplit(".", 2)[-2].endswith(NORM_ENDINGS) and WHOLE_NORM not in own_name
            if layout.norm_offset and is_norm:
                part = Shifted(part, layout.norm_offset)
            is_rotated = layout.interleaved_rope and re.search(r"\.[qk]_proj\.", own_name)
            if is_rotated and part.shape[0] % config.head_dim == 0:  # else the check of shapes reports it
                part = RowsOf(part, half_split_rows(part.shape[0], config))
            if own_name.endswith(".e_score_correction_bias") and part.shape[0] == 1 < len(part.shape):
                part = Flattened(part)  # ernie4_5_moe has a group of experts there
            if config.latent and (rows := latent_rows(own_name, part.shape[0], config.latent)) is not None:
                part = RowsOf(part, rows)
            yield own_name, scaled(own_name, part, config)


@dataclass(frozen=True)
class Fused:
    """Matrices that are stored as one: each group has a fixed number of rows of every matrix, in order."""

    parts: Sequence[tuple[str, int]]  # names and rows of a group; those of one name are joined in order
    groups: int = 1
    any_size: bool = False  # the numbers of rows are shares of whatever is stored

    @property
    def size(self) -> int:
        return self.groups * sum(rows for _, rows in self.parts)

    def fits(self, stored: int) -> bool:
        """Whether a matrix with `stored` rows can be split this way."""
        return stored % self.size == 0 if self.any_size else stored == self.size

    def rows(self, count: int) -> dict[str, npt.NDArray[np.intp]]:
        """The rows of each matrix, out of `count` stored ones."""
        stored, begin = np.arange(count, dtype=np.intp).reshape(self.groups, -1), 0
        found = dict[str, npt.NDArray[np.intp]]()
        for name, share in self.parts:
            rows = share * count // self.size
            own = stored[:, begin : begin + rows].ravel()
            found[name] = np.concatenate((found[name], own)) if name in found else own
            begin += rows
        return found


def split_joined(name: str, tensor: Tensor, fused: Mapping[str, Fused]) -> Iterator[tuple[str, Tensor]]:
    """The tensor, or, if it is several matrices stored as one, each of them."""
    joined = next((part for part in name.split(".") if part in fused), None)
    if joined is None or not fused[joined].fits(tensor.shape[0]):
        yield name, tensor  # a wrong size is reported by the check of names and shapes
        return
    for part, rows in fused[joined].rows(tensor.shape[0]).items():
        yield name.replace(joined, part), RowsOf(tensor, rows)


def fused_matrices(config: ModelConfig, gated_queries: bool) -> dict[str, Fused]:
    """Of each matrix that may be several stored as one: which."""
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    fused = {
        "qkv_proj": Fused((("q_proj", query), ("k_proj", key), ("v_proj", key))),
        "gate_up_proj": Fused((("gate_proj", 1), ("up_proj", 1)), any_size=True),
    }
    if gated_queries:
        parts = ("q_proj", config.head_dim), ("gate_proj", config.head_dim)
        fused["q_proj"] = Fused(parts, config.num_heads)
    if config.recurrent is not None and config.recurrent.key_heads:
        fused |= _fused_delta(config.recurrent)
    return fused


def _fused_delta(recurrent: RecurrentConfig) -> dict[str, Fused]:
    """The two matrices of qwen3_next, which group their columns by key head."""
    heads, shared_by = recurrent.key_heads, recurrent.value_heads // recurrent.key_heads
    keys, values = recurrent.key_dim, shared_by * recurrent.value_dim
    qkv = [("in_proj_qkv", size) for size in (keys, keys, values)]
    return {
        "in_proj_qkvz": Fused((*qkv, ("in_proj_z", values)), heads),
        "in_proj_ba": Fused((("in_proj_b", shared_by), ("in_proj_a", shared_by)), heads),
    }


def half_split_rows(rows: int, config: ModelConfig) -> npt.NDArray[np.intp]:
    """The stored row of each half-split row of q or k, whose rotated pairs are stored as neighbours.

    The part of a head that is not rotated stays where it is:

        stored       0a 0b 1a 1b  x y
        half-split   0a 1a 0b 1b  x y
    """
    stored = np.arange(rows, dtype=np.intp).reshape(-1, config.head_dim)
    rotated = config.rope.dim or config.head_dim
    pairs = stored[:, :rotated].reshape(len(stored), rotated // 2, 2).swapaxes(1, 2)
    return np.concatenate((pairs.reshape(len(stored), rotated), stored[:, rotated:]), axis=1).ravel()


def latent_rows(name: str, rows: int, latent: LatentConfig) -> npt.NDArray[np.intp] | None:
    """The stored row of each row of a projection of MLA, whose rotated rows are stored last; None: all stay.

    The rotated ones come first, half-split (see half_split_rows):

        stored    x y  0a 0b 1a 1b          ours    0a 1a 0b 1b  x y
    """
    match = re.search(r"\.self_attn\.(q_proj|q_b_proj|kv_a_proj_with_mqa)\.", name)
    if match is None:
        return None
    other = latent.rank if match[1] == "kv_a_proj_with_mqa" else latent.nope_dim
    if rows % (other + latent.rope_dim):
        return None  # a wrong size is reported by the check of names and shapes
    stored = np.arange(rows, dtype=np.intp).reshape(-1, other + latent.rope_dim)
    rotated = stored[:, other:]
    if latent.interleaved:
        pairs = rotated.reshape(len(stored), latent.rope_dim // 2, 2)
        rotated = pairs.swapaxes(1, 2).reshape(len(stored), latent.rope_dim)
    return np.concatenate((rotated, stored[:, :other]), axis=1).ravel()
