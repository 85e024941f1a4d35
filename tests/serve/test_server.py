"""The start: refused options, the model's name, and a warm-up without side effects."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

from paceline.backends.cpu.backend import CpuBackend
from paceline.build import build_engine
from paceline.config import EngineConfig
from paceline.core.params import SamplingParams
from paceline.errors import ConfigError
from paceline.serve.loading import load, model_names
from paceline.serve.options import ServeOptions
from paceline.serve.server import allow_files
from tests.draft.model.test_draft_model_cpu import save_model


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("port", value) for value in (-1, 65536, "80", True)),
        *(("host", value) for value in ("", " ")),
        *(("api_key", value) for value in (("",), ("a b",), ("é",), ("a\n",))),
        *(("served_model_name", value) for value in (("",), ("a\n",), ("a" * 300,))),
        *(("max_queue", value) for value in (-1, 1.5)),
        *(("max_connections", value) for value in (0, None)),
        *(("max_body_bytes", value) for value in (0, 1 << 40)),
        *(("request_timeout", value) for value in (-1, float("nan"), "soon")),
        *(("client_timeout", value) for value in (-1,)),
        *(("drain_timeout", value) for value in (float("inf"),)),
        *(("timeout_keep_alive", value) for value in (0,)),
        *(("cors_origin", value) for value in (("example.org",), ("https://a.org/path",), ("https://a, b",))),
        *(("max_segments", value) for value in (-1,)),
        *(("root_path", value) for value in ("llm", "/llm/", "/a b", "//a")),
        *(("tool_call_parser", value) for value in ("telepathy",)),
        *(("log_level", value) for value in ("loud",)),
        *(("log_format", value) for value in ("xml",)),
    ],
)
def test_an_invalid_option_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=option):
        ServeOptions(**{option: value})


def test_an_unknown_option_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_queue'"):
        ServeOptions(max_queues=1)  # type: ignore[call-arg]


def test_a_refused_key_is_not_shown() -> None:
    with pytest.raises(ConfigError) as refusal:
        ServeOptions(api_key=("my secret key",))
    assert "secret" not in str(refusal.value)


def test_a_model_is_called_by_its_name_never_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "my-model.gguf").touch()
    (tmp_path / "folder").mkdir()
    options = ServeOptions()
    assert model_names(str(tmp_path / "my-model.gguf"), options) == ("my-model",)
    assert model_names(str(tmp_path / "folder") + "/", options) == ("folder",)
    assert model_names("smollm2-135m", options) == ("smollm2-135m",)
    assert model_names("org/model", options) == ("org/model",)
    assert model_names(str(tmp_path), ServeOptions(served_model_name=("a", "b"))) == ("a", "b")


def test_the_limit_on_open_files_is_raised_for_the_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        allow_files(600)
        now = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert now >= 856 or now == hard
        allow_files(10)  # never fewer
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == now
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


def test_the_warm_up_leaves_the_engine_unchanged(folder: str) -> None:
    """Requests without a seed get one by their number: the first request must be number one."""
    config = EngineConfig.from_options(
        model=folder, threads=1, max_model_len=100, speculative_config="suffix"
    )
    warmed, untouched = load(config).engine, build_engine(config).engine
    outputs = []
    for engine in (warmed, untouched):
        assert engine.kv.prefix_queries == 0
        (request,) = engine.add_request([5, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True))
        while engine.has_unfinished:
            engine.step()
        outputs.append((request.output_token_ids, request.speculative.num_draft_tokens))
    assert outputs[0] == outputs[1]


def test_a_model_whose_passes_fail_is_not_served(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room for a pass")

    monkeypatch.setattr(CpuBackend, "forward", fail)
    with pytest.raises(MemoryError, match="no room for a pass"):
        load(EngineConfig.from_options(model=folder, threads=1))
