"""The base of drafters that run a learned head beside the target: loading, pages and features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np

from paceline.backends.async_decoding import DeviceDraft
from paceline.backends.head_chains import EXTEND_FACTOR
from paceline.backends.heads import ChainNoise, HeadChains, HeadStorage
from paceline.backends.options import BackendOptions
from paceline.core.arrays import Float32Array
from paceline.core.features import Features
from paceline.core.forward import KeptFeatures
from paceline.core.trees import DraftPlan, DraftTrees
from paceline.draft.base import Drafter, DrafterNeeds, DraftSampling, Target, UnboundDrafter
from paceline.draft.growing_tree import Scoring
from paceline.draft.heads.head_options import EagleOptions, find_head
from paceline.draft.heads.head_pages import HeadPages
from paceline.draft.model.draft_cache import Context
from paceline.draft.model.vocabulary import Vocabulary, trimmed_vocabulary
from paceline.errors import ConfigError
from paceline.models.heads.checkpoint import HeadCheckpoint, load_head
from paceline.models.heads.config import BlockConfig
from paceline.models.heads.fingerprint import check_target
from paceline.verify.sampling import Sampler

if TYPE_CHECKING:
    from paceline.core.request import Request
    from paceline.core.verdict import Verdict
    from paceline.kv.cache import KVCache

MAX_TREE_NODES = 63  # drafted nodes of a tree on the device: with its root, the rows of an attention tile

Runner = TypeVar("Runner", bound=HeadStorage)
# From contexts, the most tokens to draft after each, and the least chance of a chain, to the chains
DraftChains = Callable[[Sequence[Context], Sequence[int], float], HeadChains]


@dataclass(frozen=True, eq=False)
class Mask:
    """What the slots of a P-EAGLE head after the first read."""

    token: int
    feature: Float32Array  # [feature width]


@dataclass(frozen=True)
class HeadShape:
    """What a drafter must know about its head."""

    feature_layers: tuple[int, ...]  # the target's hidden states that it reads, in this order
    feature_width: int  # numbers per token, of all these layers
    vocabulary: Vocabulary
    longest: int  # tokens of its context
    block: BlockConfig | None = None  # of a parallel head
    layers: int = 1  # with keys and values
    kv_heads: int = 1
    head_dim: int = 1
    mask: Mask | None = None  # of a P-EAGLE head

    @property
    def is_parallel(self) -> bool:
        """Whether one pass guesses all levels of a draft."""
        return self.block is not None or self.mask is not None

    def stored(self) -> dict[str, object]:
        """What a pool of its keys, values and features depends on, by name."""
        names = ("feature_layers", "feature_width", "longest", "block", "layers", "kv_heads", "head_dim")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class LoadedHead(Generic[Runner]):
    """A head that a runner has loaded, and how it drafts."""

    runner: Runner
    shape: HeadShape
    sampling: DraftSampling
    least_chance: float = 0.0  # a chain ends where the head gives it a lower one

    @property
    def bytes_per_page(self) -> int:
        """Bytes of its keys, values and features beside each page of the target."""
        runner, width = self.runner, self.shape.feature_width
        stored = 0 if runner.keeps_features else HeadPages.feature_bytes_per_page(runner.page_size, width)
        return runner.bytes_per_page() + stored

    def scoring(self) -> Scoring:
        """How its trees score guesses."""
        vocabulary = self.shape.vocabulary
        factor = 1.0 if self.shape.is_parallel else EXTEND_FACTOR  # another level may cost no pass
        return Scoring(vocabulary, Sampler(vocabulary.target_size), self.least_chance, factor)


class PagedHeadDrafter(Drafter, Generic[Runner]):
    """Drafts with a head that stores its keys, values and features beside the target's pages."""

    Options: ClassVar[type[Any]] = EagleOptions
    attaches = True
    drafts_on_host = False
    first_index = 1  # KV index of the head's first slot, see HeadPages

    def __init__(self, loaded: LoadedHead[Runner], kv: KVCache) -> None:
        self._runner, self._shape, self._sampling = loaded.runner, loaded.shape, loaded.sampling
        runner, shape, keeps = self._runner, self._shape, self._runner.keeps_features
        self.needs = DrafterNeeds(() if keeps else shape.feature_layers, loaded.bytes_per_page)
        self.draft_ids = shape.vocabulary.target_ids
        self.drafts_trees = shape.mask is None  # of a fixed shape, on the device
        self.device = self if keeps and self._sampling is not DraftSampling.INDEPENDENT else None
        self.head = self
        self.kv = self._pages = HeadPages(kv, runner, shape.longest, shape.feature_width, self.first_index)
        self._scoring = loaded.scoring()
        self._passes = self._make_passes()
        self._seen_layers: tuple[int, ...] = ()  # feature layers of the last pass
        self._parts = np.empty(0, dtype=np.int64)  # [layers] the index of each layer of the head among them

    @classmethod
    def load_runner(cls, head: HeadCheckpoint, options: BackendOptions, target: Target) -> Runner:
        """A runner of the head on the target's backend."""
        raise NotImplementedError

    @classmethod
    def load(cls, options: Any, target: Target) -> UnboundDrafter:
        """The drafter with the head that the options name."""
        head = load_head(find_head(options, cls.name, target))
        config = head.config
        if config.kind != cls.name:
            raise ConfigError(
                f"{head.source} is an {config.kind} head, but the method is {cls.name}: "
                f"set method to {config.kind!r}."
            )
        if options.parallel_drafting not in (None, config.is_parallel):
            guesses = "all tokens of a draft in one pass" if config.is_parallel else "one token in each pass"
            raise ConfigError(f"{head.source} guesses {guesses}: leave out parallel_drafting.")
        check_target(config, target.config, target.fingerprint, str(head.source), options.any_target)
        return cls.from_checkpoint(head, target, options.quantization, options.min_prob)

    @classmethod
    def from_checkpoint(
        cls, head: HeadCheckpoint, target: Target, quantization: str | None, min_prob: float | None
    ) -> UnboundDrafter:
        """The drafter with a loaded head, on the target's backend."""
        backend_options = target.backend
        if quantization is not None:
            backend_options = replace(backend_options, quantization=quantization)
        runner = cls.load_runner(head, backend_options, target)
        mask = None
        if head.config.mask_token_id is not None:
            mask = Mask(head.config.mask_token_id, head.tensors["mask_hidden"].float32().reshape(-1))
        shape = HeadShape(
            feature_layers=head.config.layers_of(target.config.num_layers),
            feature_width=head.config.feature_width,
            vocabulary=trimmed_vocabulary(head.draft_ids, target.config.vocab_size),
            longest=head.config.max_position,
            block=head.config.block,
            layers=len(head.config.block.layers) if head.config.block else head.config.num_layers,
            kv_heads=head.config.num_kv_heads,
            head_dim=head.config.head_dim,
            mask=mask,
        )
        least_chance = runner.least_chance if min_prob is None else min_prob
        return cls.unbound(LoadedHead(runner, shape, target.sampling, least_chance))

    @classmethod
    def unbound(cls, loaded: LoadedHead[Runner]) -> UnboundDrafter:
        """The drafter with this head, before there is a KV cache."""
        return UnboundDrafter(cls.name, partial(cls, loaded), loaded.bytes_per_page, loaded)

    def _make_passes(self) -> Any:
        """The passes of the head over its pages."""
        raise NotImplementedError

    def replace(self, head: LoadedHead[Runner]) -> None:
        """As for any DraftHead. The pool stays, with the features of all committed tokens: keys and values
        are computed again from these, of each request when it is next drafted for."""
        sizes, wanted = head.shape.stored(), self._shape.stored()
        if differing := [name for name in wanted if sizes[name] != wanted[name]]:
            raise ConfigError(
                f"the new {self.name} head does not fit the pages of the present one: {differing[0]} is "
                f"{sizes[differing[0]]}, not {wanted[differing[0]]}. Restart with the other head."
            )
        runner = self._runner.replaced_by(head.runner)
        self._pages.replace_owner(self._runner, runner)
        self._runner, self._shape, self._scoring = runner, head.shape, head.scoring()
        self.draft_ids, self.drafts_trees = head.shape.vocabulary.target_ids, head.shape.mask is None
        self._passes = self._make_passes()

    def prepare(self) -> None:
        self._runner.prepare(self._pages.pool)

    @property
    def kept_features(self) -> KeptFeatures | None:
        keeps = self._runner.keeps_features
        return KeptFeatures(self._pages.pool, self._shape.feature_layers) if keeps else None

    def observe(
        self, requests: Sequence[Request], verdicts: Sequence[Verdict], features: Features | None
    ) -> None:
        if self._runner.keeps_features:
            return  # passes write them to its pool
        assert features is not None, "the engine provides what DrafterNeeds ask for"
        if features.layers != self._seen_layers:
            self._seen_layers = features.layers
            parts = [features.layers.index(layer) for layer in self.needs.feature_layers]
            self._parts = np.array(parts, dtype=np.int64)
        self._pages.put(features.committed_spans(requests, verdicts), features.values, self._parts)

    def device_draft(self, plan: DraftPlan) -> DeviceDraft | None:
        draft = DeviceDraft(plan.levels, self._runner, self._pages.pool, self._shape.feature_layers)
        if plan.branching == 1:
            return draft
        if not self.drafts_trees or plan.nodes > MAX_TREE_NODES:
            return None
        return replace(draft, branching=plan.branching, nodes=plan.nodes)

    @property
    def catch_up_seconds(self) -> float | None:
        return self._runner.catch_up_seconds

    def attach(self, requests: Sequence[Request]) -> bool:
        attached: bool = self._passes.attach(requests, self._shape.longest)
        return attached

    def prefill_ahead(self, requests: Sequence[Request]) -> None:
        # append any token, so that the slots of their last tokens are computed too
        opened = self._pages.open_computing(requests)
        self._passes.compute([replace(context, tokens=[*context.tokens, 0]) for context in opened])

    def detach(self, requests: Sequence[Request], unsure: int) -> None:
        # slots that read the feature of their own token, not of the one before, are written a token later
        self._passes.detach(requests, unsure + 1 - self.first_index)

    def _is_one_call(self, request: Request, plan: DraftPlan) -> bool:
        """Whether the runner can draft a request's tree alone: a greedy or coupled chain of plain logits."""
        state = request.sampling
        samples_on_runner = state.greedy or (self._sampling is DraftSampling.COUPLED and state.keeps_all)
        return plan.branching == 1 and samples_on_runner and state.leaves_logits(request.num_output)

    def _propose_chains(
        self, contexts: Sequence[Context | None], plans: Sequence[DraftPlan], draft: DraftChains
    ) -> DraftTrees:
        """The drafts of `propose` where all of them are chains, by one call of `draft`."""
        opened = {number: context for number, context in enumerate(contexts) if context is not None}
        proposed: list[Sequence[int]] = [()] * len(contexts)
        chances: list[Sequence[float]] = [()] * len(contexts)
        if opened:
            lengths = [plans[number].shrunk(context.room).levels for number, context in opened.items()]
            min_chances = [plans[number].least_chance or self._scoring.least_chance for number in opened]
            chains = draft(list(opened.values()), lengths, min(min_chances))
            rows = zip(chains.tokens.tolist(), chains.chances.tolist(), chains.lengths.tolist(), strict=True)
            for (number, context), min_chance, (tokens, chain_chances, length) in zip(
                opened.items(), min_chances, rows, strict=True
            ):
                # the call ends chains by the lowest least chance of all; chances only fall along a chain
                while length and chain_chances[length - 1] < min_chance > min(min_chances):
                    length -= 1
                proposed[number] = chain = _up_to_end(context.request, tokens[:length])
                chances[number] = chain_chances[: len(chain)]
        return DraftTrees.chains(proposed, chances)


def noise_of(contexts: Sequence[Context]) -> ChainNoise:
    """The noise of the targets' choices behind these contexts."""
    return ChainNoise(
        np.array([context.request.seed for context in contexts], dtype=np.uint64),
        np.array([context.request.params.temperature for context in contexts], dtype=np.float64),
    )


def _up_to_end(request: Request, tokens: Sequence[int]) -> Sequence[int]:
    """The tokens of a chain up to and including the first that ends the request."""
    before = request.num_output
    ends = (index + 1 for index, token in enumerate(tokens) if request.ends_by(token, before + index))
    return tokens[: next(ends, len(tokens))]
