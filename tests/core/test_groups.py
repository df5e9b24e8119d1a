"""Group advantages against loops and TRL 1.16, selection, and every degenerate group."""

import functools
import itertools
import json
import pathlib

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxppo.core import (
    above_baseline,
    above_percentile,
    batch_scaled,
    combine_rewards,
    first_of_equal,
    group_mean,
    group_mean_over_batch_std,
    group_normalised,
    has_signal,
    leave_one_out,
    normalised_sum,
    pass_at_k,
    top_of_group,
)
from jaxppo.core.selection import rft_percentile

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
examples = functools.partial(hypothesis.settings, deadline=None, derandomize=True)
# Ids in no order, groups of 4, 3, 2, 2 and 1, none of them adjacent.
GROUPS = np.array([7, -2, 7, 900, 5, -2, 7, 5, 7, -2, 11, 11])


def loop_mean(r):
    return r - r.mean()


def loop_normalised(r):
    return (r - r.mean()) / (r.std(ddof=1) + 1e-4)


def loop_leave_one_out(r):
    return np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))])


def loop_pass_at(k):
    def loop(r):
        result = []
        for i in range(len(r)):
            sets = list(itertools.combinations(np.delete(r, i), k - 1))
            result.append(np.mean([max(r[i], *s) - max(s) for s in sets]) if sets else 0.0)
        return np.array(result)

    return loop


METHODS = {
    "mean": (group_mean, loop_mean),
    "normalised": (group_normalised, loop_normalised),
    "leave_one_out": (leave_one_out, loop_leave_one_out),
    "pass@2": (functools.partial(pass_at_k, k=2), loop_pass_at(2)),
    "pass@3": (functools.partial(pass_at_k, k=3), loop_pass_at(3)),
    "pass@4": (functools.partial(pass_at_k, k=4), loop_pass_at(4)),
}
JITTED = {name: jax.jit(ours) for name, (ours, _) in METHODS.items()}
SCALED = {
    "mean/batch": group_mean_over_batch_std,
    "scaled": lambda r, g, p: batch_scaled(group_mean(r, g, p), p),
}
EVERY = JITTED | {name: jax.jit(ours) for name, ours in SCALED.items()}


def by_group(loop, rewards, groups, present):
    """The loop on each group's present rewards; 0 elsewhere and where they do not differ."""
    result = np.zeros(len(rewards))
    for group in np.unique(groups):
        rows = np.flatnonzero((groups == group) & present)
        if len(rows) and rewards[rows].max() > rewards[rows].min():
            result[rows] = loop(rewards[rows])
    return result


@pytest.mark.parametrize("name", METHODS)
@examples(max_examples=10)
@hypothesis.given(seed=st.integers(0, 2**16))
def test_advantages_are_the_loops(name, seed):
    rng = np.random.default_rng(seed)
    rewards = rng.normal(size=12).round(1)  # a few ties
    present = rng.random(12) < 0.8
    dirty = np.where(present, rewards, np.nan)
    with jax.enable_x64(True):
        got = JITTED[name](dirty, GROUPS, present)
    expected = by_group(METHODS[name][1], rewards, GROUPS, present)
    np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_rows_are_groups_without_ids(name):
    rewards, present = np.random.default_rng(0).normal(size=(3, 4)), np.ones(12, bool)
    present[6] = False
    got = JITTED[name](rewards, None, present.reshape(3, 4))
    assert got.shape == (3, 4)
    assert got[1, 2] == 0
    flat = JITTED[name](rewards.reshape(-1), np.repeat([3, 1, 2], 4), present)
    np.testing.assert_array_equal(got.reshape(-1), flat)


@pytest.mark.parametrize("name", METHODS)
def test_order_does_not_matter(name):
    rng, present = np.random.default_rng(1), np.ones(12, bool)
    rewards, order = rng.normal(size=12), rng.permutation(12)
    with jax.enable_x64(True):
        got = np.asarray(JITTED[name](rewards[order], GROUPS[order], present))
        straight = np.asarray(JITTED[name](rewards, GROUPS, present))
    np.testing.assert_allclose(got, straight[order], rtol=1e-12)


@pytest.mark.parametrize("name", EVERY)
def test_equal_rewards_have_no_advantage_at_all(name):
    # In float32 the plain mean of seven 0.1 is not 0.1: a standard deviation would blow that up.
    values, sizes = [0.1, 0.3, 0.7, 1e8, -1 / 3], [1, 2, 3, 7, 8]
    rewards = [np.full(n, value) for value in values for n in sizes]
    groups = np.repeat(np.arange(len(rewards)), [len(x) for x in rewards])
    rewards = np.append(np.concatenate(rewards), [0.0, 0.0, 1.0, 2.0]).astype(np.float32)
    groups = np.append(groups, [99] * 4)  # one group with spread
    got = np.asarray(EVERY[name](jnp.asarray(rewards), groups, np.ones(len(rewards), bool)))
    np.testing.assert_array_equal(got[:-4], 0)
    assert got[-1] > 0


def test_a_plain_mean_would_give_an_advantage_out_of_rounding():
    rewards = np.full(7, 0.1, np.float32)
    mean = np.float32(functools.reduce(np.add, rewards) / np.float32(7))
    assert rewards[0] != mean  # so the test above can fail


@pytest.mark.parametrize("name", EVERY)
def test_degenerate_groups(name):
    # a single sample; one present of three; none present; equal but for a missing one
    rewards = np.array([3.0, 1.0, np.nan, np.nan, np.nan, np.nan, 2.0, np.nan, 2.0])
    groups = np.array([0, 1, 1, 1, 2, 2, 3, 3, 3])
    got = EVERY[name](rewards, groups, np.isfinite(rewards))
    np.testing.assert_array_equal(got, np.zeros(9))
    nothing = EVERY[name](np.full(9, np.nan), groups, np.zeros(9, bool))
    np.testing.assert_array_equal(nothing, np.zeros(9))


def test_groups_must_be_given_and_k_be_2():
    with pytest.raises(ValueError, match="need groups"):
        group_mean(np.zeros(3))
    with pytest.raises(ValueError, match="leave_one_out"):
        pass_at_k(np.zeros((2, 2)), k=1)
    with pytest.raises(ValueError, match="k >= 1"):
        top_of_group(np.zeros((2, 2)), k=0)


jit_pass = jax.jit(pass_at_k, static_argnames="k")


def test_pass_at_the_whole_group_is_the_lead_of_the_best():
    rewards = np.array([[0.0, 3.0, 1.0], [5.0, 5.0, 1.0]])
    np.testing.assert_allclose(jit_pass(rewards, k=3), [[0, 2, 0], [0, 0, 0]])
    np.testing.assert_array_equal(jit_pass(rewards, k=4), np.zeros((2, 3)))


def test_pass_at_k_points_along_the_gradient_of_the_best_of_k():
    """By enumeration: three responses, four drawn, the expected maximum of two."""
    reward, n, k = np.array([0.0, 1.0, 2.5]), 4, 2
    draws = np.array(list(itertools.product(range(3), repeat=n)))

    def best(logits):
        p = jax.nn.softmax(logits)
        return sum(p[i] * p[j] * max(reward[i], reward[j]) for i in range(3) for j in range(3))

    with jax.enable_x64(True):
        logits = jnp.array([0.3, -0.5, 0.1])
        p = np.asarray(jax.nn.softmax(logits))
        advantages = np.asarray(jit_pass(reward[draws], k=k))
        score = np.eye(3)[draws] - p  # gradient of the log-prob of each draw
        sampled = (advantages[..., None] * score).mean(1)
        expectation = (p[draws].prod(1)[:, None] * sampled).sum(0)
        np.testing.assert_allclose(k * expectation, jax.grad(best)(logits), rtol=1e-10)


def test_scaling_by_the_batch():
    rng = np.random.default_rng(2)
    rewards, present = rng.normal(size=12), np.arange(12) != 5
    dirty = np.where(present, rewards, np.inf)
    centred = by_group(loop_mean, rewards, GROUPS, present)
    with jax.enable_x64(True):
        by_rewards = EVERY["mean/batch"](dirty, GROUPS, present)
        by_advantages = batch_scaled(np.where(present, centred, np.nan), present, eps=0.01)
    np.testing.assert_allclose(by_rewards, centred / (rewards[present].std(ddof=1) + 1e-4))
    np.testing.assert_allclose(by_advantages, centred / (centred[present].std(ddof=1) + 0.01))


def test_equal_advantages_have_no_scale():
    present = np.array([True, True, True, False])
    got = batch_scaled(np.array([0.1, 0.1, 0.1, 7.0], np.float32), present)
    np.testing.assert_array_equal(got, np.zeros(4))


def test_greedy_baseline():
    rewards = np.array([0.1, 2.0, np.nan, 1.0], np.float32)
    baseline = np.array([0.1, 0.5, 1.0, np.nan], np.float32)
    present = np.array([True, True, False, False])
    np.testing.assert_array_equal(above_baseline(rewards, baseline, present), [0, 1.5, 0, 0])


GRPO = json.loads((GOLDEN / "trl116_grpo_advantages_cases.json").read_text())


@pytest.mark.parametrize("case", GRPO, ids=lambda c: str(c["case"]))
def test_advantages_are_trls(case):
    golden = np.load(GOLDEN / "trl116_grpo_advantages.npz")
    rewards, weights, expected = (
        golden[f"c{case['case']}_{key}"] for key in ("rewards_per_func", "weights", "advantages")
    )
    groups = np.repeat(np.arange(case["prompts"]), case["num_generations"])
    present = np.isfinite(rewards)
    assert present.all() != case["has_nan"]
    scale = {
        "group": jax.jit(group_normalised),
        "batch": jax.jit(group_mean_over_batch_std),
        "none": jax.jit(group_mean),
    }[case["scale_rewards"]]
    with jax.enable_x64(case["dtype"] == "f64"):
        if case["aggregation"] == "normalize_then_sum":
            got = jax.jit(normalised_sum)(rewards, weights, groups, present)
        else:
            got = scale(*_combined(rewards, weights, groups, present))
    # TRL divides n by n - 1 in single precision (integers of torch) whatever the rewards are in, so
    # where a standard deviation is, its figures have seven digits. In single precision its residue
    # shows too: 3.4e-8 for a group of equal rewards.
    single = case["dtype"] == "f32"
    rtol = 2e-6 if single else 1e-10 if case["scale_rewards"] == "none" else 5e-8
    np.testing.assert_allclose(got, expected, rtol=rtol, atol=1e-6 * single)
    np.testing.assert_array_equal(got[groups == 0], 0)


def _combined(rewards, weights, groups, present):
    total, some = jax.jit(combine_rewards)(rewards, weights, present)
    return total, groups, some


RLOO = json.loads((GOLDEN / "trl116_rloo_cases.json").read_text())
RLOO_FILE = np.load(GOLDEN / "trl116_rloo.npz")


@pytest.mark.parametrize(
    "case", [c for c in RLOO if f"{c['case']}_rewards" in RLOO_FILE], ids=lambda c: c["case"]
)
def test_leave_one_out_is_trls(case):
    rewards = RLOO_FILE[f"{case['case']}_rewards"]
    single = case["dtype"] == "f32"
    with jax.enable_x64(not single):
        got = jax.jit(leave_one_out)(
            rewards.reshape(case["prompts"], -1),
            None,
            np.isfinite(rewards).reshape(case["prompts"], -1),
        )
    expected = RLOO_FILE[f"{case['case']}_advantages"]
    tolerance = 2e-6 if single else 1e-12
    np.testing.assert_allclose(got.reshape(-1), expected, rtol=tolerance, atol=tolerance)


def test_several_rewards_add_up_where_they_apply():
    rewards = np.array([[1.0, 10.0], [np.nan, 10.0], [np.nan, np.nan]])
    total, present = combine_rewards(rewards, np.array([2.0, 0.5]), np.isfinite(rewards))
    np.testing.assert_allclose(total, [7, 5, 0])
    np.testing.assert_array_equal(present, [True, True, False])


def test_no_reward_drowns_another():
    rng = np.random.default_rng(3)
    rewards, weights = rng.normal(size=(12, 2)), np.array([1.0, 1.0])
    with jax.enable_x64(True):
        jitted = jax.jit(normalised_sum)
        plain = jitted(rewards, weights, GROUPS)
        large = jitted(rewards * np.array([1, 1e5]), weights, GROUPS)
        np.testing.assert_allclose(plain, large, atol=2e-3)
        equal = jitted(np.full((12, 2), 0.1), weights, GROUPS)
    np.testing.assert_array_equal(equal, np.zeros(12))


def test_signal_is_two_different_rewards():
    rewards = np.array([1.0, 1.0, 0.0, np.nan, 0.1, 0.1, 0.1, 5.0, np.nan])
    groups = np.array([0, 0, 1, 1, 2, 2, 2, 3, 0])
    got = jax.jit(has_signal)(rewards, groups, np.isfinite(rewards))
    np.testing.assert_array_equal(got, np.zeros(9, bool))
    rewards[1] = 1 + 1e-6
    got = jax.jit(has_signal)(rewards, groups, np.isfinite(rewards))
    np.testing.assert_array_equal(got, [True, True] + [False] * 6 + [True])


def test_best_and_top_of_a_group():
    rewards = np.array([[1.0, 3.0, 2.0, 3.0], [0.1, 0.1, 0.1, 0.1], [0.0, 0.0, 1.0, 9.0]])
    present = np.ones((3, 4), bool)
    present[2, 3] = False
    top_of = jax.jit(top_of_group, static_argnames="k")
    best = np.asarray(top_of(rewards, None, present))
    np.testing.assert_array_equal(best, [[0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]])
    top = np.asarray(top_of(rewards, None, present, k=2))
    np.testing.assert_array_equal(top, [[0, 1, 0, 1], [0, 0, 0, 0], [1, 0, 1, 0]])
    assert np.asarray(top_of(rewards, None, present, k=9)).sum() == 7


jit_above = jax.jit(above_percentile)


@examples(max_examples=15)
@hypothesis.given(seed=st.integers(0, 2**16), percentile=st.sampled_from([0.0, 0.5, 0.7, 0.95, 1]))
def test_percentiles_are_numpys(seed, percentile):
    rng = np.random.default_rng(seed)
    rewards = rng.integers(0, 6, 44).astype(float)
    groups = rng.permutation(np.repeat([4, 9, 2], [11, 22, 11]))
    present = rng.random(44) < 0.9
    with jax.enable_x64(True):
        got = np.asarray(jit_above(rewards, groups, present, percentile=float(percentile)))
    for group in (4, 9, 2):
        rows = (groups == group) & present
        threshold = np.quantile(rewards[rows], percentile)
        wanted = (rewards >= threshold - 1e-9) & (rewards > rewards[rows].min()) & rows
        np.testing.assert_array_equal(got[groups == group], wanted[groups == group])


def test_percentile_at_a_sample_takes_that_sample():
    # 0.6 of 26 samples is the sixteenth, though 0.6 * 25 is above 15 in float32.
    assert np.float32(0.6) * np.float32(25) > 15
    # Of equal rewards, and of one sample, none is better than another.
    rewards = np.concatenate([np.arange(26.0), np.full(5, 0.1), [1.0]])
    groups = np.repeat([0, 1, 2], [26, 5, 1])
    got = np.asarray(jit_above(rewards, groups, None, percentile=0.6))
    np.testing.assert_array_equal(np.flatnonzero(got), np.arange(15, 26))


def test_percentile_rises_and_starts_anew():
    steps = [
        float(rft_percentile(step, start=0.7, end=0.95, n_improve_steps=4)) for step in range(6)
    ]
    np.testing.assert_allclose(steps, [0.7, 0.7625, 0.825, 0.8875, 0.7, 0.7625])


def test_equal_responses_of_a_prompt_are_taken_once():
    tokens = np.array([[1, 2, 9], [1, 2, 8], [1, 2, 3], [1, 2, 9], [1, 2, 9], [1, 0, 0]])
    mask = np.array([[1, 1, 0], [1, 1, 0], [1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]], bool)
    groups = np.array([0, 0, 0, 1, 0, 0])
    got = jax.jit(first_of_equal)(tokens, mask, groups)
    np.testing.assert_array_equal(got, [True, False, True, True, True, True])
