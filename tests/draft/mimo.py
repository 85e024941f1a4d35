"""Tiny MiMo checkpoints: a qwen2 model whose files also have a block for multi-token prediction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from tests.tiny import random_model

if TYPE_CHECKING:
    from transformers import Qwen2Config, Qwen2ForCausalLM

PREFIX = "model.mtp_layers.0."


class Block:
    """The block by transformers' own qwen2 layer, over whole sequences."""

    def __init__(self, config: Qwen2Config, seed: int = 7) -> None:
        from transformers import Qwen2Config, Qwen2Model

        one_layer = Qwen2Config.from_dict({**config.to_dict(), "num_hidden_layers": 1, "layer_types": None})
        self.layer = Qwen2Model(one_layer).float().eval()  # its final norm is the block's
        size = config.hidden_size
        self.token_norm, self.hidden_norm = (
            torch.nn.RMSNorm(size, eps=config.rms_norm_eps) for _ in range(2)
        )
        self.input_proj = torch.nn.Linear(2 * size, size, bias=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters().items():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.1 * noise)

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Its parameters under the names that they have in MiMo's files."""
        named = {
            f"{PREFIX}token_layernorm.weight": self.token_norm.weight,
            f"{PREFIX}hidden_layernorm.weight": self.hidden_norm.weight,
            f"{PREFIX}input_proj.weight": self.input_proj.weight,
            f"{PREFIX}final_layernorm.weight": self.layer.norm.weight,
        }
        return named | {PREFIX + name: value for name, value in self.layer.layers[0].named_parameters()}

    def __call__(self, states: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Normed outputs [length, hidden] of slots with these states and embeddings of tokens."""
        both = torch.cat((self.hidden_norm(states), self.token_norm(embedded)), dim=-1)
        return self.layer(inputs_embeds=self.input_proj(both)[None]).last_hidden_state[0]


def make_mimo(folder: Path, block: Block) -> None:
    """Turn a saved qwen2 model into a MiMo with this block."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    weights = folder / "model.safetensors"
    own = {name: value.detach().contiguous() for name, value in block.named_parameters().items()}
    save_file(load_file(weights) | own, weights)


def random_mimo(folder: Path) -> tuple[Qwen2ForCausalLM, Block]:
    """A saved MiMo in which every weight is random, as transformers computes it."""
    model = random_model("qwen2")
    model.save_pretrained(folder)
    block = Block(model.config)
    make_mimo(folder, block)
    return model, block
