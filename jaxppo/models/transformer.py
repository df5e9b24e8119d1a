"""The decoder: a causal transformer in Flax Linen whose options a family's table sets.

Letters: `B` batch, `T` tokens in this call, `S` cache slots or keys, `D` width, `H` heads,
`K` size of a head, `V` vocabulary.

Matrix products run on `[B*T, D]` rather than `[B, T, D]`: XLA's backward pass of a linear layer is
half as fast again that way on CPU and never slower elsewhere. Layers are unrolled, and each
has a cache of its own, because stacked caches make every decode step copy the whole buffer.
"""

from collections.abc import Callable
from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: nn.gelu(x, approximate=False),
    "gelu_new": nn.gelu,
    "gelu_pytorch_tanh": nn.gelu,
    "relu": nn.relu,
    "silu": nn.silu,
}


@dataclass(frozen=True)
class DecoderConfig:
    """What a decoder is built from.

    vocab_size: rows of the embedding table.
    width: size of the residual stream.
    layers, heads: number of blocks; attention heads a block.
    mlp_width: hidden units of a block's MLP.
    max_positions: length of the learned position table; longer sequences are refused.
    activation: a key of `ACTIVATIONS`.
    norm_eps: added to the variance in layer norms.
    initializer_range: standard deviation of freshly initialised weights.
    num_labels: 0 for a language model, else the outputs of a classifier's score head.
    pad_id: the id a classifier's checkpoint pads with, if it names one.
    compute_dtype: dtype of matrix products and residual stream; None: that of the parameters.
    lora_scale: alpha / rank, the weight of low-rank adapters where the tree has some.
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    mlp_width: int
    max_positions: int
    activation: str = "gelu_new"
    norm_eps: float = 1e-5
    initializer_range: float = 0.02
    num_labels: int = 0
    pad_id: int | None = None
    compute_dtype: str | None = None
    lora_scale: float = 1.0


@struct.dataclass
class KVCache:
    """Keys and values of the tokens seen so far.

    keys, values: a tuple with one `[B, H, S, K]` array a layer (head-major: the layout in which
      a decode step reads the cache without reordering it).
    valid: `[B, S]` bool, the slots that hold a real token of the row.
    index: int32, the next slot to write: a scalar where rows advance together, `[B]` where each
      has its own. The caller sees to it that it stays below `S`.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    valid: jax.Array
    index: jax.Array

    def grown(self, length: int) -> "KVCache":
        """Returns the same cache with room for `length` slots."""
        extra = length - self.valid.shape[1]
        widen = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, extra), (0, 0)))  # noqa: E731
        return self.replace(
            keys=tuple(map(widen, self.keys)),
            values=tuple(map(widen, self.values)),
            valid=jnp.pad(self.valid, ((0, 0), (0, extra))),
        )


def write_slots(old, new, index):
    """Puts `new [B, H, T, K]` into `old [B, H, S, K]` from slot `index` on, a scalar or `[B]`."""
    new = new.astype(old.dtype)
    if index.ndim == 0:
        return jax.lax.dynamic_update_slice_in_dim(old, new, index, axis=2)
    B, _, T, _ = new.shape
    slots = index[:, None] + jnp.arange(T)
    return old.at[jnp.arange(B)[:, None], :, slots].set(new.swapaxes(1, 2))


def attend(q_BHTK, k_BHSK, v_BHSK, allowed):
    """Scaled dot-product attention with a float32 (or wider) softmax.

    `allowed` is bool and broadcasts to `[B, H, T, S]`. A query that may see nothing gets an even
    mixture of the values instead of NaN; only padding ever asks for that.
    """
    scores = jnp.einsum("bhtk,bhsk->bhts", q_BHTK, k_BHSK) * q_BHTK.shape[-1] ** -0.5
    scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    weights = jax.nn.softmax(jnp.where(allowed, scores, -1e30), axis=-1).astype(v_BHSK.dtype)
    return jnp.einsum("bhts,bhsk->bhtk", weights, v_BHSK)


class Linear(nn.Module):
    """`x @ kernel + bias` over the last axis, on two-dimensional rows, in the dtype of `x`.

    Where the tree holds `lora_a [in, rank]` and `lora_b [rank, out]` beside the kernel, it adds
    `lora_scale * (x @ lora_a) @ lora_b`; without them the layer is the unadapted one.
    """

    features: int
    stddev: float
    use_bias: bool = True
    lora_scale: float = 1.0

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.normal(self.stddev)
        x_ND = x.reshape(-1, x.shape[-1])
        y = x_ND @ self.param("kernel", init, (x.shape[-1], self.features)).astype(x.dtype)
        if self.has_variable("params", "lora_a"):
            a, b = (self.get_variable("params", f"lora_{part}").astype(x.dtype) for part in "ab")
            y = y + self.lora_scale * ((x_ND @ a) @ b)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,))
            y = y + bias.astype(x.dtype)
        return y.reshape(*x.shape[:-1], self.features)


class LayerNorm(nn.Module):
    """Layer normalisation in float32 (or wider), returned in the input's dtype."""

    eps: float

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + self.eps)
        return (y * scale + bias).astype(x.dtype)


class Attention(nn.Module):
    config: DecoderConfig

    @nn.compact
    def __call__(self, x_BTD, allowed, layer_cache=None, index=None):
        """Returns the mixed values and this layer's keys and values, written at `index`."""
        c = self.config
        B, T, _ = x_BTD.shape

        def heads(name):
            y = Linear(c.width, c.initializer_range, lora_scale=c.lora_scale, name=name)(x_BTD)
            return y.reshape(B, T, c.heads, -1).swapaxes(1, 2)

        q, k, v = heads("query"), heads("key"), heads("value")
        if layer_cache is not None:
            k, v = (write_slots(old, new, index) for old, new in zip(layer_cache, (k, v)))
        y_BTD = attend(q, k, v, allowed).swapaxes(1, 2).reshape(B, T, c.width)
        out_stddev = c.initializer_range / (2 * c.layers) ** 0.5
        out = Linear(c.width, out_stddev, lora_scale=c.lora_scale, name="out")
        return out(y_BTD), (k, v)


class Block(nn.Module):
    config: DecoderConfig

    @nn.compact
    def __call__(self, x_BTD, allowed, layer_cache=None, index=None):
        c = self.config
        y, layer_cache = Attention(c, name="attention")(
            LayerNorm(c.norm_eps, name="norm_1")(x_BTD), allowed, layer_cache, index
        )
        x_BTD = x_BTD + y
        scale = c.lora_scale
        y = Linear(c.mlp_width, c.initializer_range, lora_scale=scale, name="up")(
            LayerNorm(c.norm_eps, name="norm_2")(x_BTD)
        )
        out_stddev = c.initializer_range / (2 * c.layers) ** 0.5
        down = Linear(c.width, out_stddev, lora_scale=scale, name="down")
        return x_BTD + down(ACTIVATIONS[c.activation](y)), layer_cache


class Decoder(nn.Module):
    """Token ids to final hidden states. The output projection is apart, see `Model.unembed`.

    It can be run in two parts: blocks `first` up to `last` only, from the states `hidden` before
    block `first` instead of from tokens. Final norm only at the very end (`last` None).
    """

    config: DecoderConfig

    @nn.compact
    def __call__(self, tokens, positions, allowed, cache=None, *, hidden=None, first=0, last=None):
        c = self.config
        init = nn.initializers.normal(c.initializer_range)
        if hidden is None:
            table = self.param("tokens", init, (c.vocab_size, c.width))
            position_table = self.param("positions", init, (c.max_positions, c.width))
            x_BTD = table[tokens] + position_table[positions]
            x_BTD = x_BTD.astype(c.compute_dtype or x_BTD.dtype)
        else:
            x_BTD = hidden
        layers = []
        for i in range(first, c.layers if last is None else last):
            layer_cache = None if cache is None else (cache.keys[i], cache.values[i])
            index = None if cache is None else cache.index
            x_BTD, written = Block(c, name=f"block_{i}")(x_BTD, allowed, layer_cache, index)
            layers.append(written)
        if last is not None:
            return x_BTD, tuple(layers)
        if c.num_labels:  # only creates the parameter; `Model.score` uses it
            self.param("score", init, (c.width, c.num_labels))
        return LayerNorm(c.norm_eps, name="norm")(x_BTD), tuple(layers)
