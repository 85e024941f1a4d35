"""make_answers: from prompts (from files or self-written) to a file of answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.models.checkpoint import Checkpoint
from paceline.models.config import ModelConfig
from paceline.models.registry import load_checkpoint, load_tokenizer
from paceline.models.tokenizer import Tokenizer
from paceline.options import check_integer, check_number, refuse_unknown
from paceline.train.answers import Answerer, write_answers
from paceline.train.examples import ExampleWriter
from paceline.train.prompts import Prompt, Skipped, read_all_prompts, tokenized
from paceline.train.self_prompts import self_written

REQUESTS_ON_GPU = 256  # at once; above this the time of a pass grows in proportion
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

    answers: int
    tokens: int  # answered so far
    skipped: Skipped


@contextmanager
def open_answerer(
    checkpoint: Checkpoint, tokenizer: Tokenizer, device: str, options: AnswerOptions
) -> Iterator[tuple[Answerer, int]]:
    """The answerer for this device, and its preferred number of prompts per batch."""
    if device == "cpu" or find_spec("triton") is not None:
        from paceline.llm import LLM
        from paceline.train.engine_answers import EngineAnswerer

        how = {} if device == "cpu" else _on_gpu(checkpoint.config, device, options)
        llm = LLM(str(checkpoint.source), speculative_config="off", **how)
        try:
            yield EngineAnswerer(llm), 64 if device == "cpu" else PROMPTS_ON_GPU
        finally:
            llm.close()
        return
    import torch

    from paceline.train.sampler import Sampler
    from paceline.train.sequences import load_target

    target = load_target(checkpoint, torch.device(device), torch.bfloat16)
    sampler = Sampler(target, tokenizer.eos_ids)
    yield sampler, sampler.batch_size(options.max_prompt_tokens, options.max_tokens)


def _on_gpu(config: ModelConfig, device: str, options: AnswerOptions) -> dict[str, Any]:
    """Engine options for answering many prompts on a GPU: full batches, and KV cache for all of them."""
    longest = min(options.max_prompt_tokens + options.max_tokens, config.max_position)
    bytes_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2  # of the KV cache
    return {
        "backend": "cuda",
        "device": device,
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
) -> Answered:
    """Answer the prompts of files, and self-written ones, into the file `out`.

    An existing file is continued. After every batch, `on_progress` returns whether to continue.
    """
    if not files and not options.self_written:
        raise ConfigError("There are no prompts: give a file of them, or let the model write some.")
    tokenizer = load_tokenizer(model)
    settings = {"model": model.name, **vars(options)}
    checkpoint = load_checkpoint(model)
    writer = ExampleWriter(out, checkpoint.config.vocab_size, settings)
    skipped = Skipped()
    with open_answerer(checkpoint, tokenizer, device, options) as (answerer, batch_size):

        def prompts() -> Iterator[Prompt]:
            yield from read_all_prompts(files, skipped)
            yield from self_written(
                tokenizer, answerer, options.self_written, skipped, options.seed, batch_size=batch_size
            )

        def on_batch(writer: ExampleWriter) -> bool:
            return on_progress(Answered(len(writer.done), writer.answered_tokens, skipped))

        # at least one token must fit after a prompt
        max_prompt_tokens = min(options.max_prompt_tokens, checkpoint.config.max_position - 1)
        pairs = tokenized(prompts(), tokenizer, max_prompt_tokens, skipped)
        heats, max_tokens, seed = options.temperatures, options.max_tokens, options.seed
        write_answers(pairs, answerer, writer, heats, max_tokens, seed, batch_size, on_batch)
    writer.close()
    return Answered(len(writer.done), writer.answered_tokens, skipped)
