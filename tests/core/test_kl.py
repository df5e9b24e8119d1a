"""Estimators and exact KL by enumeration; controllers against trlx and a hand table."""

import functools
import pathlib

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxppo.core import KLState, adaptive_kl, exact_kl, fixed_kl, kl_estimate, kl_loss

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
P, Q = np.array([0.6, 0.3, 0.1]), np.array([0.2, 0.3, 0.5])
KL = 0.6 * np.log(3) - 0.1 * np.log(5)  # 0.4982


def expectation(kind):
    return float(np.sum(P * np.asarray(kl_estimate(np.log(P), np.log(Q), kind))))


def test_unbiased_estimators_average_to_the_kl():
    with jax.enable_x64(True):
        assert pytest.approx(0.4982, abs=1e-4) == KL
        assert expectation("k1") == pytest.approx(KL, rel=1e-12)
        # trlx has the other sign inside the exponential, which averages to 0.622 here.
        assert expectation("k3") == pytest.approx(KL, rel=1e-12)
        assert float(exact_kl(np.log(P), np.log(Q))) == pytest.approx(KL, rel=1e-12)
        assert expectation("k2") == pytest.approx(np.sum(P * np.log(P / Q) ** 2) / 2, rel=1e-12)
        assert expectation("abs") == pytest.approx(np.sum(P * np.abs(np.log(P / Q))), rel=1e-12)


def test_estimates_by_hand_and_their_sign():
    # The policy makes the first token likelier than the reference does: moving away costs.
    logprobs, ref = jnp.array([-1.0, -3.0, -2.0]), jnp.array([-2.0, -1.0, -2.0])
    np.testing.assert_allclose(kl_estimate(logprobs, ref), [1, -2, 0])
    np.testing.assert_allclose(kl_estimate(logprobs, ref, "k2"), [0.5, 2, 0])
    np.testing.assert_allclose(
        kl_estimate(logprobs, ref, "k3"), [np.exp(-1), np.exp(2) - 3, 0], rtol=1e-6
    )
    np.testing.assert_allclose(kl_estimate(logprobs, ref, "abs"), [1, 2, 0])


def test_k3_keeps_its_digits_near_zero():
    r = np.float32(1e-5)
    estimate = kl_estimate(jnp.zeros(1) + r, jnp.zeros(1), "k3")
    # Written as exp(-r) - 1 + r, float32 gives nothing but rounding here.
    np.testing.assert_allclose(estimate, 0.5e-10, rtol=0.5)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_estimates_are_exactly_zero_at_the_reference(kind):
    logprobs = jnp.log(jnp.array([[0.1, 0.3], [1e-9, 1.0]]))
    np.testing.assert_array_equal(kl_estimate(logprobs, logprobs, kind), jnp.zeros((2, 2)))
    np.testing.assert_array_equal(exact_kl(logprobs, logprobs), jnp.zeros(2))


def test_gradients_of_the_estimators_as_the_docstring_has_them():
    def sampled(kind):
        """The average over samples from the policy of the gradient of the estimate."""
        frozen = jnp.asarray(P)

        def loss(logits):
            return jnp.sum(frozen * kl_estimate(jax.nn.log_softmax(logits), jnp.log(Q), kind))

        return jax.grad(loss)(jnp.log(P))

    with jax.enable_x64(True):
        forward = jax.grad(lambda logits: exact_kl(logits, jnp.log(Q)))(jnp.log(P))
        backward = jax.grad(lambda logits: exact_kl(jnp.log(Q), logits))(jnp.log(P))
        assert np.abs(forward - backward).max() > 0.01
        np.testing.assert_allclose(sampled("k1"), 0, atol=1e-12)
        np.testing.assert_allclose(sampled("k2"), forward, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(sampled("k3"), backward, rtol=1e-10, atol=1e-12)


def test_full_is_the_exact_kl_of_whole_distributions():
    np.testing.assert_array_equal(
        kl_estimate(np.log(P), np.log(Q), "full"), exact_kl(np.log(P), np.log(Q))
    )


def test_unknown_kinds_are_refused_with_the_valid_ones():
    with pytest.raises(ValueError, match=r"'k4'.*'k1', 'k2', 'k3', 'abs'"):
        kl_estimate(np.zeros(2), np.zeros(2), "k4")
    with pytest.raises(AssertionError):
        kl_estimate(np.zeros(2), np.zeros(3))


def test_exact_kl_equals_a_loop():
    rng = np.random.default_rng(0)
    logits, ref_logits = rng.normal(size=(2, 2, 3, 5)) * 3
    expected = np.zeros((2, 3))
    for i in range(2):
        for j in range(3):
            p = np.exp(logits[i, j]) / sum(np.exp(x) for x in logits[i, j])
            q = np.exp(ref_logits[i, j]) / sum(np.exp(x) for x in ref_logits[i, j])
            expected[i, j] = sum(p[v] * np.log(p[v] / q[v]) for v in range(5))
    with jax.enable_x64(True):
        result = exact_kl(logits, ref_logits)
        assert result.dtype == jnp.float64
        np.testing.assert_allclose(result, expected, rtol=1e-10)
        np.testing.assert_allclose(jax.jit(exact_kl)(logits, ref_logits), expected, rtol=1e-10)
    assert exact_kl(logits.astype(jnp.bfloat16), ref_logits).dtype == jnp.float32


@pytest.mark.parametrize("ref_of_the_impossible", [0.3, -np.inf])
def test_exact_kl_leaves_out_what_the_policy_cannot_sample(ref_of_the_impossible):
    logits = np.array([0.5, -np.inf, 1.0, -0.5])
    ref_logits = np.array([1.0, ref_of_the_impossible, 0.2, 0.1])
    possible = np.array([0, 2, 3])

    def by_hand(logits, ref_logits):
        log_p = jax.nn.log_softmax(logits[possible])
        log_q = jax.nn.log_softmax(ref_logits)[possible]
        return jnp.sum(jnp.exp(log_p) * (log_p - log_q))

    with jax.enable_x64(True):
        value, slope = jax.value_and_grad(exact_kl)(logits, ref_logits)
        expected, expected_slope = jax.value_and_grad(by_hand)(logits, ref_logits)
        ref_slope = jax.grad(exact_kl, argnums=1)(logits, ref_logits)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    np.testing.assert_allclose(slope, expected_slope, rtol=1e-10, atol=1e-14)
    assert np.asarray(slope)[1] == 0
    assert np.isfinite(ref_slope).all()


def test_exact_kl_is_infinite_where_the_reference_rules_out_a_sample():
    assert exact_kl(np.array([0.0, 0.0]), np.array([0.0, -np.inf])) == np.inf
    # Unless its probability is no number either: 0 * inf is not NaN here.
    assert exact_kl(np.array([0.0, -1e4]), np.array([0.0, -np.inf])) == 0


@pytest.mark.parametrize("case", ["case0", "case2"])
def test_adaptive_kl_is_trlx(case):
    golden = np.load(GOLDEN / "trlx_adaptive_kl.npz")
    init, target, horizon, num_samples = (
        float(golden[f"{case}_{name}"]) for name in ("init", "target", "horizon", "n_steps")
    )
    controller = adaptive_kl(init, target, horizon)
    update = jax.jit(controller.update)
    with jax.enable_x64(True):
        state = KLState(jnp.float64(init))
        for current, expected in zip(golden[f"{case}_current"], golden[f"{case}_value_after"]):
            state = update(state, current, num_samples)
            np.testing.assert_allclose(state.coef, expected, rtol=1e-10)
        assert state.coef.dtype == jnp.float64


def test_adaptive_kl_by_hand():
    controller = adaptive_kl(0.1, target=6.0, horizon=1000)
    state = controller.init()
    assert state.coef.dtype == jnp.float32
    table = [
        (12.0, 100, 0.1 * 1.02),  # far above: +0.2 * 100 / 1000
        (6.6, 100, 0.1 * 1.01),  # 10 % above
        (6.0, 100, 0.1),  # on target
        (5.4, 500, 0.1 * 0.95),  # 10 % below, five times the samples
        (0.0, 100, 0.1 * 0.98),  # far below
        (-3.0, 100, 0.1 * 0.98),  # an estimate may be negative
        (6e9, 0, 0.1),  # no samples
    ]
    for kl, num_samples, expected in table:
        for update in (controller.update, jax.jit(controller.update)):
            coef = update(state, kl, num_samples).coef
            assert coef.dtype == jnp.float32
            np.testing.assert_allclose(coef, expected, rtol=1e-6)


@pytest.mark.parametrize("kl", [np.nan, np.inf, -np.inf])
def test_a_kl_that_is_not_finite_leaves_the_coefficient(kl):
    state = KLState(jnp.float32(0.3))
    controller = adaptive_kl(0.1, 6.0, 10.0)
    assert controller.update(state, kl, 100).coef == jnp.float32(0.3)
    assert controller.update(state, 0.0, 1).coef != jnp.float32(0.3)


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(st.floats(-1e6, 1e6), st.integers(0, 10**6))
def test_adaptive_kl_stays_positive_and_moves_towards_the_target(kl, num_samples):
    coef = float(_update(KLState(jnp.float32(0.1)), kl, num_samples).coef)
    start = float(np.float32(0.1))
    assert np.isfinite(coef)
    assert coef >= 0.2 * start * (1 - 1e-6)
    assert (coef - start) * (kl - 6.0) >= 0


_update = jax.jit(adaptive_kl(0.1, 6.0, 1000).update)


def test_the_formula_alone_would_turn_the_price_negative():
    # 1 - 0.2 * 64 / 10 = -0.28: the floor of 0.2 holds instead.
    state = adaptive_kl(1.0, 6.0, 10).update(KLState(jnp.float32(1.0)), 0.0, 64)
    np.testing.assert_allclose(state.coef, 0.2)
    # A whole horizon at once is not touched by it.
    state = adaptive_kl(1.0, 6.0, 10).update(KLState(jnp.float32(1.0)), 0.0, 10)
    np.testing.assert_allclose(state.coef, 0.8)


def test_fixed_kl_keeps_its_coefficient():
    controller = fixed_kl(0.2)
    state = controller.init()
    assert state.coef.dtype == jnp.float32
    for update in (controller.update, jax.jit(controller.update)):
        assert update(state, 1e9, 1000) == state
    assert fixed_kl(0.0).init().coef == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (functools.partial(adaptive_kl, -0.1, 6.0, 10.0), "init_coef"),
        (functools.partial(adaptive_kl, np.nan, 6.0, 10.0), "init_coef"),
        (functools.partial(adaptive_kl, np.inf, 6.0, 10.0), "init_coef"),
        (functools.partial(adaptive_kl, 0.0, 6.0, 10.0), "for ever.*fixed_kl"),
        (functools.partial(adaptive_kl, 0.1, 0.0, 10.0), "target.*fixed_kl"),
        (functools.partial(adaptive_kl, 0.1, -1.0, 10.0), "target"),
        (functools.partial(adaptive_kl, 0.1, 6.0, 0), "horizon.*fixed_kl"),
        (functools.partial(adaptive_kl, 0.1, 6.0, -5), "horizon"),
        (functools.partial(fixed_kl, -0.1), "coef"),
        (functools.partial(fixed_kl, np.nan), "coef"),
    ],
)
def test_bad_parameters_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


KINDS = ["k1", "k2", "k3", "abs"]


@pytest.mark.parametrize("kind", KINDS)
def test_kl_in_the_loss_has_the_gradient_of_the_kl(kind):
    """Every token of a vocabulary of three, weighted as the policy would draw it."""

    def sampled(logits, drawn, **old):
        terms = kl_loss(jax.nn.log_softmax(logits), jnp.log(Q), kind, **old)
        return jnp.sum(drawn * terms)

    with jax.enable_x64(True):
        logits = jnp.log(P)
        wanted = jax.grad(lambda x: exact_kl(x, jnp.log(Q)))(logits)
        value, slope = jax.value_and_grad(sampled)(logits, P)
        np.testing.assert_allclose(slope, wanted, rtol=1e-10, atol=1e-14)
        np.testing.assert_allclose(value, expectation(kind), rtol=1e-12)
        # The tokens were drawn by another policy, whose ratio puts value and gradient right.
        drawn = np.array([0.2, 0.45, 0.35])
        value, slope = jax.value_and_grad(sampled)(logits, drawn, old_logprobs=np.log(drawn))
        np.testing.assert_allclose(slope, wanted, rtol=1e-10, atol=1e-14)
        np.testing.assert_allclose(value, expectation(kind), rtol=1e-12)
        if kind in ("k1", "k3"):
            np.testing.assert_allclose(value, KL, rtol=1e-12)
        biased = jax.grad(sampled)(logits, drawn)
        assert np.abs(biased - wanted).max() > 0.01  # so the weight is needed


@pytest.mark.parametrize("kind", KINDS)
def test_kl_in_the_loss_of_two_tokens(kind):
    """All responses of two tokens: the gradient is that of the KL at each prefix as drawn."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        first, second = jnp.asarray(rng.normal(size=3)), jnp.asarray(rng.normal(size=(3, 3)))
        ref_first, ref_second = rng.normal(size=3), rng.normal(size=(3, 3))
        drawn = jax.nn.softmax(first)[:, None] * jax.nn.softmax(second)

        def sampled(first, second):
            log_p = jax.nn.log_softmax(first)[:, None], jax.nn.log_softmax(second)
            log_q = jax.nn.log_softmax(ref_first)[:, None], jax.nn.log_softmax(ref_second)
            terms = [kl_loss(p, q, kind) for p, q in zip(log_p, log_q)]
            return jnp.sum(drawn * sum(terms))

        def at_each_prefix(first, second):
            chance = drawn.sum(1)  # of the prefixes, a constant
            return exact_kl(first, ref_first) + jnp.sum(chance * exact_kl(second, ref_second))

        got = jax.jit(jax.grad(sampled, argnums=(0, 1)))(first, second)
        wanted = jax.jit(jax.grad(at_each_prefix, argnums=(0, 1)))(first, second)
        for a, b in zip(got, wanted):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_that_ran_away_is_still_pulled_back(kind):
    def loss(x, ref):
        return kl_loss(x, ref, kind).sum()

    far = jnp.array([-500.0, -1.0])
    value, slope = jax.value_and_grad(loss)(far, jnp.array([-1.0, -500.0]))
    np.testing.assert_array_equal(slope, [-20, 20])
    assert np.isfinite(value)
    slope = jax.grad(loss)(jnp.array([-1.0]), jnp.array([-jnp.inf]))  # ruled out by the reference
    np.testing.assert_array_equal(slope, [20])
    np.testing.assert_array_equal(jax.grad(loss)(far, far), [0, 0])
    np.testing.assert_array_equal(jax.grad(loss, argnums=1)(far, 0 * far), [0, 0])


def test_unknown_kinds_in_the_loss():
    with pytest.raises(ValueError, match="'k3'"):
        kl_loss(jnp.zeros(2), jnp.zeros(2), "exact")
