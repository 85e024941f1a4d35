"""Families with blocks that llama does not have: the compiled pass computes what torch computes.

Each also keeps the promise of batch invariance: a token's logits have the bits of the token alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.backends.cpu import CpuBackend
from paceline.backends.load import load_backend
from paceline.backends.options import BackendOptions
from paceline.backends.torch.backend import TorchBackend
from paceline.errors import BackendError
from paceline.models.checkpoint import Checkpoint
from paceline.models.needs import BACKEND_BLOCKS
from tests.backends.cpu.subject import TREES, assert_chunks_are_true, assert_tree_is_true, load, plant
from tests.backends.driver import drive, run
from tests.large import LARGE
from tests.tiny_families import MORE_HYBRIDS, TORCH_FAMILIES

CLOSE = 1e-4
TREE = TREES["late branches"]
MODELS = [*TORCH_FAMILIES, *MORE_HYBRIDS, "gemma4-unified", "all blocks"]


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_a_tree_and_features_are_those_of_torch(
    checkpoint_of: Callable[[str], Checkpoint], name: str
) -> None:
    checkpoint = checkpoint_of(name)
    backend = CpuBackend.load(checkpoint, quantization="none", threads=2, max_rows=48)
    prompt = np.random.default_rng(1).integers(0, checkpoint.config.vocab_size, 40).tolist()
    tokens, layers = [*range(5, 5 + len(TREE))], (checkpoint.config.num_layers, 0, 1)
    found, expected = [], []
    for results, model in ((found, backend), (expected, TorchBackend.load(checkpoint))):
        request = drive(model, pages_each=6)[0]
        results += [request.extend(prompt[:23]), request.extend(prompt[23:]), request.run(tokens, TREE)]
        asked = drive(model, pages_each=6)[0].ask(prompt[:20])
        results.append(run([asked], logit_rows=[], feature_layers=layers).features)
    backend.close()
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=CLOSE)


@pytest.mark.parametrize("name", MODELS)
def test_a_token_has_the_same_bits_in_chunks_and_trees_as_alone(
    checkpoint_of: Callable[[str], Checkpoint], name: str
) -> None:
    subject = load(checkpoint_of(name), "int8", (1, 2), max_rows=80)
    for backend in subject.backends.values():
        for chunk in (7, 70):
            assert_chunks_are_true(subject, backend, chunk)
        for context in (15, 33) if LARGE else (15,):  # the tree crosses a border of pages after 16
            tokens = plant(TREE, subject.prompt[context:], backend.config.vocab_size)
            assert_tree_is_true(subject, subject.prefix(backend, context), TREE, tokens)
        backend.close()


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss"])
def test_the_first_layers_are_a_model_of_their_own(
    checkpoint_of: Callable[[str], Checkpoint], name: str
) -> None:
    """As torch runs them: with the embedding, the final norm and the LM head of the whole."""
    checkpoint = checkpoint_of(name)
    backend = CpuBackend.load(checkpoint, quantization="none", threads=1, max_rows=16)
    early, reference = backend.first_layers(2), TorchBackend.load(checkpoint).first_layers(2)
    found, expected = (drive(model, pages_each=1)[0].run([5, 9, 4, 20]) for model in (early, reference))
    np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE)
    backend.close()


def test_a_block_without_kernels_is_refused_by_name(
    checkpoint_of: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = checkpoint_of("gemma3")
    other = replace(known, config=replace(known.config, value_norm=True), source=Path("x"))
    monkeypatch.setitem(BACKEND_BLOCKS, "cpu", BACKEND_BLOCKS["cpu"] - {"norms without weights"})
    with pytest.raises(
        BackendError, match=r"has norms without weights, for which the cpu .* --backend torch"
    ):
        load_backend(other, BackendOptions("cpu"), 16)
