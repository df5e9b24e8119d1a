"""Schedules and optimizers against torch's formulas, written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxppo.optim import make_optimizer, make_schedule

COSINE = {"T_max": 10, "eta_min": 0.2}
LINEAR = {"start_factor": 0.25, "end_factor": 0.5, "total_iters": 8}
ADAM = {"betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}
SGD = {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}


def rates(schedule, steps):
    return np.array([schedule(step) for step in steps])


def test_cosine_is_torchs_and_stays_at_its_end():
    schedule = make_schedule("cosine_annealing", COSINE, 1.0, 0)
    t = np.arange(11)
    expected = 0.2 + (1.0 - 0.2) * (1 + np.cos(np.pi * t / 10)) / 2
    np.testing.assert_allclose(rates(schedule, t), expected, rtol=1e-6)
    np.testing.assert_allclose(rates(schedule, [11, 25]), 0.2, rtol=1e-6)


def test_trlxs_default_cosine_is_constant():
    schedule = make_schedule("cosine_annealing", {"T_max": 1e12, "eta_min": 3e-5}, 1e-3, 0)
    np.testing.assert_allclose(rates(schedule, [0, 1, 10**6]), 1e-3, rtol=1e-6)
    assert jax.jit(schedule)(jnp.int32(5)) == pytest.approx(1e-3, rel=1e-6)


def test_linear_is_torchs_and_stays_at_its_end():
    schedule = make_schedule("linear", LINEAR, 2.0, 0)
    t = np.arange(12)
    expected = 2.0 * (0.25 + (0.5 - 0.25) * np.minimum(t, 8) / 8)
    np.testing.assert_allclose(rates(schedule, t), expected, rtol=1e-6)


def test_constant_is_constant():
    np.testing.assert_allclose(rates(make_schedule("constant", {}, 0.3, 0), [0, 99]), 0.3)


@pytest.mark.parametrize(
    ("name", "kwargs"), [("cosine_annealing", COSINE), ("linear", LINEAR), ("constant", {})]
)
def test_warmup_rises_to_where_the_schedule_begins(name, kwargs):
    plain = make_schedule(name, kwargs, 1.0, 0)
    warm = make_schedule(name, kwargs, 1.0, 4)
    begin = 0.25 if name == "linear" else 1.0
    np.testing.assert_allclose(rates(warm, range(4)), begin * np.arange(1, 5) / 5, rtol=1e-6)
    np.testing.assert_allclose(rates(warm, range(4, 20)), rates(plain, range(16)), rtol=1e-6)
    assert jax.jit(warm)(2) == pytest.approx(begin * 3 / 5, rel=1e-6)


def params_and_gradients():
    rng = np.random.default_rng(0)
    shapes = {"kernel": (3, 2), "bias": (2,), "scale": (), "stack": (2, 2, 2)}
    params = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    gradients = [{name: rng.normal(size=shape) for name, shape in shapes.items()} for _ in range(3)]
    return params, gradients


def run(name, kwargs, lr, max_grad_norm=None):
    """Parameters after each of three steps, in float64."""
    params, gradients = params_and_gradients()
    schedule = lr if callable(lr) else optax.constant_schedule(lr)
    with jax.enable_x64(True):
        optimizer = make_optimizer(name, kwargs, schedule, max_grad_norm)
        params = jax.tree.map(jnp.asarray, params)
        state = optimizer.init(params)
        steps = []
        for gradient in gradients:
            updates, state = optimizer.update(gradient, state, params)
            params = optax.apply_updates(params, updates)
            steps.append(jax.device_get(params))
    return steps


def by_hand(rule, weight_decay=0.0, decoupled=False, lr=0.1, clip=None):
    """Torch's order: gradients are clipped, then decay is added, then the rule is applied."""
    params, gradients = params_and_gradients()
    memory = {name: {} for name in params}
    steps = []
    for t, gradient in enumerate(gradients, start=1):
        rate = lr(t - 1) if callable(lr) else lr
        norm = np.sqrt(sum(np.sum(g**2) for g in gradient.values()))
        factor = min(1.0, clip / norm) if clip else 1.0
        for name, g in gradient.items():
            p = params[name]
            decay = weight_decay if np.ndim(p) >= 2 else 0.0
            g = g * factor + (0 if decoupled else decay * p)
            p = p * (1 - rate * decay) if decoupled else p
            params[name] = p - rate * rule(g, memory[name], t)
        steps.append(dict(params))
    return steps


def adam(g, memory, t, b1=0.8, b2=0.9, eps=1e-3):
    memory["m"] = b1 * memory.get("m", 0) + (1 - b1) * g
    memory["v"] = b2 * memory.get("v", 0) + (1 - b2) * g**2
    m, v = memory["m"] / (1 - b1**t), memory["v"] / (1 - b2**t)
    return m / (np.sqrt(v) + eps)


def momentum(g, memory, t, nesterov=False):
    memory["b"] = 0.9 * memory["b"] + g if t > 1 else g
    return g + 0.9 * memory["b"] if nesterov else memory["b"]


def assert_same(found, expected):
    assert len(found) == len(expected) == 3
    for one, other in zip(found, expected):
        for name in other:
            np.testing.assert_allclose(one[name], other[name], rtol=1e-6, err_msg=name)


def test_adamw_decays_apart_from_the_moments():
    assert_same(run("adamw", ADAM, 0.1), by_hand(adam, 0.1, decoupled=True))


def test_adam_adds_decay_to_the_gradient():
    found = run("adam", ADAM, 0.1)
    assert_same(found, by_hand(adam, 0.1))
    other = run("adamw", ADAM, 0.1)
    assert np.abs(found[0]["kernel"] - other[0]["kernel"]).max() > 1e-4


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_decay_leaves_biases_and_norms_alone(name):
    kwargs = {**ADAM, **SGD}
    decayed, plain = (run(name, {**kwargs, "weight_decay": w}, 0.1) for w in (0.3, 0.0))
    for leaf in ("bias", "scale"):
        np.testing.assert_array_equal(decayed[-1][leaf], plain[-1][leaf])
    for leaf in ("kernel", "stack"):
        assert np.abs(decayed[0][leaf] - plain[0][leaf]).max() > 1e-4


def test_sgd_with_and_without_momentum():
    assert_same(run("sgd", SGD, 0.1), by_hand(lambda g, *_: g))
    assert_same(run("sgd", {**SGD, "weight_decay": 0.2}, 0.1), by_hand(lambda g, *_: g, 0.2))
    assert_same(run("sgd", {**SGD, "momentum": 0.9}, 0.1), by_hand(momentum))
    nesterov = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.2}
    expected = by_hand(lambda g, memory, t: momentum(g, memory, t, nesterov=True), 0.2)
    assert_same(run("sgd", nesterov, 0.1), expected)


def test_one_nesterov_step_in_numbers():
    optimizer = make_optimizer(
        "sgd", {"momentum": 0.5, "nesterov": True, "weight_decay": 0.0}, lambda step: 0.1, None
    )
    updates, _ = optimizer.update([jnp.array([2.0])], optimizer.init([jnp.array([1.0])]), [1.0])
    np.testing.assert_allclose(updates[0], [-0.3], rtol=1e-6)  # -0.1 * (2 + 0.5 * 2)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_large_gradients_are_scaled_by_their_global_norm(name):
    rule = adam if name == "adamw" else (lambda g, *_: g)
    kwargs = {**ADAM, **SGD, "weight_decay": 0.1}
    clipped = run(name, kwargs, 0.1, max_grad_norm=0.5)
    # decay is no part of the gradient that is clipped
    assert_same(clipped, by_hand(rule, 0.1, decoupled=name == "adamw", clip=0.5))
    free = run(name, kwargs, 0.1)
    assert_same(run(name, kwargs, 0.1, max_grad_norm=1e3), free)
    assert_same(run(name, kwargs, 0.1, max_grad_norm=0), free)


def test_the_rate_follows_the_schedule_step_by_step():
    schedule = make_schedule("linear", {**LINEAR, "total_iters": 2}, 0.4, 1)
    rate = {0: 0.05, 1: 0.1, 2: 0.15}  # 0.4 / 4 begins after one step of warmup at a half of it
    assert_same(run("sgd", SGD, schedule), by_hand(lambda g, *_: g, lr=rate.get))
    assert_same(run("adamw", ADAM, schedule), by_hand(adam, 0.1, decoupled=True, lr=rate.get))


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="scheduler 'step' is unknown"):
        make_schedule("step", {}, 1.0, 0)
    with pytest.raises(ValueError, match="optimizer 'lion' is unknown"):
        make_optimizer("lion", ADAM, optax.constant_schedule(1.0), None)
