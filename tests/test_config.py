"""Options are refused when unknown or out of range; each component gets its own slice."""

from __future__ import annotations

import dataclasses
import re
import sys

import pytest

from paceline import machine
from paceline.backends import options as backend_options
from paceline.config import EngineConfig
from paceline.core.trees import PLAIN, DraftPlan
from paceline.draft.base import DraftSampling
from paceline.errors import ConfigError
from paceline.machine import Gpu


def test_options_reach_the_slice_they_belong_to():
    config = EngineConfig.from_options(
        model="m.gguf", max_num_seqs=3, threads=2, seed=9, enable_prefix_caching=False
    )
    assert config.model.model == "m.gguf"
    assert config.scheduler.max_num_seqs == 3
    assert config.backend.threads == 2
    assert not config.cache.enable_prefix_caching
    assert config.seed == 9
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1


def test_defaults():
    config = EngineConfig.from_options()
    assert config.model.model == "smollm2-135m"
    assert (config.scheduler.max_num_seqs, config.max_num_batched_tokens) == (16, 512)
    assert config.backend.name == "cpu"


def test_a_gpu_has_larger_passes_unless_asked_otherwise():
    def rows(**options):
        return EngineConfig.from_options(backend="cuda", **options).max_num_batched_tokens

    assert (rows(), rows(max_num_seqs=3000), rows(max_num_batched_tokens=300)) == (2048, 3000, 300)


@pytest.mark.parametrize("method", ["suffix", "hybrid"])
def test_share_suffix_cache_is_an_option_of_the_engine_or_of_the_method(method):
    entry = {"method": method, **({"fallback": {"method": "ngram"}} if method == "hybrid" else {})}

    def shared(entry, **options):
        speculative = EngineConfig.from_options(speculative_config=[entry, "ngram"], **options).speculative
        return speculative.speculation().drafters[method].options.share_suffix_cache

    assert shared(entry) == "responses"
    assert shared(entry, share_suffix_cache="prompts") == "prompts"
    assert shared({**entry, "share_suffix_cache": "prompts"}) == "prompts"
    assert shared({**entry, "share_suffix_cache": "prompts"}, share_suffix_cache="off") == "off"


NO_GPU = Gpu(missing="no NVIDIA driver is loaded")
H200 = Gpu("NVIDIA H200")


@pytest.mark.parametrize(
    ("gpu", "options", "name", "device", "why"),
    [
        (NO_GPU, {}, "cpu", "cpu", "no NVIDIA driver is loaded"),
        (NO_GPU, {"dtype": "bfloat16"}, "torch", "cpu", "no NVIDIA driver.*only torch"),
        (NO_GPU, {"device": "cuda"}, "cuda", "cuda", "device cuda was asked for"),
        (NO_GPU, {"backend": "cuda"}, "cuda", "cuda", "as asked for"),
        (NO_GPU, {"backend": "torch"}, "torch", "cpu", "as asked for"),
        (H200, {}, "cuda", "cuda", "found NVIDIA H200"),
        (H200, {"dtype": "bfloat16"}, "cuda", "cuda", "found NVIDIA H200"),
        (H200, {"dtype": "float32"}, "cpu", "cpu", "float32"),
        (H200, {"device": "cpu"}, "cpu", "cpu", "device cpu was asked for"),
        (H200, {"device": "cuda:1"}, "cuda", "cuda:1", "device cuda:1 was asked for"),
        (H200, {"backend": "cpu"}, "cpu", "cpu", "as asked for"),
        (H200, {"backend": "torch", "device": "cuda"}, "torch", "cuda", "as asked for"),
    ],
)
def test_backend_and_device_are_inferred_from_each_other(monkeypatch, gpu, options, name, device, why):
    monkeypatch.setattr(backend_options, "find_gpu", lambda: gpu)
    choice = EngineConfig.from_options(**options).backend.choice
    assert (choice.name, choice.device) == (name, device)
    assert re.search(why, choice.why)


def test_without_a_driver_torch_is_not_imported_to_look_for_a_gpu(monkeypatch):
    monkeypatch.setattr(machine, "GPU_FILES", ("/no/such/file",))
    monkeypatch.setitem(sys.modules, "torch", None)  # an import would fail
    assert machine.find_gpu.__wrapped__().missing == "no NVIDIA driver is loaded"


def test_a_gpu_without_triton_is_not_used(monkeypatch):
    monkeypatch.setattr(machine, "GPU_FILES", ("/",))
    monkeypatch.setattr(machine, "find_spec", lambda name: None if name == "triton" else name)
    assert "triton is not installed" in machine.find_gpu.__wrapped__().missing


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seq": 3}, "did you mean 'max_num_seqs'"),
        ({"nonsense": 3}, "The options are"),
        ({"trust_remote_code": True}, "an option of vLLM.*Leave it out: code of checkpoints is never run"),
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer from 1"),
        ({"max_num_seqs": 2.0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 8}, "at least max_num_seqs"),
        ({"backend": "tpu"}, "one of auto, cpu, torch"),
        ({"dtype": "int3"}, "dtype must be one of"),
        ({"backend": "cpu", "device": "cuda"}, "backend='cuda'"),
        ({"backend": "cpu", "dtype": "bfloat16"}, "quantization instead"),
        ({"backend": "torch", "quantization": "native"}, "one of auto, none, int8, int4, fp8, got"),
        ({"backend": "cuda", "device": "cuda", "quantization": "q2"}, "one of auto, none, native, int8"),
        ({"backend": "cuda", "device": "cpu"}, "use device='cuda'"),
        ({"dtype": "float16"}, "backend='cuda'"),
        ({"threads": 0}, "threads"),
        (
            {"share_suffix_cache": "all"},
            "share_suffix_cache must be one of responses, prompts, off, got 'all'",
        ),
        ({"exact": "yes"}, "True or False"),
        ({"exact": True, "backend": "torch"}, "always exact"),
        (
            {"exact": True, "speculative_config": {"method": "ngram", "verification": "block"}},
            "'block' keeps the distribution.*'pathwise'",
        ),
        ({"model": ""}, "model must be"),
        ({"model": 3}, "model must be"),
        ({"draft": "suffix"}, "is speculative_config here"),
        ({"speculative_config": "off,suffix"}, "'off' stands alone"),
        ({"tokenizer": ""}, "tokenizer must be"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"kv_cache_memory_bytes": -1}, "kv_cache_memory_bytes"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be a number above 0"),
        ({"enable_prefix_caching": "yes"}, "True or False"),
        ({"seed": -1}, "seed"),
        ({"speculative_config": {"method": "guess"}}, "method must be one of ngram, suffix"),
        ({"speculative_config": {"num_speculative_tokens": 3}}, "method must be one of"),
        (
            {"speculative_config": "guess"},
            "'guess' names no drafting method. Use off, auto, model:PATH",
        ),
        (
            {"speculative_config": "sufix"},
            "'sufix' names no drafting method: did you mean 'suffix'\\? Use off",
        ),
        ({"speculative_config": "medsua:head"}, "did you mean 'medusa'"),
        ({"speculative_config": "model:"}, "names no drafting method. Use off"),
        (
            {"speculative_config": "suffix:5"},
            'suffix takes nothing after.*--draft .{"method": "suffix", "num_speculative_tokens": 5}',
        ),
        ({"speculative_config": "eagle3:3"}, "eagle3 takes PATH after the colon. If 3 is a length"),
        ({"speculative_config": 3}, "must be an object"),
        ({"speculative_config": []}, "must be an object"),
        ({"speculative_config": '{"method": '}, "is not JSON"),
        (
            {"speculative_config": {"method": "ngram", "lookup": 3}},
            "unknown option 'lookup'.*prompt_lookup_max",
        ),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": -1}}, "0 is plain decoding"),
        ({"speculative_config": {"method": "ngram", "branching": 2}}, "ngram drafts chains"),
        ({"speculative_config": {"method": "ngram", "verification": "hope"}}, "one of pathwise, rejection"),
        (
            {"speculative_config": {"method": "ngram", "rejection_sample_method": "synthetic"}},
            "standard or block",
        ),
        ({"speculative_config": {"method": "ngram", "draft_sample_method": "best"}}, "probabilistic, greedy"),
        ({"speculative_config": {"method": "suffix", "branching": 2, "verification": "block"}}, "traversal"),
        ({"speculative_config": "ngram,suffix,ngram"}, "'ngram' twice"),
        (
            {
                "speculative_config": {"method": "ngram", "num_speculative_tokens": 64},
                "max_num_batched_tokens": 64,
            },
            "at most 64 rows.*Use at most 63",
        ),
        (
            {
                "speculative_config": [
                    {"method": "ngram", "verification": "block"},
                    {"method": "suffix", "verification": "pathwise"},
                ]
            },
            "share one",
        ),
    ],
)
def test_invalid_configurations_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options(**options)


def speculation(given):
    return EngineConfig.from_options(speculative_config=given).speculative.speculation()


def test_speculation_can_be_switched_off():
    assert EngineConfig.from_options(speculative_config="auto") == EngineConfig.from_options()
    assert not speculation(None).drafters
    assert not speculation("off").drafters
    assert speculation({"method": "ngram", "num_speculative_tokens": 0}).default_plan == PLAIN


def test_the_short_form_the_object_and_its_json_mean_the_same():
    expected = speculation({"method": "ngram"})
    assert speculation("ngram") == speculation('{"method": "ngram"}') == speculation(["ngram"]) == expected
    assert speculation("model:a/b").drafters["draft_model"].options.model == "a/b"
    assert speculation({"model": "a/b"}) == speculation("model:a/b")


def test_the_first_of_several_drafters_is_the_default():
    both = speculation(
        [{"method": "suffix", "num_speculative_tokens": 5, "branching": 2, "depth": 3}, "ngram"]
    )
    assert list(both.drafters) == ["suffix", "ngram"]
    assert both.default_plan == DraftPlan("suffix", 5, branching=2, depth=3)
    assert speculation("suffix,ngram").drafters.keys() == both.drafters.keys()


def test_drafts_are_sampled_as_the_rule_needs():
    assert speculation("ngram").sampling is DraftSampling.COUPLED
    assert speculation({"method": "ngram", "verification": "block"}).sampling is DraftSampling.INDEPENDENT
    standard = speculation({"method": "ngram", "rejection_sample_method": "standard"})
    assert (standard.rule, standard.sampling) == ("rejection", DraftSampling.INDEPENDENT)
    greedy = speculation({"method": "ngram", "draft_sample_method": "greedy"})
    assert greedy.sampling is DraftSampling.GREEDY
