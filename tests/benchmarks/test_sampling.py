"""`python -m benchmarks sampling`: sampling options on the device beside the same options on the host."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.engine import commands
from benchmarks.engine.concurrency import short_prompts
from benchmarks.engine.sampling import build_pair, measure_sampling, options_for
from benchmarks.engine.views import sampling_result
from paceline.build import Loaded
from paceline.engine.engine import Engine
from paceline.machine import Gpu
from tests.toy import ToyBackend, toy_engine
from tests.toy_decoder import ToyDecoder

PROMPTS = short_prompts([2 + number * number % 64 for number in range(300)], 4)


def toy_pair() -> tuple[ToyBackend, tuple[Engine, Engine]]:
    backend = ToyBackend(on_device=True)

    def build() -> Loaded:
        engine = toy_engine(backend, enable_prefix_caching=False)
        return Loaded(engine, engine.tokenizer, None, {})  # type: ignore[arg-type]

    return backend, build_pair(backend, build)


def test_one_engine_samples_on_the_device_and_the_other_on_the_host() -> None:
    backend, engines = toy_pair()
    lines = measure_sampling({"off": engines}, PROMPTS, tokens=3, rounds=1)
    assert [line.options for line in lines] == [options.name for options in options_for(4)]
    assert len(lines) == 7
    assert all(line.device > 0 and line.host > 0 and line.differing == 0 for line in lines)
    # Each line runs twice, with two decode passes. The second engine has device passes in two lines: of
    # requests without options, and of those beside one that needs the host.
    assert backend.num_launched == 7 * 2 * 2 + 2 * 2 * 2
    (finding,) = sampling_result("toy", 4, 3, 1, lines).findings
    assert finding.good


def test_outputs_that_differ_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(ToyDecoder):
        """A decoder with the fault to find: it applies no logit edits."""

        def join(self, requests: Any) -> None:
            super().join(requests)
            self._edits = dict.fromkeys(self._edits)

    monkeypatch.setattr("tests.toy.ToyDecoder", Forgetful)
    _, engines = toy_pair()
    lines = measure_sampling({"off": engines}, PROMPTS, tokens=4, rounds=1)
    assert {line.options for line in lines if line.differing} == {
        "repetition_penalty, frequency_penalty",
        "logit_bias",
        "1 request in 4: logit_bias, logprobs=5",
    }
    (finding,) = sampling_result("toy", 4, 4, 1, lines).findings
    assert not finding.good


def test_without_a_gpu_it_says_why_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "find_gpu", lambda: Gpu(missing="no NVIDIA driver is loaded"))
    result = CliRunner().invoke(app, ["sampling", "no-such-model"])
    assert result.exit_code != 0
    assert "needs a CUDA GPU, but no NVIDIA driver is loaded" in str(result.exception)
