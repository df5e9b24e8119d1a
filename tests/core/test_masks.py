"""Masks, penalties, corrections of stale samples, and the entropy's price."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo.core import adaptive_entropy, fixed_entropy, policy_loss
from jaxppo.core.corrections import (
    effective_share,
    masked_importance,
    on_policy_enough,
    truncated_importance,
)
from jaxppo.core.masks import ended_only, missing_eos_penalty, overlong_penalty, top_entropy
from jaxppo.core.ratios import sequence_ratio, trajectory_ratio

MASK = np.array([[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]], bool)


def test_truncated_responses_leave_loss_and_denominator():
    rng = np.random.default_rng(0)
    logprobs, advantages = rng.normal(size=(3, 4)), rng.normal(size=3)
    kept = ended_only(MASK, np.array([False, True, True]))
    np.testing.assert_array_equal(kept, MASK & [[False], [True], [True]])
    loss, _ = policy_loss(logprobs, logprobs, advantages, kept)
    np.testing.assert_allclose(loss, -advantages[1], rtol=1e-6)
    nothing = ended_only(MASK, np.zeros(3, bool))
    slope = jax.grad(lambda x: policy_loss(x, logprobs, advantages, nothing)[0])(logprobs)
    np.testing.assert_array_equal(slope, np.zeros((3, 4)))


@pytest.mark.parametrize("share", [0.2, 0.5, 0.35, 1.0])
def test_top_entropy_is_numpys_quantile_over_real_tokens(share):
    rng = np.random.default_rng(1)
    entropy, mask = rng.uniform(0, 3, (6, 7)), rng.random((6, 7)) < 0.6
    dirty = np.where(mask, entropy, np.nan)
    with jax.enable_x64(True):
        got = np.asarray(jax.jit(functools.partial(top_entropy, share=share))(dirty, mask))
    threshold = np.quantile(entropy[mask], 1 - share)
    np.testing.assert_array_equal(got, mask & (entropy >= threshold - 1e-12))
    assert abs(got.sum() - share * mask.sum()) <= 1


def test_top_entropy_of_few_and_equal_tokens():
    np.testing.assert_array_equal(top_entropy(np.full((3, 4), 0.1), MASK, share=0.2), MASK)
    one = np.zeros((3, 4), bool)
    one[1, 2] = True
    np.testing.assert_array_equal(top_entropy(np.ones((3, 4)), one, share=0.2), one)
    assert not np.asarray(top_entropy(np.ones((3, 4)), 0 * MASK > 0, share=0.2)).any()
    for share in (0, -1, 1.5):
        with pytest.raises(ValueError, match="share"):
            top_entropy(np.ones((3, 4)), MASK, share=share)


def test_penalties_of_length_and_of_a_missing_end():
    got = overlong_penalty(np.array([0, 80, 81, 90, 100, 101, 500]), max_length=100, buffer=20)
    np.testing.assert_allclose(got, [0, 0, -0.05, -0.5, -1, -1, -1], atol=1e-7)
    np.testing.assert_allclose(missing_eos_penalty(np.array([True, False]), penalty=1.5), [0, -1.5])
    with pytest.raises(ValueError, match="buffer"):
        overlong_penalty(np.array([3]), max_length=10, buffer=0)
    with pytest.raises(ValueError, match="penalty"):
        missing_eos_penalty(np.array([True]), penalty=-1)


def test_importance_is_cut_by_token_and_by_response():
    old = np.log(np.array([[0.4, 0.1, 0.3, np.nan], [0.5, 0.2, 1, 1], [1, 1, 1, 1]]))
    behaviour = np.log(np.array([[0.1, 0.2, 0.2, 9], [0.25, 0.2, 3, 1], [1, 1, 1, 1]]))
    token = truncated_importance(old, behaviour, MASK, upper=1.8)
    np.testing.assert_allclose(token, [[1.8, 0.5, 1.5, 0], [1.8, 1, 0, 0], [0] * 4], rtol=1e-6)
    whole = truncated_importance(old, behaviour, MASK, ratio=trajectory_ratio, upper=2.5)
    np.testing.assert_allclose(whole, [[2.5, 2.5, 2.5, 0], [2, 2, 0, 0], [0] * 4], rtol=1e-6)
    mean = truncated_importance(old, behaviour, MASK, ratio=sequence_ratio, upper=2.5)
    np.testing.assert_allclose(mean[0, :3], [3 ** (1 / 3)] * 3, rtol=1e-6)
    masked = masked_importance(old, behaviour, MASK, lower=0.6, upper=1.8)
    np.testing.assert_allclose(masked, [[0, 0, 1.5, 0], [0, 1, 0, 0], [0] * 4], rtol=1e-6)
    slope = jax.grad(lambda x: truncated_importance(x, behaviour, MASK).sum())(np.ones((3, 4)))
    np.testing.assert_array_equal(slope, np.zeros((3, 4)))


def test_importance_makes_the_gradient_that_of_fresh_samples():
    """Over all three tokens as the behaviour policy draws them, weights undo the difference."""
    reward = np.array([1.0, -0.5, 2.0])
    with jax.enable_x64(True):
        behaviour = jax.nn.log_softmax(jnp.array([0.2, 0.4, -0.3]))
        logits = jnp.array([0.5, -0.2, 0.1])
        now = jax.nn.log_softmax(logits)
        here = np.ones((3, 1), bool)
        weights = truncated_importance(now[:, None], behaviour[:, None], here, upper=99.0)[:, 0]
        chance = np.exp(behaviour)
        score = np.eye(3) - np.exp(now)
        got = (chance * weights * reward) @ score
        wanted = jax.grad(lambda x: jnp.sum(jax.nn.softmax(x) * reward))(logits)
        np.testing.assert_allclose(got, wanted, rtol=1e-10)


def test_effective_share():
    mask = np.array([[True, True, False], [True, True, False]])
    share = lambda w: float(effective_share(np.array(w), mask))  # noqa: E731
    assert share([[2, 2, 7], [2, 2, np.nan]]) == pytest.approx(1)
    assert share([[1, 0, 7], [0, 0, 7]]) == pytest.approx(0.25)
    assert share([[0, 0, 7], [0, 0, 7]]) == 0


def test_bad_responses_far_off_policy_are_left_out():
    mask = np.ones((5, 2), bool)
    mask[0, 1] = False
    old = np.zeros((5, 2))
    now = np.array([[-0.3, np.nan], [-0.3, -0.1], [-0.3, -0.3], [0.5, 0.5], [-0.3, -0.3]])
    advantages = np.array([-1.0, -1, 1, -1, 0])[:, None] * np.ones((1, 2))
    got = on_policy_enough(now, old, advantages, mask, threshold=0.25)
    np.testing.assert_array_equal(got, [[False, False]] + [[True, True]] * 4)


def test_adaptive_entropy_by_hand():
    control = adaptive_entropy(0.5, init_coef=0.01, delta=0.004, max_coef=0.015)
    state = control.init()
    assert float(state.price) == pytest.approx(0.01)
    seen = []
    for entropy in (0.4, 0.5, 0.6, np.nan, 0.7, 0.7, 0.7, 0.7, 0.1):
        state = jax.jit(control.update)(state, entropy)
        seen.append((float(state.coef), float(state.price)))
    expected = [0.014, 0.015, 0.011, 0.011, 0.007, 0.003, 0, 0, 0.004]
    np.testing.assert_allclose([coef for coef, _ in seen], expected, atol=1e-8)
    on = np.array([1, 1, 0, 0, 0, 0, 0, 0, 1])
    np.testing.assert_allclose([price for _, price in seen], expected * on, atol=1e-8)


def test_fixed_entropy_and_bad_controllers():
    control = fixed_entropy(0.3)
    assert float(control.update(control.init(), 9.0).price) == pytest.approx(0.3)
    for build in (
        lambda: fixed_entropy(-1),
        lambda: adaptive_entropy(0),
        lambda: adaptive_entropy(1.0, delta=0),
        lambda: adaptive_entropy(1.0, init_coef=2.0),
    ):
        with pytest.raises(ValueError, match=r"must|needs"):
            build()
