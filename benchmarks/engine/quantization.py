"""The cost of quantization: perplexity of the fixed text with two formats of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.engine.perplexity import perplexity
from benchmarks.loading import load_backend_for_bench
from paceline.bench.loading import settings
from paceline.bench.text import text_ids
from paceline.bench.timing import OnTurn
from paceline.errors import ConfigError
from paceline.options import check_integer


@dataclass(frozen=True)
class Measured:
    """Perplexity with one format of the weights."""

    quantization: str  # never "auto"
    threads: int | None  # None: the backend has none of its own
    tokens: int
    perplexity: float


@dataclass(frozen=True)
class Comparison:
    """Two formats of the weights on the same text."""

    measured: Measured
    against: Measured

    @property
    def difference_percent(self) -> float:
        """How much higher (worse) the first one's perplexity is, in percent; negative: lower."""
        return 100 * (self.measured.perplexity / self.against.perplexity - 1)

    def facts(self) -> dict[str, object]:
        """The comparison for JSON."""
        return {
            "quantization": self.measured.quantization,
            "against": self.against.quantization,
            "threads": self.measured.threads,
            "tokens": self.measured.tokens,
            "perplexity": self.measured.perplexity,
            "against_perplexity": self.against.perplexity,
            "difference_percent": self.difference_percent,
        }


def compare_quantizations(
    model: str,
    quantization: str,
    against: str,
    threads: int | None = None,
    context: int = 512,
    on_turn: OnTurn = lambda _: None,
) -> Comparison:
    """Perplexity with `quantization` and with `against`: quantizations of the cpu backend, or "torch".

    One model is loaded after the other, because two may not fit into memory.
    """
    results = []
    for name in (quantization, against):
        results.append(_measure(model, name, threads, context))
        on_turn(name)
    return Comparison(*results)


def _measure(model: str, quantization: str, threads: int | None, context: int) -> Measured:
    loaded = load_backend_for_bench(model, quantization, threads)
    check_integer(ConfigError, "context", context, 2, loaded.max_position)
    ids = text_ids(loaded.tokenizer)
    chosen = settings(loaded.backend)
    name = chosen.quantization if quantization == "auto" else quantization
    return Measured(name, chosen.threads, len(ids), perplexity(loaded.backend, ids, context))
