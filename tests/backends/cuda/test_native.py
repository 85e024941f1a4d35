"""Every kernel of CUDA C++ can be left out, and then Triton's do its work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.backends.cuda import attend, between, logits, persistent
from paceline.backends.cuda.kernels import attention
from paceline.backends.cuda.native import KERNELS, leaving_out


def attends() -> bool:
    """Whether the kernel is asked; Triton's is not run here."""
    nothing: Any = None
    attend.attend(nothing, nothing, nothing, nothing, None, 16, nothing, nothing)
    return True


def is_between() -> bool:
    nothing: Any = None
    layer: Any = SimpleNamespace(output=SimpleNamespace(weight=torch.zeros(1)))
    return between.run_between(layer, nothing, nothing, 96, nothing, None)


def gives_logits() -> bool:
    nothing: Any = None
    matrix: Any = SimpleNamespace(weight=torch.zeros(1))
    return logits.run_logits(nothing, matrix, nothing, 96)


def stays() -> bool:
    nothing: Any = None
    tables: Any = SimpleNamespace(paths=None, positions=torch.zeros(1))
    return persistent.PersistentLayers(nothing, nothing, nothing, 16).run(torch.zeros(1), tables)


@pytest.mark.parametrize(
    ("name", "run"),
    [("attend", attends), ("between", is_between), ("logits", gives_logits), ("persistent", stays)],
)
def test_a_kernel_is_left_out(name: str, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> bool:
        raise RuntimeError("asked")

    monkeypatch.setattr(attend, "_run", refuse)
    monkeypatch.setattr(attention, "attend", lambda *arguments, **options: None)
    monkeypatch.setattr(persistent.PersistentLayers, "_prepare", refuse)
    for module in (between, logits):
        monkeypatch.setattr(module, "streams_on", refuse)
    assert name in KERNELS
    with pytest.raises(RuntimeError, match="asked"):
        run()
    with leaving_out([name]):
        run()
    with leaving_out([own for own in KERNELS if own != name]), pytest.raises(RuntimeError, match="asked"):
        run()
