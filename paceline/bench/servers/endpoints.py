"""Streamed requests to any OpenAI-compatible server, arriving by a profile."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from paceline.bench.run.turns import Answer, Slices, Turn
from paceline.bench.servers import client
from paceline.bench.servers.client import ClientError, Server
from paceline.bench.servers.counters import NAMES, DraftCounters, read_counters
from paceline.bench.traffic.profiles import Profile
from paceline.bench.traffic.schemas import fits_schema
from paceline.bench.traffic.workloads import Prompt
from paceline.core.params import SamplingParams
from paceline.core.structured_outputs import StructuredOutputsParams
from paceline.errors import ConfigError

WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Endpoint:
    """A contestant: a server, or one method or model of a paceline server."""

    server: Server
    metrics: Server | None  # its path is that of the metrics page; None: acceptance is unknown
    extra: Mapping[str, Any] = field(default_factory=dict)  # added to every request
    ours: bool = False  # a paceline server: accepts a segment and a cache salt


@dataclass(frozen=True)
class ServedTask:
    """One prompt of a workload as an HTTP request."""

    id: str
    segment: str
    path: str
    body: Mapping[str, Any]
    structure: StructuredOutputsParams | None = None


def served_task(prompt: Prompt, model: str, number: int, temperature: float, constrain: bool) -> ServedTask:
    """The request for a prompt; its seed is its number."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": prompt.max_tokens,
        "temperature": temperature,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    wanted = prompt.structured_outputs if constrain else None
    if wanted is not None:
        schema = {"name": "answer", "schema": wanted["json"]} if "json" in wanted else None
        body["response_format"] = (
            {"type": "json_object"} if schema is None else {"type": "json_schema", "json_schema": schema}
        )
    structure = SamplingParams(structured_outputs=wanted).structure
    if prompt.messages is None:
        return ServedTask(
            prompt.id, prompt.segment, "/v1/completions", {**body, "prompt": prompt.text}, structure
        )
    body["messages"] = list(prompt.messages)
    if prompt.chat_template_kwargs:
        body["chat_template_kwargs"] = prompt.chat_template_kwargs
    return ServedTask(prompt.id, prompt.segment, "/v1/chat/completions", body, structure)


def metrics_page(url: str, api_key: str | None) -> Server:
    """The address of a metrics page; without a path, /metrics."""
    page = Server.at(url, api_key)
    return replace(page, path=urlsplit(url).path.rstrip("/") or "/metrics")


async def read_page(page: Server) -> DraftCounters:
    """The draft counters of a metrics page. ClientError if it has none."""
    answer = await client.get(page, "")
    counters = read_counters(answer.body.decode(errors="replace")) if answer.status == 200 else None
    if counters is None:
        why = f"has neither {NAMES}" if answer.status == 200 else f"answers with status {answer.status}"
        raise ClientError(
            f"{page.host}:{page.port}{page.path} {why}, so there is nothing to tell how drafts fared. Turn "
            "speculation and metrics on in that server, name the right page by --metrics, or leave it out."
        )
    return counters


class EndpointRunner:
    """A server that gets requests from this process."""

    def __init__(self, endpoint: Endpoint, salt: str) -> None:
        """`salt` separates this run from prefixes that others left in a paceline server's cache."""
        self._endpoint = endpoint
        self._salt = salt

    def slices(self, group: Sequence[ServedTask], profile: Profile) -> Slices:
        """All answers in one slice: a server cannot be paused. Incomplete ones have an error."""
        yield
        return asyncio.run(self._run(group, profile))

    def warm_up(self, group: Sequence[ServedTask], profile: Profile) -> None:
        """Generate a few tokens. What is wrong with every request is reported here."""
        short = replace(group[0], body={**group[0].body, "max_tokens": WARM_UP_TOKENS})
        answer = asyncio.run(self._ask(short, time.perf_counter()))
        if answer.error is not None:
            raise ConfigError(f"the server does not answer the first request: {answer.error}")

    def close(self) -> None:
        pass

    async def _run(self, group: Sequence[ServedTask], profile: Profile) -> Turn:
        page = self._endpoint.metrics
        before = None if page is None else await read_page(page)
        answers: list[Answer | None] = [None] * len(group)
        start = time.perf_counter()

        async def ask(index: int, arrival: float) -> None:
            task = group[index]
            if profile.lengths:
                most = min(task.body["max_tokens"], profile.lengths[index])
                task = replace(task, body={**task.body, "max_tokens": most})
            answers[index] = await self._ask(task, arrival)

        async def client_of(waiting: Iterator[int]) -> None:
            for index in waiting:
                await ask(index, time.perf_counter())

        async def due(index: int) -> None:
            await asyncio.sleep(max(0.0, start + profile.due[index] - time.perf_counter()))
            await ask(index, start + profile.due[index])

        if profile.concurrency is None:
            await asyncio.gather(*(due(index) for index in range(len(group))))
        else:
            waiting = iter(range(len(group)))  # shared: a free client takes the next
            await asyncio.gather(*(client_of(waiting) for _ in range(profile.concurrency)))
        seconds = time.perf_counter() - start
        whole = [answer for answer in answers if answer is not None]
        if page is None or before is None:
            return Turn(seconds, whole)
        after = await read_page(page)
        return Turn(seconds, whole, after.since(before), after.since_by_segment(before))

    async def _ask(self, task: ServedTask, arrival: float) -> Answer:
        body = {**task.body, **self._endpoint.extra}
        if self._endpoint.ours:
            body |= {"segment": task.segment, "cache_salt": self._salt}
        try:
            answer = await client.post(self._endpoint.server, task.path, body)
        except ClientError as error:  # a server under load may refuse connections
            return Answer([], 0, (), 0.0, error=str(error))
        return read_answer(answer, task, arrival)


def read_answer(answer: client.Answer, task: ServedTask, arrival: float) -> Answer:
    """A stream as an Answer, with times since the request's arrival."""
    if not answer.complete:
        message = (answer.error or {}).get("message") or answer.body[-200:].decode(errors="replace")
        reason = f"status {answer.status}: {message}" if answer.status else "the connection was closed"
        return Answer([], 0, (), 0.0, error=reason)
    if not answer.completion_tokens:
        raise ClientError(
            "the server tells no usage at the end of a stream, so its tokens cannot be counted: it must "
            "understand stream_options.include_usage."
        )
    end = answer.choices[-1][0] - arrival
    return Answer(
        token_ids=[],
        num_tokens=answer.completion_tokens,
        times=tuple(when - arrival for when, _ in answer.texts) or (end,),
        e2e_seconds=end,
        text=answer.text,
        finished=answer.finish_reason == "stop",
        valid=fits_schema(answer.text, task.structure),
        answered_by=answer.headers.get("x-routed-model"),
    )


async def served_model(server: Server) -> tuple[str, bool]:
    """The name of the server's first model, and whether the server is a paceline."""
    answer = await client.get(server, "/v1/models")
    try:
        if answer.status != 200:
            raise ValueError((answer.error or {}).get("message", f"status {answer.status}"))
        first = json.loads(answer.body)["data"][0]
        return str(first["id"]), first.get("owned_by") == "paceline"
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ClientError(
            f"{server.host}:{server.port} does not tell its models at /v1/models ({error}). Give the "
            "address of an OpenAI-compatible server, and --api-key if it wants one."
        ) from None
