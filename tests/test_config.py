"""Options are refused when unknown or out of range; each component gets its own slice."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.config import EngineConfig
from paceline.errors import ConfigError


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
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (16, 512)
    assert config.backend.name == "cpu"


def test_auto_takes_torch_where_the_cpu_backend_cannot_run():
    assert EngineConfig.from_options(device="cuda").backend.name == "torch"
    assert EngineConfig.from_options(dtype="bfloat16").backend.name == "torch"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seq": 3}, "did you mean 'max_num_seqs'"),
        ({"nonsense": 3}, "The options are"),
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer from 1"),
        ({"max_num_seqs": 2.0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 8}, "at least max_num_seqs"),
        ({"backend": "tpu"}, "one of auto, cpu, torch"),
        ({"dtype": "int3"}, "dtype must be one of"),
        ({"backend": "cpu", "device": "cuda"}, "backend='torch'"),
        ({"backend": "cpu", "dtype": "bfloat16"}, "quantization instead"),
        ({"backend": "torch", "quantization": "int8"}, "takes dtype"),
        ({"threads": 0}, "threads"),
        ({"model": ""}, "model must be"),
        ({"model": 3}, "model must be"),
        ({"tokenizer": ""}, "tokenizer must be"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"kv_cache_memory_bytes": -1}, "kv_cache_memory_bytes"),
        ({"enable_prefix_caching": "yes"}, "True or False"),
        ({"seed": -1}, "seed"),
        ({"speculative_config": {"method": "eagle3"}}, "none yet"),
        ({"speculative_config": "ngram"}, "'off'"),
    ],
)
def test_what_cannot_be_meant_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options(**options)


def test_speculation_can_be_switched_off_by_name():
    assert EngineConfig.from_options(speculative_config=None) == EngineConfig.from_options()
    EngineConfig.from_options(speculative_config="off")
