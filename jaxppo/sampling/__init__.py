"""Sampling: the distribution, stop strings, and the decode loop."""

from jaxppo.sampling.decoding import Options, Samples, is_truncating
from jaxppo.sampling.logits import draw, forbid, keep_most_probable, scale, truncate
from jaxppo.sampling.sampler import sample
from jaxppo.sampling.stops import StopTable, stop_table, token_bytes
from jaxppo.sampling.stream import Stream, Streamed, make_stream, sample_stream

__all__ = [
    "Options",
    "Samples",
    "StopTable",
    "Stream",
    "Streamed",
    "draw",
    "forbid",
    "is_truncating",
    "keep_most_probable",
    "make_stream",
    "sample",
    "sample_stream",
    "scale",
    "stop_table",
    "token_bytes",
    "truncate",
]
