"""Two checkpoints of a routes file on the compiled CPU backend: one team of threads, the same bytes."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from paceline.build import build_engine
from paceline.core.params import SamplingParams
from paceline.engine.frontend.async_engine import AsyncEngine
from paceline.engine.frontend.step_turns import StepTurns
from paceline.serve.loading import ServedModel, load_models
from paceline.serve.routes.file import RoutesFile, read_routes
from tests.draft.model.test_draft_model_cpu import save_model

PROMPTS = [[5 + number, 6, 7, 8] for number in range(4)]
PARAMS = SamplingParams(temperature=0.7, seed=3, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def declared(tmp_path_factory: pytest.TempPathFactory) -> RoutesFile:
    folder = tmp_path_factory.mktemp("routes")
    text = ""
    for name, family in (("small", "llama"), ("large", "qwen2")):
        (folder / name).mkdir()
        save_model(folder / name, family)
        text += f'[models.{name}]\nmodel = "{folder / name}"\n'
    file = Path(folder / "routes.toml")
    file.write_text(text)
    return read_routes(str(file), {"threads": 2, "max_model_len": 100, "backend": "cpu"})


def test_models_that_answer_at_once_give_the_bytes_that_they_give_alone(declared: RoutesFile) -> None:
    before = workers()
    served = load_models(declared)
    assert len(workers() - before) == 1  # the caller is the other of the two threads
    alone = [answers_alone(declared, model.names) for model in served]
    assert asyncio.run(answers_together(served)) == alone
    assert alone[0] != alone[1]


def workers() -> set[threading.Thread]:
    """The threads of all teams."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("paceline-cpu")}


def answers_alone(declared: RoutesFile, names: tuple[str, ...]) -> list[list[int]]:
    engine = build_engine(declared.models[names].config).engine
    requests = [request for prompt in PROMPTS for request in engine.add_request(prompt, PARAMS)]
    while engine.has_unfinished:
        engine.step()
    return [request.output_token_ids for request in requests]


async def answers_together(served: list[ServedModel]) -> list[list[list[int]]]:
    turns = StepTurns()
    fronts = [AsyncEngine(model.engine, model.tokenizer, max_queue=10, turn=turns.join()) for model in served]
    for front in fronts:
        front.start()
    streams = [
        [await front.submit(prompt, PARAMS, str(number)) for number, prompt in enumerate(PROMPTS)]
        for front in fronts
    ]
    try:
        return [[(await stream.finished()).outputs[0].token_ids for stream in each] for each in streams]
    finally:
        for front in fronts:
            await front.stop()
