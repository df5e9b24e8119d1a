"""The sampler: prefill, then a `while_loop` that ends when every row has.

A pure function of parameters, key and prompts. Jit it with the model and the options closed
over: `jax.jit(functools.partial(sample, model=model, max_new_tokens=40))`.
"""

from typing import NamedTuple

import chex
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


@struct.dataclass
class _State:
    step: jax.Array  # scalar int32, response tokens written so far
    token: jax.Array  # [B], the newest
    done: jax.Array  # [B] bool
    stop_state: jax.Array  # [B] int32
    samples: Samples
    cache: KVCache


def sample(
    params,
    key,
    prompts,
    prompt_mask,
    *,
    model: Model,
    max_new_tokens: int,
    temperature=1.0,
    top_k: int = 0,
    top_p=1.0,
    min_p=0.0,
    eos_ids: tuple[int, ...] = (),
    pad_id: int = 0,
    min_new_tokens: int = 0,
    stops: StopTable | None = None,
    row_ids=None,
) -> Samples:
    """Samples one response a prompt.

    Args:
      params: the model's parameters.
      key: a typed key, consumed. Row `r` uses `fold_in(key, row_ids[r])` and its own count of
        tokens, so a response does not depend on the rows beside it.
      prompts: `[B, P]` int32, padded on the left.
      prompt_mask: `[B, P]` bool, true at the prompt's tokens; the last column is true.
      model: the bundle of functions.
      max_new_tokens: `N`, the most tokens sampled a row. Static.
      temperature: divides the logits. The number 0 takes the most probable token instead, whose
        log-prob is then 0, since it is drawn with certainty.
      top_k, top_p, min_p: truncation, see `truncate`. `top_k` is static.
      eos_ids: ids that end a row. They count as sampled tokens.
      pad_id: what stands after the end; its value means nothing to anybody.
      min_new_tokens: EOS ids can't be drawn before so many tokens.
      stops: from `stop_table`; a row ends with the token that completes a stop string.
      row_ids: `[B]` int32, the rows' numbers in the whole rollout; 0..B-1 by default.

    Raises:
      ValueError: prompt and response don't fit the model's positions, or the mask (where its values
        are at hand, outside jit) shows padding on the right.
    """
    chex.assert_rank([prompts, prompt_mask], 2)
    chex.assert_equal_shape([prompts, prompt_mask])
    prompt_mask = jnp.asarray(prompt_mask, bool)
    if not isinstance(prompt_mask, jax.core.Tracer) and not prompt_mask[:, -1].all():
        raise ValueError("prompts must be padded on the left: the last column is not all real")
    B, P = prompts.shape
    N = max_new_tokens
    if P + N > model.config.max_positions:
        raise ValueError(
            f"a prompt of {P} and a response of {N} tokens exceed the model's "
            f"{model.config.max_positions} positions; lower max_new_tokens or shorten the prompts"
        )
    greedy = isinstance(temperature, int | float) and temperature == 0
    truncated = not greedy and is_truncating(top_k=top_k, top_p=top_p, min_p=min_p)
    row_keys = jax.vmap(jax.random.fold_in, (None, 0))(
        key, jnp.arange(B) if row_ids is None else row_ids
    )

    def choose(logits, step):
        """The next token of each row, its log-prob, and how many could have been drawn."""
        if min_new_tokens:
            logits = forbid(logits, eos_ids, jnp.broadcast_to(step < min_new_tokens, (B,)))
        if greedy:
            return jnp.argmax(logits, -1).astype(jnp.int32), jnp.zeros(B), None
        logits, kept = scale(logits, temperature), None
        if truncated:
            logits, kept = truncate(logits, top_k=top_k, top_p=top_p, min_p=min_p)
        uniform = jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(k, step)))(row_keys)
        token = draw(logits, uniform)
        chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
        return token, chosen - jax.nn.logsumexp(logits, axis=-1), kept

    def write(state: _State, logits) -> _State:
        """Draws a token for each row that is not done, and records it."""
        token, logprob, kept = choose(logits, state.step)
        live = ~state.done
        token = jnp.where(live, token, pad_id)
        put = lambda grid, column: grid.at[:, state.step].set(column)  # noqa: E731
        ends = jnp.isin(token, jnp.asarray(eos_ids, jnp.int32)) if eos_ids else jnp.zeros(B, bool)
        stop_state = state.stop_state
        if stops is not None:
            stop_state = jnp.asarray(stops.next_state)[stop_state, token]
            ends = ends | (stop_state == stops.matched)
        old = state.samples
        samples = Samples(
            tokens=put(old.tokens, token),
            logprobs=put(old.logprobs, jnp.where(live, logprob, 0.0)),
            mask=put(old.mask, live),
            ended=old.ended | (live & ends),
            kept=None if kept is None else put(old.kept, jnp.where(live, kept, 0)),
        )
        done = state.done | ends
        return _State(state.step + 1, token, done, stop_state, samples, state.cache)

    def decode(state: _State) -> _State:
        """Feeds the newest tokens and writes the next. Rows that are done are not fed on."""
        hidden, cache = model.apply(
            params, state.token[:, None], mask=~state.done[:, None], cache=state.cache
        )
        return write(state.replace(cache=cache), model.unembed(params, hidden[:, -1]))

    def unfinished(state: _State):
        return (
            # room for another response token
            (state.step < N)
            # some row still writes
            & ~jnp.all(state.done)
        )

    hidden, cache = model.apply(
        params, prompts, mask=prompt_mask, cache=model.init_cache(B, P, params["tokens"].dtype)
    )
    logits = model.unembed(params, hidden[:, -1])
    empty = _State(
        step=jnp.zeros((), jnp.int32),
        token=jnp.zeros(B, jnp.int32),
        done=jnp.zeros(B, bool),
        stop_state=jnp.zeros(B, jnp.int32),
        samples=Samples(
            tokens=jnp.full((B, N), pad_id, jnp.int32),
            logprobs=jnp.zeros((B, N), logits.dtype),
            mask=jnp.zeros((B, N), bool),
            ended=jnp.zeros(B, bool),
            kept=jnp.zeros((B, N), jnp.int32) if truncated else None,
        ),
        cache=cache.grown(P + N - 1),  # the last token is drawn, not fed
    )
    return jax.lax.while_loop(unfinished, decode, write(empty, logits)).samples


def is_truncating(*, top_k=0, top_p=1.0, min_p=0.0) -> bool:
    """Whether these options leave some tokens out (traced values count as doing so)."""
    neutral = (top_k, 0), (top_p, 1.0), (min_p, 0.0)
    return any(not isinstance(x, int | float) or x != off for x, off in neutral)
