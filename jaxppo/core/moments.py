"""Running mean and standard deviation, as a state and pure functions."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp


class MomentsState(NamedTuple):
    """Moments of everything seen so far; scalars of one float type.

    mean: the mean, in units of x; 0 before anything was seen.
    var: the population variance (divided by count), in squared units of x.
    count: the number of entries seen, as a float.
    """

    mean: chex.Numeric = 0.0
    var: chex.Numeric = 0.0
    count: chex.Numeric = 0.0


def init_moments(dtype: chex.ArrayDType = jnp.float32) -> MomentsState:
    """Makes the state in which nothing has been seen.

    Args:
      dtype: float type of the state, which it keeps through updates.

    Returns:
      A MomentsState of zeros.
    """
    # Three arrays, not one thrice: donated buffers must not be shared.
    return MomentsState(jnp.zeros((), dtype), jnp.zeros((), dtype), jnp.zeros((), dtype))


def update_moments(state: MomentsState, x: chex.Array, mask: chex.Array) -> MomentsState:
    r"""Adds the real entries of an array to the running moments.

    With m, v the mean and the population variance of the n entries seen and m', v' those of the n'
    new ones,

        mean <- m + (m' - m) n' / (n + n')
        var  <- (v n + v' n' + (m' - m)^2 n n' / (n + n')) / (n + n')

    so that the result does not depend on how the entries were cut into batches. No real entry
    leaves the state as it is, to the bit.

    Source: Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing
    sample variances".

    Args:
      state: the moments so far.
      x: any shape; computed with in the state's type.
      mask: the shape of x, bool, True at real entries. What the others hold has no influence.

    Returns:
      The moments with the real entries added, in the state's type.

    Raises:
      AssertionError: if the shapes differ.
    """
    chex.assert_equal_shape([x, mask])
    state = jax.tree.map(jnp.asarray, state)
    dtype = state.mean.dtype
    mask = jnp.asarray(mask, bool)
    x = jnp.where(mask, jnp.asarray(x), 0).astype(dtype)
    added = jnp.sum(mask).astype(dtype)
    added_mean = jnp.sum(x) / jnp.maximum(added, 1)
    added_squares = jnp.sum(jnp.square(jnp.where(mask, x - added_mean, 0)))

    count = state.count + added
    share = added / jnp.maximum(count, 1)
    shift = added_mean - state.mean
    squares = state.var * state.count + added_squares + jnp.square(shift) * state.count * share
    new = MomentsState(state.mean + shift * share, squares / jnp.maximum(count, 1), count)
    return jax.tree.map(lambda new, old: jnp.where(added > 0, new, old), new, state)


def moments_std(state: MomentsState) -> jax.Array:
    r"""Returns the unbiased standard deviation of everything seen.

        sqrt(var * count / (count - 1))

    and 1 for count < 2, where it is not defined and a scale of 1 changes nothing. Equal entries
    give 0; who divides by it adds an epsilon.

    Args:
      state: the moments.

    Returns:
      A scalar, in units of x, in the state's type.
    """
    defined = state.count >= 2
    unbiased = state.var * state.count / jnp.where(defined, state.count - 1, 1)
    return jnp.where(defined, jnp.sqrt(unbiased), 1)
