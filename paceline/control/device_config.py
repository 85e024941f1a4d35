"""The part of ControlConfig that is about passes on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class DeviceCostConfig:
    """Seconds of passes on the device, by plan, requests and context."""

    guess_per_token: float = 0.1  # plain passes that a drafted token adds, before anything was measured
    rate: float = 0.05  # step size of the seconds of one kind of pass
    measured_weight: int = 3  # passes; weight of what an earlier engine has learned
    # Kalman filter of what passes take longer than at start-up; the unit is the time of a plain pass
    deviation: float = 0.3  # standard deviation of the first guess, for all plans together
    own_deviation: float = 0.03  # the same for the difference of one plan from that
    drift: float = 0.03  # standard deviation of the change from pass to pass, for all plans together
    own_drift: float = 0.005  # the same for one plan
    noise: float = 0.15  # standard deviation of one observation
    max_outlier: float = 2.0  # ratio to the usual seconds at which an observation is clipped
    # standard deviations; a pass that takes longer does not count: it waited for another process's kernels
    gate: float = 3.0
    catch_up_guess: float = 0.001  # plain passes per token of a head's catching up, before it was measured


@dataclass(frozen=True)
class ChainConfig:
    """Acceptance of chains that are drafted on the device."""

    fade: float = 0.97  # factor on the counts per pass
    recent_fade: float = 0.9  # the same for recent counts: texts differ, and answers are short
    # drafts; weight of the usual acceptance beside the recent counts, times the square root of the requests
    usual_weight: float = 7.0
    least_recent: float = 1e-6  # drafts; fewer recent ones are none: their odds would overflow, and be NaN
    parent_weight: float = 1.0  # drafts; weight of the depth above, where there are few observations
    least_chance: float = 0.005  # of acceptance and of rejection: nothing is certain
    # prior of a node in a tree whose elder siblings were rejected, by their number; the last holds for more
    sibling_chances: tuple[float, ...] = (0.25, 0.14, 0.09)
    sibling_weight: float = 20.0  # tries that the prior counts for
    sibling_fade: float = 0.98  # factor on the counts of siblings per pass with trees


@dataclass(frozen=True)
class DevicePlannerConfig:
    """The choice among a few plans for passes on the device."""

    start_margin: float = 1.04  # over plain decoding, to draft
    switch_margin: float = 1.02  # over the present plan: for less, nothing is switched
    hold: int = 8  # passes
    max_hold: int = 32  # where the choice stays the same; doubled each time
    settle_passes: int = 2  # after a switch, not timed: they overlap with passes of the old plan
    attach_cost: float = 4  # plain passes: a head is attached after the pipeline was drained
    # variance of the passes that a request needs, over that of drafts that are accepted independently of each
    # other: some texts are harder to draft for than others
    text_spread: float = 1.5
    # the tokens over which the cost of a head's catching up is spread
    usual_output: float = 0.6  # of max_tokens, before an output has ended
    least_output: float = 0.25  # of a usual output: the least that is still expected of a request
    end_rate: float = 0.05  # step size of what is learned from each output that ends
    # arms: few, because graphs are captured for each
    head_lengths: tuple[int, ...] = (2, 3, 5, 7)  # tokens of a head's chains
    lookup_lengths: tuple[int, ...] = (3, 7)  # tokens of chains that are looked up in texts
    # tokens of a lookup, and of the head's chain where the lookup finds nothing. Up to 8 rows a
    # megakernel computes all layers, so 7 looked-up tokens cost little more than 5 with one request
    cascade_lengths: tuple[tuple[int, int], ...] = ((2, 2), (3, 3), (5, 5), (7, 7), (15, 5))
    # nodes, branching and depth of a head's trees: with few requests their rows cost little
    trees: tuple[tuple[int, int, int], ...] = ((7, 3, 4), (15, 4, 3), (15, 4, 5))
    # lookups on the device; in a cascade with a head they need longer matches (engine/device_drafting.py)
    lookup: Mapping[str, Any] = field(
        default_factory=lambda: {
            "method": "ngram",
            "num_speculative_tokens": 15,
            "prompt_lookup_min": 3,
            "prompt_lookup_max": 8,
        }
    )
    # prior acceptance by depth (the last holds for deeper tokens), and the drafts that it counts for
    head_chances: tuple[float, ...] = (0.7,)
    sampled_chances: tuple[float, ...] = (0.6,)
    head_weight: int = 12
    lookup_chances: tuple[float, ...] = (0.1, 0.7)  # most lookups find nothing
    lookup_weight: int = 3
    lookup_share: float = 0.12  # of requests for which something is found
