"""The training loop, and `train(...)` for Python callers."""

import itertools
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from jaxppo import checkpoint, tracking
from jaxppo import config as configs
from jaxppo.collect import Collected, Task, collect
from jaxppo.environments import Environment
from jaxppo.evaluation import evaluate
from jaxppo.experience import Rollout
from jaxppo.models import Model, ModelError, save_adapter, save_pretrained
from jaxppo.programs import Scored
from jaxppo.prompts import PromptError, prompt_indices, take
from jaxppo.refill import refill
from jaxppo.rewards.functions import RewardError
from jaxppo.rewards.model import reward_model
from jaxppo.rewards.scoring import Reward
from jaxppo.run import LoopState, Progress, Run, prepare_run


class TrainingError(RuntimeError):
    """Training can't go on, and why."""


USER_ERRORS = (
    configs.ConfigError,
    ModelError,
    PromptError,
    RewardError,
    TrainingError,
    checkpoint.CheckpointError,
    tracking.TrackerError,
)


@dataclass(frozen=True)
class Trained:
    """A finished run.

    model, params, tokenizer: the policy as it ended, adapters merged; `params` includes the value
      head where it reads the policy's own states.
    summary: figures before and after training.
    folder: metrics, samples, checkpoints, and the exports `model/` and `best_model/`.
    """

    model: Model
    params: Any
    tokenizer: Any
    summary: dict[str, dict[str, float]]
    folder: Path

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes a folder that `transformers` opens."""
        save_pretrained(directory, self.model, self.params, self.tokenizer)


def train(
    model_path: str | os.PathLike | None = None,
    reward_fn: Callable | Reward | Sequence | None = None,
    prompts: Sequence | None = None,
    eval_prompts: Sequence | None = None,
    metric_fn: Callable | None = None,
    config: ConfigDict | dict | None = None,
    stop_sequences: Sequence[str] = (),
    *,
    environment: Callable[[], Environment] | None = None,
    console=None,
) -> Trained:
    """Tunes a language model with PPO on a live reward. The arguments are trlx's.

    Args:
      model_path: a checkpoint folder or a hub id; takes the place of `config.model.model_path`.
      reward_fn: `(samples, prompts, outputs, tokenizer, **columns) -> scores`, a float a sample
        or a list of floats a sample, one a token; a `Reward` with a name, a weight and a failure
        policy; or a list of these. None: the classifier `config.reward.model_path`.
      prompts: strings, dicts with a "prompt" and further columns for the functions, or chats.
        None: nothing but the BOS token.
      eval_prompts: as prompts; by default the first chunk of them.
      metric_fn: called as reward_fn is; returns `{name: values}`, logged at evaluations.
      config: overrides of `default_config()`, nested or dotted.
      stop_sequences: strings that end a response, and are cut off the text.
      environment: makes an `Environment`, with which the policy has a conversation on each prompt;
        see docs/environments.md. A reward function is not needed then.
      console: a rich console; None makes one on the standard output.

    Returns:
      The trained policy and the run's figures. With a folder in `config.train.checkpoint_dir`, the
      same call continues a run that was stopped, and a finished one returns at once; without, each
      call is a new run in `runs/`.

    Raises:
      ConfigError, PromptError, ModelError: before anything is written.
      RewardError, TrainingError, CheckpointError: what was complete by then is saved.
    """
    config = configs.make_config(config)
    if model_path is not None:
        config.model.model_path = str(model_path)
    if reward_fn is None and config.reward.model_path:
        reward_fn = configured_reward(config)
    if reward_fn is None and environment is None:
        raise configs.ConfigError(
            "there is no reward function; pass reward_fn=, a function of samples that returns "
            "one score each, or set reward.model_path to a classifier"
        )
    task = Task(
        prompts, reward_fn, eval_prompts, metric_fn, stop_sequences, environment=environment
    )
    return run_task(config, task, console=console)


def configured_reward(config: ConfigDict) -> Callable:
    """The reward model that the config names."""
    r = config.reward
    label = int(r.label) if (r.label or "").isdigit() else r.label
    return reward_model(r.model_path, label=label, output=r.output)


def run_task(config: ConfigDict, task: Task, *, console=None) -> Trained:
    """Does what `train` does, for a `Task` and a whole config; `main` calls it too."""
    config = configs.make_config(config)
    configs.validate(config)
    if config.train.checkpoint_dir is None:  # a new folder each time: nothing to resume
        config.train.checkpoint_dir = _new_folder()
    console = console or tracking.make_console()
    tracking.use_compile_cache(config.train.compile_cache)
    run, state, progress = prepare_run(config, task, console)
    compiles = tracking.count_compiles()
    try:
        state, progress = _loop(run, state, progress, compiles)
    finally:
        run.sink.close()
    return _finish(run, state, progress)


def _new_folder() -> str:
    """The name of a folder in runs/ that is not there yet, after the time."""
    name = time.strftime("runs/%Y%m%d-%H%M%S")
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(1)))
    return next(name for name in names if not Path(name).exists())


def _loop(
    run: Run, state: LoopState, progress: Progress, compiles: Callable[[], int]
) -> tuple[LoopState, Progress]:
    """Trains until the plan is done. Every cycle is a function of (seed, cycle) and the state."""
    train, plan = run.config.train, run.plan
    saved, unlogged, first = progress.cycle, None, progress.cycle
    try:
        while True:
            if unlogged is not None:
                _log(run, progress, unlogged, compiles, first=progress.cycle == first + 1)
                unlogged = None
            before = progress.step - plan.optimizer_steps_per_cycle
            done = progress.cycle >= plan.cycles
            edge = done or progress.cycle == 0
            if progress.evaluated != progress.step and (
                edge or configs.due(train.eval_interval, before, progress.step)
            ):
                progress = evaluate(run, state, progress)
            if saved != progress.cycle and (
                edge or configs.due(train.checkpoint_interval, before, progress.step)
            ):
                _save(run, state, progress)
                saved = progress.cycle
            if done:
                return state, progress
            traced = train.profile and progress.cycle == first + 1  # compiled by then
            with jax.profiler.trace(str(run.folder / "profile")) if traced else nullcontext():
                (state, progress), unlogged = _cycle(run, state, progress)
                if traced:
                    jax.block_until_ready(state)
    except (Exception, KeyboardInterrupt) as error:
        # what is complete is worth keeping, unless it is what failed
        whole = not any(x.is_deleted() for x in jax.tree.leaves(state))
        if isinstance(error, RewardError):
            error = _keep_rollouts(run, progress, error)
        if whole and saved != progress.cycle and not isinstance(error, TrainingError):
            if unlogged is not None:
                _log(run, progress, unlogged, compiles)
            _save(run, state, progress)
        raise error


def _keep_rollouts(run: Run, progress: Progress, error: RewardError) -> RewardError:
    """Writes the samples that a reward failed on, and says where they are."""
    if not error.rollouts:
        return error
    path = run.folder / "failed_rollouts.jsonl"
    where = {"cycle": progress.cycle + 1, "step": progress.step, "error": str(error)}
    lines = [json.dumps(where | row, default=str) + "\n" for row in error.rollouts]
    with suppress(OSError), path.open("a", encoding="utf-8") as file:
        file.writelines(lines)
        told = RewardError(f"{error}; its {len(lines)} samples are in {path}")
        told.__cause__ = error
        return told
    return error


class _Dispatched(NamedTuple):
    """A cycle's figures, some still being computed, and when it and its updates began."""

    row: dict
    began: float
    updating: float


def _cycle(
    run: Run, state: LoopState, progress: Progress
) -> tuple[tuple[LoopState, Progress], _Dispatched]:
    """Rollouts, rewards, experience, updates. Returns once the updates are dispatched.

    The old state's buffers are then gone; the new state is whole as soon as it exists.
    """
    plan, programs, keys, cycle = run.plan, run.programs, run.keys, progress.cycle
    began = time.perf_counter()
    size = run.config.method.group_size
    groups = plan.rollouts_per_cycle // size
    key = jax.random.fold_in(keys.rollouts, cycle)
    surplus, drawn = state.surplus, 1
    if run.config.method.dynamic_rounds:
        collected, surplus, drawn = refill(
            lambda turn: _draw(
                run, state, progress, progress.drawn + turn, jax.random.fold_in(key, turn)
            ),
            lambda rollout: _rescore(run, state, rollout),
            state.surplus,
            size=size,
            rounds=run.config.method.dynamic_rounds,
        )
    else:
        collected = _draw(run, state, progress, cycle, key)
    if not collected.present.any():
        raise RewardError(f"no sample of cycle {cycle + 1} has a score: look at the rewards")
    coef = jnp.copy(state.ppo.kl.coef)
    batch, scaling, row = programs.experience(
        collected.rollout,
        jnp.asarray(collected.grid),
        jnp.asarray(collected.totals),
        jnp.asarray(collected.present),
        jnp.asarray(collected.ended),
        jnp.repeat(jnp.arange(groups), size),
        state.scaling,
        collected.scored,
        coef,
        cycle,
        collected.behaviour,
        collected.baseline,
    )
    row |= {
        "kl_ctl_value": coef,
        "learning_rate_group_0": programs.learning_rate(state.ppo.step),
    }
    updating = time.perf_counter()
    key = jax.random.fold_in(keys.updates, cycle)
    ppo, metrics = programs.update(state.ppo, run.policy.frozen, run.policy.initial, batch, key)
    row |= metrics | collected.stats | collected.times
    row["perf/tokens_per_s"] = collected.rollout.mask.sum()
    progress = progress._replace(
        cycle=cycle + 1,
        step=progress.step + plan.optimizer_steps_per_cycle,
        drawn=progress.drawn + drawn,
    )
    return (LoopState(ppo, scaling, surplus), progress), _Dispatched(row, began, updating)


def _draw(run: Run, state: LoopState, progress: Progress, batch: int, key: jax.Array) -> Collected:
    """A cycle's samples of the prompts of a batch; those of one prompt stand together."""
    plan, programs, size = run.plan, run.programs, run.config.method.group_size
    groups = plan.rollouts_per_cycle // size
    distinct = prompt_indices(len(run.prompts.ids), batch, groups, run.config.train.seed)
    common = {"trained": state.ppo.params, "policy": run.policy, "key": key, **run.sampling}
    name = f"cycle {progress.cycle + 1} rollouts"
    with tracking.phase(run.console, name, plan.chunks_per_cycle) as advance:
        collected = collect(
            prompts=take(run.prompts, np.repeat(distinct, size)),
            generate=programs.generate,
            stream=programs.stream,
            score=run.score,
            on_chunk=advance,
            **common,
        )
    if run.config.method.name != "remax":
        return collected
    greedy = collect(
        prompts=take(run.prompts, distinct), generate=programs.generate_greedy, score=None, **common
    )
    stats = dict(collected.stats)
    if greedy.present.any():
        stats["rollout/greedy_score"] = float(greedy.totals[greedy.present].mean())
    return collected._replace(
        baseline=np.repeat(greedy.totals, size),
        present=collected.present & np.repeat(greedy.present, size),
        stats=stats,
    )


def _rescore(run: Run, state: LoopState, rollout: Rollout) -> Scored:
    """What the weights of now think of samples that older ones drew, chunk by chunk."""
    size = run.config.method.chunk_size
    parts = [
        run.score(
            state.ppo.params,
            jax.tree.map(lambda x, at=at: x[at : at + size], rollout),
            jnp.zeros((size, rollout.tokens.shape[1])),
        )
        for at in range(0, len(rollout.tokens), size)
    ]
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)


def _log(
    run: Run,
    progress: Progress,
    dispatched: _Dispatched,
    compiles: Callable[[], int],
    *,
    first: bool = False,
) -> None:
    """Waits for a cycle's figures, checks and records them; the first time, the start-up too."""
    with tracking.phase(run.console, f"cycle {progress.cycle} updates", None):
        row = {name: float(x) for name, x in jax.device_get(dispatched.row).items()}
    now = time.perf_counter()
    row["time/update"] = now - dispatched.updating
    row["time/cycle"] = now - dispatched.began
    row["perf/tokens_per_s"] /= row["time/cycle"]
    row["perf/compiles"] = compiles()
    if first:
        row["time/to_first_update"] = now - run.began
    _check_finite(row, progress.step, run)
    run.sink.write(progress.step, row)
    tracking.cycle_line(run.console, progress.cycle, run.plan.cycles, progress.step, row)


def _check_finite(row: dict[str, float], step: int, run: Run) -> None:
    """Stops the run, naming the figures that are not finite."""
    bad = [name for name, value in row.items() if not math.isfinite(value)]
    if bad:
        raise TrainingError(
            f"{', '.join(sorted(bad))} became nan or infinite at step {step}; earlier checkpoints "
            f"are in {run.folder}: lower the learning rate or look at the rewards, then run again"
        )


def _save(run: Run, state: LoopState, progress: Progress) -> None:
    if run.config.train.save_optimizer:
        checkpoint.save(
            run.folder / "checkpoints",
            progress.step,
            state,
            {"progress": progress._asdict(), "reference": run.reference},
            keep=run.config.train.keep_checkpoints,
        )


def _finish(run: Run, state: LoopState, progress: Progress) -> Trained:
    """Exports the last and the best policy, and writes and shows the figures before and after."""
    policy, trained = run.policy, state.ppo.params
    params = policy.exported(trained)
    save_pretrained(run.folder / "model", policy.model, params, run.tokenizer)
    if run.config.model.lora.rank:
        base = run.task.model_path or run.config.model.model_path
        save_adapter(run.folder / "adapter", policy.model, policy.merged(trained), base=base)
    best = checkpoint.latest_step(run.folder / "best")
    if best is not None:
        best_trained, _ = checkpoint.restore(run.folder / "best", best, trained)
        best_params = policy.exported(best_trained)
        save_pretrained(run.folder / "best_model", policy.model, best_params, run.tokenizer)
    summary = {
        name: {"before": progress.first[name], "after": progress.last[name]}
        for name in progress.first
        if name in progress.last
    }
    text = json.dumps(summary, indent=2) + "\n"
    (run.folder / "summary.json").write_text(text, encoding="utf-8")
    rows = [(name, x["before"], x["after"]) for name, x in summary.items()]
    tracking.show_summary(run.console, f"{progress.step} optimizer steps", rows)
    run.console.print(f"figures and models are in {run.folder}", markup=False)
    return Trained(policy.model, params, run.tokenizer, summary, run.folder)
