"""`paceline train eagle3|answers`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.config import DEFAULT_MODEL
from paceline.errors import ConfigError
from paceline.terminal.flags import Flag, Group, Options, with_flags

if TYPE_CHECKING:
    import torch

    from paceline.train.card import Measured
    from paceline.train.make_answers import AnswerOptions
    from paceline.train.options import TrainOptions
    from paceline.train.processes import Processes
    from paceline.train.run_eagle3 import Trained

app = typer.Typer(help="Train a draft head on the target's own answers.", no_args_is_help=True)

Model = Annotated[str, typer.Argument(help="The target: an alias, a .gguf file, a folder or a hub id.")]
Data = Annotated[
    list[Path] | None,
    typer.Option("--data", help="Prompts (chats, ShareGPT, OpenAI logs) or answers. May be repeated."),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is one.")]

SELF_WRITTEN = 2000  # prompts, where no file is given

ANSWERS: Group = (
    Flag("temperatures", str, "0,0.8", "Each prompt is answered once at each of these."),
    Flag("max_prompt_tokens", int, 512, "Longer prompts are left out."),
    Flag("max_tokens", int, 384, "Of an answer."),
    Flag("self_written", int | None, None, "Prompts that the model writes; 2000, if no file is given."),
)
SEED: Group = (Flag("seed", int, 0, "The same seed gives the same answers and weights."),)
TRAINING: Group = (
    Flag("epochs", int, 3, "How often each answer is seen."),
    Flag("max_steps", int | None, None, "Optimizer steps, instead of epochs."),
    Flag("minutes", float | None, None, "Time to train, instead of epochs."),
    Flag("unroll", int, 5, "Draft steps that are trained."),
    Flag("step_decay", float, 0.8, "Weight of a draft step's loss, relative to the step before."),
    Flag("draft_vocab_size", int, 8192, "Tokens that the head can guess: the most frequent ones."),
    Flag("intermediate_size", int | None, None, "Of the head's MLP; the target's, if left out."),
    Flag("fc_norm", bool, False, "EAGLE-3.1: a norm for each feature.", "--fc-norm"),
    Flag("norm_output", bool, False, "EAGLE-3.1: feed back the normed state.", "--norm-output"),
    Flag("batch_tokens", int, 8192, "Tokens of one step, padding included."),
    Flag("max_length", int, 1024, "Tokens of an example; the rest is cut off."),
    Flag("learning_rate", float, 5e-4, "At its highest, after the warm-up."),
    Flag("warmup_steps", int, 100, "Steps until then."),
    Flag("clip", float, 1.0, "Largest norm of the gradient."),
    Flag("held_out", float, 0.02, "Share of the examples that is kept for the evaluation."),
    Flag("checkpoint_every", int, 500, "Steps from one checkpoint to the next."),
)


@app.command("answers")
@with_flags(answering=ANSWERS, seed=SEED)
def answers_command(
    answering: Options,
    seed: Options,
    out: Annotated[Path, typer.Option(help="The file of answers; one that exists is gone on with.")],
    model: Model = DEFAULT_MODEL,
    data: Data = None,
    device: Device = "auto",
) -> None:
    """Let the target answer prompts, for `train eagle3` here or on another machine."""
    from paceline.models.registry import resolve

    options = _answer_options(answering, seed, has_files=bool(data))
    _answer(resolve(model), data or [], out, options, _device(device))


@app.command("eagle3")
@with_flags(answering=ANSWERS, training=TRAINING, seed=SEED)
def eagle3_command(
    answering: Options,
    training: Options,
    seed: Options,
    out: Annotated[Path, typer.Option(help="The folder of the head; a run that was killed goes on there.")],
    model: Model = DEFAULT_MODEL,
    data: Data = None,
    init_from: Annotated[
        Path | None, typer.Option(help="A head to train on from, instead of a new one.")
    ] = None,
    device: Device = "auto",
    evaluate: Annotated[
        int, typer.Option(help="Held-out prompts to measure the head with, in the engine.")
    ] = 40,
) -> None:
    """Train an EAGLE-3 head: the target answers the prompts, the head learns to guess the answers."""
    from paceline.draft.heads.checkpoint import write_head
    from paceline.models.registry import resolve
    from paceline.train.card import write_report
    from paceline.train.examples import is_answers
    from paceline.train.options import TrainOptions
    from paceline.train.processes import processes_on, started_by_torchrun

    options = TrainOptions(**training, **seed)
    files = data or []
    prompts = [path for path in files if not is_answers(path)]
    answers = [path for path in files if is_answers(path)]
    answer_options = _answer_options(answering, seed, has_files=bool(files))
    path, chosen = resolve(model), _device(device)
    if started_by_torchrun() and (prompts or answer_options.self_written):
        raise ConfigError(
            "torchrun only trains: let one process answer the prompts, with `paceline train answers`, and "
            "give its file as --data."
        )
    if prompts or answer_options.self_written:
        answers.append(out / "answers.jsonl")
        _answer(path, prompts, answers[-1], answer_options, chosen)
    processes, own_device = processes_on(chosen)
    trained = _train(path, answers, out, options, own_device, init_from, processes)
    if processes.rank != 0:
        return
    write_head(trained.head, out, "sglang")
    measured = _evaluate(path, trained, out, evaluate, options.seed)
    write_report(trained, path.name, options, measured, out)
    print(f"The head is in {out}: serve with --draft eagle3:{out}", file=sys.stderr)


def _answer_options(answering: Options, seed: Options, has_files: bool) -> AnswerOptions:
    from paceline.train.make_answers import AnswerOptions

    self_written = answering["self_written"]
    if self_written is None:
        self_written = 0 if has_files else SELF_WRITTEN
    try:
        temperatures = tuple(float(part) for part in answering["temperatures"].split(","))
    except ValueError:
        raise ConfigError(
            f"--temperatures must be numbers with commas between, such as 0,0.8; got "
            f"{answering['temperatures']!r}."
        ) from None
    return AnswerOptions(**{**answering, "temperatures": temperatures, "self_written": self_written}, **seed)


def _answer(model: Path, prompts: Sequence[Path], out: Path, options: AnswerOptions, device: str) -> None:
    from paceline.train.make_answers import Answered, make_answers
    from paceline.train.show import answering_progress

    with answering_progress() as show:

        def on_progress(answered: Answered) -> bool:
            show(answered)
            return True

        answered = make_answers(model, prompts, out, options, device, on_progress)
    for line in answered.skipped.lines():
        print(line, file=sys.stderr)
    print(f"{answered.answers} answers, {answered.tokens} tokens: {out}", file=sys.stderr)


def _train(
    model: Path,
    answers: Sequence[Path],
    out: Path,
    options: TrainOptions,
    device: torch.device,
    init_from: Path | None,
    processes: Processes,
) -> Trained:
    """Train with a progress bar, which rank 0 alone shows."""
    from paceline.draft.heads.checkpoint import load_head
    from paceline.draft.heads.config import TargetName
    from paceline.draft.heads.fingerprint import target_fingerprint
    from paceline.models.registry import load_checkpoint
    from paceline.train.run_eagle3 import train_eagle3
    from paceline.train.show import training_progress

    checkpoint = load_checkpoint(model)
    name = TargetName(target_fingerprint(checkpoint), model.name)
    start = load_head(init_from) if init_from is not None else None
    with training_progress(visible=processes.rank == 0) as show:
        return train_eagle3(checkpoint, name, answers, out, options, device, start, show, processes)


def _evaluate(model: Path, trained: Trained, out: Path, number: int, seed: int) -> Measured:
    """Tokens per pass of the head, of what it was before, and of n-gram drafts, on held-out prompts."""
    from paceline.draft.heads.checkpoint import write_head
    from paceline.llm import LLM
    from paceline.train.evaluation import contestants, held_out_prompts, tokens_per_pass
    from paceline.train.show import show_measured

    prompts = held_out_prompts(trained.examples, trained.held_out_examples, number, seed)
    if not prompts:
        return {}
    with TemporaryDirectory() as untrained:
        write_head(trained.untrained, Path(untrained), "sglang")
        measured = tokens_per_pass(
            lambda config: LLM(str(model), speculative_config=config),
            prompts,
            contestants(out, Path(untrained)),
        )
    show_measured(measured, len(prompts))
    return measured


def _device(wanted: str) -> str:
    """The device that `auto` means; others are taken as they are."""
    if wanted != "auto":
        return wanted
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
