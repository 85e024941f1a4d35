"""RemoteRun: a request at the ingress, built up from the tokens that replicas send.

The ingress keeps the same Request objects as an engine would, without KV: they hold the text, find stop
strings, and become the RequestOutput. So answers, metrics and the page of running requests need no second
implementation, and a request can be resumed from them at any token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from paceline.core.detokenizer import TextTokenizer
from paceline.core.params import SamplingParams
from paceline.core.request import Request, Status
from paceline.engine.frontend.stream import Stream, Update
from paceline.engine.output_processor import Delta, append_tokens
from paceline.engine.outputs import RequestMetrics, RequestOutput, request_output, with_texts
from paceline.scale.remote.channel import Link
from paceline.scale.remote.wire import TokenUpdate, decode_error, decode_logprobs, decode_metrics


class Lost(Exception):  # not an error: the request continues on another replica
    """A replica will send nothing more for a request."""


class RemoteRun:
    """One request: its outputs so far, and the attempt that computes them now."""

    def __init__(
        self,
        children: Sequence[Request],
        params: SamplingParams,
        stream: Stream,
        tokenizer: TextTokenizer,
        clock: Callable[[], float],
        prefix_hashes: Sequence[int],
        session: str | None,
    ) -> None:
        """`params` have a seed. `prefix_hashes` and `session` are for the routing."""
        self.children = children
        self.params = params
        self.stream = stream
        self.prefix_hashes = prefix_hashes
        self.session = session
        self.weights_id: str | None = None  # of the weights that produced the tokens so far
        self._loop = asyncio.get_running_loop()
        # done when the attempt ends; its exception: why it is lost
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.replica: str | None = None  # that runs the attempt
        self.cut_short = False  # the ingress ended an output by its text; its replica does not know
        self._tokenizer = tokenizer
        self._clock = clock
        self._metrics: RequestMetrics | None = None  # as the last replica counted

    @property
    def finished(self) -> bool:
        return all(child.finish_reason is not None for child in self.children)

    @property
    def num_tokens(self) -> int:
        return sum(child.num_output for child in self.children)

    @property
    def resume(self) -> dict[int, list[int]] | None:
        """The tokens of the unfinished outputs, for the next attempt; None: start over.

        Prompt log-probabilities come with child 0. If it ended without them, all are computed again, and the
        tokens that are already here are skipped.
        """
        wants_prompt = self.params.prompt_logprobs is not None and not self.children[0].prompt_logprobs
        if self.num_tokens == 0 or (wants_prompt and self.children[0].finish_reason is not None):
            return None
        unfinished = [child for child in self.children if child.finish_reason is None]
        return {child.child: child.output_token_ids for child in unfinished}

    def begin(self, link: Link) -> None:
        """A replica gets the next attempt."""
        self.replica, self.weights_id = link.replica, link.weights_id
        self.ended = self._loop.create_future()
        for child in self.children:
            if child.finish_reason is None:
                child.status = Status.RUNNING

    def add(self, update: TokenUpdate) -> tuple[Delta, Update] | None:
        """Append the tokens that are new here; None if there are none. Raises Lost if some are missing."""
        child = self.children[update.child]
        if child.finish_reason is not None:
            return None  # its text ended it here, or an attempt started over
        known = child.num_output - update.start
        if known < 0:
            raise Lost("tokens are missing")
        if update.error is not None:
            self._end(child, "error", decode_error(update.error))
            return self._news(child, ())
        if known >= len(update.token_ids) and update.token_ids:
            return None
        if child.first_token_time is None:
            child.first_token_time = self._clock()
        tokens, reason = append_tokens(child, tuple(update.token_ids[known:]))
        entries = (update.logprobs or [])[known : known + len(tokens)]
        child.logprobs.extend(with_texts(decode_logprobs(entry) or {}, self._tokenizer) for entry in entries)
        if reason is not None:
            self._end(child, reason)
            self.cut_short |= update.finish_reason is None
        return self._news(child, tokens)

    def finish(self, output: dict[str, Any]) -> None:
        """Take the replica's metrics."""
        self._metrics = decode_metrics(output["metrics"])
        if output["prompt_logprobs"] is not None:
            entries = [decode_logprobs(entry) for entry in output["prompt_logprobs"]]
            self.children[0].prompt_logprobs = entries

    def output(self) -> RequestOutput:
        """The whole output."""
        output = request_output(None, self.children, self._tokenizer)
        if (counted := self._metrics) is None:
            return output
        metrics = replace(
            output.metrics,
            num_cached_tokens=counted.num_cached_tokens,
            num_preemptions=counted.num_preemptions,
            speculative=counted.speculative,
        )
        return replace(output, metrics=metrics)

    def abort(self) -> list[Request]:
        """End the unfinished outputs; they are returned."""
        unfinished = [child for child in self.children if child.finish_reason is None]
        for child in unfinished:
            self._end(child, "abort")
        return unfinished

    def _end(self, child: Request, reason: str, error: Exception | None = None) -> None:
        child.finish_reason, child.error = reason, error
        child.status = Status.FINISHED
        child.finished_time = self._clock()
        child.detokenizer.finish()

    def _news(self, child: Request, tokens: tuple[int, ...]) -> tuple[Delta, Update]:
        text = child.detokenizer.take()
        logprobs = None
        if self.params.logprobs is not None:
            logprobs = tuple(child.logprobs[len(child.logprobs) - len(tokens) :])
        update = Update(
            child.child, text, tokens, logprobs, child.finish_reason, child.stop_reason, child.error
        )
        return Delta(child, tokens), update
