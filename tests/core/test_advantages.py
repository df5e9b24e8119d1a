"""gae and whiten against trlx, TRL 0.24, hand computations and plain loops."""

import functools
import json
import pathlib

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxppo.core import gae, whiten

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
examples = functools.partial(hypothesis.settings, deadline=None, derandomize=True)
masks = hnp.arrays(bool, (3, 6))
seeds = st.integers(0, 2**16)
junk = st.sampled_from([np.nan, np.inf, -np.inf, 1e30])
jit_gae = jax.jit(gae)
jit_whiten = jax.jit(whiten, static_argnames="shift_mean")


@jax.jit
@functools.partial(jax.value_and_grad, argnums=(0, 1))
def gae_scalar(rewards, values, mask, w, u):
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    return jnp.sum(w * advantages + u * returns)


@functools.partial(jax.jit, static_argnums=3)
@jax.grad
def whiten_slope(x, mask, w, shift_mean):
    return jnp.sum(w * whiten(x, mask, shift_mean=shift_mean))


def loop_gae(rewards, values, mask, gamma, lam):
    """The definition, one position at a time, over the list of a row's real positions."""
    advantages, returns = np.zeros(mask.shape), np.zeros(mask.shape)
    for row in range(mask.shape[0]):
        real = [t for t in range(mask.shape[1]) if mask[row, t]]
        for i in range(len(real)):
            total, weight = 0.0, 1.0
            for j in range(i, len(real)):
                following = values[row, real[j + 1]] if j + 1 < len(real) else 0.0
                delta = rewards[row, real[j]] + gamma * following - values[row, real[j]]
                total += weight * delta
                weight *= gamma * lam
            advantages[row, real[i]] = total
            returns[row, real[i]] = total + values[row, real[i]]
    return advantages, returns


def whiten_unbiased(x, mask, bessel, shift_mean=True):
    """Our whitening turned into the peers', whose variance is b = n / (n - 1) times as large.

    rsqrt(v b + eps) = rsqrt(v + eps / b) / sqrt(b), and b concerns the deviations alone.
    """
    kept = 0.0 if shift_mean else np.asarray(x)[mask].mean()
    whitened = np.asarray(whiten(x, mask, shift_mean=shift_mean, eps=1e-8 / bessel))
    return np.where(mask, (whitened - kept) / np.sqrt(bessel) + kept, 0)


def trl_bessel(n):
    """TRL divides two integer tensors, which gives the factor in single precision."""
    return float(np.float32(n) / np.float32(n - 1))


@pytest.mark.parametrize("case", ["case0", "case2", "case4"])
def test_gae_is_trlx_where_every_token_is_real(case):
    golden = np.load(GOLDEN / "trlx_gae_f64.npz")
    rewards, values = golden[f"{case}_rewards"], golden[f"{case}_values"]
    mask = np.ones(values.shape, bool)
    gamma, lam = float(golden[f"{case}_gamma"]), float(golden[f"{case}_lam"])
    with jax.enable_x64(True):
        advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
        assert advantages.dtype == returns.dtype == jnp.float64
        # trlx divides by n - 1 on one process and by n on several; ours is n always.
        whitened = whiten_unbiased(advantages, mask, mask.size / (mask.size - 1))
    np.testing.assert_allclose(advantages, golden[f"{case}_adv_raw"], rtol=1e-10)
    np.testing.assert_allclose(returns, golden[f"{case}_returns"], rtol=1e-10)
    np.testing.assert_allclose(whitened, golden[f"{case}_adv_whitened"], rtol=1e-10)


@pytest.mark.parametrize("config", json.loads((GOLDEN / "trl024_ppo_cases.json").read_text()))
def test_gae_is_trl_with_its_extra_position_counted_as_real(config):
    # TRL 0.24 puts the score one position after the last token and takes the value there as the
    # successor (trl#3750). Calling that position real gives its numbers; our experience puts the
    # score on the last action, see the test below.
    golden = np.load(GOLDEN / "trl024_ppo_f64.npz")
    c = f"c{config['case']}_"
    actions, with_extra = ~golden[c + "padding_mask"], ~golden[c + "padding_mask_p1"]
    assert with_extra.sum() > actions.sum()
    with jax.enable_x64(True):
        advantages, returns = gae(
            golden[c + "rewards"],
            golden[c + "values"],
            with_extra,
            gamma=config["gamma"],
            lam=config["lam"],
        )
        whitened = whiten_unbiased(advantages, actions, trl_bessel(actions.sum()))
    np.testing.assert_allclose(
        np.where(with_extra, returns, 0), np.where(with_extra, golden[c + "returns"], 0), rtol=1e-10
    )
    np.testing.assert_allclose(whitened, golden[c + "advantages"], rtol=1e-10)


def test_gae_credits_the_last_action_in_full():
    # A score of 1 on the last action with V = 0: the advantage is 1 there and 0.5 one action
    # before. Where the score stands on the padding behind it, as in trlx and TRL, both are halved.
    mask = np.array([[True, True, False]])
    zeros = np.zeros((1, 3), np.float32)
    advantages, returns = gae(np.array([[0.0, 1.0, 9.0]]), zeros, mask, gamma=1.0, lam=0.5)
    np.testing.assert_array_equal(advantages, [[0.5, 1.0, 0.0]])
    np.testing.assert_array_equal(returns, [[0.5, 1.0, 0.0]])


def test_gae_by_hand_across_a_hole():
    # delta_2 = 2 - 0.25 = 1.75; the successor of 0 is 2: delta_0 = 1 + 0.5 * 0.25 - 0.5 = 0.625;
    # A_0 = 0.625 + 0.5 * 0.8 * 1.75 = 1.325.
    rewards = np.array([[1.0, 7.0, 2.0, 7.0]])
    values = np.array([[0.5, 7.0, 0.25, 7.0]])
    mask = np.array([[True, False, True, False]])
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.8)
    np.testing.assert_allclose(advantages, [[1.325, 0, 1.75, 0]], rtol=1e-6)
    np.testing.assert_allclose(returns, [[1.825, 0, 2.0, 0]], rtol=1e-6)


@examples(max_examples=40)
@hypothesis.given(masks, seeds, st.floats(0, 1), st.floats(0, 1))
def test_gae_equals_the_loop(mask, seed, gamma, lam):
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, *mask.shape))
    with jax.enable_x64(True):
        ours = jit_gae(rewards, values, mask, gamma=gamma, lam=lam)
    for result, expected in zip(ours, loop_gae(rewards, values, mask, gamma, lam)):
        np.testing.assert_allclose(result, expected, rtol=1e-10, atol=1e-12)


@examples(max_examples=25)
@hypothesis.given(masks, seeds, junk)
def test_gae_does_not_see_padding_in_value_or_gradient(mask, seed, junk):
    rng = np.random.default_rng(seed)
    rewards, values, w, u = rng.normal(size=(4, *mask.shape))

    with jax.enable_x64(True):
        clean = gae_scalar(np.where(mask, rewards, 0), np.where(mask, values, 0), mask, w, u)
        dirty = gae_scalar(np.where(mask, rewards, junk), np.where(mask, values, junk), mask, w, u)
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    for gradient in dirty[1]:
        assert np.isfinite(gradient).all()
        assert (np.asarray(gradient)[~mask] == 0).all()
    assert not mask.any() or (np.asarray(dirty[1][0])[mask] != 0).any()


@pytest.mark.parametrize("junk", [np.nan, np.inf])
def test_padding_has_no_influence_outside_jit_either(junk):
    # XLA turns a product with a mask into a selection, so that jit hides a 0 * NaN.
    mask = np.array([[True, False, True], [False, True, False]])
    x = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    dirty = np.where(mask, x, np.float32(junk))
    with jax.disable_jit():
        for scalar in (
            lambda x: sum(jnp.sum(y) for y in gae(x, x + 1, mask, gamma=0.9, lam=0.8)),
            lambda x: jnp.sum(jnp.square(whiten(x, mask) + 1)),
        ):
            clean, clean_slope = jax.value_and_grad(scalar)(np.where(mask, x, 0))
            value, slope = jax.value_and_grad(scalar)(dirty)
            assert value == clean
            np.testing.assert_array_equal(slope, clean_slope)


@examples(max_examples=25)
@hypothesis.given(masks, seeds)
def test_gae_does_not_depend_on_where_padding_stands(mask, seed):
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, *mask.shape))
    squeezed = np.zeros((2, *mask.shape))
    lengths = mask.sum(1)
    for row, length in enumerate(lengths):
        squeezed[:, row, :length] = rewards[row, mask[row]], values[row, mask[row]]
    prefix = np.arange(mask.shape[1]) < lengths[:, None]
    with jax.enable_x64(True):
        ragged = jit_gae(rewards, values, mask, gamma=0.9, lam=0.8)
        packed = jit_gae(*squeezed, prefix, gamma=0.9, lam=0.8)
    for a, b in zip(ragged, packed):
        np.testing.assert_array_equal(np.asarray(a)[mask], np.asarray(b)[prefix])


@pytest.mark.parametrize("length", [0, 1])
def test_gae_of_short_rows(length):
    rewards = np.full((2, length), 3.0)
    values = np.full((2, length), 1.0)
    advantages, returns = gae(rewards, values, np.ones((2, length), bool), gamma=0.9, lam=0.9)
    np.testing.assert_array_equal(advantages, np.full((2, length), 2.0))
    np.testing.assert_array_equal(returns, np.full((2, length), 3.0))


def test_gae_is_the_same_under_jit_and_float32_for_bfloat16():
    rewards, values = jax.random.normal(jax.random.key(0), (2, 3, 6))
    mask = jax.random.bernoulli(jax.random.key(1), 0.7, (3, 6))
    plain = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    jitted = jit_gae(rewards, values, mask, gamma=0.9, lam=0.8)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), plain, jitted)
    half = gae(rewards.astype(jnp.bfloat16), values, mask, gamma=0.9, lam=0.8)
    assert half[0].dtype == half[1].dtype == jnp.float32
    half = [x.astype(jnp.bfloat16) for x in (rewards, values)]
    assert gae(*half, mask, gamma=0.9, lam=0.8)[0].dtype == jnp.float32


@pytest.mark.parametrize(
    "shapes", [((2, 3), (2, 3), (2, 4)), ((2, 3), (3, 2), (2, 3)), ((3,),) * 3]
)
def test_gae_refuses_shapes_that_do_not_fit(shapes):
    with pytest.raises(AssertionError):
        gae(*(np.ones(shape) for shape in shapes), gamma=1.0, lam=1.0)


@pytest.mark.parametrize("case", ["case0", "case1", "case2"])
def test_whiten_is_trlx_up_to_its_unbiased_variance(case):
    golden = np.load(GOLDEN / "trlx_whiten_logprobs_f64.npz")
    x = golden[f"{case}_x"]
    mask = np.ones(x.shape, bool)
    with jax.enable_x64(True):
        bessel = x.size / (x.size - 1)
        shifted = whiten_unbiased(x, mask, bessel)
        kept = whiten_unbiased(x, mask, bessel, shift_mean=False)
        population = whiten(x, mask)
    np.testing.assert_allclose(shifted, golden[f"{case}_whitened"], rtol=1e-10)
    np.testing.assert_allclose(kept, golden[f"{case}_whitened_noshift"], rtol=1e-10)
    np.testing.assert_allclose(population, (x - x.mean()) / np.sqrt(x.var() + 1e-8), rtol=1e-10)


@pytest.mark.parametrize("case", ["w0", "w1"])
def test_whiten_is_trl_on_real_entries(case):
    golden = np.load(GOLDEN / "trl024_ppo_f64.npz")
    x, mask = golden[f"{case}_x"], golden[f"{case}_mask"]
    with jax.enable_x64(True):
        shifted = whiten_unbiased(x, mask, trl_bessel(mask.sum()))
        kept = whiten_unbiased(x, mask, trl_bessel(mask.sum()), shift_mean=False)
    np.testing.assert_allclose(shifted[mask], golden[f"{case}_masked_whiten"][mask], rtol=1e-10)
    np.testing.assert_allclose(
        kept[mask], golden[f"{case}_masked_whiten_noshift"][mask], rtol=1e-10
    )


@examples(max_examples=25)
@hypothesis.given(masks, seeds, junk, st.booleans())
def test_whiten_counts_real_entries_only(mask, seed, junk, shift_mean):
    rng = np.random.default_rng(seed)
    x, w = rng.normal(size=(2, *mask.shape))
    dirty = np.where(mask, x, junk)

    with jax.enable_x64(True):
        result = np.asarray(jit_whiten(dirty, mask, shift_mean=shift_mean))
        slope = np.asarray(whiten_slope(dirty, mask, w, shift_mean))
        clean_slope = np.asarray(whiten_slope(np.where(mask, x, 0), mask, w, shift_mean))
    assert (result[~mask] == 0).all()
    np.testing.assert_array_equal(slope, clean_slope)
    assert np.isfinite(slope).all()
    real = x[mask]
    if len(real):
        expected = (real - real.mean()) / np.sqrt(real.var() + 1e-8)
        expected = expected if shift_mean else expected + real.mean()
        np.testing.assert_allclose(result[mask], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whiten_of_one_entry_and_of_none(shift_mean):
    x = np.array([[5.0, np.nan]], np.float32)
    one = whiten(x, np.array([[True, False]]), shift_mean=shift_mean)
    np.testing.assert_array_equal(one, [[0.0 if shift_mean else 5.0, 0.0]])
    none = whiten(x, np.zeros((1, 2), bool), shift_mean=shift_mean)
    np.testing.assert_array_equal(none, [[0.0, 0.0]])
