"""The PPO update as a pure function of state and batch (Schulman et al. 2017, arXiv:1707.06347).

It knows nothing of language models: `evaluate(params, batch) -> Evaluation` is all it asks, so a
bandit's MLP trains by the same code as a transformer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxppo.core.batch import Evaluation, Objective, PPOBatch, Prices
from jaxppo.core.kl import KLController, KLState
from jaxppo.core.losses import finish_metrics, ppo_loss_sums

Evaluate = Callable[[Any, PPOBatch], Evaluation]


class PPOState(NamedTuple):
    """What training changes.

    params: the policy's (and critic's) parameters, any pytree.
    opt_state: the optimizer's state.
    kl: the KL controller's state.
    step: scalar int32, optimizer steps taken.
    entropy: the entropy controller's state; `()` without an objective.
    """

    params: Any
    opt_state: optax.OptState
    kl: KLState
    step: jax.Array
    entropy: Any = ()


@dataclass(frozen=True)
class PPOConfig:
    """Hyperparameters of the update, under trlx's names.

    ppo_epochs: passes over the batch.
    batch_size: samples an optimizer step; a smaller last one a pass is kept.
    minibatch_size: samples held in memory at once; changes no number. None: `batch_size`.
    cliprange: the ratio's distance from 1 beyond which it earns nothing more.
    cliprange_value: the same for the value's distance from the old one.
    vf_coef: weight of the value loss.
    approx_kl_stop: once a minibatch shows a mean KL per token between old and new policy above
      this, it and the rest of the call's updates are skipped. None: never.
    """

    ppo_epochs: int = 4
    batch_size: int = 32
    minibatch_size: int | None = None
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 1.0
    approx_kl_stop: float | None = None


def ppo_init(
    params,
    *,
    optimizer: optax.GradientTransformation,
    kl: KLController,
    objective: Objective | None = None,
) -> PPOState:
    """Makes the state in which training begins, for updates with the same arguments.

    The state holds `params` themselves: give a copy (`jax.tree.map(jnp.copy, params)`) if they are
    needed after `ppo_step` was called with its state donated.
    """
    entropy = () if objective is None else objective.entropy.init()
    return PPOState(params, optimizer.init(params), kl.init(), jnp.zeros((), jnp.int32), entropy)


def ppo_update(
    state: PPOState,
    minibatch: PPOBatch,
    *,
    evaluate: Evaluate,
    optimizer: optax.GradientTransformation,
    config: PPOConfig,
    objective: Objective | None = None,
) -> tuple[PPOState, dict[str, jax.Array]]:
    """Takes one optimizer step on one minibatch.

    Without an objective the loss is PPO's, the mean over all real tokens of the minibatch; with
    one, what it says. `minibatch_size` cuts the work and changes nothing: the denominators are
    counted first, over the whole minibatch, and micro-batches add up their sums.

    Returns:
      The new state, and sums: those of `ppo_loss_sums` or of the objective, which `finish_metrics`
      turns into means over tokens, and `optimizer/{grad_norm,steps}`, to be divided by the steps.
      An objective's losses are means already; they are multiplied by the tokens here, so that
      several steps average by their tokens.
    """
    S = minibatch.mask.shape[0]
    size = min(config.minibatch_size or S, S)
    # whole micro-batches: rows beyond the end repeat real ones without their actions
    rows = jnp.arange(-(-S // size) * size)
    cut = lambda x: x[rows % S].reshape(-1, size, *x.shape[1:])  # noqa: E731
    parts = jax.tree.map(cut, minibatch)
    parts = parts.replace(mask=parts.mask & (rows < S).reshape(-1, size, 1))
    tokens = jnp.maximum(minibatch.mask.sum(), 1)
    if objective is not None:
        parts = (parts, jax.tree.map(cut, objective.weigh(minibatch)))
        prices = Prices(state.kl.coef, state.entropy.price)

    def objective_loss(params, part):
        batch, weights = part
        sums = objective.sums(evaluate(params, batch), batch, weights, prices)
        total = sums["losses/total_loss"]
        losses = {k: v * tokens for k, v in sums.items() if k.startswith("losses/")}
        return total, {**sums, **losses}

    def loss(params, part):
        if objective is not None:
            return objective_loss(params, part)
        seen = evaluate(params, part)
        sums = ppo_loss_sums(
            seen.logprobs,
            seen.values,
            part.old_logprobs,
            part.old_values,
            part.advantages,
            part.returns,
            part.mask,
            cliprange=config.cliprange,
            cliprange_value=config.cliprange_value,
            vf_coef=config.vf_coef,
            entropy=seen.entropy,
        )
        return sums["losses/total_loss"] / tokens, sums

    def accumulate(total, part):
        grads, sums = jax.grad(loss, has_aux=True)(state.params, part)
        return jax.tree.map(jnp.add, total, (grads, sums)), None

    if len(rows) == size:
        grads, sums = jax.grad(loss, has_aux=True)(
            state.params, jax.tree.map(lambda x: x[0], parts)
        )
    else:
        first = jax.tree.map(lambda x: x[0], parts)
        shapes = jax.eval_shape(jax.grad(loss, has_aux=True), state.params, first)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        (grads, sums), _ = jax.lax.scan(accumulate, zeros, parts)

    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    entropy = state.entropy
    if objective is not None:
        # without a token there is no entropy: NaN leaves the controller where it is
        mean = jnp.where(sums["count"] > 0, sums["policy/entropy"] / sums["count"], jnp.nan)
        entropy = objective.entropy.update(entropy, mean)
    new = PPOState(params, opt_state, state.kl, state.step + 1, entropy)
    sums["optimizer/grad_norm"] = optax.global_norm(grads).astype(jnp.float32)
    sums["optimizer/steps"] = jnp.ones((), jnp.float32)
    return new, sums


def ppo_step(
    state: PPOState,
    batch: PPOBatch,
    key: jax.Array,
    *,
    evaluate: Evaluate,
    optimizer: optax.GradientTransformation,
    kl: KLController,
    config: PPOConfig,
    objective: Objective | None = None,
) -> tuple[PPOState, dict[str, jax.Array]]:
    """Runs all updates of one batch: epochs, shuffled minibatches, micro-batches.

    Jit it with the state donated: `jax.jit(functools.partial(ppo_step, evaluate=..., ...),
    donate_argnums=0)`. Parameters that something else still needs (a reference) must be copies.

    Args:
      state: from `ppo_init` or the step before.
      batch: `B` samples; advantages are taken as they are, so whiten them before.
      key: consumed; shuffles the samples anew for every epoch.
      evaluate: `(params, batch) -> Evaluation`, for any subset of the batch's rows.
      optimizer: the optax chain that `ppo_init` was given.
      kl: the KL controller, updated once with the mean of `batch.kl` over the `B` samples.
      config: see `PPOConfig`; with an objective its ranges and vf_coef are not read.
      objective: what to minimise, from `make_objective`; None: the PPO loss. The state must come
        from `ppo_init` with the same.

    Returns:
      The new state and metrics: scalars, means over the tokens of all optimizer steps taken.
    """
    B = batch.mask.shape[0]
    size = min(config.batch_size, B)

    def update(carry, rows):
        state, stopped = carry
        minibatch = jax.tree.map(lambda x: x[rows], batch)
        new, sums = ppo_update(
            state,
            minibatch,
            evaluate=evaluate,
            optimizer=optimizer,
            config=config,
            objective=objective,
        )
        if config.approx_kl_stop is not None:
            limit = config.approx_kl_stop * sums["count"]
            stopped = stopped | (sums["policy/approx_kl"] > limit)
            new = jax.tree.map(lambda old, x: jnp.where(stopped, old, x), state, new)
            sums = jax.tree.map(lambda x: jnp.where(stopped, jnp.zeros_like(x), x), sums)
        return (new, stopped), sums

    def epoch(carry, epoch_key):
        order = jax.random.permutation(epoch_key, B)
        whole = B // size * size
        carry, sums = jax.lax.scan(update, carry, order[:whole].reshape(-1, size))
        sums = jax.tree.map(lambda x: x.sum(0), sums)
        if whole < B:
            carry, rest = update(carry, order[whole:])
            sums = jax.tree.map(jnp.add, sums, rest)
        return carry, sums

    start = (state, jnp.zeros((), bool))
    (state, _), sums = jax.lax.scan(epoch, start, jax.random.split(key, config.ppo_epochs))
    state = state._replace(kl=kl.update(state.kl, batch.kl.mean(), B))
    sums = jax.tree.map(lambda x: x.sum(0), sums)
    steps = sums.pop("optimizer/steps")
    grad_norm = sums.pop("optimizer/grad_norm") / jnp.maximum(steps, 1)
    metrics = finish_metrics(sums)
    return state, {**metrics, "optimizer/grad_norm": grad_norm, "optimizer/steps": steps}
