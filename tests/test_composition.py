"""`ppo_step` trains models it knows nothing of, and imports nothing that knows of one."""

import ast
import functools
import pathlib
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxppo

ARMS, CONTEXTS, BATCH = 4, 3, 64
BEST = jnp.array([2, 0, 3])  # the arm that pays, by context


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(ARMS + 1)(nn.tanh(nn.Dense(16)(x)))


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(CONTEXTS, 16, rngs=rngs)
        self.outer = nnx.Linear(16, ARMS + 1, rngs=rngs)

    def __call__(self, x):
        return self.outer(nnx.tanh(self.inner(x)))


def linen_bandit():
    net = LinenNet()
    return lambda params, x: net.apply(params, x), net.init(
        jax.random.key(0), jnp.zeros((1, CONTEXTS))
    )


def nnx_bandit():
    graphdef, params = nnx.split(NNXNet(nnx.Rngs(0)))
    return lambda params, x: nnx.merge(graphdef, params)(x), params


@pytest.mark.parametrize("make", [linen_bandit, nnx_bandit])
def test_ppo_step_trains_a_contextual_bandit(make):
    apply, params = make()
    optimizer, kl = optax.adam(3e-2), jaxppo.fixed_kl(0.0)

    def evaluate(params, batch):
        outputs = apply(params, batch.inputs["contexts"])
        log_p = jax.nn.log_softmax(outputs[:, :ARMS])
        chosen = jnp.take_along_axis(log_p, batch.inputs["arms"], axis=1)
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=1, keepdims=True)
        return jaxppo.Evaluation(chosen, outputs[:, ARMS:], entropy)

    step = jax.jit(
        functools.partial(
            jaxppo.ppo_step,
            evaluate=evaluate,
            optimizer=optimizer,
            kl=kl,
            config=jaxppo.PPOConfig(ppo_epochs=2, batch_size=32, minibatch_size=16),
        ),
        donate_argnums=0,
    )

    @jax.jit
    def play(params, key):
        which, draw = jax.random.split(key)
        number = jax.random.randint(which, (BATCH,), 0, CONTEXTS)
        contexts = jax.nn.one_hot(number, CONTEXTS)
        outputs = apply(params, contexts)
        arms = jax.random.categorical(draw, outputs[:, :ARMS])[:, None]
        rewards = (arms == BEST[number][:, None]).astype(jnp.float32)
        mask = jnp.ones((BATCH, 1), bool)
        batch = jaxppo.PPOBatch(
            inputs={"contexts": contexts, "arms": arms},
            old_logprobs=jnp.take_along_axis(jax.nn.log_softmax(outputs[:, :ARMS]), arms, axis=1),
            old_values=outputs[:, ARMS:],
            advantages=jaxppo.whiten(rewards - outputs[:, ARMS:], mask),
            returns=rewards,
            mask=mask,
            kl=jnp.zeros(BATCH),
        )
        return batch, rewards.mean()

    def expected_reward(params):
        p = jax.nn.softmax(apply(params, jnp.eye(CONTEXTS))[:, :ARMS])
        return float(p[jnp.arange(CONTEXTS), BEST].mean())

    before = expected_reward(params)
    state = jaxppo.ppo_init(params, optimizer=optimizer, kl=kl)
    for key in jax.random.split(jax.random.key(1), 30):
        batch, _ = play(state.params, key)
        state, metrics = step(state, batch, key)
    assert before < 0.5
    assert expected_reward(state.params) > 0.9
    assert int(state.step) == 30 * 2 * 2
    assert metrics["values/explained_variance"] <= 1
    assert step._cache_size() == 1


def test_update_and_maths_import_neither_models_nor_transformers():
    package = pathlib.Path(jaxppo.__file__).parent
    allowed = {"jax", "flax", "chex", "optax", "numpy", *sys.stdlib_module_names}
    files = [package / "ppo.py", *(package / "core").glob("*.py")]
    assert len(files) > 5
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: {ast.unparse(node)}"
                names = [node.module]
            else:
                continue
            for name in names:
                inside = name == "jaxppo.core" or name.startswith("jaxppo.core.")
                assert inside or name.split(".")[0] in allowed, f"{file} imports {name}"
