"""Assistants of Gemma 4: the network of transformers, the same bytes, and drafts that follow their target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from paceline import LLM
from paceline.backends.cpu import CpuBackend
from paceline.backends.load import load_assistant_runner
from paceline.backends.options import BackendOptions
from paceline.backends.torch.backend import TorchBackend
from paceline.control.controller import FixedController
from paceline.core.forward import ForwardBatch
from paceline.core.params import SamplingParams
from paceline.core.trees import PLAIN, DraftPlan, DraftTrees
from paceline.draft.base import DraftSampling, Target
from paceline.draft.heads.assistant import AssistantDrafter
from paceline.draft.heads.head_options import HeadOptions
from paceline.engine.admission import Limits
from paceline.errors import CheckpointError, ConfigError, HeadMismatchError, UnsupportedModelError
from paceline.models.heads.assistant import load_assistant
from paceline.models.registry import load_checkpoint
from tests.backends.driver import drive, run
from tests.draft.heads.test_eagle_cpu import ROWS, run_engine
from tests.draft.model.test_draft_model_cpu import save_model
from tests.engine.test_exactness_cpu import Tokenizer
from tests.engines import Later, new_engine
from tests.large import REPEATS
from tests.models.heads.gguf_head_files import convert_assistant, convert_head
from tests.models.heads.test_gguf_heads import DFLASH, saved
from tests.tiny import random_model
from tests.tiny_families import FULL, SLIDING, VOCAB_SIZE

WINDOW = 9  # of the tiny models
STEPS = 4
ASSISTANTS = {"gemma4": "Gemma4", "gemma4-moe": "Gemma4", "gemma4-unified": "Gemma4Unified"}


def random_assistant(model, kind, **options):
    """An assistant of transformers for a target, with random weights."""
    import transformers

    text = model.config.to_dict()
    for name in ("num_kv_shared_layers", "enable_moe_block", "use_double_wide_mlp"):
        text.pop(name, None)
    sizes = {"num_hidden_layers": 3, "layer_types": [SLIDING, SLIDING, FULL], "hidden_size": 44}
    sizes |= {"intermediate_size": 51, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    shapes = {layer: text["per_layer_config"].get(str(of)) for layer, of in (("0", 0), ("1", 0), ("2", 1))}
    sizes["per_layer_config"] = {layer: shape for layer, shape in shapes.items() if shape}
    config = getattr(transformers, f"{kind}AssistantConfig")(
        text_config={**text, **sizes}, backbone_hidden_size=model.config.hidden_size, **options
    )
    assistant = getattr(transformers, f"{kind}AssistantForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in assistant.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.25 * noise)
        for name, buffer in assistant.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.25 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("token_ordering"):
                buffer.copy_(torch.randperm(VOCAB_SIZE, generator=generator))
    return assistant


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Gives a target and its assistant, made once: those of transformers, the checkpoints, the backend."""

    @cache
    def load(family):
        model = random_model(family)
        ordered = {
            "use_ordered_embeddings": True,
            "num_centroids": VOCAB_SIZE,
            "centroid_intermediate_top_k": 50,
        }
        options = ordered if family == "gemma4" else {}
        assistant = random_assistant(model, ASSISTANTS[family], **options)
        folders = [tmp_path_factory.mktemp(name) for name in ("target", "assistant")]
        model.save_pretrained(folders[0])
        assistant.save_pretrained(folders[1])
        checkpoint = load_checkpoint(folders[0])
        backend = TorchBackend.load(checkpoint, max_rows=ROWS)
        return model, assistant, checkpoint, backend, folders[1]

    return load


@pytest.fixture(params=ASSISTANTS)
def loaded(request, load):
    return load(request.param)


def target_of(checkpoint, backend, sampling=DraftSampling.COUPLED):
    norm = checkpoint.tensors["model.norm.weight"].float32()
    options = BackendOptions(backend=backend.name, threads=1)
    return Target(checkpoint.config, Tokenizer(), options, backend, ROWS, sampling, final_norm=norm)


@torch.inference_mode()
def steps_of_transformers(model, assistant, tokens: Sequence[int], count: int) -> list[np.ndarray]:
    """The logits of a draft's steps after `tokens`, the last of which the target has not computed."""
    ids = torch.tensor([list(tokens)])
    known = model(ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
    # its mask has the last WINDOW + 1 of the keys that it is given; the target's window has its own position
    shared = dict(known.shared_kv_states)
    shared[SLIDING] = tuple(part[:, :, -(WINDOW - 1) :] for part in shared[SLIDING])
    state, token, logits = known.hidden_states[-1][:, -1:], ids[:, -1:], []
    position = torch.tensor([[len(tokens) - 1]])
    for _ in range(count):
        inputs = torch.cat((model.get_input_embeddings()(token), state), dim=-1)
        step = assistant(inputs_embeds=inputs, position_ids=position, shared_kv_states=shared)
        state, token = step.last_hidden_state, step.logits.argmax(-1)
        logits.append(step.logits[0, 0].numpy())
    return logits


@pytest.mark.parametrize("length", [3, 30])
def test_its_steps_are_those_of_transformers(loaded, length):
    model, assistant, checkpoint, backend, folder = loaded
    tokens = (np.arange(3, 4 + length) * 7 % VOCAB_SIZE).tolist()
    expected = steps_of_transformers(model, assistant, tokens, STEPS)
    (request,) = drive(backend, 2)
    output = run([request.ask(tokens[:-1])], feature_layers=(checkpoint.config.num_layers,))
    request.commit(range(length))
    runner = load_assistant_runner(load_assistant(folder), backend)
    last = torch.from_numpy(output.features[-1:])
    state, token = backend.model.norm(last).numpy(), tokens[-1]
    before = [keys.clone() for keys in request.pool.cache.keys]
    for logits in expected:
        found = runner.run(_batch(request, token), state)
        scored = np.isfinite(found.logits[0])
        assert scored.sum() == (50 if load_assistant(folder).clusters else VOCAB_SIZE)
        np.testing.assert_allclose(found.logits[0][scored], logits[scored], atol=1e-4, rtol=1e-4)
        assert (logits[~scored] < logits[scored].min()).all()
        state, token = found.states, int(found.logits[0].argmax())
    assert np.abs(expected).max() > 1
    assert all(torch.equal(*pair) for pair in zip(before, request.pool.cache.keys, strict=True))


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_cpu_backend_gives_what_torch_gives(loaded, quantization):
    """Chains and levels of trees, of two requests at once, over the pool of the target."""
    _, _, checkpoint, torch_backend, folder = loaded
    if quantization == "int8" and checkpoint.config.moe:
        pytest.skip("rounded scores may choose other experts")
    cpu = CpuBackend.load(checkpoint, quantization=quantization, threads=2, max_rows=ROWS)
    random, assistant = np.random.default_rng(3), load_assistant(folder)
    states = 0.5 * random.standard_normal((5, checkpoint.config.hidden_size)).astype(np.float32)
    found = []
    for backend in (cpu, torch_backend):
        requests, runner = drive(backend, 3, 2), load_assistant_runner(assistant, backend)
        for number, request in enumerate(requests):
            request.extend([(7 * i + number) % VOCAB_SIZE for i in range(3, 33 - 20 * number)])
        lengths = np.array([request.context_length for request in requests], dtype=np.int32)
        sizes = np.array([3, 2])
        batch = ForwardBatch(
            tokens=np.array([5, 9, 9, 2, 50], dtype=np.int32),
            positions=np.repeat(lengths, sizes),
            parents=np.full(5, -1, dtype=np.int32),
            row_offsets=np.array([0, 3, 5], dtype=np.int32),
            context_lengths=lengths,
            page_tables=np.stack([request.pages for request in requests]),
            logit_rows=np.arange(5, dtype=np.int32),
            pool=requests[0].pool,
        )
        first = runner.run(batch, states)
        outputs = [first.logits.copy(), first.states.copy()]
        second = runner.run(batch, outputs[1])
        found.append([*outputs, second.logits.copy(), second.states])
    cpu.close()
    for ours, expected in zip(*found, strict=True):
        known = np.isfinite(ours) & np.isfinite(expected)
        assert known.mean() > 0.2
        if quantization == "none":
            assert (np.isfinite(ours) == np.isfinite(expected)).all()
            np.testing.assert_allclose(ours[known], expected[known], rtol=1e-4, atol=2e-4)
        else:
            assert np.median(np.abs(ours[known] - expected[known])) < 0.1 * np.abs(expected[known]).mean()


def _batch(request, token):
    """A pass over one token after the committed ones."""
    one = np.ones(1, dtype=np.int32)
    return ForwardBatch(
        tokens=token * one,
        positions=request.context_length * one,
        parents=-one,
        row_offsets=np.array([0, 1], dtype=np.int32),
        context_lengths=request.context_length * one,
        page_tables=request.pages[None],
        logit_rows=0 * one,
        pool=request.pool,
    )


class AgainstTransformers(AssistantDrafter):
    """Compares every chain, all of them greedy, with that of transformers over the whole text."""

    models: tuple
    compared = 0

    def propose(self, requests: Sequence, plans: Sequence[DraftPlan]) -> DraftTrees:
        proposed = super().propose(requests, plans)
        for number, (request, plan) in enumerate(zip(requests, plans, strict=True)):
            if request.num_pending == 1:
                tokens, parents = proposed.tree_lists(number)
                assert parents == list(range(-1, len(tokens) - 1))
                steps = steps_of_transformers(*self.models, request.token_ids, len(tokens))
                assert tokens == [int(logits.argmax()) for logits in steps]
                self.compared += len(tokens) == plan.budget
        return proposed


@pytest.mark.parametrize(
    ("loaded", "num_window_pages"),
    [
        pytest.param(*case, marks=REPEATS if number else ())
        for number, case in enumerate(product(ASSISTANTS, (24, None)))
    ],
    indirect=["loaded"],
)
def test_drafts_are_those_of_transformers(loaded, num_window_pages):
    """Also after a prefix hit, in chunks of a prompt, while other requests run, and from window pages.

    What a step of each family computes is compared above.
    """
    model, assistant, checkpoint, backend, folder = loaded
    drafter = Later(AgainstTransformers.load(HeadOptions(model=str(folder)), target_of(checkpoint, backend)))
    drafter.models = model, assistant
    engine = make_engine(backend, drafter, VOCAB_SIZE, rows=24, num_window_pages=num_window_pages)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for _ in range(2):
        prompts = [[5], list(range(3, 20)), list(range(9, 90))]
        added = [engine.add_request(prompt, params)[0] for prompt in prompts]
        while engine.has_unfinished:
            engine.step()
        assert not any(request.failed_drafters for request in added)
    assert drafter.compared > 40
    assert engine.kv.prefix_hits > 0


def make_engine(backend, drafter, vocab_size, rows=ROWS, num_window_pages=None):
    return new_engine(
        backend,
        Tokenizer(),
        Limits(vocab_size, 160, 4, rows),
        num_pages=40,
        num_window_pages=num_window_pages,
        controller=FixedController(DraftPlan("assistant", 4)),
        drafters={"assistant": drafter},
    )


PLANS = [PLAIN, *(DraftPlan("assistant", *shape) for shape in ((1,), (4,), (6, 2), (9, 3), (5, 4, 2)))]


@pytest.fixture(scope="module")
def undrafted():
    """The tokens of plain decoding on a backend of a target, computed once for each backend's name."""
    known = {}

    def tokens(loaded, name):
        checkpoint, backend = loaded[2:4]
        if (checkpoint.source, name) not in known:
            if name == "cpu":
                backend = CpuBackend.load(checkpoint, threads=1, max_rows=ROWS)
            added, _ = run_engine(backend, None, PLAIN)
            known[checkpoint.source, name] = [one.output_token_ids for one in added]
        return known[checkpoint.source, name]

    return tokens


def drafted_cases():
    """Every family with drafts of both kinds, on both backends.

    How drafts are drawn does not depend on the backend, nor on torch, which is slow, what is done with them
    on the family: torch has coupled drafts of one family alone.
    """
    for family, name in product(ASSISTANTS, ("torch", "cpu")):
        on_torch = name == "torch"
        marks = REPEATS if on_torch and family != "gemma4" else ()
        yield pytest.param(family, DraftSampling.COUPLED, 24, name, marks=marks)
        yield pytest.param(family, DraftSampling.COUPLED, None, name, marks=REPEATS)
        marks = REPEATS if on_torch else ()
        yield pytest.param(family, DraftSampling.INDEPENDENT, None, name, marks=marks)


@pytest.mark.parametrize(
    ("loaded", "sampling", "num_window_pages", "name"), [*drafted_cases()], indirect=["loaded"]
)
def test_same_tokens_with_chains_and_trees(loaded, undrafted, sampling, num_window_pages, name):
    _, _, checkpoint, backend, folder = loaded
    if name == "cpu":
        backend = CpuBackend.load(checkpoint, threads=1, max_rows=ROWS)
    options = HeadOptions(model=str(folder))
    drafter = Later(AssistantDrafter.load(options, target_of(checkpoint, backend, sampling)))
    sizes = {"rows": 24, "max_num_seqs": 4, "num_window_pages": num_window_pages}
    added, engine = run_engine(backend, drafter, *PLANS, **sizes, times=2)
    assert drafter.needs.feature_layers == (checkpoint.config.num_layers,)
    assert [one.output_token_ids for one in added] == undrafted(loaded, name)
    assert sum(one.speculative.num_draft_tokens for one in added) > 100
    assert engine.kv.prefix_hits > 0


@pytest.fixture(scope="module")
def knowing(tmp_path_factory):
    """A Gemma 4 that says 5 t + 3 after each token t, and an assistant that knows it from the token alone.

    Embeddings are one-hot and layers add nothing, so both read the embedding of the last token.
    """
    from transformers import Gemma4ForCausalLM

    vocab = 32
    config = random_model("gemma4").config
    config.vocab_size = config.vocab_size_per_layer_input = vocab
    config.hidden_size, config.tie_word_embeddings = 64, False
    model = Gemma4ForCausalLM(config).eval()
    assistant = random_assistant(model, "Gemma4")
    after = [(5 * token + 3) % vocab for token in range(vocab)]
    with torch.no_grad():
        for part in (*model.model.layers, *assistant.model.layers):
            for name, parameter in part.named_parameters():
                if name.endswith("layernorm.weight"):
                    parameter.zero_()  # of those after attention and MLP: they add nothing
            part.layer_scalar.fill_(1)
            if hasattr(part, "post_per_layer_input_norm"):
                part.post_per_layer_input_norm.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocab, 64))
        model.lm_head.weight.zero_()
        model.lm_head.weight[after, range(vocab)] = 1
        assistant.pre_projection.weight.zero_()
        assistant.pre_projection.weight[range(32), range(32)] = 1
        assistant.model.norm.weight.fill_(1)
        assistant.model.embed_tokens.weight.zero_()
        assistant.model.embed_tokens.weight[after, range(vocab)] = 1
    folders = [tmp_path_factory.mktemp(name) for name in ("target", "assistant")]
    save_model(folders[0])  # a tokenizer
    model.save_pretrained(folders[0])
    assistant.save_pretrained(folders[1])
    return folders


def test_an_assistant_that_knows_what_comes_is_accepted_whole(knowing):
    checkpoint = load_checkpoint(knowing[0])
    backend = TorchBackend.load(checkpoint, max_rows=ROWS)
    drafter = AssistantDrafter.load(HeadOptions(model=str(knowing[1])), target_of(checkpoint, backend))
    engine = make_engine(backend, drafter, checkpoint.config.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=26, ignore_eos=True)
    (request,) = engine.add_request([4, 9, 1, 22, 7], params)
    while engine.has_unfinished:
        engine.step()
    assert not request.failed_drafters
    assert request.output_token_ids[:3] == [6, 1, 8]  # 5 * 7 + 3 = 38, ...
    assert request.speculative.num_accepted_draft_tokens == request.speculative.num_draft_tokens == 20


def test_it_is_named_by_its_folder(knowing):
    target, assistant = map(str, knowing)
    llm = LLM(target, backend="torch", speculative_config=f"assistant:{assistant}", max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    (output,) = llm.generate([[3, 4, 5]], params, use_tqdm=False)
    assert output.metrics.speculative.draft_acceptance_rate == 1
    with pytest.raises(UnsupportedModelError, match="--draft assistant:PATH"):
        LLM(assistant, backend="torch")


def test_what_does_not_fit_is_refused(loaded, knowing):
    _, _, checkpoint, backend, _ = loaded
    target = target_of(checkpoint, backend)
    with pytest.raises(HeadMismatchError, match="32 tokens and hidden size 64"):
        AssistantDrafter.load(HeadOptions(model=str(knowing[1])), target)
    with pytest.raises(CheckpointError, match="no assistant of Gemma 4"):
        AssistantDrafter.load(HeadOptions(model=str(knowing[0])), target)
    with pytest.raises(ConfigError, match="assistant:PATH"):
        AssistantDrafter.load(HeadOptions(), target)


def test_an_assistant_of_a_gguf_file_has_the_steps_of_its_folder(loaded):
    """Its converter leaves clusters out: all tokens are scored, as by the folder where it scores them."""
    _, _, checkpoint, backend, folder = loaded
    theirs = load_assistant(folder)
    for with_clusters in (False, theirs.clusters is not None):
        ours = load_assistant(convert_assistant(folder, with_clusters))
        assert ours.clusters is None
        same = {name: getattr(theirs.config, name) for name in ("rms_norm_eps", "family")}  # 32 bits; no word
        assert replace(ours.config, **same) == theirs.config
        assert ours.target_hidden_size == theirs.target_hidden_size
        for name, tensor in ours.tensors.items():
            np.testing.assert_array_equal(tensor.float32(), theirs.tensors[name].float32(), err_msg=name)
    (request,) = drive(backend, 2)
    request.extend([(7 * i) % VOCAB_SIZE for i in range(3, 30)])
    state = np.random.default_rng(1).standard_normal((1, checkpoint.config.hidden_size)).astype(np.float32)
    found, expected = (
        load_assistant_runner(one, backend).run(_batch(request, 5), state) for one in (ours, theirs)
    )
    scored = np.isfinite(expected.logits)
    assert np.isfinite(found.logits).all()
    np.testing.assert_allclose(found.logits[scored], expected.logits[scored], atol=1e-5)
    np.testing.assert_allclose(found.states, expected.states, atol=1e-5)


def test_drafts_of_a_gguf_file_are_accepted_as_those_of_its_folder(knowing):
    path = convert_assistant(knowing[1])
    llm = LLM(str(knowing[0]), backend="torch", speculative_config=f"assistant:{path}", max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    (output,) = llm.generate([[3, 4, 5]], params, use_tqdm=False)
    assert output.metrics.speculative.draft_acceptance_rate == 1
    with pytest.raises(UnsupportedModelError, match=r"a draft head, not a model.* --draft assistant:"):
        load_checkpoint(path)


def test_a_gguf_file_of_something_else_is_no_assistant(tmp_path):
    path = convert_head(saved(tmp_path, DFLASH))
    with pytest.raises(CheckpointError, match="no assistant of Gemma 4: its architecture is 'dflash'"):
        load_assistant(path)
