"""Corrections for samples of a policy that is not quite the one being updated.

Letters: B rows, N positions of the response. Three policies may differ: the one whose weights drew
the tokens (behaviour), the one at the start of this update (old), and the one now. The ratio of now
to old is the business of `ratios` and `clips`; here is that of old to behaviour, which is 1 when
the samples are fresh, as sampler and trainer are one program.
"""

import chex
import jax
import jax.numpy as jnp

from jaxppo.core.kl import LOG_RATIO_LIMIT
from jaxppo.core.ratios import token_ratio


def truncated_importance(
    old_logprobs: chex.Array,
    behaviour_logprobs: chex.Array,
    mask: chex.Array,
    *,
    ratio=token_ratio,
    upper: float = 2.0,
) -> jax.Array:
    r"""Importance weights cut at an upper bound: min(old / behaviour, upper).

    Source: Espeholt et al. 2018 (IMPALA), https://arxiv.org/abs/1802.01561, for the
    truncation.

    Args:
      old_logprobs, behaviour_logprobs: [B, N], in nats.
      mask: [B, N] bool, True at actions.
      ratio: `token_ratio` for weights of each token; `trajectory_ratio` for one of the response,
        which is free of bias but for the bound; `sequence_ratio` for the geometric mean.
      upper: > 0.

    Returns:
      [B, N], a `scale` of `policy_loss_sums`; 0 at masked positions. No gradient.
    """
    weights = jnp.minimum(jnp.exp(ratio(old_logprobs, behaviour_logprobs, mask)), upper)
    return jax.lax.stop_gradient(jnp.where(mask, weights, 0))


def masked_importance(
    old_logprobs: chex.Array,
    behaviour_logprobs: chex.Array,
    mask: chex.Array,
    *,
    ratio=token_ratio,
    lower: float = 0.5,
    upper: float = 2.0,
) -> jax.Array:
    r"""Importance weights inside a range, and 0 outside: what has drifted too far is not used.

    Args and returns: see `truncated_importance`; lower: >= 0.
    """
    weights = jnp.exp(ratio(old_logprobs, behaviour_logprobs, mask))
    inside = mask & (weights >= lower) & (weights <= upper)
    return jax.lax.stop_gradient(jnp.where(inside, weights, 0))


def effective_share(weights: chex.Array, mask: chex.Array) -> jax.Array:
    r"""The share of the tokens that importance weights leave: (sum w)^2 / (n sum w^2).

    1 when all weights are equal, 1/n when one token has all the weight, 0 without weight.
    """
    weights = jnp.where(mask, weights, 0)
    square = jnp.sum(jnp.square(weights)) * jnp.maximum(jnp.sum(mask), 1)
    return jnp.where(square > 0, jnp.square(jnp.sum(weights)) / jnp.where(square > 0, square, 1), 0)


def on_policy_enough(
    logprobs: chex.Array,
    old_logprobs: chex.Array,
    advantages: chex.Array,
    mask: chex.Array,
    *,
    threshold: float,
) -> jax.Array:
    r"""Leaves out bad responses that the policy no longer writes.

        keep = A >= 0  or  1/|o| sum_t (log old(t) - log policy(t)) <= threshold

    A response of negative advantage that has become unlikely teaches little, and its gradient is
    large.

    Source: DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, off-policy sequence masking.

    Args:
      logprobs, old_logprobs: [B, N], in nats; give the behaviour policy's for old to count the
        drift of stale samples too.
      advantages: [B, N].
      mask: [B, N] bool, True at actions.
      threshold: in nats a token, >= 0.

    Returns:
      [B, N] bool, a `scale` of `policy_loss_sums`; False at masked positions. No gradient.
    """
    chex.assert_rank([logprobs, old_logprobs, advantages, mask], 2)
    chex.assert_equal_shape([logprobs, old_logprobs, advantages, mask])
    drift = jnp.where(mask, old_logprobs, 0) - jnp.where(mask, logprobs, 0)
    drift = jnp.clip(drift, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    count = jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1)
    near = jnp.sum(drift, axis=1, keepdims=True) / count <= threshold
    return mask & ((jnp.where(mask, advantages, 0) >= 0) | near)
