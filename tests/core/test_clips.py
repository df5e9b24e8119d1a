"""Ratios, clips and normalisers by themselves: values by hand, slopes, which tokens stand still."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo.core import LOG_RATIO_LIMIT, clips, normalisers, ratios

MASK = np.array([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]], bool)
RATIOS = [
    ratios.token_ratio,
    ratios.sequence_ratio,
    ratios.sequence_token_ratio,
    ratios.trajectory_ratio,
]


def test_ratios_by_hand():
    new = np.array([[-1.0, -2.0, np.nan, -3.0], [-1.0] * 4, [np.inf] * 4])
    old = np.array([[-1.5, -1.0, 7.0, -2.0], [-1.25] * 4, [np.nan] * 4])
    token = [[0.5, -1, 0, -1], [0.25, 0, 0, 0], [0, 0, 0, 0]]
    mean = [[-0.5, -0.5, 0, -0.5], [0.25, 0, 0, 0], [0, 0, 0, 0]]
    total = [[-1.5, -1.5, 0, -1.5], [0.25, 0, 0, 0], [0, 0, 0, 0]]
    for ratio, expected in zip(RATIOS, (token, mean, mean, total)):
        np.testing.assert_allclose(ratio(new, old, MASK), expected, err_msg=ratio.__name__)


def test_slopes_of_the_ratios():
    """Row 0 has three tokens; the slope of the ratio at token 0 by each token."""
    new = np.random.default_rng(0).normal(size=(3, 4))

    def slope(ratio):
        return jax.grad(lambda x: ratio(x, new, MASK)[0, 0])(new)[0]

    np.testing.assert_allclose(slope(ratios.token_ratio), [1, 0, 0, 0])
    np.testing.assert_allclose(slope(ratios.sequence_ratio), [1 / 3, 1 / 3, 0, 1 / 3], rtol=1e-6)
    np.testing.assert_allclose(slope(ratios.sequence_token_ratio), [1, 0, 0, 0])
    np.testing.assert_allclose(slope(ratios.trajectory_ratio), [1, 1, 0, 1])


@pytest.mark.parametrize("ratio", RATIOS)
def test_ratios_are_limited_and_old_is_a_constant(ratio):
    far = np.full((3, 4), 100.0)
    for sign in (1, -1):
        got = ratio(sign * far, 0 * far, MASK)
        np.testing.assert_array_equal(got, np.where(MASK, sign * LOG_RATIO_LIMIT, 0))
        slope = jax.grad(lambda x, sign=sign: ratio(sign * x, 0 * far, MASK).sum())(far)
        np.testing.assert_array_equal(slope, np.zeros((3, 4)))
    np.testing.assert_array_equal(ratio(far, far, MASK), np.zeros((3, 4)))
    by_old = jax.grad(lambda x: ratio(0 * far, x, MASK).sum())(0 * far)
    np.testing.assert_array_equal(by_old, np.zeros((3, 4)))


# A grid of ratios and both signs of the advantage, and an advantage of 0.
RHO = np.repeat([0.3, 0.75, 0.85, 1.0, 1.05, 1.15, 1.25, 2.5, 5.0, 9.0], 3)[None]
A = np.tile([1.5, -2.0, 0.0], 10)[None]
HERE = np.ones_like(RHO, bool)
CLIPS = {
    "clip": clips.clip_ratio,
    "higher": functools.partial(clips.clip_ratio, low=0.2, high=0.28),
    "none": functools.partial(clips.clip_ratio, low=np.inf, high=np.inf),
    "dual": clips.dual_clip,
    "delta": clips.two_sided_clip,
    "small delta": functools.partial(clips.two_sided_clip, delta=1.1),
}


def by_hand(name, rho, a):
    low, high = {"higher": (0.8, 1.28), "none": (-np.inf, np.inf)}.get(name, (0.8, 1.2))
    delta = {"delta": 4.0, "small delta": 1.1}.get(name, np.inf)
    loss = max(-a * min(rho, delta), -a * min(max(rho, low), high))
    return min(loss, -3 * a) if name == "dual" and a < 0 else loss


@pytest.mark.parametrize("name", CLIPS)
def test_bounded_surrogates_and_where_they_stand_still(name):
    with jax.enable_x64(True):
        got = CLIPS[name](jnp.log(RHO), None, A, HERE)
        expected = [by_hand(name, rho, a) for rho, a in zip(RHO[0], A[0])]
        np.testing.assert_allclose(got.loss[0], expected, rtol=1e-12)
        slope = jax.grad(lambda x: CLIPS[name](x, None, A, HERE).loss.sum())(jnp.log(RHO))
        moves = np.asarray(slope) != 0
    np.testing.assert_array_equal(got.clipped, ~moves & (A != 0))
    np.testing.assert_allclose(slope, np.where(moves, -A * RHO, 0), rtol=1e-12)
    assert np.asarray(got.clipped).any() != (name == "none")


def test_dual_clip_is_the_two_sided_one_above_the_range():
    dual = clips.dual_clip(jnp.log(RHO), None, A, HERE, bound=3.0)
    two = clips.two_sided_clip(jnp.log(RHO), None, A, HERE, delta=3.0)
    np.testing.assert_allclose(dual.loss, two.loss, rtol=1e-6)
    np.testing.assert_array_equal(dual.clipped, two.clipped)


def test_cispo_cuts_the_weight_and_keeps_every_gradient():
    logprobs = np.random.default_rng(1).normal(-2, 1, RHO.shape)
    with jax.enable_x64(True):
        cut = functools.partial(clips.cispo, lower=0.8, upper=2.0)
        got = cut(jnp.log(RHO), logprobs, A, HERE)
        weight = np.clip(RHO, 0.8, 2.0)
        np.testing.assert_allclose(got.loss, -weight * A * logprobs, rtol=1e-12)
        by_ratio = jax.grad(lambda x: cut(x, logprobs, A, HERE).loss.sum())(jnp.log(RHO))
        by_logprobs = jax.grad(lambda x: cut(jnp.log(RHO), x, A, HERE).loss.sum())(logprobs)
        np.testing.assert_array_equal(by_ratio, np.zeros_like(RHO))
        np.testing.assert_allclose(by_logprobs, -weight * A, rtol=1e-12)
        np.testing.assert_array_equal(got.clipped, (RHO < 0.8) | (RHO > 2))


def test_sapo_begins_as_the_plain_surrogate():
    with jax.enable_x64(True):
        slope = jax.grad(lambda x: clips.sapo(x, None, A, HERE).loss.sum())(0 * RHO)
        np.testing.assert_allclose(slope, -A, rtol=1e-12)
        got = clips.sapo(jnp.log(RHO), None, A, HERE, tau_pos=2.0, tau_neg=3.0).loss
        tau = np.where(A > 0, 2.0, 3.0)
        np.testing.assert_allclose(got, -A * 4 / tau / (1 + np.exp(-tau * (RHO - 1))), rtol=1e-12)


def test_vespo_weighs_the_response_and_is_one_at_the_start():
    zeros = np.zeros((1, 4))
    logprobs, a = np.full((1, 4), -2.0), np.array([[1.0, 1, -1, -1]])
    got = clips.vespo(jnp.asarray(zeros), logprobs, a, zeros == 0)
    np.testing.assert_allclose(got.loss, 2 * a, rtol=1e-6)


@pytest.mark.parametrize(
    "normaliser",
    [
        normalisers.token_mean,
        normalisers.sequence_mean,
        normalisers.sequence_sum,
        normalisers.fixed_length,
    ],
)
def test_weights_by_loop_and_whatever_the_padding(normaliser):
    tokens, samples = MASK.sum(), MASK.any(1).sum()
    expected = np.zeros(MASK.shape)
    for i, t in np.argwhere(MASK):
        expected[i, t] = {
            "token_mean": 1 / tokens,
            "sequence_mean": 1 / (samples * MASK[i].sum()),
            "sequence_sum": 1 / samples,
            "fixed_length": 1 / (samples * 9),
        }[normaliser.__name__]
    np.testing.assert_allclose(normaliser(MASK, 9), expected, rtol=1e-6)
    wider = np.pad(MASK, ((0, 2), (1, 3)))  # empty rows and columns change nothing
    np.testing.assert_array_equal(normaliser(wider, 9)[:3, 1:5], normaliser(MASK, 9))
    np.testing.assert_array_equal(normaliser(np.zeros((2, 3), bool), 9), np.zeros((2, 3)))


def test_fixed_length_needs_a_length():
    for length in (None, 0, -3):
        with pytest.raises(ValueError, match="max_length"):
            normalisers.fixed_length(MASK, length)
