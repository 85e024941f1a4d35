"""draft_model: a second, smaller model drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from paceline.draft.base import DrafterNeeds, DraftSampling, Target, UnboundDrafter
from paceline.draft.model.draft_cache import DraftCache, SharedPages
from paceline.draft.model.model_drafter import ModelDrafter
from paceline.draft.model.separate_pages import SeparatePages
from paceline.draft.model.vocabulary import Vocabulary, common_vocabulary, vocabulary_intersection
from paceline.errors import ConfigError
from paceline.options import check_bool, check_integer, refuse_unknown

if TYPE_CHECKING:
    from paceline.backends.async_decoding import DeviceDraft
    from paceline.backends.base import Backend
    from paceline.core.request import Request
    from paceline.core.trees import DraftPlan
    from paceline.kv.cache import KVCache


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class DraftModelOptions:
    """The keys of speculative_config for method draft_model."""

    model: str | None = None  # required: an alias, a folder of safetensors, a .gguf file or a hub id
    quantization: str | None = None  # None: the target's
    max_model_len: int | None = None  # tokens; None: the draft model's context. Longer requests get no drafts
    use_heterogeneous_vocab: bool = False  # draft with the tokens that two different vocabularies share
    draft_tensor_parallel_size: int = 1  # 1: it runs on the target's first device; or as the target

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
        check_integer(ConfigError, "draft_tensor_parallel_size", self.draft_tensor_parallel_size, 1, None)


class DraftModelDrafter(ModelDrafter):
    """Drafts with a model of its own, on the device too if it has the target's vocabulary."""

    name = "draft_model"
    attaches = True
    drafts_on_host = drafts_trees = False
    catch_up_seconds: float | None = None
    Options = DraftModelOptions

    def __init__(
        self,
        backend: Backend,
        vocabulary: Vocabulary,
        cache: DraftCache,
        *,
        vocab_size: int,
        sampling: DraftSampling,
        device_longest: int = 0,
    ) -> None:
        """`device_longest`: tokens of a request that it can draft for on the device; 0: it cannot."""
        super().__init__(backend, vocabulary, cache, vocab_size=vocab_size, sampling=sampling)
        self.needs = DrafterNeeds(bytes_per_page=backend.bytes_per_page())
        self._device_longest = device_longest
        self.device = self if device_longest and backend.drafts_on_device else None

    @classmethod
    def load(cls, options: DraftModelOptions, target: Target) -> UnboundDrafter:
        """The drafter with the model that the options name, on the target's backend."""
        from paceline.backends.load import load_backend
        from paceline.models.registry import load_with_tokenizer, resolve

        assert options.model is not None
        size, ranks = options.draft_tensor_parallel_size, target.backend.tensor_parallel_size
        if size not in (1, ranks):
            allowed = f"Use {ranks}, or 1." if ranks > 1 else "Leave it out."
            raise ConfigError(
                f"draft_tensor_parallel_size is {size}, but the target's tensor_parallel_size is {ranks}. "
                f"{allowed}"
            )
        checkpoint, tokenizer = load_with_tokenizer(resolve(options.model))
        config = checkpoint.config
        if config.recurrent is not None:
            raise ConfigError(
                f"the draft model {options.model} is a {config.family} model with recurrent layers, whose "
                "states cannot be taken back after a rejected draft. Use a draft model without such layers."
            )
        longest = options.max_model_len or config.max_position
        if longest > config.max_position:
            raise ConfigError(
                f"max_model_len of the draft model is {longest}, but its context is {config.max_position}. "
                f"Use at most {config.max_position}; requests that outgrow it continue without drafts."
            )
        pair = target.tokenizer, tokenizer, target.config.vocab_size, config.vocab_size
        vocabulary: Vocabulary
        make_cache: Callable[[KVCache, Backend], DraftCache]
        if options.use_heterogeneous_vocab:
            vocabulary = intersection = vocabulary_intersection(*pair, options.model)
            make_cache = partial(SeparatePages, longest=longest, vocabulary=intersection)
        else:
            vocabulary = common_vocabulary(*pair, options.model)
            make_cache = partial(SharedPages, longest=longest)
        backend_options = target.backend
        if size != backend_options.tensor_parallel_size:
            backend_options = replace(
                backend_options, backend=backend_options.name, tensor_parallel_size=size
            )
        if options.quantization is not None:
            backend_options = replace(backend_options, quantization=options.quantization)
        backend = load_backend(checkpoint, backend_options, target.max_rows, beside=target.loaded)
        assert backend.page_size == target.loaded.page_size, "one kind of backend has one page size"
        # the device computes the target's tokens: on the target's pages, and the model must know every id
        is_shared = not options.use_heterogeneous_vocab and config.vocab_size >= target.config.vocab_size

        def bind(kv: KVCache) -> DraftModelDrafter:
            return cls(
                backend,
                vocabulary,
                make_cache(kv, backend),
                vocab_size=config.vocab_size,
                sampling=target.sampling,
                device_longest=longest if is_shared else 0,
            )

        return UnboundDrafter(cls.name, bind, backend.bytes_per_page())

    def device_draft(self, plan: DraftPlan) -> DeviceDraft | None:
        from paceline.backends.async_decoding import DeviceDraft  # here: drafters load without a backend

        if plan.branching > 1:
            return None
        return DeviceDraft(plan.levels, pool=self._cache.pool, model=self._backend)

    def attach(self, requests: Sequence[Request]) -> bool:
        return self._runner.attach(requests, self._device_longest)

    def prefill_ahead(self, requests: Sequence[Request]) -> None:
        return  # `attach` computes all of it

    def detach(self, requests: Sequence[Request], unsure: int) -> None:
        self._runner.detach(requests, unsure)
