"""Hugging Face checkpoints out: a folder that `transformers` and what reads its format open."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxppo.models.bundle import Model
from jaxppo.models.families import FAMILIES
from jaxppo.models.folders import INDEX_FILE, VALUE_HEAD_FILE, write_json, write_tensors
from jaxppo.models.lora import merge_lora
from jaxppo.models.tables import get_path

SHARD_BYTES = 5 * 10**9


def save_pretrained(
    directory: str | Path, model: Model, params, tokenizer=None, *, max_shard_bytes=SHARD_BYTES
) -> None:
    """Writes a folder that `transformers` (and what reads its format) opens.

    Every leaf is written in its own dtype under its Hugging Face name, adapters merged into their
    kernels; a value head goes to `value_head.safetensors` beside the model. One tensor at a time is
    on the host. Everything is written before any file of an older export is replaced.

    Args:
      directory: made if need be.
      model, params: as loaded or trained.
      tokenizer: saved with its chat template.
      max_shard_bytes: weights beyond it go to several files with an index.

    Raises:
      OSError: the disk refuses; what was there before is still there.
    """
    directory = Path(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        part.chmod(0o777 & ~_umask())
        _write(part, model, params, tokenizer, max_shard_bytes)
        directory.mkdir(exist_ok=True)
        written = {file.relative_to(part) for file in part.rglob("*") if file.is_file()}
        for name in sorted(written):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (part / name).replace(directory / name)
        for old in [*directory.glob("*.safetensors"), directory / INDEX_FILE]:
            if old.relative_to(directory) not in written:  # of another export; it would be read
                old.unlink(missing_ok=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write(folder: Path, model: Model, params, tokenizer, max_shard_bytes: int) -> None:
    head = params.get("value_head")
    params = merge_lora(params, model.config.lora_scale)
    tensors = list(_tensors(model, params))
    shards: list[list] = [[]]
    size = 0
    for tensor in tensors:
        _, dtype, shape, _ = tensor
        length = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if shards[-1] and size + length > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += length
    if len(shards) == 1:
        write_tensors(folder / "model.safetensors", tensors)
    else:
        weight_map, total = {}, 0
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
            write_tensors(folder / name, shard)
            weight_map |= {tensor[0]: name for tensor in shard}
            total += sum(
                int(np.prod(t[2], dtype=np.int64)) * np.dtype(t[1]).itemsize for t in shard
            )
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / INDEX_FILE, index)
    dtypes = {str(np.dtype(dtype)) for _, dtype, *_ in tensors}
    config = dict(model.hf_config)
    config.pop("torch_dtype", None)
    config["dtype"] = dtypes.pop() if len(dtypes) == 1 else "float32"
    write_json(folder / "config.json", config)
    if model.generation_config:
        write_json(folder / "generation_config.json", model.generation_config)
    if head is not None:
        flat = [
            (f"{layer}.{name}", leaf.dtype, leaf.shape, lambda leaf=leaf: np.asarray(leaf))
            for layer, leaves in head.items()
            for name, leaf in leaves.items()
        ]
        write_tensors(folder / VALUE_HEAD_FILE, flat)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))


def _tensors(model: Model, params) -> Iterator[tuple[str, Any, tuple[int, ...], Any]]:
    """The checkpoint's tensors, made only when they are written; shapes are found without data."""
    for rule in FAMILIES[model.hf_config["model_type"]].rules(model.config):
        leaves = [get_path(params, path) for path in rule.paths]

        def make(rule=rule, leaves=leaves):
            arrays = [np.asarray(leaf) for leaf in leaves]
            if rule.index is not None:
                arrays = [array[rule.index] for array in arrays]
            return rule.transform.save(*arrays)

        def shapes(rule=rule, leaves=leaves):  # of stand-ins that take no memory
            drop = 0 if rule.index is None else 1
            empty = np.zeros((), np.int8)
            return rule.transform.save(*(np.broadcast_to(empty, x.shape[drop:]) for x in leaves))

        yield rule.name, leaves[0].dtype, shapes().shape, make


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
