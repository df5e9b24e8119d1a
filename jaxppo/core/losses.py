"""The clipped PPO objective, as sums that add up and as the means they become.

Letters: B rows, T time. Position `t` is the token at `t` taken as an action.

Micro-batches, packed rows and devices hold different numbers of tokens, so a mean of their means is
not the mean over the batch. Therefore everything here is a sum over real tokens until
`finish_metrics`, the one place that divides.
"""

import chex
import jax
import jax.numpy as jnp

from jaxppo.core.kl import LOG_RATIO_LIMIT


def ppo_loss_sums(
    logprobs: chex.Array,
    values: chex.Array,
    old_logprobs: chex.Array,
    old_values: chex.Array,
    advantages: chex.Array,
    returns: chex.Array,
    mask: chex.Array,
    *,
    cliprange: float,
    cliprange_value: float,
    vf_coef: float,
    entropy: chex.Array | None = None,
) -> dict[str, jax.Array]:
    r"""Sums the PPO loss and its statistics over the real tokens.

    With l = logprobs - old_logprobs limited to +-LOG_RATIO_LIMIT, rho = exp(l), A the advantages,
    R the returns, V and V_old the values, each token adds

        policy = max(-A rho, -A clip(rho, 1 - cliprange, 1 + cliprange))
        value  = max((V - R)^2, (V_clip - R)^2) / 2
        total  = policy + vf_coef * value
        with V_clip = clip(V, V_old - cliprange_value, V_old + cliprange_value)

    Gradients flow to `logprobs` and `values` only; the rest are constants of the update. The
    results of several calls add key by key (`jax.tree.map(jnp.add, a, b)`), and `finish_metrics`
    turns the total into means. To accumulate gradients, differentiate "losses/total_loss" and
    divide the sum of the gradients once, by the count of the whole optimizer step.

    Source: Schulman et al. 2017, https://arxiv.org/abs/1707.06347, equation 7; the clipped value
    loss as in OpenAI baselines and trlx.

    Args:
      logprobs: [B, T], log-probs of the actions under the policy now, in nats.
      values: [B, T], now, in units of reward.
      old_logprobs: [B, T], when the actions were sampled.
      old_values: [B, T], when the actions were sampled.
      advantages: [B, T], usually whitened.
      returns: [B, T], targets of the values, in units of reward.
      mask: [B, T] bool, True at actions. What the other positions hold has no influence on value or
        gradient, NaN included.
      cliprange: bound on |rho - 1|; `inf` for none.
      cliprange_value: bound on |V - V_old|, in units of reward; `inf` for none.
      vf_coef: weight of the value loss.
      entropy: [B, T], entropy of the policy in nats; reported, no part of the loss.

    Returns:
      A dict of scalars, float32 or wider, each the sum over real tokens of
        "losses/total_loss", "losses/policy_loss", "losses/value_loss": as above;
        "policy/approx_kl": rho - 1 - l, which estimates KL(old || new);
        "policy/clipfrac", "values/clipfrac": 1 where the clipped term is strictly the larger;
        "policy/entropy": only if given;
        "ratio": rho;
        "values/mean", "old_values/mean", "returns/mean": V, V_old, R;
        "values/values_error": (V - R)^2;
        "returns/square", "residuals/mean": R^2, R - V, for the explained variance;
        "count": 1.

    Raises:
      AssertionError: if the ranks are not 2 or the shapes differ.
    """
    arrays = [logprobs, values, old_logprobs, old_values, advantages, returns]
    if entropy is not None:
        arrays.append(entropy)
    chex.assert_rank([*arrays, mask], 2)
    chex.assert_equal_shape([*arrays, mask])
    arrays = [jnp.asarray(x) for x in arrays]
    mask = jnp.asarray(mask, bool)
    dtype = jnp.promote_types(jnp.result_type(*arrays), jnp.float32)
    # Select on the input: afterwards every term below is finite at masked positions, so that the
    # second selection, in total(), passes back zeros and not 0 * NaN.
    arrays = [jnp.where(mask, x, 0).astype(dtype) for x in arrays]
    logprobs, values = arrays[:2]
    old_logprobs, old_values, advantages, returns = map(jax.lax.stop_gradient, arrays[2:6])

    def total(x):
        return jnp.sum(jnp.where(mask, x, 0), dtype=dtype)

    log_ratio = jnp.clip(logprobs - old_logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = jnp.exp(log_ratio)
    policy_loss = -advantages * ratio
    policy_loss_clipped = -advantages * jnp.clip(ratio, 1 - cliprange, 1 + cliprange)

    policy_sum = total(jnp.maximum(policy_loss, policy_loss_clipped))
    critic = value_loss_sums(values, old_values, returns, mask, cliprange_value=cliprange_value)
    sums = {
        "losses/total_loss": policy_sum + vf_coef * critic["losses/value_loss"],
        "losses/policy_loss": policy_sum,
        "policy/approx_kl": total(jnp.expm1(log_ratio) - log_ratio),
        "policy/clipfrac": total(policy_loss_clipped > policy_loss),
        "ratio": total(ratio),
        "count": total(mask),
        **critic,
    }
    if entropy is not None:
        sums["policy/entropy"] = total(arrays[6])
    return sums


def value_loss_sums(
    values: chex.Array,
    old_values: chex.Array,
    returns: chex.Array,
    mask: chex.Array,
    *,
    cliprange_value: float,
) -> dict[str, jax.Array]:
    """Sums the clipped value loss and the critic's statistics over the real tokens.

    The terms, the arguments and the keys are those of `ppo_loss_sums` that concern values.

    Raises:
      AssertionError: if the ranks are not 2 or the shapes differ.
    """
    arrays = [values, old_values, returns]
    chex.assert_rank([*arrays, mask], 2)
    chex.assert_equal_shape([*arrays, mask])
    arrays = [jnp.asarray(x) for x in arrays]
    mask = jnp.asarray(mask, bool)
    dtype = jnp.promote_types(jnp.result_type(*arrays), jnp.float32)
    values, old_values, returns = (jnp.where(mask, x, 0).astype(dtype) for x in arrays)
    old_values, returns = map(jax.lax.stop_gradient, (old_values, returns))

    def total(x):
        return jnp.sum(jnp.where(mask, x, 0), dtype=dtype)

    # Not old + clip(new - old): inside the range that would differ from `values` by rounding, and
    # count as clipped.
    values_clipped = jnp.clip(values, old_values - cliprange_value, old_values + cliprange_value)
    value_error = jnp.square(values - returns)
    value_error_clipped = jnp.square(values_clipped - returns)
    return {
        "losses/value_loss": total(jnp.maximum(value_error, value_error_clipped)) / 2,
        "values/clipfrac": total(value_error_clipped > value_error),
        "values/mean": total(values),
        "values/values_error": total(value_error),
        "old_values/mean": total(old_values),
        "returns/mean": total(returns),
        "returns/square": total(jnp.square(returns)),
        "residuals/mean": total(returns - values),
    }


def finish_metrics(sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
    r"""Turns sums over real tokens into means, and the moments among them into explained variance.

        values/explained_variance = 1 - Var(R - V) / Var(R)

    It is 1 for perfect values, 0 for values that explain nothing, and 0 by convention where the
    returns do not vary (within the rounding of the sums), as then there is nothing to explain.

    Args:
      sums: what `ppo_loss_sums` returned, or the sum of several; further keys are divided likewise.

    Returns:
      A dict of scalars: the same keys, without "count", "returns/square" and "residuals/mean", and
      with "values/explained_variance" where there is a critic. No token at all gives zeros.
    """
    count = jnp.maximum(sums["count"], 1)
    means = {key: value / count for key, value in sums.items() if key != "count"}
    if "returns/square" not in means:
        return means
    returns_square = means.pop("returns/square")
    residuals = means.pop("residuals/mean")
    returns_variance = returns_square - jnp.square(means["returns/mean"])
    residuals_variance = means["values/values_error"] - jnp.square(residuals)
    # E[R^2] - E[R]^2 of equal returns is rounding noise, of either sign.
    varies = returns_variance > 8 * jnp.finfo(returns_square.dtype).eps * returns_square
    unexplained = residuals_variance / jnp.where(varies, returns_variance, 1)
    means["values/explained_variance"] = jnp.where(varies, 1 - unexplained, 0)
    return means


def ppo_loss(
    logprobs: chex.Array,
    values: chex.Array,
    old_logprobs: chex.Array,
    old_values: chex.Array,
    advantages: chex.Array,
    returns: chex.Array,
    mask: chex.Array,
    *,
    cliprange: float,
    cliprange_value: float,
    vf_coef: float,
    entropy: chex.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Computes the PPO loss of one batch, the mean over its real tokens.

    The arguments, their shapes and the equations are those of `ppo_loss_sums`; the metrics are
    those of `finish_metrics`. A batch without a real token has loss 0 and gradient 0.

    Returns:
      (loss, metrics): a scalar, and a dict of scalars under the names trlx gives them.

    Raises:
      AssertionError: if the ranks are not 2 or the shapes differ.
    """
    sums = ppo_loss_sums(
        logprobs,
        values,
        old_logprobs,
        old_values,
        advantages,
        returns,
        mask,
        cliprange=cliprange,
        cliprange_value=cliprange_value,
        vf_coef=vf_coef,
        entropy=entropy,
    )
    metrics = finish_metrics(sums)
    return metrics["losses/total_loss"], metrics
