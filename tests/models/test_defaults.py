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
    for key in values.keys() - TOLD_BY_TENSORS - LIKE_OTHERS:
        found = read({name: value for name, value in values.items() if name != key})
        if found not in (None, expected):
            others[key] = values[key]
    assert others == {}


ROPE_KEYS = {"rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
ROPES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "null": {"rope_parameters": None, "rope_scaling": None},
    "empty": {"rope_scaling": {}},
    "theta": {"rope_theta": 12345.0},
    "scaling": {"rope_scaling": YARN},
    "scaling and theta": {"rope_scaling": YARN, "rope_theta": 12345.0},
    "parameters and scaling": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5.0},
        "rope_scaling": YARN,
    },
}
SCALED = {"scaling", "scaling and theta", "parameters and scaling"}
# what transformers refuses, or reads otherwise than was meant: it gives olmo3's theta to the layers
# without a window alone, and ignores the scaling, or the theta, of families that are younger than these keys
OTHERWISE: dict[str, set[str]] = {
    "olmo3": {"theta", "scaling and theta", "parameters and scaling"},  # the last is for different layers
    "gemma3_text": {"parameters and scaling"},
    "cohere2_moe": SCALED,
    "mellum": {"empty"} | SCALED,
    "phi3": SCALED,
    "qwen2_vl": SCALED,
    "qwen2_5_vl": SCALED,
}
NOT_FROM_FILES = {"time_step_limit"}  # which transformers does not read as it writes it


def with_kinds_of_layers(values: dict[str, Any]) -> dict[str, Any]:
    """The same, with windows in all layers but the last, if layers have kinds."""
    if set(values.get("layer_types") or ()) != {"full_attention"} or "sliding_window" not in values:
        return values
    windows = ["sliding_attention"] * (values["num_hidden_layers"] - 1)
    return values | {"layer_types": [*windows, "full_attention"], "sliding_window": 1024}


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", sorted({*FAMILIES, *OTHER_NAMES} - UNKNOWN))
def test_what_a_file_lacks_of_a_rope_is_what_transformers_takes(family: str, rope: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if rope in OTHERWISE.get(family, ()):
        pytest.skip("transformers refuses such a file, or reads it in another way")
    values = with_kinds_of_layers(default_config(family))
    values = {name: value for name, value in values.items() if name not in ROPE_KEYS | NOT_FROM_FILES}
    if family in PARTIAL:
        values["head_dim"] = 64
    whole = CONFIG_MAPPING[family].from_dict(json.loads(json.dumps(values | ROPES[rope])))
    complete = json.loads(whole.to_json_string(use_diff=False))
    complete.pop("per_layer_config", None)
    expected, found = read(complete), read(values | ROPES[rope])
    assert expected is not None
    assert found == expected
