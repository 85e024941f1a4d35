"""The cost of a pass along four curves, and its floors."""

from __future__ import annotations

import pytest

from benchmarks.growth.command import growth_result
from benchmarks.growth.floor import Floor, Load, model_products
from benchmarks.growth.measure import SHORT_CONTEXT, BackendPasses, measure_growth
from paceline.errors import ConfigError
from paceline.models.config import ModelConfig, MoeConfig, RopeConfig
from tests.benchmarks.cli import run
from tests.benchmarks.test_rows import Recording

FLOOR = Floor(
    weight_bytes=1000,
    kv_bytes=2.0,
    row_products=100,
    output_products=50,
    key_products=4,
    bandwidth=1e3,
    products_per_second=1e4,
    max_rows=16,
)


def test_each_curve_grows_in_one_thing() -> None:
    backend = Recording()
    subject = BackendPasses(backend, vocab_size=60, max_position=256, floor=FLOOR)
    sizes = {"context": (20,), "requests": (3,), "tree": (5,), "prompt": (40,)}
    grown = measure_growth(subject, sizes, rounds=1)
    assert [(point.curve, point.size) for point in grown] == [(name, of[0]) for name, of in sizes.items()]
    last = [batch for batch in backend.passes if batch.num_rows == 1 and batch.context_lengths[0] == 20]
    assert len(last) == 2  # a warm-up and one round
    requests = [batch for batch in backend.passes if len(batch.context_lengths) == 3]
    assert all(batch.context_lengths.tolist() == [SHORT_CONTEXT] * 3 for batch in requests)
    tree = next(batch for batch in backend.passes if batch.num_rows == 5)
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1]
    assert (tree.positions - SHORT_CONTEXT).tolist() == [0, 1, 1, 2, 2]
    assert [batch.num_rows for batch in backend.passes[-3:]] == [16, 16, 8]  # a prompt in chunks


def test_sizes_beyond_the_models_context_are_left_out() -> None:
    subject = BackendPasses(Recording(), vocab_size=60, max_position=64, floor=FLOOR)
    assert [point.size for point in measure_growth(subject, {"context": (20, 64)}, rounds=1)] == [20]
    with pytest.raises(ConfigError, match="context of 64 tokens holds none"):
        measure_growth(subject, {"context": (64,)}, rounds=1)


def test_floors_count_what_a_pass_reads_and_multiplies() -> None:
    step = Load(requests=2, context=10)
    assert FLOOR.memory(step) == pytest.approx((1000 + 2 * 10 * 2.0) / 1e3)
    assert FLOOR.arithmetic(step) == pytest.approx((2 * 100 + 2 * 50 + 2 * 11 * 4) / 1e4)
    prompt = Load(rows=40, is_prompt=True)  # passes of 16, 16 and 8 rows, one row of logits
    assert FLOOR.memory(prompt) == pytest.approx((3 * 1000 + (0 + 16 + 32) * 2.0) / 1e3)
    assert FLOOR.arithmetic(prompt) == pytest.approx((40 * 100 + 50 + 40 * 41 // 2 * 4) / 1e4)
    assert FLOOR.seconds(prompt) == max(FLOOR.memory(prompt), FLOOR.arithmetic(prompt))


def test_of_experts_the_chosen_ones_are_multiplied() -> None:
    dense = ModelConfig("llama", 64, 32, 1, 4, 2, 8, 48, 1e-5, RopeConfig(1e4), 128, tie_embeddings=True)
    attention = 32 * (32 + 16 + 16) + 32 * 32
    assert model_products(dense) == (attention + 3 * 32 * 48, 64 * 32, 2 * 4 * 8)
    moe = MoeConfig(8, 2, 48, True, frozenset({0}))
    mixture = ModelConfig(
        "qwen3_moe", 64, 32, 1, 4, 2, 8, 48, 1e-5, RopeConfig(1e4), 128, tie_embeddings=True, moe=moe
    )
    assert model_products(mixture)[0] == attention + 8 * 32 + 2 * 3 * 32 * 48  # and the router


def test_a_chart_for_each_curve() -> None:
    subject = BackendPasses(Recording(), vocab_size=60, max_position=256, floor=FLOOR)
    grown = measure_growth(subject, {"tree": (1, 2)}, rounds=1)
    result = growth_result("toy", grown, rounds=1)
    assert [chart.title for chart in result.figures[0].charts] == ["tree"]
    assert [row[0] for row in result.tables[0].rows[1:]] == ["1", "2"]


def test_a_shape_must_be_known() -> None:
    with pytest.raises(ConfigError, match="there is no shape 'tiny'; choose from llama"):
        run("growth", "--shape", "tiny")
