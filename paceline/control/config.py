"""ControlConfig: every tuned number of the controller, by part, with its unit and its reason.

Values were tuned on `tests/control/simulation.py` and on the grids of `benchmarks/control`. A "plain pass" is
a decoding pass without drafts; as a unit, it makes a number hold on slow and fast machines alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.control.device_config import ChainConfig, DeviceCostConfig, DevicePlannerConfig


@dataclass(frozen=True)
class PassCostConfig:
    """Seconds of a pass by its rows: an exponentially weighted table."""

    scale_rate: float = 0.05  # step size, per pass, of the factor on all row counts: the machine's speed
    young_passes: int = 8  # the first passes: the mean of these is the first factor
    shape_rate: float = 0.03  # step size of one row count once it was seen often
    measured_weight: int = 12  # passes that a measurement at start-up counts for
    interpolated_weight: int = 4  # passes that a row count between two known ones starts with
    # A row count far from known ones was only guessed: its first passes are believed as they are, and say
    # nothing of the machine's speed.
    max_gap: float = 2.0  # factor between the known row counts below and above it
    max_reach: float = 1.5  # factor to the largest known row count
    guessed_passes: int = 3
    max_outlier: float = 1.5  # ratio to the expected seconds at which an observation is clipped
    slow_weight: float = 0.4  # weight of a slower pass: it may have been preempted, a fast one never is
    per_token_rate: float = 0.05  # step size of the seconds that a new token takes on the host


@dataclass(frozen=True)
class MeasureConfig:
    """The measurement of passes when an engine starts."""

    rows: tuple[int, ...] = (1, 8, 4, 2, 16, 5, 9, 3, 6, 32, 12, 7, 17, 64, 24, 128)  # most informative first
    long_context: int = 1024  # tokens of the context that is compared with an empty one
    small_pass: int = 16  # rows up to which a pass is repeated often
    small_repeats: int = 12  # of small passes; the fastest counts, because other load only slows them
    repeats: int = 3  # of larger passes, up to `large_pass` rows
    large_pass: int = 64  # rows above which a pass is repeated least: on a CPU it takes tenths of a second
    large_repeats: int = 2  # the first one may capture a CUDA graph
    max_seconds: float = 2.0  # in all: it delays the start of a server


@dataclass(frozen=True)
class DraftCostConfig:
    """Seconds of a drafter's call: a Kalman filter over five terms (see cost/draft_calls.py)."""

    # Prior standard deviation of each term, in plain passes. The level's is large: cost that could belong to
    # levels is attributed to them, so that short drafts are tried too often rather than too seldom.
    prior_deviation: tuple[float, ...] = (0.3, 0.02, 0.5, 0.005, 0.008)
    restored_deviation: float = 0.5  # of a cost from memory: its relative deviation
    min_deviation: float = 0.05  # fraction of the prior deviation that is added to that
    drift: float = 0.0005  # fraction by which the covariance returns to the prior per call: costs change
    noise: float = 0.05  # plain passes: deviation between equal calls
    slow_noise: float = 2.0  # times that noise for a call slower than expected: it may have been preempted
    max_deviations: float = 2.0  # at which a slow call is clipped
    slow_calls: int = 3  # in a row that are believed: the drafter has become slower
    warm_up_calls: int = 2  # of which the fastest counts: the first calls fill caches
    catch_up_cost: float = 0.004  # plain passes: prior cost of a token to catch up with
    idle_fade: float = 0.998  # factor on the cost of an unused drafter per choice, so it is tried again
    length_rate: float = 0.2  # step size of a segment's steps per request


@dataclass(frozen=True)
class AcceptanceConfig:
    """How likely drafted nodes are to be accepted."""

    # calibration: a piecewise linear map from a drafter's confidence to the observed acceptance
    points: tuple[float, ...] = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 1.0)
    prior_nodes: float = 3.0  # nodes that "as the drafter says" counts for at each point
    calibration_fade: float = 0.99  # factor on the counts per draft: about the last 100 count
    max_chance: float = 0.995  # nothing is surer than this
    silent_chance: float = 0.7  # confidence per token of a drafter that reports none
    # recent drafts, from which scenarios are sampled
    request_drafts: int = 8  # kept per request: consecutive drafts are alike, but not for long
    shared_drafts: int = 96  # kept per segment and in all
    own_half: int = 8  # own drafts at which half of a request's scenarios are its own
    segment_enough: int = 16  # drafts of a segment above which those of other segments are not sampled
    max_segments: int = 256  # tracked one by one: a client may send any number of names
    first_guess: float = 0.6  # confidence per token of a drafter that was never called
    continuation: float = 0.75  # prior ratio of a node's confidence to its parent's
    continuation_rate: float = 0.02  # step size of that ratio per node
    # acceptance estimates: accepted over predicted tokens, of all, of a segment and of a request
    min_ratio: float = 0.05  # below, a drafter could never come back
    max_ratio: float = 1.3  # of a request over all: above it is chance
    idle_fade: float = 0.97  # factor on the counts per choice: a bad streak must not outlive its drafts
    all_fade: float = 0.97  # factor per draft
    all_prior: float = 15.0  # tokens that the estimate above counts for
    segment_fade: float = 0.98
    segment_prior: float = 40.0
    request_fade: float = 0.97
    request_prior: float = 15.0
    # scenarios
    total_scenarios: int = 128  # of all requests of a choice together: bounds its time
    min_scenarios: int = 8  # of one request
    max_scenarios: int = 48


@dataclass(frozen=True)
class PlannerConfig:
    """The choice of plans for passes through the host."""

    # margins, as ratios of tokens per second
    start_margin: float = 1.05  # over plain decoding, to start drafting: the best of many guesses is too high
    stay_margin: float = 1.0  # over plain decoding, to keep drafting: a few bad drafts mean little
    longer_draft: float = 0.98  # of the best: a longer draft may cost this, because it ends by itself
    cascade_margin: float = 2.0  # times what the expensive drafter gains that the cheap one must promise
    cheaper: float = 3.0  # times: so much cheaper a drafter must be to be asked before another
    good_chance: float = 0.9  # per token, of drafts better than almost all: bounds what can be gained
    min_headroom: float = 0.12  # gain of such drafts below which nothing is searched: real ones gain less
    # thresholds
    min_threshold: float = 0.05  # lowest confidence that a drafter is asked for
    max_threshold: float = 0.63  # highest acceptance chance that is asked for
    min_tokens_left: int = 3  # of a request: with fewer, a draft saves nothing
    # how long a choice holds, in steps
    hold: int = 32
    max_hold: int = 128  # where it stays the same; doubled each time
    arrival_hold: int = 6  # until new requests get their own, or a won probe takes effect
    lasting_tokens: int = 24  # left of the only request, for its choice to hold for the next one too
    warm_up_steps: int = 16  # in which choices hold for one step, while nothing is known
    # how well a drafter is known, in drafts
    unknown_drafts: int = 4
    young_drafts: int = 40
    known_drafts: int = 100
    # steps that are planned in full
    cascade_sample: int = 4  # one in this many asks the second of two drafters alone, to learn its worth
    cached_steps: int = 9  # that follow a planned one with the same plans: planning costs about a row
    quiet_sample: int = 4  # one in this many updates the costs while nothing is drafted
    # a choice is repeated when drafts bring less than expected
    max_shortfall: float = 10.0  # tokens, times the square root of the requests
    shortfall_fade: float = 0.97  # factor per step


@dataclass(frozen=True)
class ExplorerConfig:
    """Time for trying what was not chosen."""

    # through the host: single drafts
    share: float = 0.004  # of all time
    max_saved: float = 12  # steps' time that can be saved up: it would be spent where drafts do not pay
    initial_credit: float = 2.0  # plain passes
    max_nodes: int = 4  # of a probe
    cheap_promise: float = 0.5  # tokens that a cheap probe must promise to replace the chosen draft
    # on the device: trials of a few passes
    device_share: float = 0.01  # of all time
    # passes' time that can be saved up, or what the next trial costs: a head is attached, and tried
    device_saved: float = 8


@dataclass(frozen=True)
class GuardConfig:
    """The A/B test of drafting against plain decoding."""

    plain_steps: int = 2  # of a pair
    min_drafted_steps: int = 80  # of a pair at first
    max_drafted_steps: int = 1280  # where the gain is certain
    trial_steps: int = 20  # drafted steps of a pair after a stop
    min_pairs: int = 6  # before a verdict
    fade: float = 0.93  # factor on a pair's weight per pair
    min_variance: float = 4e-4  # of a pair: a few that agree by chance prove nothing
    stop_steps: int = 256  # without drafts after the first loss, doubled after each
    max_stop_steps: int = 8192
    min_loss: float = 0.005  # log speedup, beyond two standard errors, to stop
    clear_gain: float = 0.02  # log speedup, beyond two standard errors, to test less often
    retry_ratio: float = 1.15  # over the speedup that was promised at the stop: then it is tried at once


@dataclass(frozen=True)
class SegmentConfig:
    """The warning about segments that gain little."""

    min_steps: int = 400  # of a segment's requests before it is judged
    min_accepted: float = 0.1  # accepted tokens per step
    fade: float = 0.995  # factor per step
    max_segments: int = 256


@dataclass(frozen=True)
class ControlConfig:
    """All of them. Components read the module's CONFIG."""

    passes: PassCostConfig = field(default_factory=PassCostConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    draft_calls: DraftCostConfig = field(default_factory=DraftCostConfig)
    device_passes: DeviceCostConfig = field(default_factory=DeviceCostConfig)
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)
    chains: ChainConfig = field(default_factory=ChainConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    device_planner: DevicePlannerConfig = field(default_factory=DevicePlannerConfig)
    explorer: ExplorerConfig = field(default_factory=ExplorerConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    segments: SegmentConfig = field(default_factory=SegmentConfig)


CONFIG = ControlConfig()
