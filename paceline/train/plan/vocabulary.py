"""What a pilot's head would accept with a smaller vocabulary, and that head.

A smaller vocabulary makes a step cheaper and ends a draft at every token outside of it. Vocabularies have the
most frequent tokens, so each contains all smaller ones, and one pilot with the largest tells of all.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.core.arrays import Int32Array
from paceline.models.files.safetensors_writer import encode
from paceline.models.heads.checkpoint import HeadCheckpoint, load_head, write_head
from paceline.train.loop.batches import Batch

# Tensors with a row for each token of the draft vocabulary
BY_TOKEN = ("lm_head.weight", "markov_head.markov_w2.weight", "candidate_selector.successor_codebook")


def accepted_within(accepted: Tensor, batch: Batch, draft_ids: Int32Array) -> Tensor:
    """Accepted guesses int64 [1, tokens] of chains that end at the first token that is not in `draft_ids`."""
    tokens = batch.tokens[0]
    inside = torch.isin(tokens, torch.from_numpy(draft_ids).long().to(tokens.device))
    places = torch.arange(len(tokens), device=tokens.device)
    outside = torch.where(inside, len(tokens), places)  # of each token outside, its place
    first = outside.flip(0).cummin(0).values.flip(0)  # the first one from each place on
    after = torch.nn.functional.pad(first[1:], (0, 1), value=len(tokens))
    return torch.minimum(accepted, (after - 1 - places)[None])


def restrict_vocabulary(folder: Path, draft_ids: Int32Array) -> None:
    """Leave the head in a folder only these tokens: ids ascending, all of which it can guess."""
    head = load_head(folder)
    own = head.draft_ids
    own = np.arange(head.config.draft_vocab_size, dtype=np.int32) if own is None else own
    rows = np.flatnonzero(np.isin(own, draft_ids))
    tensors = {
        name: encode(tensor.float32()[rows], "F16") if name in BY_TOKEN else tensor
        for name, tensor in head.tensors.items()
    }
    config = replace(head.config, draft_vocab_size=len(rows))
    write_head(HeadCheckpoint(config, tensors, own[rows], folder), folder, "vllm")
