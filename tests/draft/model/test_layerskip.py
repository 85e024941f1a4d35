"""layerskip: the first layers of the target draft for all of them, over the target's own keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from paceline import LLM
from paceline.backends.cpu import CpuBackend
from paceline.backends.options import BackendOptions
from paceline.backends.torch.backend import TorchBackend
from paceline.core.params import SamplingParams
from paceline.core.trees import PLAIN, DraftPlan, DraftTrees
from paceline.draft.base import DraftSampling, Target
from paceline.draft.model.draft_cache import SharedPages, TargetPages
from paceline.draft.model.draft_model import DraftModelDrafter
from paceline.draft.model.layerskip import LayerSkipDrafter, LayerSkipOptions, usual_exit_layer
from paceline.draft.speculative_config import parse_speculative_config
from paceline.errors import ConfigError
from paceline.kv.cache import KVCache
from paceline.models.files.layout import expected_tensors
from paceline.models.registry import load_checkpoint
from tests.backends.driver import drive
from tests.backends.driver import run as run_pass
from tests.draft.draft_models import AgainstFresh, HazyToy, drafting_engine, model_drafter, same_ids
from tests.draft.model.test_draft_model_cpu import ROWS, run_engine, save_model
from tests.draft.model.test_draft_model_cpu import results as all_results
from tests.engine.test_exactness import requests, result
from tests.engine.test_exactness_cpu import Tokenizer
from tests.engines import Later
from tests.large import in_turn
from tests.tiny import save_checkpoint
from tests.tiny_families import SIZES, VOCAB_SIZE
from tests.toy import ToyBackend
from tests.toy import drain as drain_plain

LAYERS = SIZES["num_hidden_layers"]
BACKENDS = {
    "cpu": lambda checkpoint: CpuBackend.load(checkpoint, quantization="int8", threads=1, max_rows=ROWS),
    "torch": lambda checkpoint: TorchBackend.load(checkpoint, max_rows=ROWS),
}


def plan(*shape: int) -> DraftPlan:
    return DraftPlan("layerskip", *shape)


MIXED = (PLAIN, plan(1), plan(4), plan(6, 2), plan(9, 3), plan(5, 4, 2))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return load_checkpoint(save_checkpoint("qwen2-some-windows", tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request, checkpoint):
    return BACKENDS[request.param](checkpoint)


@pytest.fixture(scope="module")
def plain(backend, checkpoint):
    return results(backend, run_engine(backend, drafter_of(backend, checkpoint, 1), PLAIN)[0])


def results(backend, added):
    """Of the torch backend tokens alone: its log-probabilities are equal up to rounding."""
    return [
        (tokens, logprobs if backend.batch_invariant else None) for tokens, logprobs in all_results(added)
    ]


def drafter_of(backend, checkpoint, exit_layer, sampling=DraftSampling.COUPLED, kind=LayerSkipDrafter):
    options = BackendOptions(backend=backend.name)
    target = Target(checkpoint.config, Tokenizer(), options, backend, ROWS, sampling)
    return Later(kind.load(LayerSkipOptions(exit_layer), target))


def toy_drafter(target, early, kind=LayerSkipDrafter):
    """`early` plays the first layers of the toy."""
    return model_drafter(early, same_ids(), lambda kv, _: TargetPages(kv, target), kind=kind)


class AgainstFewerLayers(LayerSkipDrafter):
    """Compares every proposal with that of a model that has no other layers, with pages of its own."""

    alone: DraftModelDrafter
    compared = 0

    def propose(self, wanted: Sequence, plans: Sequence[DraftPlan]) -> DraftTrees:
        proposed = super().propose(wanted, plans)
        for number, (request, one) in enumerate(zip(wanted, plans, strict=True)):
            if request.num_pending == 1:
                expected = AgainstFresh._expected(self.alone, request, one)
                assert proposed.tree_lists(number) == expected.tree_lists(0)
                self.compared += 1
        return proposed


def without_later_layers(checkpoint, count):
    """A checkpoint of its own, which has the first layers only."""
    windows = checkpoint.config.sliding_windows[:count]
    config = replace(checkpoint.config, num_layers=count, sliding_windows=windows)
    tensors = {name: checkpoint.tensors[name] for name, _ in expected_tensors(config)}
    return replace(checkpoint, config=config, tensors=tensors)


CASES = {
    "coupled, chunks and prefix hits": (DraftSampling.COUPLED, 2, {"rows": 24, "max_num_seqs": 4}),
    "greedy, preemption": (DraftSampling.GREEDY, 1, {"num_pages": 14}),
    "drawn, preemption": (DraftSampling.INDEPENDENT, 2, {"num_pages": 14}),
}


@pytest.mark.parametrize(
    ("backend", "case"), in_turn({name: name for name in BACKENDS}, CASES), indirect=["backend"]
)
def test_layerskip_drafts_as_a_model_of_its_layers_and_changes_no_byte(checkpoint, backend, plain, case):
    sampling, exit_layer, setting = case
    drafter = drafter_of(backend, checkpoint, exit_layer, sampling, AgainstFewerLayers)
    few = BACKENDS[backend.name](without_later_layers(checkpoint, exit_layer))
    pages, vocabulary = partial(SharedPages, longest=256), same_ids(VOCAB_SIZE, VOCAB_SIZE)
    alone = model_drafter(few, vocabulary, pages, sampling, vocab_size=VOCAB_SIZE)
    drafter.alone = alone.bind(KVCache(100, few.page_size, max_sequences=1, max_length=160))
    added, engine = run_engine(backend, drafter, *MIXED, times=2, **setting)
    assert results(backend, added) == plain
    assert drafter.compared > 30
    assert engine.scheduler.num_preemptions > 0 if "num_pages" in setting else engine.kv.prefix_hits > 0


def test_all_layers_draft_what_all_layers_say(checkpoint, backend, plain):
    """At every temperature, with every option."""
    added, _ = run_engine(backend, drafter_of(backend, checkpoint, LAYERS), plan(5))
    assert results(backend, added) == plain
    drafted = [request.speculative.num_draft_tokens for request in added]
    assert [request.speculative.num_accepted_draft_tokens for request in added] == drafted
    assert sum(drafted) > 30


def test_layerskip_has_no_cache_and_nothing_to_catch_up_on():
    target, early = ToyBackend(max_rows=128), HazyToy()
    drafter = toy_drafter(target, early)
    engine = drafting_engine(drafter, plan(3), backend=target)
    engine.add_request(list(range(2, 32)), SamplingParams(max_tokens=30, ignore_eos=True))
    drain_plain(engine)
    assert drafter.needs.bytes_per_page == 0
    assert drafter._cache.pool is engine._pool
    assert len(early.batches) > 6
    assert set(early.batches) == {(1, 1)}  # the last token, then one row a level


def test_early_layers_leave_the_features_of_the_target_alone(backend):
    (request,) = drive(backend, 2)
    features = run_pass([request.ask(range(5, 17))], feature_layers=(1, 2)).features
    before = features.copy()
    request.backend = backend.first_layers(2)
    run_pass([request.ask(range(40, 52))])
    assert (features == before).all()


class Erased(LayerSkipDrafter):
    """Puts rubbish where its rows were written, and behind."""

    def propose(self, wanted: Sequence, plans: Sequence[DraftPlan]) -> DraftTrees:
        proposed = super().propose(wanted, plans)
        pool, kv = self._cache.pool, self._cache._kv
        for request, one in zip(wanted, plans, strict=True):
            for index in range(request.num_computed, len(request.token_ids) + one.budget):
                page = int(kv.page_tables[request.slot, index // kv.page_size])
                pool.tokens[page * kv.page_size + index % kv.page_size] = -999
        return proposed


@pytest.mark.parametrize(
    "setting", [{}, {"num_pages": 26, "max_model_len": 100}], ids=["roomy", "preemption"]
)
def test_the_target_never_reads_what_a_draft_wrote(alone, setting):
    """The toy's logits are a hash of all that it reads in its pool."""
    target = ToyBackend(max_rows=128)
    drafter = toy_drafter(target, HazyToy(), Erased)
    engine = drafting_engine(drafter, *MIXED, backend=target, **setting)
    for _ in range(2):  # the second time with prefix hits
        added = [engine.add_request(ids, params)[0] for ids, params in requests()]
        drain_plain(engine)
    assert [result(request) for request in added] == alone
    assert not any(request.failed_drafters for request in added)
    drafted = sum(request.speculative.num_draft_tokens for request in added)
    assert 20 < sum(request.speculative.num_accepted_draft_tokens for request in added) < drafted
    assert engine.scheduler.num_preemptions > 0 or not setting


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def generate(model, speculative_config, **options):
    llm = LLM(model, speculative_config=speculative_config, threads=1, max_model_len=200, **options)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    return llm.generate([list(range(3, 60))], params, use_tqdm=False)[0]


def test_loads_by_method_name(model):
    expected = generate(model, None).outputs[0].token_ids
    whole = {"method": "layerskip", "exit_layer": LAYERS}
    hybrid = {"method": "hybrid", "fallback": {"method": "layerskip"}, "combine": "tree", "branching": 2}
    for config in ("layerskip", "layerskip:2", whole, hybrid):
        drafted = generate(model, config)
        assert drafted.outputs[0].token_ids == expected
        counts = drafted.metrics.speculative
        assert counts.num_draft_tokens > 10
        assert counts.failed_drafters == []
        assert counts.num_accepted_draft_tokens == counts.num_draft_tokens or config is not whole


def test_a_quarter_of_the_layers_drafts_by_default():
    assert [usual_exit_layer(layers) for layers in (1, 3, 16, 30, 32)] == [1, 1, 4, 7, 8]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"exit_layer": 0}, "exit_layer must be an integer from 1 up, got 0"),
        ({"exit_layer": "two"}, "exit_layer must be an integer from 1 up, got 'two'"),
        ({"exit_layer": 4}, "exit_layer must be an integer from 1 to 3, got 4. The target has 3 layers"),
        ({"exit_lyer": 2}, "unknown option 'exit_lyer' .* did you mean 'exit_layer'"),
    ],
)
def test_wrong_options_are_refused_with_the_remedy(model, config, message):
    with pytest.raises(ConfigError, match=message):
        generate(model, {"method": "layerskip", **config})


def test_the_short_form_takes_a_number():
    (config,) = parse_speculative_config("layerskip:7").drafters.values()
    assert config.options.exit_layer == 7
    with pytest.raises(ConfigError, match=r"'layerskip:seven' names no drafting method.*layerskip:LAYERS"):
        parse_speculative_config("layerskip:seven")


def test_layerskip_needs_the_targets_pages():
    """Its guesses are written where that pass writes what it chooses."""
    assert LayerSkipDrafter.needs.target_pages
    assert not DraftModelDrafter.needs.target_pages
