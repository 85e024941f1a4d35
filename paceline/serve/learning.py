"""`paceline serve --learn`: what is refused, and the collector of a served model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic

from paceline.config import EngineConfig
from paceline.draft.base import UnboundDrafter
from paceline.errors import ConfigError
from paceline.learn.activity import new_activity
from paceline.learn.data.collector import Collector, Policy
from paceline.learn.data.folder import LearnFolder
from paceline.learn.data.selection import ALL_SALTS
from paceline.learn.data.store import TrafficStore, open_store
from paceline.learn.evaluation.history import History
from paceline.learn.evaluation.trial import TrialConfig
from paceline.learn.jobs import ProcessJobs
from paceline.learn.learner import LoadedHead
from paceline.learn.options import Decode, LearnOptions
from paceline.learn.slowdown import Slowdown
from paceline.learn.status import LearnerConfig
from paceline.models.config import ModelConfig
from paceline.models.heads.config import TargetName
from paceline.serve.http.middleware import key_digest
from paceline.serve.learner import LearningModel, first_head
from paceline.serve.loading import ServedModel
from paceline.serve.observability.logs import log_event
from paceline.serve.options import ServeOptions

logger = logging.getLogger(__name__)

REMEMBERED = 10_000  # kept answers that drafters of past responses get at the start, as many as they hold
# the share of a GPU that a trainer takes while requests run, of --learn-max-slowdown. A request beside one of
# its steps stands still meanwhile, so p95 latency shows more of it than the tokens per second do
BUSY_PART = 0.25
TRAINABLE = ("eagle3", "dflash", "dspark")  # methods whose heads can be trained further, as objectives.KINDS


@dataclass(frozen=True)
class TrainableModel(Generic[LoadedHead]):
    """A served model and its head, which can be trained further."""

    target: TargetName
    vocab_size: int
    method: str  # of its head
    first: Path  # the head that it was loaded with
    load: Callable[[Path], LoadedHead]  # what its engine takes as a head, by its folder
    decode: Decode
    config: EngineConfig
    # gives the engine's drafters an answer from before its start: prompt, output; None: engines elsewhere
    remember: Callable[[Sequence[int], Sequence[int]], None] | None = None


def learn_options(flags: Mapping[str, Any], options: ServeOptions, config: EngineConfig) -> LearnOptions:
    """The options of --learn; ConfigError, before anything is loaded, if nothing could be learned.

    `config` is of the served model; of several, none learns.
    """
    given: dict[str, Any] = {
        name: tuple(value or ()) if name in ("learn_skip_key", "learn_generic") else value
        for name, value in flags.items()
    }
    learning = LearnOptions(**given)
    if not learning.learn:
        return learning
    if find_spec("torch") is None:
        raise ConfigError("--learn needs the module torch: run `pip install 'paceline[train]'`.")
    if options.routes is not None:
        raise ConfigError("--learn is for one model: leave it out, or --routes.")
    speculation = config.speculative.speculation()
    automatic = speculation.auto and not speculation.drafters
    if not automatic and not any(name in TRAINABLE for name in speculation.drafters):
        raise ConfigError(
            f"--learn trains the head that drafts, and here is none: give --draft {TRAINABLE[0]}:PATH, or "
            "leave --draft out for a model that has a shipped head."
        )
    salt = learned_salt(learning, options)
    if options.separates_keys and learning.learn_salts == "off" and salt is None:
        raise ConfigError(
            "--learn keeps no requests with a salt, and each API key has its own: give --learn-salts shared "
            "to learn from all of them together, --learn-salt KEY to learn from one of them, or "
            "--share-cache-across-keys."
        )
    learning.redact()
    return learning


def trainable_model(model: ServedModel, config: EngineConfig) -> TrainableModel[UnboundDrafter]:
    """The loaded model with its trainable head; ConfigError if it has none."""
    loaded = model.loaded
    assert loaded is not None
    drafters = loaded.drafters
    method = trainable_method(drafters, loaded.model_config)

    def remember(prompt: Sequence[int], output: Sequence[int]) -> None:
        for drafter in drafters.values():
            if drafter.memory is not None:
                drafter.memory.remember(prompt, output)

    return TrainableModel(
        TargetName(loaded.fingerprint, model.names[0]),
        loaded.model_config.vocab_size,
        method,
        first_head(loaded.speculation, method, loaded.fingerprint),
        partial(loaded.load_head, method),
        model.tokenizer.decode,
        config,
        remember,
    )


def trainable_method(drafters: Iterable[str], model: ModelConfig) -> str:
    """The loaded method whose head learns; ConfigError if there is none."""
    found = [name for name in drafters if name in TRAINABLE]
    if not found:
        raise ConfigError(
            "--learn trains the head that drafts, and none is shipped for this model: train one by "
            "`paceline train eagle3`, and give it as --draft eagle3:PATH."
        )
    if blocks := model.beyond_llama():
        raise ConfigError(
            f"--learn cannot train a head for this {model.family} model, which has "
            f"{', '.join(blocks)}: leave it out."
        )
    return found[0]


@contextmanager
def learning_model(
    learning: LearnOptions, options: ServeOptions, model: TrainableModel[LoadedHead], replicas: int = 1
) -> Iterator[LearningModel[LoadedHead]]:
    """A context with a model that learns on this many engines."""
    folder = LearnFolder(learning.folder(model.target.fingerprint))
    store = open_store(folder.traffic, model.target, model.vocab_size, learning.limits)
    policy = collector_policy(learning, options)
    salt = trained_salt(policy, store)
    if policy.only is not None:
        folder = LearnFolder(folder.root, salt)  # no other server finds these heads
    history = History(folder.heads, model.first)
    collector = Collector(store, policy, learning.redact(), model.decode)
    remembered = 0
    if model.remember is not None:  # what was redacted, refused or too old is not there
        for row in store.newest(REMEMBERED):
            if not row.salt:
                model.remember(row.prompt_ids, row.output_ids)
                remembered += 1
    log_event(
        logger,
        "learning",
        folder=str(folder.root),
        method=model.method,
        share=learning.learn_share,
        salt=salt,
        remembered=remembered,
    )
    device = model.config.backend.choice.device
    generic = [
        part for file in learning.learn_generic for part in ("--generic", str(Path(file).expanduser()))
    ]
    train = ("--minutes", str(learning.learn_minutes), *generic)
    trial = TrialConfig()  # each engine computes keys and values again after a swap
    trial = replace(trial, skipped_steps=replicas * trial.skipped_steps)
    config = LearnerConfig(
        min_rows=learning.learn_min_rows, max_running=learning.learn_max_running, trial=trial
    )
    slowdown = Slowdown(learning.learn_max_slowdown, device)
    with closing(collector), new_activity() as activity:
        busy_share = min(learning.learn_gpu_share, BUSY_PART * learning.learn_max_slowdown)
        shares = ("--gpu-share", str(learning.learn_gpu_share), "--busy-share", str(busy_share))
        both = ("--salt", salt, "--device", device, "--activity", str(activity.path), *shares)
        jobs = ProcessJobs(folder, model.config.model.model, train, both)
        yield LearningModel(model.method, model.load, collector, history, jobs, activity, config, slowdown)


def trained_salt(policy: Policy, store: TrafficStore) -> str:
    """The salt whose rows train the head, as `paceline learn train --salt` takes it; empty: those without.

    How well a head drafts reveals what it was trained on, so rows of a salt train a head that other clients
    use only if all salts are shared.
    """
    if policy.only is not None:
        return store.hash(policy.only)
    return ALL_SALTS if policy.salts == "shared" else ""


def learned_salt(learning: LearnOptions, options: ServeOptions) -> str | None:
    """The one salt to learn from, as Policy.salt_of gives it; None: --learn-salt is not given."""
    if learning.learn_salt is None or not options.separates_keys:
        return learning.learn_salt
    if learning.learn_salt not in options.api_key:
        raise ConfigError(
            "Each of several API keys is a salt of its own: give one of them as --learn-salt, or "
            "--share-cache-across-keys for a cache_salt that all of them may send."
        )
    return key_digest(learning.learn_salt.encode()).hex()


def collector_policy(learning: LearnOptions, options: ServeOptions) -> Policy:
    """Whose requests are kept, by the server's options."""
    return Policy(
        salts=learning.learn_salts,
        only=learned_salt(learning, options),
        separate_keys=options.separates_keys,
        skipped_keys=frozenset(key_digest(key.encode()).hex() for key in learning.learn_skip_key),
        share=learning.learn_share,
    )
