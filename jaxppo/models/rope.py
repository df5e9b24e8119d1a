"""Rotary positions: the frequencies that a config asks for, and the rotation itself.

Letters: `B` batch, `H` heads, `T` tokens, `K` size of a head, `P` rotated pairs.

Frequencies never depend on the length of a sequence: a token would otherwise be rotated one way
while it is sampled and another way when the whole text is scored. The two kinds of scaling that
change with the length (dynamic, longrope) are kept to the lengths at which they do not.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np


class Rope(NamedTuple):
    """How queries and keys of a layer are rotated (RoFormer, arXiv:2104.09864).

    frequencies: `P` angles in radians a position; the first `2 * P` entries of a head are rotated.
    scale: factor on cosine and sine (the attention factor of yarn and longrope).
    interleaved: pairs are neighbours, as in GPT-J; else entry `i` is paired with `i + P`.
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0
    interleaved: bool = False


def frequencies(size: int, theta: float) -> np.ndarray:
    """The unscaled ones, `theta ** (-2 i / size)` for `i < size / 2`."""
    return theta ** (-np.arange(0, size, 2) / size)


def _linear(base, size, theta, p, positions):
    return base / p["factor"], 1.0, positions


def _dynamic(base, size, theta, p, positions):
    return base, 1.0, positions  # up to max_position_embeddings it leaves the frequencies alone


def _llama3(base, size, theta, p, positions):
    low, high = p["low_freq_factor"], p["high_freq_factor"]
    turns = p["original_max_position_embeddings"] * base / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return base * (kept + (1 - kept) / p["factor"]), 1.0, positions


def _yarn(base, size, theta, p, positions):
    """Arxiv 2309.00071: slow frequencies are stretched, fast ones kept, a ramp between."""
    original = p["original_max_position_embeddings"]
    factor = p.get("factor") or positions / original

    def index(turns):  # of the frequency that turns so often within the original length
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index(p.get("beta_fast") or 32), index(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = (np.arange(size // 2) - low) / (high - low if high != low else 0.001)
    stretched = np.clip(ramp, 0.0, 1.0)

    def magnitude(weight):
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    scale = p.get("attention_factor")
    if scale is None:
        weights = p.get("mscale"), p.get("mscale_all_dim")
        scale = magnitude(weights[0]) / magnitude(weights[1]) if all(weights) else magnitude(1.0)
    return base * (stretched / factor + 1 - stretched), scale, positions


def _longrope(base, size, theta, p, positions):
    """Arxiv 2402.13753, up to the original length only, where the short factors hold."""
    original = p["original_max_position_embeddings"]
    factor = p.get("factor") or positions / original
    scale = p.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short = np.asarray(p["short_factor"], float)
    if short.shape != base.shape:
        raise ValueError(f"short_factor has {short.size} entries, not {base.size}")
    return base / short, scale, min(positions, original)


_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_YARN = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
_ORIGINAL = "original_max_position_embeddings"

# what each kind of scaling reads, and the function that applies it
KINDS = {
    "default": (set(), lambda base, size, theta, p, positions: (base, 1.0, positions)),
    "linear": ({"factor"}, _linear),
    "dynamic": ({"factor"}, _dynamic),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL}, _llama3),
    "yarn": ({"factor", _ORIGINAL} | _YARN, _yarn),
    "longrope": (
        {"factor", "short_factor", "long_factor", "attention_factor", _ORIGINAL},
        _longrope,
    ),
}


def make_rope(
    size: int, theta: float, positions: int, parameters: Mapping[str, Any] | None = None
) -> tuple[Rope, int]:
    """Builds the rotation of `size` entries of a head, as `transformers` would.

    Args:
      size: entries of a head that are rotated.
      theta: the base.
      positions: the config's `max_position_embeddings`.
      parameters: the config's `rope_parameters` (`rope_scaling` in older ones).

    Returns:
      The rotation and the number of positions it holds for.

    Raises:
      ValueError: an unknown kind, or options that it doesn't have; all are named.
    """
    given = {k: v for k, v in (parameters or {}).items() if v is not None}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in KINDS:
        raise ValueError(f"rope_type={kind} is not supported; supported are: {', '.join(KINDS)}")
    known, scaled = KINDS[kind]
    unknown = sorted(set(given) - known - _COMMON)
    if unknown:
        named = ", ".join(f"{name}={given[name]}" for name in unknown)
        raise ValueError(f"rope_type={kind} with {named} is not supported")
    base = frequencies(size, theta)
    result, scale, limit = scaled(base, size, theta, {_ORIGINAL: positions, **given}, positions)
    return Rope(tuple(result.tolist()), float(scale)), limit


def rotation(rope: Rope, positions, dtype):
    """Returns cosines and sines, `[B, 1, T, P]`, of tokens at `positions [B, T]`."""
    dtype = jnp.promote_types(dtype, jnp.float32)
    angle = positions[:, None, :, None].astype(dtype) * jnp.asarray(rope.frequencies, dtype)
    return jnp.cos(angle) * rope.scale, jnp.sin(angle) * rope.scale


def rotate(rope: Rope, x_BHTK, cos, sin):
    """Rotates queries or keys; what lies beyond the rotated pairs is left as it is."""
    P = len(rope.frequencies)
    turned = x_BHTK[..., : 2 * P]
    if rope.interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
    else:
        a, b = turned[..., :P], turned[..., P:]
    parts = a * cos - b * sin, b * cos + a * sin
    if rope.interleaved:
        turned = jnp.stack(parts, axis=-1).reshape(turned.shape)
    else:
        turned = jnp.concatenate(parts, axis=-1)
    return jnp.concatenate([turned.astype(x_BHTK.dtype), x_BHTK[..., 2 * P :]], axis=-1)
