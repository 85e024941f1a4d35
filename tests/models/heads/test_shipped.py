"""The head that is shipped for the default model: it is there, it is small, and it drafts well."""

from __future__ import annotations

import pytest

from paceline.build import LoadedModel, build_engine, load_model
from paceline.config import EngineConfig
from paceline.control.acceptance.drafter import DrafterAcceptance
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.models.heads.shipped import known_drafts, shipped_head

pytestmark = pytest.mark.real

QUESTIONS = (
    "Lily has 12 apples and buys 3 bags of 5. How many apples has she now?",
    "Write a Python function that adds up a list of numbers.",
)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(EngineConfig.from_options())


def test_the_shipped_head_is_small_and_has_a_model_card(model: LoadedModel) -> None:
    folder = shipped_head("eagle3", model.fingerprint)
    assert folder is not None, "no head is shipped for the default model"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 20_000_000
    assert "acceptance" in (folder / "README.md").read_text()


def test_the_shipped_head_comes_with_a_prior_for_the_controller(model: LoadedModel) -> None:
    models = known_drafts(model.fingerprint)["models"]
    assert models.keys() == {"suffix", "suffix greedy", "eagle3", "eagle3 greedy"}
    for facts in models.values():
        known = DrafterAcceptance(7)
        known.begin_with(facts)
        assert 0.2 < known.sample_scenarios([(("1", 0), "")], 16).sum(axis=2).mean() < 3
    assert known_drafts("of another model") == {}


def test_the_shipped_head_drafts_well_and_changes_no_byte(model: LoadedModel) -> None:
    def answers(**options: str) -> list[Request]:
        loaded = build_engine(EngineConfig.from_options(**options), model)
        params = SamplingParams(temperature=0, max_tokens=48)
        requests = []
        for question in QUESTIONS:
            chat = model.tokenizer.apply_chat_template([{"role": "user", "content": question}])
            ids = model.tokenizer.encode(chat, add_special_tokens=False)
            requests += loaded.engine.add_request(ids, params)
        while loaded.engine.has_unfinished:
            loaded.engine.step()
        return requests

    drafted, plain = answers(speculative_config="eagle3"), answers(speculative_config="off")
    assert [request.output_token_ids for request in drafted] == [one.output_token_ids for one in plain]
    steps = sum(request.speculative.num_spec_steps for request in drafted)
    accepted = sum(request.speculative.num_accepted_draft_tokens for request in drafted)
    assert 1 + accepted / steps > 2.5
    assert not any(request.failed_drafters for request in drafted)
    assert not any(request.speculative.num_draft_tokens for request in plain)
