"""Verification: from logits to tokens, the same ones whatever was drafted."""

from paceline.verify.logprobs import Logprob
from paceline.verify.params import SamplingParams
from paceline.verify.pathwise import Verdict, verify_pathwise
from paceline.verify.sampling import Sampler, Workspace

__all__ = ["Logprob", "Sampler", "SamplingParams", "Verdict", "Workspace", "verify_pathwise"]
