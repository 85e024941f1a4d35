"""What is measured on a GPU: shapes, settings, our bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu.power import Power
from paceline.backends.cuda.native.nvrtc import ALIASES, KERNELS
from paceline.errors import ConfigError
from paceline.models.config import ModelConfig, MoeConfig, RopeConfig
from paceline.models.families.config_reader import model_config

SHAPES = {
    "llama-3.2-1b": ModelConfig(
        "llama", 128256, 2048, 16, 32, 8, 64, 8192, 1e-5, RopeConfig(500000.0), 8192, tie_embeddings=True
    ),
    "qwen2.5-1.5b": ModelConfig(
        "qwen2", 151936, 1536, 28, 12, 2, 128, 8960, 1e-6, RopeConfig(1e6), 8192, True, qkv_bias=True
    ),
    "llama-3.1-8b": ModelConfig(
        "llama", 128256, 4096, 32, 32, 8, 128, 14336, 1e-5, RopeConfig(500000.0), 8192, tie_embeddings=False
    ),
    "qwen3-30b-a3b": ModelConfig(
        "qwen3_moe",
        151936,
        2048,
        48,
        32,
        4,
        128,
        6144,
        1e-6,
        RopeConfig(1e6),
        8192,
        tie_embeddings=False,
        qk_norm=True,
        moe=MoeConfig(128, 8, 768, True, frozenset(range(48))),
    ),
}

# families whose layers differ from llama's, as their config.json describes them
_SIZES = ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"]
_SIZES += ["intermediate_size", "vocab_size"]
_DELTA_NET: dict[str, object] = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
}
_LATENTS: dict[str, object] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_FAMILIES: dict[str, tuple[tuple[int, ...], dict[str, object]]] = {
    "gpt-oss-20b": (
        (2880, 24, 64, 8, 64, 2880, 201088),
        {"model_type": "gpt_oss", "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128},
    ),
    "gemma-3-12b": (
        (3840, 48, 16, 8, 256, 15360, 262208),
        {"model_type": "gemma3_text", "sliding_window": 1024, "query_pre_attn_scalar": 256},
    ),
    "olmo-3-7b": (
        (4096, 32, 32, 32, 128, 11008, 100278),
        {"model_type": "olmo3", "sliding_window": 4096},
    ),
    # hybrids: a gated delta net in three of four layers
    "qwen3.5-9b": ((4096, 32, 16, 4, 256, 12288, 248320), {"model_type": "qwen3_5_text", **_DELTA_NET}),
    "qwen3-next-8-layers": (  # of 48
        (2048, 8, 16, 2, 256, 5632, 151936),
        {
            "model_type": "qwen3_next",
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            **_DELTA_NET,
        },
    ),
    "deepseek-v2-lite": (
        (2048, 27, 16, 16, 192, 10944, 102400),
        {
            "model_type": "deepseek_v2",
            "q_lora_rank": None,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
            **_LATENTS,
        },
    ),
    "deepseek-v3-3-layers": (  # of 61; these have no experts
        (7168, 3, 128, 128, 192, 18432, 129280),
        {
            "model_type": "deepseek_v3",
            "q_lora_rank": 1536,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
            **_LATENTS,
        },
    ),
}
SHAPES |= {
    name: model_config(dict(zip(_SIZES, sizes, strict=True)) | {"max_position_embeddings": 8192} | rest, name)
    for name, (sizes, rest) in _FAMILIES.items()
}

# this project's bars: milliseconds per step by shape, method and requests
BARS = {
    ("llama-3.2-1b", "plain"): {1: 0.8},
    ("qwen2.5-1.5b", "plain"): {1: 1.0, 64: 2.83},  # 22,600 tokens per second
    ("llama-3.1-8b", "plain"): {1: 4.2, 64: 5.5},
    ("llama-3.1-8b", "eagle3"): {1: 5.2, 16: 5.8},
    ("llama-3.1-8b", "dspark"): {1: 4.7, 16: 5.6},
    ("llama-3.1-8b", "ngram"): {1: 4.5},
    ("llama-3.1-8b", "model"): {1: 9.0},
}
TREE_TO_CHAIN = 1.1  # bar of a tree, relative to the chain of the same run
COUNTS = {  # numbers of requests, by shape and method
    ("qwen2.5-1.5b", "plain"): (1, 16, 64, 256),
    ("llama-3.1-8b", "tree"): (1,),
    ("llama-3.1-8b", "dspark"): (1, 16),
    ("llama-3.1-8b", "model"): (1, 16),
    ("llama-3.1-8b", "ngram"): (1, 16),
}
USUAL_COUNTS = (1, 16, 64)
METHODS = ("plain", "eagle3", "tree", "dspark", "model", "ngram")
SPECULATIVE = "llama-3.1-8b"  # the shape for drafting methods
DRAFT_MODEL = "llama-3.2-1b"
MIN_STEPS = 16  # per measurement


@dataclass(frozen=True)
class Measured:
    """One line of the table: milliseconds per step, the median over blocks of steps."""

    shape: str
    method: str
    requests: int
    milliseconds: float
    floor: float  # time to read the weights of a step once, at the bandwidth measured here
    torch: float | None = None  # the same model in plain torch
    vllm: float | None = None
    bar: float | None = None
    without: float | None = None  # the same without some kernels
    power: Power | None = None  # of the GPU meanwhile

    @property
    def verdict(self) -> str:
        """Whether the bar is met; empty if there is none."""
        return "" if self.bar is None else "met" if self.milliseconds <= self.bar else "missed"


@dataclass(frozen=True)
class Setting:
    """Lengths of requests, and the format of weights."""

    prompt_tokens: int = 128
    output_tokens: int = 256
    quantization: str = "none"  # or fp8, int8, int4, mxfp4
    without: tuple[str, ...] = ()  # kernels that are disabled for comparison
    common_tokens: int = 0  # shared prefix of all prompts, stored once

    def __post_init__(self) -> None:
        if not 0 <= self.common_tokens < self.prompt_tokens:
            raise ConfigError(
                f"--common-tokens are the first of --input-tokens {self.prompt_tokens}: give fewer, not "
                f"{self.common_tokens}."
            )
        for name in self.without:
            if name not in KERNELS and name not in ALIASES:
                raise ConfigError(f"--without knows no kernel {name!r}; choose from {', '.join(KERNELS)}.")

    @property
    def is_usual(self) -> bool:
        """Whether the bars apply to this setting."""
        return self.is_peers and self.quantization == "none"

    @property
    def is_peers(self) -> bool:
        """Whether peers were measured with prompts like these."""
        return (self.prompt_tokens, self.common_tokens) == (128, 0)

    @property
    def longest(self) -> int:
        """Maximum tokens per request: even the shortest measurement takes some steps."""
        return self.prompt_tokens + max(self.output_tokens, MIN_STEPS) + 1


def planned(
    shapes: Sequence[str], methods: Sequence[str], requests: Sequence[int] | None
) -> list[tuple[str, str, int]]:
    """Shape, method and requests of every line; without `requests`, those with bars and some more."""
    for names, known, kind in ((shapes, SHAPES, "shape"), (methods, METHODS, "method")):
        for name in names:
            if name not in known:
                raise ConfigError(f"there is no {kind} {name!r}; choose from {', '.join(known)}.")
    return [
        (shape, method, count)
        for shape in shapes
        for method in methods
        if method == "plain" or shape == SPECULATIVE
        for count in requests or COUNTS.get((shape, method), USUAL_COUNTS)
    ]


def bar_of(shape: str, method: str, requests: int, lines: Sequence[Measured]) -> float | None:
    """The bar of a line; for a tree, relative to the chain of the same run."""
    if method == "tree":
        chains = [
            line for line in lines if (line.shape, line.method, line.requests) == (shape, "eagle3", requests)
        ]
        return TREE_TO_CHAIN * chains[0].milliseconds if chains else None
    return BARS.get((shape, method), {}).get(requests)
