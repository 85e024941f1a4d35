"""From a node's logits to its one token.

The order, which is vLLM's:

    constraint -> allowed_token_ids, bad_words, min_tokens -> logit_bias -> penalties
    greedy: argmax, ties to the lowest id
    else:   temperature -> truncation -> argmax(log p + gumbel)

all on the node's own path. A constraint goes first: a token that it forces is taken whatever the other
options say, and so are its tokens where they forbid them all. `logits_processors.py` has the options.
The order within truncation is that of `truncation.py`. The token depends on the logits, the options, the
path and (seed, position), and on nothing else.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from paceline.constrain.constraint import Constraint
from paceline.core.arrays import Float32Array, Float64Array, Int64Array
from paceline.core.logit_edits import LogitEdits
from paceline.core.params import SamplingParams
from paceline.core.truncation import KEEPS_ALL
from paceline.errors import BackendError
from paceline.verify.choosing import ALL_IDS, best_candidates, choose_token, target_probabilities
from paceline.verify.logits_processors import LogitsProcessors

_PLAIN_OPTIONS = (1.0, KEEPS_ALL)  # temperature, truncation: the plain softmax


class Workspace:
    """Scratch arrays of the vocabulary's size, allocated once and shared by all requests of an engine."""

    def __init__(self, vocab_size: int) -> None:
        self.logits = np.empty(vocab_size, dtype=np.float32)  # [vocab] logits with options applied
        self.scratch = (  # [vocab] each, for the kernels
            np.empty(vocab_size, dtype=np.float64),
            np.empty(vocab_size, dtype=np.int64),
            np.empty(vocab_size, dtype=np.int64),
        )
        self._lines = np.empty((0, vocab_size), dtype=np.float64)  # [lines, vocab]

    def lines(self, count: int) -> Float64Array:
        """Uninitialized distributions: float64 [count, vocab]. The next call may return the same memory."""
        if count > len(self._lines):
            self._lines = np.empty((count, self._lines.shape[1]), dtype=np.float64)
        return self._lines[:count]


class Sampler:
    """Samples one request's tokens from logits. `advance` tells it each token of the request's path."""

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt: Sequence[int],
        ending_ids: Iterable[int],
        constraint: Constraint | None = None,
        bad_words: Collection[Sequence[int]] = (),
    ) -> None:
        """`ending_ids` are the ids that min_tokens forbids: end-of-sequence and stop ids.

        `bad_words` are the token sequences of the params' bad_words.
        """
        self.constraint = constraint  # None: any token may follow
        self._params = params
        self._seed = np.uint64(seed)
        self._options = (params.temperature, params.truncation)
        self._processors = LogitsProcessors(params, prompt, ending_ids, bad_words)

    @property
    def greedy(self) -> bool:
        """Whether the token is the largest logit, without noise."""
        return self._params.greedy

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is truncated."""
        return self._options[1].keeps_all

    def leaves_logits(self, num_output: int) -> bool:
        """Whether neither a constraint nor an option edits logits from here on."""
        return self.constraint is None and not self.edits_logits(num_output)

    def edits_logits(self, num_output: int) -> bool:
        """Whether options (bias, min_tokens, penalties, allowed ids, bad words) edit logits from here on."""
        return self._processors.edits(num_output)

    @property
    def bans_tokens(self) -> bool:
        """Whether allowed_token_ids or bad_words exclude tokens, which `logit_edits` does not tell."""
        return self._processors.bans

    def logit_edits(self) -> LogitEdits:
        """What `edits_logits` stands for, for a device that samples the next tokens."""
        return self._processors.for_device()

    @property
    def seed(self) -> int:
        """The key of all noise of the request."""
        return int(self._seed)

    def advance(self, token: int) -> None:
        """Append a token to the path."""
        if self.constraint is not None:
            self.constraint.advance(token)
        if self._processors.follows_path:
            self._processors.advance(token)

    def branch(self, tokens: Iterable[int]) -> Sampler:
        """A sampler whose path is this one's plus these tokens. This one is not changed."""
        if not self._processors.follows_path and self.constraint is None:
            return self  # nothing depends on the path
        twin = copy.copy(self)
        twin._processors = self._processors.branch()
        if self.constraint is not None:
            twin.constraint = self.constraint.branch()
        for token in tokens:
            twin.advance(token)
        return twin

    def sample(self, logits: Float32Array, position: int, num_output: int, workspace: Workspace) -> int:
        """The token at `position`, when `num_output` tokens of output precede it.

        Raises BackendError if the logits hold NaN or +inf, or if no token is allowed.
        """
        forced = self._forced(logits)
        if forced is not None:
            return forced
        if self.greedy and not self.edits_logits(num_output):
            token = int(logits.argmax())  # if the largest of all is allowed, it is the largest allowed
            if math.isfinite(logits[token]) and (self.constraint is None or self.constraint.allows(token)):
                return token
        logits = self.edited_logits(logits, num_output, workspace)
        if self.greedy:
            token = int(logits.argmax())  # the first NaN, if there is one
            if math.isfinite(logits[token]):
                return token
        else:
            key = (self._seed, np.uint64(position))
            token = choose_token(logits, self._options, workspace.scratch, key)
            if token >= 0:
                return token
        raise unusable_logits(f"at position {position}")

    def probabilities(
        self, logits: Float32Array, num_output: int, workspace: Workspace, out: Float64Array | None = None
    ) -> Float64Array:
        """The distribution that `sample` draws from, all options applied: float64 [vocab], in `out` if given.

        Exactly zero for what the options exclude; one-hot at temperature 0. Raises BackendError
        where `sample` does.
        """
        if out is None:
            out = np.empty(len(logits), dtype=np.float64)
        forced = self._forced(logits)
        if forced is not None:
            out[:] = 0.0
            out[forced] = 1.0
            return out
        logits = self.edited_logits(logits, num_output, workspace)
        if self.greedy:
            token = int(logits.argmax())
            usable = math.isfinite(logits[token])
            out[:] = 0.0
            out[token] = 1.0
        else:
            usable = target_probabilities(logits, self._options, workspace.scratch, out)
        if not usable:
            raise unusable_logits(f"after {num_output} tokens of output")
        return out

    def candidates(
        self,
        logits: Float32Array,
        position: int,
        num_output: int,
        count: int,
        coupled: bool,
        workspace: Workspace,
        known: Int64Array = ALL_IDS,
    ) -> tuple[Int64Array, Float64Array]:
        """The `count` best ids, best first, and their log p: int64 and float64 [at most count].

        Best by log p + gumbel if coupled: the first is then the token that `sample` would return. Else by
        log p, ties to the lowest id. Fewer where the options keep fewer. At temperature 0, where p is
        one-hot, they are ranked by the logits, and log p is that of temperature 1. The logits may be those
        of the ids `known` only, if `leaves_logits`.
        """
        forced = self._forced(logits)
        if forced is not None:
            return np.array([forced]), np.zeros(1)
        logits = self.edited_logits(logits, num_output, workspace)
        best = best_candidates(
            (logits, known),
            _PLAIN_OPTIONS if self.greedy else self._options,
            workspace.scratch,
            (self._seed, np.uint64(position)),
            coupled and not self.greedy,
            count,
        )
        if best is None:
            raise unusable_logits(f"at position {position}")
        return best

    def _forced(self, logits: Float32Array) -> int | None:
        """The token that the constraint forces, if it allows exactly one."""
        if self.constraint is None:
            return None
        forced = self.constraint.forced()
        if not forced:
            return None
        if not math.isfinite(logits[forced[0]]):
            raise unusable_logits(f"of token {forced[0]}")
        return forced[0]

    def edited_logits(self, logits: Float32Array, num_output: int, workspace: Workspace) -> Float32Array:
        """The logits that the constraint allows, edited by the options, if there are any."""
        if self.leaves_logits(num_output):
            return logits
        mask = None if self.constraint is None else self.constraint.mask()
        return self._processors.apply(logits, mask, num_output, workspace.logits)


def unusable_logits(where: str) -> BackendError:
    """The error for a request whose logits give no token."""
    return BackendError(
        f"the model's logits {where} hold NaN or infinity, or allow no token. "
        "The model file or its quantization may be damaged; try --quantization none."
    )
