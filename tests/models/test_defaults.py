"""A key that a config.json lacks means what it means to transformers, or the file is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.errors import PacelineError
from paceline.models.config import ModelConfig
from paceline.models.families.config_reader import model_config
from paceline.models.families.table import FAMILIES, OTHER_NAMES

TOLD_BY_TENSORS = {"num_key_value_heads", "q_lora_rank", "tie_word_embeddings"}  # whose shapes are checked
ALWAYS_THERE = {"rope_parameters"}  # the default's scaling is that of one published model
LIKE_OTHERS = {"layer_types"}  # of layers that are all alike, the list says nothing
UNKNOWN = {"mimo", "kimi_k2"}  # to transformers
PARTIAL = {"glm4_moe", "glm4v_moe_text"}  # default heads of 42 numbers, of which half cannot be rotated


def default_config(family: str) -> dict[str, Any]:
    """The config.json of a family with all keys, by transformers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values: dict[str, Any] = json.loads(CONFIG_MAPPING[family]().to_json_string(use_diff=False))
    values.pop("per_layer_config", None)  # of Gemma 4: files have none
    return values | {"architectures": ["ForCausalLM"]}


def read(values: dict[str, Any]) -> ModelConfig | None:
    """What a config.json says; None: it is refused."""
    try:
        return model_config(values, "config.json")
    except PacelineError:
        return None


@pytest.mark.parametrize("family", sorted({*FAMILIES, *OTHER_NAMES} - UNKNOWN - PARTIAL))
def test_a_missing_key_means_what_transformers_takes(family: str) -> None:
    values = default_config(family)
    expected = read(values)
    assert expected is not None
    others = {}
    for key in values.keys() - TOLD_BY_TENSORS - ALWAYS_THERE - LIKE_OTHERS:
        found = read({name: value for name, value in values.items() if name != key})
        if found not in (None, expected):
            others[key] = values[key]
    assert others == {}
