"""The options of KV events: `--kv-events-config` as vLLM takes it, and a flag for each common field."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from paceline.errors import ConfigError
from paceline.options import check_bool, check_choice, check_integer, refuse_unknown

PUBLISHERS = ("zmq", "null")
ENCODINGS = ("map", "array")
_ENDPOINT = re.compile(r"tcp://\S+:(\d{1,5}|\*)|ipc://\S+")
# vLLM binds where it finds a wildcard and connects otherwise; 0.0.0.0 can only mean bind
_BOUND = re.compile(r"tcp://(0\.0\.0\.0:.*|.*\*.*|.*::.*)|ipc://.*")


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class KVEventsOptions:
    """How KV events are published; names and defaults are those of vLLM's KVEventsConfig."""

    endpoint: str = "tcp://*:5557"  # PUB socket; with a wildcard it binds, else it connects to a subscriber
    replay_endpoint: str | None = None  # ROUTER socket that replays the last batches; None: no replay
    topic: str = ""  # the first frame of each message; llm-d expects kv@POD_IP:PORT@MODEL
    buffer_steps: int = 10_000  # batches kept for replay
    hwm: int = 100_000  # batches queued for one slow subscriber; more are dropped for it
    max_queue_size: int = 100_000  # batches waiting to be sent; more are dropped
    # the form of an event: a map with a "type" (vLLM since June 2026), or an array that begins with the type
    # (vLLM before, and gateways that read only that)
    encoding: str = "map"
    publish_salted: bool = False  # also publish blocks of prompts with a cache salt, and so their token ids

    def __post_init__(self) -> None:
        _check_endpoint("endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            _check_endpoint("replay_endpoint", self.replay_endpoint)
            if not binds(self.replay_endpoint):
                raise ConfigError(
                    "kv_events replay_endpoint must be an address to bind, such as tcp://*:5558, got "
                    f"{self.replay_endpoint!r}."
                )
        if not isinstance(self.topic, str):
            raise ConfigError(f"kv_events topic must be text, got {self.topic!r}.")
        check_integer(ConfigError, "kv_events buffer_steps", self.buffer_steps, 1, 1_000_000)
        check_integer(ConfigError, "kv_events hwm", self.hwm, 1, 100_000_000)
        check_integer(ConfigError, "kv_events max_queue_size", self.max_queue_size, 1, 100_000_000)
        check_choice(ConfigError, "kv_events encoding", self.encoding, ENCODINGS)
        check_bool(ConfigError, "kv_events publish_salted", self.publish_salted)

    @staticmethod
    def from_flags(config: str | None, **flags: str | None) -> KVEventsOptions | None:
        """The options of vLLM's JSON and of the flags beside it; None if there are to be no events."""
        fields = {name: value for name, value in flags.items() if value is not None}
        if config is None and not fields:
            return None
        parsed = {} if config is None else _parse(config)
        wanted = parsed.pop("enable_kv_cache_events", True)
        check_bool(ConfigError, "enable_kv_cache_events of --kv-events-config", wanted)
        publisher = parsed.pop("publisher", "zmq")
        check_choice(ConfigError, "publisher of --kv-events-config", publisher, PUBLISHERS)
        for name in fields.keys() & parsed.keys():
            raise ConfigError(
                f"{name} is in --kv-events-config and in --kv-events-{name.replace('_', '-')}: give it once."
            )
        options = KVEventsOptions(**parsed | fields)
        return options if wanted and publisher == "zmq" else None


def binds(endpoint: str) -> bool:
    """Whether this endpoint is bound, so that subscribers connect to it, and not the other way round."""
    return _BOUND.fullmatch(endpoint) is not None


def _parse(config: str) -> dict[str, Any]:
    try:
        parsed = json.loads(config)
    except ValueError as error:
        raise ConfigError(f"--kv-events-config is not JSON: {error}.") from error
    if not isinstance(parsed, dict):
        raise ConfigError('--kv-events-config must be a JSON object, such as {"endpoint": "tcp://*:5557"}.')
    return parsed


def _check_endpoint(name: str, endpoint: object) -> None:
    if not isinstance(endpoint, str) or not _ENDPOINT.fullmatch(endpoint):
        raise ConfigError(
            f"kv_events {name} must be a ZeroMQ address such as tcp://*:5557 (binds) or "
            f"tcp://gateway:5557 (connects), got {endpoint!r}."
        )
