"""Advantage estimation and whitening.

Letters: B rows, T time. Position `t` is the token at `t` taken as an action, so `values[:, t]` is
the value of the state just before that token and `rewards[:, t]` is what the token earned.
"""

import chex
import jax
import jax.numpy as jnp


def gae(
    rewards: chex.Array,
    values: chex.Array,
    mask: chex.Array,
    *,
    gamma: float,
    lam: float,
) -> tuple[jax.Array, jax.Array]:
    r"""Estimates advantages and returns by generalised advantage estimation.

    With t' the next real position of the row after the real position t,

        delta_t = r_t + gamma * V_{t'} - V_t
        A_t     = delta_t + gamma * lam * A_{t'}
        R_t     = A_t + V_t

    and V_{t'} = A_{t'} = 0 where no real position follows. Masked positions are skipped wherever
    they stand: text that a tool wrote between two turns is no action, so it neither delays the
    credit nor takes part in it, and gamma discounts per action, not per position.

    Source: Schulman et al. 2016, https://arxiv.org/abs/1506.02438, equations 11-16.

    Args:
      rewards: [B, T], in units of reward.
      values: [B, T], in units of reward.
      mask: [B, T] bool, True at actions. What other positions hold has no influence, NaN included.
      gamma: discount per action, in [0, 1].
      lam: weight of the longer estimates, in [0, 1]; 1 gives the Monte Carlo return.

    Returns:
      (advantages, returns), [B, T] each, 0 at masked positions, float32 or wider. Gradients flow to
      rewards and values; `ppo_loss` takes its advantages and returns as constants.

    Raises:
      AssertionError: if the ranks are not 2 or the shapes differ.
    """
    chex.assert_rank([rewards, values, mask], 2)
    chex.assert_equal_shape([rewards, values, mask])
    rewards, values = jnp.asarray(rewards), jnp.asarray(values)
    mask = jnp.asarray(mask, bool)
    dtype = jnp.promote_types(jnp.result_type(rewards, values), jnp.float32)
    # Select on the input: 0 * NaN is NaN, in the gradient too.
    rewards = jnp.where(mask, rewards, 0).astype(dtype)
    values = jnp.where(mask, values, 0).astype(dtype)
    gamma, lam = jnp.asarray(gamma, dtype), jnp.asarray(lam, dtype)

    def step(successor, inputs):
        next_value, next_advantage = successor
        reward, value, real = inputs
        delta = reward + gamma * next_value - value
        advantage = delta + gamma * lam * next_advantage
        # A masked position hands the successor on as it got it.
        successor = (
            jnp.where(real, value, next_value),
            jnp.where(real, advantage, next_advantage),
        )
        return successor, jnp.where(real, advantage, 0)

    nothing_follows = jnp.zeros(rewards.shape[:1], dtype)
    _, advantages = jax.lax.scan(
        step,
        (nothing_follows, nothing_follows),
        (rewards.T, values.T, mask.T),
        reverse=True,
    )
    advantages = advantages.T
    return advantages, advantages + values  # both are 0 at masked positions


def whiten(
    x: chex.Array, mask: chex.Array, *, shift_mean: bool = True, eps: float = 1e-8
) -> jax.Array:
    r"""Scales the real entries of an array to variance 1 and, by default, mean 0.

        y_i = (x_i - m) / sqrt(v + eps)  [+ m, if not shift_mean]

    with m and v the mean and the population variance (divided by n, not n - 1) of the n real
    entries. Only real entries count: padding in the statistics would make the result depend on how
    ragged the batch is. Under `jit` with a sharded `x` the statistics are those of the whole array.

    Args:
      x: any shape.
      mask: the shape of x, bool, True at real entries.
      shift_mean: whether the mean is removed; if not, it is kept as it was.
      eps: added to the variance, in squared units of x.

    Returns:
      The shape of x, 0 at masked entries, float32 or wider. A single real entry becomes 0 (its own
      value without `shift_mean`); no real entry gives zeros.

    Raises:
      AssertionError: if the shapes differ.
    """
    chex.assert_equal_shape([x, mask])
    mask = jnp.asarray(mask, bool)
    x = jnp.where(mask, jnp.asarray(x), 0)
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    count = jnp.maximum(jnp.sum(mask), 1).astype(x.dtype)
    mean = jnp.sum(x) / count
    centred = jnp.where(mask, x - mean, 0)
    variance = jnp.sum(jnp.square(centred)) / count
    whitened = centred * jax.lax.rsqrt(variance + eps)
    return whitened if shift_mean else jnp.where(mask, whitened + mean, 0)
