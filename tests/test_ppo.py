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
    finish_metrics,
    fixed_kl,
    ppo_init,
    ppo_loss,
    ppo_step,
    ppo_update,
)

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
