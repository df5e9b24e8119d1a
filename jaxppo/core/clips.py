"""What a token adds to the policy loss, given its ratio and its advantage.

Letters: B rows, N positions of the response; rho the ratio, A the advantage. Every function is
`(log_ratio, logprobs, advantages, mask, *, ...) -> Clipped`, [B, N] each, as `policy_loss_sums`
calls it: inputs are finite, advantages constants. `log_ratio` comes from `ratios`, so any of these
works with any of those. Nothing is masked, weighted or summed here.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp


class Clipped(NamedTuple):
    """The terms of the policy loss.

    loss: [B, N].
    clipped: [B, N] bool, where clipping decided and the token passes no gradient (for CISPO: where
      its weight was cut).
    """

    loss: jax.Array
    clipped: jax.Array


def clip_ratio(
    log_ratio: chex.Array,
    logprobs: chex.Array,
    advantages: chex.Array,
    mask: chex.Array,
    *,
    low: float = 0.2,
    high: float = 0.2,
) -> Clipped:
    r"""The clipped surrogate: max(-A rho, -A clip(rho, 1 - low, 1 + high)).

    Symmetric with low = high; "clip-higher" with a larger high, which leaves unlikely tokens room
    to grow.

    Sources: Schulman et al. 2017 (PPO), https://arxiv.org/abs/1707.06347, equation 7; Yu et al.
    2025 (DAPO), https://arxiv.org/abs/2503.14476, section 3.1.

    Args:
      log_ratio: [B, N], in nats.
      logprobs, mask: not used.
      advantages: [B, N].
      low, high: distances from 1; `inf` for no bound on that side.
    """
    del logprobs, mask
    ratio = jnp.exp(log_ratio)
    free = -advantages * ratio
    bound = -advantages * jnp.clip(ratio, 1 - low, 1 + high)
    return Clipped(jnp.maximum(free, bound), bound > free)


def dual_clip(
    log_ratio: chex.Array,
    logprobs: chex.Array,
    advantages: chex.Array,
    mask: chex.Array,
    *,
    low: float = 0.2,
    high: float = 0.2,
    bound: float = 3.0,
) -> Clipped:
    r"""`clip_ratio`, and for A < 0 no more than -A bound.

        min(max(-A rho, -A clip(rho, 1 - low, 1 + high)), -A bound)   if A < 0

    A bad token whose probability has grown far would otherwise pull without limit.

    Source: Ye et al. 2019, https://arxiv.org/abs/1912.09729.

    Args: see `clip_ratio`; bound: of the ratio, > 1 + high.
    """
    once = clip_ratio(log_ratio, logprobs, advantages, mask, low=low, high=high)
    limit = -advantages * bound
    cut = (advantages < 0) & (once.loss > limit)
    return Clipped(jnp.where(cut, limit, once.loss), once.clipped | cut)


def two_sided_clip(
    log_ratio: chex.Array,
    logprobs: chex.Array,
    advantages: chex.Array,
    mask: chex.Array,
    *,
    low: float = 0.2,
    high: float = 0.2,
    delta: float = 4.0,
) -> Clipped:
    r"""The clipped surrogate of a ratio cut at delta.

        max(-A min(rho, delta), -A clip(rho, 1 - low, 1 + high))

    With delta >= 1 + high it is `dual_clip` with bound = delta.

    Source: INTELLECT-2 2025, https://arxiv.org/abs/2505.07291.

    Args: see `clip_ratio`; delta: of the ratio.
    """
    del logprobs, mask
    ratio = jnp.exp(log_ratio)
    cut = ratio > delta
    free = -advantages * jnp.where(cut, delta, ratio)
    bound = -advantages * jnp.clip(ratio, 1 - low, 1 + high)
    outside = (ratio < 1 - low) | (ratio > 1 + high)
    still = jnp.where(free >= bound, cut, outside) & (advantages != 0)
    return Clipped(jnp.maximum(free, bound), still)


def cispo(
    log_ratio: chex.Array,
    logprobs: chex.Array,
    advantages: chex.Array,
    mask: chex.Array,
    *,
    lower: float = 0.0,
    upper: float = 5.0,
) -> Clipped:
    r"""Clips the weight and not the gradient: -sg[clip(rho, lower, upper)] A log pi.

    Every token keeps its gradient; only its weight is bounded.

    Source: MiniMax 2025 (MiniMax-M1), https://arxiv.org/abs/2506.13585, with its 1 - eps_low
    and 1 + eps_high named by their values.

    Args: see `clip_ratio`; logprobs: [B, N], in nats; lower, upper: bounds of the ratio itself.
    """
    del mask
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
    weight = jnp.clip(ratio, lower, upper)
    return Clipped(-weight * advantages * logprobs, weight != ratio)


def sapo(
    log_ratio: chex.Array,
    logprobs: chex.Array,
    advantages: chex.Array,
    mask: chex.Array,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Clipped:
    r"""A smooth gate in place of a bound: -A (4 / tau) sigmoid(tau (rho - 1)).

    tau is tau_pos where A > 0 and tau_neg elsewhere. At rho = 1 the gradient is that of -A rho.

    Source: Gao et al. 2025 (SAPO), https://arxiv.org/abs/2511.20347.

    Args: see `clip_ratio`; tau_pos, tau_neg: > 0; the larger, the sooner the gate closes.
    """
    del logprobs, mask
    tau = jnp.where(advantages > 0, tau_pos, tau_neg).astype(log_ratio.dtype)
    gate = jax.nn.sigmoid(tau * jnp.expm1(log_ratio)) * 4 / tau
    return Clipped(-gate * advantages, jnp.zeros(log_ratio.shape, bool))


def geometric_mean(
    log_ratio: chex.Array,
    logprobs: chex.Array,
    advantages: chex.Array,
    mask: chex.Array,
    *,
    low: float = 0.4,
    high: float = 0.4,
) -> Clipped:
    r"""The geometric mean of a response's clipped ratios, at every token of it.

        -A exp(1/|o| sum_t c_t),  c_t = min(l_t, high) if A > 0, max(l_t, -low) if A < 0

    with l the log ratio: the surrogate's one-sided clipping, in log space. An outlier among the
    tokens moves a geometric mean less than an arithmetic one. A must be the same for all tokens of
    a response, and the weights must average over it.

    Source: Zhao et al. 2025 (GMPO), https://arxiv.org/abs/2507.20673.

    Args: see `clip_ratio`; mask: [B, N] bool; low, high: in nats.
    """
    del logprobs
    clipped = jnp.where(advantages > 0, log_ratio > high, log_ratio < -low)
    bounded = jnp.where(clipped, jnp.where(advantages > 0, high, -low), log_ratio)
    count = jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1)
    mean = jnp.sum(jnp.where(mask, bounded, 0), axis=1, keepdims=True) / count
    return Clipped(-advantages * jnp.exp(mean), clipped)


def vespo(
    log_ratio: chex.Array,
    logprobs: chex.Array,
    advantages: chex.Array,
    mask: chex.Array,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Clipped:
    r"""A smooth weight of the whole response: -sg[phi(w)] A log pi.

        phi(w) = exp(lambda + k log w - lambda w),   log w = sum_t log rho_t

    phi(1) = 1, and falls on both sides. log w is limited to [log 1e-8, 20]. Wants `token_ratio`.

    Source: VESPO 2026, https://arxiv.org/abs/2602.10693, with the constants of its code and TRL's.

    Args: see `clip_ratio`; mask: [B, N] bool; k, lambda: of the gamma weight, by the sign of A.
    """
    log_w = jnp.sum(jnp.where(mask, log_ratio, 0), axis=1, keepdims=True)
    log_w = jax.lax.stop_gradient(jnp.clip(log_w, jnp.log(1e-8), 20.0))
    k = jnp.where(advantages >= 0, k_pos, k_neg).astype(log_ratio.dtype)
    lam = jnp.where(advantages >= 0, lambda_pos, lambda_neg).astype(log_ratio.dtype)
    phi = jnp.exp(lam + k * log_w - lam * jnp.exp(log_w))
    return Clipped(-phi * advantages * logprobs, jnp.zeros(log_ratio.shape, bool))


def likelihood(
    log_ratio: chex.Array, logprobs: chex.Array, advantages: chex.Array, mask: chex.Array
) -> Clipped:
    r"""No ratio and no bound: -A log pi, REINFORCE; with A = 1, the likelihood of the samples.

    Right for one update on samples of the policy itself. Of later updates only methods that imitate
    chosen samples are right.

    Source: Williams 1992, "Simple statistical gradient-following algorithms for connectionist
    reinforcement learning".

    Args: see `clip_ratio`; logprobs: [B, N], in nats.
    """
    del mask
    return Clipped(-advantages * logprobs, jnp.zeros(log_ratio.shape, bool))
