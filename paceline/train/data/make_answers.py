"""make_answers: from prompts (from files or self-written) to a file of answers."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.llm import LLM
from paceline.models.checkpoint import Checkpoint
from paceline.models.config import ModelConfig
from paceline.models.registry import load_checkpoint, load_tokenizer
from paceline.options import check_integer, check_number, refuse_unknown
from paceline.train.data.answers import Answerer, Next, write_answers
from paceline.train.data.examples import ExampleWriter
from paceline.train.data.exclusion import Excluded
from paceline.train.data.prompts import Prompt, Skipped, read_all_prompts, tokenized
from paceline.train.data.rows import read_rows
from paceline.train.data.self_prompts import self_written

REQUESTS_ON_GPU = 256  # at once; above this the time of a pass grows in proportion
PROMPTS_ON_CPU = 64  # per batch
PROMPTS_ON_GPU = 1024  # per batch; the last answers of one leave the GPU nearly idle, a kill loses one
RESERVED = 128  # tokens that the engine may reserve for a request beyond its maximum length


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class AnswerOptions:
    """How prompts are answered. The same options and prompts give the same answers."""

    temperatures: tuple[float, ...] = (0.0, 0.8)  # each prompt is answered once at each
    max_prompt_tokens: int = 512  # longer prompts are skipped
    max_tokens: int = 384  # per answer
    self_written: int = 0  # number of prompts that the model writes itself
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperatures:
            raise ConfigError("temperatures is empty: give at least one, such as 0.8.")
        for temperature in self.temperatures:
            check_number(ConfigError, "a temperature", temperature, 0.0, 10.0)
        for name, low in (("max_prompt_tokens", 1), ("max_tokens", 2), ("self_written", 0), ("seed", 0)):
            check_integer(ConfigError, name, getattr(self, name), low, None)


@dataclass(frozen=True)
class Answered:
    """Progress of answering."""

    answers: int  # those of earlier runs included
    tokens: int  # answered so far
    total: int  # answers to all prompts, if no other row is skipped
    skipped: Skipped
    writing_prompts: bool = False  # now, before they are answered

    @property
    def complete(self) -> bool:
        """Whether all prompts have been answered."""
        return self.answers >= self.total


@contextmanager
def open_answerer(
    checkpoint: Checkpoint, device: str, options: AnswerOptions
) -> Iterator[tuple[Answerer, int]]:
    """The target on this device, and its preferred number of prompts per batch."""
    how = engine_options(device)
    if device != "cpu":
        how |= _full_batches(checkpoint.config, options)
    llm = LLM(str(checkpoint.source), speculative_config="off", **how)
    try:
        yield Answerer(llm), PROMPTS_ON_CPU if device == "cpu" else PROMPTS_ON_GPU
    finally:
        llm.close()


def engine_options(device: str) -> dict[str, Any]:
    """Engine options for a device; the torch backend where the cuda backend lacks Triton."""
    if device == "cpu" or find_spec("triton") is not None:
        return {"device": device}
    return {"backend": "torch", "device": device}


def _full_batches(config: ModelConfig, options: AnswerOptions) -> dict[str, Any]:
    """Engine options for answering many prompts on a GPU: full batches, and KV cache for all of them."""
    longest = min(options.max_prompt_tokens + options.max_tokens, config.max_position)
    bytes_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2  # of the KV cache
    return {
        "max_num_seqs": REQUESTS_ON_GPU,
        "max_num_batched_tokens": 8 * REQUESTS_ON_GPU,
        "max_model_len": longest,
        "kv_cache_memory_bytes": REQUESTS_ON_GPU * (longest + RESERVED) * bytes_per_token,
        "enable_prefix_caching": False,
    }


def make_answers(
    model: Path,
    files: Sequence[Path],
    out: Path,
    options: AnswerOptions,
    device: str,
    on_progress: Callable[[Answered], bool] = lambda answered: True,
    seconds: float | None = None,
    exclude: Sequence[Path] = (),
) -> Answered:
    """Answer the prompts of files, and self-written ones, into the file `out`.

    An existing file is continued. `on_progress` is called often, and returns whether to continue. `seconds`:
    answer for this long only, as many prompts as that gives, chosen by the seed, the last ones
    cut short. `exclude`: files of prompts that must not be trained on.
    """
    if not files and not options.self_written:
        raise ConfigError("There are no prompts: give a file of them, or let the model write some.")
    rows = sum(1 for path in files for _ in read_rows(path)) + options.self_written
    if not rows:
        names = ", ".join(map(str, files))
        raise ConfigError(f"There are no rows in {names}: write one object with messages or prompt a line.")
    tokenizer = load_tokenizer(model)
    settings = {"model": model.name, **vars(options)}
    if exclude:
        settings["exclude"] = sorted(path.name for path in exclude)
    checkpoint = load_checkpoint(model)
    writer = ExampleWriter(out, checkpoint.config.vocab_size, settings)
    skipped = Skipped()

    def answered(answers: int = 0, tokens: int = 0, writing_prompts: bool = False) -> Answered:
        total = (rows - skipped.counts.total()) * len(options.temperatures)
        done = len(writer.done) + answers
        return Answered(done, writer.answered_tokens + tokens, total, skipped, writing_prompts)

    with open_answerer(checkpoint, device, options) as (answerer, batch_size):
        end = math.inf if seconds is None else time.monotonic() + seconds

        def after(progress: Answered) -> Next:
            if not on_progress(progress):
                return Next.DROP
            return Next.CUT if time.monotonic() > end else Next.GO_ON

        def watch(answers: int, tokens: int) -> Next:
            return after(answered(answers, tokens))

        def watch_writing(prompts: int, tokens: int) -> Next:
            return after(answered(0, tokens, writing_prompts=True))

        def prompts() -> Iterator[Prompt]:
            given = read_all_prompts(files, skipped)
            yield from given if seconds is None else _in_any_order(given, options.seed)
            if options.self_written:  # for which the model must have a chat template
                yield from self_written(
                    tokenizer,
                    answerer,
                    options.self_written,
                    skipped,
                    options.seed,
                    batch_size=batch_size,
                    watch=watch_writing,
                )

        # at least one token must fit after a prompt
        max_prompt_tokens = min(options.max_prompt_tokens, checkpoint.config.max_position - 1)
        pairs = tokenized(prompts(), tokenizer, max_prompt_tokens, skipped, Excluded(exclude))
        heats, max_tokens, seed = options.temperatures, options.max_tokens, options.seed
        write_answers(pairs, answerer, writer, heats, max_tokens, seed, batch_size, watch)
    writer.close()
    return answered()


def _in_any_order(prompts: Iterator[Prompt], seed: int) -> list[Prompt]:
    """The prompts shuffled: files are often sorted by kind, and only the first ones may be answered."""
    shuffled = list(prompts)
    random.Random(seed).shuffle(shuffled)
    return shuffled
