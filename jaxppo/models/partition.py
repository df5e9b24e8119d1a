"""Where each parameter lies on a mesh: one table for all families.

Axes: `fsdp` cuts parameters among the devices that share a batch's work, `tensor` cuts the products
themselves (columns into a layer, rows out of it, the vocabulary of embeddings and heads). An
axis that the mesh lacks, or that does not divide a dimension, is left out there.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"(tokens|head)", ("tensor", "fsdp")),
    (r"head_bias", ("tensor",)),
    (r"positions|token_types|score|project_(in|out)", (None, "fsdp")),
    (r"(query|key|value|up|gate)/kernel", ("fsdp", "tensor")),
    (r"(query|key|value|up|gate)/bias", ("tensor",)),
    (r"(out|down)/kernel", ("tensor", "fsdp")),
    (r"experts/(up|gate)", (None, "fsdp", "tensor")),
    (r"experts/down", (None, "tensor", "fsdp")),
    (r"(query|key|value|up|gate)/lora_a", ("fsdp", None)),
    (r"(query|key|value|up|gate)/lora_b", (None, "tensor")),
    (r"(out|down)/lora_a", ("tensor", None)),
    (r"(out|down)/lora_b", (None, "fsdp")),
)


def partition_spec(path: str, shape: tuple[int, ...], axes: Mapping[str, int]) -> PartitionSpec:
    """The spec of the parameter `a/b/c` on a mesh with axes of these sizes; replicated if no rule
    knows it (norms, other biases)."""
    for pattern, wanted in RULES:
        if re.search(f"(^|/){pattern}$", path) and len(wanted) == len(shape):
            fits = [a if a in axes and d % axes[a] == 0 else None for a, d in zip(wanted, shape)]
            return PartitionSpec(*fits)
    return PartitionSpec()


def param_shardings(mesh: Mesh, params: Any) -> dict[str, Any]:
    """The sharding of every leaf of a tree of arrays or `ShapeDtypeStruct`s."""
    axes = dict(mesh.shape)
    flat = flatten_dict(params, sep="/")
    shardings = {
        path: NamedSharding(mesh, partition_spec(path, leaf.shape, axes))
        for path, leaf in flat.items()
    }
    return unflatten_dict(shardings, sep="/")


def init_sharded(init: Callable[[jax.Array], Any], key: jax.Array, mesh: Mesh) -> Any:
    """Random parameters, made where they will lie: no device ever holds all of them."""
    shardings = param_shardings(mesh, jax.eval_shape(init, key))
    return jax.jit(init, out_shardings=shardings)(key)
