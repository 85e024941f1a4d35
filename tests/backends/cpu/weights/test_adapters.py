"""LoRA adapters on the cpu backend: the logits of torch, the same bits beside any other rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from paceline.backends.cpu import CpuBackend
from paceline.backends.torch.backend import TorchBackend
from paceline.models.checkpoint import Checkpoint
from tests.backends.adapters import drive_with, extend_all, random_adapters
from tests.backends.cpu.numbers import assert_same_bits
from tests.backends.driver import Driven, drive, run
from tests.large import in_turn

LENGTH, PAGES, NAMES = 40, 4, ("b", "", "a")
PROMPT = np.random.default_rng(1).integers(0, 60, LENGTH).tolist()
TOKENS, PARENTS = [11, 22, 33, 44, 44, 55], [-1, 0, 0, 1, 2, 4]


def prefill_and_tree(requests: list[Driven]) -> np.ndarray:
    prefill = extend_all(requests, PROMPT)
    tree = run([request.ask(TOKENS, PARENTS) for request in requests]).logits
    return np.concatenate((prefill, tree.reshape(len(requests), len(TOKENS), -1)), axis=1)


FAMILIES = ["llama", "qwen2", "qwen3-moe", "granite", "blocks", "uneven"]
HYBRIDS = ["lfm2", "qwen3-5", "nemotron-h", "nemotron-h-latent", "falcon-h1"]
EVERYWHERE = ["deepseek-v2", "deepseek-v3", "gpt-oss", "llama4", "gemma4", "gemma4-moe", *HYBRIDS]


@pytest.mark.parametrize("family", [*FAMILIES, *EVERYWHERE])
def test_logits_are_those_of_torch(family: str, checkpoint_of: Callable[[str], Checkpoint]) -> None:
    checkpoint = checkpoint_of(family)
    adapters = random_adapters(checkpoint.config, everywhere=family in EVERYWHERE)
    ours = CpuBackend.load(checkpoint, quantization="none", threads=2, max_rows=192, adapters=adapters)
    found = [
        prefill_and_tree(drive_with(backend, PAGES, NAMES))
        for backend in (ours, TorchBackend.load(checkpoint, adapters=adapters))
    ]
    ours.close()
    np.testing.assert_allclose(*found, rtol=0, atol=5e-4)
    assert np.abs(found[0][0] - found[0][1]).max() > 0.1
    assert np.abs(found[0][2] - found[0][1]).max() > 0.1


@pytest.mark.parametrize("quantization", ["native", "int8"])
def test_an_adapter_changes_quantized_weights_as_much_as_in_torch(
    quantization: str, checkpoint_of: Callable[[str], Checkpoint]
) -> None:
    """Rounding of weights and rows is the only difference, with an adapter as without."""
    checkpoint = checkpoint_of("blocks")
    adapters = random_adapters(checkpoint.config, scale=0.1)
    ours = CpuBackend.load(checkpoint, quantization=quantization, threads=2, max_rows=192, adapters=adapters)
    got, expected = (
        prefill_and_tree(drive_with(backend, PAGES, NAMES))
        for backend in (ours, TorchBackend.load(checkpoint, adapters=adapters))
    )
    ours.close()
    difference, changed = (
        np.median(np.abs(own), axis=(1, 2)) for own in (got - expected, expected - expected[1])
    )
    for number in (0, 2):
        assert difference[number] < 2 * difference[1] + 0.02 * changed[number]
        assert changed[number] > 5 * difference[number]


@pytest.mark.parametrize(
    ("model", "threads"),
    in_turn(
        {
            "-".join(own): own
            for own in (
                ("blocks", "native"),
                ("uneven", "int8"),
                ("qwen3", "none"),
                ("mixtral", "int8"),
                ("deepseek-v3", "int8"),
                ("deepseek-v2", "none"),
                ("lfm2", "int8"),
                ("qwen3-next", "int8"),
                ("falcon-h1", "none"),
            )
        },
        {"2 threads": 2, "1 thread": 1},
    ),
)
def test_a_row_has_the_same_bits_beside_any_others(
    model: tuple[str, str], threads: int, checkpoint_of: Callable[[str], Checkpoint]
) -> None:
    """Alone and token by token, beside other adapters in chunks, as a branch of a tree; and without one
    those of a backend that has none."""
    name, quantization = model
    checkpoint = checkpoint_of(name)
    options = {"quantization": quantization, "threads": threads, "max_rows": 192}
    everywhere = checkpoint.config.moe is not None or checkpoint.config.recurrent is not None
    adapters = random_adapters(checkpoint.config, everywhere=everywhere)
    backend = CpuBackend.load(checkpoint, **options, adapters=adapters)  # type: ignore[arg-type]
    plain = CpuBackend.load(checkpoint, **options)  # type: ignore[arg-type]
    truth = []
    for adapter in NAMES:
        (request,) = drive_with(backend, PAGES, [adapter])
        truth.append(np.concatenate([request.extend([token]) for token in PROMPT]))
    assert_same_bits(truth[1], drive(plain, PAGES)[0].run(PROMPT))
    together = drive_with(backend, PAGES, NAMES)
    chunks = [extend_all(together, PROMPT[begin:end]) for begin, end in ((0, 1), (1, 4), (4, 23), (23, 34))]
    assert_same_bits(np.concatenate(chunks, axis=1), np.stack(truth)[:, :34])
    # the second branch is the rest of the prompt
    tokens, parents = [PROMPT[34], 3, PROMPT[35], 4, PROMPT[36]], [-1, 0, 0, 1, 2]
    drafted = run([request.ask(tokens, parents) for request in together]).logits.reshape(3, 5, -1)
    assert_same_bits(drafted[:, [0, 2, 4]], np.stack(truth)[:, 34:37])
    backend.close()
    plain.close()
