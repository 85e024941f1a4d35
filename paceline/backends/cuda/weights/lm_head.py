"""The LM head of a pass: gathers the wanted rows, and launches the product."""

from __future__ import annotations

import torch

from paceline.backends.cuda.kernels.products.matrix import Normed
from paceline.backends.cuda.native.logits import run_logits
from paceline.backends.cuda.native.many_rows import project
from paceline.backends.cuda.passes.workspace import Workspace
from paceline.backends.cuda.weights.model_weights import Weights


def select(workspace: Workspace, chosen: torch.Tensor) -> None:
    """Copy the LM head's input of the rows `chosen` [outputs] to `workspace.selected`."""
    read, written = workspace.attention_input, workspace.selected
    written.rows[: len(chosen)] = read.rows[chosen]
    written.squares[: len(chosen)] = read.squares[chosen]


def run_lm_head(weights: Weights, workspace: Workspace, read: Normed, rows: int, joins: bool = True) -> None:
    """Write the logits of the first rows of `read` to `workspace.logits`.

    Without `joins` they are not gathered: a rank has only those of its own token ids, in
    `workspace.local.logits`.
    """
    local = workspace.local.logits
    if not run_logits(read, weights.head, local, rows):
        project(read, weights.head, local, rows, workspace.scratch)
    scale, cap = weights.config.logits_scale, weights.config.logits_softcap
    if scale != 1:
        local[:rows].mul_(scale)
    if cap:
        local[:rows].div_(cap).tanh_().mul_(cap)
    if joins:
        weights.shard.gather([local], [workspace.logits], rows)
