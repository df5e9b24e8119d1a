"""Controllers of the price of entropy, in the manner of `KLController`."""

import math
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp


class EntropyState(NamedTuple):
    """State of an entropy controller; scalars.

    coef: what the bonus costs when it is on, in units of loss a nat.
    active: 1 where the bonus is on, 0 where it is off.
    """

    coef: jax.Array
    active: jax.Array

    @property
    def price(self) -> jax.Array:
        """What the next update is to pay for a nat of entropy."""
        return self.coef * self.active


class EntropyController(NamedTuple):
    """Two pure functions that set the price of entropy.

    init: `() -> EntropyState`.
    update: `(state, entropy) -> EntropyState`, once an optimizer step, with the mean entropy over
      all tokens of that step (scalar, nats).
    """

    init: Callable[[], EntropyState]
    update: Callable[[EntropyState, chex.Numeric], EntropyState]


def fixed_entropy(coef: float) -> EntropyController:
    """Makes a controller that pays the same for ever.

    Args:
      coef: units of loss a nat; 0 for no bonus.

    Raises:
      ValueError: if coef is negative or not finite.
    """
    if not (coef >= 0 and math.isfinite(coef)):
        raise ValueError(f"coef must be zero or a positive number, got {coef}.")

    def init() -> EntropyState:
        return EntropyState(jnp.asarray(coef, float), jnp.ones((), float))

    return EntropyController(init, lambda state, entropy: state)


def adaptive_entropy(
    target: float,
    *,
    init_coef: float = 0.0,
    delta: float = 0.005,
    min_coef: float = 0.0,
    max_coef: float = 1.0,
) -> EntropyController:
    r"""Makes a controller that holds the entropy up at a target.

        coef <- clip(coef + delta, min, max)   if entropy <= target, and the bonus is on
        coef <- clip(coef - delta, min, max)   else, and the bonus is off

    The first update, before any entropy was measured, is paid with init_coef. An entropy that is
    not finite leaves the state as it is.

    Source: He et al. 2025 (Skywork-OR1), https://arxiv.org/abs/2505.22312.

    Args:
      target: nats a token, > 0.
      init_coef, min_coef, max_coef: units of loss a nat, 0 <= min <= init <= max.
      delta: step of the coefficient, > 0.

    Raises:
      ValueError: if a parameter is out of range.
    """
    if not (target > 0 and math.isfinite(target)):
        raise ValueError(f"target must be a positive entropy in nats, got {target}: try 0.2.")
    if not 0 <= min_coef <= init_coef <= max_coef < math.inf:
        raise ValueError(
            "adaptive_entropy needs 0 <= min_coef <= init_coef <= max_coef, got "
            f"{min_coef}, {init_coef}, {max_coef}."
        )
    if not (delta > 0 and math.isfinite(delta)):
        raise ValueError(f"delta must be positive, got {delta}: the coefficient would not move.")

    def init() -> EntropyState:
        return EntropyState(jnp.asarray(init_coef, float), jnp.ones((), float))

    def update(state: EntropyState, entropy: chex.Numeric) -> EntropyState:
        dtype = jnp.asarray(state.coef).dtype
        entropy = jnp.asarray(entropy, dtype)
        low = entropy <= target
        coef = jnp.clip(state.coef + jnp.where(low, delta, -delta), min_coef, max_coef)
        new = EntropyState(coef.astype(dtype), low.astype(dtype))
        return jax.tree.map(lambda x, old: jnp.where(jnp.isfinite(entropy), x, old), new, state)

    return EntropyController(init, update)
