"""Rollouts: prompts in, scored samples out. Rollouts and evaluations take the same path."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxppo.experience import Rollout
from jaxppo.policy import Policy
from jaxppo.programs import Scored
from jaxppo.prompts import Prompts, decode_outputs, left_pad, take
from jaxppo.rewards.functions import call_reward


class Task(NamedTuple):
    """What a run is about.

    prompts: strings, dicts with a "prompt" and further columns, or chats (lists of messages);
      None: nothing but the BOS token.
    reward_fn: `(samples, prompts, outputs, tokenizer, **columns) -> scores`.
    eval_prompts: as prompts; None: the first chunk of them.
    metric_fn: like reward_fn, returns `{name: values}`; None: no further metrics.
    stop_sequences: strings that end a response.
    model_path: takes the place of the config's, for a task that makes its own model.
    """

    prompts: Sequence | None
    reward_fn: Callable
    eval_prompts: Sequence | None = None
    metric_fn: Callable | None = None
    stop_sequences: Sequence[str] = ()
    model_path: Any = None


class Collected(NamedTuple):
    """Scored samples of several chunks. `R` rows, `N` response tokens.

    rollout: device arrays, `R` rows.
    grid, totals: `[R, N]` and `[R]` float32, the scores on the response grid and in sum.
    ended: `[R]` bool, responses that ended by themselves.
    scored: from `Programs.score`; None if that was not asked for.
    samples, prompts, outputs: `R` strings each.
    stats: figures of the samples: tokens a response (the EOS counted), shares that ended by
      themselves, that were cut off, and that hold no text, and the padding of the response grid.
    times: seconds and rates, which differ from run to run.
    """

    rollout: Rollout
    grid: np.ndarray
    totals: np.ndarray
    ended: np.ndarray
    scored: Scored | None
    samples: list[str]
    prompts: list[str]
    outputs: list[str]
    stats: dict[str, float]
    times: dict[str, float]


def collect(
    trained,
    policy: Policy,
    key: jax.Array,
    prompts: Prompts,
    *,
    generate: Callable,
    score: Callable | None,
    task: Task,
    tokenizer,
    chunk_size: int,
    width: int,
    pad_id: int,
    on_chunk: Callable[[], None] = lambda: None,
) -> Collected:
    """Samples a response to each prompt and scores it.

    Args:
      trained, policy: the parameters, in two trees.
      key: consumed; row `i` of `prompts` draws with `fold_in(key, i)`.
      prompts: `R` of them. The last chunk is filled up with rows that count for nothing.
      generate: `Programs.generate` or `generate_eval`.
      score: `(trained, rollout, sampler_logprobs) -> Scored`, runs on the device while the reward
        function works on the host; None: no log-probs.
      task, tokenizer: for text and scores.
      chunk_size: rows sampled and scored in one go.
      width: `P`, to which prompts are padded.
      pad_id: what they are padded with.
      on_chunk: called after each chunk.
    """
    total, params = len(prompts.ids), policy.merged(trained)
    began = time.perf_counter()
    generating = rewarding = 0.0
    rollouts, scoreds, grids, totals, ended = [], [], [], [], []
    texts: tuple[list, list] = ([], [])
    for at in range(0, total, chunk_size):
        rows = np.arange(at, min(at + chunk_size, total))
        chunk = take(prompts, rows)
        filled = [*chunk.ids, *[chunk.ids[0]] * (chunk_size - len(rows))]
        tokens, mask = left_pad(filled, width, pad_id)
        clock = time.perf_counter()
        row_ids = jnp.arange(at, at + chunk_size)
        samples = generate(params, key, jnp.asarray(tokens), jnp.asarray(mask), row_ids)
        rollout = Rollout(
            jnp.asarray(tokens), jnp.asarray(mask), samples.tokens, samples.mask, samples.kept
        )
        if score is not None:  # dispatched before the host waits for the tokens
            scoreds.append(score(trained, rollout, samples.logprobs))
        response, lengths = np.asarray(samples.tokens), np.asarray(samples.mask.sum(1))
        generating += time.perf_counter() - clock
        clock = time.perf_counter()
        lengths = lengths[: len(rows)]
        written = [row[:n] for row, n in zip(response, lengths)]
        outputs = decode_outputs(tokenizer, chunk.ids, written, task.stop_sequences)
        whole = [prompt + output for prompt, output in zip(chunk.texts, outputs)]
        scores = call_reward(
            task.reward_fn,
            samples=whole,
            prompts=chunk.texts,
            outputs=outputs,
            tokenizer=tokenizer,
            columns=chunk.columns,
            lengths=lengths,
            width=response.shape[1],
        )
        rewarding += time.perf_counter() - clock
        rollouts.append(rollout)
        grids.append(scores.grid)
        totals.append(scores.totals)
        ended.append(np.asarray(samples.ended)[: len(rows)])
        texts[0].extend(whole)
        texts[1].extend(outputs)
        on_chunk()

    join = lambda parts: jax.tree.map(lambda *xs: jnp.concatenate(xs)[:total], *parts)  # noqa: E731
    rollout = join(rollouts)
    lengths = np.asarray(rollout.mask.sum(1))
    share = float(np.concatenate(ended).mean())
    sampled = int(lengths.sum())
    return Collected(
        rollout=rollout,
        grid=np.concatenate(grids),
        totals=np.concatenate(totals),
        ended=np.concatenate(ended),
        scored=join(scoreds) if scoreds else None,
        samples=texts[0],
        prompts=list(prompts.texts),
        outputs=texts[1],
        stats={
            "rollout/response_length": float(lengths.mean()),
            "rollout/ended": share,
            "rollout/truncated": 1.0 - share,
            "rollout/empty": float(np.mean([not text.strip() for text in texts[1]])),
            "padding_percentage": 100.0 * (1.0 - sampled / rollout.mask.size),
        },
        times={
            "time/rollout_generate": generating,
            "time/rollout_score": rewarding,
            "time/rollout_time": time.perf_counter() - began,
            "perf/rollout_tokens_per_s": sampled / max(generating, 1e-9),
        },
    )
