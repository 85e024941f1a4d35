"""`paceline simulate`: its three modes, refused flags, and the JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.report.page import html_page
from paceline.bench.report.terminal import print_result
from paceline.bench.run.engine_runner import Task
from paceline.bench.run.rows import Row, rows
from paceline.bench.run.turns import Answer
from paceline.bench.simulate import check, run
from paceline.bench.simulate.capacity import highest
from paceline.bench.simulate.check import acceptance_of
from paceline.bench.simulate.flags import DRAFTS, MACHINE, TRAFFIC
from paceline.bench.simulate.job import Guesses, simulate_engine
from paceline.bench.simulate.run import Simulation
from paceline.bench.simulate.sources import of_bench, of_depths
from paceline.bench.simulate.view import Assumed, simulated_result
from paceline.bench.simulate.world import Acceptance
from paceline.cli import app
from paceline.core.params import SamplingParams
from paceline.core.request import SpeculativeCounts
from paceline.errors import ConfigError
from tests.bench.test_speculation import made_up_runs

SMALL = ("--input-tokens", "16", "--output-tokens", "8", "--concurrency", "1,4")


@pytest.fixture(autouse=True)
def wide_page(monkeypatch):
    """Tables of any width, whatever the terminal that runs the tests."""
    monkeypatch.setenv("COLUMNS", "200")


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    app(["simulate", *arguments], standalone_mode=False)
    return capsys.readouterr().out


def test_a_gpu_is_simulated_as_a_table_and_as_json(capsys):
    shown = simulated(capsys, "--gpu", "h200", *SMALL)
    assert "chain:5" in shown
    assert "first token" in shown
    assumed = "prompts of 16 tokens, answers of 8; acceptance 0.7 per token (--alpha)"
    assert f"simulated: {assumed}" in " ".join(shown.split())
    assert "gain: drafted, because that is expected to be faster." in shown
    facts = json.loads(simulated(capsys, "--gpu", "h200", *SMALL, "--json"))
    assert [(row["concurrency"], row["method"]) for row in facts["rows"]] == [
        *((1, "off"), (1, "auto"), (1, "chain:5")),
        *((4, "off"), (4, "auto"), (4, "chain:5")),
    ]
    assert facts["rows"][0]["tpot_ms"] == pytest.approx(4.9, abs=0.2)
    assert facts["assumed"] == {
        "input_tokens": 16,
        "output_tokens": 8,
        "acceptance": "acceptance 0.7 per token (--alpha)",
    }
    assert {"p50", "p90", "p99"} == facts["rows"][0]["percentiles"]["ttft_ms"].keys()


def test_rates_capacity_and_cost_fit_on_a_page_of_100_columns(capsys, monkeypatch):
    monkeypatch.setattr(run, "OPEN_REQUESTS", 16)
    machine, traffic, drafts = (
        {flag.name: flag.default for flag in group} for group in (MACHINE, TRAFFIC, DRAFTS)
    )
    machine |= {"preset": "llama-3.1-70b", "gpu": "4xh100", "gpu_price": 3.0}
    traffic |= {"input_tokens": 16, "output_tokens": 8, "concurrency": "1,128", "rate": "2,40"}
    traffic |= {"slo": "ttft=900,tpot=60"}
    result = simulate_engine(
        None, Guesses(0.7, 3, None, None), machine, traffic, drafts | {"methods": "chain:3"}
    )
    print_result(result)
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines) <= 100
    assert any(line.startswith("Drafting pays up to ") for line in lines)
    assert "Drafting pays up to " in html_page(result)
    rows, capacity = result.facts["rows"], result.facts["capacity"]
    assert [row["profile"] for row in rows[::2]] == ["x1", "x128", "2/s", "40/s"]
    costs = [4 * 3 / 3600 / row["tokens_per_second"] * 1e6 for row in rows]
    assert [row["cost_per_million_tokens"] for row in rows] == pytest.approx(costs)
    assert [found["method"] for found in capacity] == ["off", "chain:3"]
    assert all(found["row"]["good_share"] >= 0.9 and found["requests_per_second"] > 2 for found in capacity)


@pytest.mark.parametrize(
    ("acceptance", "verdict", "limit"),
    [
        ("0.9", "Drafting pays up to 4 requests at once and maybe beyond (", 4),
        ("0", "Drafting does not pay, not even at 1 at once (", None),
    ],
)
def test_one_line_says_up_to_which_concurrency_it_pays(capsys, acceptance, verdict, limit):
    arguments = ("--gpu", "h200", "--acceptance", acceptance, "--methods", "chain:1", *SMALL)
    assert verdict in simulated(capsys, *arguments)
    assert json.loads(simulated(capsys, *arguments, "--json"))["pays_up_to"] == limit


def test_the_next_load_that_was_tried_is_named():
    def at(concurrency: int, method: str, speedup: float) -> Row:
        return replace(plain, concurrency=concurrency, method=method, speedup_vs_off=speedup)

    plain, _ = rows("toy", made_up_runs())
    tried = [at(64, "chain:3", 1.2), at(256, "chain:3", 1.01)]
    result = simulated_result("m", Assumed(1, 1, "a"), Simulation(tried, [{}, {}]))
    assert [finding.text for finding in result.findings] == [
        "Drafting pays up to 64 requests at once (chain:3: 1.20 times plain decoding).",
        "It does not at 256, the next load tried (chain:3: 1.01 times plain decoding).",
    ]


@pytest.mark.parametrize(("limit", "found"), [(7.0, 7.0), (900.0, 640.0), (0.3, 0.3), (0.01, 0.0)])
def test_the_highest_rate_that_fits_is_found(limit, found):
    tried = []

    def fits(rate):
        tried.append(rate)
        return rate <= limit

    assert found / 1.1 <= highest(fits, start=10.0) <= found
    assert len(tried) < 16


def test_a_model_is_measured_and_then_simulated(capsys, tiny_gguf):
    arguments = (str(tiny_gguf), "--acceptance", "0.9,0.8", "--methods", "chain:2", *SMALL)
    facts = json.loads(simulated(capsys, *arguments, "--json"))
    off, chain = facts["rows"][:2]
    assert off["tokens_per_second"] > 0
    assert chain["mean_acceptance_length"] > 2


def test_a_model_is_run_and_simulated_side_by_side(capsys, tiny_gguf, monkeypatch):
    """How close they are is not tested: that would time a busy machine."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    tasks = [Task(str(number), "", [3 + number, 4] * 8, params) for number in range(10)]
    monkeypatch.setattr(check, "_tasks", lambda model: (tasks[:8], tasks[8:]))
    arguments = ["simulate", str(tiny_gguf), "--check", "--concurrency", "2", "--threads", "1", "--json"]
    app(arguments, standalone_mode=False)
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["method"] for row in rows] == ["off", "suffix", "auto"]
    assert all(row["simulated"] > 0 and row["ratio"] == row["simulated"] / row["measured"] for row in rows)
    assert rows[0]["measured_length"] == rows[0]["simulated_length"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bits", "4"], "--bits needs a machine"),
        (["--no-chances"], "--no-chances needs a machine"),
        (["--gpu", "h200", "--row-cost", "1"], "--row-cost"),
        (["--gpu", "h200", "--draft-cost", "1"], "--draft-cost"),
        (["some.gguf", "--gpu", "h200"], "--gpu is of a simulated --gpu"),
        (["some.gguf", "--model", "llama-3.1-8b"], "--model is of a simulated --gpu"),
        (["--model", "llama-3.1-8b"], "--model needs a machine"),
        (["--gpu", "h100", "--model", "llama-3.1-70b"], "weights take 143.* such as --gpu 4xh100"),
        (["--gpu", "h200", "--rate", "fast"], "--rate must be positive numbers"),
        (["--gpu", "h200", "--slo", "500"], "--slo must be milliseconds"),
        (["--gpu", "h200", "--gpu-price", "-1"], "--gpu-price"),
        (["--gpu", "h200", "--workload", "chat"], "needs a MODEL"),
        (["--gpu", "h200", "--threads", "1"], "--threads is of a MODEL"),
        (["--check", "--gpu", "h200"], "--gpu has no effect with --check"),
        (["--check", "--input-tokens", "7"], "--input-tokens has no effect with --check"),
        (["--gpu", "h200", "--acceptance", "0.5", "--from", "x"], "give one of them"),
        (["--gpu", "h200", "--acceptance", "0.5,0.6"], "do not rise"),
        (["--gpu", "h200", "--from", "missing.json"], "cannot be read"),
        (["--gpu", "h200", "--output-tokens", "1"], "--output-tokens"),
    ],
)
def test_flags_without_effect_or_meaning_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        app(["simulate", *arguments], standalone_mode=False)


def row(method: str, **facts: Any) -> dict[str, Any]:
    return {"method": method, "acceptance_per_position": [0.5, 0.25], "drafted_share": 0.8} | facts


def test_acceptance_is_read_from_a_bench_file(tmp_path: Path):
    rows = [
        row("off", acceptance_per_position=[]),
        row("suffix", drafted_per_position=[1.0, 0.5]),
        row("suffix", drafted_share=None),  # of a server that does not tell
        row("auto"),
    ]
    (tmp_path / "bench.json").write_text(json.dumps({"rows": rows}))
    assert of_bench(tmp_path / "bench.json") == {
        "suffix": [Acceptance((0.4, 0.2), (0.8, 0.4)), Acceptance((0.5, 0.25), (1.0, 1.0))]
    }


def test_a_bench_file_without_drafts_is_refused(tmp_path: Path):
    (tmp_path / "bench.json").write_text(json.dumps({"rows": [row("off", acceptance_per_position=[])]}))
    with pytest.raises(ConfigError, match="no row in which something was drafted"):
        of_bench(tmp_path / "bench.json")


def test_fractions_are_of_all_passes():
    assert of_depths("0.6,0.4") == {"chain": [Acceptance((0.6, 0.4), (1.0, 1.0))]}


def test_acceptance_of_an_answer_is_counted_by_pass():
    counts = SpeculativeCounts()
    for nodes, accepted in ((3, 3), (3, 1), (1, 0)):
        counts.add(("suffix", nodes, nodes, accepted))
    gains = (1, 4, 2, 1, 1)  # the prompt's pass, three drafted ones, one where nothing was found
    answer = Answer([], sum(gains), (0.1,), 1.0, gains=gains, speculative=counts)
    assert acceptance_of(answer) == Acceptance((0.5, 0.25, 0.25), (0.75, 0.5, 0.5))
    assert acceptance_of(Answer([], 2, (0.1,), 1.0, gains=(1, 1))) is None
