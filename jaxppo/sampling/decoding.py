"""Decoding, one token at a time: what the samplers of this room have in common.

`B` rows, `N` the most tokens a response may have, `V` vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxppo.models import KVCache, Model
from jaxppo.sampling.logits import draw, forbid, scale, truncate
from jaxppo.sampling.stops import StopTable


class Samples(NamedTuple):
    """Responses, right-padded. `B` rows, `N` = `max_new_tokens`.

    tokens: `[B, N]` int32, the sampled ids and after them `pad_id`.
    logprobs: `[B, N]` float32, log-probabilities under the distribution sampled from; 0 in padding.
    mask: `[B, N]` bool, true where a token was sampled (the EOS token included).
    ended: `[B]` bool, the row ended by itself: an EOS id or a stop string; else it was cut off.
    kept: `[B, N]` int32, how many tokens truncation left to draw from; None without truncation.
    """

    tokens: jax.Array
    logprobs: jax.Array
    mask: jax.Array
    ended: jax.Array
    kept: jax.Array | None = None


class Options(NamedTuple):
    """How tokens are drawn; the arguments of `sample` under their names."""

    max_new_tokens: int
    temperature: float | jax.Array = 1.0
    top_k: int = 0
    top_p: float | jax.Array = 1.0
    min_p: float | jax.Array = 0.0
    eos_ids: tuple[int, ...] = ()
    pad_id: int = 0
    min_new_tokens: int = 0
    stops: StopTable | None = None

    @property
    def greedy(self) -> bool:
        return isinstance(self.temperature, int | float) and self.temperature == 0

    @property
    def truncating(self) -> bool:
        return not self.greedy and is_truncating(
            top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
        )


@struct.dataclass
class State:
    """Rows that are being written.

    keys: `[B]` typed keys, one a row.
    step: `[B]` int32, response tokens written so far.
    token: `[B]` int32, the newest.
    done: `[B]` bool, nothing more is written.
    stop_state: `[B]` int32, of the stop strings' automaton.
    samples: what was written.
    cache: of the tokens that were fed: all but the newest.
    """

    keys: jax.Array
    step: jax.Array
    token: jax.Array
    done: jax.Array
    stop_state: jax.Array
    samples: Samples
    cache: KVCache


def blank(keys, cache: KVCache, dtype, options: Options) -> State:
    """Rows in which nothing is written yet; log-probs in `dtype`."""
    B, N = len(keys), options.max_new_tokens
    return State(
        keys=keys,
        step=jnp.zeros(B, jnp.int32),
        token=jnp.zeros(B, jnp.int32),
        done=jnp.zeros(B, bool),
        stop_state=jnp.zeros(B, jnp.int32),
        samples=Samples(
            tokens=jnp.full((B, N), options.pad_id, jnp.int32),
            logprobs=jnp.zeros((B, N), dtype),
            mask=jnp.zeros((B, N), bool),
            ended=jnp.zeros(B, bool),
            kept=jnp.zeros((B, N), jnp.int32) if options.truncating else None,
        ),
        cache=cache,
    )


def begin(keys, cache: KVCache, logits, options: Options) -> State:
    """Draws the first token of each row from `logits [B, V]`, those of its prompt's last token."""
    return _write(blank(keys, cache, logits.dtype, options), logits, options)


def advance(params, state: State, *, model: Model, options: Options) -> State:
    """Feeds the newest tokens and writes the next. Rows that are done are not fed on."""
    hidden, cache = model.apply(
        params, state.token[:, None], mask=~state.done[:, None], cache=state.cache
    )
    return _write(state.replace(cache=cache), model.unembed(params, hidden[:, -1]), options)


def _write(state: State, logits, options: Options) -> State:
    """Draws a token for each row that is not done, and records it."""
    token, logprob, kept = _choose(logits, state.keys, state.step, options)
    live = ~state.done
    token = jnp.where(live, token, options.pad_id)
    B, N = state.samples.tokens.shape
    column = jnp.where(live, state.step, N)  # writes beyond the end are dropped
    put = lambda grid, x: grid.at[jnp.arange(B), column].set(x, mode="drop")  # noqa: E731
    ends = jnp.isin(token, jnp.asarray(options.eos_ids or (-1,), jnp.int32))
    stop_state = state.stop_state
    if options.stops is not None:
        stop_state = jnp.asarray(options.stops.next_state)[stop_state, token]
        ends = ends | (stop_state == options.stops.matched)
    old, step = state.samples, state.step + live
    return State(
        keys=state.keys,
        step=step,
        token=token,
        done=state.done | ends | (step >= N),
        stop_state=stop_state,
        samples=Samples(
            tokens=put(old.tokens, token),
            logprobs=put(old.logprobs, logprob.astype(old.logprobs.dtype)),
            mask=put(old.mask, live),
            ended=old.ended | (live & ends),
            kept=None if kept is None else put(old.kept, kept),
        ),
        cache=state.cache,
    )


def _choose(logits, keys, step, options: Options):
    """The next token of each row, its log-prob, and how many could have been drawn."""
    if options.min_new_tokens:
        logits = forbid(logits, options.eos_ids, step < options.min_new_tokens)
    if options.greedy:
        return jnp.argmax(logits, -1).astype(jnp.int32), jnp.zeros(len(step)), None
    logits, kept = scale(logits, options.temperature), None
    if options.truncating:
        logits, kept = truncate(
            logits, top_k=options.top_k, top_p=options.top_p, min_p=options.min_p
        )
    uniform = jax.vmap(lambda key, step: jax.random.uniform(jax.random.fold_in(key, step)))
    token = draw(logits, uniform(keys, step))
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return token, chosen - jax.nn.logsumexp(logits, axis=-1), kept


def check_room(model: Model, prompt: int, response: int) -> None:
    """Raises `ValueError` where so many tokens do not fit the model's positions."""
    if prompt + response > model.config.max_positions:
        raise ValueError(
            f"a prompt of {prompt} and a response of {response} tokens exceed the model's "
            f"{model.config.max_positions} positions; lower max_new_tokens or shorten the prompts"
        )


def row_keys(key, row_ids):
    """One key a row, of its number in the whole rollout: `[B]`."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, row_ids)


def cache_dtype(model: Model, params):
    """The dtype in which keys and values are kept: that in which the model computes."""
    return model.config.compute_dtype or params["tokens"].dtype


def is_truncating(*, top_k=0, top_p=1.0, min_p=0.0) -> bool:
    """Whether these options leave some tokens out (traced values count as doing so)."""
    neutral = (top_k, 0), (top_p, 1.0), (min_p, 0.0)
    return any(not isinstance(x, int | float) or x != off for x, off in neutral)
