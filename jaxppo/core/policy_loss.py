"""The policy loss of every method here: ratio, clip and weights are functions that it is given.

Letters: B rows, N positions of the response. Position `t` is the token at `t` taken as an action.
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from jaxppo.core.clips import Clipped, clip_ratio
from jaxppo.core.kl import LOG_RATIO_LIMIT, kl_loss
from jaxppo.core.losses import finish_metrics
from jaxppo.core.normalisers import token_mean
from jaxppo.core.ratios import token_ratio

Ratio = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Clip = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], Clipped]
Normaliser = Callable[[jax.Array, int | None], jax.Array]


def policy_loss_sums(
    logprobs: chex.Array,
    old_logprobs: chex.Array,
    advantages: chex.Array,
    mask: chex.Array,
    weights: chex.Array,
    *,
    ratio: Ratio = token_ratio,
    clip: Clip = clip_ratio,
    scale: chex.Array | None = None,
    ref_logprobs: chex.Array | None = None,
    kl_kind: str = "k3",
    behaviour_logprobs: chex.Array | None = None,
    kl: chex.Array | None = None,
    kl_coef: chex.Numeric = 0.0,
    entropy: chex.Array | None = None,
    entropy_weights: chex.Array | None = None,
    entropy_coef: chex.Numeric = 0.0,
) -> dict[str, jax.Array]:
    r"""Sums the policy loss by weight, and its statistics over the real tokens.

        l      = ratio(logprobs, old_logprobs, mask)
        policy = sum w scale clip(l, logprobs, advantages, mask).loss
        KL     = sum w kl_term
        total  = policy + kl_coef KL - entropy_coef sum w_entropy entropy

    The sums run over the rows given. With weights made from the whole optimizer step (see
    `normalisers`) the results of its micro-batches add up, key by key, to those of the step, and
    "losses/total_loss" is what to differentiate: no division is left to do.

    Args:
      logprobs: [B, N], of the actions under the policy now, in nats; gradients flow to it.
      old_logprobs: [B, N], when the actions were sampled.
      advantages: [B, N], or [B] for one a response.
      mask: [B, N] bool, True at actions. What the other positions of any argument hold has no
        influence on value or gradient, NaN included.
      weights: [B, N], >= 0.
      ratio: log ratios, of `ratios`.
      clip: terms of the loss, of `clips`.
      scale: [B, N], a constant factor of the policy term alone: importance corrections, tokens to
        leave out. None: 1.
      ref_logprobs: [B, N], under the reference; None: no KL in the loss, unless `kl` is given.
      kl_kind: of `kl_loss`.
      behaviour_logprobs: [B, N], under the weights that drew the tokens, by whose ratio to the
        policy now the KL is weighted; None: old_logprobs.
      kl: [B, N], the exact KL of each position, through which gradients flow; in place of an
        estimate from ref_logprobs.
      kl_coef: price of a nat.
      entropy: [B, N], of the policy now, in nats; reported, and gradients flow to it in a bonus.
      entropy_weights: [B, N], such as `token_mean` of the step; None: no bonus.
      entropy_coef: price of a nat, of the bonus.

    Returns:
      A dict of scalars, float32 or wider:
        "losses/total_loss", "losses/policy_loss", and where there is one "losses/kl_loss" and
          "losses/entropy_bonus": weighted sums as above, the last two without coefficient;
        sums over real tokens: "policy/approx_kl" (rho_t - 1 - log rho_t), "policy/clipfrac",
          "ratio", "policy/entropy", "policy/ref_kl", "count".

    Raises:
      AssertionError: if the shapes differ.
    """
    chex.assert_rank([logprobs, old_logprobs, mask, weights], 2)
    chex.assert_equal_shape([logprobs, old_logprobs, mask, weights])
    mask, logprobs = jnp.asarray(mask, bool), jnp.asarray(logprobs)
    advantages = jnp.asarray(advantages)
    if advantages.ndim == 1:
        advantages = jnp.broadcast_to(advantages[:, None], mask.shape)
    kinds = jnp.result_type(logprobs, jnp.asarray(old_logprobs), advantages)
    dtype = jnp.promote_types(kinds, jnp.float32)

    def real(x):
        # Select on the input: 0 * NaN is NaN, in the gradient too.
        chex.assert_equal_shape([x, mask])
        return jnp.where(mask, jnp.asarray(x), 0).astype(dtype)

    def constant(x):
        return jax.lax.stop_gradient(real(x))

    def total(x):
        return jnp.sum(jnp.where(mask, x, 0), dtype=dtype)

    logprobs, old_logprobs, advantages = (
        real(logprobs),
        constant(old_logprobs),
        constant(advantages),
    )
    weights = constant(weights)
    log_ratio = ratio(logprobs, old_logprobs, mask)
    terms = clip(log_ratio, logprobs, advantages, mask)
    factor = weights if scale is None else weights * constant(scale)
    token = jnp.clip(logprobs - old_logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    sums = {
        "losses/policy_loss": total(factor * terms.loss),
        "policy/approx_kl": total(jnp.expm1(token) - token),
        "policy/clipfrac": total(terms.clipped),
        "ratio": total(jnp.exp(log_ratio)),
        "count": total(mask),
    }
    loss = sums["losses/policy_loss"]
    if kl is None and ref_logprobs is not None:
        drawn = old_logprobs if behaviour_logprobs is None else constant(behaviour_logprobs)
        kl = kl_loss(logprobs, constant(ref_logprobs), kl_kind, old_logprobs=drawn)
    if kl is not None:
        kl = real(kl)
        sums["losses/kl_loss"] = total(weights * kl)
        sums["policy/ref_kl"] = total(kl)
        loss += kl_coef * sums["losses/kl_loss"]
    if entropy is not None:
        entropy = real(entropy)
        sums["policy/entropy"] = total(entropy)
        if entropy_weights is not None:
            sums["losses/entropy_bonus"] = total(constant(entropy_weights) * entropy)
            loss -= entropy_coef * sums["losses/entropy_bonus"]
    sums["losses/total_loss"] = loss
    return sums


def policy_loss(
    logprobs: chex.Array,
    old_logprobs: chex.Array,
    advantages: chex.Array,
    mask: chex.Array,
    *,
    normaliser: Normaliser = token_mean,
    max_length: int | None = None,
    **options,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Computes the policy loss of one whole batch.

    Args:
      logprobs, old_logprobs, advantages, mask: see `policy_loss_sums`.
      normaliser: weights of the tokens, of `normalisers`.
      max_length: most tokens a response may have, for `fixed_length`.
      **options: keyword arguments of `policy_loss_sums`.

    Returns:
      (loss, metrics): a scalar, and a dict of scalars; those under "losses/" are as
      `policy_loss_sums` has them, the others means over the real tokens. A batch without a real
      token has loss 0 and gradient 0.
    """
    weights = normaliser(mask, max_length)
    sums = policy_loss_sums(logprobs, old_logprobs, advantages, mask, weights, **options)
    metrics = finish_metrics({k: v for k, v in sums.items() if not k.startswith("losses/")})
    metrics |= {k: v for k, v in sums.items() if k.startswith("losses/")}
    return sums["losses/total_loss"], metrics
