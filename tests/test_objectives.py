"""The update with an objective: a method's own loss in place of PPO's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_ppo import KL, assert_same, evaluate, make_batch, make_params, run

from jaxppo import (
    Evaluation,
    KLState,
    PPOBatch,
    PPOConfig,
    adaptive_kl,
    exact_kl,
    fixed_kl,
    ppo_init,
    ppo_step,
)
from jaxppo.core import adaptive_entropy
from jaxppo.core.batch import Prices
from jaxppo.core.corrections import truncated_importance
from jaxppo.core.ratios import trajectory_ratio
from jaxppo.methods import METHODS, Feedback, KLPlace
from jaxppo.objectives import make_objective


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


@pytest.mark.parametrize("option", ["entropy_share", "importance", "off_policy_threshold"])
def test_options_leave_tokens_out_or_weigh_them(option):
    """The policy's term by a loop; the denominator counts every token all the same."""
    value = {
        "entropy_share": 0.4,
        "importance": functools.partial(truncated_importance, upper=1.2),
        "off_policy_threshold": 0.05,
    }[option]
    with jax.enable_x64(True):
        batch = full_batch(params=make_params(5))
        objective = make_objective(METHODS["dapo"], **{option: value})
        seen, weights = evaluate(make_params(), batch), objective.weigh(batch)
        sums = objective.sums(seen, batch, weights, Prices(0.0, 0.0))
    new, old, drawn, advantages, mask, entropy = map(
        np.asarray,
        (
            seen.logprobs,
            batch.old_logprobs,
            batch.behaviour_logprobs,
            batch.advantages,
            batch.mask,
            batch.old_entropy,
        ),
    )
    expected, factors = 0.0, []
    for i, t in np.argwhere(mask):
        factor = {
            "entropy_share": float(entropy[i, t] >= np.quantile(entropy[mask], 0.6)),
            "importance": min(np.exp(old[i, t] - drawn[i, t]), 1.2),
            "off_policy_threshold": float(
                advantages[i, t] >= 0 or np.mean((drawn - new)[i][mask[i]]) <= 0.05
            ),
        }[option]
        rho = np.exp(new[i, t] - old[i, t])
        clipped = min(max(rho, 0.8), 1.28)
        expected -= factor * min(rho * advantages[i, t], clipped * advantages[i, t]) / mask.sum()
        factors.append(factor)
    assert len(set(factors)) > 1
    np.testing.assert_allclose(sums["losses/policy_loss"], expected, rtol=1e-10)


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
        assert metrics.keys() == plain.keys()


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
        # A step without a token measures no entropy.
        nothing = batch.replace(mask=jnp.zeros_like(batch.mask))
        state, _ = run_objective(nothing, objective, minibatch_size=2, **options)
        np.testing.assert_allclose(state.entropy.price, 0.1, rtol=1e-6)
        assert_same(state.params, make_params(), 0)


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


@pytest.mark.parametrize("name", ["grpo", "rloo", "cispo", "rft"])
def test_a_bandit_learns(name):
    """Three arms, groups of eight pulls: feedback, credit, batch and update, in one jit."""
    method, reward = METHODS[name], jnp.array([0.0, 0.5, 1.0])
    objective = make_objective(method, max_length=1)
    optimizer, kl = optax.sgd(1.0), fixed_kl(0.01)
    here = jnp.ones((64, 1), bool)
    config = PPOConfig(batch_size=32, ppo_epochs=1)

    def see(params, batch):
        log_p = jax.nn.log_softmax(params)
        entropy = jnp.broadcast_to(-jnp.sum(jnp.exp(log_p) * log_p), batch.inputs.shape)
        return Evaluation(log_p[batch.inputs], 0 * entropy, entropy)

    @jax.jit
    def cycle(state, key):
        play_key, step_key = jax.random.split(key)
        arms = jax.random.categorical(play_key, state.params, shape=(64, 1))
        old = jax.nn.log_softmax(state.params)[arms]
        ref = jnp.full_like(old, -jnp.log(3))
        rewards = reward[arms]
        if method.kl.reward:
            rewards -= state.kl.coef * (old - ref)
        credit = method.advantage(Feedback(rewards, here, jnp.arange(64) // 8))
        batch = PPOBatch(
            inputs=arms,
            old_logprobs=old,
            old_values=0 * old,
            advantages=credit.advantages,
            returns=credit.returns,
            mask=here & credit.keep[:, None],
            kl=jnp.sum(old - ref, axis=1),
            ref_logprobs=ref,
        )
        state, _ = ppo_step(
            state, batch, step_key,
            evaluate=see, optimizer=optimizer, kl=kl, config=config, objective=objective,
        )  # fmt: skip
        return state

    state = ppo_init(jnp.zeros(3), optimizer=optimizer, kl=kl, objective=objective)
    for key in jax.random.split(jax.random.key(0), 20):
        state = cycle(state, key)
    assert jax.nn.softmax(state.params) @ reward > 0.9
