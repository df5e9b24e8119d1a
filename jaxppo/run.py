"""Preparing a run: what is loaded and checked before it, and where it stands.

Everything that can be refused is refused here, before the run folder is touched.
"""

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from jaxppo import checkpoint, tracking
from jaxppo import config as configs
from jaxppo.collect import Task
from jaxppo.environments import converse
from jaxppo.models import (
    Model,
    ModelError,
    eos_ids,
    load_pretrained,
    load_tokenizer,
)
from jaxppo.models.trainable import without_heads
from jaxppo.policy import Policy, make_policy
from jaxppo.ppo import PPOState, ppo_init
from jaxppo.programs import Programs, make_programs, memory_lines
from jaxppo.prompts import PromptError, Prompts, prepare, take
from jaxppo.refill import empty_surplus
from jaxppo.rewards.scaling import ScalingState, init_scaling
from jaxppo.rewards.scoring import as_rewards
from jaxppo.sampling import is_truncating, stop_table


class LoopState(NamedTuple):
    """Everything that a cycle changes; what a checkpoint holds.

    surplus: samples for the next cycle, with dynamic sampling; else `()`.
    """

    ppo: PPOState
    scaling: ScalingState
    surplus: Any = ()


class Progress(NamedTuple):
    """Where a run stands; the part of a checkpoint that is JSON.

    cycle: cycles completed.
    step: optimizer steps completed.
    evaluated: the step of the newest evaluation, None before there was one.
    best: the best evaluation reward so far.
    first: figures of the evaluation before training.
    last: figures of the newest evaluation.
    drawn: with dynamic sampling, how many cycles' worth of prompts were sampled.
    """

    cycle: int = 0
    step: int = 0
    evaluated: int | None = None
    best: float | None = None
    first: dict | None = None
    last: dict | None = None
    drawn: int = 0


class Keys(NamedTuple):
    """One key a purpose; those of cycles and evaluations are folded with cycle or step."""

    value_head: jax.Array
    rollouts: jax.Array
    updates: jax.Array
    evaluations: jax.Array


class Run(NamedTuple):
    """What stays the same throughout a run.

    sampling: what `collect` is told for rollouts and evaluations alike.
    policy: architectures, modes and frozen parameters.
    score: `(trained, rollout, sampler_logprobs) -> Scored`, against the reference.
    reference: the fingerprint of the reference's parameters.
    began: by `time.perf_counter`, before anything was loaded.
    """

    config: ConfigDict
    plan: configs.Plan
    keys: Keys
    task: Task
    policy: Policy
    tokenizer: Any
    programs: Programs
    score: Callable
    prompts: Prompts
    eval_prompts: Prompts
    sampling: dict[str, Any]
    folder: Path
    reference: str
    sink: tracking.Sink
    console: Any
    began: float


def prepare_run(config: ConfigDict, task: Task, console) -> tuple[Run, LoopState, Progress]:
    """Loads, checks and plans; makes the run folder last, when nothing can be refused any more."""
    began = time.perf_counter()
    rewards = () if task.reward_fn is None else as_rewards(task.reward_fn)
    path = task.model_path or config.model.model_path
    if not path:
        raise configs.ConfigError("model.model_path is not set; name a model folder or hub id")
    model, params, tokenizer = load_pretrained(path)
    if model.score is not None:
        raise ModelError(f"{path} is a classifier; the policy must be a language model")
    if config.tokenizer.tokenizer_path:
        tokenizer = load_tokenizer(config.tokenizer.tokenizer_path)
    if tokenizer is None:
        raise ModelError(f"{path} holds no tokenizer; set tokenizer.tokenizer_path")
    conversing = task.environment is not None
    if conversing and config.method.decode_slots:
        raise configs.ConfigError(
            "method.decode_slots has no effect on conversations with an environment; leave it out"
        )
    new = configs.response_room(config, conversing)
    prompts, eval_prompts = _prompts(config, task, model, tokenizer, new)
    every = [*prompts.ids, *eval_prompts.ids]
    vocabulary = model.config.vocab_size
    if (highest := max(int(ids.max()) for ids in every)) >= vocabulary:
        raise ModelError(
            f"the tokenizer gives the id {highest}, but the model knows {vocabulary} tokens: they "
            "do not belong together"
        )
    width = max(map(len, every))
    pad_id = next(x for x in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if x is not None)
    for rollouts in (True, False):
        unknown = [i for i in configs.stop_ids(config, rollouts=rollouts) or () if i >= vocabulary]
        if unknown:
            raise configs.ConfigError(
                f"eos_token_id {unknown[0]} is not among the model's {vocabulary} tokens"
            )
    sequences = task.stop_sequences
    if not isinstance(sequences, list | tuple) or not all(isinstance(s, str) for s in sequences):
        raise configs.ConfigError(f"stop_sequences must be a list of strings, got {sequences!r}")
    try:
        stops = stop_table(tokenizer, sequences, vocabulary)
    except ValueError as error:  # an empty one, or half of a surrogate pair
        raise configs.ConfigError(f"stop_sequences can't be used: {error}") from None
    keys = Keys(*jax.random.split(jax.random.key(config.train.seed), 4))
    reference = checkpoint.fingerprint(without_heads(params))
    policy = make_policy(config, model, params, keys.value_head)
    programs = make_programs(
        config, policy, eos_ids=eos_ids(model, tokenizer), pad_id=pad_id, stops=stops,
        conversing=conversing,
    )  # fmt: skip
    plan = configs.plan(config, len(prompts.ids))
    lines = [("model", str(path)), *configs.plan_lines(plan, config)]
    lines += memory_lines(config, policy, programs, width)
    tracking.show_plan(console, "jaxppo", lines)

    state = LoopState(
        ppo_init(
            policy.trained,
            optimizer=programs.optimizer,
            kl=programs.kl,
            objective=programs.objective,
        ),
        init_scaling(config.method.ref_std, config.method.ref_mean),
    )
    if config.method.dynamic_rounds:
        kwargs = configs.rollout_kwargs(config)
        length = new if conversing else kwargs["max_new_tokens"]
        truncating = is_truncating(**{name: kwargs[name] for name in ("top_k", "top_p", "min_p")})
        state = state._replace(
            surplus=empty_surplus(
                plan.rollouts_per_cycle, width, length, kept=truncating, seen=conversing
            )
        )
    folder = Path(config.train.checkpoint_dir)
    policy = policy._replace(trained=None)  # the state's from here on, which gives them away
    state, progress = _resume(config, folder, state, reference, console)
    run = Run(
        config=config,
        plan=plan,
        keys=keys,
        task=task,
        policy=policy,
        tokenizer=tokenizer,
        programs=programs,
        score=lambda trained, *rest: programs.score(trained, policy.frozen, policy.initial, *rest),
        prompts=prompts,
        eval_prompts=eval_prompts,
        sampling={
            "task": task,
            "rewards": rewards,
            "tokenizer": tokenizer,
            "chunk_size": config.method.chunk_size,
            "width": width,
            "pad_id": pad_id,
            "slots": config.method.decode_slots,
            "overlap": config.train.overlap_rewards,
            "converse": conversing
            and partial(
                converse,
                task.environment,
                max_turns=config.environment.max_turns,
                action_tokens=configs.longest_action(config),
                observation_tokens=config.environment.observation_tokens,
                prompt_width=width,
                tokenizer=tokenizer,
                pad_id=pad_id,
                stop_sequences=sequences,
            ),
        },
        folder=folder,
        reference=reference,
        sink=_sinks(config, folder, progress),
        console=console,
        began=began,
    )
    return run, state, progress


def _prompts(config, task: Task, model: Model, tokenizer, new: int) -> tuple[Prompts, Prompts]:
    """Tokenises prompts and evaluation prompts; too long ones are refused or cut."""
    positions = model.config.max_positions
    room = min(config.train.seq_length, positions) - new
    if room < 1:
        raise configs.ConfigError(
            f"{new} tokens of a response or conversation leave no room for a prompt in the "
            f"{min(config.train.seq_length, positions)} of train.seq_length and the model; lower "
            "method.gen_kwargs.max_new_tokens, or environment.max_turns and observation_tokens"
        )
    truncate = config.tokenizer.truncation_side if config.tokenizer.truncate_prompts else None
    given = task.prompts
    if given is None:
        if tokenizer.bos_token is None:
            raise PromptError(
                "there are no prompts, and the tokenizer has no BOS token to begin with"
            )
        given = [tokenizer.bos_token] * config.train.batch_size
    prepared = prepare(given, tokenizer, max_tokens=room, truncate=truncate)
    if task.eval_prompts is None:
        count = min(len(prepared.ids), config.method.chunk_size)
        return prepared, take(prepared, range(count))
    return prepared, prepare(task.eval_prompts, tokenizer, max_tokens=room, truncate=truncate)


def _resume(
    config: ConfigDict, folder: Path, state: LoopState, reference: str, console
) -> tuple[LoopState, Progress]:
    """Goes on from the newest checkpoint in the run folder, or begins a new run in it."""
    step = checkpoint.latest_step(folder / "checkpoints")
    begun, finished = ((folder / name).exists() for name in ("metrics.jsonl", "summary.json"))
    if (step is not None or begun) and not config.train.resume:
        raise configs.ConfigError(
            f"{folder} already holds a run; choose another --workdir, or set train.resume to True"
        )
    if step is None and finished:
        raise configs.ConfigError(
            f"{folder} holds a finished run without a checkpoint to go on from; choose another "
            "--workdir (train.checkpoint_dir)"
        )
    progress = Progress()
    text, recorded = configs.to_json(config), folder / "config.json"
    if step is not None:
        state, progress = _restore(folder, step, state, reference)
        console.print(f"continuing in {folder} after cycle {progress.cycle} (step {step})")
        if progress.cycle >= configs.plan(config, 1).cycles:
            console.print(
                "it is complete: for more, raise train.epochs or train.total_steps; for a new run, "
                "choose another --workdir (train.checkpoint_dir)"
            )
        try:
            before = json.loads(recorded.read_text(encoding="utf-8"))
            changed = _changed(before, json.loads(text))
        except (OSError, ValueError, AttributeError):
            changed = [f"unknown, since {recorded} can't be read"]
        if changed:
            console.print(f"options changed since then: {', '.join(changed)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint.forget_after(folder / "best", -1 if step is None else step)
        part = recorded.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        part.replace(recorded)
    except OSError as error:
        raise checkpoint.CheckpointError(f"the run folder can't be written: {error}") from error
    return state, progress


def _restore(
    folder: Path, step: int, state: LoopState, reference: str
) -> tuple[LoopState, Progress]:
    """Reads a checkpoint, and refuses one whose run was held near another model."""
    state, meta = checkpoint.restore(folder / "checkpoints", step, state)
    try:
        progress, began_with = Progress(**meta["progress"]), meta["reference"]
    except (KeyError, TypeError) as error:
        raise checkpoint.CheckpointError(
            f"checkpoint {folder / 'checkpoints' / str(step)} lacks {error}: it is damaged or not "
            "of this version; choose another --workdir or remove it"
        ) from None
    if began_with != reference:
        raise configs.ConfigError(
            f"the run in {folder} began with other weights than this model's: choose another "
            "--workdir (train.checkpoint_dir), or the model that it began with"
        )
    return state, progress


def _sinks(config: ConfigDict, folder: Path, progress: Progress) -> tracking.Sink:
    """JSON lines, and the tracker that was asked for."""
    train = config.train
    resume_step = None if progress.evaluated is None else progress.step
    evaluated = progress.evaluated == progress.step
    sinks = [tracking.json_lines(folder, resume_step=resume_step, evaluated=evaluated)]
    if train.tracker == "tensorboard":
        sinks.append(tracking.tensorboard(folder / "tensorboard", resume_step=resume_step))
    elif train.tracker == "wandb":
        sinks.append(
            tracking.wandb_sink(
                project=train.project_name,
                name=train.run_name,
                entity=train.entity_name,
                group=train.group_name,
                tags=train.tags,
                dir=folder,
                config=config.to_dict(),
                resume_step=resume_step,
            )
        )
    return tracking.combine(sinks)


def _changed(old: dict, new: dict, prefix: str = "") -> list[str]:
    """Dotted names of the options in which two configs differ."""
    names = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            names += _changed(before, after, f"{prefix}{key}.")
        elif before != after:
            names.append(prefix + key)
    return names
