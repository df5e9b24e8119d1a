"""The update: how many steps, on which rows, with which gradient. No language model is here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxppo import (
    Evaluation,
    KLController,
    KLState,
    PPOBatch,
    PPOConfig,
    adaptive_kl,
    exact_kl,
    finish_metrics,
    fixed_kl,
    ppo_init,
    ppo_loss,
    ppo_step,
    ppo_update,
)
from jaxppo.core import adaptive_entropy
from jaxppo.core.corrections import truncated_importance
from jaxppo.core.ratios import trajectory_ratio
from jaxppo.methods import METHODS, KLPlace
from jaxppo.objectives import make_objective

FEATURES, ACTIONS = 3, 5
RANGES = {"cliprange": 0.2, "cliprange_value": 0.3, "vf_coef": 0.5}
KL = fixed_kl(0.1)


def evaluate(params, batch):
    """A linear policy over five actions, and a linear critic."""
    features, actions = batch.inputs["features"], batch.inputs["actions"]
    log_p = jax.nn.log_softmax(features @ params["policy"])
    chosen = jnp.take_along_axis(log_p, actions[..., None], axis=-1)[..., 0]
    return Evaluation(chosen, features @ params["critic"], -jnp.sum(jnp.exp(log_p) * log_p, -1))


def make_params(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "policy": jnp.asarray(rng.normal(size=(FEATURES, ACTIONS))),
        "critic": jnp.asarray(rng.normal(size=FEATURES)),
    }


def make_batch(B=7, T=4, seed=1, params=None):
    """Ragged samples; row 2 has no action at all. Old figures are those of `params`."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, T + 1, B)
    lengths[2 % B] = 0
    batch = PPOBatch(
        inputs={
            "features": jnp.asarray(rng.normal(size=(B, T, FEATURES))),
            "actions": jnp.asarray(rng.integers(0, ACTIONS, (B, T))),
        },
        old_logprobs=jnp.zeros((B, T)),
        old_values=jnp.zeros((B, T)),
        advantages=jnp.asarray(rng.normal(size=(B, T))),
        returns=jnp.asarray(rng.normal(size=(B, T))),
        mask=jnp.asarray(np.arange(T) < lengths[:, None]),
        kl=jnp.asarray(rng.uniform(size=B)),
    )
    old = jax.jit(evaluate)(make_params() if params is None else params, batch)
    return batch.replace(old_logprobs=old.logprobs, old_values=old.values)


def run(batch, *, optimizer=None, kl=KL, params=None, key=0, evaluate=evaluate, **options):
    """One call of a jitted ppo_step from the beginning."""
    optimizer = optimizer or optax.sgd(0.3, momentum=0.9)
    state = ppo_init(make_params() if params is None else params, optimizer=optimizer, kl=kl)
    step = functools.partial(
        ppo_step,
        evaluate=evaluate,
        optimizer=optimizer,
        kl=kl,
        config=PPOConfig(**{**RANGES, "batch_size": 4, "ppo_epochs": 2, **options}),
    )
    return jax.jit(step)(state, batch, jax.random.key(key))


def assert_same(a, b, tolerance=1e-10):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b
    )


def row_recorder(steps, B):
    """An optimizer that moves nothing and notes which rows had a gradient, step by step."""
    init = lambda params: (jnp.zeros((), int), jnp.zeros((steps, B), bool))  # noqa: E731

    def update(grads, state, params=None):
        at, log = state
        return jax.tree.map(jnp.zeros_like, grads), (at + 1, log.at[at].set(grads["row"] != 0))

    return optax.GradientTransformation(init, update)


def rows_by_step(B, key=0, **options):
    """Which rows each optimizer step saw, [steps, B] bool, and the state and metrics."""
    epochs, size = options["ppo_epochs"], options["batch_size"]
    ones = jnp.ones((B, 1))
    batch = PPOBatch(
        inputs=jnp.arange(B),
        old_logprobs=0 * ones,
        old_values=0 * ones,
        advantages=ones,
        returns=0 * ones,
        mask=ones > 0,
        kl=jnp.zeros(B),
    )

    def evaluate(params, batch):
        chosen = params["row"][batch.inputs][:, None]
        return Evaluation(chosen, 0 * chosen, 0 * chosen)

    state, metrics = run(
        batch,
        params={"row": jnp.zeros(B)},
        optimizer=row_recorder(epochs * -(-B // size), B),
        evaluate=evaluate,
        key=key,
        **options,
    )
    return np.asarray(state.opt_state[1]), state, metrics


@pytest.mark.parametrize(
    ("B", "size", "micro", "epochs"),
    [(8, 4, 2, 3), (10, 4, None, 2), (10, 4, 3, 2), (3, 8, None, 2), (5, 5, 1, 1)],
)
def test_every_epoch_uses_each_sample_once(B, size, micro, epochs):
    rows, state, metrics = rows_by_step(B, batch_size=size, minibatch_size=micro, ppo_epochs=epochs)
    batches = -(-B // size)
    assert int(state.step) == int(state.opt_state[0]) == epochs * batches
    assert metrics["optimizer/steps"] == epochs * batches
    for epoch in rows.reshape(epochs, batches, B):
        np.testing.assert_array_equal(epoch.sum(0), np.ones(B))
        assert sorted(epoch.sum(1)) == sorted([size] * (B // size) + [B % size] * (B % size > 0))


def test_samples_are_shuffled_by_epoch_and_by_key():
    options = {"batch_size": 4, "ppo_epochs": 2}
    first, _, _ = rows_by_step(12, key=0, **options)
    again, _, _ = rows_by_step(12, key=0, **options)
    other, _, _ = rows_by_step(12, key=1, **options)
    np.testing.assert_array_equal(first, again)
    assert (first[:3] != first[3:]).any()
    assert (first[:3] != other[:3]).any()
    assert (first[:3] != np.repeat(np.eye(3, dtype=bool), 4, axis=1)).any()  # not in order


def test_one_step_is_the_gradient_of_the_mean_over_tokens():
    with jax.enable_x64(True):
        # old figures of other parameters, so that some terms are clipped
        batch, params = make_batch(params=make_params(5)), make_params()

        def loss(params):
            seen = evaluate(params, batch)
            arrays = (batch.old_logprobs, batch.old_values, batch.advantages, batch.returns)
            return ppo_loss(seen.logprobs, seen.values, *arrays, batch.mask, **RANGES)

        grads, wanted = jax.grad(loss, has_aux=True)(params)
        state, metrics = run(batch, optimizer=optax.sgd(0.3), batch_size=7, ppo_epochs=1)
        assert_same(state.params, jax.tree.map(lambda p, g: p - 0.3 * g, params, grads))
        assert 0 < wanted["policy/clipfrac"] < 1
        for name, value in wanted.items():
            assert_same(metrics[name], value)
        np.testing.assert_allclose(
            metrics["optimizer/grad_norm"], optax.global_norm(grads), rtol=1e-6
        )


@pytest.fixture(scope="module")
def whole():
    """The update that others must equal: no micro-batches, in float64."""
    with jax.enable_x64(True):
        return run(make_batch())


@pytest.mark.parametrize("micro", [1, 3, 5, 16])
def test_micro_batches_change_nothing(whole, micro):
    with jax.enable_x64(True):
        assert_same(run(make_batch(), minibatch_size=micro), whole)


@pytest.mark.parametrize(("micro", "filling"), [(None, 0.0), (None, np.inf), (3, np.nan)])
def test_padding_changes_nothing(whole, micro, filling):
    with jax.enable_x64(True):
        batch = make_batch()
        B, T = batch.mask.shape
        wider = jax.tree.map(
            lambda x: (
                jnp.concatenate([x, jnp.ones((B, 3, *x.shape[2:]), x.dtype)], axis=1)
                if x.ndim > 1
                else x
            ),
            batch,
        )
        mask = wider.mask & (jnp.arange(T + 3) < T)
        fill = lambda x: jnp.where(mask, x, filling)  # noqa: E731
        wider = wider.replace(
            mask=mask,
            old_logprobs=fill(wider.old_logprobs),
            old_values=fill(wider.old_values),
            advantages=fill(wider.advantages),
            returns=fill(wider.returns),
        )
        assert_same(run(wider, minibatch_size=micro), whole)


@pytest.mark.parametrize("micro", [None, 2])
def test_without_actions_nothing_moves(micro):
    batch = make_batch()
    batch = batch.replace(
        mask=jnp.zeros_like(batch.mask), advantages=jnp.full_like(batch.advantages, jnp.nan)
    )
    state, metrics = run(batch, minibatch_size=micro)
    assert_same(state.params, make_params(), 0)
    assert metrics["optimizer/grad_norm"] == 0
    assert all(np.isfinite(value) for value in metrics.values())


def test_the_first_ratio_is_one_exactly():
    _, metrics = run(make_batch(), batch_size=7, ppo_epochs=1)
    assert metrics["ratio"] == 1
    assert metrics["policy/approx_kl"] == 0
    assert metrics["policy/clipfrac"] == 0
    _, metrics = run(make_batch(), batch_size=7, ppo_epochs=2)
    assert metrics["policy/approx_kl"] > 0


def test_with_learning_rate_zero_metrics_are_means_over_all_tokens():
    with jax.enable_x64(True):
        batch, params = make_batch(), make_params()
        seen = evaluate(params, batch)
        _, wanted = ppo_loss(
            *(seen.logprobs, seen.values, batch.old_logprobs, batch.old_values),
            *(batch.advantages, batch.returns, batch.mask),
            **RANGES,
            entropy=seen.entropy,
        )
        state, metrics = run(batch, optimizer=optax.sgd(0.0), batch_size=3, ppo_epochs=3)
        assert int(state.step) == 9
        assert metrics["ratio"] == 1
        assert metrics["policy/approx_kl"] == 0
        assert wanted.keys() == metrics.keys() - {"optimizer/grad_norm", "optimizer/steps"}
        for name, value in wanted.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


def test_approx_kl_stop_ends_the_call():
    """Only row 0 has an advantage, so only it shows a KL, once it was trained on."""
    B, epochs = 4, 3
    for key in range(20):
        rows, _, _ = rows_by_step(B, key=key, batch_size=1, ppo_epochs=epochs)
        order = rows.argmax(1).reshape(epochs, B)
        place = int(np.flatnonzero(order[1] == 0)[0])
        if place < B - 1:  # rows without KL follow in that epoch, and must not be trained on
            break
    batch = PPOBatch(
        inputs=jnp.arange(B),
        old_logprobs=jnp.zeros((B, 1)),
        old_values=jnp.zeros((B, 1)),
        advantages=jnp.array([[1.0], [0.0], [0.0], [0.0]]),
        returns=jnp.zeros((B, 1)),
        mask=jnp.ones((B, 1), bool),
        kl=jnp.ones(B),
    )

    def by_row(params, batch):
        chosen = params["row"][batch.inputs][:, None]
        return Evaluation(chosen, 0 * chosen, 0 * chosen)

    options = {"params": {"row": jnp.zeros(B)}, "optimizer": optax.sgd(0.1), "evaluate": by_row}
    options |= {"key": key, "batch_size": 1, "ppo_epochs": epochs, "kl": adaptive_kl(1.0, 0.1, 100)}
    stopped, metrics = run(batch, approx_kl_stop=1e-4, **options)
    assert int(stopped.step) == metrics["optimizer/steps"] == B + place
    np.testing.assert_allclose(stopped.params["row"], [0.1, 0, 0, 0], rtol=1e-6)
    assert metrics["policy/approx_kl"] == 0  # the minibatch that shows it is not counted
    assert stopped.kl.coef > 1  # the controller is updated all the same
    endless, metrics = run(batch, approx_kl_stop=1e4, **options)
    free, _ = run(batch, **options)
    assert int(endless.step) == int(free.step) == metrics["optimizer/steps"] == B * epochs
    assert_same(endless.params, free.params, 0)
    assert free.params["row"][0] > 0.2


def test_the_kl_controller_is_updated_once_with_the_mean():
    kl = KLController(
        lambda: KLState(jnp.zeros(3)),
        lambda state, kl, count: KLState(state.coef + jnp.stack([kl, count * 1.0, 1.0])),
    )
    batch = make_batch()
    state, _ = run(batch, kl=kl)
    np.testing.assert_allclose(state.kl.coef, [batch.kl.mean(), 7, 1], rtol=1e-6)


def test_grad_norm_is_the_mean_over_steps():
    with jax.enable_x64(True):
        batch = make_batch(B=4)
        norms = []
        for epochs in (1, 2, 3):
            _, metrics = run(batch, ppo_epochs=epochs, optimizer=optax.sgd(0.5))
            norms.append(float(metrics["optimizer/grad_norm"]) * epochs)
        singles = np.diff([0, *norms])
        # the norms of three consecutive steps, each computed from its own parameters
        state = ppo_init(make_params(), optimizer=optax.sgd(0.5), kl=KL)
        update = functools.partial(
            ppo_update, evaluate=evaluate, optimizer=optax.sgd(0.5), config=PPOConfig(**RANGES)
        )
        for single in singles:
            state, sums = jax.jit(update)(state, batch)
            np.testing.assert_allclose(single, sums["optimizer/grad_norm"], rtol=1e-5)
        assert len(set(singles.round(5))) == 3


def test_ppo_update_gives_sums_that_finish_as_means():
    with jax.enable_x64(True):
        batch, params = make_batch(), make_params()
        optimizer = optax.adam(1e-2)
        state = ppo_init(params, optimizer=optimizer, kl=KL)
        update = functools.partial(
            ppo_update, evaluate=evaluate, optimizer=optimizer, config=PPOConfig(**RANGES)
        )
        new, sums = jax.jit(update)(state, batch)
        assert sums["count"] == batch.mask.sum()
        assert sums.pop("optimizer/steps") == 1
        sums.pop("optimizer/grad_norm")
        seen = evaluate(params, batch)
        _, wanted = ppo_loss(
            *(seen.logprobs, seen.values, batch.old_logprobs, batch.old_values),
            *(batch.advantages, batch.returns, batch.mask),
            **RANGES,
            entropy=seen.entropy,
        )
        assert_same(finish_metrics(sums), wanted)
        assert int(new.step) == 1
        assert_same(new.kl, state.kl, 0)


def test_one_compilation_and_donated_buffers():
    optimizer = optax.adam(1e-2)
    config = PPOConfig(batch_size=3, minibatch_size=2, ppo_epochs=2)
    step = jax.jit(
        functools.partial(ppo_step, evaluate=evaluate, optimizer=optimizer, kl=KL, config=config),
        donate_argnums=0,
    )
    state = ppo_init(make_params(), optimizer=optimizer, kl=KL)
    for i in range(4):
        before = state
        state, _ = step(before, make_batch(seed=i), jax.random.key(i))
        assert before.params["policy"].is_deleted()
        assert int(state.step) == (i + 1) * 6
    assert step._cache_size() == 1


def test_nothing_depends_on_jit():
    batch, optimizer = make_batch(), optax.adam(1e-2)
    config = PPOConfig(batch_size=4, minibatch_size=2, ppo_epochs=1)
    state = ppo_init(make_params(), optimizer=optimizer, kl=KL)
    eager, _ = ppo_step(
        state, batch, jax.random.key(3),
        evaluate=evaluate, optimizer=optimizer, kl=KL, config=config,
    )  # fmt: skip
    jitted, _ = run(
        batch, optimizer=optimizer, key=3, minibatch_size=2, ppo_epochs=1,
        cliprange_value=0.2, vf_coef=1.0,
    )  # fmt: skip
    assert_same(eager.params, jitted.params, 1e-5)


# Updates with an objective: a method's own loss in place of PPO's.


def full_batch(**kwargs):
    """A batch with everything an objective may ask for; padding of the extras is NaN."""
    batch = make_batch(**kwargs)
    rng = np.random.default_rng(9)
    extra = lambda scale: jnp.where(  # noqa: E731
        batch.mask, batch.old_logprobs + scale * rng.normal(size=batch.mask.shape), jnp.nan
    )
    return batch.replace(
        ref_logprobs=extra(0.5),
        behaviour_logprobs=extra(0.3),
        old_entropy=jnp.where(batch.mask, rng.uniform(0, 1.6, batch.mask.shape), jnp.nan),
    )


def run_objective(batch, objective, *, kl=KL, optimizer=None, evaluate=evaluate, **options):
    optimizer = optimizer or optax.sgd(0.3, momentum=0.9)
    state = ppo_init(make_params(), optimizer=optimizer, kl=kl, objective=objective)
    config = PPOConfig(**{"batch_size": 4, "ppo_epochs": 2, **options})
    step = functools.partial(
        ppo_step,
        evaluate=evaluate,
        optimizer=optimizer,
        kl=kl,
        config=config,
        objective=objective,
    )
    return jax.jit(step)(state, batch, jax.random.key(0))


OBJECTIVES = {
    "grpo with everything": lambda: make_objective(
        METHODS["grpo"],
        entropy=adaptive_entropy(1.4, init_coef=0.01),
        entropy_share=0.6,
        off_policy_threshold=0.01,
        importance=functools.partial(truncated_importance, ratio=trajectory_ratio),
    ),
    "dr_grpo": lambda: make_objective(METHODS["dr_grpo"], max_length=9),
    "ppo": lambda: make_objective(METHODS["ppo"], vf_coef=0.5, cliprange_value=0.3),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_micro_batches_change_nothing_under_an_objective(name):
    with jax.enable_x64(True):
        objective, batch = OBJECTIVES[name](), full_batch()
        whole = run_objective(batch, objective)
        assert_same(run_objective(batch, objective, minibatch_size=3), whole)
        moved = optax.global_norm(
            jax.tree.map(jnp.subtract, whole[0].params, make_params()),
        )
        assert 1e-3 < moved < 1e3
        assert all(np.isfinite(x) for x in whole[1].values())


def test_ppo_as_an_objective_is_ppo():
    with jax.enable_x64(True):
        # not its own old figures, so that ratios and values are clipped in the first step already
        batch = make_batch(params=make_params(5))
        plain_state, plain = run(batch)
        objective = make_objective(METHODS["ppo"], vf_coef=0.5, cliprange_value=0.3)
        state, metrics = run_objective(batch, objective)
        assert_same(state.params, plain_state.params)
        assert 0 < plain["policy/clipfrac"] < 1
        for key, value in plain.items():
            assert_same(metrics[key], value)
        assert metrics.keys() - plain.keys() == {"losses/entropy_bonus"}


def test_without_a_critic_none_is_trained_or_reported():
    state, metrics = run_objective(full_batch(), make_objective(METHODS["dapo"]))
    np.testing.assert_array_equal(state.params["critic"], make_params()["critic"])
    assert np.abs(state.params["policy"] - make_params()["policy"]).max() > 1e-3
    assert not [key for key in metrics if "value" in key or "return" in key]


def test_the_controllers_coefficient_prices_the_kl_in_the_loss():
    """One plain gradient step: its KL part is proportional to the coefficient."""
    with jax.enable_x64(True):
        objective, batch = make_objective(METHODS["grpo"]), full_batch()
        optimizer, control = optax.sgd(1.0), adaptive_kl(0.1, 1e-3, 100)
        state = ppo_init(make_params(), optimizer=optimizer, kl=control, objective=objective)
        config = PPOConfig(batch_size=7, ppo_epochs=1)
        step = functools.partial(
            ppo_step,
            evaluate=evaluate,
            optimizer=optimizer,
            kl=control,
            config=config,
            objective=objective,
        )
        step, key = jax.jit(step), jax.random.key(0)
        states = [
            step(state._replace(kl=KLState(jnp.asarray(coef))), batch, key)[0]
            for coef in (0.0, 0.1, 0.4)
        ]
        once, four = (x.params["policy"] - states[0].params["policy"] for x in states[1:])
        assert np.abs(once).max() > 1e-4
        np.testing.assert_allclose(four, 4 * once, rtol=1e-9, atol=1e-14)
        # And it adapts: the batch's KL is far above the target.
        np.testing.assert_allclose(states[1].kl.coef, 0.1 * (1 + 0.2 * 7 / 100), rtol=1e-6)


def test_exact_kl_in_the_loss_comes_from_evaluate():
    reference = make_params(3)["policy"]

    def with_kl(params, batch):
        features = batch.inputs["features"]
        kl = exact_kl(features @ params["policy"], features @ reference)
        return evaluate(params, batch)._replace(kl=kl)

    method = METHODS["dapo"]._replace(kl=KLPlace(loss="exact"))
    options = {"batch_size": 7, "ppo_epochs": 1, "optimizer": optax.sgd(1.0)}
    with jax.enable_x64(True):
        batch, params = make_batch(), make_params()
        batch = batch.replace(advantages=0 * batch.advantages)
        state, metrics = run_objective(
            batch, make_objective(method), kl=fixed_kl(0.3), evaluate=with_kl, **options
        )

        def loss(params):
            kl = jnp.where(batch.mask, with_kl(params, batch).kl, 0)
            return kl.sum() / batch.mask.sum()

        value, slope = jax.value_and_grad(loss)(params)
        assert_same(state.params["policy"], params["policy"] - 0.3 * slope["policy"])
        np.testing.assert_allclose(metrics["policy/ref_kl"], value, rtol=1e-10)
        np.testing.assert_allclose(metrics["losses/total_loss"], 0.3 * value, rtol=1e-10)
        with pytest.raises(ValueError, match="exact kl"):
            run_objective(batch, make_objective(method), **options)


def test_the_entropy_bonus_and_its_controller():
    options = {"batch_size": 7, "ppo_epochs": 3, "optimizer": optax.sgd(0.1)}
    with jax.enable_x64(True):
        batch = make_batch()
        batch = batch.replace(advantages=0 * batch.advantages)

        def mean_entropy(params):
            seen = evaluate(params, batch).entropy
            return jnp.where(batch.mask, seen, 0).sum() / batch.mask.sum()

        # Always below its target: the price of the three steps is 0.1, 0.6, 1.1.
        control = adaptive_entropy(9.0, init_coef=0.1, delta=0.5, max_coef=2.0)
        objective = make_objective(METHODS["dapo"], entropy=control)
        state, metrics = run_objective(batch, objective, minibatch_size=2, **options)
        policy, seen = make_params()["policy"], []
        for price in (0.1, 0.6, 1.1):
            params = {**make_params(), "policy": policy}
            value, slope = jax.value_and_grad(mean_entropy)(params)
            seen.append(value)
            policy = policy + 0.1 * price * slope["policy"]
        assert_same(state.params["policy"], policy)
        assert_same(metrics["policy/entropy"], np.mean(seen))
        np.testing.assert_allclose(state.entropy.coef, 1.6, rtol=1e-6)
        assert seen[2] > seen[0]


def test_an_objective_keeps_one_compilation_and_donates():
    optimizer, objective = optax.adam(1e-2), OBJECTIVES["grpo with everything"]()
    config = PPOConfig(batch_size=3, minibatch_size=2, ppo_epochs=2, approx_kl_stop=0.5)
    step = jax.jit(
        functools.partial(
            ppo_step,
            evaluate=evaluate,
            optimizer=optimizer,
            kl=KL,
            config=config,
            objective=objective,
        ),
        donate_argnums=0,
    )
    state = ppo_init(make_params(), optimizer=optimizer, kl=KL, objective=objective)
    for i in range(3):
        state, _ = step(state, full_batch(seed=i), jax.random.key(i))
    assert step._cache_size() == 1
