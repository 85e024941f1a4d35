"""Verification: from logits to tokens, the same ones whatever was drafted."""

from paceline.verify.logprobs import Logprob
from paceline.verify.params import SamplingParams
from paceline.verify.sampling import Sampler, Workspace
from paceline.verify.verdict import Case, Verdict

__all__ = ["Case", "Logprob", "Sampler", "SamplingParams", "Verdict", "Workspace"]
