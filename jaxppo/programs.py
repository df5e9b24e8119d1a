"""The compiled functions of a run. Each is traced once: shapes never change from cycle to cycle."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from jaxppo import config as configs
from jaxppo.core.batch import Evaluation, Objective
from jaxppo.core.corrections import truncated_importance
from jaxppo.core.entropy_bonus import adaptive_entropy, fixed_entropy
from jaxppo.core.kl import KLController, adaptive_kl, fixed_kl
from jaxppo.core.masks import missing_eos_penalty, overlong_penalty
from jaxppo.experience import (
    Rollout,
    last_action,
    make_evaluate,
    make_experience,
    make_method_experience,
    make_trunk,
)
from jaxppo.methods import Method
from jaxppo.models import merge
from jaxppo.models.trainable import without_heads
from jaxppo.objectives import make_objective
from jaxppo.optim import by_part, delayed, make_optimizer, make_schedule
from jaxppo.policy import Policy
from jaxppo.ppo import PPOConfig, ppo_step
from jaxppo.rewards.scaling import scale_baseline, scale_scores
from jaxppo.sampling import Options, Stream, make_stream, sample


class Scored(NamedTuple):
    """What policy and reference think of sampled tokens.

    old: the policy's evaluation, `[B, N]` each.
    ref_logprobs: `[B, N]`, the reference's log-probs of the same tokens, same transform.
    gap: `[B]`, the largest difference of a row's log-probs between sampler and scorer.
    trunk: states of the blocks that are not trained, for `Rollout.trunk`; None where all are.
    """

    old: Evaluation
    ref_logprobs: jax.Array
    gap: jax.Array
    trunk: jax.Array | None = None


class Programs(NamedTuple):
    """Jitted functions; `R` rollouts of a cycle, `B` rows of a chunk.

    generate, generate_eval: `(params, key, prompts, prompt_mask, row_ids) -> Samples`, with the
      options of rollouts and of evaluations.
    stream, stream_eval: the same as continuous batching, with `method.decode_slots`.
    score: `(trained, frozen, initial, rollout, sampler_logprobs) -> Scored`, trees as in `Policy`;
      log-probs are those of the distribution that `generate` samples from.
    generate_greedy: as `generate`, of the most probable tokens.
    experience: `(rollout, grid, totals, present, ended, groups, scaling, scored, kl_coef, cycle,
      behaviour=None, baseline=None) -> (batch, scaling, metrics)`; samples that are not present
      have no influence, the last two are those of `Collected`.
    update: `(state, frozen, initial, batch, key) -> (state, metrics)`; the state is donated.
    optimizer, kl, objective: what the state is made with.
    learning_rate: `(step) -> rate`.
    same_sampling: whether evaluations sample as rollouts do, so that `score` fits them too.
    """

    generate: Callable
    generate_eval: Callable
    stream: Stream | None
    stream_eval: Stream | None
    score: Callable
    generate_greedy: Callable
    experience: Callable
    update: Callable
    optimizer: optax.GradientTransformation
    kl: KLController
    objective: Objective | None
    learning_rate: optax.Schedule
    same_sampling: bool


def make_programs(
    config: ConfigDict,
    policy: Policy,
    *,
    eos_ids: tuple[int, ...],
    pad_id: int,
    stops,
    conversing: bool = False,
) -> Programs:
    """Builds the functions of a run. Compiles nothing yet.

    Args:
      config: a valid config.
      policy: architectures and modes; its parameters are not read.
      eos_ids: the model's own ids that end a response; the config's take precedence.
      pad_id: what fills up responses.
      stops: from `stop_table`, or None.
      conversing: whether there is an environment, so that a response is several actions.
    """
    model = policy.model
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

    def streamer(options):
        if config.method.decode_slots is None:
            return None
        return make_stream(model, Options(pad_id=pad_id, stops=stops, **options))

    generate, stream = generator(options[True]), streamer(options[True])
    greedy = {**options[True], "temperature": 0.0}
    drawn = {key: value for key, value in options[True].items() if key != "max_new_tokens"}
    evaluate = make_evaluate(model, trunk_layers=policy.trunk_layers, critic=policy.critic, **drawn)
    trunk = make_trunk(model, policy.trunk_layers) if policy.trunk_layers else None

    def score(trained, frozen, initial, rollout: Rollout, sampler_logprobs):
        if trunk is not None:  # shared by policy and reference
            rollout = rollout._replace(trunk=trunk(frozen, rollout))
        old = evaluate(merge(trained, frozen), rollout)
        reference = evaluate(without_heads(merge(initial, frozen)), rollout)
        difference = jnp.where(rollout.mask, jnp.abs(old.logprobs - sampler_logprobs), 0.0)
        kept = rollout.trunk if config.train.cache_trunk else None
        return Scored(old, reference.logprobs, difference.max(1), kept)

    method, row = config.method, configs.row(config)
    plain = configs.plain_ppo(config)
    most = configs.rollout_kwargs(config)["max_new_tokens"]
    most *= config.environment.max_turns if conversing else 1  # tokens sampled
    objective = None if plain else _objective(config, row, most)

    def experience(
        rollout, grid, totals, present, ended, groups, scaling, scored: Scored, kl_coef, cycle,
        behaviour=None, baseline=None,
    ):  # fmt: skip
        rollout = rollout._replace(mask=rollout.mask & present[:, None])
        grid, scaling, scores = scale_scores(
            grid, totals, scaling, mode=method.scale_reward, clip=method.cliprange_reward,
            mask=rollout.mask, present=present,
        )  # fmt: skip
        if baseline is not None:
            baseline = scale_baseline(
                baseline, scaling, mode=method.scale_reward, clip=method.cliprange_reward
            )
        charge = jnp.zeros(len(totals))
        if method.overlong_buffer:
            charge += overlong_penalty(
                rollout.mask.sum(1), max_length=most, buffer=method.overlong_buffer
            )
        if method.missing_eos_penalty:
            charge += missing_eos_penalty(ended, penalty=method.missing_eos_penalty)
        if method.overlong_buffer or method.missing_eos_penalty:
            grid = grid + jnp.where(last_action(rollout.mask), charge[:, None], 0.0)
        arguments = (rollout._replace(trunk=scored.trunk), grid, scored.old, scored.ref_logprobs)
        common = {
            "kl_coef": kl_coef, "kl_estimator": method.kl_estimator, "present": present,
        }  # fmt: skip
        if plain:
            batch, metrics = make_experience(
                *arguments, gamma=method.gamma, lam=method.lam,
                whiten_advantages=method.whiten_advantages, **common,
            )  # fmt: skip
        else:
            batch, metrics = make_method_experience(
                *arguments, method=row, groups=groups if method.group_size > 1 else None,
                ended=ended if method.mask_truncated else None, step=cycle,
                baseline=baseline, **common,
            )  # fmt: skip
            batch = batch.replace(behaviour_logprobs=behaviour)
        metrics = {**scores, **metrics, "rollout/logprob_gap": scored.gap.max()}
        return batch, scaling, metrics

    kl = (
        fixed_kl(method.init_kl_coef)
        if method.target is None
        else adaptive_kl(method.init_kl_coef, method.target, method.horizon)
    )
    o, s = config.optimizer, config.scheduler
    schedule = make_schedule(s.name, configs.scheduler_kwargs(config), o.kwargs.lr, s.warmup_steps)
    kwargs = configs.optimizer_kwargs(config)
    optimizer = make_optimizer(o.name, kwargs, schedule, o.max_grad_norm)
    if o.critic_lr or config.train.critic_warmup_steps:
        steps = config.train.critic_warmup_steps
        rate = o.critic_lr or o.kwargs.lr
        critic = make_schedule(s.name, configs.scheduler_kwargs(config), rate, s.warmup_steps)
        schedule = delayed(schedule, steps)
        optimizer = by_part(
            make_optimizer(o.name, kwargs, schedule, o.max_grad_norm),
            make_optimizer(o.name, kwargs, critic, o.max_grad_norm),
        )
    settings = PPOConfig(
        ppo_epochs=method.ppo_epochs,
        batch_size=config.train.batch_size,
        minibatch_size=config.train.minibatch_size,
        cliprange=method.cliprange,
        cliprange_value=method.cliprange_value,
        vf_coef=method.vf_coef,
        approx_kl_stop=method.approx_kl_stop,
    )

    def update(state, frozen, initial, batch, key):
        def evaluate_now(trained, batch):
            exact = row.kl.loss == "exact"
            reference = without_heads(merge(initial, frozen)) if exact else None
            return evaluate(merge(trained, frozen), batch, reference)

        return ppo_step(
            state, batch, key, evaluate=evaluate_now,
            optimizer=optimizer, kl=kl, config=settings, objective=objective,
        )  # fmt: skip

    return Programs(
        generate=generate,
        generate_eval=generate if same else generator(options[False]),
        stream=stream,
        stream_eval=stream if same else streamer(options[False]),
        score=jax.jit(score),
        generate_greedy=generator(greedy),
        experience=jax.jit(experience),
        update=jax.jit(update, donate_argnums=0),
        optimizer=optimizer,
        kl=kl,
        objective=objective,
        learning_rate=schedule,
        same_sampling=same,
    )


def _objective(config: ConfigDict, row: Method, max_length: int) -> Objective:
    """The loss of a method with the config's prices."""
    m, entropy = config.method, None
    if m.entropy_target is not None:
        entropy = adaptive_entropy(m.entropy_target, init_coef=m.entropy_coef)
    elif m.entropy_coef:
        entropy = fixed_entropy(m.entropy_coef)
    return make_objective(
        row,
        max_length=max_length,
        vf_coef=m.vf_coef,
        cliprange_value=m.cliprange_value,
        entropy=entropy,
        entropy_share=m.entropy_share,
        off_policy_threshold=m.off_policy_threshold,
        importance=truncated_importance if m.dynamic_rounds else None,
    )


def memory_lines(
    config: ConfigDict, policy: Policy, programs: Programs, width: int
) -> list[tuple[str, str]]:
    """Estimates the memory of a run before anything is compiled, as lines for the plan.

    Parameters, optimizer state and cache are exact; activations are what a transformer's backward
    pass keeps of each token, to within some tens of percent.
    """
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    c = policy.model.config
    trained, frozen = size(policy.trained), size(policy.frozen)
    state = size(jax.eval_shape(programs.optimizer.init, policy.trained))
    new = configs.rollout_kwargs(config)["max_new_tokens"]
    tokens = width + new
    rows = config.train.minibatch_size or config.train.batch_size
    bytes_each = 2 if c.compute_dtype == "bfloat16" else 4
    cache = 2 * config.method.chunk_size * c.layers * c.cache_heads * c.head_size * tokens
    cache *= bytes_each
    block = 10 * c.width + 3 * c.mlp_width + 2 * c.heads * tokens
    deep = c.layers - policy.trunk_layers
    activations = rows * tokens * deep * block * bytes_each + 3 * 2**24 * 4
    trunk = 0
    if policy.trunk_layers and config.train.cache_trunk:
        trunk = configs.plan(config, 1).rollouts_per_cycle * tokens * c.width * bytes_each
    parts = {
        "policy": trained + frozen,
        "reference": size(policy.initial),
        "gradients": trained,
        "optimizer": state,
        "activations": activations,
        "trunk": trunk,
        "cache": cache,
    }
    detail = ", ".join(f"{name} {x / 2**20:,.0f}" for name, x in parts.items() if x)
    return [
        ("trained", policy.description),
        ("memory", f"about {sum(parts.values()) / 2**20:,.0f} MiB ({detail})"),
    ]
