"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): `W + scale * A B` beside frozen kernels.

An adapter is two leaves beside a `kernel [in, out]`: `lora_a [in, rank]` and `lora_b [rank, out]`.
Linear layers add it where it is there, with `DecoderConfig.lora_scale` = alpha / rank.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

# What peft calls the layers of common families, in the names of our tree.
NAMES = {
    "q_proj": "attention/query",
    "k_proj": "attention/key",
    "v_proj": "attention/value",
    "o_proj": "attention/out",
    "out_proj": "attention/out",
    "c_attn": "attention/(query|key|value)",
    "query_key_value": "attention/(query|key|value)",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "c_fc": "up",
    "fc_in": "up",
    "fc_out": "down",
    "all-linear": "attention/(query|key|value|out)|gate|up|down",
}


def layers(params: Mapping[str, Any]) -> list[str]:
    """The paths of the linear layers that can be adapted, as `block_0/attention/query`."""
    return [
        path.removesuffix("/kernel")
        for path, leaf in flatten_dict(params, sep="/").items()
        if path.startswith("block_") and path.endswith("/kernel") and leaf.ndim == 2
    ]


def add_lora(
    key: jax.Array, params: Mapping[str, Any], *, rank: int, targets: str | Sequence[str]
) -> dict[str, Any]:
    """Adds adapters that change nothing yet: A is random, B is 0.

    Args:
      key: consumed.
      params: a decoder's, as loaded. Not changed.
      rank: columns of A and rows of B.
      targets: regular expressions, or names of peft's (`q_proj`, `c_attn`, `all-linear`). A layer
        is adapted if one matches the end of its path, as `query` and `block_[67]/.*` do.

    Returns:
      The tree with the new leaves, in the dtype of their kernels.

    Raises:
      ValueError: a target that matches no layer, with the names that there are.
    """
    every = layers(params)
    chosen = set()
    for target in [targets] if isinstance(targets, str) else targets:
        try:
            pattern = re.compile(f"(.*/)?({NAMES.get(target, target)})")
        except re.error as error:
            raise ValueError(f"{target!r} is no regular expression: {error}") from None
        matched = {path for path in every if pattern.fullmatch(path)}
        if not matched:
            names = sorted({path.split("/", 1)[1] for path in every})
            raise ValueError(f"{target!r} matches none of the layers; they are {', '.join(names)}")
        chosen |= matched
    flat = dict(flatten_dict(params, sep="/"))
    for number, path in enumerate(every):
        if path not in chosen:
            continue
        kernel = flat[f"{path}/kernel"]
        size = (kernel.shape[0], rank)
        a = jax.random.normal(jax.random.fold_in(key, number), size) * kernel.shape[0] ** -0.5
        flat[f"{path}/lora_a"] = a.astype(kernel.dtype)
        flat[f"{path}/lora_b"] = jnp.zeros((rank, kernel.shape[1]), kernel.dtype)
    return unflatten_dict(flat, sep="/")


def merge_lora(params: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """Adds each adapter to its kernel, and leaves it out: an ordinary tree of the same function."""
    merged = {
        name: merge_lora(part, scale) if isinstance(part, Mapping) else part
        for name, part in params.items()
        if name not in ("lora_a", "lora_b")
    }
    if "lora_a" in params:
        dtype = jnp.promote_types(params["kernel"].dtype, jnp.float32)
        a, b = (params[name].astype(dtype) for name in ("lora_a", "lora_b"))
        kernel = params["kernel"].astype(dtype) + scale * (a @ b)
        merged["kernel"] = kernel.astype(params["kernel"].dtype)
    return merged
