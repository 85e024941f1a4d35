"""A request: one prompt and one of its n outputs. Plain Python, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntFlag, auto

from paceline.core.detokenizer import Detokenizer
from paceline.core.params import SamplingParams
from paceline.core.sampling import SamplingState
from paceline.core.stats import DraftKind
from paceline.core.trees import DraftPlan
from paceline.core.verdict import Logprob

UNLIMITED = 1 << 30  # drafted tokens


class SamplingNeeds(IntFlag):
    """What sampling a token needs beyond argmax(logits / temperature + noise).

    A decoder that samples on the device declares which of these it can do.
    """

    NOTHING = 0
    TRUNCATION = auto()  # top-k, top-p, min-p
    LOGIT_EDITS = auto()  # bias, penalties, min_tokens without a token mask
    LOGPROBS = auto()
    TOKEN_MASK = auto()  # a constraint, allowed_token_ids, bad_words: the host makes a mask for every token


class Status(Enum):
    WAITING = "waiting"  # in the queue, holds no KV
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class SpeculativeCounts:
    """Counts of a request's drafts. All zero when nothing was drafted."""

    drafts: dict[DraftKind, int] = field(default_factory=dict)  # drafts of each kind, counted
    draft_time: float = 0.0  # seconds; a step's time is split evenly among the requests it drafted for
    verify_time: float = 0.0  # seconds
    last_drafter: str | None = None

    def add(self, draft: DraftKind) -> None:
        """Count one step's draft."""
        self.drafts[draft] = self.drafts.get(draft, 0) + 1
        self.last_drafter = draft[0]

    @property
    def num_spec_steps(self) -> int:
        """Steps with at least one drafted token."""
        return sum(self.drafts.values())

    @property
    def num_draft_tokens(self) -> int:
        return sum(nodes * count for (_, nodes, _, _), count in self.drafts.items())

    @property
    def num_accepted_draft_tokens(self) -> int:
        return sum(accepted * count for (_, _, _, accepted), count in self.drafts.items())

    @property
    def acceptance_histogram(self) -> list[int]:
        """[i] steps that accepted i tokens."""
        return self._histogram(3)

    @property
    def depth_histogram(self) -> list[int]:
        """[d] drafts that reached depth d, not d + 1."""
        return self._histogram(2)

    @property
    def drafters(self) -> dict[str, int]:
        """Drafts by drafter."""
        names = dict.fromkeys(drafter for drafter, *_ in self.drafts)
        return {name: sum(count for kind, count in self.drafts.items() if kind[0] == name) for name in names}

    def _histogram(self, index: int) -> list[int]:
        """Drafts counted by the field of DraftKind with this index."""
        bins = [0] * (1 + max([int(kind[index]) for kind in self.drafts], default=-1))
        for kind, count in self.drafts.items():
            bins[int(kind[index])] += count
        return bins

    @property
    def drafts_per_position(self) -> list[int]:
        """[d] drafts that reached depth d + 1."""
        reached = self.depth_histogram
        return [sum(reached[depth:]) for depth in range(1, len(reached))]

    @property
    def accepted_per_position(self) -> list[int]:
        """[d] drafts whose token at depth d + 1 was accepted."""
        steps = self.acceptance_histogram
        return [sum(steps[depth + 1 :]) for depth in range(len(self.depth_histogram) - 1)]


@dataclass(eq=False, slots=True)
class Request:
    """One prompt and one output. Only the engine changes it, between two passes; all others read it."""

    request_id: str
    child: int  # which of the n outputs of request_id
    arrival_order: tuple[int, int]  # (order of request_id, child)
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_output: int  # output tokens, by max_tokens and the context length
    ending_ids: frozenset[int]  # end-of-sequence (unless ignored) and stop ids
    sampling: SamplingState
    detokenizer: Detokenizer
    arrival_time: float
    segment: str = ""  # the kind of traffic it belongs to, for statistics
    cache_salt: str = ""  # only requests of the same salt share cached pages and past responses
    adapter: str = ""  # the backend's adapter that it runs with; "": none
    plan: DraftPlan | None = None  # requested by its options; None: the controller decides
    unavailable_drafter: str | None = None  # named by its options, but not loaded by the engine
    leader: Request | None = None  # child 0: the others wait for its prompt's pages, to share them

    token_ids: list[int] = field(default_factory=list)  # prompt and output
    status: Status = Status.WAITING
    slot: int = -1  # row of the KV page table while running
    num_computed: int = 0  # tokens whose keys and values are committed
    finish_reason: str | None = None  # stop | length | abort | error
    stop_reason: int | str | None = None  # the stop id or stop string that ended it
    error: Exception | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    scheduled_time: float | None = None  # when it first took part in a pass
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache when it was first admitted
    num_preemptions: int = 0
    most_tokens: int = field(init=False)  # the most that it can have, prompt and output
    speculative: SpeculativeCounts = field(default_factory=SpeculativeCounts)
    # they raised for this request and are not used again
    failed_drafters: set[str] = field(default_factory=set)
    _first_needs: int = 0  # SamplingNeeds of the first min_tokens tokens, and of the later ones
    _later_needs: int = 0

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.most_tokens = len(self.prompt_token_ids) + self.max_output
        self._first_needs = self._later_needs = self._needs_of(0)
        if self.params.min_tokens:
            self._later_needs = self._needs_of(self.params.min_tokens)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_pending(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 while decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are still missing. Child 0 has them for all n."""
        wanted = self.params.prompt_logprobs is not None and self.child == 0
        return wanted and len(self.prompt_logprobs) < len(self.prompt_token_ids)

    @property
    def undrafted(self) -> bool:
        """Whether its options turn drafting off."""
        return self.plan is not None and self.plan.budget == 0

    @property
    def most_drafted(self) -> int:
        """The most drafted tokens of a pass that its options allow; UNLIMITED if they do not say."""
        return UNLIMITED if self.plan is None else self.plan.nodes

    @property
    def sampling_needs(self) -> int:
        """The SamplingNeeds of its next token, as an int: every pass asks for all requests."""
        if self._first_needs == self._later_needs:
            return self._later_needs
        return self._first_needs if self.num_output < self.params.min_tokens else self._later_needs

    def _needs_of(self, num_output: int) -> int:
        state, needs = self.sampling, SamplingNeeds.NOTHING
        if not state.greedy and not state.keeps_all:
            needs |= SamplingNeeds.TRUNCATION
        if state.needs_edits(num_output):
            needs |= SamplingNeeds.LOGIT_EDITS
        if self.params.logprobs is not None:
            needs |= SamplingNeeds.LOGPROBS
        if state.is_masked:
            needs |= SamplingNeeds.TOKEN_MASK
        return int(needs)

    def ends_by(self, token: int, num_output: int) -> bool:
        """Whether this token ends the output after `num_output` tokens: a stop id, or max_tokens."""
        return token in self.ending_ids or num_output + 1 >= self.max_output
