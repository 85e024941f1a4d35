"""The manifests in examples/gateways fit the server: its flags, its ports, its metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.backends.cpu.compiled_model import CompiledModel
from paceline.config import EngineConfig
from paceline.serve.options import ServeOptions
from paceline.terminal.flag_groups import ENGINE, SERVER
from tests.serve.observability.test_metrics import samples
from tests.serve.running import serving

FOLDER = Path(__file__).parents[2] / "examples" / "gateways"
# what llm-d's router and the inference extension read of an engine that they take for vLLM
VLLM_DEFAULTS = {
    "vllm:num_requests_waiting": set(),
    "vllm:num_requests_running": set(),
    "vllm:kv_cache_usage_perc": set(),
    "vllm:lora_requests_info": {"max_lora", "running_lora_adapters", "waiting_lora_adapters"},
    "vllm:cache_config_info": {"block_size", "num_gpu_blocks"},
}


def documents() -> dict[str, Any]:
    """All documents of the manifests, by their kind."""
    found = [one for file in sorted(FOLDER.glob("*.yaml")) for one in yaml.safe_load_all(file.read_text())]
    kinds = {document["kind"]: document for document in found}
    assert len(kinds) == len(found) >= 5
    return kinds


def container() -> dict[str, Any]:
    (found,) = documents()["Deployment"]["spec"]["template"]["spec"]["containers"]
    return dict(found)


def flags() -> dict[str, str]:
    """The flags of the Deployment, by their names in Python."""
    command, _model, *arguments = container()["args"]
    assert command == "serve"
    pairs = [argument.removeprefix("--").split("=", 1) for argument in arguments]
    return {name.replace("-", "_"): value for name, value in pairs}


def server_options() -> ServeOptions:
    given, known = flags(), {flag.name: flag for flag in SERVER}
    EngineConfig.from_options(**{name: given[name] for name in given.keys() & {flag.name for flag in ENGINE}})
    values: dict[str, Any] = {}
    for name in given.keys() - {flag.name for flag in ENGINE}:
        kind = known[name].kind
        values[name] = kind(given[name]) if kind in (int, float, str) else given[name]
    values["served_model_name"] = (values["served_model_name"],)
    return ServeOptions(**values)


def plugins() -> dict[str, dict[str, Any]]:
    return {
        plugin["type"]: plugin.get("parameters", {})
        for plugin in documents()["EndpointPickerConfig"]["plugins"]
    }


def test_the_flags_are_the_servers_and_the_ports_agree() -> None:
    options = server_options()
    assert options.kv_events is not None
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert ports == {"http": options.port, "kv-events": 5557, "kv-replay": 5558}
    assert options.kv_events.endpoint == f"tcp://*:{ports['kv-events']}"
    assert options.kv_events.replay_endpoint == f"tcp://*:{ports['kv-replay']}"
    kinds = documents()
    (target,) = kinds["InferencePool"]["spec"]["targetPorts"]
    assert target["number"] == options.port
    allowed = [port["port"] for rule in kinds["NetworkPolicy"]["spec"]["ingress"] for port in rule["ports"]]
    assert sorted(allowed) == sorted(ports.values())
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > options.drain_timeout


def test_the_pool_the_route_and_the_policy_select_the_pods() -> None:
    kinds = documents()
    labels = kinds["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for selector in (
        kinds["Deployment"]["spec"]["selector"],
        kinds["InferencePool"]["spec"]["selector"],
        kinds["NetworkPolicy"]["spec"]["podSelector"],
    ):
        assert selector["matchLabels"].items() <= labels.items()
    (rule,) = kinds["HTTPRoute"]["spec"]["rules"]
    assert [ref["name"] for ref in rule["backendRefs"]] == [kinds["InferencePool"]["metadata"]["name"]]
    engines = [engine["name"] for engine in plugins()["core-metrics-extractor"]["engineConfigs"]]
    assert labels["llm-d.ai/engine-type"] in engines


def test_the_picker_reads_metrics_that_the_server_has() -> None:
    with serving(metrics_prefix=flags()["metrics_prefix"]) as client:
        found = samples(client)
    (engine,) = plugins()["core-metrics-extractor"]["engineConfigs"]
    names = [value for key, value in engine.items() if key.endswith("Spec")]
    assert len(names) == 4
    for name in names:
        assert len(found[name]) == 1, name
    for name, labels in VLLM_DEFAULTS.items():
        ((has, _),) = found[name]
        assert labels <= has.keys(), name


def test_without_the_flag_vllms_names_are_not_there() -> None:
    with serving() as client:
        found = samples(client)
    assert VLLM_DEFAULTS.keys().isdisjoint(found)


def test_the_picker_follows_the_events_that_the_server_publishes() -> None:
    scorer, events = plugins()["precise-prefix-cache-scorer"], server_options().kv_events
    assert events is not None
    assert scorer["tokenProcessorConfig"]["blockSize"] == CompiledModel.page_size
    discovery = scorer["kvEventsConfig"]["podDiscoveryConfig"]
    assert events.endpoint.endswith(f":{discovery['socketPort']}")
    prefix, pod, model = events.topic.split("@")
    assert f"{prefix}@" == scorer["kvEventsConfig"]["topicFilter"]
    assert pod == "$(POD_IP):8000"
    assert model == flags()["served_model_name"]
    assert "POD_IP" in [variable["name"] for variable in container()["env"]]


@pytest.mark.parametrize("name", ["sources", "schedulingProfiles"])
def test_every_plugin_that_is_referred_to_is_declared(name: str) -> None:
    config = documents()["EndpointPickerConfig"]
    part = config["dataLayer"]["sources"] if name == "sources" else config["schedulingProfiles"]
    refs = yaml.safe_dump(part).split("pluginRef: ")[1:]
    assert len(refs) >= 4
    assert {ref.split("\n")[0].split()[0] for ref in refs} <= plugins().keys()
