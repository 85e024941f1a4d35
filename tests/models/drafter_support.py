"""Who drafts for which family: every method on `torch` and `cpu`, tried with tiny random heads and models.

A part of `python -m tests.models.support`. A method works if trees (or chains, where it has no others) were
drafted, and the tokens are those of plain decoding.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from paceline.backends.base import Backend
from paceline.backends.load import load_backend, load_medusa_runner
from paceline.backends.options import BackendOptions
from paceline.control.controller import FixedController
from paceline.core.params import SamplingParams
from paceline.core.trees import DraftPlan
from paceline.draft.base import DraftSampling, Target, UnboundDrafter
from paceline.draft.heads.assistant import AssistantDrafter
from paceline.draft.heads.block import DFlashDrafter
from paceline.draft.heads.eagle import Eagle3Drafter
from paceline.draft.heads.head_options import HeadOptions
from paceline.draft.heads.medusa import MedusaDrafter
from paceline.draft.heads.mtp import MtpDrafter, MtpOptions
from paceline.draft.methods import METHODS, load_drafter
from paceline.draft.model.draft_cache import SharedPages
from paceline.draft.model.layerskip import LayerSkipDrafter, LayerSkipOptions
from paceline.draft.model.vocabulary import trimmed_vocabulary
from paceline.draft.speculative_config import parse_speculative_config
from paceline.engine.admission import Limits
from paceline.errors import PacelineError
from paceline.models.checkpoint import Checkpoint
from paceline.models.heads.mtp import LAYOUTS
from paceline.models.needs import missing_blocks
from paceline.models.registry import load_checkpoint
from tests import tiny
from tests.draft.draft_models import model_drafter
from tests.draft.heads.test_assistant import ASSISTANTS, random_assistant
from tests.draft.mimo import DEEPSEEK, QWEN, random_mimo, random_with_block
from tests.engine.test_exactness_cpu import Tokenizer
from tests.engines import new_engine
from tests.models.heads.driver import random_checkpoint
from tests.models.heads.test_medusa_heads import random_medusa
from tests.models.heads.tiny_heads import DFLASH, EAGLE3
from tests.tiny_families import VOCAB_SIZE

ROWS, MAX_LEN = 64, 160
# the tiny checkpoint whose files get a block for multi-token prediction, by family
BLOCKS = {
    "qwen3_5_text": ("qwen3-5", QWEN),
    "qwen3_5_moe_text": ("qwen3-5-moe", QWEN),
    "qwen3_next": ("qwen3-next", QWEN),
    "glm4_moe": ("glm4-moe", DEEPSEEK),
    "deepseek_v3": ("deepseek-v3", DEEPSEEK),
    "kimi_k2": ("deepseek-v3", DEEPSEEK),
    "glm4_moe_lite": ("glm4-moe-lite", DEEPSEEK),
}
OTHERS = {"mtp": "no block in its files", "assistant": "none published"}


def _from_text(config: dict[str, object], target: Target, checkpoint: Checkpoint) -> UnboundDrafter:
    ((name, drafter),) = parse_speculative_config(config).drafters.items()
    return load_drafter(name, drafter, target)


def _draft_model(target: Target, checkpoint: Checkpoint) -> UnboundDrafter:
    """A llama as the draft model."""
    backend = load_backend(_llama(), target.backend, ROWS, beside=target.loaded)
    cache_of, vocabulary = partial(SharedPages, longest=MAX_LEN), trimmed_vocabulary(None, VOCAB_SIZE)
    return model_drafter(backend, vocabulary, cache_of, vocab_size=VOCAB_SIZE).unbound


def _medusa(target: Target, checkpoint: Checkpoint) -> UnboundDrafter:
    head = random_medusa()
    runner = load_medusa_runner(head, target.backend, target.loaded)
    vocabulary = trimmed_vocabulary(None, VOCAB_SIZE)
    return UnboundDrafter("medusa", partial(MedusaDrafter, runner, head.config.num_heads, vocabulary, target))


def _assistant(target: Target, checkpoint: Checkpoint) -> UnboundDrafter:
    unified = checkpoint.config.family == "gemma4_unified_text"
    name = "gemma4-unified" if unified else "gemma4-moe" if checkpoint.config.moe else "gemma4"
    folder = Path(tempfile.mkdtemp())
    random_assistant(tiny.random_model(name), ASSISTANTS[name]).save_pretrained(folder)
    return AssistantDrafter.load(HeadOptions(model=str(folder)), target)


TRIED: dict[str, Callable[[Target, Checkpoint], UnboundDrafter]] = {
    "ngram": partial(_from_text, {"method": "ngram", "prompt_lookup_min": 1}),
    "suffix": partial(_from_text, {"method": "suffix"}),
    "draft_model": _draft_model,
    "eagle3": lambda target, _: Eagle3Drafter.beside(random_checkpoint(EAGLE3), target, None, 0.0),
    "dflash": lambda target, _: DFlashDrafter.beside(random_checkpoint(DFLASH), target, None, 0.0),
    "medusa": _medusa,
    "mtp": lambda target, _: MtpDrafter.load(MtpOptions(min_prob=0.0), target),
    "assistant": _assistant,
    "layerskip": lambda target, _: LayerSkipDrafter.load(LayerSkipOptions(1), target),
}


def drafter_table(checkpoints: dict[str, list[Checkpoint]]) -> list[str]:
    """The lines of the table, one for each family."""
    lines = [
        f"| `model_type` | {' | '.join(f'`{name}`' for name in TRIED)} |",
        f"|{' --- |' * (len(TRIED) + 1)}",
    ]
    for family, made in checkpoints.items():
        cells = [_cell(family, method, made) for method in TRIED]
        lines.append(f"| `{family}` | {' | '.join(cells)} |")
    return lines


def _cell(family: str, method: str, made: list[Checkpoint]) -> str:
    """`yes`; the backends that it works on; or why it does not."""
    if method == "mtp":
        made = [_with_block(family)] if family in LAYOUTS else []
    if method == "assistant" and not family.startswith("gemma4"):
        made = []
    if not made:
        return f"no: {OTHERS[method]}"
    results = {
        backend: {_try(method, checkpoint, backend) for checkpoint in made if _runs(checkpoint, backend)}
        for backend in ("torch", "cpu")
    }
    tried = {backend: " / ".join(sorted(found)) for backend, found in results.items() if found}
    if len({*tried.values()}) == 1:
        return f"{next(iter(tried.values()))}{'' if 'cpu' in tried else ' (`torch`)'}"
    return ", ".join(f"`{backend}`: {found}" for backend, found in tried.items())


def _runs(checkpoint: Checkpoint, backend: str) -> bool:
    return not missing_blocks(checkpoint.config, backend)


def _try(method: str, checkpoint: Checkpoint, backend: str) -> str:
    options = BackendOptions(backend=backend, threads=1)
    loaded, norm = load_backend(checkpoint, options, ROWS), checkpoint.tensors["model.norm.weight"].float32()
    target = Target(
        checkpoint.config, Tokenizer(), options, loaded, ROWS, DraftSampling.COUPLED, "", norm, checkpoint.mtp
    )
    try:
        drafter = TRIED[method](target, checkpoint)
    except PacelineError:
        return "no"
    expected, _ = _tokens(loaded, None, method)
    found, drafted = _tokens(loaded, drafter, method)
    if found != expected:
        return "**other tokens**"
    return "yes" if drafted else "**no drafts**"


def _tokens(backend: Backend, drafter: UnboundDrafter | None, method: str) -> tuple[list[list[int]], int]:
    """The output tokens of some prompts, greedy and sampled, and the number of drafted tokens."""
    plan = DraftPlan(method, 5, branching=2 if METHODS[method].trees else 1)
    engine = new_engine(
        backend,
        Tokenizer(),
        Limits(VOCAB_SIZE, MAX_LEN, 4, ROWS),
        num_pages=64,
        controller=FixedController(plan) if drafter else None,
        drafters={method: drafter} if drafter else {},
    )
    prompts = [[5], [9, 8, 7, 6] * 5, list(range(2, 142))]  # the last has a match for most tokens
    params = SamplingParams(seed=7, max_tokens=12, ignore_eos=True)
    requests = [
        engine.add_request(prompt, replace(params, temperature=temperature))[0]
        for prompt, temperature in zip(prompts, (0.0, 0.8, 1.0), strict=True)
    ]
    while engine.has_unfinished:
        engine.step()
    assert not any(request.error or request.failed_drafters for request in requests)
    drafted = sum(request.speculative.num_draft_tokens for request in requests)
    return [request.output_token_ids for request in requests], drafted


@cache
def _llama() -> Checkpoint:
    return load_checkpoint(tiny.save_checkpoint("llama", Path(tempfile.mkdtemp())))


def _with_block(family: str) -> Checkpoint:
    """A checkpoint of the family with a block for multi-token prediction."""
    folder = Path(tempfile.mkdtemp())
    if family == "mimo":
        random_mimo(folder)
    else:
        random_with_block(*BLOCKS[family], folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"model_type": family}))
    return load_checkpoint(folder)
