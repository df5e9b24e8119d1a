"""Rollouts: prompts in, scored samples out. Rollouts and evaluations take the same path."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxppo.environments import Environment
from jaxppo.experience import Rollout
from jaxppo.policy import Policy
from jaxppo.programs import Scored
from jaxppo.prompts import Prompts, decode_outputs, left_pad, take, token_ends
from jaxppo.rewards.functions import RewardError
from jaxppo.rewards.scoring import Reward, add_tallies, score_samples, tally_metrics
from jaxppo.sampling import Samples, Stream, sample_stream


class Task(NamedTuple):
    """What a run is about.

    prompts: strings, dicts with a "prompt" and further columns, or chats (lists of messages);
      None: nothing but the BOS token.
    reward_fn: `(samples, prompts, outputs, tokenizer, **columns) -> scores`, a `Reward`, or a list
      of these; None where an environment pays.
    eval_prompts: as prompts; None: the first chunk of them.
    metric_fn: like reward_fn, returns `{name: values}`; None: no further metrics.
    stop_sequences: strings that end a response.
    model_path: takes the place of the config's, for a task that makes its own model.
    environment: makes an `Environment`. Each sample is then a conversation with one; what it pays
      and what reward functions give is added.
    """

    prompts: Sequence | None
    reward_fn: Callable | Reward | Sequence[Callable | Reward] | None = None
    eval_prompts: Sequence | None = None
    metric_fn: Callable | None = None
    stop_sequences: Sequence[str] = ()
    model_path: Any = None
    environment: Callable[[], Environment] | None = None


class Collected(NamedTuple):
    """Scored samples of several chunks. `R` rows, `N` response tokens.

    rollout: device arrays, `R` rows.
    grid, totals: `[R, N]` and `[R]` float32, the scores on the response grid and in sum.
    present: `[R]` bool, false for samples without a score: none applied, or one failed.
    ended: `[R]` bool, responses that ended by themselves.
    scored: from `Programs.score`; None if that was not asked for.
    samples, prompts, outputs: `R` strings each.
    stats: figures of the samples: tokens a response (the EOS counted), shares that ended by
      themselves, that were cut off, and that hold no text, and the padding of the response grid;
      of each reward, if it has a name of its own or there are several.
    times: seconds and rates, which differ from run to run.
    behaviour: `[R, N]`, log-probs under the weights that drew the tokens, where those of some
      samples are older; None: they are those of `scored`.
    baseline: `[R]`, the score of the greedy response to each prompt, where that is asked for.
    """

    rollout: Rollout
    grid: np.ndarray
    totals: np.ndarray
    present: np.ndarray
    ended: np.ndarray
    scored: Scored | None
    samples: list[str]
    prompts: list[str]
    outputs: list[str]
    stats: dict[str, float]
    times: dict[str, float]
    behaviour: jax.Array | None = None
    baseline: np.ndarray | None = None


def collect(
    trained,
    policy: Policy,
    key: jax.Array,
    prompts: Prompts,
    *,
    generate: Callable,
    score: Callable | None,
    task: Task,
    rewards: Sequence[Reward],
    tokenizer,
    chunk_size: int,
    width: int,
    pad_id: int,
    stream: Stream | None = None,
    slots: int = 0,
    overlap: bool = True,
    converse: Callable | None = None,
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
      task, rewards, tokenizer: for text and scores.
      chunk_size: rows sampled and scored in one go.
      width: `P`, to which prompts are padded.
      pad_id: what they are padded with.
      stream, slots: where given, all prompts go through so many decoding slots instead.
      overlap: rewards of a chunk are computed in a thread while the next ones are sampled.
      converse: `jaxppo.environments.converse` with an environment; None: a sample is a response.
      on_chunk: called after each chunk.
    """
    total, params = len(prompts.ids), policy.merged(trained)
    began = time.perf_counter()
    rollouts, scoreds, ended, turns = [], [], [], []

    def judged(chunk: Prompts, tokens, lengths, earned):
        """Texts, scores and tallies of a chunk, and the seconds that they took."""
        clock = time.perf_counter()
        written = [row[:n] for row, n in zip(tokens, lengths)]
        stop_sequences = () if converse else task.stop_sequences
        outputs = decode_outputs(tokenizer, chunk.ids, written, stop_sequences)
        whole = [prompt + output for prompt, output in zip(chunk.texts, outputs)]
        try:
            scores, tallies = score_samples(
                rewards,
                samples=whole,
                prompts=chunk.texts,
                outputs=outputs,
                tokenizer=tokenizer,
                columns=chunk.columns,
                lengths=lengths,
                width=tokens.shape[1],
                ends=lambda row: token_ends(tokenizer, chunk.ids[row], written[row]),
                earned=earned,
            )
        except RewardError as error:
            columns = {"prompt": chunk.texts, "output": outputs, **chunk.columns}
            error.rollouts = [dict(zip(columns, row)) for row in zip(*columns.values())]
            raise
        return whole, outputs, scores, tallies, time.perf_counter() - clock

    def padded(at: int):
        """A chunk's prompts as a grid, filled up to the chunk's size."""
        ids = prompts.ids[at : at + chunk_size]
        return left_pad([*ids, *[ids[0]] * (chunk_size - len(ids))], width, pad_id)

    def conversations(at: int) -> tuple[Samples, np.ndarray, np.ndarray]:
        """A chunk of samples, filled up with empty ones, what was seen in them, and earned."""
        rows = range(at, min(at + chunk_size, total))
        chunk = take(prompts, rows)
        held = converse(
            generate, params, key, prompts=chunk.ids, texts=chunk.texts, columns=chunk.columns,
            row_ids=rows, rows=chunk_size,
        )  # fmt: skip
        turns.append(held.turns)
        missing = chunk_size - len(rows)
        fill = lambda x: np.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))  # noqa: E731
        samples, seen = jax.tree.map(lambda x: jnp.asarray(fill(x)), (held.samples, held.seen))
        return samples, seen, held.earned

    def finish(at: int, samples: Samples, seen=None, earned=None) -> None:
        """Sends a sampled chunk to the device's scorer and to the reward function."""
        rows = range(at, min(at + chunk_size, total))
        grid, mask = padded(at)
        rollout = Rollout(
            *(jnp.asarray(x) for x in (grid, mask, samples.tokens, samples.mask)),
            kept=samples.kept,
            seen=seen,
        )
        if score is not None:  # dispatched before the host waits for the tokens
            scoreds.append(score(trained, rollout, samples.logprobs))
        tokens = np.asarray(samples.tokens)
        lengths = np.asarray((samples.mask if seen is None else seen).sum(1))[: len(rows)]
        rollouts.append(rollout)
        ended.append(np.asarray(samples.ended)[: len(rows)])
        worker.submit(judged, take(prompts, rows), tokens, lengths, earned)
        on_chunk()

    with _Worker(overlapping=overlap and total > chunk_size) as worker:
        if converse:
            for at in range(0, total, chunk_size):
                finish(at, *conversations(at))
        elif stream is None:
            for at in range(0, total, chunk_size):
                row_ids = jnp.arange(at, at + chunk_size)
                finish(at, generate(params, key, *map(jnp.asarray, padded(at)), row_ids))
        else:
            _stream_chunks(params, key, prompts, stream, slots, chunk_size, finish)
        generating = time.perf_counter() - began
        scored = worker.results()
    grid, totals, present = (
        np.concatenate([getattr(part[2], name) for part in scored])
        for name in ("grid", "totals", "present")
    )
    texts = tuple([text for part in scored for text in part[i]] for i in (0, 1))
    rewarding = sum(part[4] for part in scored)
    plain = [reward == Reward(reward.function, reward.name) for reward in rewards] == [True]
    tallies = {} if plain and not converse else add_tallies([part[3] for part in scored])
    if not worker.overlapping:
        generating -= rewarding

    join = lambda parts: jax.tree.map(lambda *xs: jnp.concatenate(xs)[:total], *parts)  # noqa: E731
    rollout = join(rollouts)
    lengths = np.asarray(rollout.mask.sum(1))
    share = float(np.concatenate(ended).mean())
    sampled = int(lengths.sum())
    read = sampled if rollout.seen is None else int(rollout.seen.sum())
    return Collected(
        rollout=rollout,
        grid=grid,
        totals=totals,
        present=present,
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
            "rollout/scored": float(present.mean()),
            "padding_percentage": 100.0 * (1.0 - read / rollout.mask.size),
            **({"rollout/turns": float(np.concatenate(turns).mean())} if turns else {}),
            **tally_metrics(tallies),
        },
        times={
            "time/rollout_generate": generating,
            "time/rollout_score": rewarding,
            "time/rollout_time": time.perf_counter() - began,
            "perf/rollout_tokens_per_s": sampled / max(generating, 1e-9),
        },
    )


class _Worker:
    """Calls functions in order: at once, or in one thread beside the caller."""

    def __init__(self, overlapping: bool):
        self.overlapping = overlapping
        self._pool = ThreadPoolExecutor(1, "rewards") if overlapping else None
        self._results: list = []

    def submit(self, function, *arguments) -> None:
        """The first error of an earlier call is raised here, or by `results`."""
        if self._pool is None:
            self._results.append(function(*arguments))
            return
        for job in self._results:
            if job.done():
                job.result()
        self._results.append(self._pool.submit(function, *arguments))

    def results(self) -> list:
        """What the calls returned, in their order."""
        return [job.result() for job in self._results] if self._pool else self._results

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def _stream_chunks(params, key, prompts, stream, slots, chunk_size, finish) -> None:
    """Decodes all prompts through few slots; a chunk is finished when its last row is."""
    total = len(prompts.ids)
    whole, missing = None, np.ones(-(-total // chunk_size) * chunk_size, bool)
    missing[total:] = False
    following = 0

    def on_rows(rows, part: Samples) -> None:
        nonlocal whole, following
        if whole is None:
            whole = jax.tree.map(lambda x: np.zeros((len(missing), *x.shape[1:]), x.dtype), part)
        for old, new in zip(jax.tree.leaves(whole), jax.tree.leaves(part)):
            old[rows] = new
        missing[rows] = False
        while following < len(missing) and not missing[following : following + chunk_size].any():
            cut = slice(following, following + chunk_size)
            finish(following, jax.tree.map(lambda x, cut=cut: x[cut].copy(), whole))
            following += chunk_size

    sample_stream(params, key, prompts.ids, stream=stream, slots=slots, on_rows=on_rows)
