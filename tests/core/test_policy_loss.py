"""The policy loss against TRL 1.16's GRPO and RLOO losses, and under every cut of a step."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo.core import clips, kl_loss, normalisers, policy_loss, policy_loss_sums, ppo_loss, ratios

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
CASES = json.loads((GOLDEN / "trl116_grpo_loss_cases.json").read_text())
LOSSES = dict(np.load(GOLDEN / "trl116_grpo_loss_f64.npz"))
MASK = LOSSES["mask"].astype(bool)
NORMALISERS = {
    "grpo": normalisers.sequence_mean,
    "sapo": normalisers.sequence_mean,
    "bnpo": normalisers.token_mean,  # of the micro-batch there, which is all there is here
    "dapo": normalisers.token_mean,
    "cispo": normalisers.token_mean,
    "vespo": normalisers.token_mean,
    "dr_grpo": normalisers.fixed_length,
    "luspo": normalisers.sequence_sum,
}
RATIOS = {"token": ratios.token_ratio, "sequence": ratios.sequence_ratio}


def clip_of(case):
    low, high = case["epsilon_low"], case["epsilon_high"]
    if case["loss_type"] == "cispo":
        return functools.partial(clips.cispo, upper=high)
    if case["loss_type"] == "sapo":
        # torch.where of two Python numbers is in single precision.
        return functools.partial(clips.sapo, tau_neg=float(np.float32(1.05)))
    if case["loss_type"] == "vespo":
        return clips.vespo
    if case["delta"] is not None:
        return functools.partial(clips.two_sided_clip, low=low, high=high, delta=case["delta"])
    return functools.partial(clips.clip_ratio, low=low, high=high)


def corrected_at_the_token(case):
    """Whether TRL's KL term has the KL's gradient: k3 times the ratio of the *token*."""
    return case["use_bias_correction_kl"] and case["importance_sampling_level"] == "token"


def accumulation(case):
    """What TRL multiplies a micro-batch's loss by, to make up for its neighbours."""
    steps = case["steps"]
    whole = steps["steps_per_generation"] if case["loss_type"] in ("dapo", "cispo", "vespo") else 1
    return whole / steps["grad_accum"]


def ours(case):
    """Loss, gradient and metrics of a golden case by `policy_loss`, and the weights it used."""
    old = LOSSES["logps"] if case["old_logps"] == "absent" else LOSSES["old_logps"]

    def loss(logprobs):
        options = {}
        if case["beta"]:
            options = {"kl_coef": case["beta"], "ref_logprobs": LOSSES["ref_logps"]}
            if not case["use_bias_correction_kl"]:
                options["kl"] = kl_loss(logprobs, LOSSES["ref_logps"], "k3")
        return policy_loss(
            logprobs,
            old,
            LOSSES["advantages"],
            MASK,
            normaliser=NORMALISERS[case["loss_type"]],
            max_length=int(LOSSES["max_completion_length"]),
            ratio=RATIOS[case["importance_sampling_level"]],
            clip=clip_of(case),
            entropy=LOSSES["entropies"],
            **options,
        )

    (value, metrics), slope = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(LOSSES["logps"]))
    weights = NORMALISERS[case["loss_type"]](MASK, int(LOSSES["max_completion_length"]))
    return float(value), np.asarray(slope), metrics, np.asarray(weights), old


def test_all_golden_cases_are_here():
    assert len(CASES) == 52
    assert sum(case["beta"] > 0 for case in CASES) == 28
    assert sum(case["beta"] > 0 and corrected_at_the_token(case) for case in CASES) == 1


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['case']}-{c['loss_type']}")
def test_loss_is_trl(case):
    name, beta = f"c{case['case']}", case["beta"]
    with jax.enable_x64(True):
        value, slope, metrics, weights, old = ours(case)
    now, ref = LOSSES["logps"], LOSSES["ref_logps"]
    factor = accumulation(case)
    their_loss, their_slope = LOSSES[f"{name}_loss"] / factor, LOSSES[f"{name}_grad"] / factor
    r = np.where(MASK, now - ref, 0)
    k3 = np.exp(-r) - 1 + r
    if beta and case["use_bias_correction_kl"] and not corrected_at_the_token(case):
        # TRL weights the KL of a token by the geometric mean of its response's ratios, which is no
        # importance weight and has a gradient of its own. Ours is the ratio of the token.
        log_rho = np.where(MASK, now - old, 0)
        n = MASK.sum(1, keepdims=True)
        s = np.exp(log_rho.sum(1, keepdims=True) / n)
        rho = np.exp(log_rho)
        their_loss = their_loss + beta * (weights * (rho - s) * k3).sum()
        through_s = s / n * (weights * k3).sum(1, keepdims=True)
        their_term = weights * s * (1 - np.exp(-r)) + np.where(MASK, through_s, 0)
        their_slope = their_slope + beta * (weights * rho * r - their_term)
    elif beta and not corrected_at_the_token(case):
        # The gradient of k3 as it is belongs to KL(reference || policy); see
        # test_kl.py. Ours is r, where TRL's is 1 - exp(-r).
        their_slope = their_slope + beta * weights * (r - (1 - np.exp(-r)))
    np.testing.assert_allclose(value, their_loss, rtol=1e-10)
    np.testing.assert_allclose(slope, their_slope, rtol=1e-10, atol=1e-14)
    assert np.abs(slope).max() > 1e-4

    # Clip fractions are over responses there where the ratio is, and after delta was applied.
    theirs = {"policy/entropy": "entropy"}
    if case["importance_sampling_level"] == "token" and case["delta"] is None:
        theirs["policy/clipfrac"] = "clip_ratio/region_mean"
    if not case["use_bias_correction_kl"]:
        theirs["policy/ref_kl"] = "kl"
    for key, theirs_key in theirs.items():
        if f"{name}_metric:{theirs_key}" in LOSSES:
            expected = LOSSES[f"{name}_metric:{theirs_key}"]
            np.testing.assert_allclose(metrics[key], expected, rtol=1e-6, err_msg=key)


@pytest.mark.parametrize(("name", "rtol"), [("l0", 1e-5), ("l1", 1e-10)])
def test_loss_is_trls_rloo(name, rtol):
    golden = np.load(GOLDEN / "trl116_rloo.npz")
    g = {k.removeprefix(name + "_"): v for k, v in golden.items() if k.startswith(name)}
    with jax.enable_x64(True):

        def loss(logprobs):
            return policy_loss(
                logprobs,
                g["old_per_token_logps"],
                g["advantages"],
                g["mask"],
                normaliser=normalisers.sequence_mean,
                ratio=ratios.trajectory_ratio,
            )

        (value, metrics), slope = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(g["logps"]))
    np.testing.assert_allclose(value, g["loss"], rtol=rtol)
    np.testing.assert_allclose(slope, g["grad"], rtol=rtol, atol=rtol / 10)
    assert 0 < float(metrics["policy/clipfrac"]) < 1


def random_step(seed, B=6, N=5):
    """A step with an empty row, and rows of every length."""
    rng = np.random.default_rng(seed)
    mask = np.arange(N) < np.array([N, 0, 1, 3, N, 2])[:B, None]
    new, ref = rng.normal(-2, 0.5, (2, B, N))
    old = new + 0.3 * rng.normal(size=(B, N))
    return new, old, ref, rng.normal(size=B), rng.uniform(0, 2, (B, N)), mask


ALL = [
    (ratios.token_ratio, clips.clip_ratio, normalisers.token_mean),
    (ratios.token_ratio, clips.dual_clip, normalisers.sequence_mean),
    (ratios.sequence_ratio, clips.clip_ratio, normalisers.sequence_mean),
    (ratios.sequence_token_ratio, clips.clip_ratio, normalisers.token_mean),
    (ratios.trajectory_ratio, clips.two_sided_clip, normalisers.sequence_sum),
    (ratios.token_ratio, clips.cispo, normalisers.fixed_length),
    (ratios.token_ratio, clips.sapo, normalisers.sequence_sum),
    (ratios.token_ratio, clips.geometric_mean, normalisers.sequence_mean),
    (ratios.token_ratio, clips.vespo, normalisers.token_mean),
    (ratios.token_ratio, clips.likelihood, normalisers.fixed_length),
]


def loss_of(ratio, clip, weights, entropy_weights):
    def loss(new, entropy, old, ref, advantages, mask, weights, entropy_weights):
        sums = policy_loss_sums(
            new, old, advantages, mask, weights, ratio=ratio, clip=clip, ref_logprobs=ref,
            kl_coef=0.1, entropy=entropy, entropy_weights=entropy_weights, entropy_coef=0.05,
        )  # fmt: skip
        return sums["losses/total_loss"], sums

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize(("ratio", "clip", "normaliser"), ALL)
def test_parts_of_a_step_add_up_and_padding_has_no_influence(ratio, clip, normaliser):
    with jax.enable_x64(True):
        new, old, ref, advantages, entropy, mask = random_step(3)
        weights, token = normaliser(mask, 7), normalisers.token_mean(mask)
        loss = loss_of(ratio, clip, weights, token)
        (_, whole), slopes = loss(new, entropy, old, ref, advantages, mask, weights, token)
        assert whole["count"] == mask.sum()
        assert all(np.isfinite(x).all() for x in slopes)
        assert (np.asarray(slopes[0])[~mask] == 0).all()
        summed, pieces = None, []
        for rows in (slice(0, 3), slice(3, 6)):  # the first has the empty row
            arrays = (new, entropy, old, ref, advantages, mask, weights, token)
            (_, part), slope = loss(*(x[rows] for x in arrays))
            summed = part if summed is None else jax.tree.map(jnp.add, summed, part)
            pieces.append(slope)
        for key, value in whole.items():
            np.testing.assert_allclose(summed[key], value, rtol=1e-10, atol=1e-13, err_msg=key)
        for i, slope in enumerate(slopes):
            cut = np.concatenate([piece[i] for piece in pieces])
            np.testing.assert_allclose(cut, slope, rtol=1e-10, atol=1e-13)
        for filling in (np.nan, np.inf, -np.inf):
            dirty = [np.where(mask, x, filling) for x in (new, entropy, old, ref)]
            (_, again), dirty_slopes = loss(*dirty, advantages, mask, weights, token)
            for key, value in whole.items():
                assert again[key] == value, key
            jax.tree.map(np.testing.assert_array_equal, dirty_slopes, slopes)


@pytest.mark.parametrize(("ratio", "clip", "normaliser"), ALL)
def test_no_action_gives_no_loss_and_extremes_stay_finite(ratio, clip, normaliser):
    new, old, ref, advantages, entropy, mask = random_step(4)
    shape = mask.shape
    loss = loss_of(ratio, clip, None, None)
    nothing = np.zeros(shape, bool)
    nan = np.full(shape, np.nan)
    weights, token = normaliser(nothing, 7), normalisers.token_mean(nothing)
    (value, sums), slopes = loss(nan, nan, nan, nan, nan[:, 0], nothing, weights, token)
    assert value == 0
    assert all(x == 0 for x in sums.values())
    assert all((np.asarray(x) == 0).all() for x in slopes)
    weights, token = normaliser(mask, 7), normalisers.token_mean(mask)
    for far in (-400.0, 400.0):
        (value, _), slopes = loss(new + far, entropy, old, ref, advantages, mask, weights, token)
        assert np.isfinite(value)
        assert all(np.isfinite(x).all() for x in slopes)


def test_it_is_ppos_loss_with_ppos_choices():
    with jax.enable_x64(True):
        new, old, _, _, entropy, mask = random_step(5)
        advantages = np.random.default_rng(6).normal(size=mask.shape)
        zeros = np.zeros_like(new)
        ppo = functools.partial(ppo_loss, cliprange=0.2, cliprange_value=0.2, vf_coef=0.0)
        want, slope = jax.value_and_grad(
            lambda x: ppo(x, zeros, old, zeros, advantages, zeros, mask, entropy=entropy),
            has_aux=True,
        )(new)
        got, ours = jax.value_and_grad(
            lambda x: policy_loss(x, old, advantages, mask, entropy=entropy), has_aux=True
        )(new)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-12)
    np.testing.assert_allclose(ours, slope, rtol=1e-12)
    for key in ("policy/approx_kl", "policy/clipfrac", "policy/entropy", "ratio"):
        np.testing.assert_allclose(got[1][key], want[1][key], rtol=1e-12, err_msg=key)
    assert 0 < float(got[1]["policy/clipfrac"]) < 1


def test_the_kl_is_weighted_by_the_policy_that_drew():
    with jax.enable_x64(True):
        new, old, ref, advantages, _, mask = random_step(9)
        drawn = old + 0.5 * np.random.default_rng(1).normal(size=old.shape)
        weights = normalisers.sequence_mean(mask)

        def loss(x, **options):
            sums = policy_loss_sums(x, old, 0 * advantages, mask, weights, **options)
            return sums["losses/kl_loss"]

        def plain(x, drawn):
            return jnp.sum(weights * kl_loss(x, ref, "k3", old_logprobs=drawn))

        for options, by in (({}, old), ({"behaviour_logprobs": drawn}, drawn)):
            got = jax.value_and_grad(functools.partial(loss, ref_logprobs=ref, **options))(new)
            wanted = jax.value_and_grad(plain)(new, by)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), got, wanted)


def test_scale_acts_on_the_policy_term_alone():
    with jax.enable_x64(True):
        new, old, ref, advantages, _, mask = random_step(7)
        weights = normalisers.token_mean(mask)
        scale = np.where(mask, np.random.default_rng(8).uniform(0, 2, mask.shape), np.nan)
        run = functools.partial(policy_loss_sums, new, old, advantages, mask, weights)
        sums = run(scale=scale, ref_logprobs=ref, kl_coef=0.5)
        plain = run(ref_logprobs=ref)
        terms = clips.clip_ratio(np.where(mask, new - old, 0), None, advantages[:, None], None).loss
        expected = np.where(mask, weights * np.where(mask, scale, 0) * terms, 0).sum()
    np.testing.assert_allclose(sums["losses/policy_loss"], expected, rtol=1e-12)
    np.testing.assert_allclose(sums["losses/kl_loss"], plain["losses/kl_loss"], rtol=1e-12)
    total = float(sums["losses/policy_loss"]) + 0.5 * float(sums["losses/kl_loss"])
    np.testing.assert_allclose(sums["losses/total_loss"], total, rtol=1e-12)
