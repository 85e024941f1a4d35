"""draft_model: a second, smaller model guesses what the target will say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from paceline.draft.base import Drafter, DrafterNeeds, DraftSampling, Features, Target
from paceline.draft.draft_cache import DraftCache, SharedPages
from paceline.draft.draft_pass import DraftRunner
from paceline.draft.growth import Scales, make_tree, merged
from paceline.draft.own_pages import OwnPages
from paceline.draft.trees import DraftPlan, DraftTrees
from paceline.draft.vocabulary import Vocabulary, common_vocabulary, vocabulary_intersection
from paceline.errors import ConfigError
from paceline.options import check_bool, check_integer, refuse_unknown
from paceline.verify.sampling import Workspace

if TYPE_CHECKING:
    from paceline.backends.base import Backend
    from paceline.engine.request import Request
    from paceline.kv.cache import KVCache
    from paceline.verify.verdict import Verdict


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class DraftModelOptions:
    """The keys of speculative_config that are draft_model's own."""

    model: str | None = None  # required: an alias, a folder of safetensors, a .gguf file or a hub id
    quantization: str | None = None  # None: the target's
    max_model_len: int | None = None  # None: the draft model's context; longer requests go on without drafts
    use_heterogeneous_vocab: bool = False  # draft with the tokens that two different vocabularies share
    draft_tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(
                "the method draft_model needs a model: name an alias, a path or a hub id, as in "
                f"{{'method': 'draft_model', 'model': 'smollm2-135m'}}; got {self.model!r}."
            )
        if self.quantization is not None and not isinstance(self.quantization, str):
            raise ConfigError(f"quantization must be a text such as 'int8', got {self.quantization!r}.")
        if self.max_model_len is not None:
            check_integer(ConfigError, "max_model_len of the draft model", self.max_model_len, 2, None)
        check_bool(ConfigError, "use_heterogeneous_vocab", self.use_heterogeneous_vocab)
        remedy = "A draft model runs on one device; leave it out."
        check_integer(
            ConfigError, "draft_tensor_parallel_size", self.draft_tensor_parallel_size, 1, 1, remedy
        )


class DraftModelDrafter(Drafter):
    """Runs a model of its own ahead of the target, one pass for each level of the tree.

    It computes what it needs when it proposes, so requests that it does not draft for cost nothing.
    """

    name = "draft_model"
    Options = DraftModelOptions

    def __init__(
        self,
        backend: Backend,
        vocabulary: Vocabulary,
        make_cache: Callable[[KVCache, Backend], DraftCache],
        *,
        vocab_size: int,
        sampling: DraftSampling,
    ) -> None:
        """`make_cache` gives the draft's cache beside the target's; `vocab_size` is the draft model's."""
        self.needs = DrafterNeeds(bytes_per_page=backend.bytes_per_page())
        self._backend = backend
        self._vocab_size = vocab_size
        self._make_cache = make_cache
        self._sampling = sampling
        self._scales = Scales(vocabulary, Workspace(vocabulary.target_size))

    @classmethod
    def load(cls, options: DraftModelOptions, target: Target) -> DraftModelDrafter:
        """The drafter with the model that the options name, run as the target is."""
        from paceline.backends.load import load_backend
        from paceline.models.registry import load_checkpoint, load_tokenizer, resolve

        assert options.model is not None
        path = resolve(options.model)
        checkpoint = load_checkpoint(path)
        config = checkpoint.config
        longest = options.max_model_len or config.max_position
        if longest > config.max_position:
            raise ConfigError(
                f"max_model_len of the draft model is {longest}, but its context is {config.max_position}. "
                f"Use at most {config.max_position}; requests that outgrow it go on without drafts."
            )
        pair = target.tokenizer, load_tokenizer(path), target.config.vocab_size, config.vocab_size
        vocabulary: Vocabulary
        make_cache: Callable[[KVCache, Backend], DraftCache]
        if options.use_heterogeneous_vocab:
            vocabulary = intersection = vocabulary_intersection(*pair, options.model)
            make_cache = partial(OwnPages, longest=longest, vocabulary=intersection)
        else:
            vocabulary = common_vocabulary(*pair, options.model)
            make_cache = partial(SharedPages, longest=longest)
        how = target.backend
        if options.quantization is not None:
            how = replace(how, quantization=options.quantization)
        backend = load_backend(checkpoint, how, target.max_rows, beside=target.loaded)
        assert backend.page_size == target.loaded.page_size, "one kind of backend has one page size"
        return cls(backend, vocabulary, make_cache, vocab_size=config.vocab_size, sampling=target.sampling)

    def bind(self, kv: KVCache) -> None:
        self._cache = self._make_cache(kv, self._backend)
        self._runner = DraftRunner(self._backend, self._cache, self._vocab_size)

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        contexts = self._cache.open(requests, [plan.budget for plan in plans])
        trees = [
            None
            if context is None
            else make_tree(context, plan.shrunk(context.room), self._scales, self._sampling)
            for context, plan in zip(contexts, plans, strict=True)
        ]
        growing = [tree for tree in trees if tree is not None]
        if growing:
            logits = self._runner.catch_up([tree.context for tree in growing])
            for tree, row in zip(growing, logits, strict=True):
                tree.grow(row[None])
        while growing := [tree for tree in growing if tree.frontier]:
            logits = self._runner.run([tree.part() for tree in growing])
            first = 0
            for tree in growing:
                end = first + len(tree.frontier)
                tree.grow(logits[first:end])
                first = end
        for tree in filter(None, trees):
            self._cache.keep_drafted(tree.context, tree.chain_in_place())
        return merged(trees)

    def observe(
        self, requests: Sequence[Request], verdicts: Sequence[Verdict], features: Features | None
    ) -> None:
        for request, verdict in zip(requests, verdicts, strict=True):
            in_place = verdict.accepted == tuple(range(len(verdict.accepted)))
            self._cache.settle(request, in_place)

    def forget(self, request: Request) -> None:
        self._cache.forget(request)
