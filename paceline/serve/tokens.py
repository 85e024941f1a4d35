"""/tokenize and /detokenize: texts and conversations to token ids and back, in vLLM's shape."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from paceline.serve.answers import READS, json_response
from paceline.serve.bodies import JsonRoute
from paceline.serve.chat_protocol import Message
from paceline.serve.errors import FieldError
from paceline.serve.fields import Body, Bool, Int, Name
from paceline.serve.service import Service
from paceline.serve.tools.chat_fields import FunctionTool, chat_tools


class TokenizeRequest(Body):
    model: Name | None = None
    prompt: str | None = None  # either this
    messages: Annotated[list[Message], Field(min_length=1)] | None = None  # or these
    tools: list[FunctionTool] | None = None  # with messages
    add_generation_prompt: Bool | None = None  # with messages; true by default
    add_special_tokens: Bool | None = None  # with a prompt; true by default
    return_token_strs: Bool | None = None


class Tokens(BaseModel):
    count: int
    max_model_len: int  # tokens of prompt and output together
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    model: Name | None = None
    tokens: list[Annotated[Int, Field(ge=0)]]


class Text(BaseModel):
    prompt: str


def router(service: Service) -> APIRouter:
    """The routes of the tokenizer."""
    routes = APIRouter(route_class=JsonRoute, tags=["Tokens"])

    @routes.post("/tokenize", response_model=Tokens, responses=READS)
    async def tokenize(body: TokenizeRequest) -> Response:
        """The token ids of a prompt, or of a conversation as the model gets it."""
        service.check_model(body.model)
        tokens = await _encode(service, body)
        answer: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": service.limits.max_model_len,
            "tokens": tokens,
        }
        if body.return_token_strs:
            spelled = [service.tokenizer.token_bytes(token) for token in tokens]
            answer["token_strs"] = [one.decode("utf-8", errors="replace") for one in spelled]
        return json_response(answer)

    @routes.post("/detokenize", response_model=Text, responses=READS)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids, special tokens included."""
        service.check_model(body.model)
        size = service.limits.vocab_size
        if any(token >= size for token in body.tokens):
            raise FieldError("tokens", f"tokens has {max(body.tokens)}, but ids go from 0 to {size - 1}.")
        text = await service.in_thread(service.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return json_response({"prompt": text})

    return routes


async def _encode(service: Service, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise FieldError("prompt", "give either a prompt or messages.")
    if body.prompt is not None:
        (tokens,) = await service.encode([body.prompt], body.add_special_tokens is not False)
        return tokens
    plan = service.toolbox.plan(chat_tools(body.tools))
    messages = [message.plain() for message in body.messages or ()]
    return await service.encode_chat(messages, plan, body.add_generation_prompt is not False)
