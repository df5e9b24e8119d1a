"""The compiled functions of a run. Each is traced once: shapes never change from cycle to cycle."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from jaxppo import config as configs
from jaxppo.core.batch import Evaluation
from jaxppo.core.kl import KLController, adaptive_kl, fixed_kl
from jaxppo.experience import Rollout, make_evaluate, make_experience
from jaxppo.models import Model
from jaxppo.optim import make_optimizer, make_schedule
from jaxppo.ppo import PPOConfig, ppo_step
from jaxppo.rewards.scaling import scale_scores
from jaxppo.sampling import sample


class Scored(NamedTuple):
    """What policy and reference think of sampled tokens.

    old: the policy's evaluation, `[B, N]` each.
    ref_logprobs: `[B, N]`, the reference's log-probs of the same tokens, same transform.
    gap: `[B]`, the largest difference of a row's log-probs between sampler and scorer.
    """

    old: Evaluation
    ref_logprobs: jax.Array
    gap: jax.Array


class Programs(NamedTuple):
    """Jitted functions; `R` rollouts of a cycle, `B` rows of a chunk.

    generate, generate_eval: `(params, key, prompts, prompt_mask, row_ids) -> Samples`, with the
      options of rollouts and of evaluations.
    score: `(params, ref_params, rollout, sampler_logprobs) -> Scored`; log-probs are those of the
      distribution that `generate` samples from.
    experience: `(rollout, grid, totals, scaling, scored, kl_coef) -> (batch, scaling, metrics)`.
    update: `(state, batch, key) -> (state, metrics)`; the state is donated.
    optimizer, kl: what the state is made with.
    learning_rate: `(step) -> rate`.
    same_sampling: whether evaluations sample as rollouts do, so that `score` fits them too.
    """

    generate: Callable
    generate_eval: Callable
    score: Callable
    experience: Callable
    update: Callable
    optimizer: optax.GradientTransformation
    kl: KLController
    learning_rate: optax.Schedule
    same_sampling: bool


def make_programs(
    config: ConfigDict, model: Model, *, eos_ids: tuple[int, ...], pad_id: int, stops
) -> Programs:
    """Builds the functions of a run. Compiles nothing yet.

    Args:
      config: a valid config.
      model: the policy's (and reference's) architecture.
      eos_ids: the model's own ids that end a response; the config's take precedence.
      pad_id: what fills up responses.
      stops: from `stop_table`, or None.
    """
    options = {}
    for rollouts in (True, False):
        kwargs = configs.rollout_kwargs(config) if rollouts else configs.eval_kwargs(config)
        ids = configs.stop_ids(config, rollouts=rollouts)
        options[rollouts] = {**kwargs, "eos_ids": eos_ids if ids is None else ids}
    same = options[True] == options[False]

    def generator(options):
        def generate(params, key, prompts, prompt_mask, row_ids):
            return sample(
                params, key, prompts, prompt_mask,
                model=model, pad_id=pad_id, stops=stops, row_ids=row_ids, **options,
            )  # fmt: skip

        return jax.jit(generate)

    generate = generator(options[True])
    policy = {key: value for key, value in options[True].items() if key != "max_new_tokens"}
    evaluate = make_evaluate(model, **policy)

    def score(params, ref_params, rollout: Rollout, sampler_logprobs):
        old = evaluate(params, rollout)
        difference = jnp.where(rollout.mask, jnp.abs(old.logprobs - sampler_logprobs), 0.0)
        return Scored(old, evaluate(ref_params, rollout).logprobs, difference.max(1))

    method = config.method

    def experience(rollout, grid, totals, scaling, scored: Scored, kl_coef):
        grid, scaling, scores = scale_scores(
            grid, totals, scaling, mode=method.scale_reward, clip=method.cliprange_reward
        )
        batch, metrics = make_experience(
            rollout,
            grid,
            scored.old,
            scored.ref_logprobs,
            kl_coef=kl_coef,
            gamma=method.gamma,
            lam=method.lam,
            kl_estimator=method.kl_estimator,
            whiten_advantages=method.whiten_advantages,
        )
        metrics = {**scores, **metrics, "rollout/logprob_gap": scored.gap.max()}
        return batch, scaling, metrics

    kl = (
        fixed_kl(method.init_kl_coef)
        if method.target is None
        else adaptive_kl(method.init_kl_coef, method.target, method.horizon)
    )
    o, s = config.optimizer, config.scheduler
    schedule = make_schedule(s.name, configs.scheduler_kwargs(config), o.kwargs.lr, s.warmup_steps)
    optimizer = make_optimizer(o.name, configs.optimizer_kwargs(config), schedule, o.max_grad_norm)
    update = partial(
        ppo_step,
        evaluate=evaluate,
        optimizer=optimizer,
        kl=kl,
        config=PPOConfig(
            ppo_epochs=method.ppo_epochs,
            batch_size=config.train.batch_size,
            minibatch_size=config.train.minibatch_size,
            cliprange=method.cliprange,
            cliprange_value=method.cliprange_value,
            vf_coef=method.vf_coef,
            approx_kl_stop=method.approx_kl_stop,
        ),
    )
    return Programs(
        generate=generate,
        generate_eval=generate if same else generator(options[False]),
        score=jax.jit(score),
        experience=jax.jit(experience),
        update=jax.jit(update, donate_argnums=0),
        optimizer=optimizer,
        kl=kl,
        learning_rate=schedule,
        same_sampling=same,
    )


def memory_lines(
    config: ConfigDict, model: Model, params: Any, programs: Programs, width: int
) -> list[tuple[str, str]]:
    """Estimates the memory of a run before anything is compiled, as lines for the plan.

    Parameters, optimizer state and cache are exact; activations are what a transformer's backward
    pass keeps of each token, to within some tens of percent.
    """
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    c = model.config
    policy, state = size(params), size(jax.eval_shape(programs.optimizer.init, params))
    new = configs.rollout_kwargs(config)["max_new_tokens"]
    tokens = width + new
    rows = config.train.minibatch_size or config.train.batch_size
    cache = 2 * config.method.chunk_size * c.layers * c.width * tokens * 4
    block = 10 * c.width + 3 * c.mlp_width + 2 * c.heads * tokens
    activations = rows * tokens * c.layers * block * 4 + 3 * 2**24 * 4
    parts = {
        "policy": policy,
        "reference": size({k: v for k, v in params.items() if k != "value_head"}),
        "gradients": policy,
        "optimizer": state,
        "activations": activations,
        "cache": cache,
    }
    detail = ", ".join(f"{name} {amount / 2**20:,.0f}" for name, amount in parts.items())
    count = sum(x.size for x in jax.tree.leaves(params))
    return [
        ("parameters", f"{count / 1e6:,.1f} million"),
        ("memory", f"about {sum(parts.values()) / 2**20:,.0f} MiB ({detail})"),
    ]
