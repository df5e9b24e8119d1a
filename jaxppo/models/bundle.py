"""A model as a bundle of pure functions over a parameter tree.

Nothing outside this room imports a module class: the sampler, the scorer and the update are
handed a `Model` and call its functions with parameters of their own. The tree may carry further
entries (such as `value_head`), which the functions ignore.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import chex
import jax
import jax.numpy as jnp

from jaxppo.models.transformer import Decoder, DecoderConfig, KVCache

Params = Mapping[str, Any]
POOLERS = {"tanh": jnp.tanh, "relu": jax.nn.relu}


@dataclass(frozen=True, eq=False)
class Model:
    """Pure functions of one architecture. `B` batch, `T` time, `V` vocabulary, `D` width.

    config: the sizes and options everything follows from.
    init: `(key) -> params`, random parameters in float32; the key is consumed.
    apply: `(params, tokens, *, positions=None, mask=None, segment_ids=None, cache=None,
      hidden=None, first=0, last=None) -> (hidden [B, T, D], cache)`. `mask [B, T]` bool marks real
      tokens (None: all are); padding is seen by no real token. Positions default to the count of
      real tokens before, so results do not depend on the side or amount of padding.
      `segment_ids [B, T]` keeps packed samples apart (the caller then gives positions). With a
      cache, the `T` tokens go to its next slots and see what it holds. `last` ends the pass before
      that block (and before the final norm); `first` and `hidden` go on from the states before
      block `first`, so that a trunk can be computed once for several tops.
    unembed: `(params, hidden [..., D]) -> logits [..., V]`, float32 or wider; apart from `apply`
      so that nobody has to hold `[B, T, V]`.
    logits: `(params, tokens, mask=None) -> [B, T, V]`, the two above in one.
    score: `(params, tokens, mask=None) -> [B, labels]`, a classifier's logits read at each row's
      last real token (encoders: the first). None for language models.
    init_cache: `(batch, length, dtype=float32) -> cache`, empty, for `length` tokens; `dtype` is
      that of the parameters, and gives way to the config's `compute_dtype`.
    hf_config, generation_config: the checkpoint's JSON files, kept for the export.
    """

    config: DecoderConfig
    init: Callable[[jax.Array], Params]
    apply: Callable[..., tuple[jax.Array, KVCache | None]]
    unembed: Callable[[Params, jax.Array], jax.Array]
    logits: Callable[..., jax.Array]
    score: Callable[..., jax.Array] | None
    init_cache: Callable[..., KVCache]
    hf_config: Mapping[str, Any] = field(repr=False)
    generation_config: Mapping[str, Any] = field(repr=False)


def with_options(model: "Model", **changes) -> "Model":
    """The same architecture with other options, such as `compute_dtype="bfloat16"`."""
    config = replace(model.config, **changes)
    return build_model(config, model.hf_config, model.generation_config)


def build_model(
    config: DecoderConfig, hf_config: Mapping[str, Any], generation_config: Mapping[str, Any]
) -> Model:
    """Builds the functions of a decoder. Loads and allocates nothing."""
    module = Decoder(config)

    def init(key):
        tokens = jnp.zeros((1, 1), jnp.int32)
        return module.init(key, tokens, tokens, jnp.ones((1, 1, 1), bool))["params"]

    def apply(
        params,
        tokens,
        *,
        positions=None,
        mask=None,
        segment_ids=None,
        cache=None,
        hidden=None,
        first=0,
        last=None,
    ):
        chex.assert_rank(tokens, 2)
        B, T = tokens.shape
        if cache is None and T > config.max_positions and positions is None:
            raise ValueError(
                f"{T} tokens are more than the {config.max_positions} positions of this model: "
                "shorten the prompts or the responses"
            )
        if segment_ids is not None and (positions is None or cache is not None):
            raise ValueError("segment_ids need explicit positions and no cache")
        if (hidden is None) != (first == 0) or (cache is not None and (first or last is not None)):
            raise ValueError("a partial pass takes hidden with first > 0, and no cache")
        if mask is None and cache is not None:
            mask = jnp.ones((B, T), bool)
        if positions is None:
            if mask is None:
                positions = jnp.arange(T)[None]
            else:
                seen = 0 if cache is None else cache.valid.sum(1, keepdims=True)
                positions = jnp.maximum(seen + jnp.cumsum(mask, axis=1) - 1, 0)
        key_positions = None
        if cache is None:
            allowed = visible(T, mask, segment_ids, causal=config.causal)
        else:
            slots = jnp.broadcast_to(cache.index[..., None] + jnp.arange(T), (B, T))
            write = lambda old, new: old.at[jnp.arange(B)[:, None], slots].set(new)  # noqa: E731
            valid = write(cache.valid, mask)
            allowed = visible_in_cache(slots, valid)
            if cache.positions is not None:
                new = jnp.broadcast_to(positions, (B, T)).astype(cache.positions.dtype)
                key_positions = write(cache.positions, new)
        hidden, layers = module.apply(
            {"params": params},
            tokens,
            positions,
            allowed,
            cache,
            key_positions=key_positions,
            hidden=hidden,
            first=first,
            last=last,
        )
        if cache is not None:
            cache = cache.replace(
                keys=tuple(k for k, _ in layers),
                values=tuple(v for _, v in layers),
                valid=valid,
                index=cache.index + T,
                positions=key_positions,
            )
        return hidden, cache

    def unembed(params, hidden):
        if not config.tied and "head" not in params:
            raise ValueError("these parameters have no output projection: not a language model")
        table = params["tokens" if config.tied else "head"]
        x = _project_out(params, hidden.reshape(-1, hidden.shape[-1]))
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        logits = jnp.matmul(x, table.astype(x.dtype).T, preferred_element_type=dtype)
        if config.head_bias:
            logits = logits + params["head_bias"].astype(dtype)
        if config.logit_softcap is not None:
            logits = config.logit_softcap * jnp.tanh(logits / config.logit_softcap)
        return logits.reshape(*hidden.shape[:-1], table.shape[0])

    def logits(params, tokens, mask=None):
        return unembed(params, apply(params, tokens, mask=mask)[0])

    def score(params, tokens, mask=None):
        hidden, _ = apply(params, tokens, mask=mask)
        B, T = tokens.shape
        if config.pooler:  # the first real token, else the last
            read = jnp.zeros(B, int) if mask is None else jnp.argmax(mask, axis=1)
        elif mask is None:
            read = jnp.full(B, T - 1)
        else:
            read = jnp.max(jnp.where(mask, jnp.arange(T), 0), axis=1)
        state = jnp.take_along_axis(hidden, read[:, None, None], axis=1)[:, 0]
        state = _project_out(params, state)
        if config.pooler:
            layer = params["pooler"]
            state = state @ layer["kernel"].astype(state.dtype) + layer["bias"].astype(state.dtype)
            state = POOLERS[config.pooler](state)
        labels = state @ params["score"].astype(state.dtype)
        if config.pooler:
            labels = labels + params["score_bias"]
        return labels.astype(jnp.promote_types(labels.dtype, jnp.float32))

    def init_cache(batch, length, dtype=jnp.float32):
        if not config.causal:
            raise ValueError("an encoder reads a text as a whole and has no cache to sample with")
        # keys and values come in the compute dtype; a wider cache would widen all that follows
        dtype = config.compute_dtype or dtype
        shape = (batch, config.cache_heads, length, config.head_size)
        zeros = lambda: tuple(jnp.zeros(shape, dtype) for _ in range(config.layers))  # noqa: E731
        return KVCache(
            keys=zeros(),
            values=zeros(),
            valid=jnp.zeros((batch, length), bool),
            index=jnp.zeros((), jnp.int32),
            positions=jnp.zeros((batch, length), jnp.int32) if config.needs_distances else None,
        )

    return Model(
        config=config,
        init=init,
        apply=apply,
        unembed=unembed,
        logits=logits,
        score=score if config.num_labels else None,
        init_cache=init_cache,
        hf_config=dict(hf_config),
        generation_config=dict(generation_config),
    )


def visible(length: int, mask=None, segment_ids=None, *, causal=True):
    """Which tokens each token may see, `[B or 1, T, T]` bool: real ones of its own segment, and
    if `causal` none ahead of it. `mask` and `segment_ids` are `[B, T]`; windows are the layers' own
    matter.
    """
    allowed = jnp.ones((1, length, length), bool)
    allowed = jnp.tril(allowed) if causal else allowed
    if mask is not None:
        allowed = allowed & mask[:, None, :]
    if segment_ids is not None:
        allowed = allowed & (segment_ids[:, :, None] == segment_ids[:, None, :])
    return allowed


def visible_in_cache(slots, valid):
    """The same for tokens in the slots `[B, T]` of a cache; `valid [B, S]` includes them."""
    return (jnp.arange(valid.shape[1]) <= slots[..., None]) & valid[:, None, :]


def _project_out(params, x):
    """From the residual stream's width to the embeddings', where they differ."""
    return x @ params["project_out"].astype(x.dtype) if "project_out" in params else x
