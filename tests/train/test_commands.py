"""`paceline train`: from prompts to a head that drafts, on the command line."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.models.heads.checkpoint import load_head
from paceline.models.heads.medusa import load_medusa
from paceline.models.registry import load_checkpoint
from paceline.terminal.flags import Group
from paceline.train import job
from paceline.train.data import make_answers
from paceline.train.data.make_answers import AnswerOptions
from paceline.train.flags import ANSWERS, BLOCK, DSPARK, EAGLE3, MEDUSA, SEED
from paceline.train.options import BlockOptions, DSparkOptions, Eagle3Options, MedusaOptions, TrainOptions
from tests.draft.model.test_draft_model_cpu import save_model
from tests.models.model_files import config_of, random_tensors, write_gguf

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of two layers with a context of 128 and a tokenizer of bytes."""
    path = tmp_path_factory.mktemp("train") / "tiny.gguf"
    return write_gguf(path, "llama", random_tensors(config_of("llama")))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"prompt": text, "segment": "letters [/of]\n all kinds"}
        for text in ("abc abc", "one two", "xyz", "a b c", "q")
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\nno JSON\n")
    return path


SMALL_LOOP = ("--device", "cpu", "--max-tokens", "12", "--max-steps", "10", "--held-out", "0.5")
SMALL_LOOP += ("--draft-vocab-size", "50", "--batch-tokens", "64")
SMALL = (*SMALL_LOOP, "--unroll", "2", "--intermediate-size", "16")


def test_prompts_become_a_head_with_its_card(
    paceline: Run, tiny_gguf: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "head"
    code, table, stderr = paceline("train", "eagle3", tiny_gguf, "--data", prompts, "--out", out, *SMALL)
    assert code == 0, stderr
    assert "1 row left out: broken JSON" in stderr
    assert "this head" in table
    head = load_head(out)
    assert head.config.draft_vocab_size == 50
    assert head.config.target is not None
    assert head.config.target.name == "tiny.gguf"
    card = (out / "README.md").read_text()
    assert "10 steps" in card
    assert "| this head |" in card
    assert "1.00 is plain" in card  # what the table is to be read against
    assert "faster" not in card
    assert "| segments | letters [/of] all kinds " in card
    assert "| answered at | temperatures 0, 0.8 |" in card
    facts = json.loads((out / "training.json").read_text())
    assert set(facts["tokens_per_pass"]) == {"this head", "this head, trees of 16", "untrained", "ngram"}
    assert facts["tokens_per_pass"]["ngram"]["all"] >= 1
    assert (out / "training.svg").read_text().startswith("<svg")


def test_the_same_answers_become_medusa_heads(
    paceline: Run, tiny_gguf: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "heads"
    options = (*SMALL_LOOP, "--heads", "2", "--learning-rate", "0.01")
    code, table, stderr = paceline("train", "medusa", tiny_gguf, "--data", prompts, "--out", out, *options)
    assert code == 0, stderr
    assert "untrained" in table
    assert f"--draft medusa:{out}" in stderr
    heads = load_medusa(out)
    assert (heads.config.num_heads, heads.config.draft_vocab_size) == (2, 50)
    assert "# Medusa draft heads for tiny.gguf" in (out / "README.md").read_text()


@pytest.mark.parametrize(
    ("recipe", "method", "own"),
    [
        ("dspark", "dspark", ()),
        ("dflash2", "dflash", ("--convolution-group", "4", "--selector-rank", "8", "--weighting", "d-pace")),
    ],
)
def test_the_same_answers_become_a_parallel_head(
    paceline: Run,
    tiny_gguf: Path,
    prompts: Path,
    tmp_path: Path,
    recipe: str,
    method: str,
    own: tuple[str, ...],
) -> None:
    out = tmp_path / "head"
    options = (*SMALL_LOOP, "--layers", "1", "--block-size", "3", "--features", "2", "--evaluate", "2")
    given = (tiny_gguf, "--data", prompts, "--out", out, *options, *own)
    code, table, stderr = paceline("train", recipe, *given)
    assert code == 0, stderr
    assert "untrained" in table
    head = load_head(out)
    assert head.config.block is not None
    assert (head.config.block.size, head.config.draft_vocab_size) == (3, 50)
    assert bool(head.config.block.selector_rank) == (recipe == "dflash2")
    assert f"--draft {method}:{out}" in stderr
    assert "1 layers, hidden" in (out / "README.md").read_text()


def test_the_same_answers_become_a_p_eagle_head_that_is_trained_further(
    paceline: Run, tiny_gguf: Path, prompts: Path, tmp_path: Path
) -> None:
    out, further = tmp_path / "head", tmp_path / "further"
    given = (tiny_gguf, "--data", prompts, "--evaluate", "2", *SMALL)
    code, table, stderr = paceline("train", "p-eagle", *given, "--layers", "2", "--out", out)
    assert code == 0, stderr
    assert "untrained" in table
    head = load_head(out)
    assert (head.config.num_layers, head.config.is_parallel) == (2, True)
    assert head.config.feature_layers == (1, 2)  # those of a small target, each once
    assert f"--draft eagle3:{out}" in stderr
    card = (out / "README.md").read_text()
    assert "`paceline train p-eagle`" in card
    assert "2 layers, hidden" in card
    code, _, stderr = paceline("train", "eagle3", *given, "--init-from", out, "--out", further)
    assert code == 0, stderr
    assert load_head(further).config == head.config
    plain = tmp_path / "plain"
    assert paceline("train", "eagle3", *given, "--out", plain)[0] == 0
    others = ("--init-from", out, "--layers", "3", "--out", tmp_path / "none")
    code, _, stderr = paceline("train", "p-eagle", *given, *others)
    assert code != 0
    assert "--layers 3: the head of --init-from has 2 and keeps it. Leave out --layers." in " ".join(
        stderr.split()
    )
    code, _, stderr = paceline("train", "p-eagle", *given, "--init-from", plain, "--out", tmp_path / "none")
    assert code != 0
    assert "is no P-EAGLE head" in stderr


def test_answers_of_one_machine_train_a_head_on_another(
    paceline: Run, tiny_gguf: Path, prompts: Path, tmp_path: Path
) -> None:
    answers, out = tmp_path / "answers.jsonl", tmp_path / "head"
    short = ("--device", "cpu", "--max-tokens", "12")
    assert paceline("train", "answers", tiny_gguf, "--data", prompts, "--out", answers, *short)[0] == 0
    written = answers.read_bytes()
    code, _, stderr = paceline(
        "train", "eagle3", tiny_gguf, "--data", answers, "--out", out, *SMALL, "--evaluate", "0"
    )
    assert code == 0, stderr
    assert answers.read_bytes() == written
    further = tmp_path / "further"
    again = ("--data", answers, "--out", further, *SMALL, "--evaluate", "0", "--init-from", out)
    assert paceline("train", "eagle3", tiny_gguf, *again)[0] == 0
    before, after = (load_head(folder).tensors["fc.weight"].float32() for folder in (out, further))
    assert before.shape == after.shape
    assert (before != after).any()
    wide = tmp_path / "wide"
    wider = ("--data", answers, "--out", wide, *SMALL, "--evaluate", "0", "--init-from", out)
    code, _, stderr = paceline("train", "eagle3", tiny_gguf, *wider, "--intermediate-size", "999")
    assert code == 0, stderr
    assert load_head(wide).config.intermediate_size == 999
    code, _, stderr = paceline("train", "eagle3", tiny_gguf, *wider, "--intermediate-size", "1")
    assert code != 0
    assert "Leave out --intermediate-size, or give a larger one." in " ".join(stderr.split())


def test_a_model_without_a_chat_template_answers_texts_but_those_that_are_measured_with(
    paceline: Run, prompts: Path, tmp_path: Path
) -> None:
    model = save_model(tmp_path / "base", "llama")
    measured, answers = tmp_path / "measured.jsonl", tmp_path / "answers.jsonl"
    measured.write_text(json.dumps({"prompt": "One, two!"}))
    given = ("--data", prompts, "--exclude", measured, "--temperatures", "0", "--max-tokens", "6")
    code, _, stderr = paceline("train", "answers", model, *given, "--device", "cpu", "--out", answers)
    assert code == 0, stderr
    assert "1 row left out: in a file of --exclude (first: prompts-2)" in stderr
    assert "4 answers, " in stderr


def test_an_interrupted_command_says_what_is_kept_and_continues_there(
    paceline: Run, tiny_gguf: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("train", "eagle3", tiny_gguf, "--workload", prompts, *SMALL, "--max-steps", "30")
    command = (*command, "--evaluate", "0", "--out")
    whole, out = tmp_path / "whole", tmp_path / "head"
    assert paceline(*command, whole)[0] == 0

    def press(when: Callable[[Any], bool]) -> Callable[[Any], None]:
        def pressed(progress: Any) -> None:
            if when(progress):
                signal.raise_signal(signal.SIGINT)

        return pressed

    def watching(shown: Callable[..., Any], pressed: Callable[[Any], None]) -> Callable[..., Any]:
        @contextmanager
        def shows(*arguments: Any, **options: Any) -> Iterator[Callable[[Any], bool]]:
            with shown(*arguments, **options) as show:
                yield lambda progress: (pressed(progress), show(progress))[1]

        return shows

    with monkeypatch.context() as patch:
        pressed = press(lambda progress: progress.tokens > 0)
        patch.setattr(job, "answering_progress", watching(job.answering_progress, pressed))
        code, _, stderr = paceline(*command, out)
    assert code == 130
    assert re.search(r"Interrupted: \d+ of 6 answers are kept in .*answers.jsonl\. The same command", stderr)
    assert not (out / "checkpoint.safetensors").exists()
    with monkeypatch.context() as patch:
        pressed = press(lambda progress: progress.step == 10)
        patch.setattr(job, "training_progress", watching(job.training_progress, pressed))
        code, _, stderr = paceline(*command, out)
    assert code == 130
    assert "Interrupted: 10 of 30 steps are kept in" in stderr
    assert not (out / "model.safetensors").exists()
    code, _, stderr = paceline(*command, out)
    assert code == 0, stderr
    assert "going on from the checkpoint: step 10 of 30" in stderr
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_minutes_are_of_the_whole_command(
    paceline: Run, tiny_gguf: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "head"
    small = ("--device", "cpu", "--max-tokens", "12", "--draft-vocab-size", "5", "--unroll", "2")
    command = ("train", "eagle3", tiny_gguf, "--data", prompts, "--out", out, *small, "--minutes", "0.05")
    code, _, stderr = paceline(*command)
    assert code == 0, stderr
    assert re.search(r"step 0 of \d+: loss \d+\.\d+, accepted \d+ \d+ %, \d+ s left", stderr)
    assert re.search(r"the draft vocabulary \(5 tokens\) covers only \d+ % .*--draft-vocab-size", stderr)
    facts = json.loads((out / "training.json").read_text())
    assert facts["batch_tokens"] >= 512
    assert facts["history"][0]["step"] == facts["held_out_history"][0]["step"] == 0
    served = f"paceline serve {tiny_gguf} --draft eagle3:{out}"
    assert f"    {served}\n" in (out / "README.md").read_text()
    assert served in stderr
    trained = (out / "model.safetensors").read_bytes()
    assert paceline(*command)[0] == 0, "nothing is answered or trained again"
    assert (out / "model.safetensors").read_bytes() == trained


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--init-from", "eagle3"), "no draft head 'eagle3'"),
        (("--init-from", "shipped"), "no eagle3 head is shipped for this target, only for"),
        (("--temperatures", "warm"), "--temperatures must be numbers"),
        (("--epochs", "0"), "epochs must be an integer from 1"),
        (("--max-epochs", "2"), "max_epochs is a limit of minutes"),
        (("--data", "no-such-file"), "cannot be read"),
        (("--data", "."), "is no file"),
        (("--device", "gpu"), "device must be cpu, cuda or auto"),
        (("--device", "cuda:99"), "no device cuda:99"),
    ],
)
def test_mistakes_are_reported_before_anything_runs(
    paceline: Run, tiny_gguf: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, _, stderr = paceline("train", "eagle3", tiny_gguf, "--out", tmp_path / "head", *arguments)
    assert code == 2
    assert message in stderr
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize(
    ("flags", "options"),
    [(EAGLE3, Eagle3Options), (BLOCK, BlockOptions), (DSPARK, DSparkOptions), (MEDUSA, MedusaOptions)],
)
def test_flags_have_the_names_and_defaults_of_the_options(flags: Group, options: type[TrainOptions]) -> None:
    training = {field.name: field.default for field in dataclasses.fields(options)}
    assert {flag.name: flag.default for flag in (*flags, *SEED)} == training


def test_if_no_prompt_can_be_used_the_reasons_are_reported(
    paceline: Run, tiny_gguf: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "wizard", "content": "x"}]}\n\n{"prompt": ""}\n')
    code, _, stderr = paceline("train", "eagle3", tiny_gguf, "--data", rows, "--out", tmp_path / "h", *SMALL)
    assert code == 2
    assert "1 row left out: wrong roles (first: rows-1)" in stderr
    assert "None of the prompts can be used" in stderr


def test_a_file_without_rows_is_reported_before_the_model_loads(
    paceline: Run, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_answers, "open_answerer", None)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n")
    code, _, stderr = paceline("train", "eagle3", tiny_gguf, "--data", rows, "--out", tmp_path / "h", *SMALL)
    assert (code, f"There are no rows in {rows}" in stderr) == (2, True)


def test_an_unwritable_folder_is_reported_before_anything_is_answered(
    paceline: Run, tiny_gguf: Path, prompts: Path
) -> None:
    inside_a_file = prompts / "head"
    code, _, stderr = paceline("train", "medusa", tiny_gguf, "--data", prompts, "--out", inside_a_file)
    assert code == 2
    assert "Give another folder with --out" in stderr
    assert "answers" not in stderr


def test_running_out_of_gpu_memory_is_reported_with_the_remedy(
    paceline: Run, tiny_gguf: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(job, "train_head", full)
    short = ("--device", "cpu", "--max-tokens", "4")
    code, _, stderr = paceline(
        "train", "eagle3", tiny_gguf, "--data", prompts, "--out", tmp_path / "h", *short
    )
    assert code == 2
    assert "give a smaller --batch-tokens and another folder" in stderr


def test_answer_flags_match_the_options() -> None:
    answering = {field.name: field.default for field in dataclasses.fields(AnswerOptions)}
    flags = {flag.name: flag.default for flag in (*ANSWERS, *SEED)}
    assert flags.keys() == answering.keys()
    assert flags["temperatures"] == "0,0.8"
    assert answering["temperatures"] == (0.0, 0.8)
    for name in ("max_prompt_tokens", "max_tokens", "seed"):
        assert flags[name] == answering[name]


def test_the_tiny_target_has_too_few_layers_for_the_usual_features(tiny_gguf: Path) -> None:
    assert load_checkpoint(tiny_gguf).config.num_layers == 2  # so that the runs above cover that case
