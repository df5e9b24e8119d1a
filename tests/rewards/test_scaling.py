"""Scaling of scores against numbers by hand and numpy over everything seen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo.rewards import init_scaling, scale_scores


def on_grid(totals, lengths=None, width=3):
    """Scalar scores as `call_reward` places them."""
    totals = np.asarray(totals, np.float32)
    grid = np.zeros((len(totals), width), np.float32)
    lengths = [width] * len(totals) if lengths is None else lengths
    for i, length in enumerate(lengths):
        if length:
            grid[i, length - 1] = totals[i]
    return grid, totals


def scale(totals, state, mode, clip=None, lengths=None):
    """Returns the scores on the grid, the new state and the metrics."""
    grid, totals = on_grid(totals, lengths)
    return scale_scores(grid, totals, state, mode=mode, clip=clip)


@pytest.mark.parametrize("jit", [False, True])
def test_scores_are_clipped_then_measured_then_divided(jit):
    wrap = jax.jit if jit else lambda f: f
    fn = wrap(functools.partial(scale_scores, mode="running", clip=2.0))
    grid, totals = on_grid([3.0, -10.0, 1.0, 0.0], lengths=[3, 2, 1, 3])
    scaled, state, metrics = fn(grid, totals, init_scaling())
    # clipped 2, -2, 1, 0: mean 1/4, squares 9 - 4/16, over 3
    std = np.sqrt((9 - 0.25) / 3)
    expected = np.array([[0, 0, 2], [0, -2, 0], [1, 0, 0], [0, 0, 0]]) / std
    np.testing.assert_allclose(scaled, expected, rtol=1e-6)
    for name, value in {"mean": 0.25, "std": std, "running_mean": 0.25, "running_std": std}.items():
        np.testing.assert_allclose(metrics[f"rollout_scores/{name}"], value, rtol=1e-6)
    assert state.moments.count == 4
    assert scaled.dtype == jnp.float32


def test_the_mean_is_not_subtracted():
    # totals 9, 11: std sqrt(2)
    scaled, *_ = scale([9.0, 11.0], init_scaling(), "running")
    np.testing.assert_allclose(scaled[:, 2], np.array([9, 11]) / np.sqrt(2), rtol=1e-6)


@pytest.mark.parametrize("jit", [False, True])
def test_running_divides_by_the_std_of_all_cycles_so_far(jit):
    fn = functools.partial(scale_scores, mode="running", clip=None)
    fn = jax.jit(fn) if jit else fn
    rng = np.random.default_rng(0)
    state, seen = init_scaling(), np.zeros(0)
    for cycle, count in enumerate([5, 5, 1, 8]):
        grid, totals = on_grid(rng.normal(3 + cycle, 1 + cycle, count))
        seen = np.concatenate([seen, totals])
        scaled, state, metrics = fn(grid, totals, state)
        np.testing.assert_allclose(scaled, grid / seen.std(ddof=1), rtol=1e-5)
        named = {"running_mean": seen.mean(), "running_std": seen.std(ddof=1)}
        named |= {"mean": totals.mean(), "std": totals.std(ddof=1) if count > 1 else 1}
        for name, value in named.items():
            np.testing.assert_allclose(metrics[f"rollout_scores/{name}"], value, rtol=1e-5)


def test_ref_divides_by_the_first_cycle_for_ever():
    first, state, _ = scale([1.0, 3.0, 5.0], init_scaling(), "ref")  # std 2
    np.testing.assert_allclose(first[:, 2], [0.5, 1.5, 2.5], rtol=1e-6)
    for totals in ([100.0, -100.0, 8.0], [7.0], [4.0, 4.0]):
        later, state, _ = scale(totals, state, "ref")
        np.testing.assert_allclose(later[:, 2], np.array(totals) / 2, rtol=1e-6)
    assert state.ref_std == 2


def test_ref_takes_a_given_std_instead():
    state = init_scaling(ref_std=4.0)
    for totals in ([1.0, 3.0, 5.0], [8.0], [6.0, 6.0]):
        scaled, state, _ = scale(totals, state, "ref")
        np.testing.assert_allclose(scaled[:, 2], np.array(totals) / 4, rtol=1e-6)
    # a small one is as good, whatever the scores
    scaled, *_ = scale([1000.0, 1000.0], init_scaling(ref_std=1e-4), "ref")
    np.testing.assert_allclose(scaled[:, 2], 1e7, rtol=1e-6)


def test_without_a_mode_scores_are_clipped_and_no_more():
    scaled, state, metrics = scale([1.0, 30.0, -30.0], init_scaling(), None, clip=10.0)
    np.testing.assert_array_equal(scaled[:, 2], [1, 10, -10])
    assert metrics["rollout_scores/mean"] == pytest.approx(1 / 3)
    assert state.moments.count == 3
    for clip in (None, 0, 0.0):
        scaled, *_ = scale([1.0, 30.0, -3e8], init_scaling(), None, clip=clip)
        np.testing.assert_array_equal(scaled[:, 2], np.float32([1, 30, -3e8]))


@pytest.mark.parametrize("mode", ["running", "ref"])
def test_one_sample_has_no_std_and_divides_by_one(mode):
    # trlx divides by n - 1 = 0 here, and every reward becomes NaN
    scaled, state, metrics = scale([5.0], init_scaling(), mode)
    np.testing.assert_array_equal(scaled, [[0, 0, 5]])
    assert all(np.isfinite(x) for x in [*metrics.values(), *jax.tree.leaves(state)])


@pytest.mark.parametrize("mode", ["running", "ref"])
@pytest.mark.parametrize("value", [0.0, 0.1, 0.3, -3.3, 1000.1])
@pytest.mark.parametrize("count", [3, 7, 24])
def test_equal_scores_divide_by_one(mode, value, count):
    # rounding leaves them a standard deviation of some 1e-8 of the mean
    scaled, state, _ = scale([value] * count, init_scaling(), mode)
    np.testing.assert_array_equal(scaled[:, 2], np.full(count, value, np.float32))
    # and the next cycle's spread is measured as if nothing had been
    scaled, state, _ = scale([value - 1, value + 1, value], state, mode)
    std = np.std([value] * count + [value - 1, value + 1, value], ddof=1) if mode[1] == "u" else 1
    np.testing.assert_allclose(
        scaled[:, 2], np.array([value - 1, value + 1, value]) / std, rtol=1e-3
    )


def test_a_small_spread_is_a_spread():
    scaled, *_ = scale([1e-4, 2e-4, 3e-4], init_scaling(), "running")
    np.testing.assert_allclose(scaled[:, 2], [1, 2, 3], rtol=1e-4)
    scaled, *_ = scale([100.0, 100.01, 100.02], init_scaling(), "running")
    np.testing.assert_allclose(scaled[:, 2], 100 / 0.01, rtol=1e-2)


def test_dense_scores_are_clipped_one_by_one():
    grid = np.array([[3.0, -1.0, 0.5], [0.5, 0.5, 0.5], [9.0, 9.0, 0.0]], np.float32)
    scaled, _, metrics = scale_scores(grid, grid.sum(1), init_scaling(), mode="running", clip=1.0)
    clipped = np.array([[1, -1, 0.5], [0.5, 0.5, 0.5], [1, 1, 0]])
    totals = clipped.sum(1)  # 0.5, 1.5, 2
    np.testing.assert_allclose(scaled, clipped / totals.std(ddof=1), rtol=1e-6)
    np.testing.assert_allclose(metrics["rollout_scores/mean"], totals.mean(), rtol=1e-6)


def test_totals_of_long_dense_rows_are_those_of_their_clipped_scores():
    # sums of many float32 depend on who adds them: numpy's totals are not XLA's to the last digit
    rng = np.random.default_rng(0)
    grid = rng.uniform(0, 100, (32, 256)).astype(np.float32)
    grid[:, 16:] = -grid[:, :16].sum(1, keepdims=True) / 240  # all but cancel
    grid = rng.permuted(grid, axis=1)
    fn = jax.jit(functools.partial(scale_scores, mode=None, clip=5.0))
    _, _, metrics = fn(grid, grid.sum(1), init_scaling())
    totals = np.clip(grid.astype(np.float64), -5, 5).sum(1)
    np.testing.assert_allclose(metrics["rollout_scores/mean"], totals.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["rollout_scores/std"], totals.std(ddof=1), rtol=1e-4)


def test_empty_responses_count_in_the_moments():
    # the second response is empty: its score has no place on the grid, but it is a score
    scaled, _, metrics = scale([2.0, 50.0, 4.0], init_scaling(), "running", 6.0, [3, 0, 1])
    np.testing.assert_allclose(metrics["rollout_scores/mean"], 4, rtol=1e-6)
    np.testing.assert_allclose(metrics["rollout_scores/std"], 2, rtol=1e-6)
    np.testing.assert_allclose(scaled, [[0, 0, 1], [0, 0, 0], [2, 0, 0]], rtol=1e-6)


def test_other_modes_are_refused():
    with pytest.raises(
        ValueError, match="'whiten' is unknown; choose one of None, 'running', 'ref'"
    ):
        scale([1.0], init_scaling(), "whiten")


def test_centred_scores_have_mean_0_and_std_1_on_the_first_cycle_and_keep_its_measure():
    fn = jax.jit(functools.partial(scale_scores, mode="ref_centred", clip=None))
    lengths, mask = [3, 2, 1, 3], np.arange(3) < np.array([3, 2, 1, 3])[:, None]
    first, totals = on_grid([4.0, 1.0, -2.0, 9.0], lengths)
    scaled, state, _ = fn(first, totals, init_scaling(), mask=mask)
    np.testing.assert_allclose(scaled.sum(1), (totals - 3) / totals.std(ddof=1), rtol=1e-6)
    assert (np.asarray(scaled)[first == 0] == 0).all()  # only where the score lies
    second, totals_2 = on_grid([3.0, 3.0, 3.0, 5.0], lengths)
    scaled, state, _ = fn(second, totals_2, state, mask=mask)
    np.testing.assert_allclose(scaled.sum(1), (totals_2 - 3) / totals.std(ddof=1), rtol=1e-6)
    given, *_ = fn(second, totals_2, init_scaling(2.0, 1.0), mask=mask)
    np.testing.assert_allclose(given.sum(1), (totals_2 - 1) / 2, rtol=1e-6)
