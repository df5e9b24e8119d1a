"""Dynamic sampling: groups that teach nothing are replaced by others (DAPO, arXiv:2503.14476).

`R` samples of a cycle, `N` response positions; the samples of a group stand together.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxppo.collect import Collected
from jaxppo.experience import Rollout


class Surplus(NamedTuple):
    """Samples that a cycle had no place for, the first `count` of `R` rows; for the next cycle.

    behaviour: `[R, N]`, log-probs under the weights that drew them.
    The other fields are those of `Collected`.
    """

    count: jax.Array
    rollout: Rollout
    grid: jax.Array
    totals: jax.Array
    present: jax.Array
    ended: jax.Array
    behaviour: jax.Array


class Part(NamedTuple):
    """Rows of `Collected`, with the log-probs of the weights that drew them; host arrays."""

    rollout: Rollout
    grid: np.ndarray
    totals: np.ndarray
    present: np.ndarray
    ended: np.ndarray
    scored: Any
    behaviour: np.ndarray


def empty_surplus(rows: int, width: int, length: int, *, kept: bool, seen: bool) -> Surplus:
    """The state before the first cycle.

    Args:
      rows, width, length: `R`, `P` and `N`.
      kept, seen: whether rollouts have these arrays.
    """
    ints = lambda *shape: jnp.zeros(shape, jnp.int32)  # noqa: E731
    floats = lambda *shape: jnp.zeros(shape, jnp.float32)  # noqa: E731
    bools = lambda *shape: jnp.zeros(shape, bool)  # noqa: E731
    rollout = Rollout(
        prompts=ints(rows, width),
        prompt_mask=jnp.ones((rows, width), bool),
        tokens=ints(rows, length),
        mask=bools(rows, length),
        kept=ints(rows, length) if kept else None,
        seen=bools(rows, length) if seen else None,
    )
    return Surplus(
        count=ints(),
        rollout=rollout,
        grid=floats(rows, length),
        totals=floats(rows),
        present=bools(rows),
        ended=bools(rows),
        behaviour=floats(rows, length),
    )


def refill(
    draw: Callable[[int], Collected],
    rescore: Callable[[Rollout], Any],
    surplus: Surplus,
    *,
    size: int,
    rounds: int,
) -> tuple[Collected, Surplus, int]:
    """Draws until a cycle is full of groups in which two samples differ in their score.

    Where so many rounds do not fill it, groups without signal do.

    Args:
      draw: `(round) -> Collected`, a whole cycle's samples of new prompts.
      rescore: `(rollout) -> Scored` by the weights of now, for `R` rows drawn by older ones.
      surplus: of the cycle before; its groups come first.
      size: samples a group.
      rounds: the most draws.

    Returns:
      `R` samples, with `Collected.behaviour` and without their texts; the new surplus; and the
      rounds it took. Figures are those of all draws.
    """
    R = len(surplus.totals)
    good, spare, drawn = [], [], []
    if (old := int(surplus.count)) > 0:
        scored = rescore(surplus.rollout)
        # what older weights drew has other log-probs now: that is no fault of the scorer
        scored = scored._replace(gap=jnp.zeros_like(scored.gap))
        part = jax.device_get(Part(*surplus[1:6], scored, surplus.behaviour))
        good.append(_rows(part, np.arange(old)))
    while len(drawn) < rounds and sum(len(part.totals) for part in good) < R:
        found = draw(len(drawn))
        drawn.append(found)
        part = Part(
            found.rollout, found.grid, found.totals, found.present, found.ended, found.scored,
            found.scored.old.logprobs,
        )  # fmt: skip
        part = jax.device_get(part)
        signal = np.repeat(_has_signal(part.totals, part.present, size), size)
        good.append(_rows(part, np.flatnonzero(signal)))
        spare.append(_rows(part, np.flatnonzero(~signal)))
    whole = _join([*good, *spare])
    count = max(sum(len(part.totals) for part in good) - R, 0)
    kept = _rows(whole, np.arange(R))
    fill = lambda x: jnp.asarray(np.resize(x, (R, *x.shape[1:])) if len(x) else x)  # noqa: E731
    over = _rows(whole, np.arange(R, R + count)) if count else _rows(whole, np.zeros(R, int))
    over = jax.tree.map(fill, over._replace(scored=None))
    new = Surplus(jnp.asarray(count, jnp.int32), *over[:5], over.behaviour)
    held = jax.tree.map(jnp.asarray, (kept.rollout, kept.scored, kept.behaviour))
    collected = drawn[-1]._replace(
        rollout=held[0], grid=kept.grid, totals=kept.totals, present=kept.present,
        ended=kept.ended, scored=held[1], behaviour=held[2],
        samples=[], prompts=[], outputs=[],
        stats=_over_draws([found.stats for found in drawn])
        | {"rollout/rounds": float(len(drawn)), "rollout/surplus": count},
        times=_over_draws([found.times for found in drawn]),
    )  # fmt: skip
    return collected, new, len(drawn)


def _over_draws(figures: list[dict[str, float]]) -> dict[str, float]:
    """Seconds and counts add up; others are averaged over the draws that have them."""
    whole = {}
    for key in dict.fromkeys(key for part in figures for key in part):
        values = [part[key] for part in figures if key in part]
        adds = key.startswith("time/") or key.endswith(("/none", "/dropped", "/failures"))
        whole[key] = float(np.sum(values) if adds else np.mean(values))
    return whole


def _has_signal(totals: np.ndarray, present: np.ndarray, size: int) -> np.ndarray:
    """`[groups]` bool: whether two present samples of a group differ."""
    totals, present = totals.reshape(-1, size), present.reshape(-1, size)
    high = np.where(present, totals, -np.inf).max(1)
    return high > np.where(present, totals, np.inf).min(1)


def _rows(part: Part, rows: np.ndarray) -> Part:
    return jax.tree.map(lambda x: x[rows], part)


def _join(parts: list[Part]) -> Part:
    return jax.tree.map(lambda *xs: np.concatenate(xs), *parts)
