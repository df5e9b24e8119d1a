"""The decoder: a causal transformer in Flax Linen whose options a family's table sets.

Letters: `B` batch, `T` tokens in this call, `S` cache slots or keys, `D` width, `H` heads,
`K` size of a head, `V` vocabulary.

Layers are unrolled, and each has a cache of its own, because stacked caches make every decode step
copy the whole buffer.
"""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from jaxppo.models.experts import Experts
from jaxppo.models.layers import ACTIVATIONS, LayerNorm, Linear, RMSNorm, alibi_slopes, attend
from jaxppo.models.rope import Rope, rotate, rotation


@dataclass(frozen=True)
class DecoderConfig:
    """What a decoder is built from. The defaults are GPT-2's.

    vocab_size: rows of the embedding table.
    width: size of the residual stream.
    layers, heads: number of blocks; attention heads a block.
    mlp_width: hidden units of a block's MLP.
    max_positions: positions the model has or was made for; longer sequences are refused.
    activation: a key of `ACTIVATIONS`.
    norm_eps: added to the variance in norms.
    initializer_range: standard deviation of freshly initialised weights.
    num_labels: 0 for a language model, else the outputs of a classifier's score head.
    pad_id: the id a classifier's checkpoint pads with, if it names one.
    compute_dtype: dtype of matrix products and residual stream; None: that of the parameters.
    lora_scale: alpha / rank, the weight of low-rank adapters where the tree has some.

    kv_heads: heads of keys and values, each shared by `heads / kv_heads` queries; None: `heads`.
    head_dim: size of a head; None: `width / heads`.
    qkv_bias, out_bias, mlp_bias: which linear layers add a bias.
    gated: the MLP is `down(activation(gate(x)) * up(x))` instead of `down(activation(up(x)))`.
    norm: "layer" (mean and variance, with bias) or "rms".
    norm_offset: added to the scales of norms, which are then initialised at 1 less.
    norm_place: "before" attention and MLP, "behind" each (before it is added to the residual
      stream), "both", or "last" (on the residual stream, after the addition).
    final_norm: whether a norm follows the last block.
    residual: "sequential"; "parallel" (attention and MLP read the same stream, each through its
      own norm) or "shared" (the same, through one norm).
    qk_norm: None, or norms of queries and keys, "head" by head or over the "whole" projection.
    attention_scale: factor on the scores; None: `head_dim ** -0.5`.
    attention_softcap, logit_softcap: `cap * tanh(x / cap)` on the scores and on the logits.
    learned_positions: there is a table of positions, added to the embeddings.
    position_offset: the row of position 0 in it.
    ropes: the rotation of each layer (None: none in this layer); empty: none at all.
    alibi: scores fall linearly with the distance in tokens (arXiv:2108.12409).
    windows: how many positions back each layer sees, its own included (None: all); empty: all.
    embedding_scale: factor on the embeddings; embedding_norm: a norm follows them.
    embedding_width: size of the embeddings, projected to and from `width`; None: `width`.
    tied: the output projection is the embedding table; head_bias: logits have a bias.
    experts, experts_per_token, expert_width, normalize_experts: see `Experts`; 0: none.
    expert_layers: which layers have them; the others have a plain MLP.

    causal: a token sees those before it and itself; else all of them, and there is no cache.
    token_types: rows of a table whose first is added to every embedding (encoders of one text).
    pooler: activation of a layer between the first token's state and the scores; None: a
      classifier reads the last token's state, without a layer.
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
    kv_heads: int | None = None
    head_dim: int | None = None
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    gated: bool = False
    norm: str = "layer"
    norm_offset: float = 0.0
    norm_place: str = "before"
    final_norm: bool = True
    residual: str = "sequential"
    qk_norm: str | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    learned_positions: bool = True
    position_offset: int = 0
    ropes: tuple[Rope | None, ...] = ()
    alibi: bool = False
    windows: tuple[int | None, ...] = ()
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    embedding_width: int | None = None
    tied: bool = True
    head_bias: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    normalize_experts: bool = True
    expert_layers: tuple[int, ...] = ()
    causal: bool = True
    token_types: int = 0
    pooler: str | None = None

    @property
    def head_size(self) -> int:
        """Entries of a head."""
        return self.head_dim or self.width // self.heads

    @property
    def cache_heads(self) -> int:
        """Heads of keys and values, which is what a cache holds."""
        return self.kv_heads or self.heads

    @property
    def needs_distances(self) -> bool:
        """Whether attention asks how far back a key is, beyond that it is not ahead."""
        return self.alibi or any(self.windows)


@struct.dataclass
class KVCache:
    """Keys and values of the tokens seen so far.

    keys, values: a tuple with one `[B, N, S, K]` array a layer, of the `N` heads that keys and
      values have (head-major: the layout in which a decode step reads the cache without
      reordering it).
    valid: `[B, S]` bool, the slots that hold a real token of the row.
    index: int32, the next slot to write: a scalar where rows advance together, `[B]` where each
      has its own. The caller sees to it that it stays below `S`.
    positions: `[B, S]` int32, of the tokens in the slots; None where attention asks for none.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    valid: jax.Array
    index: jax.Array
    positions: jax.Array | None = None

    def grown(self, length: int) -> "KVCache":
        """Returns the same cache with room for `length` slots."""
        extra = length - self.valid.shape[1]
        widen = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, extra), (0, 0)))  # noqa: E731
        append = lambda x: jnp.pad(x, ((0, 0), (0, extra)))  # noqa: E731
        return self.replace(
            keys=tuple(map(widen, self.keys)),
            values=tuple(map(widen, self.values)),
            valid=append(self.valid),
            positions=None if self.positions is None else append(self.positions),
        )


def write_slots(old, new, index):
    """Puts `new [B, N, T, K]` into `old [B, N, S, K]` from slot `index` on, a scalar or `[B]`."""
    new = new.astype(old.dtype)
    if index.ndim == 0:
        return jax.lax.dynamic_update_slice_in_dim(old, new, index, axis=2)
    B, _, T, _ = new.shape
    slots = index[:, None] + jnp.arange(T)
    return old.at[jnp.arange(B)[:, None], :, slots].set(new.swapaxes(1, 2))


def _norm(c: DecoderConfig, name: str) -> nn.Module:
    if c.norm == "rms":
        return RMSNorm(c.norm_eps, c.norm_offset, name=name)
    return LayerNorm(c.norm_eps, name=name)


def _linear(c: DecoderConfig, features: int, name: str, bias: bool, into_residual=False) -> Linear:
    # GPT-2 scales down what is added to the residual stream, by the root of the additions
    stddev = c.initializer_range / (2 * c.layers) ** 0.5 if into_residual else c.initializer_range
    return Linear(features, stddev, bias, c.lora_scale, name=name)


class Attention(nn.Module):
    config: DecoderConfig
    rope: Rope | None = None

    @nn.compact
    def __call__(self, x_BTD, allowed, turn=None, bias=None, layer_cache=None, index=None):
        """Returns the mixed values and this layer's keys and values, written at `index`."""
        c = self.config
        B, T, _ = x_BTD.shape

        def heads(name, count):
            y = _linear(c, count * c.head_size, name, c.qkv_bias)(x_BTD)
            normed = c.qk_norm and name != "value"
            if normed and c.qk_norm == "whole":
                y = _norm(c, f"{name}_norm")(y)
            y = y.reshape(B, T, count, c.head_size)
            if normed and c.qk_norm == "head":
                y = _norm(c, f"{name}_norm")(y)
            return y.swapaxes(1, 2)

        q, k, v = (
            heads("query", c.heads),
            heads("key", c.cache_heads),
            heads("value", c.cache_heads),
        )
        if self.rope is not None:
            q, k = rotate(self.rope, q, *turn), rotate(self.rope, k, *turn)
        if layer_cache is not None:
            k, v = (write_slots(old, new, index) for old, new in zip(layer_cache, (k, v)))
        y = attend(
            q, k, v, allowed, scale=c.attention_scale, softcap=c.attention_softcap, bias=bias
        )
        y_BTD = y.swapaxes(1, 2).reshape(B, T, c.heads * c.head_size)
        return _linear(c, c.width, "out", c.out_bias, into_residual=True)(y_BTD), (k, v)


class Block(nn.Module):
    config: DecoderConfig
    layer: int = 0

    @nn.compact
    def __call__(self, x_BTD, allowed, turn=None, bias=None, layer_cache=None, index=None):
        c = self.config
        before, behind = c.norm_place in ("before", "both"), c.norm_place in ("behind", "both")

        def norm(name, wanted, y):
            return _norm(c, name)(y) if wanted else y

        x = x_BTD
        read = norm("norm_1", before, x)
        rope = c.ropes[self.layer] if c.ropes else None
        y, layer_cache = Attention(c, rope, name="attention")(
            read, allowed, turn, bias, layer_cache, index
        )
        y = norm("norm_1_behind", behind, y)
        if c.residual == "sequential":
            x = norm("norm_1", c.norm_place == "last", x + y)
            read = norm("norm_2", before, x)
        else:
            read = read if c.residual == "shared" else norm("norm_2", before, x)
            x = x + y
        x = x + norm("norm_2_behind", behind, self.mlp(read))
        return norm("norm_2", c.norm_place == "last", x), layer_cache

    def mlp(self, x):
        c = self.config
        activation = ACTIVATIONS[c.activation]
        if self.layer in c.expert_layers:
            return Experts(
                c.experts, c.experts_per_token, c.expert_width, c.normalize_experts, activation,
                c.initializer_range, name="experts",
            )(x)  # fmt: skip
        y = _linear(c, c.mlp_width, "up", c.mlp_bias)(x)
        if c.gated:
            y = activation(_linear(c, c.mlp_width, "gate", c.mlp_bias)(x)) * y
        else:
            y = activation(y)
        return _linear(c, c.width, "down", c.mlp_bias, into_residual=True)(y)


class Decoder(nn.Module):
    """Token ids to final hidden states. The output projection is apart, see `Model.unembed`.

    It can be run in two parts: blocks `first` up to `last` only, from the states `hidden` before
    block `first` instead of from tokens. Final norm only at the very end (`last` None).
    `allowed [B, T, S]` says which keys a token may see, windows apart; `key_positions [B, S]` are
    those of the keys, `positions` unless there is a cache.
    """

    config: DecoderConfig

    @nn.compact
    def __call__(
        self, tokens, positions, allowed, cache=None, *,
        key_positions=None, hidden=None, first=0, last=None,
    ):  # fmt: skip
        c = self.config
        x_BTD = self.embed(tokens, positions) if hidden is None else hidden
        turn, see, bias = _attention_inputs(c, positions, key_positions, allowed, x_BTD.dtype)
        layers = []
        for i in range(first, c.layers if last is None else last):
            layer_cache = None if cache is None else (cache.keys[i], cache.values[i])
            index = None if cache is None else cache.index
            x_BTD, written = Block(c, i, name=f"block_{i}")(
                x_BTD,
                see[c.windows[i] if c.windows else None],
                turn[c.ropes[i]] if c.ropes else None,
                bias,
                layer_cache,
                index,
            )
            layers.append(written)
        if last is not None:
            return x_BTD, tuple(layers)
        if self.is_initializing():
            self.output_parameters()
        return (_norm(c, "norm")(x_BTD) if c.final_norm else x_BTD), tuple(layers)

    def embed(self, tokens, positions):
        c = self.config
        init = nn.initializers.normal(c.initializer_range)
        table = self.param("tokens", init, (c.vocab_size, c.embedding_width or c.width))
        x_BTD = table[tokens]
        if c.embedding_scale != 1.0:
            x_BTD = x_BTD * jnp.asarray(c.embedding_scale, x_BTD.dtype)
        if c.embedding_width:
            x_BTD = x_BTD @ self.param("project_in", init, (c.embedding_width, c.width))
        if c.learned_positions:
            rows = c.max_positions + c.position_offset
            position_table = self.param("positions", init, (rows, c.width))
            x_BTD = x_BTD + position_table[positions + c.position_offset]
        if c.token_types:
            x_BTD = x_BTD + self.param("token_types", init, (c.token_types, c.width))[0]
        x_BTD = x_BTD.astype(c.compute_dtype or x_BTD.dtype)
        return _norm(c, "embedding_norm")(x_BTD) if c.embedding_norm else x_BTD

    def output_parameters(self):
        """Creates what `Model.unembed` and `Model.score` use."""
        c = self.config
        init = nn.initializers.normal(c.initializer_range)
        out = c.embedding_width or c.width
        if c.embedding_width:
            self.param("project_out", init, (c.width, out))
        if c.num_labels:
            self.param("score", init, (out, c.num_labels))
            if c.pooler:
                Linear(out, c.initializer_range, name="pooler")(jnp.zeros((1, out)))
                self.param("score_bias", nn.initializers.zeros, (c.num_labels,))
            return
        if not c.tied:
            self.param("head", init, (c.vocab_size, out))
        if c.head_bias:
            self.param("head_bias", nn.initializers.zeros, (c.vocab_size,))


def _attention_inputs(c: DecoderConfig, positions, key_positions, allowed, dtype):
    """What layers share: rotations by `Rope`, masks by window, and the alibi bias."""
    # dicts, as the order of sets differs from process to process, and with it the program
    turn = {None: None}
    turn |= {r: rotation(r, positions, dtype) for r in dict.fromkeys(c.ropes) if r is not None}
    see, bias = {None: allowed[:, None]}, None
    if c.needs_distances:
        keys = positions if key_positions is None else key_positions
        back_BTS = positions[:, :, None] - keys[:, None, :]
        windows = [w for w in dict.fromkeys(c.windows) if w is not None]
        see |= {w: see[None] & (back_BTS < w)[:, None] for w in windows}
        if c.alibi:
            slopes = jnp.asarray(alibi_slopes(c.heads), jnp.promote_types(dtype, jnp.float32))
            bias = -slopes[:, None, None] * back_BTS[:, None]
    return turn, see, bias
