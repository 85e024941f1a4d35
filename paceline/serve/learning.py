"""`paceline serve --learn`: what is refused, and the collector of a served model."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from paceline.build import Loaded
from paceline.errors import ConfigError
from paceline.learn.collector import Collector, Policy
from paceline.learn.folder import LearnFolder
from paceline.learn.jobs import ProcessJobs
from paceline.learn.options import LearnOptions
from paceline.learn.selection import ALL_SALTS
from paceline.learn.status import LearnerConfig
from paceline.learn.store import open_store
from paceline.models.heads.config import TargetName
from paceline.serve.learner import LearningModel, history_of
from paceline.serve.loading import ServedModel
from paceline.serve.logs import log_event
from paceline.serve.middleware import key_digest
from paceline.serve.options import ServeOptions
from paceline.serve.routes.file import RoutesFile

logger = logging.getLogger(__name__)

TRAINABLE = ("eagle3", "dflash", "dspark")  # methods whose heads can be trained further, as objectives.KINDS


def learn_options(flags: Mapping[str, Any], options: ServeOptions, declared: RoutesFile) -> LearnOptions:
    """The options of --learn; ConfigError, before anything is loaded, if nothing could be learned."""
    given: dict[str, Any] = {
        name: tuple(value or ()) if name == "learn_skip_key" else value for name, value in flags.items()
    }
    learning = LearnOptions(**given)
    if not learning.learn:
        return learning
    if find_spec("torch") is None:
        raise ConfigError("--learn needs the module torch: run `pip install 'paceline[train]'`.")
    if options.routes is not None:
        raise ConfigError("--learn is for one model: leave it out, or --routes.")
    (entry,) = declared.models.values()
    speculation = entry.config.speculative.speculation()
    automatic = speculation.auto and not speculation.drafters
    if not automatic and not any(name in TRAINABLE for name in speculation.drafters):
        raise ConfigError(
            f"--learn trains the head that drafts, and here is none: give --draft {TRAINABLE[0]}:PATH, or "
            "leave --draft out for a model that has a shipped head."
        )
    separate = _separates_keys(options) and learning.learn_salts == "off"
    if separate:
        raise ConfigError(
            "--learn keeps no requests with a salt, and each API key has its own: give --learn-salts shared "
            "to learn from all of them together, or --share-cache-across-keys."
        )
    learning.redact()
    return learning


def trainable_method(loaded: Loaded) -> str:
    """The method whose head learns; ConfigError if the loaded model has none."""
    found = [name for name in loaded.drafters if name in TRAINABLE]
    if not found:
        raise ConfigError(
            "--learn trains the head that drafts, and none is shipped for this model: train one by "
            "`paceline train eagle3`, and give it as --draft eagle3:PATH."
        )
    if blocks := loaded.model_config.beyond_llama():
        raise ConfigError(
            f"--learn cannot train a head for this {loaded.model_config.family} model, which has "
            f"{', '.join(blocks)}: leave it out."
        )
    return found[0]


@contextmanager
def collecting(
    learning: LearnOptions, options: ServeOptions, declared: RoutesFile, models: Sequence[ServedModel]
) -> Iterator[LearningModel | None]:
    """A context with the served model as one that learns; None without --learn."""
    if not learning.learn:
        yield None
        return
    ((model,), (entry,)) = models, declared.models.values()
    assert model.loaded is not None
    method = trainable_method(model.loaded)
    target = TargetName(model.loaded.fingerprint, model.names[0])
    folder = LearnFolder(learning.folder(target.fingerprint))
    history = history_of(model.loaded, method, folder.heads)
    store = open_store(folder.traffic, target, model.loaded.model_config.vocab_size, learning.limits)
    policy = collector_policy(learning, options)
    collector = Collector(store, policy, learning.redact(), model.tokenizer.decode)
    log_event(logger, "learning", folder=str(folder.root), method=method, share=learning.learn_share)
    salt = ALL_SALTS if learning.learn_salts == "shared" else ""
    both = ("--salt", salt, "--device", entry.config.backend.choice.device)
    train = ("--minutes", str(learning.learn_minutes))
    jobs = ProcessJobs(folder, entry.config.model.model, train, both)
    config = LearnerConfig(min_rows=learning.learn_min_rows, max_running=learning.learn_max_running)
    try:
        yield LearningModel(model.loaded, method, collector, history, jobs, config)
    finally:
        collector.close()


def collector_policy(learning: LearnOptions, options: ServeOptions) -> Policy:
    """Whose requests are kept, by the server's options."""
    return Policy(
        salts=learning.learn_salts,
        separate_keys=_separates_keys(options),
        skipped_keys=frozenset(key_digest(key.encode()).hex() for key in learning.learn_skip_key),
        share=learning.learn_share,
    )


def _separates_keys(options: ServeOptions) -> bool:
    """Whether requests of different API keys are kept apart. With one key there is nothing to separate."""
    return len(set(options.api_key)) > 1 and not options.share_cache_across_keys
