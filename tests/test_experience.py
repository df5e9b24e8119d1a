"""From samples to advantages: a tiny GPT-2 trains on just what it sampled, wherever that lies."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers_train import ARCHITECTURE, EOS, PAD

from jaxppo import (
    Evaluation,
    PPOConfig,
    Rollout,
    create_model,
    fixed_kl,
    init_value_head,
    make_evaluate,
    make_experience,
    ppo_init,
    ppo_step,
    sample,
)

MODEL = create_model(ARCHITECTURE)
B, P, N = 6, 4, 5
PROMPTS = np.random.default_rng(0).integers(0, 20, (B, P))
PROMPT_LENGTHS = np.array([4, 1, 3, 2, 4, 1])
PROMPT_MASK = np.arange(P) >= P - PROMPT_LENGTHS[:, None]


def make_params(seed, dtype=jnp.float64):
    """Random parameters with a value head that is not zero."""
    params = dict(MODEL.init(jax.random.key(seed)))
    params["value_head"] = init_value_head(jax.random.key(seed + 1), 16)
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    leaves = [x + rng.normal(size=x.shape) * 0.1 for x in leaves]
    return tree.unflatten([jnp.asarray(x, dtype) for x in leaves])


@functools.partial(jax.jit, static_argnames=("lam", "kl_estimator", "whiten_advantages"))
def experience(*args, kl_coef=0.1, gamma=1.0, lam=0.95, **options):
    return make_experience(*args, kl_coef=kl_coef, gamma=gamma, lam=lam, **options)


def draw(params, **options):
    return jax.jit(functools.partial(sample, model=MODEL, max_new_tokens=N, pad_id=PAD, **options))(
        params, jax.random.key(7), jnp.asarray(PROMPTS), jnp.asarray(PROMPT_MASK)
    )


def as_rollout(samples):
    return Rollout(
        jnp.asarray(PROMPTS), jnp.asarray(PROMPT_MASK), samples.tokens, samples.mask, samples.kept
    )


def ragged_rollout():
    """Hand-made responses; row 1 is empty, rows 0 and 3 end with EOS, and what pads is PAD."""
    tokens = np.random.default_rng(3).integers(0, 20, (B, N))
    lengths = np.array([2, 0, 5, 3, 4, 1])
    tokens[0, 1] = tokens[3, 2] = EOS
    mask = np.arange(N) < lengths[:, None]
    tokens = np.where(mask, tokens, PAD)
    prompts = np.where(PROMPT_MASK, PROMPTS, PAD)
    return Rollout(*map(jnp.asarray, (prompts, PROMPT_MASK, tokens, mask)))


def last_action_scores(mask, scores):
    """Each row's score on its last action, as `call_reward` puts it."""
    grid = np.zeros(mask.shape)
    lengths = np.asarray(mask).sum(1)
    rows = np.flatnonzero(lengths)
    grid[rows, lengths[rows] - 1] = np.asarray(scores)[rows]
    return jnp.asarray(grid)


SCORES = np.array([1.0, 5.0, -1.0, 0.5, 2.0, -0.3])


def update(rollout, *, minibatch_size=None, **options):
    """The whole way from a rollout to new parameters, with sgd: so to gradients."""
    new, old, ref = make_params(1), make_params(0), make_params(2)
    evaluate = make_evaluate(MODEL, temperature=1.3, **options)
    optimizer, kl = optax.sgd(1.0), fixed_kl(0.1)

    @jax.jit
    def whole(new, old, ref, rollout, grid):
        batch, figures = make_experience(
            rollout,
            grid,
            evaluate(old, rollout),
            evaluate(ref, rollout).logprobs,
            kl_coef=0.1,
            gamma=0.97,
            lam=0.9,
        )
        state, metrics = ppo_step(
            ppo_init(new, optimizer=optimizer, kl=kl),
            batch,
            jax.random.key(0),
            evaluate=evaluate,
            optimizer=optimizer,
            kl=kl,
            config=PPOConfig(ppo_epochs=1, batch_size=B, minibatch_size=minibatch_size),
        )
        step = jax.tree.map(jnp.subtract, new, state.params)
        return step, batch.advantages[:, :N], batch.returns[:, :N], figures | metrics

    return whole(new, old, ref, rollout, last_action_scores(rollout.mask, SCORES))


def assert_same(a, b, tolerance=1e-10):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b
    )


@pytest.fixture(scope="module")
def wanted():
    with jax.enable_x64(True):
        return jax.device_get(update(ragged_rollout()))


def widened(rollout, left, right, pad_id):
    """More padding on either side, with another id in all of it."""
    pad = lambda x, sides, value: jnp.pad(x, ((0, 0), sides), constant_values=value)  # noqa: E731
    prompts = jnp.where(rollout.prompt_mask, rollout.prompts, pad_id)
    tokens = jnp.where(rollout.mask, rollout.tokens, pad_id)
    return Rollout(
        pad(prompts, (left, 0), pad_id),
        pad(rollout.prompt_mask, (left, 0), False),
        pad(tokens, (0, right), pad_id),
        pad(rollout.mask, (0, right), False),
    )


@pytest.mark.parametrize(
    ("left", "right", "pad_id"), [(3, 0, PAD), (0, 4, PAD), (0, 0, EOS), (0, 0, 5), (2, 3, EOS)]
)
def test_gradients_do_not_depend_on_padding(wanted, left, right, pad_id):
    with jax.enable_x64(True):
        assert_same(update(widened(ragged_rollout(), left, right, pad_id)), wanted)


@pytest.mark.parametrize("chunk_size", [1, 7])
def test_gradients_do_not_depend_on_the_chunks_of_the_head(wanted, chunk_size):
    with jax.enable_x64(True):
        assert_same(update(ragged_rollout(), chunk_size=chunk_size), wanted)


def test_gradients_do_not_depend_on_micro_batches(wanted):
    with jax.enable_x64(True):
        assert_same(update(ragged_rollout(), minibatch_size=4), wanted)


def test_the_whole_update_is_finite_and_moves_every_parameter(wanted):
    step, advantages, _, metrics = wanted
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(wanted))
    assert (np.asarray(advantages)[1] == 0).all()  # the empty row
    assert 0 < metrics["policy/clipfrac"] < 1
    for path, leaf in jax.tree.leaves_with_path(step):
        # adding a constant to all keys of a query changes no attention
        zero = "key" in str(path) and "bias" in str(path)
        assert zero or np.abs(leaf).max() > 1e-6, path


TRANSFORMS = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.7, "top_p": 0.8, "min_new_tokens": 2},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("options", TRANSFORMS)
def test_the_scorer_sees_what_the_sampler_drew_from(options):
    params = make_params(0, jnp.float32)
    options = {**options, "eos_ids": (EOS, 4, 5)}
    samples = draw(params, **options)
    rollout = as_rollout(samples)
    assert 0 < samples.mask.sum() < B * N  # some rows ended early
    evaluate = jax.jit(make_evaluate(MODEL, **options))
    seen, ref = evaluate(params, rollout), evaluate(params, rollout)
    gap = jnp.where(samples.mask, seen.logprobs - samples.logprobs, 0)
    assert jnp.abs(gap).max() <= 2e-6
    batch, metrics = experience(rollout, jnp.zeros((B, N)), seen, ref.logprobs)
    assert (batch.kl == 0).all()
    for name in ("policy/kl", "policy/kl_k3", "policy/sqrt_kl", "policy/kl_per_token"):
        assert metrics[name] == 0
    # sampled tokens follow the distribution: none that truncation left out
    assert jnp.where(samples.mask, seen.logprobs, 0).min() > -20
    if options.get("top_k"):
        assert jnp.where(samples.mask, samples.kept, 0).max() <= options["top_k"]


def test_the_first_ratio_is_one():
    """Scorer and update are different programs: equal up to rounding in float32."""
    options = {"temperature": 0.7, "top_k": 5, "eos_ids": (EOS,)}
    params = make_params(0, jnp.float32)
    rollout = as_rollout(draw(params, **options))
    evaluate, optimizer, kl = make_evaluate(MODEL, **options), optax.sgd(0.0), fixed_kl(0.1)
    old = jax.jit(evaluate)(params, rollout)
    batch, _ = experience(rollout, jnp.ones((B, N)), old, old.logprobs)
    step = jax.jit(
        functools.partial(
            ppo_step,
            evaluate=evaluate,
            optimizer=optimizer,
            kl=kl,
            config=PPOConfig(ppo_epochs=2, batch_size=4, minibatch_size=2),
        )
    )
    _, metrics = step(ppo_init(params, optimizer=optimizer, kl=kl), batch, jax.random.key(0))
    assert abs(metrics["ratio"] - 1) <= 1e-6
    assert 0 <= metrics["policy/approx_kl"] <= 1e-6
    assert metrics["policy/clipfrac"] == 0


def test_truncation_needs_what_the_sampler_kept():
    rollout = ragged_rollout()
    evaluate = make_evaluate(MODEL, top_k=5)
    with pytest.raises(ValueError, match=r"without top_k.*Samples\.kept"):
        jax.eval_shape(evaluate, make_params(0, jnp.float32), rollout)


@pytest.mark.parametrize("temperature", [0, 0.0, -1.0])
def test_temperature_zero_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature must be above 0"):
        make_evaluate(MODEL, temperature=temperature)


def test_without_a_value_head_values_are_zero():
    params = make_params(0, jnp.float32)
    evaluate = jax.jit(make_evaluate(MODEL))
    assert (evaluate(params, ragged_rollout()).values != 0).any()
    del params["value_head"]
    seen = evaluate(params, ragged_rollout())
    np.testing.assert_array_equal(seen.values, np.zeros((B, N)))


def test_log_probs_are_those_of_a_naive_loop():
    """Token by token, without padding: log softmax of the logits before the token."""
    with jax.enable_x64(True):
        rollout, params = ragged_rollout(), make_params(0)
        seen = jax.jit(make_evaluate(MODEL, temperature=0.7))(params, rollout)
        last = jax.jit(
            lambda params, tokens: jax.nn.log_softmax(MODEL.logits(params, tokens)[0, -1] / 0.7)
        )
        for row in (0, 3, 5):
            prompt = np.asarray(rollout.prompts[row])[np.asarray(rollout.prompt_mask[row])]
            response = np.asarray(rollout.tokens[row])[np.asarray(rollout.mask[row])]
            for t, token in enumerate(response):
                context = jnp.asarray([*prompt, *response[:t]])[None]
                log_p = np.asarray(last(params, context))
                np.testing.assert_allclose(seen.logprobs[row, t], log_p[token], rtol=1e-10)
                entropy = -np.sum(np.exp(log_p) * log_p)
                np.testing.assert_allclose(seen.entropy[row, t], entropy, rtol=1e-10)


@pytest.mark.parametrize("pad_id", [EOS, PAD])
def test_ending_is_an_action_that_learns(pad_id):
    """One-token responses, EOS, of which one is rewarded and one is not; padding may be EOS too."""
    with jax.enable_x64(True):
        params = make_params(0)
        tokens = jnp.array([[EOS, pad_id, pad_id], [EOS, pad_id, pad_id]])
        mask = jnp.array([[True, False, False]] * 2)
        rollout = Rollout(jnp.array([[1, 2], [3, 4]]), jnp.ones((2, 2), bool), tokens, mask)
        evaluate, optimizer, kl = jax.jit(make_evaluate(MODEL)), optax.sgd(1e-3), fixed_kl(0.0)
        old = evaluate(params, rollout)
        scores = last_action_scores(mask, [1.0, -1.0])
        old = old._replace(values=jnp.zeros_like(scores))
        batch, _ = experience(rollout, scores, old, old.logprobs)
        np.testing.assert_allclose(batch.advantages, [[1, 0, 0], [-1, 0, 0]], atol=1e-6)
        step = functools.partial(
            ppo_step,
            evaluate=evaluate,
            optimizer=optimizer,
            kl=kl,
            config=PPOConfig(ppo_epochs=1, batch_size=2, vf_coef=0.0),
        )
        state = ppo_init(params, optimizer=optimizer, kl=kl)
        state, _ = jax.jit(step)(state, batch, jax.random.key(0))
        change = evaluate(state.params, rollout).logprobs - old.logprobs
        assert change[0, 0] > 1e-5
        assert change[1, 0] < -1e-5


# make_experience alone, by hand


def by_hand(scores=((0.0, 0.0, 2.0), (-1.0, 0.0, 0.0)), **options):
    """Two rows, three and one actions; log-ratios 0.2, -0.1, 0.4 and 0.3; padding is NaN."""
    nan = np.nan
    logprobs = np.array([[-1.0, -2.0, -0.5], [-0.7, nan, nan]])
    ratio = np.array([[0.2, -0.1, 0.4], [0.3, nan, nan]])
    values = np.array([[0.1, 0.2, 0.3], [0.5, nan, nan]])
    mask = np.array([[True, True, True], [True, False, False]])
    tokens = jnp.zeros((2, 3), int)
    rollout = Rollout(tokens, jnp.ones((2, 3), bool), tokens, jnp.asarray(mask))
    scores = jnp.array(scores)
    old = Evaluation(*map(jnp.asarray, (logprobs, values, logprobs)))
    options = {"kl_coef": 0.1, "gamma": 0.9, "lam": 0.8, "whiten_advantages": False} | options
    return experience(rollout, scores, old, jnp.asarray(logprobs - ratio), **options)


def test_a_score_a_sample_lies_on_its_last_action():
    grid, one_each = by_hand()[0], by_hand(scores=(2.0, -1.0))[0]
    np.testing.assert_array_equal(grid.advantages, one_each.advantages)
    with pytest.raises(AssertionError):
        by_hand(scores=((1.0,), (2.0,)))


def test_advantages_by_hand():
    with jax.enable_x64(True):
        batch, metrics = by_hand()
        # rewards: score - 0.1 * log-ratio, the score on the last action
        r = [-0.02, 0.01, 2 - 0.04]
        a2 = r[2] - 0.3
        a1 = r[1] + 0.9 * 0.3 - 0.2 + 0.72 * a2
        a0 = r[0] + 0.9 * 0.2 - 0.1 + 0.72 * a1
        b0 = -1.03 - 0.5
        np.testing.assert_allclose(batch.advantages, [[a0, a1, a2], [b0, 0, 0]], rtol=1e-12)
        np.testing.assert_allclose(
            batch.returns, [[a0 + 0.1, a1 + 0.2, a2 + 0.3], [-1.03, 0, 0]], rtol=1e-12
        )
        np.testing.assert_allclose(batch.kl, [0.5, 0.3], rtol=1e-12)
        k3 = np.exp([-0.2, 0.1, -0.4, -0.3]) - 1 + [0.2, -0.1, 0.4, 0.3]
        expected = {
            "policy/kl": 0.4,
            "policy/kl_k3": k3.sum() / 2,
            "policy/sqrt_kl": np.sqrt(k3.sum() / 2),
            "policy/kl_per_token": 0.2,
            # what is left of the scores 2 and -1 is the score minus the coefficient times the KL
            "rollout/reward_after_kl": (2 - 0.1 * 0.5 - 1 - 0.1 * 0.3) / 2,
            "rollout/advantage_mean": (a0 + a1 + a2 + b0) / 4,
            "rollout/advantage_std": np.sqrt((a0**2 + a1**2 + a2**2 + b0**2) / 4),
        }
        for name, x in (("old_values", [0.1, 0.2, 0.3, 0.5]), ("returns", None)):
            x = np.asarray(batch.returns)[np.asarray(batch.mask)] if x is None else np.asarray(x)
            expected |= {f"{name}/mean": x.mean(), f"{name}/std": x.std()}
            expected |= {f"{name}/min": x.min(), f"{name}/max": x.max()}
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-10, err_msg=name)


@pytest.mark.parametrize(
    ("kind", "penalty"),
    [
        ("k1", lambda r: r),
        ("k2", lambda r: r**2 / 2),
        ("k3", lambda r: np.exp(-r) - 1 + r),
        ("abs", np.abs),
    ],
)
def test_kl_estimators_are_penalties(kind, penalty):
    """With gamma = lambda = 0 and no value the advantage is the reward itself."""
    with jax.enable_x64(True):
        batch, metrics = by_hand(kl_estimator=kind, gamma=0.0, lam=0.0, kl_coef=0.5)
        rewards = -0.5 * penalty(np.array([[0.2, -0.1, 0.4], [0.3, 0, 0]]))
        rewards += [[0, 0, 2], [-1, 0, 0]]
        np.testing.assert_allclose(batch.returns, rewards, rtol=1e-10)
        # what is reported is the KL, whatever the penalty
        np.testing.assert_allclose(metrics["policy/kl"], 0.4, rtol=1e-12)
        np.testing.assert_allclose(
            metrics["rollout/reward_after_kl"], rewards.sum() / 2, rtol=1e-10
        )


def test_whitening_counts_real_tokens_only():
    with jax.enable_x64(True):
        plain, _ = by_hand()
        white, _ = by_hand(whiten_advantages=True)
        mask = np.asarray(plain.mask)
        real = np.asarray(plain.advantages)[mask]
        expected = (real - real.mean()) / np.sqrt(real.var() + 1e-8)
        np.testing.assert_allclose(np.asarray(white.advantages)[mask], expected, rtol=1e-10)
        assert (np.asarray(white.advantages)[~mask] == 0).all()
        assert_same(white.returns, plain.returns, 0)


def test_no_actions_at_all_is_finite():
    rollout = ragged_rollout()
    rollout = rollout._replace(mask=jnp.zeros_like(rollout.mask))
    nan = jnp.full((B, N), jnp.nan)
    batch, metrics = experience(rollout, nan, Evaluation(nan, nan, nan), nan)
    for x in (batch.advantages, batch.returns, batch.kl, *metrics.values()):
        assert np.isfinite(x).all()
