"""Running moments against trlx and numpy."""

import functools
import pathlib

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxppo.core import MomentsState, init_moments, moments_std, update_moments

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
jit_update = jax.jit(update_moments)


def test_moments_are_trlx():
    golden = np.load(GOLDEN / "trlx_running_moments_f64.npz")
    seen = np.zeros(0)
    with jax.enable_x64(True):
        state = init_moments(jnp.float64)
        for step in range(6):
            x = golden[f"step{step}_xs"]
            seen = np.concatenate([seen, x])
            state = update_moments(state, x, np.ones(x.shape, bool))
            np.testing.assert_allclose(state.var, golden[f"step{step}_running_var"], rtol=1e-10)
            np.testing.assert_allclose(
                moments_std(state), golden[f"step{step}_running_std"], rtol=1e-10
            )
            np.testing.assert_allclose(state.count, golden[f"step{step}_count"])
            # The record of the running mean is one tensor, updated in place, so that all its
            # entries are the last. The mean of what was seen stands in for the others.
            np.testing.assert_allclose(state.mean, seen.mean(), rtol=1e-10)
        np.testing.assert_allclose(state.mean, golden["step5_running_mean"], rtol=1e-10)
        assert state.mean.dtype == jnp.float64


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(
    hnp.arrays(bool, (4, 3, 2)), st.integers(0, 2**16), st.sampled_from([np.nan, np.inf, -np.inf])
)
def test_moments_are_those_of_all_real_entries(masks, seed, junk):
    x = np.random.default_rng(seed).normal(size=masks.shape) * 3 + 2
    with jax.enable_x64(True):
        state = init_moments(jnp.float64)
        for batch, mask in zip(x, masks):
            state = jit_update(state, np.where(mask, batch, junk), mask)
        state, std = jax.device_get((state, moments_std(state)))
    real = x[masks]
    assert state.count == len(real)
    np.testing.assert_allclose(state.mean, real.mean() if len(real) else 0, rtol=1e-10)
    np.testing.assert_allclose(state.var, real.var() if len(real) else 0, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(std, real.std(ddof=1) if len(real) > 1 else 1, rtol=1e-10)


def test_no_real_entry_leaves_the_state_to_the_bit():
    none = np.zeros(2, bool)
    assert jit_update(init_moments(), np.ones(2), none) == init_moments()
    for var in np.random.default_rng(3).uniform(size=40).astype(np.float32):
        # 3 * var / 3 is not always var.
        state = MomentsState(jnp.float32(0.1), jnp.asarray(var), jnp.float32(3))
        assert jit_update(state, np.full(2, np.nan, np.float32), none) == state


def test_moments_do_not_see_padding_outside_jit_either():
    # XLA turns a product with a mask into a selection, so that jit hides a 0 * NaN.
    mask = np.array([True, False, True])
    with jax.disable_jit():
        clean = update_moments(init_moments(), np.array([1.0, 0.0, 4.0]), mask)
        dirty = update_moments(init_moments(), np.array([1.0, np.nan, 4.0]), mask)
    assert clean == dirty
    assert (clean.mean, clean.var, clean.count) == (2.5, 2.25, 2)


def test_std_of_little_and_of_equal_entries():
    assert moments_std(init_moments()) == 1
    one = update_moments(init_moments(), np.array([7.0]), np.array([True]))
    assert (one.mean, one.var, one.count) == (7, 0, 1)
    assert moments_std(one) == 1
    two = update_moments(one, np.array([7.0]), np.array([True]))
    assert moments_std(two) == 0
    three = update_moments(two, np.array([10.0]), np.array([True]))  # 7, 7, 10: mean 8, squares 6
    np.testing.assert_allclose(moments_std(three), np.sqrt(3), rtol=1e-6)


def test_the_state_keeps_its_type_and_works_under_jit():
    state = init_moments()
    x = np.random.default_rng(0).normal(size=(2, 3))
    plain = update_moments(state, x, np.ones((2, 3), bool))
    jitted = jit_update(state, x, np.ones((2, 3), bool))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), plain, jitted)
    with jax.enable_x64(True):
        wide = update_moments(state, x, np.ones((2, 3), bool))
        assert all(leaf.dtype == jnp.float32 for leaf in (*plain, *wide, moments_std(wide)))
    half = update_moments(state, jnp.ones((2, 3), jnp.bfloat16), np.ones((2, 3), bool))
    assert half.mean.dtype == jnp.float32


def test_float32_keeps_a_small_spread_around_a_large_mean():
    x = (1000 + np.random.default_rng(1).normal(size=(5, 40)) * 0.1).astype(np.float32)
    state = init_moments()
    for batch in x:
        state = jit_update(state, batch, np.ones(40, bool))
    # The naive E[x^2] - E[x]^2 has an error as large as the variance itself here.
    np.testing.assert_allclose(moments_std(state), x.astype(np.float64).std(ddof=1), rtol=1e-2)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(AssertionError):
        update_moments(init_moments(), np.ones((2, 3)), np.ones((2, 1), bool))
