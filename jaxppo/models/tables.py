"""Rules that rename and reshape tensors between Hugging Face checkpoints and parameter trees.

A family is a list of `Rule`s; each works in both directions, so that the export is the import
run backwards and a round trip is exact.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np


class Transform(NamedTuple):
    """`load` turns one checkpoint tensor into our leaves, `save` does the inverse."""

    load: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    save: Callable[..., np.ndarray]


same = Transform(lambda x: (x,), lambda x: x)
transposed = Transform(lambda x: (x.T,), lambda x: x.T)


def split(parts: int) -> Transform:
    """Cuts the last axis into equal parts (fused query, key and value)."""
    return Transform(
        lambda x: tuple(np.split(x, parts, axis=-1)), lambda *xs: np.concatenate(xs, axis=-1)
    )


class Rule(NamedTuple):
    """One checkpoint tensor `name` and the tree paths (`a/b/c`) that it fills."""

    name: str
    paths: tuple[str, ...]
    transform: Transform = same


class Family(NamedTuple):
    """How one architecture family is read and written.

    config: `(hf_config) -> DecoderConfig`; refuses options it can't honour by name.
    rules: `(DecoderConfig) -> [Rule]`, under the names that an export writes.
    prefix: the part of those names that base-model checkpoints leave out.
    ignored: suffixes of tensors that hold nothing of their own (stored masks, tied copies).
    """

    config: Callable[[Mapping[str, Any]], Any]
    rules: Callable[[Any], list[Rule]]
    prefix: str
    ignored: tuple[str, ...]


def get_path(tree: Mapping[str, Any], path: str) -> Any:
    """Reads the leaf at `a/b/c`."""
    for key in path.split("/"):
        tree = tree[key]
    return tree


def set_path(tree: dict[str, Any], path: str, leaf: Any) -> None:
    """Writes the leaf at `a/b/c` in place, making the dicts on the way."""
    *parents, last = path.split("/")
    for key in parents:
        tree = tree.setdefault(key, {})
    tree[last] = leaf
