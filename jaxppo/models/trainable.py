"""Which leaves of a parameter tree are trained: a tree becomes two, and two become one.

The update, its gradients, the optimizer's state and checkpoints hold the trained tree only. The
frozen one is an argument beside it that policy and reference share.
"""

from collections.abc import Callable, Mapping
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict

HEADS = ("value_head", "value_branch", "critic")  # parts of the tree that only values come from


def split(params: Mapping[str, Any], trained: Callable[[str], bool]) -> tuple[dict, dict]:
    """Cuts a tree of dicts in two: the leaves whose path `a/b/c` is trained, and the others."""
    flat = flatten_dict(params, sep="/")
    parts = ({k: v for k, v in flat.items() if trained(k) is on} for on in (True, False))
    return tuple(unflatten_dict(part, sep="/") for part in parts)


def merge(trained: Mapping[str, Any], frozen: Mapping[str, Any]) -> dict[str, Any]:
    """Puts together what `split` cut. Where both have a leaf, that of `trained` stands."""
    merged = dict(frozen)
    for key, part in trained.items():
        both = isinstance(part, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(part, merged[key]) if both else part
    return merged


def without_heads(params: Mapping[str, Any]) -> dict[str, Any]:
    """The language model alone."""
    return {key: part for key, part in params.items() if key not in HEADS}


def top_layers(layers: int, unfrozen: int) -> Callable[[str], bool]:
    """Says of a path whether it is trained under trlx's `num_layers_unfrozen`.

    -1: everything. N: the top N of the `layers` blocks, the final norm, and an output projection
    of its own; 0: the final norm. Embeddings stay, and with them a tied output projection. What
    gives values is trained in any case.
    """
    if unfrozen < 0:
        return lambda path: True
    tops = {"norm", *HEADS, *(f"block_{i}" for i in range(layers - unfrozen, layers))}
    if unfrozen:
        tops |= {"head", "head_bias", "project_out"}
    return lambda path: path.split("/")[0] in tops


def adapters(path: str) -> bool:
    """Says of a path whether it is trained when low-rank adapters are."""
    return path.split("/")[0] in HEADS or path.rsplit("/", 1)[-1] in ("lora_a", "lora_b")


def first_trained_block(trained: Mapping[str, Any], layers: int) -> int:
    """The block below which policy and reference are the same, and no gradient goes.

    0 where embeddings are trained; `layers` where no block is.
    """
    names = set(without_heads(trained)) - {"norm", "head", "head_bias", "project_out"}
    blocks = {name for name in names if name.startswith("block_")}
    if names - blocks:
        return 0
    return min((int(name.removeprefix("block_")) for name in blocks), default=layers)
