"""`python -m benchmarks sampling MODEL`: tokens per second of sampling options on the device and on the host.

Both contestants are engines on the same backend and weights. One has a decoder that declares nothing but
truncation, so that requests with other options go through the host. They run in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

from benchmarks.engine.concurrency import run_requests
from benchmarks.turns import take_turns
from paceline.backends.async_decoding import AsyncDecoder
from paceline.backends.base import Backend
from paceline.bench.timing import OnTurn
from paceline.build import Loaded
from paceline.core.params import SamplingParams
from paceline.core.request import SamplingNeeds
from paceline.engine.engine import Engine

Run = tuple[float, list[tuple[list[int], list[Any]]]]  # seconds; tokens and logprobs of each request

TEMPERATURE = 0.8
BIAS = {5: 2.0, 7: -2.0}
EDITED = {"logprobs": 5, "logit_bias": BIAS}  # of the logits before the bias
MASKED = {"structured_outputs": {"regex": "[A-Za-z ,.]+"}}  # a mask for every token, and nothing is forced
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2}


@dataclass(frozen=True)
class Options:
    """The sampling options of a batch of requests."""

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)
    every: int = 1  # one request in `every` has them, the others have none


OPTIONS = (
    Options("none"),
    Options("logprobs=5", {"logprobs": 5}),
    Options("repetition_penalty, frequency_penalty", PENALTIES),
    Options("logit_bias", {"logit_bias": BIAS}),
    Options("structured_outputs", MASKED),
    Options("structured_outputs, logprobs=5", MASKED | {"logprobs": 5}),
    Options("1 request in 16: structured_outputs", MASKED, every=16),
    Options("1 request in 16: logit_bias, logprobs=5", EDITED, every=16),
    Options("1 request in 4: logit_bias, logprobs=5", EDITED, every=4),
)


@dataclass(frozen=True)
class SamplingSpeed:
    """Tokens per second of one set of options with one drafting method, best of the rounds."""

    options: str
    method: str
    device: float
    host: float
    differing: int  # requests whose tokens or log-probabilities are not the same on both

    @property
    def ratio(self) -> float:
        return self.device / self.host


def options_for(requests: int) -> list[Options]:
    """The options to measure with this many requests."""
    return [options for options in OPTIONS if options.every <= requests]


class HostSampling:
    """A decoder that declares nothing but truncation; all else is the given decoder's."""

    supported_sampling = SamplingNeeds.TRUNCATION

    def __init__(self, decoder: AsyncDecoder) -> None:
        self._decoder = decoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)


def build_pair(backend: Backend, build: Callable[[], Loaded]) -> tuple[Engine, Engine]:
    """Two engines, warmed up: the second samples all options but truncation on the host."""
    device = build().engine
    device.prepare()
    make = backend.make_async_decoder

    def narrowed(*arguments: Any, **options: Any) -> HostSampling | None:
        decoder = make(*arguments, **options)
        return None if decoder is None else HostSampling(decoder)

    with mock.patch.object(backend, "make_async_decoder", narrowed):
        host = build().engine
        host.prepare()
    return device, host


def measure_sampling(
    engines: Mapping[str, tuple[Engine, Engine]],
    prompts: Sequence[Sequence[int]],
    tokens: int,
    rounds: int,
    on_turn: OnTurn = lambda _: None,
) -> list[SamplingSpeed]:
    """The speed of each of the options, by drafting method. `engines`: by method, those of `build_pair`."""
    lines = []
    for options in options_for(len(prompts)):
        params = [_params(options, number, tokens) for number in range(len(prompts))]
        for method, (device, host) in engines.items():
            jobs = {
                "device": partial(_run, device, prompts, params),
                "host": partial(_run, host, prompts, params),
            }
            ((_, expected),) = take_turns(jobs, 1)["device"]  # compiles
            runs = take_turns(jobs, rounds)
            on_turn(f"{options.name}, {method}")
            on_device, on_host = (min([seconds for seconds, _ in runs[name]]) for name in jobs)
            outputs = [output for turns in runs.values() for _, output in turns]
            differing = sum(
                [len(set(map(repr, of_request))) > 1 for of_request in zip(expected, *outputs, strict=True)]
            )
            count = len(prompts) * tokens
            speed = SamplingSpeed(options.name, method, count / on_device, count / on_host, differing)
            lines.append(speed)
    return lines


def _run(engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Run:
    seconds, requests = run_requests(engine, prompts, params)
    return seconds, [(request.output_token_ids, request.logprobs) for request in requests]


def _params(options: Options, number: int, tokens: int) -> SamplingParams:
    values = options.values if number % options.every == 0 else {}
    return SamplingParams(temperature=TEMPERATURE, seed=number, max_tokens=tokens, ignore_eos=True, **values)
