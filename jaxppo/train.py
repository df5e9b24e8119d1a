"""The training loop, and `train(...)` for Python callers."""

import json
import math
import os
import time
from collections.abc import Callable, Sequence
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
from jaxppo.models import (
    Model,
    ModelError,
    eos_ids,
    init_value_head,
    load_pretrained,
    load_tokenizer,
    save_pretrained,
)
from jaxppo.ppo import PPOState, ppo_init
from jaxppo.programs import Programs, make_programs, memory_lines
from jaxppo.prompts import PromptError, Prompts, prepare, prompt_indices, take
from jaxppo.rewards.functions import RewardError, call_metric
from jaxppo.rewards.scaling import ScalingState, init_scaling
from jaxppo.sampling import stop_table


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


class LoopState(NamedTuple):
    """Everything that a cycle changes; what a checkpoint holds."""

    ppo: PPOState
    scaling: ScalingState


class Progress(NamedTuple):
    """Where a run stands; the part of a checkpoint that is JSON.

    cycle: cycles completed.
    step: optimizer steps completed.
    best: the best evaluation reward so far, None before there was one.
    first: figures of the evaluation before training.
    last: figures of the newest evaluation.
    """

    cycle: int = 0
    step: int = 0
    best: float | None = None
    first: dict | None = None
    last: dict | None = None


class Run(NamedTuple):
    """What stays the same throughout a run."""

    config: ConfigDict
    plan: configs.Plan
    task: Task
    model: Model
    ref_params: Any
    tokenizer: Any
    programs: Programs
    prompts: Prompts
    eval_prompts: Prompts
    width: int
    pad_id: int
    folder: Path
    sink: tracking.Sink
    console: Any


@dataclass(frozen=True)
class Trained:
    """A finished run.

    model, params, tokenizer: the policy as it ended; `params` includes the value head.
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
    reward_fn: Callable | None = None,
    prompts: Sequence | None = None,
    eval_prompts: Sequence | None = None,
    metric_fn: Callable | None = None,
    config: ConfigDict | dict | None = None,
    stop_sequences: Sequence[str] = (),
    *,
    console=None,
) -> Trained:
    """Tunes a language model with PPO on a live reward. The arguments are trlx's.

    Args:
      model_path: a checkpoint folder or a hub id; takes the place of `config.model.model_path`.
      reward_fn: `(samples, prompts, outputs, tokenizer, **columns) -> scores`, a float a sample
        or a list of floats a sample, one a token.
      prompts: strings, dicts with a "prompt" and further columns for the functions, or chats.
      eval_prompts: as prompts; by default the first chunk of them.
      metric_fn: called as reward_fn is; returns `{name: values}`, logged at evaluations.
      config: overrides of `default_config()`, nested or dotted.
      stop_sequences: strings that end a response, and are cut off the text.
      console: a rich console; None makes one on the standard output.

    Returns:
      The trained policy and the run's figures. Run again with the same arguments and run folder,
      a finished run returns at once, and an interrupted one goes on where it stopped.

    Raises:
      ConfigError, PromptError, ModelError: before anything is written.
      RewardError, TrainingError, CheckpointError: what was complete by then is saved.
    """
    config = configs.make_config(config)
    if model_path is not None:
        config.model.model_path = str(model_path)
    if prompts is None:
        raise configs.ConfigError("there are no prompts; pass a list of strings as prompts=")
    if not callable(reward_fn):
        raise configs.ConfigError(
            "there is no reward function; pass reward_fn=, a function of samples that returns "
            "one score each"
        )
    task = Task(prompts, reward_fn, eval_prompts, metric_fn, stop_sequences)
    return run_task(config, task, console=console)


def run_task(config: ConfigDict, task: Task, *, console=None) -> Trained:
    """Does what `train` does, for a `Task` and a whole config; `main` calls it too."""
    configs.validate(config)
    console = console or tracking.make_console()
    run, state, progress = _prepare(config, task, console)
    compiles = tracking.count_compiles()
    try:
        state, progress = _loop(run, state, progress, compiles)
    finally:
        run.sink.close()
    return _finish(run, state, progress)


def _loop(
    run: Run, state: LoopState, progress: Progress, compiles: Callable[[], int]
) -> tuple[LoopState, Progress]:
    """Trains until the plan is done. Every cycle is a function of (seed, cycle) and the state."""
    config, plan, programs = run.config, run.plan, run.programs
    _, _, rollout_key, update_key, eval_key = _keys(config)
    saved = progress.cycle
    pending = None  # figures of the newest cycle, still on the device

    def settle(pending):
        """Fetches a cycle's figures, checks and logs them."""
        if pending is not None:
            step, cycle, row = pending
            row = _finite({name: float(x) for name, x in jax.device_get(row).items()}, step, run)
            row["perf/compiles"] = compiles()
            run.sink.write(step, row)
            tracking.cycle_line(run.console, cycle, plan.cycles, step, row)

    try:
        if progress.cycle == 0 and progress.first is None:
            progress = _evaluate(run, state, progress, eval_key)
        while progress.cycle < plan.cycles:
            clock = time.perf_counter()
            cycle = progress.cycle
            indices = prompt_indices(
                len(run.prompts.ids), cycle, plan.rollouts_per_cycle, config.train.seed
            )
            with tracking.phase(
                run.console, f"cycle {cycle + 1} rollouts", plan.chunks_per_cycle
            ) as (advance):
                collected = collect(
                    state.ppo.params,
                    jax.random.fold_in(rollout_key, cycle),
                    take(run.prompts, indices),
                    generate=programs.generate,
                    score=lambda params, *rest: programs.score(params, run.ref_params, *rest),
                    **_settings(run),
                    on_chunk=advance,
                )
            settle(pending)
            coef = state.ppo.kl.coef
            batch, scaling, row = programs.experience(
                collected.rollout,
                jnp.asarray(collected.grid),
                jnp.asarray(collected.totals),
                state.scaling,
                collected.scored,
                coef,
            )
            row |= {
                "kl_ctl_value": jnp.copy(coef),
                "learning_rate_group_0": programs.learning_rate(state.ppo.step),
            }
            updating = time.perf_counter()
            # from here on, the old state's buffers are gone
            ppo, metrics = programs.update(state.ppo, batch, jax.random.fold_in(update_key, cycle))
            state = LoopState(ppo, scaling)
            with tracking.phase(run.console, f"cycle {cycle + 1} updates", None):
                jax.block_until_ready(ppo)
            now = time.perf_counter()
            row |= metrics | collected.stats | collected.times
            row |= {
                "time/update": now - updating,
                "time/cycle": now - clock,
                "perf/tokens_per_s": float(collected.rollout.mask.sum()) / (now - clock),
            }
            before, step = progress.step, progress.step + plan.optimizer_steps_per_cycle
            progress = progress._replace(cycle=cycle + 1, step=step)
            pending = (step, cycle + 1, row)
            last = progress.cycle == plan.cycles
            if last or configs.due(config.train.eval_interval, before, step):
                settle(pending)
                pending = None
                progress = _evaluate(run, state, progress, eval_key)
            if last or configs.due(config.train.checkpoint_interval, before, step):
                settle(pending)
                pending = None
                _save(run, state, progress)
                saved = progress.cycle
    except (Exception, KeyboardInterrupt) as error:
        # what is complete is worth keeping, unless it is what failed
        if progress.cycle > saved and not isinstance(error, TrainingError):
            settle(pending)
            _save(run, state, progress)
        raise
    return state, progress


def _prepare(config: ConfigDict, task: Task, console) -> tuple[Run, LoopState, Progress]:
    """Loads, checks and plans; makes the run folder last, when nothing can be refused any more."""
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
    new = max(
        kwargs["max_new_tokens"]
        for kwargs in (configs.rollout_kwargs(config), configs.eval_kwargs(config))
    )
    prompts, eval_prompts = _prompts(config, task, model, tokenizer, new)
    width = max(len(ids) for ids in [*prompts.ids, *eval_prompts.ids])
    pad_id = next(x for x in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if x is not None)
    stops = stop_table(tokenizer, task.stop_sequences, model.config.vocab_size)
    programs = make_programs(
        config, model, eos_ids=eos_ids(model, tokenizer), pad_id=pad_id, stops=stops
    )
    head_key, *_ = _keys(config)
    ref_params = {name: leaf for name, leaf in params.items() if name != "value_head"}
    # copies: the update donates its state's buffers, and the reference keeps its own
    params = jax.tree.map(jnp.copy, params)
    params.setdefault(
        "value_head", init_value_head(head_key, model.config.width, config.model.value_head)
    )
    plan = configs.plan(config, len(prompts.ids))
    lines = [("model", str(path)), *configs.plan_lines(plan, config)]
    lines += memory_lines(config, model, params, programs, width)
    tracking.show_plan(console, "jaxppo", lines)

    state = LoopState(
        ppo_init(params, optimizer=programs.optimizer, kl=programs.kl),
        init_scaling(config.method.ref_std),
    )
    folder = Path(config.train.checkpoint_dir)
    state, progress = _resume(config, folder, state, console)
    sinks = [tracking.json_lines(folder, resume_step=progress.step if progress.first else None)]
    if config.train.tracker == "tensorboard":
        sinks.append(tracking.tensorboard(folder / "tensorboard"))
    elif config.train.tracker == "wandb":
        t = config.train
        sinks.append(
            tracking.wandb_sink(
                project=t.project_name, name=t.run_name, entity=t.entity_name, group=t.group_name,
                tags=t.tags, dir=folder, config=config.to_dict(),
            )
        )  # fmt: skip
    run = Run(
        config=config,
        plan=plan,
        task=task,
        model=model,
        ref_params=ref_params,
        tokenizer=tokenizer,
        programs=programs,
        prompts=prompts,
        eval_prompts=eval_prompts,
        width=width,
        pad_id=pad_id,
        folder=folder,
        sink=tracking.combine(sinks),
        console=console,
    )
    return run, state, progress


def _prompts(config, task: Task, model: Model, tokenizer, new: int) -> tuple[Prompts, Prompts]:
    """Tokenises prompts and evaluation prompts; too long ones are refused or cut."""
    positions = model.config.max_positions
    room = min(config.train.seq_length, positions) - new
    if room < 1:
        raise configs.ConfigError(
            f"method.gen_kwargs.max_new_tokens {new} leaves no room for a prompt in the model's "
            f"{positions} positions; lower it"
        )
    truncate = config.tokenizer.truncation_side if config.tokenizer.truncate_prompts else None
    prepared = prepare(task.prompts, tokenizer, max_tokens=room, truncate=truncate)
    if task.eval_prompts is None:
        count = min(len(prepared.ids), config.method.chunk_size)
        return prepared, take(prepared, range(count))
    return prepared, prepare(task.eval_prompts, tokenizer, max_tokens=room, truncate=truncate)


def _resume(config, folder: Path, state: LoopState, console) -> tuple[LoopState, Progress]:
    """Goes on from the newest checkpoint in the run folder, or begins a new run in it."""
    text = configs.to_json(config)
    recorded = folder / "config.json"
    step = checkpoint.latest_step(folder / "checkpoints")
    if step is not None and not config.train.resume:
        raise configs.ConfigError(
            f"{folder} already holds a run; choose another --workdir, or set train.resume to True"
        )
    progress = Progress()
    if step is not None:
        state, meta = checkpoint.restore(folder / "checkpoints", step, state)
        progress = Progress(**meta["progress"])
        changed = _changed(json.loads(recorded.read_text(encoding="utf-8")), json.loads(text))
        console.print(f"continuing in {folder} after cycle {progress.cycle} (step {step})")
        if changed:
            console.print(f"options changed since then: {', '.join(changed)}", markup=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        recorded.write_text(text, encoding="utf-8")
    except OSError as error:
        raise checkpoint.CheckpointError(f"the run folder can't be written: {error}") from error
    return state, progress


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


def _settings(run: Run) -> dict:
    """What `collect` is told for rollouts and evaluations alike."""
    return {
        "task": run.task,
        "tokenizer": run.tokenizer,
        "chunk_size": run.config.method.chunk_size,
        "width": run.width,
        "pad_id": run.pad_id,
    }


def _evaluate(run: Run, state: LoopState, progress: Progress, eval_key) -> Progress:
    """Samples the evaluation prompts, logs figures and samples, and keeps the best policy."""
    config, programs = run.config, run.programs
    chunks = math.ceil(len(run.eval_prompts.ids) / config.method.chunk_size)
    score = lambda params, *rest: programs.score(params, run.ref_params, *rest)  # noqa: E731
    with tracking.phase(run.console, "evaluation", chunks) as advance:
        collected = collect(
            state.ppo.params,
            jax.random.fold_in(eval_key, progress.step),
            run.eval_prompts,
            generate=programs.generate_eval,
            score=score if programs.same_sampling else None,
            **_settings(run),
            on_chunk=advance,
        )
    row = {
        "reward/mean": float(collected.totals.mean()),
        "reward/std": float(collected.totals.std()),
    }
    table = {
        "prompt": collected.prompts,
        "output": collected.outputs,
        "reward": collected.totals.tolist(),
    }
    clock = time.perf_counter()
    if run.task.metric_fn is not None:
        metrics = call_metric(
            run.task.metric_fn,
            samples=collected.samples,
            prompts=collected.prompts,
            outputs=collected.outputs,
            columns=run.eval_prompts.columns,
            tokenizer=run.tokenizer,
        )
        for name, values in metrics.items():
            if isinstance(values, list):
                table[name] = values
            row[f"metrics/{name}"] = float(np.mean(values))
    row |= _distance(collected)
    row |= {name.replace("rollout/", "eval/"): x for name, x in collected.stats.items()}
    row.pop("padding_percentage")
    figures = dict(row)
    row["time/metric"] = time.perf_counter() - clock
    row["time/generate"] = collected.times["time/rollout_generate"]
    run.sink.write(progress.step, row)
    run.sink.samples(progress.step, table)
    title = f"step {progress.step}: reward {row['reward/mean']:.4g}"
    if "eval/kl" in row:
        title += f", KL {row['eval/kl']:.3g} nats"
    tracking.show_samples(run.console, title, table, rows=config.train.log_samples)
    progress = progress._replace(first=progress.first or figures, last=figures)
    if config.train.save_best and (progress.best is None or row["reward/mean"] > progress.best):
        progress = progress._replace(best=row["reward/mean"])
        checkpoint.save(
            run.folder / "best",
            progress.step,
            state.ppo.params,
            {"reward": progress.best, "step": progress.step},
            keep=1,
        )
    return progress


def _distance(collected: Collected) -> dict[str, float]:
    """How far the samples lie from the reference, where log-probs of both are at hand."""
    if collected.scored is None:
        return {}
    mask = np.asarray(collected.rollout.mask)
    logprobs, ref_logprobs, entropy = (
        np.where(mask, np.asarray(x, np.float64), 0.0)
        for x in (
            collected.scored.old.logprobs,
            collected.scored.ref_logprobs,
            collected.scored.old.entropy,
        )
    )
    count = max(mask.sum(), 1)
    return {
        "eval/kl": float((logprobs - ref_logprobs).sum(1).mean()),
        "eval/ref_perplexity": float(np.exp(-ref_logprobs.sum() / count)),
        "eval/entropy": float(entropy.sum() / count),
    }


def _finite(row: dict[str, float], step: int, run: Run) -> dict[str, float]:
    """Stops the run, naming the figures that are not finite."""
    bad = [name for name, value in row.items() if not math.isfinite(value)]
    if bad:
        raise TrainingError(
            f"{', '.join(sorted(bad))} became nan or infinite at step {step}; earlier checkpoints are "
            f"in {run.folder}: lower the learning rate or look at the rewards, then run again"
        )
    return row


def _save(run: Run, state: LoopState, progress: Progress) -> None:
    if run.config.train.save_optimizer:
        checkpoint.save(
            run.folder / "checkpoints",
            progress.step,
            state,
            {"progress": progress._asdict()},
            keep=run.config.train.keep_checkpoints,
        )


def _finish(run: Run, state: LoopState, progress: Progress) -> Trained:
    """Exports the last and the best policy, and writes and shows the figures before and after."""
    params = state.ppo.params
    save_pretrained(run.folder / "model", run.model, params, run.tokenizer)
    best = checkpoint.latest_step(run.folder / "best")
    if best is not None:
        best_params, _ = checkpoint.restore(run.folder / "best", best, params)
        save_pretrained(run.folder / "best_model", run.model, best_params, run.tokenizer)
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
    return Trained(run.model, params, run.tokenizer, summary, run.folder)


def _keys(config: ConfigDict) -> tuple[jax.Array, ...]:
    """One key a purpose: value head, (spare), rollouts, updates, evaluations."""
    return tuple(jax.random.split(jax.random.key(config.train.seed), 5))
