"""A draft model on the cpu backend: for itself, for a coarser copy, and loaded by name."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import tokenizers

from paceline import LLM
from paceline.backends.cpu import CpuBackend
from paceline.backends.options import BackendOptions
from paceline.core.params import SamplingParams
from paceline.core.trees import PLAIN
from paceline.draft.base import DraftSampling, Target
from paceline.draft.model.draft_cache import SharedPages
from paceline.draft.model.draft_model import DraftModelDrafter
from paceline.engine.admission import Limits
from paceline.errors import ConfigError
from paceline.kv.cache import KVCache
from paceline.models.registry import load_checkpoint, load_tokenizer
from paceline.models.tokenizer import byte_alphabet
from tests.draft.draft_models import MIXED, AgainstFresh, Plans, chain, model_drafter, same_ids, tree
from tests.engine.test_exactness_cpu import Tokenizer
from tests.engine.test_exactness_cpu import requests as cpu_requests
from tests.engines import new_engine
from tests.large import in_turn
from tests.tiny import save_checkpoint
from tests.tiny_families import SIZES, VOCAB_SIZE

ROWS = 64


def requests():
    """Half of the prompts of the engine's own test, with more penalties."""
    for number, (ids, params) in enumerate(list(cpu_requests())[:9]):
        options = [{}, {"presence_penalty": 0.7, "frequency_penalty": 0.4}, {"logit_bias": {7: 3.0}}][
            number // 3
        ]
        given = {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
        given |= {"repetition_penalty": params.repetition_penalty, "seed": number, "logprobs": 2}
        yield ids, SamplingParams(**given, **options, max_tokens=params.max_tokens, ignore_eos=True)


@pytest.fixture(scope="module", params=["qwen2", "mistral-window"])
def checkpoint(request, tmp_path_factory):
    return load_checkpoint(save_checkpoint(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def target(checkpoint):
    return CpuBackend.load(checkpoint, quantization="int8", threads=1, max_rows=ROWS)


@pytest.fixture(scope="module")
def twin(checkpoint):
    return CpuBackend.load(checkpoint, quantization="int8", threads=1, max_rows=ROWS)


@pytest.fixture(scope="module")
def finer(checkpoint):
    return CpuBackend.load(checkpoint, quantization="none", threads=1, max_rows=ROWS)


def drafter_of(backend, sampling=DraftSampling.COUPLED, kind=DraftModelDrafter):
    cache_of, vocabulary = partial(SharedPages, longest=256), same_ids(VOCAB_SIZE, VOCAB_SIZE)
    return model_drafter(backend, vocabulary, cache_of, sampling, kind, VOCAB_SIZE)


def run_engine(
    backend, drafter, *plans, num_pages=100, num_window_pages=None, rows=ROWS, max_num_seqs=9, times=1
):
    engine = new_engine(
        backend,
        Tokenizer(),
        Limits(VOCAB_SIZE, 160, max_num_seqs, rows),
        num_pages=num_pages,
        num_window_pages=num_window_pages,
        controller=Plans(*plans),
        drafters={drafter.name: drafter} if drafter else {},
    )
    for _ in range(times):
        added = [engine.add_request(ids, params)[0] for ids, params in requests()]
        while engine.has_unfinished:
            engine.step()
    assert not any(request.error or request.failed_drafters for request in added)
    return added, engine


def results(added):
    return [(request.output_token_ids, request.logprobs) for request in added]


@pytest.fixture(scope="module")
def plain(target, twin):
    return results(run_engine(target, drafter_of(twin), PLAIN)[0])


@pytest.mark.parametrize("budget", [1, 5])
def test_a_model_that_drafts_for_itself_is_always_right(target, twin, plain, budget):
    """At every temperature, with every option: keys and values, noise, penalties are the target's."""
    added, _ = run_engine(target, drafter_of(twin), chain(budget))
    assert results(added) == plain
    drafted = [request.speculative.num_draft_tokens for request in added]
    assert [request.speculative.num_accepted_draft_tokens for request in added] == drafted
    assert sum(drafted) > 30


def test_its_trees_are_right_at_least_at_the_first_level(target, twin, plain):
    added, _ = run_engine(target, drafter_of(twin), tree(6, 3))
    assert results(added) == plain
    assert all(request.speculative.acceptance_histogram[0] == 0 for request in added)


SETTINGS = {"chunks and prefix hits": {"rows": 24, "max_num_seqs": 4}, "preemption": {"num_pages": 14}}


@pytest.mark.parametrize(("sampling", "setting"), in_turn(DraftSampling, SETTINGS))
def test_a_finer_copy_drafts_the_same_with_and_without_a_past(target, finer, plain, sampling, setting):
    drafter = drafter_of(finer, sampling, AgainstFresh)
    added, engine = run_engine(target, drafter, *MIXED, times=2, **setting)
    assert results(added) == plain
    assert sum(request.speculative.num_accepted_draft_tokens for request in added) > 10
    assert drafter.compared > 30
    assert engine.scheduler.num_preemptions > 0 if "num_pages" in setting else engine.kv.prefix_hits > 0


def save_model(folder, family="qwen2", tokens=()):
    """A checkpoint with a byte-level vocabulary, in which these ids have other tokens."""
    save_checkpoint(family, folder)
    return save_tokenizer(folder, tokens)


def save_tokenizer(folder, tokens=()):
    letters = sorted(byte_alphabet())[:VOCAB_SIZE]
    for token, text in dict(tokens).items():
        letters[token] = text
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({text: i for i, text in enumerate(letters)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, and a draft in whose vocabulary 20 tokens are others."""
    other = {token: "ab" + "c" * token for token in range(40, 60)}
    make = tmp_path_factory.mktemp
    return save_model(make("model")), save_model(make("draft"), "llama", other)


def generate(model, speculative_config, **options):
    llm = LLM(model, speculative_config=speculative_config, threads=1, max_model_len=200, **options)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True)
    return llm.generate([list(range(3, 60))], params, use_tqdm=False)[0]


def test_loads_by_method_name(folders):
    model, _ = folders
    expected = generate(model, None)
    drafted = generate(model, {"method": "draft_model", "model": model, "num_speculative_tokens": 5})
    assert drafted.outputs[0].token_ids == expected.outputs[0].token_ids
    counts = drafted.metrics.speculative
    assert counts.num_accepted_draft_tokens == counts.num_draft_tokens == 24
    finer = generate(model, {"model": model, "quantization": "none", "max_model_len": 70})
    assert finer.outputs[0].token_ids == expected.outputs[0].token_ids
    assert 0 < finer.metrics.speculative.num_draft_tokens <= 4 * 13


def test_a_draft_with_another_vocabulary_only_if_asked(folders):
    model, draft = folders
    with pytest.raises(ConfigError, match=r"20 ids differ .*id 40 is .* use_heterogeneous_vocab"):
        generate(model, {"model": draft})
    drafted = generate(model, {"model": draft, "use_heterogeneous_vocab": True, "branching": 2})
    assert drafted.outputs[0].token_ids == generate(model, None).outputs[0].token_ids
    assert drafted.metrics.speculative.num_draft_tokens > 30
    assert drafted.metrics.speculative.failed_drafters == []


def test_only_a_draft_that_knows_every_id_of_the_target_drafts_on_the_device(folders, monkeypatch):
    """The device passes the target's ids to the draft model as they are."""
    monkeypatch.setattr(CpuBackend, "drafts_on_device", True)
    model, draft = folders
    checkpoint, options = load_checkpoint(Path(model)), BackendOptions(backend="cpu", threads=1)
    loaded = CpuBackend.load(checkpoint, quantization="int8", threads=1, max_rows=ROWS)
    target = Target(
        checkpoint.config, load_tokenizer(Path(model)), options, loaded, ROWS, DraftSampling.COUPLED
    )
    larger = replace(target, config=replace(checkpoint.config, vocab_size=VOCAB_SIZE + 1))

    def drafts_on_device(beside: Target, **keys) -> bool:
        loaded = DraftModelDrafter.load(DraftModelDrafter.Options(**keys), beside)
        return loaded.bind(KVCache(4, beside.loaded.page_size, 1, 64)).device is not None

    assert drafts_on_device(target, model=model)
    assert not drafts_on_device(larger, model=model)
    assert not drafts_on_device(target, model=draft, use_heterogeneous_vocab=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs a model: name an alias"),
        ({"model": ""}, "needs a model: name an alias"),
        ({"model": "m", "quantization": 8}, "quantization must be a text"),
        ({"model": "m", "max_model_len": 1}, "max_model_len of the draft model must be an integer from 2 up"),
        ({"model": "m", "use_heterogeneous_vocab": 1}, "use_heterogeneous_vocab must be True or False"),
        ({"model": "m", "draft_tensor_parallel_size": 0}, "must be an integer from 1 up"),
        ({"model": "m", "maxmodel_len": 9}, "did you mean 'max_model_len'"),
    ],
)
def test_wrong_options_are_refused_with_the_remedy(options, message):
    with pytest.raises(ConfigError) as error:
        DraftModelDrafter.Options(**options)
    assert message in str(error.value)


def test_a_draft_has_as_many_ranks_as_its_target_or_one(folders):
    model, draft = folders
    with pytest.raises(ConfigError, match=r"draft_tensor_parallel_size is 2.*is 1\. Leave it out\."):
        generate(model, {"model": draft, "draft_tensor_parallel_size": 2})


def test_a_context_longer_than_the_drafts_own_is_refused(folders):
    model, _ = folders
    most = SIZES["max_position_embeddings"]
    with pytest.raises(
        ConfigError, match=f"its context is {most}. Use at most {most}; requests that outgrow"
    ):
        generate(model, {"model": model, "max_model_len": most + 1})
