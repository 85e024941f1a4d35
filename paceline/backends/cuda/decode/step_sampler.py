"""StepSampler: samples the tokens of a step's rows, by the sampling options of their requests."""

from __future__ import annotations

import torch

from paceline.backends.cuda.kernels.sampling.gumbel import Candidates, candidates_for, gumbel_argmax
from paceline.backends.cuda.kernels.sampling.logit_edits import EditState, edit_logits
from paceline.backends.cuda.kernels.sampling.logprobs import logprob_buffers, write_logprobs
from paceline.backends.cuda.kernels.sampling.token_masks import mask_logits, row_masks
from paceline.backends.cuda.kernels.sampling.truncation import find_thresholds, truncation_buffers
from paceline.backends.cuda.kernels.step_rows import DeviceRequests, ShapeTables
from paceline.backends.cuda.passes.workspace import Workspace
from paceline.backends.cuda.weights.model_weights import Weights
from paceline.backends.cuda.weights.vocabulary import sample_local, shared_candidates_for
from paceline.core.request import SamplingNeeds
from paceline.core.truncation import NUM_FIELDS

_TRUNCATION, _LOGIT_EDITS = int(SamplingNeeds.TRUNCATION), int(SamplingNeeds.LOGIT_EDITS)
_LOGPROBS, _TOKEN_MASK = int(SamplingNeeds.LOGPROBS), int(SamplingNeeds.TOKEN_MASK)
_CHANGES = _LOGIT_EDITS | _TOKEN_MASK  # of logits, in place


class StepSampler:
    """Sampling options of the requests of a step, by row, and the buffers of the sampling kernels.

    `logprobs` float64 [max_rows, nodes, fields of verify/logprobs.py] is written for requests that ask.
    `masks` are the token masks of a step's rows, which the host sends.
    `seeds` int64 [max_rows] and `temperatures` float64 [max_rows] are the requests', for coupled drafting.
    """

    def __init__(
        self, max_rows: int, shape: ShapeTables, weights: Weights, raw_logits: torch.Tensor | None = None
    ) -> None:
        """Buffers for steps of at most `max_rows` requests, each with the rows of `shape`.

        `raw_logits`: see DecodeLoop.
        """
        self._shape, self._nodes, self._head = shape, len(shape.parents), weights.head
        self._vocab_size = vocab_size = weights.config.vocab_size
        rows, device = max_rows * self._nodes, weights.device

        def zeros(*sizes: int, kind: torch.dtype) -> torch.Tensor:
            return torch.zeros(sizes, dtype=kind, device=device)

        self.seeds = zeros(max_rows, kind=torch.int64)
        self.temperatures = zeros(max_rows, kind=torch.float64)
        self._row_seeds = zeros(max_rows, self._nodes, kind=torch.int64)
        self._row_temperatures = zeros(max_rows, self._nodes, kind=torch.float64)
        self._row_truncation = zeros(max_rows, self._nodes, NUM_FIELDS, kind=torch.float64)
        self._shared_candidates = shared_candidates_for(rows, weights.head, device)
        self._candidates = self._shared_candidates.full  # of all logits at once
        if weights.shard.size > 1:
            self._candidates = candidates_for(rows, vocab_size, device)
        self.masks = row_masks(rows, vocab_size, device)
        self._truncation = truncation_buffers(rows, vocab_size, device)
        self._logprobs = logprob_buffers(rows, vocab_size, device)
        self.logprobs = self._logprobs.fields.view(max_rows, self._nodes, -1)
        if raw_logits is None:
            raw_logits = torch.empty((rows, vocab_size), device=device)
        self._raw_logits = raw_logits

    def begin(self, state: DeviceRequests, slots: torch.Tensor) -> None:
        """Copy the sampling options of the requests in these slots [requests]."""
        rows = len(slots)
        self.seeds[:rows] = state.seeds[slots]
        self.temperatures[:rows] = state.temperatures[slots]
        self._row_seeds[:rows] = state.seeds[slots][:, None]
        self._row_temperatures[:rows] = state.temperatures[slots][:, None]
        self._row_truncation[:rows] = state.truncation[slots][:, None]

    def sample(
        self,
        workspace: Workspace,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        state: DeviceRequests,
        needs: int,
        edits: EditState | None,
    ) -> Candidates:
        """The token of every row of the requests in `slots` [requests], from the logits of the last pass.

        Logits are masked and edited in place; log-probabilities are those of the raw logits. `needs`: see
        DecodeLoop.step; without any, logits are not gathered from other ranks.
        """
        requests, size, logits = len(slots), self._vocab_size, workspace.logits
        rows, temperatures = requests * self._nodes, self._row_temperatures[:requests].view(-1)
        options = temperatures, self._row_seeds[:requests].view(-1), positions
        if not needs:
            return sample_local(workspace.local.logits, self._head, *options, self._shared_candidates, rows)
        raw = logits
        if needs & _LOGPROBS and needs & _CHANGES:
            raw = self._raw_logits
            raw[:rows].copy_(logits[:rows])
        if needs & _TOKEN_MASK:
            mask_logits(logits, size, self.masks, rows)
        if needs & _LOGIT_EDITS and edits is not None:
            parents, levels = self._shape.parents, self._shape.levels
            edit_logits(logits, size, slots, edits, tokens, positions, parents, levels)
        if needs & _TRUNCATION:
            truncation = self._row_truncation[:requests].view(-1, NUM_FIELDS)
            find_thresholds(logits, size, temperatures, truncation, self._truncation, rows)
        thresholds = self._truncation.thresholds if needs & _TRUNCATION else None
        gumbel_argmax(logits, size, *options, self._candidates, rows, thresholds)
        if needs & _LOGPROBS:
            asks = state.asks_logprobs
            write_logprobs(raw, size, slots, asks, self._candidates, self._logprobs, self._nodes)
        return self._candidates
