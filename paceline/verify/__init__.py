"""Verification: from logits to tokens, and how much of a draft is accepted."""

from paceline.core.params import SamplingParams
from paceline.core.sampling import SamplingState
from paceline.core.verdict import Logprob, Verdict
from paceline.verify.sampling import Sampler
from paceline.verify.verdict import Case

__all__ = ["Case", "Logprob", "Sampler", "SamplingParams", "SamplingState", "Verdict"]
