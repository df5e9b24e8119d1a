"""The PPO loss against trlx, TRL 0.24, a plain loop, and under every way of cutting a batch."""

import collections
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

from jaxppo.core import LOG_RATIO_LIMIT, finish_metrics, ppo_loss, ppo_loss_sums

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
NAMES = ("logprobs", "values", "old_logprobs", "old_values", "advantages", "returns")
RANGES = {"cliprange": 0.2, "cliprange_value": 0.3, "vf_coef": 0.7}
examples = functools.partial(hypothesis.settings, deadline=None, derandomize=True)
masks = hnp.arrays(bool, (3, 5))
seeds = st.integers(0, 2**16)
jit_loss = jax.jit(ppo_loss)
# The loss with its gradients by all six arrays, and by logprobs and values alone.
jit_loss_and_all_slopes = jax.jit(jax.value_and_grad(ppo_loss, argnums=range(6), has_aux=True))
jit_loss_and_slopes = jax.jit(jax.value_and_grad(ppo_loss, argnums=(0, 1), has_aux=True))


def sum_and_sums(*args, **kwargs):
    sums = ppo_loss_sums(*args, **kwargs)
    return sums["losses/total_loss"], sums


jit_sums_and_slopes = jax.jit(jax.value_and_grad(sum_and_sums, argnums=(0, 1), has_aux=True))


def random_inputs(seed, shape):
    """Six arrays of which a good part is clipped."""
    rng = np.random.default_rng(seed)
    logprobs, values, advantages, returns = rng.normal(size=(4, *shape))
    old_logprobs = logprobs + 0.3 * rng.normal(size=shape)
    old_values = values + 0.4 * rng.normal(size=shape)
    return logprobs, values, old_logprobs, old_values, advantages, returns


def loop_loss(logprobs, values, old_logprobs, old_values, advantages, returns, mask, entropy):
    """Value, gradients and metrics token by token, with RANGES."""
    eps, eps_v, vf_coef = RANGES.values()
    n = max(int(mask.sum()), 1)
    m = collections.defaultdict(float)
    slope_logprobs, slope_values = np.zeros(mask.shape), np.zeros(mask.shape)
    for i in np.argwhere(mask):
        i = tuple(i)
        log_ratio = logprobs[i] - old_logprobs[i]
        rho = np.exp(log_ratio)
        free = -advantages[i] * rho
        clipped = -advantages[i] * min(max(rho, 1 - eps), 1 + eps)
        m["losses/policy_loss"] += max(free, clipped) / n
        m["policy/clipfrac"] += (clipped > free) / n
        slope_logprobs[i] = 0 if clipped > free else free / n
        v_clip = min(max(values[i], old_values[i] - eps_v), old_values[i] + eps_v)
        free, clipped = (values[i] - returns[i]) ** 2, (v_clip - returns[i]) ** 2
        m["losses/value_loss"] += 0.5 * max(free, clipped) / n
        m["values/clipfrac"] += (clipped > free) / n
        slope_values[i] = 0 if clipped > free else vf_coef * (values[i] - returns[i]) / n
        m["policy/approx_kl"] += (rho - 1 - log_ratio) / n
        m["ratio"] += rho / n
        m["values/mean"] += values[i] / n
        m["values/values_error"] += (values[i] - returns[i]) ** 2 / n
        m["old_values/mean"] += old_values[i] / n
        m["returns/mean"] += returns[i] / n
        m["policy/entropy"] += entropy[i] / n
    m["losses/total_loss"] = m["losses/policy_loss"] + vf_coef * m["losses/value_loss"]
    real = returns[mask]
    m["values/explained_variance"] = (
        1 - np.var(real - values[mask]) / np.var(real) if len(real) > 1 else 0.0
    )
    return m, slope_logprobs, slope_values


@pytest.mark.parametrize("case", ["case0", "case2"])
def test_loss_is_trlx_in_value_gradient_and_statistics(case):
    golden = {
        k.removeprefix(case + "_"): v for k, v in np.load(GOLDEN / "trlx_loss_f64.npz").items()
    }
    mask = golden["mask"].astype(bool)
    assert 0 < mask.sum() < mask.size
    ranges = {k: float(golden[k]) for k in RANGES}
    with jax.enable_x64(True):
        (loss, metrics), slopes = jit_loss_and_slopes(*(golden[k] for k in NAMES), mask, **ranges)
        assert loss.dtype == jnp.float64
    np.testing.assert_allclose(loss, golden["loss"], rtol=1e-10)
    np.testing.assert_allclose(slopes[0], golden["grad_logprobs"], rtol=1e-10, atol=1e-15)
    np.testing.assert_allclose(slopes[1], golden["grad_values"], rtol=1e-10, atol=1e-15)
    compared = 0
    for key, value in metrics.items():
        if key == "values/explained_variance":
            continue  # trlx has none
        expected = golden["stat:" + key]
        if key == "policy/approx_kl":
            # trlx divides the sum by the padded size; ours counts real tokens.
            expected = expected * mask.size / mask.sum()
        # Its clip fractions are in single precision.
        rtol = 1e-6 if key.endswith("clipfrac") else 1e-10
        np.testing.assert_allclose(value, expected, rtol=rtol, err_msg=key)
        compared += 1
    assert compared == 11


@pytest.mark.parametrize("config", json.loads((GOLDEN / "trl024_ppo_cases.json").read_text()))
def test_loss_is_trl_with_one_mask_each(config):
    # TRL 0.24 takes the value loss over one position more than the policy loss, the one it puts the
    # score on (see test_advantages.py); ours has one mask, so its terms are compared apart.
    golden = np.load(GOLDEN / "trl024_ppo_f64.npz")
    g = {k.removeprefix(f"c{config['case']}_"): v for k, v in golden.items()}
    actions, with_extra = ~g["padding_mask"], ~g["padding_mask_p1"]
    arrays = [
        g[k]
        for k in ("new_logprobs_raw", "vpred_raw", "logprobs", "values", "advantages", "returns")
    ]
    ranges = {k: config[k] for k in RANGES}
    with jax.enable_x64(True):
        (_, policy), (slope_logprobs, _) = jit_loss_and_slopes(*arrays, actions, **ranges)
        (_, value), (_, slope_values) = jit_loss_and_slopes(*arrays, with_extra, **ranges)
    policy, value = jax.device_get((policy, value))
    np.testing.assert_allclose(policy["losses/policy_loss"], g["pg_loss"], rtol=1e-10)
    np.testing.assert_allclose(value["losses/value_loss"], g["vf_loss"], rtol=1e-10)
    np.testing.assert_allclose(value["values/clipfrac"], g["vf_clipfrac"], rtol=1e-6)
    np.testing.assert_allclose(slope_logprobs, g["grad_new_logprobs"], rtol=1e-10, atol=1e-15)
    np.testing.assert_allclose(slope_values, g["grad_vpred"], rtol=1e-10, atol=1e-15)
    total = float(policy["losses/policy_loss"] + config["vf_coef"] * value["losses/value_loss"])
    np.testing.assert_allclose(total, g["loss"], rtol=1e-10)


def test_loss_by_hand():
    # One token: rho = 2, A = 1, cliprange 0.5 -> clipped to -1.5. V = 3 clipped to 1.5, R = 2: the
    # unclipped error (1) is the larger: 0.5. Loss = -1.5 + 0.1 * 0.5.
    one = np.ones((1, 1), np.float32)
    (loss, metrics), slopes = jit_loss_and_slopes(
        np.log(2) * one, 3 * one, 0 * one, one, one, 2 * one, one > 0,
        cliprange=0.5, cliprange_value=0.5, vf_coef=0.1,
    )  # fmt: skip
    np.testing.assert_allclose(loss, -1.45, rtol=1e-6)
    np.testing.assert_allclose(metrics["policy/clipfrac"], 1)
    np.testing.assert_allclose(metrics["values/clipfrac"], 0)
    np.testing.assert_allclose(slopes[0], [[0.0]])
    np.testing.assert_allclose(slopes[1], [[0.1]], rtol=1e-6)


@examples(max_examples=40)
@hypothesis.given(masks, seeds)
def test_loss_equals_the_loop(mask, seed):
    arrays = random_inputs(seed, mask.shape)
    entropy = np.random.default_rng(seed + 1).uniform(size=mask.shape)
    expected, *expected_slopes = loop_loss(*arrays, mask, entropy)
    with jax.enable_x64(True):
        (loss, metrics), slopes = jit_loss_and_slopes(*arrays, mask, **RANGES, entropy=entropy)
    assert not mask.any() or set(metrics) == set(expected)
    for key, value in expected.items():
        np.testing.assert_allclose(metrics[key], value, rtol=1e-9, atol=1e-12, err_msg=key)
    assert loss == metrics["losses/total_loss"]
    for slope, expected_slope in zip(slopes, expected_slopes):
        np.testing.assert_allclose(slope, expected_slope, rtol=1e-10, atol=1e-14)


@examples(max_examples=40)
@hypothesis.given(masks, seeds, st.sampled_from([np.nan, np.inf, -np.inf, 1e30]))
def test_loss_does_not_see_padding_in_value_or_gradient(mask, seed, junk):
    arrays = (*random_inputs(seed, mask.shape), np.ones(mask.shape))
    clean, dirty = ([np.where(mask, x, fill) for x in arrays] for fill in (0, junk))
    for x64 in (True, False):
        with jax.enable_x64(x64):
            expected = jit_loss_and_all_slopes(*clean[:6], mask, **RANGES, entropy=clean[6])
            result = jit_loss_and_all_slopes(*dirty[:6], mask, **RANGES, entropy=dirty[6])
        jax.tree.map(np.testing.assert_array_equal, expected, result)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(result))
        (_, metrics), slopes = jax.device_get(result)
        assert all((slope[~mask] == 0).all() for slope in slopes)
        # What the update was given is constant.
        assert all((slope == 0).all() for slope in slopes[2:])
        # Only a clip makes a gradient 0, and then both fractions say so.
        if mask.any() and metrics["policy/clipfrac"] < 1:
            assert (slopes[0][mask] != 0).any()


def test_loss_does_not_see_padding_outside_jit_either():
    # XLA turns a product with a mask into a selection, so that jit hides a 0 * NaN.
    mask = np.array([[True, False, True], [False, True, False]])
    arrays = [*(x.astype(np.float32) for x in random_inputs(2, (2, 3))), np.ones((2, 3))]
    slopes = jax.value_and_grad(ppo_loss, argnums=range(6), has_aux=True)
    clean, dirty = ([np.where(mask, x, fill) for x in arrays] for fill in (0, np.nan))
    with jax.disable_jit():
        expected = slopes(*clean[:6], mask, **RANGES, entropy=clean[6])
        result = slopes(*dirty[:6], mask, **RANGES, entropy=dirty[6])
    assert np.isfinite(expected[0][0])
    jax.tree.map(np.testing.assert_array_equal, expected, result)


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_no_real_token_gives_zero_and_no_gradient(shape):
    arrays = [np.full(shape, np.nan, np.float32)] * 6
    mask = np.zeros(shape, bool)
    (loss, metrics), slopes = jit_loss_and_slopes(*arrays, mask, **RANGES, entropy=arrays[0])
    assert loss == 0
    assert all(value == 0 for value in metrics.values())
    assert all((np.asarray(slope) == 0).all() for slope in slopes)


@examples(max_examples=25)
@hypothesis.given(masks, seeds)
def test_loss_does_not_depend_on_where_padding_stands(mask, seed):
    arrays = random_inputs(seed, mask.shape)
    wide = np.zeros((6, 3, 9))
    wide_mask = np.zeros((3, 9), bool)
    for row in range(3):
        count = mask[row].sum()
        wide_mask[row, 9 - count :] = True
        for k in range(6):
            wide[k, row, 9 - count :] = arrays[k][row, mask[row]]
    with jax.enable_x64(True):
        (_, metrics), slopes = jit_loss_and_slopes(*arrays, mask, **RANGES)
        (_, wide_metrics), wide_slopes = jit_loss_and_slopes(*wide, wide_mask, **RANGES)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12)
    jax.tree.map(close, metrics, wide_metrics)
    for slope, wide_slope in zip(slopes, wide_slopes):
        close(np.asarray(slope)[mask], np.asarray(wide_slope)[wide_mask])


@pytest.mark.parametrize("axis", [0, 1])
def test_sums_of_micro_batches_add_to_the_whole(axis):
    shape = (4, 6)
    arrays = random_inputs(7, shape)
    mask = np.random.default_rng(8).random(shape) < 0.6
    mask[0] = False  # a row without an action
    with jax.enable_x64(True):
        (loss, metrics), slopes = jit_loss_and_slopes(*arrays, mask, **RANGES)
        parts = [np.split(x, [1, 3], axis) for x in (*arrays, mask)]
        assert len({part.sum() for part in parts[6]}) > 1  # unequal, or a mean of means would do
        sums, part_slopes = None, []
        for part in zip(*parts):
            (_, new), new_slopes = jit_sums_and_slopes(*part, **RANGES)
            sums = new if sums is None else jax.tree.map(jnp.add, sums, new)
            part_slopes.append(new_slopes)
        assert sums["count"] == mask.sum()
        finished = finish_metrics(sums)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-14)
    jax.tree.map(close, finished, metrics)
    close(finished["losses/total_loss"], loss)
    for slope, pieces in zip(slopes, zip(*part_slopes)):
        close(slope, np.concatenate(pieces, axis) / mask.sum())


def test_finish_metrics_divides_further_sums_likewise():
    sums = ppo_loss_sums(*random_inputs(0, (2, 2)), np.ones((2, 2), bool), **RANGES)
    assert finish_metrics({**sums, "policy/kl": jnp.float32(6.0)})["policy/kl"] == 1.5


def test_loss_is_the_same_under_jit():
    arrays = [x.astype(np.float32) for x in random_inputs(3, (3, 5))]
    mask = np.random.default_rng(3).random((3, 5)) < 0.6
    plain, jitted = ppo_loss(*arrays, mask, **RANGES), jit_loss(*arrays, mask, **RANGES)
    assert plain[0].dtype == jnp.float32
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), plain, jitted)
    half = ppo_loss(*(x.astype(jnp.bfloat16) for x in arrays), mask, **RANGES)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(half))


def test_first_update_has_ratio_one_and_the_whole_gradient():
    logprobs, values, _, _, advantages, returns = random_inputs(4, (2, 3))
    mask = np.ones((2, 3), bool)
    with jax.enable_x64(True):
        (_, metrics), slopes = jit_loss_and_slopes(
            logprobs, values, logprobs, values, advantages, returns, mask, **RANGES
        )
    metrics = jax.device_get(metrics)
    assert metrics["ratio"] == 1
    assert metrics["policy/approx_kl"] == metrics["policy/clipfrac"] == 0
    np.testing.assert_allclose(slopes[0], -advantages / 6, rtol=1e-12)
    np.testing.assert_allclose(slopes[1], RANGES["vf_coef"] * (values - returns) / 6, rtol=1e-12)


def test_infinite_ranges_switch_clipping_off():
    arrays = random_inputs(5, (2, 3))
    logprobs, values, old_logprobs, _, advantages, returns = arrays
    ranges = {"cliprange": np.inf, "cliprange_value": np.inf, "vf_coef": 0.5}
    with jax.enable_x64(True):
        (_, metrics), slopes = jit_loss_and_slopes(*arrays, np.ones((2, 3), bool), **ranges)
    metrics = jax.device_get(metrics)
    ratio = np.exp(logprobs - old_logprobs)
    np.testing.assert_allclose(metrics["losses/policy_loss"], np.mean(-advantages * ratio))
    np.testing.assert_allclose(slopes[0], -advantages * ratio / 6, rtol=1e-12)
    np.testing.assert_allclose(slopes[1], 0.5 * (values - returns) / 6, rtol=1e-12)
    assert metrics["policy/clipfrac"] == metrics["values/clipfrac"] == 0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_log_ratio_is_bounded_in_value_and_free_inside(advantage):
    one = np.ones((1, 1), np.float32)
    for log_ratio in (500.0, -500.0):
        (loss, metrics), slopes = jit_loss_and_slopes(
            log_ratio * one, one, 0 * one, one, advantage * one, one, one > 0, **RANGES
        )
        assert np.isfinite(loss)
        assert slopes[0] == 0
        limited = np.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        np.testing.assert_allclose(metrics["ratio"], np.exp(limited), rtol=1e-5)
    inside = 0.99 * LOG_RATIO_LIMIT
    (_, metrics), slopes = jit_loss_and_slopes(
        inside * one, one, 0 * one, one, -one, one, one > 0, **RANGES
    )
    np.testing.assert_allclose(slopes[0], np.exp(inside), rtol=1e-5)


def test_explained_variance_of_perfect_useless_and_undefined_values():
    rng = np.random.default_rng(6)
    zeros, returns = np.zeros((2, 4)), rng.normal(size=(2, 4)) + 3
    mask = np.ones((2, 4), bool)

    def explained(values, returns):
        arrays = (a.astype(np.float32) for a in (zeros, values, zeros, values, zeros, returns))
        return float(ppo_loss(*arrays, mask, **RANGES)[1]["values/explained_variance"])

    assert explained(returns, returns) == 1
    # A constant offset explains everything; a constant, nothing; an opposite value, less than that.
    np.testing.assert_allclose(explained(returns + 1, returns), 1, atol=1e-5)
    np.testing.assert_allclose(explained(zeros + 0.7, returns), 0, atol=1e-5)
    np.testing.assert_allclose(explained(-returns, returns), -3, rtol=1e-4)
    # Equal returns: 0, although float32 sums of 0.1 leave a residue.
    for constant in (0.0, 0.1, 1e4 / 3):
        assert explained(returns, zeros + constant) == 0


def test_entropy_is_reported_and_no_part_of_the_loss():
    arrays, mask = random_inputs(9, (2, 3)), np.ones((2, 3), bool)
    loss, metrics = ppo_loss(*arrays, mask, **RANGES)
    assert "policy/entropy" not in metrics
    with_entropy, metrics = ppo_loss(*arrays, mask, **RANGES, entropy=np.full((2, 3), 2.0))
    assert metrics["policy/entropy"] == 2
    assert with_entropy == loss


def test_shapes_that_do_not_fit_are_refused():
    arrays, mask = random_inputs(0, (2, 3)), np.ones((2, 3), bool)
    with pytest.raises(AssertionError):
        ppo_loss(*arrays, mask[:, :1], **RANGES)
    with pytest.raises(AssertionError):
        ppo_loss(*arrays, mask, **RANGES, entropy=np.ones((2, 1)))
    with pytest.raises(AssertionError):
        ppo_loss(*(x[0] for x in arrays), mask[0], **RANGES)
