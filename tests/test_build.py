"""The controller for each backend and speculative_config."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline import build
from paceline.config import EngineConfig
from paceline.control.auto import AutoController
from paceline.draft.base import DrafterNeeds
from paceline.draft.lookup.ngram import NgramDrafter
from paceline.draft.lookup.suffix import SuffixDrafter
from paceline.draft.speculative_config import parse_speculative_config
from paceline.errors import CheckpointError, ModelError
from tests.models.model_files import config_of, random_tensors, write_gguf
from tests.toy import ToyBackend
from tests.toy_drafter import ScriptedDrafter


def controller(drafts_on_device: bool, asked: object, methods=("suffix", "eagle3"), others=()):
    backend = ToyBackend()
    backend.drafts_on_device = drafts_on_device
    model = SimpleNamespace(backend=backend, fingerprint="none", config=SimpleNamespace(max_position=64))
    loaded = {
        "suffix": SuffixDrafter.__new__(SuffixDrafter),
        "eagle3": ScriptedDrafter({}, "right"),
        **dict(others),
    }
    own = parse_speculative_config(["auto", *methods])
    drafters = {name: loaded[name] for name in own.drafters}
    return build._controller(EngineConfig.from_options(speculative_config=asked), model, own, drafters)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))


def test_auto_leaves_drafting_to_a_device_that_can_and_decides_elsewhere():
    for asked in ("auto", ["auto", "suffix", "eagle3"]):
        chosen = controller(True, asked)
        assert isinstance(chosen, AutoController)
        assert {plan.drafter for plan in chosen.device_plans()} == {None, "eagle3"}
        assert controller(False, asked).device_plans() == ()


@pytest.mark.parametrize(("options", "least"), [({}, 0.0), ({"min_prob": 0.2}, 0.2)])
def test_auto_drafts_below_the_own_threshold_of_a_head_unless_the_user_sets_one(options, least):
    chosen = controller(False, "auto", ["suffix", {"method": "eagle3", **options}])
    assert chosen.plans["eagle3"].least_chance == least


def test_without_a_head_the_device_drafts_from_texts():
    chosen = controller(True, "auto", ["suffix"])
    assert {plan.drafter for plan in chosen.device_plans()} == {None, "suffix"}


def test_beside_a_shipped_head_the_device_looks_up_and_the_head_drafts_where_nothing_is_found(monkeypatch):
    monkeypatch.setattr(build, "default_method", lambda fingerprint: "eagle3")
    backend = SimpleNamespace(drafts_on_device=True, supports_features=True)
    model = SimpleNamespace(backend=backend, fingerprint="any")
    drafters = build._speculation(EngineConfig.from_options(), model).drafters
    assert list(drafters) == ["ngram", "eagle3"]
    head = ScriptedDrafter({}, "right")
    head.needs = DrafterNeeds()  # its features stay on the device
    loaded = {"ngram": NgramDrafter(drafters["ngram"].options), "eagle3": head}
    plans = {name: drafters[name].plan for name in drafters}
    planner = build._device_planner(plans, loaded, {})
    assert [(plan.label, arm.attaches) for plan, arm in planner.arms.items()] == [
        ("off", False),
        ("ngram 2 + eagle3 2", True),
        ("ngram 3 + eagle3 3", True),
        ("ngram 5 + eagle3 5", True),
        ("ngram 7 + eagle3 7", True),
        ("ngram 15 + eagle3 5", True),
    ]


def test_shipped_names_the_head_that_is_shipped_for_the_target():
    wanted = parse_speculative_config({"method": "eagle3", "model": "shipped"})
    for spelling in ("shipped", "eagle3:shipped", {"model": "shipped"}, '{"model": "shipped"}'):
        assert parse_speculative_config(spelling) == wanted
    more = parse_speculative_config({"model": "shipped", "num_speculative_tokens": 3}).drafters["eagle3"]
    assert (more.plan.budget, more.options.model) == (3, "shipped")
    assert list(parse_speculative_config("auto,suffix,shipped").drafters) == ["suffix", "eagle3"]


def test_share_suffix_cache_applies_to_the_drafters_of_auto():
    model = SimpleNamespace(backend=ToyBackend(), fingerprint="none")
    for given, heard in ((None, "responses"), ("prompts", "prompts"), ("off", "off")):
        config = EngineConfig.from_options(speculative_config="auto", share_suffix_cache=given)
        assert build._speculation(config, model).drafters["suffix"].options.share_suffix_cache == heard


@pytest.mark.parametrize("needs", [DrafterNeeds(target_pages=True), DrafterNeeds(feature_layers=(1,))])
def test_a_drafter_that_needs_more_than_texts_has_no_plans_on_the_device(needs):
    """Nor has suffix beside one that needs features on the host: those of device passes stay there."""
    other = SuffixDrafter.__new__(SuffixDrafter)
    other.needs = needs
    chosen = controller(True, "auto", ["suffix", "layerskip:2"], {"layerskip": other})
    texts = {"suffix"} if not needs.feature_layers else set()
    assert {plan.drafter for plan in chosen.device_plans()} - {None} == texts


@pytest.mark.parametrize(
    ("draft", "error"),
    [
        ("eagle3:no-such-head", CheckpointError),
        ("suffix,medusa:no-such-head", CheckpointError),
        ("model:no-such-model", ModelError),
    ],
)
def test_a_head_or_draft_model_that_is_not_there_is_reported_before_the_model_loads(
    tmp_path, monkeypatch, draft, error
):
    def load_backend(*args, **options):
        raise AssertionError("the model was loaded first")

    monkeypatch.setattr(build, "load_backend", load_backend)
    tiny = write_gguf(tmp_path / "tiny.gguf", "llama", random_tensors(config_of("llama")))
    config = EngineConfig.from_options(model=str(tiny), speculative_config=draft)
    with pytest.raises(error, match=r"There is no .*'no-such"):
        build.load_model(config)
