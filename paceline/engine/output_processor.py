"""OutputProcessor: appends the tokens of a pass to its requests, commits their KV, and ends requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.request import Request
from paceline.core.schedule import Scheduled
from paceline.core.verdict import Verdict
from paceline.kv.cache import KVCache


@dataclass(slots=True)
class Delta:
    """What one step added to one request."""

    request: Request  # its detokenizer has the text
    token_ids: tuple[int, ...]


class OutputProcessor:
    """Advances requests by the verdicts of a pass."""

    def __init__(self, kv: KVCache, clock: Callable[[], float]) -> None:
        self._kv = kv
        self._clock = clock

    def advance(self, part: Scheduled, verdict: Verdict, room: int, on_device: bool = False) -> Delta:
        """The delta of a request: its tokens appended, their KV committed, the request ended if it must.

        Pages for `room` tokens beyond them stay reserved. `on_device`: the pass itself has accepted the
        tokens and advanced the recurrent states.
        """
        request, tokens = part.request, verdict.tokens
        if verdict.error is not None:
            self.end(request, "error", error=verdict.error)
            return Delta(request, ())
        if request.first_token_time is None and tokens:
            request.first_token_time = self._clock()
        tokens, reason = append_tokens(request, tokens)
        if verdict.logprobs:
            request.logprobs.extend(verdict.logprobs[: len(tokens)])
        accepted = verdict.accepted
        if len(accepted) > len(tokens):  # an accepted token has ended the request
            accepted = accepted[: len(tokens)]
        rows = part.num_tokens + len(accepted)
        if not accepted or accepted[-1] == len(accepted) - 1:  # contiguous, since paths ascend
            self._kv.commit(request.slot, request.token_ids, rows, (), room, on_device)
        else:
            moved = [part.num_tokens + node for node in accepted]
            self._kv.commit(request.slot, request.token_ids, part.num_tokens, moved, room)
        request.num_computed += rows
        if reason is not None:
            self.end(request, reason)
        return Delta(request, tokens)

    def end(self, request: Request, reason: str, error: Exception | None = None) -> None:
        """End a request. The scheduler removes it later."""
        request.finish_reason = reason
        request.error = error
        request.finished_time = self._clock()
        request.detokenizer.finish()


def append_tokens(request: Request, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], str | None]:
    """The tokens up to the one that ends the request, now appended to it, and the finish reason or None."""
    if request.detokenizer.may_stop:
        return append_one_by_one(request, tokens)
    room = request.most_tokens - len(request.token_ids)
    if len(tokens) > room:
        tokens = tokens[:room]
    reason = "length" if len(tokens) == room else None
    if not request.ending_ids.isdisjoint(tokens):
        last = next(count for count, token in enumerate(tokens) if token in request.ending_ids)
        before, tokens = tokens[:last], tokens[: last + 1]
        request.token_ids.extend(before)
        request.detokenizer.extend(before)
        return tokens, _append_token(request, tokens[last])
    request.token_ids.extend(tokens)
    request.detokenizer.extend(tokens)
    return tokens, reason


def append_one_by_one(request: Request, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], str | None]:
    """`append_tokens` for a request that a stop string can end: each token is decoded at once."""
    for count, token in enumerate(tokens, start=1):
        reason = _append_token(request, token)
        if reason is not None:
            return tokens[:count], reason
    return tokens, None


def _append_token(request: Request, token: int) -> str | None:
    """The finish reason after appending one token; None if the request continues."""
    request.token_ids.append(token)
    num_output = request.num_output
    if token in request.ending_ids:
        if request.params.include_stop_str_in_output:
            request.detokenizer.append(token, num_output)
        if token in request.params.stop_ids:
            request.stop_reason = token
        return "stop"
    stop = request.detokenizer.append(token, num_output)
    if stop is not None:
        request.stop_reason = stop
        return "stop"
    if request.detokenizer.ended:
        return "stop"
    return "length" if num_output >= request.max_output else None
