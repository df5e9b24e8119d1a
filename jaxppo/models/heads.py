"""Value heads: from a hidden state `[..., D]` to one number `[...]`."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

KINDS = ("linear", "mlp")


def init_value_head(key: jax.Array, width: int, kind: str = "mlp") -> dict:
    """Makes a head whose first values are exactly 0 (its last layer starts at zero).

    `kind` "linear" is D -> 1, "mlp" is D -> 2D -> relu -> 1, trlx's shape. The key is consumed.
    Put the result into the policy's tree as `params["value_head"]`.
    """
    if kind not in KINDS:
        raise ValueError(f"value head {kind!r} is unknown; choose one of {', '.join(KINDS)}")
    inner = width
    head = {}
    if kind == "mlp":
        inner = 2 * width
        bound = width**-0.5
        head["up"] = {
            "kernel": jax.random.uniform(key, (width, inner), minval=-bound, maxval=bound),
            "bias": jnp.zeros(inner),
        }
    head["out"] = {"kernel": jnp.zeros((inner, 1)), "bias": jnp.zeros(1)}
    return head


def apply_value_head(head: Mapping, hidden: jax.Array) -> jax.Array:
    """Returns V of each state, `[...]` for hidden states `[..., D]`, in float32 or wider."""
    x = hidden.reshape(-1, hidden.shape[-1])
    if "up" in head:
        x = jax.nn.relu(x @ head["up"]["kernel"] + head["up"]["bias"])
    values = (x @ head["out"]["kernel"] + head["out"]["bias"])[:, 0]
    return values.astype(jnp.promote_types(values.dtype, jnp.float32)).reshape(hidden.shape[:-1])
