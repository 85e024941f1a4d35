"""mtp: the block for multi-token prediction in the target's own files drafts."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline import LLM
from paceline.backends.cpu import CpuBackend, CpuHeadRunner
from paceline.backends.options import BackendOptions
from paceline.backends.torch.backend import TorchBackend
from paceline.backends.torch.head_runner import TorchHeadRunner
from paceline.control.controller import FixedController
from paceline.core.params import SamplingParams
from paceline.core.trees import PLAIN, DraftPlan
from paceline.draft.base import DraftSampling, Target
from paceline.draft.heads.mtp import MtpDrafter, MtpOptions
from paceline.engine.admission import Limits
from paceline.errors import PacelineError
from paceline.models.heads.mtp import mtp_head
from paceline.models.registry import load_checkpoint
from tests.backends.driver import drive, run
from tests.draft.heads.test_eagle_cpu import ROWS, AgainstFresh, run_engine
from tests.draft.mimo import PREFIX, Block, make_mimo, random_mimo
from tests.draft.model.test_draft_model_cpu import results, save_model
from tests.engine.test_exactness_cpu import Tokenizer
from tests.engines import Later, new_engine
from tests.models.heads.driver import drive_heads, run_heads
from tests.tiny import random_model
from tests.tiny_families import VOCAB_SIZE

LENGTH = 21
AHEAD = 3


@pytest.fixture(scope="module")
def mimo(tmp_path_factory):
    """A checkpoint, and transformers' idea of it: the model and the block."""
    folder = tmp_path_factory.mktemp("mimo")
    model, block = random_mimo(folder)
    return load_checkpoint(folder), model, block


@pytest.fixture(scope="module", params=["torch", "cpu"])
def backend(request, mimo):
    if request.param == "torch":
        return TorchBackend.load(mimo[0], max_rows=ROWS)
    return CpuBackend.load(mimo[0], quantization="none", threads=1, max_rows=ROWS)


def runner_of(checkpoint, backend):
    head = mtp_head(checkpoint.config, checkpoint.mtp)
    if backend.name == "torch":
        return TorchHeadRunner.load(head, backend, ROWS)
    return CpuHeadRunner(head, backend, ROWS)


@torch.inference_mode()
def test_the_target_and_its_block_are_those_of_transformers(mimo, backend):
    """Slots over the target's features, then over the block's own states, as far as a draft goes."""
    checkpoint, model, block = mimo
    tokens = torch.arange(3, 3 + LENGTH + AHEAD) * 7 % VOCAB_SIZE
    before_norm: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0][0]))
    expected = model(tokens[None, :LENGTH]).logits[0]
    hook.remove()
    states, embedded = before_norm[0], model.model.embed_tokens(tokens[1:])
    for _ in range(AHEAD - 1):
        states = torch.cat((states, block(states, embedded[: len(states)])[-1:]))
    guesses = model.lm_head(block(states, embedded))

    (target,) = drive(backend, 2)
    output = run([target.ask(tokens[:LENGTH].tolist())], feature_layers=(checkpoint.config.num_layers,))
    np.testing.assert_allclose(output.logits, expected.numpy(), atol=1e-4, rtol=1e-4)
    (request,) = drive_heads(runner_of(checkpoint, backend), 2)
    found = run_heads([request.ask(output.features, tokens[1 : LENGTH + 1].tolist())], from_target=True)
    logits = [found.logits]
    for token in tokens[LENGTH + 1 :].tolist():
        found = run_heads([request.ask(found.states[-1:], [token])], from_target=False)
        logits.append(found.logits)
    close = 1e-5 if backend.name == "torch" else 1e-4
    np.testing.assert_allclose(np.concatenate(logits), guesses.numpy(), atol=close, rtol=close)
    assert np.abs(guesses.numpy()).max() > 1


def target_of(checkpoint, backend, sampling=DraftSampling.COUPLED):
    options = BackendOptions(backend=backend.name, threads=1)
    return Target(checkpoint.config, Tokenizer(), options, backend, ROWS, sampling, mtp=checkpoint.mtp)


class Checked(AgainstFresh, MtpDrafter):
    """Compares every proposal with that of a drafter to which the request is new."""


@pytest.fixture(scope="module")
def compiled(mimo):
    """The cpu backend, and the results of plain decoding on it."""
    backend = CpuBackend.load(mimo[0], quantization="int8", threads=1, max_rows=ROWS)
    return backend, results(run_engine(backend, None, PLAIN)[0])


PLANS = [PLAIN, *(DraftPlan("mtp", *shape) for shape in ((1,), (4,), (6, 2), (9, 3), (5, 4, 2)))]


@pytest.mark.parametrize(
    ("sampling", "setting"),
    [
        (DraftSampling.COUPLED, {"rows": 24, "max_num_seqs": 4}),
        (DraftSampling.GREEDY, {"num_pages": 14}),
        (DraftSampling.INDEPENDENT, {"num_pages": 14}),
    ],
    ids=["coupled, chunks and prefix hits", "greedy, preemption", "drawn, preemption"],
)
def test_same_bytes_with_chains_and_trees_that_do_not_depend_on_the_past(mimo, compiled, sampling, setting):
    backend, plain = compiled
    drafter = Later(Checked.load(MtpOptions(min_prob=0.0), target_of(mimo[0], backend, sampling)))
    drafter.backend = backend
    added, engine = run_engine(backend, drafter, *PLANS, times=2, **setting)
    assert results(added) == plain
    assert drafter.compared > 30
    assert engine.scheduler.num_preemptions > 0 if "num_pages" in setting else engine.kv.prefix_hits > 0


def test_same_tokens_on_the_torch_backend(mimo):
    backend = TorchBackend.load(mimo[0], max_rows=ROWS)
    drafter = Later(MtpDrafter.load(MtpOptions(), target_of(mimo[0], backend)))
    added, _ = run_engine(backend, drafter, *PLANS)
    assert drafter.needs.feature_layers == (mimo[0].config.num_layers,)
    expected, _ = run_engine(backend, None, PLAIN)
    assert [one.output_token_ids for one in added] == [one.output_token_ids for one in expected]
    assert sum(one.speculative.num_draft_tokens for one in added) > 100


def knowing_mimo(folder, path):
    """A MiMo that says 5 t + 3 after each token t, and whose block knows it by one of its two inputs.

    Embeddings are one-hot and layers add nothing, so a state is the embedding of its token. By "token"
    the block passes on the embedding that it reads; by "state" it turns the state that it reads, which
    is a token older, into the embedding of that token's successor.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model = random_model("qwen2")
    vocab, size = 32, 64
    config = Qwen2Config(**{**model.config.to_dict(), "vocab_size": vocab, "hidden_size": size})
    model = Qwen2ForCausalLM(config)
    block = Block(config)
    after = [(5 * token + 3) % vocab for token in range(vocab)]
    with torch.no_grad():
        for part in (*model.model.layers, *block.layer.layers):
            part.self_attn.o_proj.weight.zero_()
            part.mlp.down_proj.weight.zero_()
        for norm in (block.token_norm, block.hidden_norm, block.layer.norm):
            norm.weight.fill_(1)
        model.model.embed_tokens.weight.copy_(torch.eye(vocab, size))
        model.lm_head.weight.zero_()
        model.lm_head.weight[after, range(vocab)] = 1
        block.input_proj.weight.zero_()
        state, embedding = block.input_proj.weight.split(size, dim=1)
        if path == "token":
            embedding.copy_(torch.eye(size))
        else:
            state[after, range(vocab)] = 1
    model.save_pretrained(folder)
    make_mimo(folder, block)
    return load_checkpoint(folder)


@pytest.mark.parametrize("path", ["token", "state"])
@pytest.mark.parametrize("kind", ["torch", "cpu"])
def test_a_block_that_knows_what_comes_is_accepted_whole(path, kind, tmp_path):
    checkpoint = knowing_mimo(tmp_path, path)
    if kind == "torch":
        backend = TorchBackend.load(checkpoint, max_rows=ROWS)
    else:
        backend = CpuBackend.load(checkpoint, quantization="int8", threads=1, max_rows=ROWS)
    drafter = MtpDrafter.load(MtpOptions(), target_of(checkpoint, backend))
    engine = new_engine(
        backend,
        Tokenizer(),
        Limits(checkpoint.config.vocab_size, 100, 1, ROWS),
        num_pages=10,
        controller=FixedController(DraftPlan("mtp", 4)),
        drafters={"mtp": drafter},
    )
    params = SamplingParams(temperature=0, max_tokens=26, ignore_eos=True)
    (request,) = engine.add_request([4, 9, 1, 22, 7], params)
    while engine.has_unfinished:
        engine.step()
    assert not request.failed_drafters
    assert request.output_token_ids[:3] == [6, 1, 8]  # 5 * 7 + 3 = 38, ...
    drafted = request.speculative.num_draft_tokens
    assert request.speculative.num_accepted_draft_tokens == drafted == 20


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path)
    make_mimo(tmp_path, Block(random_model("qwen2").config))
    return tmp_path


def generate(folder, speculative_config, **options):
    llm = LLM(str(folder), speculative_config=speculative_config, threads=1, max_model_len=200, **options)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)
    return llm.generate([list(range(3, 60))], params, use_tqdm=False)[0]


def test_loads_by_method_name(folder):
    expected = generate(folder, None).outputs[0].token_ids
    tree = {"method": "mtp", "num_speculative_tokens": 6, "branching": 2, "quantization": "int4"}
    hybrid = {"method": "hybrid", "fallback": {"method": "mtp"}}
    for config in ("mtp", tree, hybrid):
        drafted = generate(folder, config)
        assert drafted.outputs[0].token_ids == expected
        assert drafted.metrics.speculative.num_draft_tokens > 10
        assert drafted.metrics.speculative.failed_drafters == []


def test_a_target_without_a_block_is_refused_with_what_was_looked_for(folder):
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    name = f"{PREFIX}input_proj.weight"
    for config, message in (
        ({"method": "mtp", "model": str(folder)}, "unknown option 'model'"),
        ({"method": "mtp", "quantization": "int2"}, "quantization of a draft head must be int8 or int4"),
    ):
        with pytest.raises(PacelineError, match=message):
            generate(folder, config)
    save_file({**tensors, name: torch.zeros(60, 60)}, weights)
    with pytest.raises(PacelineError, match=rf"{name} has shape \[60, 60\].* asks for \[60, 120\]"):
        generate(folder, "mtp")
    save_file({key: value for key, value in tensors.items() if not key.startswith(PREFIX)}, weights)
    with pytest.raises(PacelineError, match=f"looked for the tensor {name}, which the target's files"):
        generate(folder, "mtp")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "qwen2"}))
    with pytest.raises(PacelineError, match="mimo have; this one is a qwen2 model"):
        generate(folder, "mtp")
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "deepseek_v9"}))
    with pytest.raises(PacelineError, match="model_type 'deepseek_v9' is not supported"):
        generate(folder, "mtp")
