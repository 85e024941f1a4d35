"""Models: the served models by name, real and virtual, and how a request gets its answer from them.

This layer knows services only by what every endpoint uses of them, so it does not matter whether their
engines run in this process or elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.requests import Request

from paceline.engine.admission import PromptTooLong
from paceline.errors import OverloadedError, UnavailableError
from paceline.serve.engines import EngineGroup
from paceline.serve.http.errors import ApiError
from paceline.serve.openai.generation import Generation, segment_of
from paceline.serve.openai.protocol import Routed, SamplingFields
from paceline.serve.queue_slots import QueueSlots
from paceline.serve.routes.file import RouteTable
from paceline.serve.routes.kinds import CascadeRoute, FallbackRoute, RequestProfile, RuleRoute, WeightRoute
from paceline.serve.routes.trail import Trail, Visit
from paceline.serve.service import Prepared, Service, unless_gone

SESSION_HEADER = "x-session-id"  # splits requests without a user


Body = TypeVar("Body", bound=SamplingFields)
PreparedT = TypeVar("PreparedT", bound=Prepared)


@dataclass(frozen=True)
class Attempt(Generic[PreparedT]):
    """A model's answer to a request, running or finished."""

    service: Service
    prepared: PreparedT
    generation: Generation
    asked: str  # the name that the client used; answers carry it
    trail: Trail

    @property
    def routed(self) -> Routed | None:
        """How the request came to this model; None if the client named it."""
        trail = self.trail
        if not trail.is_routed or trail.model is None:
            return None
        return Routed(
            model=trail.model,
            routes=trail.routes,
            escalations=trail.escalations,
            fallbacks=trail.fallbacks,
        )


class Models:
    """All models of a server. Every endpoint finds the service of a request here."""

    def __init__(self, services: Mapping[str, Service], table: RouteTable | None = None) -> None:
        """`services` are the real models by name; several names may have the same one."""
        self.services = services
        self.table = table or RouteTable.of(*services)
        engines = list(dict.fromkeys(service.engine for service in services.values()))
        self.engines = EngineGroup(engines)
        self.queue_slots = QueueSlots(engines)

    @staticmethod
    def of(service: Service) -> Models:
        """One model, under all its names."""
        return Models(dict.fromkeys(service.model_names, service))

    @property
    def default(self) -> Service:
        """The service of requests that name no model."""
        return self.reference(None)

    @property
    def num_adapters(self) -> int:
        """The number of LoRA adapters, of all models."""
        named = ((id(service), service.adapter_of(name)) for name, service in self.services.items())
        return len({(model, adapter) for model, adapter in named if adapter})

    def check(self, name: str | None) -> str:
        """The name to answer with. Raises ApiError 404 if the request names another model."""
        if name is None:
            return self.table.default
        if name not in self.table.names:
            served = " or ".join(map(repr, self.table.names))
            message = f"the model {name[:200]!r} is not served here; use {served}."
            raise ApiError(404, message, "model", "model_not_found")
        return name

    def reference(self, name: str | None) -> Service:
        """The service whose tokenizer counts for a name: of those it may lead to, the one with the longest
        context, and the first of several."""
        return self.services[self.reference_model(self.check(name))]

    def reference_model(self, name: str) -> str:
        """The name of that service's model."""
        reachable = self.table.reachable(name)
        return max(reachable, key=lambda model: self.services[model].limits.max_model_len)

    def max_model_len(self, name: str) -> int:
        """The context that every model behind a name has."""
        return min(self.services[model].limits.max_model_len for model in self.table.reachable(name))

    async def generate(
        self,
        request: Request,
        name: str | None,
        body: Body,
        prepare: Callable[[Service, Body], PreparedT],
    ) -> Attempt[PreparedT]:
        """The answer to a request, from the model `name` or from one that its route leads to.

        `prepare` tokenizes the body for a model; it runs in a worker thread.
        """
        asked = self.check(name)
        with self.engines.routing():
            return await _Routing(self, request, body, prepare, asked).answer(asked)


class _Routing(Generic[Body, PreparedT]):
    """One request on its way through virtual models."""

    def __init__(
        self,
        models: Models,
        request: Request,
        body: Body,
        prepare: Callable[[Service, Body], PreparedT],
        asked: str,
    ) -> None:
        self._models = models
        self._request = request
        self._body = body
        self._prepare = prepare
        self._asked = asked
        self._prepared: dict[str, PreparedT] = {}  # by real model
        self._trail = Trail()
        request.state.record.trail = self._trail

    async def answer(
        self, name: str, needs_logprobs: bool = False, within: tuple[Visit, ...] = ()
    ) -> Attempt[PreparedT]:
        """The answer of a real or virtual model. `needs_logprobs`: a cascade reads them."""
        route = self._models.table.routes.get(name)
        if route is None:
            return await self._attempt(name, needs_logprobs, within)
        visit = Visit(name)
        self._trail.visits.append(visit)
        within = (*within, visit)
        match route:
            case RuleRoute():
                return await self.answer(
                    route.choose(await self._profile(name, route)), needs_logprobs, within
                )
            case WeightRoute():
                return await self.answer(route.choose(name, self._key()), needs_logprobs, within)
            case CascadeRoute():
                return await self._cascade(route, needs_logprobs, within)
            case FallbackRoute():
                return await self._fallback(route, needs_logprobs, within)

    async def _attempt(
        self, name: str, needs_logprobs: bool, within: tuple[Visit, ...]
    ) -> Attempt[PreparedT]:
        """The running answer of a real model."""
        service, state = self._models.services[name], self._request.state
        state.queue_slot.move_to(service.engine)
        prepared = await self._prepare_for(name)
        state.record.warnings[:] = prepared.warnings  # without those of an earlier attempt
        adapter = service.adapter_of(name)
        generation = await service.start(self._request, prepared, self._body, needs_logprobs, adapter)
        for visit in within:
            visit.attempts.append((name, generation))
        self._trail.model = name
        return Attempt(service, prepared, generation, self._asked, self._trail)

    async def _cascade(
        self, route: CascadeRoute, needs_logprobs: bool, within: tuple[Visit, ...]
    ) -> Attempt[PreparedT]:
        """The first answer that is good enough, or that of the last model."""
        *smaller, largest = route.models
        for name in smaller:
            try:
                attempt = await self.answer(name, needs_logprobs or route.reads_logprobs, within)
            except PromptTooLong:  # for this model's context
                within[-1].escalations += 1
                continue
            if await self._is_good(route, attempt):
                return attempt
            within[-1].escalations += 1
        return await self.answer(largest, needs_logprobs, within)

    async def _is_good(self, route: CascadeRoute, attempt: Attempt[PreparedT]) -> bool:
        """Whether an answer may be sent, once it has ended. An answer that failed may not."""
        generation, prepared = attempt.generation, attempt.prepared
        try:
            await unless_gone(self._request, generation.ended())
        finally:
            generation.abort()  # only if the client has gone, or one of its outputs failed
        outputs = generation.outputs_with_logprobs
        if len(outputs) < len(prepared.prompts):
            return False
        return await attempt.service.in_thread(route.accepts, outputs, prepared.params.structure)

    async def _fallback(
        self, route: FallbackRoute, needs_logprobs: bool, within: tuple[Visit, ...]
    ) -> Attempt[PreparedT]:
        """The answer of the first model that takes the request."""
        *preferred, last = route.models
        for name in preferred:
            try:
                return await self.answer(name, needs_logprobs, within)
            except (OverloadedError, UnavailableError):
                within[-1].fallbacks += 1
        return await self.answer(last, needs_logprobs, within)

    async def _profile(self, name: str, route: RuleRoute) -> RequestProfile:
        """What the rules of a route see of the request."""
        segment = segment_of(self._request, self._body)
        if not route.reads_prompt:
            return RequestProfile(segment)
        model = self._models.reference_model(name)
        prepared = await self._prepare_for(model)
        service = self._models.services[model]
        text = prepared.user_text
        if text is None:
            text = await service.in_thread(_decoded, service, prepared)
        longest = max(map(len, prepared.prompts))
        return RequestProfile(segment, longest, prepared.params.structure is not None, text)

    async def _prepare_for(self, name: str) -> PreparedT:
        """The request as a real model gets it; prepared once."""
        if name not in self._prepared:
            service = self._models.services[name]
            self._prepared[name] = await service.in_thread(self._prepare, service, self._body)
        return self._prepared[name]

    def _key(self) -> str:
        """What is split among models: the user, else the session, else the request."""
        session = self._request.headers.get(SESSION_HEADER)
        return self._body.user or session or str(self._request.state.request_id)


def _decoded(service: Service, prepared: Prepared) -> str:
    return "\n".join(service.tokenizer.decode(prompt) for prompt in prepared.prompts)


def user_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """The texts of a conversation's user messages."""
    contents = [message.get("content") or "" for message in messages if message["role"] == "user"]
    return "\n".join(
        content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)
        for content in contents
    )
