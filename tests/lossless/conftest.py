"""One real model, requests for it, and the truth about them."""

from __future__ import annotations

from itertools import cycle

import pytest

from paceline.build import LoadedModel, load_model
from paceline.config import EngineConfig
from tests.lossless.prompts import PROMPTS
from tests.lossless.subject import (
    SAMPLINGS,
    Case,
    Configs,
    Truth,
    drafters,
    make_engine,
    write_untrained_medusa,
)

MODEL = "smollm2-135m"
TOKENS = 18  # more than a page: each answer crosses a page border


@pytest.fixture(scope="package")
def model() -> LoadedModel:
    """With one thread, because tests run beside each other: a second would mostly wait for a core."""
    return load_model(EngineConfig.from_options(model=MODEL, threads=1))


@pytest.fixture(scope="package")
def model_of_two_threads() -> LoadedModel:
    """The model for `make test-large`."""
    return load_model(EngineConfig.from_options(model=MODEL, threads=2))


@pytest.fixture(scope="package")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Configs:
    folder = tmp_path_factory.mktemp("medusa")
    write_untrained_medusa(MODEL, folder)
    return drafters(MODEL, str(folder))


@pytest.fixture(scope="package")
def truth(model: LoadedModel) -> Truth:
    return Truth(make_engine(MODEL, model, enable_prefix_caching=False))


@pytest.fixture(scope="package")
def cases(model: LoadedModel) -> list[Case]:
    """Every way of sampling, with the prompts in turn."""
    ids = {}
    for name, text in PROMPTS.items():
        # a system message of its own, because the template's is longer than most prompts
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
        chat = model.tokenizer.apply_chat_template(messages)
        ids[name] = tuple(model.tokenizer.encode(chat, add_special_tokens=False))
    turns = zip(SAMPLINGS, cycle(ids.items()), strict=False)  # the prompts never end
    return [Case(name, prompt, sampling, TOKENS) for sampling, (name, prompt) in turns]
