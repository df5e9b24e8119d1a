"""Mixture of experts: each token goes through the few gated MLPs that its router picks.

Letters: `N` tokens, `D` width, `E` experts, `F` hidden units of an expert, `R` experts a token.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp


def route(logits_NE, count: int, normalize: bool):
    """Returns the weights and numbers, `[N, R]` each, of every token's most probable experts.

    Probabilities are a float32 (or wider) softmax over all experts; `normalize` makes those of the
    chosen ones sum to 1.
    """
    dtype = jnp.promote_types(logits_NE.dtype, jnp.float32)
    probs = jax.nn.softmax(logits_NE.astype(dtype), axis=-1)
    weights, chosen = jax.lax.top_k(probs, count)
    if normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    return weights, chosen


class Experts(nn.Module):
    """`sum over the chosen e of weight_e * down_e(activation(gate_e(x)) * up_e(x))`.

    The tokens are sorted by expert, so that each product is one ragged matrix product and no
    expert computes what it was not asked for. No token is dropped, whatever the others do.
    """

    experts: int
    experts_per_token: int
    width: int
    normalize: bool
    activation: object
    stddev: float

    @nn.compact
    def __call__(self, x):
        D, E, F, R = x.shape[-1], self.experts, self.width, self.experts_per_token
        init = nn.initializers.normal(self.stddev)
        router, gate, up, down = (
            self.param(name, init, shape).astype(x.dtype)
            for name, shape in (
                ("router", (D, E)), ("gate", (E, D, F)), ("up", (E, D, F)), ("down", (E, F, D)),
            )
        )  # fmt: skip
        x_ND = x.reshape(-1, D)
        weights, chosen = route(x_ND @ router, R, self.normalize)
        order = jnp.argsort(chosen.reshape(-1), stable=True)  # of the N * R errands
        sizes = jnp.bincount(chosen.reshape(-1), length=E)
        sent = x_ND[order // R]
        inner = self.activation(jax.lax.ragged_dot(sent, gate, sizes))
        inner = inner * jax.lax.ragged_dot(sent, up, sizes)
        done = jax.lax.ragged_dot(inner, down, sizes)[jnp.argsort(order)]
        y = jnp.einsum("nrd,nr->nd", done.reshape(-1, R, D), weights.astype(x.dtype))
        return y.reshape(x.shape)
