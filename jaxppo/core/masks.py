"""Which tokens take part. Letters: B rows, N positions of the response."""

import chex
import jax
import jax.numpy as jnp


def ended_only(mask: chex.Array, ended: chex.Array) -> jax.Array:
    """Takes truncated responses out of the loss and out of every denominator.

    Apply it after the advantages: the reward of a truncated response is real and stays in its
    group's baseline. If every response was cut off nothing is left, and the loss is 0.

    Source: Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476, section 3.4.

    Args:
      mask: [B, N] bool, True at actions.
      ended: [B] bool, from the sampler: whether the response ended by itself.

    Returns:
      [B, N] bool.
    """
    chex.assert_rank([mask, ended], [2, 1])
    return jnp.asarray(mask, bool) & jnp.asarray(ended, bool)[:, None]


def top_entropy(entropy: chex.Array, mask: chex.Array, *, share: float) -> jax.Array:
    r"""Tells the tokens at which the policy was least certain: the top share by entropy.

        H_t >= quantile(1 - share) over all real tokens given, interpolated linearly

    Give it the whole optimizer step, so that the threshold does not depend on how the step is cut.
    Equal entropies are kept or left out together.

    Source: Wang et al. 2025, "Beyond the 80/20 rule", https://arxiv.org/abs/2506.01939.

    Args:
      entropy: [B, N], in nats.
      mask: [B, N] bool, True at actions.
      share: in (0, 1]; 0.2 in the paper.

    Returns:
      [B, N] bool, a `scale` of `policy_loss_sums`: left-out tokens still count in denominators.

    Raises:
      ValueError: if share is out of range.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be in (0, 1], got {share}: 0.2 keeps a fifth of the tokens.")
    chex.assert_equal_shape([entropy, mask])
    mask = jnp.asarray(mask, bool)
    values = jnp.sort(jnp.where(mask, entropy, jnp.inf).reshape(-1))
    last = jnp.maximum(jnp.sum(mask) - 1, 0)
    place = (1 - share) * last.astype(values.dtype)
    # a place that only rounding keeps from a whole number would leave the token there out
    place = jnp.where(jnp.abs(place - jnp.round(place)) < 1e-4, jnp.round(place), place)
    below = jnp.floor(place).astype(int)
    low, high = values[below], values[jnp.minimum(below + 1, last)]
    step = jnp.where(place > below, (place - below) * (high - low), 0)
    return mask & (jnp.where(mask, entropy, 0) >= low + step)


def overlong_penalty(lengths: chex.Array, *, max_length: int, buffer: int) -> jax.Array:
    r"""Charges a response the more, the further it reaches into the last tokens it may have.

        0                                for length <= max_length - buffer
        (max_length - buffer - length) / buffer   up to max_length
        -1                               beyond

    Source: Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476, equation 13.

    Args:
      lengths: any shape, tokens of the response.
      max_length: tokens.
      buffer: tokens, >= 1 and <= max_length.

    Returns:
      The shape of lengths, in [-1, 0], to be added to the reward.

    Raises:
      ValueError: if buffer is out of range.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer must be in 1..max_length={max_length}, got {buffer}.")
    return jnp.clip((max_length - buffer - jnp.asarray(lengths)) / buffer, -1.0, 0.0)


def missing_eos_penalty(ended: chex.Array, *, penalty: float) -> jax.Array:
    """Charges a response that did not end by itself: -penalty, to be added to the reward.

    Args:
      ended: any shape, bool, from the sampler.
      penalty: >= 0, in units of reward.

    Returns:
      The shape of ended.

    Raises:
      ValueError: if penalty is negative.
    """
    if penalty < 0:
        raise ValueError(f"penalty must be >= 0, got {penalty}: it is subtracted from the reward.")
    return jnp.where(jnp.asarray(ended, bool), 0.0, -float(penalty))
