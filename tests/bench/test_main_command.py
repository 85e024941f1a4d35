"""`paceline bench MODEL`: which command a word means, what is refused, the JSON and the page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.bench.commands import app
from paceline.bench.loading import bench_config
from paceline.bench.run import contest
from paceline.bench.run.contest import usual_methods
from paceline.build import load_model
from paceline.errors import ConfigError, PacelineError
from tests.bench.cli import run

ISSUE_KEYS = {
    *("workload", "segment", "concurrency", "method", "output_tokens", "seconds", "tokens_per_second"),
    *("speedup_vs_off", "mean_acceptance_length", "draft_acceptance_rate", "ttft_ms", "tpot_ms", "e2e_ms"),
}


def measured(folder: Path, model: Path, *arguments: str) -> tuple[dict[str, object], str, str]:
    """The JSON, the page and the terminal output of a small run: two segments, repeated requests."""
    prompts = [
        {"prompt": text, "max_tokens": 10, "segment": segment}
        for text, segment in (("abcabcabc", "a&b"), ("ababab", "a&b"), ("cdcd", "c"))
    ]
    (folder / "letters.jsonl").write_text("\n".join(json.dumps(prompt) for prompt in prompts))
    output = run(
        *(str(model), "--workload", str(folder / "letters.jsonl"), "--methods", "off,ngram"),
        *("--rounds", "1", "--threads", "1", "--json", str(folder / "facts.json")),
        *("--html", str(folder / "report.html"), *arguments),
    )
    return json.loads((folder / "facts.json").read_text()), (folder / "report.html").read_text(), output


class Page(HTMLParser):
    """What a page refers to, and the texts of its table's cells."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.tags: list[str] = []
        self.cells: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag == "td":
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.cells:
            self.cells[-1] += data


def test_rows_have_the_documented_keys_and_the_page_has_every_row(tmp_path: Path, tiny_gguf: Path) -> None:
    facts, text, output = measured(
        tmp_path, tiny_gguf, "--concurrency", "1,2", "--rate", "500", "--slo", "ttft=10000,e2e=0.0001"
    )
    rows = facts["rows"]
    assert isinstance(rows, list)
    assert {"machine", "model", "rows"} <= set(facts)
    assert facts["identical"] is True
    assert all(set(row) >= ISSUE_KEYS for row in rows)
    keys = [(row["profile"], row["concurrency"], row["segment"], row["method"]) for row in rows]
    profiles = (("x1", 1), ("x2", 2), ("500/s", None))
    assert keys == [
        (*profile, segment, method)
        for profile in profiles
        for segment in ("a&b", "c", "all")
        for method in ("off", "ngram")
    ]
    for row in rows:
        assert (row["good_share"], row["goodput"]) == (0, 0), "nobody answers in a ten-thousandth of a ms"
        assert list(row["percentiles"]) == ["ttft_ms", "tpot_ms", "inter_token_ms", "e2e_ms"]
        assert row["percentiles"]["e2e_ms"]["p50"] <= row["percentiles"]["e2e_ms"]["p99"]
        if row["segment"] == "all":
            low, high = row["latency_speedup_interval"]
            assert low <= row["latency_speedup_vs_off"] <= high
    page = Page(text)
    assert page.references == []
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not re.search(r"https?://|url\(|@import", text)
    for profile, _ in profiles:
        for segment in ("a&b", "c", "all"):
            assert f"letters {segment} {profile} cold" in page.cells
    tables = page.tags.count("table")
    assert tables == 5
    assert page.cells.count("ngram") == page.cells.count("off") == 9 * tables
    assert page.tags.count("svg") > 6
    assert "Every output was identical" in text
    assert "letters a&b x2 cold" in output
    assert "letters c x2 cold: at most 1 ran concurrently, because there were no more prompts." in output


def test_the_default_methods_are_lookups_and_the_shipped_head(
    monkeypatch: pytest.MonkeyPatch, tiny_gguf: Path
) -> None:
    model = load_model(bench_config(str(tiny_gguf), "auto", 1, 1))
    assert list(usual_methods(model)) == ["off", "auto", "ngram", "suffix"], "no head is shipped"
    monkeypatch.setattr(contest, "default_method", lambda fingerprint: "eagle3")
    assert list(usual_methods(model)) == ["off", "auto", "ngram", "suffix", "eagle3"]


def test_the_first_word_is_a_command_or_a_model(tmp_path: Path) -> None:
    runner = CliRunner()
    assert "--workload" in runner.invoke(app, ["run", "--help"]).output
    assert "--workload" in runner.invoke(app, ["some-model", "--help"]).output
    assert "--workload" in runner.invoke(app, ["speculation", "--help"]).output
    decode_help = runner.invoke(app, ["decode", "--help"]).output
    assert "--workload" not in decode_help
    assert "A model that has the name of a command is written as a path" in " ".join(
        runner.invoke(app, ["--help"]).output.split()
    )
    mistyped = runner.invoke(app, ["decoed", "--rounds", "1"])
    assert mistyped.exit_code == 2
    assert "Did you mean 'decode'?" in " ".join(mistyped.output.split())
    with pytest.raises(PacelineError, match="decode"):  # no such file: it is looked for as a model
        run(str(tmp_path / "decode"), "--workload", "chat", "--limit", "1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workload", "no-such"), "neither a file nor built in"),
        (("--methods", "telepathy"), "names no drafting method"),
        (("--concurrency", "0"), "--concurrency must be positive numbers"),
        (("--rate", "0"), "--rate must be a number above 0"),
        (("--trace", "no-such.csv"), "--trace no-such.csv cannot be read"),
        (("--time-scale", "2"), "--time-scale is of traces"),
        (("--slo", "speed=1"), "--slo must be milliseconds"),
        (("--metrics", "http://127.0.0.1:1"), "--metrics is of servers: name one by --endpoint"),
        (("--endpoint", "http://127.0.0.1:1", "--threads", "1"), "--threads is of engines in this process"),
        (("--endpoint", "localhost:8000"), "--endpoint must be like http"),
        (("--html", "no/such/folder/report.html"), "--html .* give a file in a folder that exists"),
        (("--rounds", "0"), "--rounds must be an integer from 1"),
        (("--temperature", "-1"), "--temperature must be a number from 0"),
        (("--limit", "0"), "--limit must be an integer from 1"),
    ],
)
def test_mistakes_are_refused_before_anything_is_loaded(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run("no-such-model", *arguments)


def test_engines_on_a_gpu_leave_room_for_each_other():
    here = bench_config("model", "auto", None, 1)
    there = bench_config("model", "auto", None, 1, backend="cuda")
    assert (here.backend.name, here.cache.kv_cache_memory_bytes) == ("cpu", None)
    assert (there.backend.name, there.backend.device) == ("cuda", "cuda")
    assert there.cache.kv_cache_memory_bytes is not None
