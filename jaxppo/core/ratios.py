"""How far the policy has moved from the one that sampled: per token, or per response.

Letters: B rows, N positions of the response. Every function is
`(logprobs, old_logprobs, mask) -> [B, N]` and gives *log* ratios, which are 0 before the first
update. They are limited to +-LOG_RATIO_LIMIT; at the limit a ratio stands still and passes no
gradient, as in `ppo_loss`. Masked positions have no influence, and hold 0.
"""

import chex
import jax
import jax.numpy as jnp

from jaxppo.core.losses import LOG_RATIO_LIMIT


def token_ratio(logprobs: chex.Array, old_logprobs: chex.Array, mask: chex.Array) -> jax.Array:
    r"""Each token by itself: log rho_t = log pi(t) - log pi_old(t).

    Source: Schulman et al. 2017 (PPO), https://arxiv.org/abs/1707.06347.

    Args:
      logprobs: [B, N], under the policy now, in nats; gradients flow to it.
      old_logprobs: [B, N], when the tokens were sampled; a constant.
      mask: [B, N] bool, True at actions.

    Returns:
      [B, N], in nats.
    """
    return _limit(_differences(logprobs, old_logprobs, mask))


def sequence_ratio(logprobs: chex.Array, old_logprobs: chex.Array, mask: chex.Array) -> jax.Array:
    r"""The response as a whole, by geometric mean: log s = sum_t log rho_t / |o| at every token.

    Source: Zheng et al. 2025 (GSPO), https://arxiv.org/abs/2507.18071.

    Args and returns: see `token_ratio`.
    """
    return _spread(_limit(_mean(_differences(logprobs, old_logprobs, mask), mask)), mask)


def sequence_token_ratio(
    logprobs: chex.Array, old_logprobs: chex.Array, mask: chex.Array
) -> jax.Array:
    r"""The value of `sequence_ratio`, the gradient of each token: sg[s] pi(t) / sg[pi(t)].

    With one advantage a response it equals `sequence_ratio` in value and gradient; it differs where
    the tokens of a response have advantages of their own.

    Source: Zheng et al. 2025 (GSPO-token), https://arxiv.org/abs/2507.18071.

    Args and returns: see `token_ratio`.
    """
    value = jax.lax.stop_gradient(sequence_ratio(logprobs, old_logprobs, mask))
    own = _differences(logprobs, old_logprobs, mask)
    inside = jnp.abs(value) < LOG_RATIO_LIMIT
    return jnp.where(inside, value + (own - jax.lax.stop_gradient(own)), value)


def trajectory_ratio(logprobs: chex.Array, old_logprobs: chex.Array, mask: chex.Array) -> jax.Array:
    r"""The probability of the whole response: log rho = sum_t log rho_t at every token.

    The response is one action. It is the importance weight without bias, and its variance grows
    exponentially with the length.

    Source: Ahmadian et al. 2024 (RLOO), https://arxiv.org/abs/2402.14740.

    Args and returns: see `token_ratio`.
    """
    total = jnp.sum(_differences(logprobs, old_logprobs, mask), axis=1, keepdims=True)
    return _spread(_limit(total), mask)


def _differences(logprobs, old_logprobs, mask) -> jax.Array:
    chex.assert_rank([logprobs, old_logprobs, mask], 2)
    chex.assert_equal_shape([logprobs, old_logprobs, mask])
    dtype = jnp.promote_types(jnp.result_type(logprobs, old_logprobs), jnp.float32)
    new, old = (jnp.where(mask, x, 0).astype(dtype) for x in (logprobs, old_logprobs))
    return new - jax.lax.stop_gradient(old)


def _mean(x, mask) -> jax.Array:
    count = jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1)
    return jnp.sum(x, axis=1, keepdims=True) / count.astype(x.dtype)


def _limit(x) -> jax.Array:
    return jnp.clip(x, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _spread(x, mask) -> jax.Array:
    return jnp.where(mask, x, 0)
