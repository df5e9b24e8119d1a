"""The parts that models are built of: attention, linear layers, norms, activations.

Letters: `B` batch, `T` queries, `S` keys, `H` heads of queries, `N` of keys, `K` size of a head.

Matrix products run on `[B*T, D]` rather than `[B, T, D]`: XLA's backward pass of a linear layer is
half as fast again that way on CPU and never slower elsewhere.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: nn.gelu(x, approximate=False),
    "gelu_new": nn.gelu,
    "gelu_pytorch_tanh": nn.gelu,
    "relu": nn.relu,
    "silu": nn.silu,
    "swish": nn.silu,
}


def attend(q_BHTK, k_BNSK, v_BNSK, allowed, *, scale=None, softcap=None, bias=None):
    """Scaled dot-product attention with a float32 (or wider) softmax.

    Keys and values have `N` heads, each shared by `H / N` neighbouring queries; they are not
    repeated. `allowed` is bool and broadcasts to `[B, H, T, S]`, as does `bias`, which is added to
    the scores after the soft-cap. A query that may see nothing gets an even mixture of the values
    instead of NaN; only padding ever asks for that.
    """
    B, H, T, K = q_BHTK.shape
    N, S = k_BNSK.shape[1:3]
    dtype = jnp.promote_types(q_BHTK.dtype, jnp.float32)
    q_BNGK = q_BHTK.reshape(B, N, H // N * T, K)
    scores = jnp.einsum("bngk,bnsk->bngs", q_BNGK, k_BNSK, preferred_element_type=dtype)
    scores = scores.reshape(B, H, T, S) * (K**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    weights = jax.nn.softmax(jnp.where(allowed, scores, -1e30), axis=-1).astype(v_BNSK.dtype)
    y = jnp.einsum("bngs,bnsk->bngk", weights.reshape(B, N, H // N * T, S), v_BNSK)
    return y.reshape(B, H, T, K)


def alibi_slopes(heads: int) -> np.ndarray:
    """How fast each head's scores fall with distance: `2 ** (-8 i / n)` for a power of two `n`.

    Other numbers of heads take those of the power of two below, then every second one of the next.
    """
    power = 2 ** (heads.bit_length() - 1)
    first = 2.0 ** (-8.0 / power * np.arange(1, power + 1))
    rest = 2.0 ** (-4.0 / power * np.arange(1, 2 * (heads - power) + 1, 2))
    return np.concatenate([first, rest])


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


class RMSNorm(nn.Module):
    """`x / rms(x) * (offset + scale)` in float32 (or wider), returned in the input's dtype."""

    eps: float
    offset: float = 0.0

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.constant(1.0 - self.offset), (x.shape[-1],))
        y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + self.eps)
        return (y * (self.offset + scale)).astype(x.dtype)
