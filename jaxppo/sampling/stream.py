"""Continuous batching: many prompts through few decoding slots, so that no slot idles for long.

`sample` ends with its longest row, and rows that ended early are paid for until then. Here a
host loop refills the slots of finished rows from the waiting prompts, and once none wait, goes
on with fewer slots. Each row keeps its own place in the cache and its own key, so a response does
not depend on when or beside whom it was decoded. A prompt that follows itself (the samples of a
group) is prefilled once.

Letters: `R` rows in all, `B` slots, `G` prompts prefilled at once, `W` their width, `S` slots of
a row's cache.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxppo.models import KVCache, Model
from jaxppo.sampling.decoding import (
    Options,
    Samples,
    State,
    advance,
    begin,
    blank,
    cache_dtype,
    check_room,
    row_keys,
)
from jaxppo.sampling.sampler import cache_lengths

PREFILL = 32  # prompts at once
FEWEST_SLOTS = 4  # below this a decode step gets no cheaper


class Prefilled(NamedTuple):
    """Prompts that were fed, but not answered.

    cache: of their tokens, at the beginning of its slots, `[G, H, W, K]`.
    logits: `[G, V]`, of each one's last token.
    """

    cache: KVCache
    logits: jax.Array


class Stream(NamedTuple):
    """Jitted functions of a `sample_stream`; made once, compiled for a few shapes each.

    prefill: `(params, tokens [G, W], lengths [G]) -> Prefilled`, prompts padded on the right.
    insert: `(state, prefilled, key, slots [G], sources [G], row_ids [G]) -> State`; puts row
      `row_ids[i]`, an answer to prompt `sources[i]`, into slot `slots[i]` (beyond `B`: nowhere)
      and draws its first token. The state is donated.
    decode: `(params, state, steps, enough) -> (state, steps done)`; until `steps` are done or
      `enough` rows are. The state is donated.
    resize: `(state, slots [B'], length) -> State` of these slots with caches of that length.
    empty: `(params, B, S) -> State`, all done.
    """

    prefill: Callable
    insert: Callable
    decode: Callable
    resize: Callable
    empty: Callable
    model: Model
    options: Options


def make_stream(model: Model, options: Options) -> Stream:
    """Makes the functions of `sample_stream` for a model and a way of drawing tokens."""

    def prefill(params, tokens, lengths):
        G, W = tokens.shape
        mask = jnp.arange(W) < lengths[:, None]
        cache = model.init_cache(G, W, cache_dtype(model, params))
        hidden, cache = model.apply(params, tokens, mask=mask, cache=cache)
        last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
        return Prefilled(cache.replace(index=lengths), model.unembed(params, last))

    def insert(state: State, prefilled: Prefilled, key, slots, sources, row_ids):
        cache = jax.tree.map(lambda x: x[sources], prefilled.cache)
        cache = cache.grown(state.cache.valid.shape[1])
        first = begin(row_keys(key, row_ids), cache, prefilled.logits[sources], options)
        return jax.tree.map(lambda old, new: old.at[slots].set(new, mode="drop"), state, first)

    def decode(params, state: State, steps, enough):
        def unfinished(carry):
            step, state = carry
            # room in the cache (the caller counted it), and too few rows to stop for
            return (step < steps) & (state.done.sum() < enough)

        def body(carry):
            step, state = carry
            return step + 1, advance(params, state, model=model, options=options)

        step, state = jax.lax.while_loop(unfinished, body, (jnp.zeros((), jnp.int32), state))
        return state, step

    def resize(state: State, slots, length):
        state = jax.tree.map(lambda x: x[slots], state)
        return state.replace(cache=state.cache.grown(length))

    def empty(params, B, S):
        keys = row_keys(jax.random.key(0), jnp.zeros(B, jnp.int32))
        cache = model.init_cache(B, S, cache_dtype(model, params))
        cache = cache.replace(index=jnp.zeros(B, jnp.int32))
        hidden = jax.ShapeDtypeStruct((B, model.config.width), cache.keys[0].dtype)
        dtype = jax.eval_shape(model.unembed, params, hidden).dtype
        return blank(keys, cache, dtype, options).replace(done=jnp.ones(B, bool))

    return Stream(
        prefill=jax.jit(prefill),
        insert=jax.jit(insert, donate_argnums=0),
        decode=jax.jit(decode, donate_argnums=1),
        resize=jax.jit(resize, static_argnums=2),
        empty=jax.jit(empty, static_argnums=(1, 2)),
        model=model,
        options=options,
    )


class Streamed(NamedTuple):
    """What `sample_stream` returns: `Samples` of `R` rows as numpy arrays, and what it took.

    slot_steps: decode steps times slots, each the cost of a token; the first token of a row costs
      none of them.
    prefilled: prompt tokens that were fed, padding included.
    """

    samples: Samples
    slot_steps: int
    prefilled: int


def sample_stream(
    params,
    key,
    prompts: Sequence[np.ndarray],
    *,
    stream: Stream,
    slots: int,
    row_ids: np.ndarray | None = None,
    on_rows: Callable[[np.ndarray, Samples], None] = lambda rows, samples: None,
) -> Streamed:
    """Samples one response a prompt. Runs on the host; the work is in the stream's functions.

    Args:
      params: the model's parameters.
      key: consumed; row `r` draws with `fold_in(key, row_ids[r])`, as in `sample`.
      prompts: `R` arrays of token ids, of any lengths. Equal neighbours are prefilled once.
      stream: from `make_stream`.
      slots: `B`, rows decoded at once.
      row_ids: `[R]`, the rows' numbers in the whole rollout; 0..R-1 by default.
      on_rows: called with the numbers of rows that are finished and their `Samples`, in the order
        in which they finish, while the device goes on with the others.
    """
    R, N = len(prompts), stream.options.max_new_tokens
    row_ids = np.arange(R) if row_ids is None else np.asarray(row_ids)
    lengths = np.asarray([len(prompt) for prompt in prompts])
    check_room(stream.model, int(lengths.max()), N)
    sizes = cache_lengths(int(lengths.max()), int(lengths.max()) + N - 1)
    batches = _prefill_batches(prompts, min(slots, PREFILL))
    B = min(slots, R)
    state = stream.empty(params, B, sizes[0])
    owner = np.full(B, -1)  # the row in each slot
    used = np.zeros(B, int)  # slots of the cache that its tokens take
    following, batch, prefilled = 0, None, None
    samples = jax.tree.map(lambda x: np.zeros((R, *x.shape[1:]), x.dtype), state.samples)
    slot_steps = fed = 0
    while True:
        free = np.flatnonzero(owner < 0)
        while len(free) and following < R:
            if batch is None or following not in batch.rows:
                batch = next(batches)
                prefilled = stream.prefill(params, batch.tokens, batch.lengths)
                fed += batch.tokens.size
            rows = np.arange(following, min(following + len(free), batch.rows.stop))
            into, free = free[: len(rows)], free[len(rows) :]
            places = (into, batch.sources[rows - batch.rows.start], row_ids[rows])
            state = stream.insert(state, prefilled, key, *_filled_up(B, *places))
            owner[into], used[into] = rows, lengths[rows]
            following += len(rows)
        live = np.flatnonzero(owner >= 0)
        if not len(live):
            return Streamed(samples, slot_steps, fed)

        while following == R and len(live) <= _next_size(B):
            B = _next_size(B)
        S, most = state.cache.valid.shape[1], used[live].max()
        length = max(S, next(size for size in sizes if size > most or size == sizes[-1]))
        if B < len(owner) or length > S:
            keep = np.arange(B) if B == len(owner) else live
            keep = np.concatenate([keep, np.flatnonzero(owner < 0)])[:B]
            state = stream.resize(state, keep, length)
            owner, used, live = owner[keep], used[keep], np.flatnonzero(owner[keep] >= 0)

        # so many rows must have ended before it is worth refilling slots, or dropping them
        enough = B - len(live) + max(1, B // 16) if following < R else B - _next_size(B)
        state, steps = stream.decode(params, state, length - most, enough)
        steps, finished, written = jax.device_get((steps, state.done, state.samples))
        slot_steps += int(steps) * B
        used[live] += int(steps)
        out = np.flatnonzero(finished & (owner >= 0))
        if len(out):
            rows, part = owner[out], jax.tree.map(lambda x, out=out: x[out], written)
            jax.tree.map(lambda whole, new, rows=rows: whole.__setitem__(rows, new), samples, part)
            owner[out] = -1
            on_rows(rows, part)


class _Batch(NamedTuple):
    """Prompts that are prefilled together, and the rows that answer them: `sources[row - start]`
    is the place of a row's prompt in the batch."""

    rows: range
    sources: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray


def _prefill_batches(prompts: Sequence[np.ndarray], size: int) -> Iterator[_Batch]:
    """Cuts the rows into batches of `size` different prompts; the last is filled up."""
    new = [True, *(not np.array_equal(a, b) for a, b in pairwise(prompts))]
    starts = [*np.flatnonzero(new)[::size], len(prompts)]
    widest = max(map(len, prompts))
    for start, stop in pairwise(starts):
        first = np.flatnonzero(new[start:stop]) + start
        picked = [prompts[first[min(i, len(first) - 1)]] for i in range(size)]
        lengths = np.asarray([len(prompt) for prompt in picked], np.int32)
        # few widths, so that few programs are compiled
        width = next(w for w in (-(-widest // 4), -(-widest // 2), widest) if w >= lengths.max())
        tokens = np.zeros((size, width), np.int32)
        for row, prompt in zip(tokens, picked):
            row[: len(prompt)] = prompt
        yield _Batch(range(start, stop), np.cumsum(new[start:stop]) - 1, tokens, lengths)


def _filled_up(B: int, slots, *columns):
    """Pads to one of two lengths, so that two programs are compiled; slot `B` is nowhere."""
    extra = (max(1, B // 8) if len(slots) <= max(1, B // 8) else B) - len(slots)
    pad = lambda x, fill: np.pad(np.asarray(x, np.int32), (0, extra), constant_values=fill)  # noqa: E731
    return pad(slots, B), *(pad(x, 0) for x in columns)


def _next_size(B: int) -> int:
    """The fewer slots with which to go on once so few rows are left; 0: with these to the end."""
    return B // 2 if B // 2 >= FEWEST_SLOTS else 0
