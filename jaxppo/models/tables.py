"""Rules that rename and reshape tensors between Hugging Face checkpoints and parameter trees.

A family is a list of `Rule`s; each works in both directions, so that the export is the import
run backwards and a round trip is exact.
"""

from collections.abc import Callable, Mapping, Sequence
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


def split_rows(sizes: Sequence[int]) -> Transform:
    """Cuts `[out, in]` (or a bias `[out]`) into pieces of so many rows, each transposed."""
    cuts = np.cumsum(sizes)[:-1].tolist()
    return Transform(
        lambda x: tuple(piece.T for piece in np.split(x, cuts, axis=0)),
        lambda *xs: np.concatenate([x.T for x in xs], axis=0),
    )


def split_heads(heads: int) -> Transform:
    """Cuts `[out, in]` (or a bias) whose rows are query, key and value of a head, head by head."""

    def load(x):
        pieces = x.reshape(heads, 3, -1, *x.shape[1:])
        return tuple(pieces[:, i].reshape(-1, *x.shape[1:]).T for i in range(3))

    def save(*xs):
        pieces = [x.T.reshape(heads, -1, *x.T.shape[1:]) for x in xs]
        return np.stack(pieces, axis=1).reshape(-1, *xs[0].T.shape[1:])

    return Transform(load, save)


class Rule(NamedTuple):
    """One checkpoint tensor `name` and the tree paths (`a/b/c`) that it fills.

    With an `index`, it is that row of a leaf which several tensors make up together: the experts
    of a layer are one `[E, in, out]` array here and a tensor each in checkpoints.
    """

    name: str
    paths: tuple[str, ...]
    transform: Transform = same
    index: int | None = None


class Family(NamedTuple):
    """How one architecture family is read and written.

    config: `(hf_config) -> DecoderConfig`; refuses options it can't honour by name.
    rules: `(DecoderConfig) -> [Rule]`, under the names that an export writes.
    prefix: the part of those names that base-model checkpoints leave out.
    ignored: suffixes of tensors that hold nothing of their own (stored masks, tied copies); those
      that a rule names are read all the same.
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
