"""LoRA adapters of latent attention and of experts: what merged files would give, the same bytes everywhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.backends.torch.backend import TorchBackend
from paceline.errors import ModelError
from paceline.models.lora import load_adapter
from paceline.models.registry import load_checkpoint
from tests.backends.driver import drive
from tests.lossless.adapter_files import save_adapter_and_merged
from tests.tiny import save_checkpoint

PROMPT = [*range(3, 30), 5, 6, 7, 5, 6]
ATTENTION = r"self_attn\.\w+_(proj|with_mqa)\.weight$"
EXPERTS = r"mlp\.experts\.|block_sparse_moe\.experts\."
MLPS = r"(mlp|experts\.\d+|shared_experts?)\.(gate|up|down|gate_up)_proj\.weight$"
CASES = [
    ("deepseek-v2", ATTENTION),
    ("deepseek-v3", ATTENTION),
    ("youtu", ATTENTION),
    ("mistral4", ATTENTION),
    ("deepseek-v3", MLPS),
    ("qwen3-moe", MLPS),
    ("qwen2-moe", MLPS),
    ("mixtral", r"experts\.\d+\.w[123]\.weight$"),
    ("gpt-oss", r"mlp\.experts\.(gate_up|down)_proj$"),
    ("glm4", ATTENTION + "|" + MLPS),
    ("cohere2", ATTENTION),
    ("afmoe", ATTENTION + "|" + MLPS),
    ("llama4", ATTENTION),
]


@pytest.mark.parametrize(("family", "wanted"), CASES, ids=lambda value: value[:12])
def test_an_adapter_gives_the_logits_of_the_merged_file(family: str, wanted: str, tmp_path: Path) -> None:
    model = save_checkpoint(family, tmp_path / "model")
    made = save_adapter_and_merged(model, tmp_path / "made", wanted)
    checkpoint = load_checkpoint(model)
    adapted = TorchBackend.load(
        checkpoint, adapters=[load_adapter("x", made / "adapter", checkpoint.config)]
    )
    request = drive(adapted, pages_each=3)[0]
    plain = drive(TorchBackend.load(checkpoint), pages_each=3)[0].run(PROMPT)
    request.adapter = "x"
    logits = request.run(PROMPT)
    expected = drive(TorchBackend.load(load_checkpoint(made / "merged")), pages_each=3)[0].run(PROMPT)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3)
    assert np.abs(logits - plain).max() > 0.1
