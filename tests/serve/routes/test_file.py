"""The routes file: its example in the guide, and every mistake, reported before a model is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.serve.routes.file import read_routes
from paceline.serve.routes.kinds import CascadeRoute, FallbackRoute, RuleRoute, WeightRoute

DOCS = Path(__file__).parents[3] / "docs"
MODELS = """
[models.small]
model = "smollm2-135m"
[models.large]
model = "smollm2-135m"
"""


def read(tmp_path: Path, text: str, **common: Any) -> Any:
    file = tmp_path / "routes.toml"
    file.write_text(text)
    return read_routes(str(file), common)


def test_the_example_of_the_guide_is_read(tmp_path: Path) -> None:
    guide = (DOCS / "guides" / "routes.md").read_text()
    (example,) = re.findall(r"```toml\n(# routes.toml.*?)```", guide, re.DOTALL)
    declared = read(tmp_path, example)
    assert [type(route) for route in declared.table.routes.values()] == [
        RuleRoute,
        CascadeRoute,
        WeightRoute,
        FallbackRoute,
    ]
    assert declared.table.default == "auto"
    assert set(declared.models) == {("small",), ("large",)}


def test_a_model_has_the_options_of_the_command_line_unless_it_sets_them(tmp_path: Path) -> None:
    text = (
        '[models.a]\nmodel = "smollm2-135m"\nthreads = 1\nmax_queue = 3\n[models.b]\nmodel = "smollm2-135m"'
    )
    models = read(tmp_path, text, threads=2, max_num_seqs=7).models
    assert [entry.config.backend.threads for entry in models.values()] == [1, 2]
    assert [entry.config.scheduler.max_num_seqs for entry in models.values()] == [7, 7]
    assert [entry.max_queue for entry in models.values()] == [3, None]


def test_models_on_a_gpu_share_its_memory(tmp_path: Path, monkeypatch: Any) -> None:
    gpu = '[models.{}]\nmodel = "smollm2-135m"\nbackend = "cuda"\n'
    text = gpu.format("a") + gpu.format("b") + MODELS.replace('-135m"', '-135m"\nbackend = "cpu"')
    models = read(tmp_path, text, gpu_memory_utilization=0.8).models
    shares = {name: entry.config.cache.gpu_memory_utilization for (name,), entry in models.items()}
    assert shares == {"a": 0.4, "b": 0.8, "small": 0.8, "large": 0.8}


def test_the_default_is_the_first_model(tmp_path: Path) -> None:
    assert read(tmp_path, MODELS).table.default == "small"


CIRCLE = """
[routes.a]
kind = "fallback"
models = ["b", "small"]
[routes.b]
kind = "cascade"
models = ["small", "c"]
min_logprob = -1
[routes.c]
kind = "weight"
weights = { a = 1, small = 1 }
"""


def rule(**conditions: str) -> str:
    lines = [f"{name} = {value}" for name, value in conditions.items()]
    return "\n".join(
        ['[routes.r]\nkind = "rule"\ndefault = "small"\n[[routes.r.rules]]\nto = "large"', *lines]
    )


def cascade(*lines: str) -> str:
    return "\n".join(['[routes.c]\nkind = "cascade"\nmodels = ["small", "large"]', *lines])


def weight(weights: str) -> str:
    return f'[routes.w]\nkind = "weight"\nweights = {weights}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MODELS + CIRCLE, "in a circle: a -> b -> c -> a"),
        (MODELS + cascade("min_logprob = -1").replace('"large"', '"c"'), "in a circle: c -> c"),
        (MODELS + cascade("min_logprob = -1").replace('"large"', '"lage"'), "did you mean 'large'"),
        ('default = "nobody"\n' + MODELS, "default names 'nobody', which is neither a model nor a route"),
        (MODELS + rule(keywords="'(a'"), "keywords is not a regular expression of Python"),
        (MODELS + rule(keywords="'a'", keyword="'b'"), "unknown option 'keyword'"),
        (MODELS + rule(), "the rule to 'large' has no condition"),
        (MODELS + rule(min_prompt_tokens="9", max_prompt_tokens="3"), "can never match"),
        (MODELS + rule(min_prompt_tokens="-1"), "min_prompt_tokens must be an integer from 0"),
        (MODELS + rule(structured="1"), "structured must be True or False"),
        (MODELS + rule(segments='"a"'), "segments must be a list of names"),
        (MODELS + rule(keywords="'a'").replace('to = "large"', ""), "rule 1 needs `to`"),
        (MODELS + '[routes.r]\nkind = "rule"\ndefault = "small"\nrules = []', "needs rules"),
        (MODELS + '[routes.r]\nkind = "rule"\nrules = []', "a rule route needs `default`"),
        (MODELS + weight("{ small = 0 }"), "the weight of 'small' must be a number above 0"),
        (MODELS + weight("{ small = -2, large = 1 }"), "the weight of 'small' must be"),
        (MODELS + weight("{ small = nan }"), "the weight of 'small' must be"),
        (MODELS + weight("{}"), "needs weights"),
        (MODELS + cascade(), "a cascade without a criterion never asks 'large'"),
        (MODELS + cascade("min_logprob = 0.5"), "min_logprob must be a number from -1000 to 0"),
        (MODELS + cascade('verify = ["shema"]'), "verify must be one of schema, finished"),
        (MODELS + cascade('verify = "schema"'), "verify must be a list"),
        (MODELS + cascade("must_match = '*'"), "must_match is not a regular expression"),
        (MODELS + '[routes.f]\nkind = "fallback"\nmodels = ["small"]', "models must have at least 2 names"),
        (MODELS + '[routes.f]\nkind = "fallback"\nmodels = ["small", "small"]', "a name twice"),
        (MODELS + '[routes.f]\nkind = "fallback"', "a fallback route needs `models`"),
        (MODELS + '[routes.f]\nkind = "random"', "kind must be one of rule, weight, cascade, fallback"),
        (
            MODELS + '[routes.small]\nkind = "weight"\nweights = { large = 1 }',
            "name of a model and of a route",
        ),
        (MODELS + '[router.x]\nkind = "weight"', "unknown option 'router' for a routes file: did you mean"),
        (MODELS + "treads = 2", "unknown option 'treads' for models.large: did you mean 'threads'?"),
        (MODELS + "threads = 0", "models.large: threads must be an integer from 1"),
        (MODELS + "max_queue = -1", "models.large: max_queue must be an integer"),
        (MODELS + 'tool_call_parser = "x"', "models.large: "),
        ("[models.x]\nthreads = 1", "models.x needs `model`"),
        ("models = 3", "models must be tables"),
        ("", "there is no model"),
        ("[models", "is not TOML"),
    ],
)
def test_mistakes_are_reported_with_what_to_do(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        read(tmp_path, text)
    assert "routes.toml" in str(error.value)


def test_a_file_that_is_not_there_is_reported(paceline: Any) -> None:
    code, _, message = paceline("serve", "--routes", "no/such/file.toml")
    assert (code, "--routes no/such/file.toml cannot be read" in message) == (2, True)


def test_models_are_declared_in_one_place_only(paceline: Any, tmp_path: Path) -> None:
    file = tmp_path / "routes.toml"
    file.write_text(MODELS)
    code, _, message = paceline("serve", "smollm2-135m", "--routes", file)
    assert (code, "is given beside --routes" in message) == (2, True)
    code, _, message = paceline("serve", "--routes", file, "--served-model-name", "x")
    assert (code, "--served-model-name is given beside --routes" in message) == (2, True)


def test_kv_events_are_of_one_model(paceline: Any, tmp_path: Path) -> None:
    file = tmp_path / "routes.toml"
    file.write_text(MODELS)
    code, _, message = paceline("serve", "--routes", file, "--kv-events-endpoint", "tcp://*:5557")
    assert (code, "KV events are of one model" in message) == (2, True)


def test_a_missing_model_is_reported_before_another_is_loaded(
    paceline: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("paceline.serve.loading.load", lambda *_: pytest.fail("a model was loaded"))
    file = tmp_path / "routes.toml"
    file.write_text(MODELS + '[models.missing]\nmodel = "no-such-model"')
    code, _, message = paceline("serve", "--routes", file, "--port", "0")
    assert (code, "There is no model 'no-such-model'" in message) == (2, True)
