"""`python -m benchmarks grid`: what each bar means, what auto may know, and the command on a tiny model."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.control.device_grid import run_device_grid
from benchmarks.control.grid import Cell, Grid, GridOptions, Group, run_grid
from benchmarks.control.grid_report import grid_result
from paceline.bench.loading import empty_memory
from paceline.bench.report.page import html_page
from paceline.bench.run.contest import Contest, SpeculationOptions
from paceline.bench.run.engine_runner import EngineRunner, Task
from paceline.bench.run.speculation import parse_methods
from paceline.bench.run.turns import Slices
from paceline.bench.traffic.profiles import Profile
from paceline.errors import ConfigError
from paceline.home import paceline_home
from tests.benchmarks.cli import run

SPEEDS = {"off": 100.0, "auto": 150.0, "ngram 4": 155.0, "suffix 7": 90.0}


def grid(*cells: Cell) -> Grid:
    contest = Contest(SpeculationOptions((), {"off": "off"}), 2, "native")
    return Grid(GridOptions(("chat",)), list(cells), [contest])


def verdicts(found: Grid) -> list[bool]:
    return [bar.holds for bar in found.bars()]


def test_a_cell_compares_auto_with_off_and_with_the_best_of_all_others() -> None:
    cell = Cell("chat", 4, SPEEDS)
    assert (cell.label, cell.speedup("auto"), cell.best_fixed) == ("chat x4", 1.5, "ngram 4")
    assert cell.auto_of_best == pytest.approx(150 / 155)
    assert Cell("chat", 1, {"off": 100.0, "auto": 99.0, "ngram 4": 50.0}).best_fixed == "off"


def test_all_bars_hold_where_auto_is_never_slower_near_the_best_and_best_in_the_mean() -> None:
    other = Cell("chat", 16, {"off": 100.0, "auto": 98.0, "ngram 4": 60.0, "suffix 7": 99.0})
    found = grid(Cell("chat", 1, SPEEDS), other)
    assert verdicts(found) == [True, True, True, True]
    assert found.means == pytest.approx({"off": 1.0, "auto": 1.24, "ngram 4": 1.075, "suffix 7": 0.945})


@pytest.mark.parametrize(
    ("speeds", "expected", "detail"),
    [
        ({"auto": 97.0}, [False, False, False, True], "below in 1: chat x1 0.970"),
        ({"auto": 140.0}, [True, False, False, True], "below in 1: chat x1 0.903"),
        ({"auto": 154.0}, [True, True, False, True], "the best fixed setting, ngram 4, 1.550"),
    ],
)
def test_a_missed_bar_names_its_cells(speeds: dict[str, float], expected: list[bool], detail: str) -> None:
    found = grid(Cell("chat", 1, {**SPEEDS, **speeds}))
    assert verdicts(found) == expected
    result = grid_result(found)
    assert [finding.good for finding in result.findings] == expected
    assert any(detail in finding.text for finding in result.findings)
    page = html_page(result)
    assert detail in page
    assert "<script" not in page


def test_groups_of_prompts_say_how_much_the_texts_matter() -> None:
    # one setting is the best for some texts, another for others, and in all no better than auto
    groups = [
        Group(100, {"off": 2.0, "auto": 1.0, "ngram 4": 0.9, "suffix 7": 1.2}),
        Group(100, {"off": 2.0, "auto": 1.0, "ngram 4": 1.2, "suffix 7": 1.0}),
    ]
    speeds = {method: 200 / sum(group.seconds[method] for group in groups) for method in groups[0].seconds}
    cell = Cell("chat", 16, speeds, groups=groups)
    assert (cell.best_fixed, cell.auto_of_best) == ("ngram 4", pytest.approx(2.1 / 2.0))
    assert cell.error == pytest.approx(0.15), "half the difference of 0.9 and 1.2"
    assert cell.auto_of_tuned == pytest.approx((1.2 + 1.2) / 2.0), "each group by what is best for the other"
    page = html_page(grid_result(grid(cell)))
    assert "0.150" in page
    assert "1.200 in the mean" in page
    alone = Cell("chat", 16, speeds, groups=groups[:1])
    assert alone.error is alone.auto_of_tuned is None


def test_means_leave_out_what_was_not_measured_in_every_cell() -> None:
    found = grid(Cell("chat", 1, {**SPEEDS, "eagle3 15 (4, 5)": 200.0}), Cell("chat", 64, SPEEDS))
    assert list(found.means) == list(SPEEDS)
    assert "eagle3 15 (4, 5)" in html_page(grid_result(found))


def test_empty_memory_keeps_models_and_hides_what_was_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    for name in ("costs/learned.json", "models/model.gguf"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    with empty_memory():
        home = paceline_home()
        assert (home / "models" / "model.gguf").read_text() == "models/model.gguf"
        assert not (home / "costs").exists()
        (home / "costs").mkdir()
        (home / "costs" / "new.json").write_text("gone afterwards")
    assert os.environ["PACELINE_HOME"] == str(tmp_path)
    assert [path.name for path in (tmp_path / "costs").iterdir()] == ["learned.json"]


def test_a_grid_without_auto_is_refused() -> None:
    with pytest.raises(ConfigError, match="--methods must have auto"):
        run_grid(GridOptions(("chat",), methods={"off": "off", "ngram": "ngram"}))


def test_a_grid_of_two_engines_measures_fixed_settings_by_what_requests_ask_for(
    tmp_path: Path, tiny_gguf: Path
) -> None:
    prompts = [{"prompt": text, "max_tokens": 8} for text in ("abcabc", "ababab", "cdcd")]
    (tmp_path / "letters.jsonl").write_text("\n".join(json.dumps(prompt) for prompt in prompts))
    options = GridOptions(
        (str(tmp_path / "letters.jsonl"),),
        (1, 2),
        model=str(tiny_gguf),
        max_tokens=4,
        threads=1,
        temperatures=(0.0, 0.8),
    )
    turns: list[str] = []
    found = run_device_grid(options, turns.append)
    assert [cell.label for cell in found.cells] == [
        f"letters x{requests} T={heat}" for requests in (1, 2) for heat in ("0", "0.8")
    ]
    assert turns == ["off", "auto", "ngram 7", "suffix 3", "suffix 7", "off, again"] * 4
    assert [len(cell.groups) for cell in found.cells] == [1] * 4, "four prompts or all"
    assert all(cell.off_spread is not None for cell in found.cells)
    assert found.identical
    assert "letters x2 T=0.8" in html_page(grid_result(found))


def test_a_cell_has_groups_of_other_prompts(tmp_path: Path, tiny_gguf: Path) -> None:
    texts = ("abcabc", "ababab", "cdcd", "dd", "abcd")
    (tmp_path / "letters.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    options = GridOptions(
        (str(tmp_path / "letters.jsonl"),),
        (1, 2),
        model=str(tiny_gguf),
        prompts=1,
        max_tokens=4,
        threads=1,
        temperatures=(0.0,),
        groups=4,
    )
    cells: list[Cell] = []
    found = run_device_grid(options, on_cell=cells.append)
    assert found.cells == cells
    alone, pairs = cells
    assert [group.tokens for group in alone.groups] == [4] * 4
    assert [group.tokens for group in pairs.groups] == [8] * 2, "a fifth prompt is no pair"
    methods = {"off", "auto", "ngram 7", "suffix 3", "suffix 7"}
    assert all(set(group.seconds) == methods for group in alone.groups)
    assert found.identical
    assert pairs.error is not None


def test_fixed_settings_can_be_named_and_cells_taken_in_random_order(tmp_path: Path, tiny_gguf: Path) -> None:
    (tmp_path / "letters.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in ("aba", "cd")))
    setting = '{"method": "ngram", "num_speculative_tokens": 2}'
    options = GridOptions(
        (str(tmp_path / "letters.jsonl"),),
        (1, 2),
        methods=parse_methods([setting]),
        model=str(tiny_gguf),
        max_tokens=4,
        threads=1,
        temperatures=(0.0, 0.8),
    )
    turns: list[str] = []
    in_order = run_device_grid(options, turns.append).cells
    assert turns == ["off", "auto", "ngram num_speculative_tokens=2", "off, again"] * 4
    shuffled = run_device_grid(replace(options, order=1)).cells
    assert [cell.label for cell in shuffled] != [cell.label for cell in in_order]
    assert {cell.label for cell in shuffled} == {cell.label for cell in in_order}


def test_no_turn_copies_the_answers_of_an_earlier_one(
    tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "letters.jsonl").write_text(json.dumps({"prompt": "abc", "max_tokens": 24}))
    options = GridOptions(
        (str(tmp_path / "letters.jsonl"),),
        (1,),
        model=str(tiny_gguf),
        max_tokens=24,
        threads=1,
        temperatures=(5.0,),  # the answer does not repeat itself
        rounds=3,
    )
    accepted: list[int] = []
    slices = EngineRunner.slices

    def noted(runner: EngineRunner, group: Sequence[Task], profile: Profile) -> Slices:
        turn = yield from slices(runner, group, profile)
        if group[0].params.speculative is not None:
            facts = [answer.speculative for answer in turn.answers]
            accepted.append(sum(each.num_accepted_draft_tokens for each in facts if each is not None))
        return turn

    monkeypatch.setattr(EngineRunner, "slices", noted)
    run_device_grid(options)
    assert accepted == [0] * 9, "ngram 7, suffix 3 and suffix 7, in three rounds"


def test_the_command_measures_every_cell_and_writes_everything(
    tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on build servers: rich takes their output for a terminal's
    prompts = [{"prompt": text, "max_tokens": 8} for text in ("abcabc", "ababab", "cdcd")]
    (tmp_path / "letters.jsonl").write_text("\n".join(json.dumps(prompt) for prompt in prompts))
    output = run(
        *("grid", str(tiny_gguf), "--workload", str(tmp_path / "letters.jsonl"), "--concurrency", "1,2"),
        *("--methods", "auto,ngram", "--limit", "1", "--max-tokens", "6", "--threads", "1"),
        *("--json", str(tmp_path / "facts.json"), "--html", str(tmp_path / "page.html")),
    )
    assert "auto began with an empty memory" in output
    assert "…" not in output, "what is piped is not cut"
    facts = json.loads((tmp_path / "facts.json").read_text())
    cells = [(cell["workload"], cell["concurrency"]) for cell in facts["cells"]]
    assert cells == [("letters", 1), ("letters", 2), ("writing", 1), ("writing", 2)]
    assert all(list(cell["speedups_vs_off"]) == ["off", "auto", "ngram"] for cell in facts["cells"])
    assert facts["identical"]
    assert [row["prompts"] for row in facts["rows"]] == [1] * 6 + [2] * 6, "never less than run at once"
    assert "4 cells" in (tmp_path / "page.html").read_text()
