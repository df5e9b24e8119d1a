"""Which samples to train on: the best of a group, those above a percentile, groups with signal.

Letters: B samples, N positions of the response. Everything is deterministic: of equal rewards the
earlier sample is taken. A group whose rewards are all equal, one of a single sample included,
prefers none of its samples, and nothing of it is selected.
"""

import chex
import jax
import jax.numpy as jnp

from jaxppo.core.groups import flatten_groups, group_stats, ranks, siblings


def has_signal(
    rewards: chex.Array, groups: chex.Array | None = None, present: chex.Array | None = None
) -> jax.Array:
    """Tells the samples whose group has two different rewards: what dynamic sampling keeps.

    A group of equal rewards gives every method here a zero advantage, so a loop may draw other
    prompts in its place.

    Source: Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476, section 3.2.

    Args:
      rewards: [B] with `groups`, or [G, n] without.
      groups: [B], integers, equal for siblings.
      present: the shape of rewards, bool; None: all are.

    Returns:
      The shape of rewards, bool; equal within a group, for its missing samples too.
    """
    flat, groups, real = flatten_groups(rewards, groups, present)
    return group_stats(flat, groups, real).varies.reshape(jnp.shape(rewards))


def top_of_group(
    rewards: chex.Array,
    groups: chex.Array | None = None,
    present: chex.Array | None = None,
    *,
    k: int = 1,
) -> jax.Array:
    """Selects the k best of each group: best-of-n with k = 1.

    Source: Dong et al. 2023 (RAFT), https://arxiv.org/abs/2304.06767, for k = 1.

    Args:
      rewards, groups, present: see `has_signal`.
      k: samples to take of each group, >= 1; a smaller group is taken whole.

    Returns:
      The shape of rewards, bool. Time and memory grow with B^2.

    Raises:
      ValueError: if k < 1.
    """
    if k < 1:
        raise ValueError(f"top_of_group needs k >= 1, got {k}.")
    flat, groups, real = flatten_groups(rewards, groups, present)
    chosen = real & group_stats(flat, groups, real).varies
    order = jnp.arange(flat.size)
    ahead = (flat > flat[:, None]) | ((flat == flat[:, None]) & (order < order[:, None]))
    chosen &= jnp.sum(ahead & siblings(groups, real), axis=1) < k
    return chosen.reshape(jnp.shape(rewards))


def above_percentile(
    rewards: chex.Array,
    groups: chex.Array | None = None,
    present: chex.Array | None = None,
    *,
    percentile: chex.Numeric,
) -> jax.Array:
    r"""Selects the samples at or above a quantile of their group, but none of its worst.

        r_i >= quantile_{group(i)}(percentile)  and  r_i > min_{group(i)}

    with the quantile interpolated linearly, as numpy's. The second condition is for rewards of few
    values, whose quantile may be the minimum. It is trlx's rejection fine-tuning with its 0.001
    next to the extremes replaced by a comparison, and the thresholds of other prompts left out.

    Source: trlx, RFTConfig; the method is that of Gulcehre et al. 2023 (ReST),
    https://arxiv.org/abs/2308.08998.

    Args:
      rewards, groups, present: see `has_signal`.
      percentile: in [0, 1], may be traced; see `rft_percentile`.

    Returns:
      The shape of rewards, bool. Time and memory grow with B^2.
    """
    flat, groups, real = flatten_groups(rewards, groups, present)
    stats = group_stats(flat, groups, real)
    place = jnp.asarray(percentile, flat.dtype) * jnp.maximum(stats.count - 1, 0)
    # 0.7 * 10 is 7.000000000000001, and would exclude the sample that stands at 7.
    place = jnp.where(jnp.abs(place - jnp.round(place)) < 1e-4, jnp.round(place), place)
    below, rank = jnp.floor(place), ranks(flat, groups, real)
    same = siblings(groups, real)

    def of_rank(wanted):
        return jnp.sum(jnp.where(same & (rank == wanted[:, None]), flat, 0), axis=1)

    low, high = of_rank(below), of_rank(jnp.minimum(below + 1, stats.count - 1))
    threshold = low + (place - below) * (high - low)
    chosen = real & (flat >= threshold) & (flat > stats.low)
    return chosen.reshape(jnp.shape(rewards))


def rft_percentile(
    step: chex.Numeric, *, start: float, end: float, n_improve_steps: int
) -> chex.Numeric:
    r"""The percentile of an improve step of trlx's rejection fine-tuning.

        start + (end - start) * (step mod n) / n

    Args:
      step: improve steps done so far.
      start, end: in [0, 1]; `end` itself is never reached, as in trlx.
      n_improve_steps: n, after which new samples are drawn and the percentile starts anew.

    Returns:
      A scalar.
    """
    return start + (end - start) * (step % n_improve_steps) / n_improve_steps


def first_of_equal(tokens: chex.Array, mask: chex.Array, groups: chex.Array) -> jax.Array:
    """Tells the samples that no earlier sample of their group equals, token for token.

    Args:
      tokens: [B, N] integers.
      mask: [B, N] bool; what other positions hold has no influence.
      groups: [B] integers.

    Returns:
      [B] bool. Memory grows with B^2.
    """
    chex.assert_rank([tokens, mask], 2)
    chex.assert_equal_shape([tokens, mask])
    mask = jnp.asarray(mask, bool)
    tokens, groups = jnp.where(mask, tokens, 0), jnp.asarray(groups)

    def compare(same, column):
        token, real = column
        equal = (token[:, None] == token) & (real[:, None] == real)
        return same & equal, None

    same, _ = jax.lax.scan(compare, groups[:, None] == groups, (tokens.T, mask.T))
    order = jnp.arange(groups.size)
    return ~jnp.any(same & (order < order[:, None]), axis=1)
