"""DeviceLoad: the requests that passes on the device are planned for, with those that are being prefilled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from paceline.control.config import CONFIG
from paceline.control.controller import Load
from paceline.control.cost.device_passes import context_bucket, request_bucket

if TYPE_CHECKING:
    from paceline.core.request import Request


class DeviceLoad:
    """Counts of the present requests; updated only when requests come, are prefilled or end."""

    def __init__(self) -> None:
        self.requests, self.context = 1, 0  # buckets, see cost/device_passes.py
        self.greedy = True  # most requests sample greedily: their drafts are accepted more often
        self.is_settled = True  # all requests decode, and none is waiting for a slot
        self.starts_batch = False  # all requests are new, and those before them have ended
        self.remaining = 1.0  # fraction of the requests before that still run
        self.replaced = 0.5  # fraction of ended requests that others have followed at once, moving mean
        self._count = self._coming = 0  # requests, with those that come, and these alone
        self._running: Sequence[Request] = ()
        self._tokens_left: float | None = None  # None: not asked for since the last note
        self._decoding = 0.0  # tokens of the requests that decode
        self._prefilling = 0.0  # and of those that do not yet
        self._usual_output: float | None = None  # tokens of outputs that have ended, moving mean
        self._output_variance = 0.0  # of those outputs over their mean, moving mean
        self._at_limit = 1.0  # fraction of those outputs that have reached max_tokens, moving mean
        self._usual_prompt = 0.0  # tokens, mean of the last requests

    def is_new(self, running: Sequence[Request], load: Load) -> bool:
        """Whether requests have come or ended, or the last one that was being prefilled decodes now. The
        newest is the last."""
        before, newest = self._running, running[-1] if running else None
        if len(running) != len(before) or load.coming != self._coming:
            return True
        return newest is not None and (
            newest is not before[-1] or (not self.is_settled and newest.num_pending == 1)
        )

    def has_only_ended(self, running: Sequence[Request], load: Load) -> bool:
        """Whether some of the noted requests have ended since, and the passes stay of the same size: there is
        time to note that with the next choice."""
        before, newest = self._running, running[-1] if running else None
        is_same = newest is not None and bool(before) and newest is before[-1] and not load.coming
        has_fewer = is_same and len(running) < len(before) and self.is_settled
        return has_fewer and request_bucket(len(running)) == self.requests

    def note(self, running: Sequence[Request], load: Load) -> None:
        """Count these requests, and expect that `load.coming` more will be like them."""
        ended = [request for request in self._running if request.finished]
        self.remaining = 1.0 - len(ended) / max(1, len(self._running))
        followed = len(ended) + load.running + load.coming + load.waiting - self._count
        none_decodes = not any(request.num_pending == 1 for request in running)
        self.starts_batch = none_decodes and len(ended) == len(self._running)
        if self.starts_batch:  # after the last one has ended
            followed = 0
        for number, request in enumerate(ended):
            self._note_end(request, number < followed)
        self._running, self._tokens_left = list(running), None
        self._count, self._coming = load.running + load.coming, load.coming
        pending = [request.num_pending for request in running]
        tokens = [request.num_computed + count for request, count in zip(running, pending, strict=True)]
        self.is_settled = not load.coming and max(pending, default=1) == 1
        total, self._decoding = float(sum(tokens)), 0.0
        if running:
            pairs = zip(tokens, pending, strict=True)
            self._decoding = float(sum([own for own, count in pairs if count == 1]))
            self._usual_prompt = (total - sum([request.num_output for request in running])) / len(running)
            self.greedy = 2 * sum([request.sampling.greedy for request in running]) > len(running)
        self._prefilling = total - self._decoding + load.coming * self._usual_prompt
        self.requests = request_bucket(max(1, self._count))
        self.context = context_bucket(total / max(1, len(running)))

    @property
    def tokens_left(self) -> float:
        """Output tokens that a request is expected to get from now on, mean; infinite if there is none."""
        if self._tokens_left is None:
            left = [self._left(request) for request in self._running]
            self._tokens_left = sum(left) / len(left) if left else math.inf
        return self._tokens_left

    @property
    def is_ending(self) -> bool:
        """Whether these are the last tokens of a batch: a choice would take longer than it could gain."""
        return self.replaced < 0.5 and self.tokens_left < CONFIG.device_planner.hold

    @property
    def is_decoding(self) -> bool:
        """Whether there is a request that decodes."""
        return self._decoding > 0

    @property
    def prompt_per_token(self) -> float:
        """Prompt tokens of a usual request for each token of its output."""
        return self._usual_prompt / (self.tokens_left if self._usual_output is None else self._usual_output)

    def catch_up(self, is_attached: bool) -> float:
        """Tokens that a head would have to compute; `is_attached`: it drafts for those that decode."""
        return self._prefilling + (0.0 if is_attached else self._decoding)

    def facts(self) -> dict[str, Any]:
        """What was learned of requests, as JSON values."""
        return {"output": self._usual_output, "prompt": self._usual_prompt, "replaced": self.replaced}

    def begin_with(self, facts: Mapping[str, Any]) -> None:
        """Start from these facts. KeyError, ValueError or TypeError if they make no sense."""
        output, prompt, replaced = facts["output"], float(facts["prompt"]), float(facts["replaced"])
        self._usual_output = None if output is None else max(1.0, float(output))
        self._usual_prompt, self.replaced = max(0.0, prompt), min(max(0.0, replaced), 1.0)

    def tokens(self, mean: float, variance: float) -> float:
        """Tokens per pass of the whole batch, from mean and variance of the tokens that one request gets per
        pass.

        If no request follows one that ends, a batch takes as many passes as its slowest request: the expected
        maximum of n requests. Requests differ in accepted tokens, by chance and because texts differ. If
        outputs end by themselves, the longest output counts, with and without drafts; outputs that reach
        max_tokens are equally long.
        """
        # relative variance of a request's passes
        luck = CONFIG.device_planner.text_spread * max(0.0, variance) / (self.tokens_left * mean)
        at_limit = self._at_limit * self.requests
        count, lengths = (at_limit, 0.0) if at_limit >= 1.0 else (self.requests, self._output_variance)
        most = expected_maximum(count)
        slowest = mean * (1.0 + most * math.sqrt(lengths)) / (1.0 + most * math.sqrt(lengths + luck))
        return self.replaced * mean + (1.0 - self.replaced) * slowest

    def _left(self, request: Request) -> float:
        """Output tokens that a request is expected to get from now on."""
        config, most = CONFIG.device_planner, request.max_output
        usual = config.usual_output * most if self._usual_output is None else min(self._usual_output, most)
        left = max(usual - request.num_output, config.least_output * usual)
        return max(min(left, most - request.num_output), 1.0)

    def _note_end(self, request: Request, is_followed: bool) -> None:
        rate, output = CONFIG.device_planner.end_rate, request.num_output
        before = max(1.0, output if self._usual_output is None else self._usual_output)
        self._usual_output = before + rate * (output - before)
        self._output_variance += rate * ((output / before - 1.0) ** 2 - self._output_variance)
        self._at_limit += rate * ((output >= request.max_output) - self._at_limit)
        self.replaced += rate * (is_followed - self.replaced)


@lru_cache(maxsize=64)
def expected_maximum(count: float) -> float:
    """The expected maximum of `count` standard normal numbers (Blom's approximation)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
