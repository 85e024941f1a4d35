"""The architectures of draft heads in GGUF files, in llama.cpp's format.

Their layers are those of a family; heads/gguf_heads.py and heads/assistant.py read the rest.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.models.gguf import fields as readers
from paceline.models.gguf.architectures import ARCHITECTURES, Architecture

DRAFT_HEADS = {
    "eagle3": Architecture(
        "llama",
        interleaved_rope=True,
        names={"attn_norm_2": "hidden_norm"},
        top_names={"fc.weight": "fc.weight", "enc.output_norm.weight": "input_norm.weight", "d2t": "d2t"},
    ),
    "dflash": Architecture(  # with a Markov head it is DSpark
        "qwen3",
        more=readers.dflash,
        top_names={
            "fc.weight": "fc.weight",
            "enc.output_norm.weight": "hidden_norm.weight",
            "d2t": "d2t",
            "markov_w1.weight": "markov_head.markov_w1.weight",
            "markov_w2.weight": "markov_head.markov_w2.weight",
            "conf_proj.weight": "confidence_head.proj.weight",
            "conf_proj.bias": "confidence_head.proj.bias",
        },
    ),
    "gemma4-assistant": replace(
        ARCHITECTURES["gemma4"],
        top_names={
            "nextn.pre_projection.weight": "pre_projection.weight",
            "nextn.post_projection.weight": "post_projection.weight",
            "masked_embd_centroids.weight": "masked_embedding.centroids.weight",
            "masked_embd_ordering": "masked_embedding.token_ordering",
        },
    ),
}
