"""Families of known blocks: torch and cpu compute what transformers does, with the same bits in any pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.backends.cpu import CpuBackend
from paceline.backends.torch.backend import TorchBackend
from paceline.models.checkpoint import Checkpoint
from paceline.models.needs import missing_blocks
from paceline.models.registry import load_checkpoint
from tests.backends.cpu.subject import TREES, assert_chunks_are_true, assert_tree_is_true, load, plant
from tests.backends.driver import Driven, drive
from tests.large import LARGE
from tests.tiny import random_model, save_checkpoint
from tests.tiny_families import VOCAB_SIZE
from tests.tiny_near_families import NEAR_FAMILIES

CLOSE = 1e-4
TREE = TREES["late branches"]
PROMPT = np.random.default_rng(1).integers(0, VOCAB_SIZE, 40).tolist()
GREEDY_TOKENS = 64 if LARGE else 14  # beyond two windows and the border of a page


@pytest.fixture(scope="module", params=NEAR_FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def checkpoint(name: str, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return load_checkpoint(save_checkpoint(name, tmp_path_factory.mktemp(name)))


def greedy(request: Driven, prompt: list[int]) -> list[int]:
    """The prompt and its likeliest continuation."""
    tokens, logits = list(prompt), request.extend(prompt)
    for _ in range(GREEDY_TOKENS):
        tokens.append(int(logits[-1].argmax()))
        logits = request.extend(tokens[-1:])
    return tokens


def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, checkpoint: Checkpoint) -> None:
    model, prompt = random_model(name), PROMPT[:20]

    def theirs(tokens: list[int]) -> np.ndarray:
        with torch.inference_mode():
            found: np.ndarray = model(torch.tensor([tokens])).logits[0].numpy()
        return found

    request = drive(TorchBackend.load(checkpoint), pages_each=6)[0]
    tokens = greedy(request, prompt)
    # transformers reads them at once: each is its likeliest token after those before it
    assert theirs(tokens)[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens[len(prompt) :]
    own = drive(TorchBackend.load(checkpoint), pages_each=6)[0].extend(PROMPT)
    np.testing.assert_allclose(own, theirs(PROMPT), rtol=0, atol=CLOSE)


def test_cpu_computes_what_torch_computes(checkpoint: Checkpoint) -> None:
    backend = CpuBackend.load(checkpoint, quantization="none", threads=2, max_rows=48)
    tokens, found = [*range(5, 5 + len(TREE))], []
    for model in (backend, TorchBackend.load(checkpoint)):
        request = drive(model, pages_each=6)[0]
        found.append([request.extend(PROMPT[:23]), request.extend(PROMPT[23:]), request.run(tokens, TREE)])
    backend.close()
    for got, want in zip(*found, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=CLOSE)


def test_a_token_has_the_same_bits_in_chunks_and_trees_as_alone(checkpoint: Checkpoint) -> None:
    subject = load(checkpoint, "int8", (1, 2), max_rows=80)
    for backend in subject.backends.values():
        assert_chunks_are_true(subject, backend, 7)
        tokens = plant(TREE, subject.prompt[15:], backend.config.vocab_size)
        assert_tree_is_true(subject, subject.prefix(backend, 15), TREE, tokens)  # across a border of pages
        backend.close()


def test_cuda_refuses_none(checkpoint: Checkpoint) -> None:
    """`python -m tests.models.support cuda` runs them on a GPU."""
    assert missing_blocks(checkpoint.config, "cuda") == []
