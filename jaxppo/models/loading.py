"""Checkpoints in: architecture, parameters and tokenizer of a folder, a file or a hub model."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxppo.models.bundle import Model, build_model
from jaxppo.models.families import FAMILIES
from jaxppo.models.folders import (
    VALUE_HEAD_FILE,
    ModelError,
    find_folder,
    read_json,
    read_tensors,
    weight_files,
)
from jaxppo.models.partition import param_shardings
from jaxppo.models.tables import Family, get_path, set_path

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")


def create_model(
    hf_config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
) -> Model:
    """Builds a model from the contents of a `config.json` alone; `model.init` gives its weights.

    Raises `ModelError` for families and options that are not supported, naming them.
    """
    kind = hf_config.get("model_type")
    if kind not in FAMILIES:
        raise ModelError(
            f"model type {kind!r} is not supported; supported are: {', '.join(sorted(FAMILIES))}"
        )
    try:
        return build_model(FAMILIES[kind].config(hf_config), hf_config, generation_config or {})
    except KeyError as missing:
        raise ModelError(f"config.json of this {kind} model lacks {missing}") from None
    except ValueError as refused:
        raise ModelError(str(refused)) from None


def load_pretrained(name_or_path: str | Path, *, dtype=None, mesh: Mesh | None = None):
    """Loads a checkpoint folder, a GGUF file, or a model of the Hugging Face hub.

    Tensors are read one at a time, each straight to where it will lie, so that the host holds
    little more than the parameters.

    Args:
      name_or_path: a folder with `config.json` and safetensors, a hub id such as `gpt2`, or a file
        that ends in `.gguf`.
      dtype: of the parameters; float32 unless given; "auto": each as it is stored.
      mesh: a mesh with axes of `jaxppo.models.partition`, over which they are distributed.

    Returns:
      `(model, params, tokenizer)`; `tokenizer` is None when the folder has none. A value head
      that `save_pretrained` left beside the model is found in `params["value_head"]`.

    Raises:
      ModelError: the folder is missing or incomplete, the family is not supported, or tensors are
        missing, left over or misshapen (all of them are named).
    """
    if str(name_or_path).endswith(".gguf"):
        from jaxppo.models.gguf import read_gguf  # needs an extra

        hf_config, tensors, tokenizer = read_gguf(Path(name_or_path))
        model = create_model(hf_config)
        params = read_params(tensors, model, dtype, mesh, source=str(name_or_path))
        return model, params, tokenizer
    folder = find_folder(name_or_path, ["*.json"])  # what is not supported is not downloaded
    generation = folder / "generation_config.json"
    model = create_model(
        read_json(folder / "config.json"), read_json(generation) if generation.exists() else {}
    )
    folder = find_folder(name_or_path)
    tensors = read_tensors(weight_files(folder))
    params = read_params(tensors, model, dtype, mesh, source=str(folder))
    if (folder / VALUE_HEAD_FILE).exists():
        place = _placer(dtype, None)
        for name, leaf in read_tensors([folder / VALUE_HEAD_FILE]):
            set_path(params, f"value_head/{name.replace('.', '/')}", place(leaf, "value_head"))
    return model, params, load_tokenizer(folder)


def read_params(
    tensors: Iterable[tuple[str, np.ndarray]],
    model: Model,
    dtype,
    mesh: Mesh | None,
    *,
    source: str,
) -> dict[str, Any]:
    """Makes a parameter tree of named tensors.

    Raises `ModelError` that names all tensors of `source` which are missing, unused or misshapen.
    """
    family: Family = FAMILIES[model.hf_config["model_type"]]
    rules = {rule.name: rule for rule in family.rules(model.config)}
    wanted = jax.eval_shape(model.init, jax.random.key(0))
    place = _placer(dtype, None if mesh is None else param_shardings(mesh, wanted))
    params: dict[str, Any] = {}
    problems, found = [], set()
    stacks: dict[str, tuple[np.ndarray, set[int]]] = {}  # leaves of many tensors, and which came
    for name, tensor in tensors:
        known = name if name in rules else family.prefix + name
        rule = rules.get(known)
        if rule is None and name.endswith(family.ignored):
            continue
        if rule is None:
            problems.append(f"{name} is not used")
            continue
        if known in found:
            problems.append(f"{name} occurs twice")
            continue
        found.add(known)
        try:
            leaves = rule.transform.load(tensor)
        except (ValueError, IndexError):  # no such axis, or it can't be cut into equal parts
            problems.append(f"{name} of shape {tensor.shape} can't become {', '.join(rule.paths)}")
            continue
        for path, leaf in zip(rule.paths, leaves):
            whole = get_path(wanted, path).shape
            shape = whole if rule.index is None else whole[1:]
            if leaf.shape != shape:
                problems.append(f"{name} gives {path} the shape {leaf.shape}, not {shape}")
            elif problems:
                continue  # it is only looked at any more
            elif rule.index is None:
                set_path(params, path, place(leaf, path))
            else:
                stack, came = stacks.setdefault(path, (np.empty(whole, leaf.dtype), set()))
                stack[rule.index] = leaf
                came.add(rule.index)
                if len(came) == whole[0]:
                    set_path(params, path, place(stack, path))
                    del stacks[path], stack
        del tensor, leaves
    problems += [f"{name} is missing" for name in rules if name not in found]
    if problems:
        shown = "; ".join(problems[:12]) + (
            f"; and {len(problems) - 12} more" * (len(problems) > 12)
        )
        raise ModelError(f"the weights in {source} do not fit their config.json: {shown}")
    return params


def _placer(dtype, shardings):
    """`(array, path) -> jax.Array`, in its dtype and on its devices."""

    def place(array: np.ndarray, path: str):
        kind = array.dtype if dtype == "auto" else jnp.dtype(dtype or jnp.float32)
        if shardings is None:
            return jnp.array(array, kind)  # a copy: the file is let go of
        sharding = get_path(shardings, path)
        return jax.make_array_from_callback(
            array.shape, sharding, lambda part: np.array(array[part], kind)
        )

    return place


def load_tokenizer(folder: str | Path):
    """Loads a folder's tokenizer, or returns None when there is none. Runs no remote code."""
    folder = find_folder(folder)
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return None
    # it would tell everybody that torch, which is not used, is missing
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer  # slow to import, and not needed for bare models

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds here
        raise ModelError(f"the tokenizer in {folder} can't be loaded: {error}") from error


def eos_ids(model: Model, tokenizer=None) -> tuple[int, ...]:
    """The ids that end a response: those of model, generation config and tokenizer together."""
    found = set()
    for ids in (
        model.hf_config.get("eos_token_id"),
        model.generation_config.get("eos_token_id"),
        getattr(tokenizer, "eos_token_id", None),
    ):
        found |= set(ids) if isinstance(ids, list) else {ids} if ids is not None else set()
    return tuple(sorted(i for i in found if 0 <= i < model.config.vocab_size))
