"""Admission: check a user's request, derive seeds, and make one Request for each of the n outputs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

from paceline.constrain.compiler import Grammar
from paceline.core.detokenizer import Detokenizer, TextTokenizer, Watch
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.core.sampling import SamplingState
from paceline.core.trees import PLAIN, DraftPlan
from paceline.draft.methods import find_method, method_names
from paceline.draft.speculative_config import PLAN_KEYS, parse_plan
from paceline.errors import GrammarError, RequestError
from paceline.options import check_bool, nearest, unknown_option
from paceline.verify.noise import derive_seed
from paceline.words import counted

REQUEST_KEYS = (*PLAN_KEYS, "strict")  # of a request's `speculative`


@dataclass(frozen=True)
class Limits:
    """The engine's limits, under vLLM's names."""

    vocab_size: int
    max_model_len: int  # tokens of a request, prompt and output
    max_num_seqs: int  # requests of a pass
    max_num_batched_tokens: int  # rows of a pass
    draft_trees: bool = True  # the verification rule takes trees, not only chains


class RequestOptions(TypedDict, total=False):
    """What a request may have besides its prompt and its sampling parameters."""

    segment: str  # kind of traffic, for statistics
    cache_salt: str  # only requests with the same one share cached pages and past responses
    adapter: str  # one of the backend's; "": none
    grammar: Grammar | None  # the compiled structured_outputs of the params
    watch: Callable[[], Watch] | None  # makes a Watch for each output, which may end it by its text
    # By child, the tokens of unfinished outputs that another engine began. Only these children are made, and
    # they continue token for token as they would have there. Needs the request's seed.
    resume: Mapping[int, Sequence[int]] | None


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
    **options: Unpack[RequestOptions],
) -> list[Request]:
    """One Request for each of the n outputs. `index` is the order of arrival.

    Seeds: a request without one gets derive_seed(engine seed, index), so a program that sends the same
    requests in the same order gets the same answers. Child 0 has the request's seed, child i
    derive_seed(seed, i). `plans` has the default plan of each of the engine's drafters; the first is the
    default.
    """
    grammar, watch, resume = options.get("grammar"), options.get("watch"), options.get("resume")
    adapter, cache_salt = options.get("adapter", ""), options.get("cache_salt", "")
    prompt = _checked_prompt(prompt_token_ids, limits)
    _check_ids(params, limits.vocab_size)
    bad_words = bad_word_tokens(params.bad_texts, tokenizer)
    room = limits.max_model_len - len(prompt)
    max_output = room if params.max_tokens is None else min(params.max_tokens, room)
    if len(prompt) + max_output > pool_tokens:
        raise RequestError(
            f"the request needs room for {len(prompt) + max_output} tokens ({len(prompt)} of prompt, "
            f"{max_output} of output), but the KV cache holds {pool_tokens}. "
            "Shorten it, or raise kv_cache_memory_bytes."
        )
    plan, unavailable = _requested_plan(params.speculative, plans or {}, limits)
    seed = derive_seed(engine_seed, index) if params.seed is None else params.seed
    ending_ids = frozenset(params.stop_ids)
    if grammar is not None or not params.ignore_eos:  # a grammar can force the end
        ending_ids |= tokenizer.eos_ids
    children: list[Request] = []
    for child in range(params.n) if resume is None else _checked_children(resume, params.n):
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
                sampling=SamplingState(params, child_seed, prompt, ending_ids, constraint, bad_words),
                detokenizer=Detokenizer(tokenizer, params, None if watch is None else watch()),
                arrival_time=now,
                segment=options.get("segment", ""),
                # keys, values and answers of an adapter are its own, whatever salt a client sends
                cache_salt=f"{adapter}\0{cache_salt}" if adapter or "\0" in cache_salt else cache_salt,
                adapter=adapter,
                plan=plan,
                unavailable_drafter=unavailable,
                leader=children[0] if children else None,
            )
        )
        if resume is not None:
            _replay(children[-1], resume[child], limits.vocab_size)
    return children


def _checked_children(resume: Mapping[int, Sequence[int]], count: int) -> list[int]:
    """The children to resume, in order."""
    children = sorted(resume)
    if not children or children[0] < 0 or children[-1] >= count:
        raise RequestError(f"resume names the outputs {children}, but must name some of 0 to {count - 1}.")
    return children


def _replay(request: Request, tokens: Sequence[int], vocab_size: int) -> None:
    """Bring a new request to the state in which it has these output tokens; their text is not given again."""
    remedy = "Resume an output with the tokens that it has got from the same request."
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise RequestError(f"resume has token id {token}, which is outside the vocabulary. {remedy}")
        ends = request.ends_by(token, request.num_output)
        try:
            request.sampling.advance(token)
        except GrammarError as error:
            raise RequestError(f"resume has tokens that the grammar forbids ({error}) {remedy}") from None
        request.token_ids.append(token)
        stop = request.detokenizer.append(token, request.num_output)
        if ends or stop is not None or request.detokenizer.ended:
            raise RequestError(f"resume has an output that has already ended. {remedy}")
    request.detokenizer.take()


def bad_word_tokens(words: Sequence[str], tokenizer: TextTokenizer) -> list[list[int]]:
    """The token sequences of words, each at the start of a text and after a space, as vLLM encodes them."""
    spellings = dict.fromkeys(
        text for word in words for text in ((word.lstrip(), " " + word.lstrip()) if word.strip() else (word,))
    )
    sequences = [tokenizer.encode(text, add_special_tokens=False) for text in spellings]
    return [sequence for sequence in sequences if sequence]


def _checked_prompt(prompt_token_ids: Sequence[int], limits: Limits) -> list[int]:
    """The prompt as a list of ints. RequestError if it does not fit the limits."""
    try:
        prompt = list(map(operator.index, prompt_token_ids))
    except TypeError:
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


class PromptTooLong(RequestError):
    """A prompt does not fit into the context; it has at least `count` tokens."""

    def __init__(self, message: str, count: int) -> None:
        super().__init__(message)
        self.count = count


def prompt_too_long(count: int, limits: Limits, exact: bool = True) -> PromptTooLong:
    """The error for a prompt of `count` tokens; of more than `count`, if that is not exact."""
    excess = count - limits.max_model_len + 1
    less = f" by {counted(excess, 'tokens')}" if exact else ""
    return PromptTooLong(
        f"the prompt has {'' if exact else 'more than '}{count} tokens and the context holds "
        f"{limits.max_model_len}, at least one of them output. Shorten the prompt{less}, or raise "
        "max_model_len if the model allows it.",
        count,
    )


def _requested_plan(
    speculative: str | Mapping[str, Any] | None, plans: Mapping[str, DraftPlan], limits: Limits
) -> tuple[DraftPlan | None, str | None]:
    """The plan that a request's `speculative` asks for (None: the engine decides), and the method that it
    names if the engine has not loaded it. Such a request is served without the method, which only costs
    speed; it is an error only if the request is `strict`."""
    if speculative is None or speculative == "auto":
        return None, None
    if speculative == "off":
        return PLAIN, None
    options = {"method": speculative} if isinstance(speculative, str) else speculative
    for key in options:
        if key not in REQUEST_KEYS:
            raise RequestError(unknown_option(str(key), REQUEST_KEYS, "speculative"))
    strict = check_bool(RequestError, "strict", options.get("strict", False))
    name = str(options.get("method", next(iter(plans), "none")))
    if name not in plans:
        _check_method(name, plans, strict)
    method = find_method(name)  # None: a drafter that was given to the engine
    trees = limits.draft_trees and (method is None or method.trees)
    plan = parse_plan(RequestError, options, plans.get(name), name, trees)
    if name not in plans:
        return (None, name) if plan.budget else (PLAIN, None)
    if plan.budget >= limits.max_num_batched_tokens:
        raise RequestError(
            f"num_speculative_tokens is {plan.budget}, but a pass has at most "
            f"{limits.max_num_batched_tokens} rows, one of them for the request's last token. "
            f"Use at most {limits.max_num_batched_tokens - 1}, or raise max_num_batched_tokens."
        )
    return plan, None


def _check_method(name: str, plans: Mapping[str, DraftPlan], strict: bool) -> None:
    """RequestError if no method has this name, or if it is not loaded and the request is strict about it."""
    known = method_names()
    if name not in known:
        raise RequestError(
            f"speculative names the method {name!r}, which does not exist"
            f"{nearest(name, [*known, *plans]) or '.'} This engine has {', '.join(plans)}; 'auto' lets it "
            "decide, 'off' drafts nothing."
        )
    if strict:
        raise RequestError(
            f"speculative asks for the drafter {name!r}, which this engine has not loaded. It has "
            f"{', '.join(plans)}; name it in the engine's speculative_config, or leave out strict to be "
            "served with the engine's default."
        )


def _check_ids(params: SamplingParams, vocab_size: int) -> None:
    """RequestError if an option names token ids outside the vocabulary."""
    named: dict[str, Iterable[int]] = {
        "logit_bias": params.logit_bias or (),
        "stop_token_ids": params.stop_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
    }
    for name, ids in named.items():
        for token in ids:
            if token >= vocab_size:
                raise RequestError(
                    f"{name} names token id {token}, but ids go from 0 to {vocab_size - 1}. "
                    "Use ids of this model's own tokenizer."
                )
