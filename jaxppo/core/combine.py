"""Several rewards of one sample become one figure. Letters: B samples, K rewards."""

import chex
import jax
import jax.numpy as jnp

from jaxppo.core.groups import batch_scaled, group_normalised


def combine_rewards(
    rewards: chex.Array, weights: chex.Array, present: chex.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    r"""Adds a sample's rewards by weight, those that apply to it.

        r_i = sum_k w_k r_ik  over the k that are present

    Args:
      rewards: [B, K], in units of reward.
      weights: [K].
      present: [B, K] bool, False where a reward function gave None: it does not apply.

    Returns:
      (rewards [B], present [B]): a sample to which no reward applies is missing, and has 0.

    Raises:
      AssertionError: if the shapes do not fit.
    """
    rewards, weights, present = _prepare(rewards, weights, present)
    return jnp.sum(rewards * weights, axis=1), present.any(axis=1)


def normalised_sum(
    rewards: chex.Array,
    weights: chex.Array,
    groups: chex.Array,
    present: chex.Array | None = None,
    *,
    eps: float = 1e-4,
) -> jax.Array:
    r"""Normalises each reward in its group before adding, so that none drowns the others.

        x_i = sum_k w_k (r_ik - mean_k) / (std_k + eps),   A_i = x_i / (std(x) + eps)

    The paper subtracts the batch mean of x too, which is 0, as every group's is.

    Source: Liu et al. 2026 (GDPO), https://arxiv.org/abs/2601.05242.

    Args:
      rewards: [B, K]; weights: [K]; present: [B, K], see `combine_rewards`.
      groups: [B] integers, equal for samples of one prompt.
      eps: added to the standard deviations, which are by n - 1.

    Returns:
      [B]; 0 for a sample to which no reward applies, and where no reward of a group has spread.
    """
    rewards, weights, present = _prepare(rewards, weights, present)
    each = [group_normalised(r, groups, p, eps=eps) for r, p in zip(rewards.T, present.T)]
    summed = jnp.stack(each, axis=1) @ weights.astype(rewards.dtype)
    return batch_scaled(summed, present.any(axis=1), eps=eps)


def _prepare(rewards, weights, present):
    rewards, weights = jnp.asarray(rewards), jnp.asarray(weights)
    present = jnp.ones(rewards.shape, bool) if present is None else jnp.asarray(present, bool)
    chex.assert_rank([rewards, weights], [2, 1])
    chex.assert_equal_shape([rewards, present])
    chex.assert_axis_dimension(weights, 0, rewards.shape[1])
    dtype = jnp.promote_types(rewards.dtype, jnp.float32)
    return jnp.where(present, rewards, 0).astype(dtype), weights.astype(dtype), present
