"""Sampling: the distribution, stop strings, and the decode loop."""

from jaxppo.sampling.logits import draw, forbid, keep_most_probable, scale, truncate
from jaxppo.sampling.sampler import Samples, is_truncating, sample
from jaxppo.sampling.stops import StopTable, stop_table, token_bytes

__all__ = [
    "Samples",
    "StopTable",
    "draw",
    "forbid",
    "is_truncating",
    "keep_most_probable",
    "sample",
    "scale",
    "stop_table",
    "token_bytes",
    "truncate",
]
