"""Distance from the reference policy: estimates, exact value, loss, controllers of the price."""

import math
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

# Bound on the difference of two log-probs of a token wherever it is exponentiated. exp(20) = 4.9e8
# is far from overflow even when its square is summed in float32, and far outside any clip range.
# Inside the bound value and gradient are untouched. Outside, a ratio of policies stands still and
# passes no gradient; the KL to a reference keeps the gradient it has at the bound.
LOG_RATIO_LIMIT = 20.0

_ESTIMATORS = {
    "k1": lambda r: r,
    "k2": lambda r: jnp.square(r) / 2,
    # expm1 because exp(-r) - 1 loses every digit near r = 0, where a run spends its time.
    "k3": lambda r: jnp.expm1(-r) + r,
    "abs": jnp.abs,
}


def kl_estimate(logprobs: chex.Array, ref_logprobs: chex.Array, kind: str = "k1") -> jax.Array:
    r"""Estimates KL(policy || reference) token by token, from tokens the policy sampled.

    With r = log policy(token) - log reference(token):

        k1  = r               unbiased, may be negative
        k2  = r^2 / 2         biased, never negative
        k3  = exp(-r) - 1 + r unbiased, never negative
        abs = |r|             no estimate of the KL; a symmetric penalty

    The sign inside the exponential of k3 belongs to samples from the *policy*; with the other sign
    the mean is chi^2(policy || reference) - KL. As a term of a loss the estimators differ from
    their use in a reward: over samples from the policy the gradient of k1 averages to 0, that of k2
    to the gradient of the KL, and that of k3 to the gradient of KL(reference || policy).

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html.

    Args:
      logprobs: log-probs of the sampled tokens under the policy, any shape, in nats.
      ref_logprobs: the same under the reference, the same shape.
      kind: "k1", "k2", "k3" or "abs"; or "full", with which both arguments are [..., V], logits or
        log-probs of whole distributions, and the result is `exact_kl`, [...].

    Returns:
      The shape of the inputs, in nats, float32 or wider. Nothing is masked or summed.

    Raises:
      ValueError: if the kind is unknown.
      AssertionError: if the shapes differ.
    """
    if kind == "full":
        return exact_kl(logprobs, ref_logprobs)
    if kind not in _ESTIMATORS:
        valid = ", ".join(repr(name) for name in _ESTIMATORS)
        raise ValueError(f"Unknown kind of KL estimate {kind!r}: use one of {valid}.")
    chex.assert_equal_shape([logprobs, ref_logprobs])
    return _ESTIMATORS[kind](_at_least_float32(logprobs) - _at_least_float32(ref_logprobs))


def exact_kl(logits: chex.Array, ref_logits: chex.Array) -> jax.Array:
    r"""Computes KL(policy || reference) over the whole vocabulary.

        sum_v p_v (log p_v - log q_v),   p = softmax(logits), q = softmax(ref_logits)

    A token the policy cannot sample (logit -inf) contributes 0 to the value and to the gradient,
    whatever the reference thinks of it. A token that only the reference rules out makes the KL
    infinite, as it is.

    Args:
      logits: [..., V], unnormalised.
      ref_logits: [..., V], unnormalised.

    Returns:
      [...], in nats, float32 or wider.

    Raises:
      AssertionError: if the shapes differ.
    """
    chex.assert_equal_shape([logits, ref_logits])
    log_p = jax.nn.log_softmax(_at_least_float32(logits), axis=-1)
    log_q = jax.nn.log_softmax(_at_least_float32(ref_logits), axis=-1)
    p = jnp.exp(log_p)
    # p > 0 rather than log_p > -inf: a p that underflows meets log_q = -inf as 0 * inf otherwise.
    log_ratio = jnp.where(p > 0, log_p - log_q, 0)
    return jnp.sum(p * log_ratio, axis=-1)


def kl_loss(
    logprobs: chex.Array,
    ref_logprobs: chex.Array,
    kind: str = "k3",
    *,
    old_logprobs: chex.Array | None = None,
) -> jax.Array:
    r"""The KL to the reference as a term of a loss: the value of an estimate, the KL's gradient.

    An estimate used as a loss as it is does not have the KL's gradient: over samples from the
    policy that of k1 averages to 0, and that of k3 to the gradient of KL(reference || policy).
    Here, with r = log policy(t) - log reference(t) and a weight w,

        value     w kind(r)
        gradient  w r grad log policy(t),   w = policy(t) / old(t), or 1 without old_logprobs

    Over tokens drawn from `old`, at the prefix they were drawn at, the gradient averages to that of
    KL(policy || reference) for every kind, and the value to the KL for k1 and k3. (With k3 and w
    the gradient is that of w k3, DeepSeek-V3.2's correction.) What a token does to the KL of later
    tokens is left out, as in every KL that stands in a loss; the KL in the reward has it.

    |r| and |log w| are limited to LOG_RATIO_LIMIT in value and weight. The gradient does not end
    there: a policy far from its reference is pulled back with the force of the limit.

    Sources: Schulman 2020, http://joschu.net/blog/kl-approx.html; DeepSeek-V3.2,
    https://arxiv.org/abs/2512.02556.

    Args:
      logprobs: of the sampled tokens under the policy now, any shape, in nats; gradients flow here.
      ref_logprobs: the same under the reference; a constant.
      kind: "k1", "k2", "k3" or "abs". For the exact KL differentiate `exact_kl`.
      old_logprobs: the same under the policy that sampled; a constant. None: the policy now.

    Returns:
      The shape of the inputs, in nats, float32 or wider. Nothing is masked or summed.

    Raises:
      ValueError: if the kind is unknown.
      AssertionError: if the shapes differ.
    """
    if kind not in _ESTIMATORS:
        valid = ", ".join(repr(name) for name in _ESTIMATORS)
        raise ValueError(f"Unknown kind of KL in the loss {kind!r}: use one of {valid}.")
    chex.assert_equal_shape([logprobs, ref_logprobs])
    logprobs = _at_least_float32(logprobs)
    now = jax.lax.stop_gradient(logprobs)

    def difference(other):
        other = jax.lax.stop_gradient(_at_least_float32(other))
        return jnp.clip(now - other, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    ratio = difference(ref_logprobs)
    weight = jnp.ones_like(ratio)
    if old_logprobs is not None:
        chex.assert_equal_shape([logprobs, old_logprobs])
        weight = jnp.exp(difference(old_logprobs))
    # logprobs - now is 0 with slope 1.
    return weight * (_ESTIMATORS[kind](ratio) + ratio * (logprobs - now))


class KLState(NamedTuple):
    """State of a KL controller.

    coef: scalar, the price of one nat of KL in units of reward.
    """

    coef: jax.Array


class KLController(NamedTuple):
    """Two pure functions that set the price of KL, in the manner of an optax transformation.

    init: `() -> KLState`.
    update: `(state, kl, num_samples) -> KLState`, with kl the measured KL (scalar, nats, the mean
      over samples of the KL summed over the sample's tokens) and num_samples the samples seen since
      the last update.
    """

    init: Callable[[], KLState]
    update: Callable[[KLState, chex.Numeric, chex.Numeric], KLState]


def adaptive_kl(init_coef: float, target: float, horizon: float) -> KLController:
    r"""Makes a controller that raises the price while the KL is above a target and lowers it below.

        coef <- coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon)

    so that a KL far off its target moves the price by a factor of about e^0.2 in `horizon` samples.
    A KL that is not finite leaves the price as it is. The factor of one update never falls under
    0.2: the formula alone would give 0 (for ever) or a negative price, which pays for KL, once an
    update counts five horizons.

    Source: Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2.2.

    Args:
      init_coef: price at the start, > 0, in units of reward a nat. The state holds it as float32; a
        state of another width keeps its own.
      target: the KL of a sample to hold, > 0, in nats.
      horizon: samples, > 0; the larger, the slower.

    Returns:
      A KLController.

    Raises:
      ValueError: if a parameter is out of range.
    """
    if not (init_coef >= 0 and math.isfinite(init_coef)):
        raise ValueError(
            f"init_coef must be a positive number, got {init_coef}: a negative price would reward "
            "the policy for leaving the reference; try 0.05."
        )
    if init_coef == 0:
        raise ValueError(
            "adaptive_kl multiplies its coefficient, so init_coef=0 would stay 0 for ever: give a "
            "positive init_coef, or use fixed_kl(0.0) to train without a KL penalty."
        )
    if not (target > 0 and math.isfinite(target)):
        raise ValueError(
            f"target must be a positive KL in nats, got {target}: give one, such as 6, or use "
            "fixed_kl(init_coef) for a coefficient that does not move."
        )
    if not (horizon > 0 and math.isfinite(horizon)):
        raise ValueError(
            f"horizon must be a positive number of samples, got {horizon}: give 10000, say, "
            "or use fixed_kl(init_coef) for a coefficient that does not move."
        )

    def init() -> KLState:
        return KLState(coef=jnp.asarray(init_coef, float))

    def update(state: KLState, kl: chex.Numeric, num_samples: chex.Numeric) -> KLState:
        chex.assert_rank([state.coef, kl, num_samples], 0)
        coef = jnp.asarray(state.coef)
        dtype = coef.dtype
        kl = jnp.asarray(kl, dtype)
        error = jnp.clip(kl / target - 1, -0.2, 0.2)
        factor = jnp.maximum(1 + error * (jnp.asarray(num_samples, dtype) / horizon), 0.2)
        return KLState(coef=jnp.where(jnp.isfinite(kl), coef * factor, coef))

    return KLController(init, update)


def fixed_kl(coef: float) -> KLController:
    """Makes a controller that keeps the price where it is.

    Args:
      coef: the price, >= 0, in units of reward a nat.

    Returns:
      A KLController whose update returns its state.

    Raises:
      ValueError: if coef is negative or not finite.
    """
    if not (coef >= 0 and math.isfinite(coef)):
        raise ValueError(
            f"coef must be zero or a positive number, got {coef}: a negative price would reward "
            "the policy for leaving the reference; use 0.0 to train without a KL penalty."
        )

    def init() -> KLState:
        return KLState(coef=jnp.asarray(coef, float))

    def update(state: KLState, kl: chex.Numeric, num_samples: chex.Numeric) -> KLState:
        del kl, num_samples
        return state

    return KLController(init, update)


def _at_least_float32(x: chex.Array) -> jax.Array:
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
