"""`python -m benchmarks same-bytes` finds answers that depend on the batch or on a draft."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.engine import same_bytes
from paceline.bench.run.engine_runner import EngineRunner


def run(model: Path, *more: str) -> tuple[int, str]:
    options = ["--limit", "2", "--max-tokens", "4", "--methods", "ngram", "--concurrency", "2"]
    result = CliRunner().invoke(app, ["same-bytes", str(model), "--backend", "cpu", *options, *more])
    return result.exit_code, result.output


@pytest.mark.parametrize("more", [(), ("--prefix-caching",)])
def test_the_same_answers_alone_together_and_drafted(
    more: tuple[str, ...], tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finds: list[bool] = []
    build = same_bytes.build_engine

    def watched(config, loaded):  # type: ignore[no-untyped-def]
        finds.append(config.cache.enable_prefix_caching)
        return build(config, loaded)

    monkeypatch.setattr(same_bytes, "build_engine", watched)
    code, output = run(tiny_gguf, *more)
    assert code == 0, output
    assert finds == [bool(more)] * 2
    lines = [line.split("│")[1:7] for line in output.splitlines() if "│" in line]
    assert [[cell.strip() for cell in line] for line in lines] == [
        [draft, str(at_once), temperature, "2", "0", "0.0%"]
        for draft in ("off", "ngram")
        for at_once in (1, 2)
        for temperature in ("0", "1")
    ]


def test_an_answer_that_depends_on_its_batch_is_counted(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crosstalk(EngineRunner):
        def run(self, group, profile):  # type: ignore[no-untyped-def]
            turn = super().run(group, profile)
            if profile.concurrency == 2:
                turn.answers[1].token_ids[3] += 1
            return turn

    monkeypatch.setattr(same_bytes, "EngineRunner", Crosstalk)
    code, output = run(tiny_gguf)
    assert code == 1
    assert output.count("50.0%") == 4  # drafted or not, greedy or sampled
    assert output.count("50.0% │              3") == 4
