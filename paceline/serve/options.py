"""The options of `paceline serve`: one frozen dataclass, like those of the engine in config.py."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields
from typing import Any

from paceline.errors import ConfigError
from paceline.options import (
    check_bool,
    check_choice,
    check_integer,
    check_number,
    check_text,
    refuse_unknown,
)
from paceline.serve.kv_events.options import KVEventsOptions
from paceline.serve.tools.formats import named_format

LOG_LEVELS = ("debug", "info", "warning", "error")
METRICS_PREFIXES = ("paceline", "vllm")
LOG_FORMATS = ("auto", "json", "text")
KEY_VARIABLE = "PACELINE_API_KEY"
_KEY = re.compile(r"[\x21-\x7e]{1,512}")
_ORIGIN = re.compile(r"\*|https?://[^\s/,]+")
_URL = re.compile(r"https?://[^\s/]+(/\S*)?")
_ROOT_PATH = re.compile(r"(/[\w.~-]+)*")


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class ServeOptions:
    """How a model is served. Times are in seconds; for limits in seconds, 0 means no limit."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    api_key: tuple[str, ...] = ()  # each of them is accepted; none: no key is needed
    share_cache_across_keys: bool = False  # false: each key has its own prefix cache and past responses
    served_model_name: tuple[str, ...] = ()  # names that clients may use; none: the model's own name
    lora_modules: tuple[str, ...] = ()  # NAME=FOLDER of adapters of the model, served as MODEL:NAME
    routes: str | None = None  # a routes file: several models, and virtual models over them
    max_queue: int = 256  # requests waiting for the engine; more get 429
    max_connections: int = 512  # more get 503
    max_body_bytes: int = 4 * 1024 * 1024  # of a request body; larger ones get 413
    request_timeout: float = 600.0  # from arrival to the last byte; then the request is aborted
    client_timeout: float = 60.0  # for a client to send its request, or to read what it was sent
    timeout_keep_alive: int = 30  # of an idle connection
    drain_timeout: float = 30.0  # for running requests to finish after the first SIGTERM
    stuck_timeout: float = 120.0  # without a finished step while there is work: /health then returns 503
    cors_origin: tuple[str, ...] = ()  # origins of web pages that may call this server
    tool_call_parser: str | None = None  # None: chosen by the model's chat template
    max_segments: int = 32  # segments with their own metrics; the others are counted as "other"
    metrics_prefix: str = "paceline"  # vllm: the metrics that vLLM has too are also served under its names
    kv_events_config: str | None = None  # vLLM's JSON; this or any of the following: publish KV events
    kv_events_endpoint: str | None = None
    kv_events_replay_endpoint: str | None = None
    kv_events_topic: str | None = None
    otlp_endpoint: str | None = None  # collector of OpenTelemetry traces, by OTLP/HTTP; None: no traces
    root_path: str = ""  # path prefix under which a proxy serves this API
    log_level: str = "info"
    log_format: str = "auto"  # auto: text on a terminal, json otherwise

    def __post_init__(self) -> None:
        check_integer(ConfigError, "port", self.port, 0, 65535)
        check_integer(ConfigError, "max_queue", self.max_queue, 0, 1_000_000)
        check_integer(ConfigError, "max_connections", self.max_connections, 1, 1_000_000)
        check_integer(ConfigError, "max_body_bytes", self.max_body_bytes, 1024, 1 << 32)
        check_integer(ConfigError, "timeout_keep_alive", self.timeout_keep_alive, 1, 86400)
        check_bool(ConfigError, "share_cache_across_keys", self.share_cache_across_keys)
        check_integer(ConfigError, "max_segments", self.max_segments, 0, 10_000)
        for name in ("request_timeout", "client_timeout", "drain_timeout", "stuck_timeout"):
            check_number(ConfigError, name, getattr(self, name), 0, 1e6)
        if not self.host.strip():
            raise ConfigError("host must be an address or a name of this machine, such as 127.0.0.1; got ''.")
        for key in self.api_key:  # never show the key itself
            if not _KEY.fullmatch(key):
                raise ConfigError("api_key must be 1 to 512 printable ASCII characters without spaces.")
        for name in self.served_model_name:
            if not name.strip() or len(name) > 256 or not name.isprintable():
                raise ConfigError(f"served_model_name must be 1 to 256 printable characters, got {name!r}.")
        if self.routes is not None:
            check_text(ConfigError, "routes", self.routes, "Give the path of a TOML file.")
        for origin in self.cors_origin:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origin must be '*' or an origin such as https://chat.example.org, got {origin!r}."
                )
        if not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(
                f"root_path must look like /llm, without a slash at its end, got {self.root_path!r}."
            )
        if self.otlp_endpoint is not None and not _URL.fullmatch(self.otlp_endpoint):
            raise ConfigError(
                "otlp_endpoint must be the URL of an OTLP/HTTP collector, such as http://localhost:4318, "
                f"got {self.otlp_endpoint!r}."
            )
        check_choice(ConfigError, "metrics_prefix", self.metrics_prefix, METRICS_PREFIXES)
        if (events := self.kv_events) and not events.publish_salted:
            self._refuse_events_of_keys()
        if self.tool_call_parser is not None:
            named_format(self.tool_call_parser)
        check_choice(ConfigError, "log_level", self.log_level, LOG_LEVELS)
        check_choice(ConfigError, "log_format", self.log_format, LOG_FORMATS)

    @property
    def separates_keys(self) -> bool:
        """Whether API keys share no cache with each other. With one key there is nothing to separate."""
        return len(set(self.api_key)) > 1 and not self.share_cache_across_keys

    @property
    def kv_events(self) -> KVEventsOptions | None:
        """How KV events are published; None: they are not."""
        return KVEventsOptions.from_flags(
            self.kv_events_config,
            endpoint=self.kv_events_endpoint,
            replay_endpoint=self.kv_events_replay_endpoint,
            topic=self.kv_events_topic,
        )

    def _refuse_events_of_keys(self) -> None:
        """Each of several API keys salts its prompts, and salted blocks are not published: there would be no
        events."""
        if self.separates_keys:
            raise ConfigError(
                "KV events leave out prompts with a cache salt, and each of several API keys has its own. "
                "Let the gateway check them, add --share-cache-across-keys, or publish their token ids too: "
                "--kv-events-config '{\"publish_salted\": true}'."
            )

    @staticmethod
    def from_flags(flags: dict[str, Any]) -> ServeOptions:
        """The options of a command line; the key of the environment is added to the keys."""
        lists = {item.name for item in fields(ServeOptions) if isinstance(item.default, tuple)}
        values: dict[str, Any] = {
            name: tuple(value or ()) if name in lists else value for name, value in flags.items()
        }
        if key := os.environ.get(KEY_VARIABLE):
            values["api_key"] = (*values.get("api_key", ()), key)
        return ServeOptions(**values)
