"""Tiny checkpoints with a block for multi-token prediction: of MiMo, which is a qwen2, and of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from tests.tiny import random_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, Qwen2ForCausalLM

PREFIX = "model.mtp_layers.0."
# settings that depend on the number of a layer
ONE_LAYER = {
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "first_k_dense_replace": 0,
    "mlp_only_layers": [],
    "mlp_layer_types": ["sparse"],
}


class Names(NamedTuple):
    """How the files of a family name the parts of the block, and the order of what it reads."""

    layer: str
    token_norm: str
    hidden_norm: str
    projection: str
    norm: str
    token_first: bool


MIMO = Names(
    layer=PREFIX,
    token_norm=f"{PREFIX}token_layernorm.weight",
    hidden_norm=f"{PREFIX}hidden_layernorm.weight",
    projection=f"{PREFIX}input_proj.weight",
    norm=f"{PREFIX}final_layernorm.weight",
    token_first=False,
)
QWEN = Names(
    layer="mtp.layers.0.",
    token_norm="mtp.pre_fc_norm_embedding.weight",
    hidden_norm="mtp.pre_fc_norm_hidden.weight",
    projection="mtp.fc.weight",
    norm="mtp.norm.weight",
    token_first=True,
)
DEEPSEEK = Names(
    layer="model.layers.3.",
    token_norm="model.layers.3.enorm.weight",
    hidden_norm="model.layers.3.hnorm.weight",
    projection="model.layers.3.eh_proj.weight",
    norm="model.layers.3.shared_head.norm.weight",
    token_first=True,
)


class Block:
    """The block by transformers' own layer of the family, over whole sequences."""

    def __init__(self, config: PretrainedConfig, names: Names = MIMO, seed: int = 7) -> None:
        from transformers import AutoModel

        values = config.to_dict()
        one_layer = {name: value for name, value in ONE_LAYER.items() if name in values}
        self.names = names
        self.layer = AutoModel.from_config(
            type(config).from_dict(values | one_layer),
            dtype=torch.float32,
            experts_implementation="eager",
        ).eval()  # its final norm is the block's
        size, kind = config.hidden_size, type(self.layer.norm)
        self.token_norm, self.hidden_norm = (kind(size, eps=config.rms_norm_eps) for _ in range(2))
        self.input_proj = torch.nn.Linear(2 * size, size, bias=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(tensor.mean() + 0.2 * noise if "norm" in name else 0.1 * noise)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Its weights under the names that they have in the family's files."""
        layer = self.layer.layers[0].state_dict(keep_vars=True)
        return {
            self.names.token_norm: self.token_norm.weight,
            self.names.hidden_norm: self.hidden_norm.weight,
            self.names.projection: self.input_proj.weight,
            self.names.norm: self.layer.norm.weight,
        } | {self.names.layer + name: value for name, value in layer.items()}

    def __call__(self, states: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Normed outputs [length, hidden] of slots with these states and embeddings of tokens."""
        both = self.hidden_norm(states), self.token_norm(embedded)
        inputs = self.input_proj(torch.cat(both[::-1] if self.names.token_first else both, dim=-1))
        return self.layer(inputs_embeds=inputs[None]).last_hidden_state[0]


def add_block(folder: Path, block: Block) -> None:
    """Add the block to the files of a saved model."""
    weights = folder / "model.safetensors"
    own = {name: value.detach().contiguous() for name, value in block.tensors().items()}
    save_file(load_file(weights) | own, weights)


def make_mimo(folder: Path, block: Block) -> None:
    """Turn a saved qwen2 model into a MiMo with this block."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    add_block(folder, block)


def random_mimo(folder: Path) -> tuple[Qwen2ForCausalLM, Block]:
    """A saved MiMo in which every weight is random, as transformers computes it."""
    model, block = random_with_block("qwen2", MIMO, folder)
    make_mimo(folder, block)
    return model, block


def random_with_block(family: str, names: Names, folder: Path) -> tuple[PreTrainedModel, Block]:
    """A saved model with a block, in which every weight is random, as transformers computes both."""
    model = random_model(family)
    model.save_pretrained(folder)
    block = Block(model.config, names)
    if names is not MIMO:
        add_block(folder, block)
    return model, block
