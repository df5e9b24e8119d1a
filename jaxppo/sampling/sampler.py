"""The sampler: prefill, then a `while_loop` that ends when every row has.

A pure function of parameters, key and prompts. Jit it with the model and the options closed
over: `jax.jit(functools.partial(sample, model=model, max_new_tokens=40))`.
"""

import chex
import jax
import jax.numpy as jnp

from jaxppo.models import Model
from jaxppo.sampling.decoding import (
    Options,
    Samples,
    State,
    advance,
    begin,
    cache_dtype,
    check_room,
    row_keys,
)
from jaxppo.sampling.stops import StopTable

CACHE_SLOTS = 128  # the shortest cache worth a loop of its own


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
    check_room(model, P, N)
    options = Options(N, temperature, top_k, top_p, min_p, eos_ids, pad_id, min_new_tokens, stops)
    keys = row_keys(key, jnp.arange(B) if row_ids is None else row_ids)
    cache = model.init_cache(B, P, cache_dtype(model, params))
    hidden, cache = model.apply(params, prompts, mask=prompt_mask, cache=cache)
    state = begin(keys, cache, model.unembed(params, hidden[:, -1]), options)
    # a step costs what the cache is long, so it grows as the responses do
    for length in cache_lengths(P, P + N - 1):  # the last token is drawn, not fed
        state = state.replace(cache=state.cache.grown(length))

        def unfinished(state: State, length=length):
            return (
                # room for the newest tokens in the cache
                (state.cache.index < length)
                # some row still writes
                & ~jnp.all(state.done)
            )

        def decode(state: State):
            return advance(params, state, model=model, options=options)

        state = jax.lax.while_loop(unfinished, decode, state)
    return state.samples


def cache_lengths(shortest: int, longest: int) -> list[int]:
    """The lengths that a cache takes on while it grows to `longest`: powers of two, then that."""
    length, lengths = CACHE_SLOTS, []
    while 1.5 * length <= longest:
        lengths += [length] if length > shortest else []
        length *= 2
    return [*lengths, longest]
