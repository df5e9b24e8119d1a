"""What each token weighs in the loss.

Letters: S samples of one optimizer step, N positions of the response. Every function is
`(mask [S, N], max_length) -> weights [S, N]`, and the loss is the plain sum of weight times term
over *all* samples of the step. The weights are made once, from the whole step; any way of cutting
the step into micro-batches, rows or devices then adds up to the same loss.

A sample without an action counts nowhere. Masked positions have weight 0.
"""

import chex
import jax
import jax.numpy as jnp


def token_mean(mask: chex.Array, max_length: int | None = None) -> jax.Array:
    r"""Every token of the step weighs the same: 1 / sum_i |o_i|. A long response weighs more.

    DAPO's formula is that of one prompt; over several the mean is of all tokens, as in its code.

    Source: PPO in practice; Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476, section 3.3.

    Args:
      mask: [S, N] bool, True at actions.
      max_length: not used.

    Returns:
      [S, N], of the default float type.
    """
    del max_length
    mask = _checked(mask)
    return mask.astype(float) / jnp.maximum(jnp.sum(mask), 1)


def sequence_mean(mask: chex.Array, max_length: int | None = None) -> jax.Array:
    r"""Every response weighs the same, shared by its tokens: 1 / (S |o_i|).

    A token of a short response weighs more than one of a long response.

    Source: Shao et al. 2024 (GRPO), https://arxiv.org/abs/2402.03300.

    Args and returns: see `token_mean`.
    """
    del max_length
    mask = _checked(mask)
    lengths = jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1)
    return mask.astype(float) / lengths / _samples(mask)


def sequence_sum(mask: chex.Array, max_length: int | None = None) -> jax.Array:
    r"""The terms of a response add up, and responses are averaged: 1 / S.

    With log-probs as terms it is the policy gradient of whole responses.

    Source: Williams 1992 (REINFORCE); Liu et al. 2026 (LUSPO), https://arxiv.org/abs/2602.05261.

    Args and returns: see `token_mean`.
    """
    del max_length
    mask = _checked(mask)
    return mask.astype(float) / _samples(mask)


def fixed_length(mask: chex.Array, max_length: int | None = None) -> jax.Array:
    r"""A constant in place of the length: 1 / (S L). No response length is favoured.

    Source: Liu et al. 2025 (Dr. GRPO), https://arxiv.org/abs/2503.20783.

    Args:
      mask: [S, N] bool, True at actions.
      max_length: L, the most tokens a response may have. Not N: that depends on the padding.

    Returns:
      [S, N], of the default float type.

    Raises:
      ValueError: without a max_length.
    """
    if not max_length or max_length < 1:
        raise ValueError(
            f"fixed_length divides by the most tokens a response may have: give max_length >= 1 "
            f"(max_new_tokens, say), not {max_length}."
        )
    return sequence_sum(mask) / max_length


def _checked(mask) -> jax.Array:
    chex.assert_rank(mask, 2)
    return jnp.asarray(mask, bool)


def _samples(mask: jax.Array) -> jax.Array:
    """Samples with an action, at least 1."""
    return jnp.maximum(jnp.sum(jnp.any(mask, axis=1)), 1)
