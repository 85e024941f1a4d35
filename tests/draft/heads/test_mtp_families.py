"""mtp of targets whose block has a layer of their own kind: latent or gated attention, experts, hybrids."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.backends.cpu import CpuBackend
from paceline.backends.load import load_head_runner
from paceline.backends.options import BackendOptions
from paceline.backends.torch.backend import TorchBackend
from paceline.core.trees import PLAIN, DraftPlan
from paceline.draft.heads.mtp import MtpDrafter, MtpOptions
from paceline.models.heads.mtp import mtp_head
from paceline.models.registry import load_checkpoint
from tests.backends.driver import drive, run
from tests.draft.heads.test_eagle_cpu import ROWS, AgainstFresh, run_engine
from tests.draft.heads.test_mtp import target_of
from tests.draft.mimo import DEEPSEEK, QWEN, random_with_block
from tests.draft.model.test_draft_model_cpu import results
from tests.engines import Later
from tests.large import LARGE
from tests.models.heads.driver import drive_heads, run_heads
from tests.tiny_families import VOCAB_SIZE

FAMILIES = {"qwen3-5": QWEN, "qwen3-next": QWEN, "glm4-moe": DEEPSEEK, "deepseek-v3": DEEPSEEK}
FAMILIES |= {"glm4-moe-lite": DEEPSEEK}
LENGTH, AHEAD = 21, 3
PLANS = [PLAIN, DraftPlan("mtp", 4), DraftPlan("mtp", 6, 2)]


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request, tmp_path_factory):
    """A checkpoint, transformers' idea of it (the model and the block), and the target's backends."""
    folder = tmp_path_factory.mktemp(request.param)
    model, block = random_with_block(request.param, FAMILIES[request.param], folder)
    checkpoint = load_checkpoint(folder)
    cpu = CpuBackend.load(checkpoint, quantization="none", threads=2, max_rows=ROWS)
    return checkpoint, model, block, {"torch": TorchBackend.load(checkpoint, max_rows=ROWS), "cpu": cpu}


@pytest.mark.parametrize("kind", ["torch", "cpu"])
@torch.inference_mode()
def test_the_block_is_that_of_transformers(loaded, kind):
    """Slots over the target's normed states, then over the block's own, as far as a draft goes."""
    checkpoint, model, block, backends = loaded
    backend = backends[kind]
    tokens = torch.arange(3, 3 + LENGTH + AHEAD) * 7 % VOCAB_SIZE
    states = model.model(tokens[None, :LENGTH]).last_hidden_state[0]
    embedded = model.model.embed_tokens(tokens[1:])
    for _ in range(AHEAD - 1):
        states = torch.cat((states, block(states, embedded[: len(states)])[-1:]))
    guesses = model.lm_head(block(states, embedded)).numpy()

    (target,) = drive(backend, 2)
    output = run([target.ask(tokens[:LENGTH].tolist())], feature_layers=(checkpoint.config.num_layers,))
    head = mtp_head(checkpoint.config, checkpoint.mtp)
    (request,) = drive_heads(load_head_runner(head, BackendOptions(kind), ROWS, backend), 2)
    found = run_heads([request.ask(output.features, tokens[1 : LENGTH + 1].tolist())], from_target=True)
    logits = [found.logits]
    for token in tokens[LENGTH + 1 :].tolist():
        found = run_heads([request.ask(found.states[-1:], [token])], from_target=False)
        logits.append(found.logits)
    np.testing.assert_allclose(np.concatenate(logits), guesses, atol=1e-4, rtol=1e-4)
    assert np.abs(guesses).max() > 1


def skip_repeats(checkpoint, *families):
    """Blocks of other families than these have mixers that one of these has too."""
    if checkpoint.config.family not in families and not LARGE:
        pytest.skip("repeats what others try: run it with `make test-large`")


def test_same_tokens_with_chains_and_trees(loaded):
    checkpoint, backend = loaded[0], loaded[3]["torch"]
    skip_repeats(checkpoint, "qwen3_5_text", "deepseek_v3")
    drafter = MtpDrafter.load(MtpOptions(), target_of(checkpoint, backend))
    added, _ = run_engine(backend, drafter, *PLANS)
    expected, _ = run_engine(backend, None, PLAIN)
    assert [one.output_token_ids for one in added] == [one.output_token_ids for one in expected]
    assert sum(one.speculative.num_draft_tokens for one in added) > 30
    assert not any(one.failed_drafters for one in added)


class Checked(AgainstFresh, MtpDrafter):
    """Compares every proposal with that of a drafter to which the request is new."""


def test_same_bytes_on_the_cpu_backend(loaded):
    """Proposals do not depend on earlier steps, and what they are changes no byte."""
    checkpoint = loaded[0]
    skip_repeats(checkpoint, "qwen3_5_text", "deepseek_v3", "glm4_moe")
    backend = CpuBackend.load(checkpoint, quantization="int8", threads=1, max_rows=ROWS)
    drafter = Later(Checked.load(MtpOptions(min_prob=0.0), target_of(checkpoint, backend)))
    drafter.backend = backend
    setting = {"rows": 24, "max_num_seqs": 4}
    added, engine = run_engine(backend, drafter, *PLANS, times=2, **setting)
    assert results(added) == results(run_engine(backend, None, PLAIN)[0])
    assert drafter.compared > 30
    assert engine.kv.prefix_hits > 0
