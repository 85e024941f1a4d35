"""A process that is killed while it trains, whatever it is doing then, loses nothing but time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.models.checkpoint import Checkpoint
from paceline.models.registry import load_checkpoint
from paceline.train.data.examples import Example, Examples, ExampleWriter
from paceline.train.loop.progress import Progress
from paceline.train.loop.trainer import OnProgress
from paceline.train.objectives.block_objective import BlockObjective
from paceline.train.objectives.eagle3_objective import Eagle3Objective
from paceline.train.objectives.medusa import MedusaObjective
from paceline.train.options import (
    BlockOptions,
    DFlash2Options,
    DSparkOptions,
    Eagle3Options,
    JetSpecOptions,
    MedusaOptions,
    PEagleOptions,
)
from paceline.train.run import train_head
from tests.large import repeated

SAME: dict[str, Any] = {"intermediate_size": 16, "batch_tokens": 96, "checkpoint_every": 10}
BLOCKS: dict[str, Any] = {"max_steps": 30, "layers": 1, "block_size": 3, **SAME}
KINDS: dict[str, tuple[Any, Any]] = {
    "eagle3": (Eagle3Objective, Eagle3Options(max_steps=30, unroll=2, **SAME)),
    # random anchors, an average of the weights, checks of which are best, weights of 4 bits
    "dspark": (
        BlockObjective,
        DSparkOptions(max_steps=70, layers=1, block_size=3, average=0.9, round_weights=True, **SAME),
    ),
    "dflash": (BlockObjective, BlockOptions(weighting="d-pace", loss="ce", **BLOCKS)),
    "dflash2": (BlockObjective, DFlash2Options(convolution_group=4, selector_rank=8, **BLOCKS)),
    "jetspec": (BlockObjective, JetSpecOptions(**BLOCKS)),
    "p-eagle": (Eagle3Objective, PEagleOptions(max_steps=30, layers=2, unroll=3, **SAME)),
    "medusa": (MedusaObjective, MedusaOptions(max_steps=30, heads=2, batch_tokens=96, checkpoint_every=10)),
}


def train(
    kind: str, model: Path, answers: Path, out: Path, on_progress: OnProgress = lambda progress: True
) -> None:
    """Train a head and write it to `out`."""
    torch.set_num_threads(1)
    objective, options = KINDS[kind]
    trained = train_head(
        load_checkpoint(model),
        [answers],
        out,
        options,
        torch.device("cpu"),
        lambda target, examples, name: objective(target, examples, options, name),
        on_progress,
    )
    trained.objective.snapshot()(out)


def tell(progress: Progress) -> bool:
    print(progress.step, flush=True)
    return True


@pytest.mark.parametrize("kind", ["dspark", *repeated(*(kind for kind in KINDS if kind != "dspark"))])
def test_a_killed_process_ends_with_the_same_file(
    kind: str, checkpoint: Checkpoint, examples: Examples, tmp_path: Path
) -> None:
    answers = tmp_path / "answers.jsonl"
    ExampleWriter(answers, examples.vocab_size, {}).append(
        Example(f"p-{one}#0", "s", examples.ids(one).tolist(), int(examples.answers[one]))
        for one in range(len(examples))
    )
    model, killed, whole = checkpoint.source, tmp_path / "killed", tmp_path / "whole"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.train.test_kill", kind, model, answers, killed],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(3)] == ["0\n", "10\n", "20\n"]
    process.kill()  # while it computes, or writes the checkpoint of step 20
    process.communicate()
    assert not (killed / "model.safetensors").exists()
    steps: list[int] = []
    train(kind, model, answers, killed, lambda progress: not steps.append(progress.step))
    assert steps[0] >= 10, "it goes on from a checkpoint"
    train(kind, model, answers, whole)
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


if __name__ == "__main__":
    train(sys.argv[1], *map(Path, sys.argv[2:]), tell)
