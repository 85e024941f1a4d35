"""`paceline train plan`, from answers to a recommendation, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.request import Request
from paceline.errors import ConfigError
from paceline.llm import LLM
from paceline.models.registry import load_checkpoint
from paceline.train.commands import app
from paceline.train.data.examples import Example, ExampleWriter, read_examples
from paceline.train.job import engine_loader
from paceline.train.loop.sequences import load_target
from paceline.train.objectives.block_objective import BlockObjective
from paceline.train.objectives.new_head import choose_draft_ids
from paceline.train.options import DSparkOptions
from paceline.train.plan.costs import measure_steps
from tests.bench.cli import run
from tests.models.model_files import config_of, random_tensors, write_gguf


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of two layers with a context of 128 and a tokenizer of bytes."""
    path = tmp_path_factory.mktemp("plan") / "tiny.gguf"
    return write_gguf(path, "llama", random_tensors(config_of("llama")))


@pytest.fixture
def answers(model: Path, tmp_path: Path) -> Path:
    vocab_size = load_checkpoint(model).config.vocab_size
    writer = ExampleWriter(tmp_path / "answers.jsonl", vocab_size, {"model": "tiny"})
    random = np.random.default_rng(0)
    rows = random.integers(0, vocab_size, (60, 24)).tolist()
    writer.append(Example(f"{number}#0", "letters", ids, 6) for number, ids in enumerate(rows))
    writer.close()
    return writer.path


def test_pilots_become_a_recommendation(model: Path, answers: Path, tmp_path: Path) -> None:
    sizes = ("--layers", "1,2", "--steps", "2,4", "--epochs", "1,2", "--batch-tokens", "256")
    facts_file = tmp_path / "plan.json"
    output = run(
        *("plan", str(model), "--data", str(answers), *sizes, "--draft-vocab-size", "64,32"),
        *("--device", "cpu", "--json", str(facts_file)),
        app=app,
    )
    facts = json.loads(facts_file.read_text())
    pilots = [(pilot["layers"], pilot["vocabulary"], len(pilot["survival"])) for pilot in facts["pilots"]]
    assert pilots == [(1, 32, 7), (1, 64, 7)] * 2 + [(2, 32, 7), (2, 64, 7)] * 2
    for smaller, larger in zip(facts["pilots"][::2], facts["pilots"][1::2], strict=True):
        assert smaller["tokens"] == larger["tokens"]
        assert sum(smaller["survival"]) <= sum(larger["survival"])
    assert {(choice["layers"], choice["epochs"]) for choice in facts["choices"]} == {
        (1, 1), (1, 2), (2, 1), (2, 2),
    }  # fmt: skip
    assert {size: set(timed) for size, timed in facts["drafted_seconds"].items()} == {
        "1": {"32", "64"}, "2": {"32", "64"},
    }  # fmt: skip
    best = facts["choices"][0]
    assert f"--layers {best['layers']} --block-size {best['drafts']}" in output.replace("\n", " ")
    assert "by --draft-vocab-size: 32: " in output.replace("\n", " ")
    assert f"--draft-vocab-size {best['vocabulary']}" in output.replace("\n", " ")
    assert "--batch-tokens 256" in output.replace("\n", " ")  # as the pilots had it
    assert facts["choices"] == sorted(facts["choices"], key=lambda choice: -choice["speedup"])


def test_an_eagle3_head_can_be_planned(model: Path, answers: Path, tmp_path: Path) -> None:
    facts_file = tmp_path / "plan.json"
    output = run(
        *("plan", str(model), "--method", "eagle3", "--data", str(answers), "--steps", "2,4"),
        *("--epochs", "1,2", "--batch-tokens", "256", "--draft-vocab-size", "64"),
        *("--device", "cpu", "--json", str(facts_file)),
        app=app,
    )
    facts = json.loads(facts_file.read_text())
    assert facts["method"] == "eagle3"
    assert [(pilot["layers"], len(pilot["survival"])) for pilot in facts["pilots"]] == [(1, 5), (1, 5)]
    said = " ".join(output.split())
    assert f"paceline train eagle3 {model}" in output.replace("\n", "")
    assert "--unroll 5 --epochs" in said
    assert "too few to tell how sure the law is" in said


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--method", "medusa"), "--method must be one of dspark, eagle3"),
        (("--method", "eagle3", "--layers", "1,2"), "An EAGLE-3 head has one layer"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    given: tuple[str, ...], message: str, model: Path, answers: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        run("plan", str(model), "--data", str(answers), *given, app=app)


@pytest.mark.parametrize("drafts", [3, 7])
def test_timed_steps_draft_whole_blocks(drafts: int, model: Path, answers: Path) -> None:
    """Though a head that has learned nothing is sure of nothing."""
    target = load_target(load_checkpoint(model), torch.device("cpu"), torch.float32)
    options = DSparkOptions(layers=1, draft_vocab_size=64)
    head = BlockObjective(target, read_examples([answers], 128), options).snapshot()
    load, requests = engine_loader(model, "cpu"), list[Request]()

    def load_watched(draft: Any) -> LLM:
        llm = load(draft)
        add = llm.engine.add_request

        def add_request(*given: Any) -> list[Request]:
            added = add(*given)
            requests.extend(added if draft != "off" else [])
            return added

        llm.engine.add_request = add_request  # type: ignore[method-assign,assignment]
        return llm

    examples = read_examples([answers], 128)
    ids = choose_draft_ids(examples.answer_counts(), 20)
    costs = measure_steps(load_watched, {1: head}, "dspark", 2, [drafts], [ids])
    assert {size: [*timed] for size, timed in costs.drafted[1].items()} == {20: [drafts]}
    for facts in (request.speculative for request in requests):
        assert facts.num_draft_tokens == drafts * facts.num_spec_steps > 0


def test_prompts_are_not_answers(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hello"}\n')
    with pytest.raises(ConfigError, match=r"has prompts, not answers\. Let the model answer them first"):
        run("plan", str(model), "--data", str(prompts), app=app)


def test_answers_to_one_prompt_are_refused_before_anything_is_trained(model: Path, tmp_path: Path) -> None:
    writer = ExampleWriter(
        tmp_path / "answers.jsonl", load_checkpoint(model).config.vocab_size, {"model": "tiny"}
    )
    writer.append(Example(f"0#{number}", "letters", [*range(24)], 6) for number in range(8))
    writer.close()
    with pytest.raises(ConfigError, match="The data answers one prompt, so none can be held out"):
        run("plan", str(model), "--data", str(writer.path), "--device", "cpu", app=app)


def test_one_amount_of_data_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--steps needs two numbers or more"):
        run("plan", "nothing", "--data", str(tmp_path), "--steps", "100", app=app)
