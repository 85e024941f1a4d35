"""/tokenize, /detokenize and /tokenizer_info: texts to token ids and back, in vLLM's format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from paceline.serve.http.bodies import json_route
from paceline.serve.http.errors import FieldError
from paceline.serve.http.sse import to_json
from paceline.serve.openai.answers import ASKS, READS, json_response
from paceline.serve.openai.chat_protocol import Message, TemplateFields
from paceline.serve.openai.fields import Body, Bool, Items, Name, TokenIds
from paceline.serve.routes.models import Models
from paceline.serve.service import Service
from paceline.serve.tools.chat_fields import FunctionTool, chat_tools

MAX_TOKENIZED = 2**18  # tokens that /tokenize returns at most, unless the context is longer
PIECE = 4096  # values of a list that are serialized in one call
TOKENIZER_CLASS = "PreTrainedTokenizerFast"  # of transformers: the one that loads any tokenizer.json
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class TokenizeRequest(TemplateFields):
    model: Name | None = None
    prompt: str | None = None  # either this
    messages: Annotated[Items[Message], Field(min_length=1)] | None = None  # or these
    tools: Items[FunctionTool] | None = None  # with messages
    add_special_tokens: Bool | None = None  # with a prompt; true by default
    return_token_strs: Bool | None = None


class Tokens(BaseModel):
    count: int
    max_model_len: int  # tokens of prompt and output together
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    model: Name | None = None
    tokens: TokenIds


class Text(BaseModel):
    prompt: str


class TokenizerInfo(BaseModel):
    """What clients with a tokenizer of their own need to imitate this one, such as lm-eval."""

    tokenizer_class: str
    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    pad_token: str | None = None
    chat_template: str | None
    vocab_size: int
    model_max_length: int  # tokens of prompt and output together


def router(models: Models) -> APIRouter:
    """The routes of the tokenizer."""
    routes = APIRouter(route_class=json_route(models), tags=["Tokens"])

    @routes.post("/tokenize", response_model=Tokens, responses=READS)
    async def tokenize(body: TokenizeRequest) -> Response:
        """The token ids of a prompt, or of a conversation as the model gets it."""
        service = models.reference(body.model)
        return await service.in_thread(_tokenized, service, body)

    @routes.post("/detokenize", response_model=Text, responses=READS)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids, special tokens included."""
        service = models.reference(body.model)
        return await service.in_thread(_detokenized, service, body)

    @routes.get("/tokenizer_info", response_model=TokenizerInfo, responses=ASKS)
    async def tokenizer_info() -> Response:
        """The tokenizer's special tokens and chat template."""
        service = models.default
        return json_response(
            {
                "tokenizer_class": TOKENIZER_CLASS,
                **dict.fromkeys(SPECIAL_TOKENS),
                **service.tokenizer.special_tokens,
                "chat_template": service.tokenizer.chat_template,
                "vocab_size": service.limits.vocab_size,
                "model_max_length": service.limits.max_model_len,
            }
        )

    return routes


def most_tokens(service: Service) -> int:
    """How many tokens a text may have that is only tokenized."""
    return max(MAX_TOKENIZED, service.limits.max_model_len)


def _tokenized(service: Service, body: TokenizeRequest) -> Response:
    tokens = _encode(service, body)
    size = service.limits.max_model_len
    parts = [f'"count":{len(tokens)},"max_model_len":{size},"tokens":{_json_list(tokens)}']
    if body.return_token_strs:
        spelled = [service.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokens]
        parts.append(f'"token_strs":{_json_list(spelled)}')
    return Response(f"{{{','.join(parts)}}}", media_type="application/json")


def _detokenized(service: Service, body: DetokenizeRequest) -> Response:
    size = service.limits.vocab_size
    highest = max(body.tokens, default=0)
    if highest >= size:
        raise FieldError("tokens", f"tokens has {highest}, but ids go from 0 to {size - 1}.")
    return json_response({"prompt": service.tokenizer.decode(body.tokens, skip_special_tokens=False)})


def _json_list(items: Sequence[object]) -> str:
    """The JSON of a list that may be long, in pieces: each call holds the GIL until it returns."""
    pieces = (to_json(items[start : start + PIECE])[1:-1] for start in range(0, len(items), PIECE))
    return f"[{','.join(pieces)}]"


def _encode(service: Service, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise FieldError("prompt", "give either a prompt or messages.")
    limit = most_tokens(service)
    if body.prompt is not None:
        return service.encode_text(body.prompt, body.add_special_tokens is not False, limit)
    plan = service.toolbox.plan(chat_tools(body.tools))
    messages = [message.plain() for message in body.messages or ()]
    text = service.chat_text(messages, plan, **body.template_options())
    return service.encode_text(text, False, limit)
