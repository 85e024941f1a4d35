"""The shift: chat, then a new domain, then chat again; a static head beside one that learns.

Every request is a prompt that was never sent before. Both heads draft the same requests, and both answers
must be equal. What the learning head answered is collected; when there are enough new rows, a process trains
a candidate, the gate judges it on rows that it was not trained on, and it is swapped in if it gains.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.learning.domains import conversations
from paceline.build import Loaded, build_engine, load_model
from paceline.config import EngineConfig
from paceline.core.params import SamplingParams
from paceline.engine.outputs import RequestOutput
from paceline.errors import ConfigError
from paceline.learn.data.collector import Collector, Origin, Policy
from paceline.learn.data.folder import LearnFolder
from paceline.learn.data.store import StoreLimits, TrafficStore
from paceline.learn.evaluation.gate import Verdict, judge
from paceline.learn.jobs import ProcessJobs
from paceline.llm import LLM
from paceline.models.heads.config import TargetName
from paceline.models.heads.registry import resolve_head

METHOD, OLD_DOMAIN = "eagle3", "chat"
DRAFTED = 5  # tokens of a chain
CACHE_BYTES = 1 << 29  # of each engine: both and the trainer share the device


@dataclass(frozen=True)
class ShiftOptions:
    """The sizes of the experiment."""

    model: str
    domain: str = "tools"
    window: int = 24  # requests that are measured together
    before: int = 4  # windows of chat
    shifted: int = 10  # windows of the new domain
    after: int = 4  # windows of chat again
    train_rows: int = 120  # new rows that start a training
    minutes: float = 5.0  # of each training
    steps: int | None = None  # of each training, instead of minutes
    max_tokens: int = 64
    threads: int | None = None
    device: str = "auto"  # of both engines and of the trainer; on a GPU it takes a tenth of the time


@dataclass(frozen=True)
class Window:
    """Some requests, drafted by both heads."""

    domain: str
    requests: int  # so far, these included
    static: float  # tokens per pass
    learning: float
    same: bool  # both gave the same answers
    swapped: bool = False  # a candidate was swapped in after it
    verdict: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0  # since the start, when it was sent and learned from


@dataclass(frozen=True)
class Shift:
    """The result."""

    options: ShiftOptions
    windows: list[Window]
    seconds: float

    def gain(self, domain: str, last: int = 3) -> float:
        """The learning head's tokens per pass over the static one's, in the last windows of a domain."""
        chosen = [window for window in self.windows if window.domain == domain][-last:]
        return sum(window.learning for window in chosen) / sum(window.static for window in chosen)

    def facts(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return asdict(self)


class Contestant:
    """An engine that drafts with one head at a time, and counts what it gains."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        loaded.engine.prepare()
        self._llm = LLM.from_engine(loaded.engine, loaded.tokenizer)

    def answer(self, chats: Sequence[Any], max_tokens: int) -> list[RequestOutput]:
        """Greedy answers."""
        return self._llm.chat(chats, SamplingParams(temperature=0, max_tokens=max_tokens), use_tqdm=False)

    def use(self, head: Path) -> None:
        """Draft with this head from now on."""
        self.loaded.engine.replace_head(METHOD, self.loaded.load_head(METHOD, head))


def run_shift(
    options: ShiftOptions, root: Path, on_window: Callable[[Window], None] = lambda window: None
) -> Shift:
    """Send the traffic, learn from it in the folder `root`, and measure both heads."""
    if (LearnFolder(root).traffic).exists():
        raise ConfigError(f"{root} has traffic of an earlier run: give another --folder.")
    started = time.monotonic()
    draft = {"method": METHOD, "model": "shipped", "num_speculative_tokens": DRAFTED, "min_prob": 0.0}
    config = EngineConfig.from_options(
        model=options.model,
        speculative_config=draft,
        threads=options.threads,
        device=options.device,
        max_model_len=1024,
        kv_cache_memory_bytes=CACHE_BYTES,
    )
    model = load_model(config)
    static, learning = (Contestant(build_engine(config, model)) for _ in range(2))
    learner = Learner(options, config.backend.choice.device, root, learning)
    windows: list[Window] = []
    sent: dict[str, int] = {}
    phases = [OLD_DOMAIN] * options.before + [options.domain] * options.shifted + [OLD_DOMAIN] * options.after
    for number, domain in enumerate(phases):
        if number == options.before:
            learner.begin()
        chats = conversations(domain, sent.get(domain, 0), options.window)
        sent[domain] = sent.get(domain, 0) + len(chats)
        first, second = (each.answer(chats, options.max_tokens) for each in (static, learning))
        learner.collect(second, domain)
        verdict = learner.learn() if number >= options.before and number + 1 < len(phases) else None
        windows.append(
            Window(
                domain,
                sum(sent.values()),
                tokens_per_pass(first),
                tokens_per_pass(second),
                [each.outputs[0].token_ids for each in first]
                == [each.outputs[0].token_ids for each in second],
                verdict is not None and verdict.passes,
                {} if verdict is None else verdict.evidence(),
                time.monotonic() - started,
            )
        )
        on_window(windows[-1])
    learner.close()
    return Shift(options, windows, time.monotonic() - started)


class Learner:
    """Collects, trains, judges and swaps, one after the other: a server does it beside its traffic."""

    def __init__(self, options: ShiftOptions, device: str, root: Path, contestant: Contestant) -> None:
        self._options, self._contestant = options, contestant
        loaded, self._folder = contestant.loaded, LearnFolder(root)
        target = TargetName(loaded.fingerprint, options.model)
        self._store = TrafficStore(
            self._folder.traffic, target, loaded.model_config.vocab_size, StoreLimits()
        )
        self._collector = Collector(self._store, Policy())
        # the traffic waits for the training here, so its priority is the usual one
        both = ("--nice", "0", "--device", device)
        threads = ("--threads", str(options.threads)) if options.threads else ()
        minutes = ("--minutes", str(options.minutes))
        length = minutes if options.steps is None else ("--steps", str(options.steps))
        self._jobs = ProcessJobs(self._folder, options.model, (*length, *threads), both)
        self._present = resolve_head("shipped", METHOD, loaded.fingerprint)
        self._swaps = 0
        self.begin()

    def begin(self) -> None:
        """Count new rows from now on: what came before is old traffic."""
        self._since, self._new_rows = time.time(), 0

    def collect(self, outputs: Sequence[RequestOutput], domain: str) -> None:
        """Keep finished requests."""
        origin = Origin(SamplingParams(temperature=0), segment=domain)
        for output in outputs:
            self._collector.offer(output, origin)
        self._new_rows += len(outputs)

    def learn(self) -> Verdict | None:
        """Train on the new rows, if there are enough, and swap in a candidate that passes the gate."""
        if self._new_rows < self._options.train_rows:
            return None
        began, self._new_rows = time.time(), 0
        candidate = asyncio.run(self._jobs.train(self._present, self._since))
        if candidate is None:
            return Verdict(False, "the trainer found nothing better")
        replay = asyncio.run(self._jobs.score(self._present, candidate))
        if replay is None:
            return Verdict(False, "the candidate could not be scored")
        verdict = judge(replay)
        if verdict.passes:
            self._swaps += 1
            self._present = candidate.rename(self._folder.root / f"head-{self._swaps}")
            self._contestant.use(self._present)
            self._since = began
        return verdict

    def close(self) -> None:
        self._collector.close()


def tokens_per_pass(outputs: Sequence[RequestOutput]) -> float:
    """Tokens per pass of the target after the first token, which needs a pass without a draft."""
    tokens = sum(len(output.outputs[0].token_ids) - 1 for output in outputs)
    accepted = sum(output.metrics.speculative.num_accepted_draft_tokens for output in outputs)
    return tokens / max(1, tokens - accepted)
