"""`python -m benchmarks gpu`: its requirements and its table."""

from __future__ import annotations

from datetime import date

import pytest
import torch

from benchmarks.gpu.command import DEFAULT_METHODS, DEFAULT_SHAPES, WORDS, engine_result, gpu_result
from benchmarks.gpu.peers import peer_milliseconds, peer_runs, peers_note
from paceline.errors import BackendError, ConfigError


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so() -> None:
    from benchmarks.gpu.measure import measure_gpu
    from benchmarks.gpu.plan import Setting

    with pytest.raises(BackendError, match="needs a CUDA device"):
        measure_gpu([("llama-3.2-1b", "plain", 1)], Setting(), print)


def test_the_defaults_are_known_and_others_are_refused() -> None:
    from benchmarks.gpu.plan import METHODS, SHAPES, planned

    others = {"qwen3-30b-a3b", "gpt-oss-20b", "gemma-3-12b", "olmo-3-7b"}
    others |= {"qwen3.5-9b", "qwen3-next-8-layers", "deepseek-v2-lite", "deepseek-v3-3-layers"}
    assert set(SHAPES) - set(DEFAULT_SHAPES.split(",")) == others
    assert set(DEFAULT_METHODS.split(",")) == set(METHODS) == set(WORDS)
    with pytest.raises(ConfigError, match=r"no shape 'gpt-9'; choose from llama-3\.2-1b"):
        planned(["gpt-9"], ["plain"], [1])
    with pytest.raises(ConfigError, match="no method 'luck'; choose from plain, eagle3"):
        planned(["llama-3.2-1b"], ["luck"], [1])


def test_every_bar_has_its_line_and_drafts_are_measured_beside_one_shape() -> None:
    from benchmarks.gpu.plan import BARS, planned

    plan = planned(DEFAULT_SHAPES.split(","), DEFAULT_METHODS.split(","), None)
    assert {(*key, count) for key, counts in BARS.items() for count in counts} < set(plan)
    assert ("qwen2.5-1.5b", "plain", 256) in plan
    assert {shape for shape, method, _ in plan if method != "plain"} == {"llama-3.1-8b"}
    assert planned(["llama-3.2-1b"], ["plain", "eagle3"], [4]) == [("llama-3.2-1b", "plain", 4)]


def test_the_more_rows_a_step_has_the_more_experts_it_reads() -> None:
    from benchmarks.gpu.measure import random_weights, weight_bytes
    from paceline.backends.cuda.weights.model_weights import load_weights
    from paceline.models.config import ModelConfig, MoeConfig, RopeConfig

    moe = MoeConfig(4, 1, 64, True, frozenset([0]))
    config = ModelConfig("mixtral", 64, 64, 1, 1, 1, 64, 64, 1e-5, RopeConfig(), 8, True, moe=moe)
    weights = load_weights(config, random_weights(config, torch.device("cpu")))
    expert = 3 * 64 * 64 * 2
    assert weight_bytes(weights, 2) - weight_bytes(weights, 1) == 3 / 4 * expert
    assert (
        weight_bytes(weights, 1) == (4 + 1 + 1) * 64 * 64 * 2 + expert
    )  # attention, head, router, one expert


def test_peers_are_read_from_one_dated_file() -> None:
    from benchmarks.gpu.plan import METHODS, SHAPES

    assert peer_milliseconds("llama-3.1-8b", "eagle3", "none", 16) == 7.11
    assert peer_milliseconds("llama-3.1-8b", "plain", "fp8", 1) == 3.47
    assert peer_milliseconds("llama-3.1-8b", "plain", "int4", 1) is None
    for run in peer_runs():
        date.fromisoformat(run.measured)
        for shape, method, _, _ in run.milliseconds:
            assert shape in SHAPES
            assert method in METHODS
    assert peers_note() in gpu_result([]).notes


def test_a_line_of_the_table() -> None:
    from benchmarks.gpu.plan import Measured
    from benchmarks.gpu.power import Power

    power = Power(980.0, 1.4, 1650.4, 1980, 700, 0.9)
    line = Measured("llama-3.1-8b", "eagle3", 16, 5.714, 4.21, None, 6.88, 5.8, power=power)
    (table,) = gpu_result([line]).tables
    assert [[cell] for cell in table.rows[0]] == [
        ["llama-3.1-8b"],
        ["EAGLE-3 head, chain of 5"],
        ["16"],
        ["5.714"],
        ["2,800"],
        [""],
        ["6.88"],
        ["4.21"],
        ["5.80"],
        ["700"],
        ["1,650*"],
        ["met"],
    ]


def test_a_line_meets_its_bar_up_to_equality() -> None:
    from benchmarks.gpu.plan import Measured

    def verdict(milliseconds: float, bar: float | None) -> str:
        return Measured("qwen2.5-1.5b", "plain", 1, milliseconds, 0.7, bar=bar).verdict

    assert [verdict(1.0, 1.0), verdict(1.01, 1.0), verdict(1.0, None)] == ["met", "missed", ""]


def test_a_tree_is_measured_against_the_chain_beside_it() -> None:
    from benchmarks.gpu.plan import Measured, bar_of

    chain = Measured("llama-3.1-8b", "eagle3", 1, 5.0, 4.21)
    assert bar_of("llama-3.1-8b", "tree", 1, [chain]) == pytest.approx(5.5)
    assert bar_of("llama-3.1-8b", "eagle3", 16, [chain]) == 5.8


def test_runs_with_and_without_kernels_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import measure as gpu
    from paceline.backends.cuda.native.nvrtc import is_left_out

    seen: list[bool] = []

    def measure(*arguments: object) -> tuple[float, None]:
        seen.append(is_left_out("decode_attention") and not is_left_out("fused_layer"))
        return [5.0, 6.0, 4.9, 6.1][len(seen) - 1], None

    monkeypatch.setattr(gpu, "measure_ours", measure)
    setting = gpu.Setting(without=("attend",))
    assert gpu.measure_both(None, 16, setting, None) == (4.9, None, 6.0)  # type: ignore[arg-type]
    assert seen == [False, True, False, True]
    assert not is_left_out("decode_attention")
    (table,) = gpu_result([gpu.Measured("llama-3.1-8b", "eagle3", 16, 4.9, 4.21, without=6.0)]).tables
    assert table.columns[3:5] == ["ms/step", "without"]
    assert table.rows[0][3:5] == ("4.900", "6.000")
    with pytest.raises(
        ConfigError, match="knows no kernel 'atend'; choose from decode_attention, fused_layer"
    ):
        gpu.Setting(without=("atend",))


def test_bursts_are_requests_times_prompt_tokens_and_times_are_shared_by_their_tokens() -> None:
    from benchmarks.gpu.engine import Served, parse_burst

    burst = parse_burst(" 64x128", 101)
    assert (burst.requests, burst.prompt_tokens, burst.output_tokens) == (64, 128, 101)
    for text in ("64", "x128", "0x5", "64x128x2"):
        with pytest.raises(ConfigError, match="such as 64x128"):
            parse_burst(text, 1)
    table = engine_result([Served("llama-3.1-8b", burst, 2048, 200.0, 1200.0)]).tables[0]
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert row["prompt tokens/s"] == "40,960"
    assert (row["ms/token"], row["after the first"]) == ("11.88", "10.00")
