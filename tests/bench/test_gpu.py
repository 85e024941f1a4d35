"""`paceline bench gpu` says what it needs, and shows what it found."""

from __future__ import annotations

import pytest
import torch

from paceline.bench.gpu_command import DEFAULT_SHAPES, gpu_table
from paceline.errors import BackendError, ConfigError


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so() -> None:
    from paceline.bench.gpu import measure_gpu

    with pytest.raises(BackendError, match="needs a CUDA device"):
        measure_gpu(["llama-3.2-1b"], [1], 128, 256, print)


def test_the_default_shapes_are_known_and_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.bench.gpu import SHAPES, measure_gpu

    assert set(DEFAULT_SHAPES.split(",")) == set(SHAPES)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"no shape 'gpt-9'; choose from llama-3\.2-1b"):
        measure_gpu(["gpt-9"], [1], 128, 256, print)


def test_a_line_of_the_table() -> None:
    from paceline.bench.gpu import Measured

    table = gpu_table([Measured("llama-3.2-1b", "paceline", 64, 1.354, 47266.0, 0.582)])
    assert [list(column.cells) for column in table.columns] == [
        ["llama-3.2-1b"],
        ["paceline"],
        ["64"],
        ["1.354"],
        ["47,266"],
        ["0.582"],
    ]
