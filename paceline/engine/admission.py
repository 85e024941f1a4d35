"""Admission: check a user's request, derive seeds, and make one Request for each of the n outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.constrain.compiler import Grammar
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.core.trees import PLAIN, DraftPlan
from paceline.draft.methods import METHODS, PLAN_KEYS, parse_plan
from paceline.errors import RequestError
from paceline.models.detokenizer import Detokenizer
from paceline.options import unknown_option
from paceline.verify.noise import derive_seed
from paceline.verify.sampling import Sampler


class TextTokenizer(Protocol):
    """The part of a tokenizer that requests need."""

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


@dataclass(frozen=True)
class Limits:
    """The engine's limits, under vLLM's names."""

    vocab_size: int
    max_model_len: int  # tokens of a request, prompt and output
    max_num_seqs: int  # requests of a pass
    max_num_batched_tokens: int  # rows of a pass
    draft_trees: bool = True  # the verification rule takes trees, not only chains


def make_requests(
    request_id: str,
    index: int,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    limits: Limits,
    tokenizer: TextTokenizer,
    engine_seed: int,
    pool_tokens: int,
    now: float,
    plans: Mapping[str, DraftPlan] | None = None,
    grammar: Grammar | None = None,
    segment: str = "",
    cache_salt: str = "",
) -> list[Request]:
    """One Request for each of the n outputs. `index` is the order of arrival.

    Seeds: a request without one gets derive_seed(engine seed, index), so a program that sends the same
    requests in the same order gets the same answers. Child 0 has the request's seed, child i
    derive_seed(seed, i). `plans` has the default plan of each of the engine's drafters; the first is the
    default. `grammar` is the compiled structured_outputs of the params.
    """
    prompt = _checked_prompt(prompt_token_ids, limits)
    _check_ids(params, limits.vocab_size)
    room = limits.max_model_len - len(prompt)
    max_output = room if params.max_tokens is None else min(params.max_tokens, room)
    if len(prompt) + max_output > pool_tokens:
        raise RequestError(
            f"the request needs room for {len(prompt) + max_output} tokens ({len(prompt)} of prompt, "
            f"{max_output} of output), but the KV cache holds {pool_tokens}. "
            "Shorten it, or raise kv_cache_memory_bytes."
        )
    plan = _asked_plan(params.speculative, plans or {}, limits)
    seed = derive_seed(engine_seed, index) if params.seed is None else params.seed
    ending_ids = frozenset(params.stop_ids)
    if grammar is not None or not params.ignore_eos:  # a grammar can force the end
        ending_ids |= tokenizer.eos_ids
    children: list[Request] = []
    for child in range(params.n):
        child_seed = derive_seed(seed, child) if child else seed
        constraint = None if grammar is None else grammar.start(params.ignore_eos)
        children.append(
            Request(
                request_id=request_id,
                child=child,
                arrival_order=(index, child),
                prompt_token_ids=prompt,
                params=params,
                seed=child_seed,
                max_output=max_output,
                ending_ids=ending_ids,
                sampler=Sampler(params, child_seed, prompt, ending_ids, constraint),
                detokenizer=Detokenizer(tokenizer, params),
                arrival_time=now,
                segment=segment,
                cache_salt=cache_salt,
                plan=plan,
                leader=children[0] if child else None,
            )
        )
    return children


def _checked_prompt(prompt_token_ids: Sequence[int], limits: Limits) -> list[int]:
    """The prompt as a list of ints. RequestError if it does not fit the limits."""
    try:
        prompt = [token.__index__() for token in prompt_token_ids]
    except (AttributeError, TypeError):
        raise RequestError(
            f"prompt_token_ids must be a list of integers, got {prompt_token_ids!r:.80}."
        ) from None
    if not prompt:
        raise RequestError("the prompt is empty: give at least one token (a text, or token ids).")
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= limits.vocab_size:
        raise RequestError(
            f"token id {low if low < 0 else high} is outside the vocabulary: ids go from 0 to "
            f"{limits.vocab_size - 1}. Use ids of this model's own tokenizer."
        )
    if len(prompt) >= limits.max_model_len:
        raise prompt_too_long(len(prompt), limits)
    return prompt


def prompt_too_long(count: int, limits: Limits, exact: bool = True) -> RequestError:
    """The error for a prompt of `count` tokens; of more than `count`, if that is not exact."""
    less = f" by {count - limits.max_model_len + 1} tokens" if exact else ""
    return RequestError(
        f"the prompt has {'' if exact else 'more than '}{count} tokens and the context holds "
        f"{limits.max_model_len}, at least one of them output. Shorten the prompt{less}, or raise "
        "max_model_len if the model allows it."
    )


def _asked_plan(
    speculative: str | Mapping[str, Any] | None, plans: Mapping[str, DraftPlan], limits: Limits
) -> DraftPlan | None:
    """The plan that a request's `speculative` asks for; None: the engine decides."""
    if speculative is None or speculative == "auto":
        return None
    if speculative == "off":
        return PLAIN
    options = {"method": speculative} if isinstance(speculative, str) else speculative
    for key in options:
        if key not in PLAN_KEYS:
            raise RequestError(unknown_option(str(key), PLAN_KEYS, "speculative"))
    name = str(options.get("method", next(iter(plans), "none")))
    if name not in plans:
        loaded = f"It has {', '.join(plans)}" if plans else "It has none"
        raise RequestError(
            f"speculative asks for the drafter {name!r}, which this engine has not loaded. {loaded}; "
            "name it in the engine's speculative_config, or use 'off'."
        )
    trees = limits.draft_trees and (name not in METHODS or METHODS[name].trees)
    plan = parse_plan(RequestError, options, plans[name], name, trees)
    if plan.budget >= limits.max_num_batched_tokens:
        raise RequestError(
            f"num_speculative_tokens is {plan.budget}, but a pass has at most "
            f"{limits.max_num_batched_tokens} rows, one of them for the request's last token. "
            f"Use at most {limits.max_num_batched_tokens - 1}, or raise max_num_batched_tokens."
        )
    return plan


def _check_ids(params: SamplingParams, vocab_size: int) -> None:
    """RequestError if logit_bias or stop_token_ids have ids outside the vocabulary."""
    for name, ids in (("logit_bias", params.logit_bias or {}), ("stop_token_ids", params.stop_ids)):
        for token in ids:
            if token >= vocab_size:
                raise RequestError(
                    f"{name} names token id {token}, but ids go from 0 to {vocab_size - 1}. "
                    "Use ids of this model's own tokenizer."
                )
