"""The least time that memory and arithmetic allow for a pass."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.models.config import ModelConfig
from paceline.models.files.layout import expected_tensors


@dataclass(frozen=True)
class Load:
    """A pass: `requests` requests of `rows` new tokens each, after `context` computed ones.

    With `is_prompt` the rows run in as many passes as they need, and only the last one gives logits.
    """

    requests: int = 1
    rows: int = 1
    context: int = 0
    is_prompt: bool = False

    @property
    def outputs(self) -> int:
        """Rows with logits."""
        return 1 if self.is_prompt else self.requests * self.rows

    @property
    def keys(self) -> int:
        """Pairs of a row and a position that it attends to; a tree is counted as a chain."""
        return self.requests * self.rows * (2 * self.context + self.rows + 1) // 2


@dataclass(frozen=True)
class Floor:
    """What a model needs and what a machine gives."""

    weight_bytes: int  # read once per pass
    kv_bytes: float  # per token of a request's context
    row_products: int  # multiply-adds of a row in linear layers, without the output head
    output_products: int  # multiply-adds of a row of logits
    key_products: int  # multiply-adds of a row with one key and its value, in all layers
    bandwidth: float  # bytes per second
    products_per_second: float  # multiply-adds
    max_rows: int  # of a pass

    def memory(self, load: Load) -> float:
        """Seconds to read weights and keys and values once per pass."""
        passes = -(-load.rows // self.max_rows) if load.is_prompt else 1
        starts = [load.context + number * self.max_rows for number in range(passes)]
        return (passes * self.weight_bytes + load.requests * sum(starts) * self.kv_bytes) / self.bandwidth

    def arithmetic(self, load: Load) -> float:
        """Seconds of the multiply-adds alone."""
        rows = load.requests * load.rows * self.row_products
        products = rows + load.outputs * self.output_products + load.keys * self.key_products
        return products / self.products_per_second

    def seconds(self, load: Load) -> float:
        """The larger of both: at best they overlap."""
        return max(self.memory(load), self.arithmetic(load))


def model_products(config: ModelConfig) -> tuple[int, int, int]:
    """Multiply-adds of a row in the layers, of a row of logits, and of a row with one key.

    Of experts, the chosen ones count.
    """
    row = 0.0
    for name, shape in expected_tensors(config):
        if len(shape) == 2 and ".layers." in name:
            row += shape[0] * shape[1] * (_chosen_share(config) if ".experts." in name else 1.0)
    key = 2 * config.num_layers * config.num_heads * config.head_dim
    return round(row), config.vocab_size * config.hidden_size, key


def _chosen_share(config: ModelConfig) -> float:
    return 1.0 if config.moe is None else config.moe.experts_per_token / config.moe.num_experts
