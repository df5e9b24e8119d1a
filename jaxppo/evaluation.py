"""Evaluations: fresh samples of the evaluation prompts, their figures, and the best policy."""

import math
import time

import jax
import numpy as np

from jaxppo import checkpoint, tracking
from jaxppo.collect import Collected, collect
from jaxppo.rewards.functions import RewardError, call_metric
from jaxppo.run import LoopState, Progress, Run


def evaluate(run: Run, state: LoopState, progress: Progress) -> Progress:
    """Samples the evaluation prompts, logs figures and samples, and keeps the best policy."""
    config, programs = run.config, run.programs
    chunks = math.ceil(len(run.eval_prompts.ids) / config.method.chunk_size)
    with tracking.phase(run.console, "evaluation", chunks) as advance:
        collected = collect(
            state.ppo.params,
            run.policy,
            jax.random.fold_in(run.keys.evaluations, progress.step),
            run.eval_prompts,
            generate=programs.generate_eval,
            stream=programs.stream_eval,
            score=run.score if programs.same_sampling else None,
            on_chunk=advance,
            **run.sampling,
        )
    totals = collected.totals[collected.present]
    if not len(totals):
        raise RewardError("no sample of the evaluation has a score: look at the rewards")
    row = {"reward/mean": float(totals.mean()), "reward/std": float(totals.std())}
    table = {
        "prompt": collected.prompts,
        "output": collected.outputs,
        "reward": [
            float(total) if there else None
            for total, there in zip(collected.totals, collected.present)
        ],
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
            if name in ("step", *table):
                raise RewardError(f"a metric can't be named {name!r}; that is a column of samples")
            if isinstance(values, list):
                table[name] = values
            row[f"metrics/{name}"] = float(np.mean(values))
    row |= _distance(collected)
    row |= {
        name.replace("rollout/", "eval/").replace("rewards/", "reward/"): x
        for name, x in collected.stats.items()
        if name.startswith(("rollout/", "rewards/"))
    }
    figures = dict(row)
    row["time/metric"] = time.perf_counter() - clock
    row["time/generate"] = collected.times["time/rollout_generate"]
    progress = progress._replace(
        evaluated=progress.step, first=progress.first or figures, last=figures
    )
    if config.train.save_best and (progress.best is None or row["reward/mean"] > progress.best):
        progress = progress._replace(best=row["reward/mean"])
        checkpoint.save(
            run.folder / "best",
            progress.step,
            state.ppo.params,
            {"reward": progress.best, "step": progress.step},
            keep=2,  # a run killed before its next checkpoint goes back to the one before
        )
    run.sink.write(progress.step, row)
    run.sink.samples(progress.step, table)
    title = f"step {progress.step}: reward {row['reward/mean']:.4g}"
    if "eval/kl" in row:
        title += f", KL {row['eval/kl']:.3g} nats"
    tracking.show_samples(run.console, title, table, rows=config.train.log_samples)
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
