"""Scaling of scores as trlx does it: clip, then divide by a standard deviation; or to mean 0 too.

`B` rows, `N` response tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxppo.core.moments import MomentsState, init_moments, moments_std, update_moments

MODES = (None, "running", "ref", "ref_centred")


class ScalingState(NamedTuple):
    """What scaling remembers over cycles.

    moments: running moments of the samples' clipped total scores.
    ref_std: scalar, the standard deviation of the first cycle's totals; 0 until there was one.
    ref_mean: scalar, their mean.
    """

    moments: MomentsState
    ref_std: jax.Array
    ref_mean: jax.Array


def init_scaling(ref_std: float | None = None, ref_mean: float | None = None) -> ScalingState:
    """The state before the first cycle. Given figures are used instead of the first cycle's."""
    scalar = lambda x: jnp.asarray(x or 0.0, jnp.float32)  # noqa: E731
    return ScalingState(init_moments(), scalar(ref_std), scalar(ref_mean))


def scale_scores(
    grid,
    totals,
    state: ScalingState,
    *,
    mode: str | None,
    clip: float | None,
    mask=None,
    present=None,
) -> tuple[jax.Array, ScalingState, dict[str, jax.Array]]:
    """Clips each score and divides by a standard deviation.

    The mean is subtracted by "ref_centred" only: it makes scores of mean 0 and standard deviation 1
    on the samples of the first cycle, which the reference policy drew.

    Args:
      grid: `[B, N]`, scores on the response grid (a scalar score on its row's last action).
      totals: `[B]`, each sample's score, also where a response is empty and has no place for it.
      state: from `init_scaling` or the cycle before.
      mode: None divides by nothing, "running" by the standard deviation of all totals so
        far (this cycle's included), "ref" and "ref_centred" by that of the first cycle.
      clip: bound of each single score, before scaling. None or 0: no bound.
      mask: `[B, N]` bool, the response's tokens; "ref_centred" subtracts the mean at the last.
      present: `[B]` bool, samples that have a score; None: all. The others count nowhere.

    Returns:
      The scaled grid, the new state, and the metrics `rollout_scores/{mean,std,running_mean,
      running_std}` of the clipped totals, before scaling.
    """
    if mode not in MODES:
        names = ", ".join(map(repr, MODES))
        raise ValueError(f"scale_reward {mode!r} is unknown; choose one of {names}")
    if clip:
        # a dense row's total is the sum of its clipped scores; an empty row keeps its own
        placed = (grid != 0).any(1)
        grid = jnp.clip(grid, -clip, clip)
        totals = jnp.where(placed, grid.sum(1), jnp.clip(totals, -clip, clip))
    every = jnp.ones(totals.shape, bool) if present is None else present
    totals = jnp.where(every, totals, 0.0)
    moments = update_moments(state.moments, totals, every)
    now = update_moments(init_moments(), totals, every)
    known = state.ref_std > 0
    ref_std = jnp.where(known, state.ref_std, _spread(now))
    ref_mean = jnp.where(known, state.ref_mean, now.mean)
    metrics = {
        "rollout_scores/mean": now.mean,
        "rollout_scores/std": moments_std(now),
        "rollout_scores/running_mean": moments.mean,
        "rollout_scores/running_std": moments_std(moments),
    }
    if mode == "ref_centred":
        last = mask & (jnp.cumsum(mask, axis=1) == mask.sum(1, keepdims=True))
        grid = grid - jnp.where(last, ref_mean, 0.0)
    divisor = {None: 1.0, "running": _spread(moments)}.get(mode, ref_std)
    # equal scores have no spread to divide by
    divisor = jnp.where(divisor > 0, divisor, 1.0)
    return grid / divisor, ScalingState(moments, ref_std, ref_mean), metrics


def scale_baseline(
    baseline, state: ScalingState, *, mode: str | None, clip: float | None
) -> jax.Array:
    """Brings scores of other samples, `[B]`, to the scale of those that `state` has just scaled.

    Args:
      baseline: scores as rewards give them.
      state: from `scale_scores` of the same cycle.
      mode, clip: as there.
    """
    if clip:
        baseline = jnp.clip(baseline, -clip, clip)
    if mode == "ref_centred":
        baseline = baseline - state.ref_mean
    divisor = {None: 1.0, "running": _spread(state.moments)}.get(mode, state.ref_std)
    return baseline / jnp.where(divisor > 0, divisor, 1.0)


def _spread(moments: MomentsState) -> jax.Array:
    """The standard deviation, or 0 where it is no more than what float32 rounds off the mean."""
    std = moments_std(moments)
    return jnp.where(std > jnp.maximum(1e-6 * jnp.abs(moments.mean), 1e-8), std, 0.0)
