"""Hugging Face folders in and out: `config.json`, safetensors, tokenizer files.

Weights are read from safetensors only: pickled `.bin` files run code when opened.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxppo.models.bundle import Model, build_model
from jaxppo.models.families import FAMILIES
from jaxppo.models.tables import get_path, set_path

INDEX_FILE = "model.safetensors.index.json"
VALUE_HEAD_FILE = "value_head.safetensors"
_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")  # taken from the hub
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")


class ModelError(ValueError):
    """A checkpoint that can't be used, and why."""


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


def load_pretrained(name_or_path: str | Path, *, dtype=None, mesh=None):
    """Loads a checkpoint folder or a model of the Hugging Face hub.

    Args:
      name_or_path: a folder with `config.json` and safetensors, or a hub id such as `gpt2`.
      dtype: of the parameters; float32 unless given.
      mesh: reserved for sharded loading; must be None.

    Returns:
      `(model, params, tokenizer)`; `tokenizer` is None when the folder has none. A value head
      that `save_pretrained` left beside the model is found in `params["value_head"]`.

    Raises:
      ModelError: the folder is missing or incomplete, the family is not supported, or tensors are
        missing, left over or misshapen (all of them are named).
    """
    if mesh is not None:
        raise NotImplementedError("loading onto a mesh is not there yet; pass mesh=None")
    folder = _folder(name_or_path, ["*.json"])  # what is not supported is not downloaded
    generation = folder / "generation_config.json"
    model = create_model(
        _read_json(folder / "config.json"), _read_json(generation) if generation.exists() else {}
    )
    folder = _folder(name_or_path)
    params = _read_params(folder, model, dtype or jnp.float32)
    return model, params, load_tokenizer(folder)


def load_tokenizer(folder: str | Path):
    """Loads a folder's tokenizer, or returns None when there is none. Runs no remote code."""
    folder = _folder(folder)
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


def save_pretrained(directory: str | Path, model: Model, params, tokenizer=None) -> None:
    """Writes a folder that `transformers` (and what reads its format) opens.

    Every leaf is written in its own dtype under its Hugging Face name; a value head goes to
    `value_head.safetensors` beside the model. Raises `OSError` when the disk refuses.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    family = FAMILIES[model.hf_config["model_type"]]
    tensors = {}
    for rule in family.rules(model.config):
        leaves = [np.asarray(get_path(params, path)) for path in rule.paths]
        if rule.index is not None:
            leaves = [leaf[rule.index] for leaf in leaves]
        tensors[rule.name] = np.ascontiguousarray(rule.transform.save(*leaves))
    _save_tensors(tensors, directory / "model.safetensors")
    (directory / INDEX_FILE).unlink(missing_ok=True)  # an older sharded checkpoint's; it would win
    dtypes = {str(tensor.dtype) for tensor in tensors.values()}
    config = dict(model.hf_config)
    config.pop("torch_dtype", None)
    config["dtype"] = dtypes.pop() if len(dtypes) == 1 else "float32"
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    if model.generation_config:
        text = json.dumps(model.generation_config, indent=2, sort_keys=True) + "\n"
        (directory / "generation_config.json").write_text(text, encoding="utf-8")
    if "value_head" in params:
        flat = {
            f"{layer}.{name}": np.ascontiguousarray(leaf)
            for layer, leaves in params["value_head"].items()
            for name, leaf in leaves.items()
        }
        _save_tensors(flat, directory / VALUE_HEAD_FILE)
    else:
        (directory / VALUE_HEAD_FILE).unlink(missing_ok=True)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(directory))


def _save_tensors(tensors: dict[str, np.ndarray], file: Path) -> None:
    save_file(tensors, file, metadata={"format": "pt"})
    # safetensors makes files that only their owner may read; give them the usual permissions
    umask = os.umask(0)
    os.umask(umask)
    file.chmod(0o666 & ~umask)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file.parent} has no {file.name}: it is not a model folder") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} can't be read: {error}") from None
    if not isinstance(loaded, dict):
        raise ModelError(f"{file} does not hold a JSON object")
    return loaded


def _folder(name_or_path: str | Path, patterns: Sequence[str] = _FILES) -> Path:
    """The local folder of a checkpoint; if it is not a path, its files come from the hub."""
    path = Path(name_or_path)
    if path.is_dir():
        return path
    name = str(name_or_path)
    looks_local = path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1
    if path.exists() or (looks_local and "/" in name):
        raise ModelError(f"model folder {name} does not exist or is not a folder")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # network, 404, gated, malformed id: all the same to the user
        raise ModelError(
            f"{name} is neither a folder here nor a model that the Hugging Face hub would give "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0]}); check the spelling "
            "or the connection"
        ) from error


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{index} has no weight_map")
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        files = [folder / "model.safetensors"]
    missing = [file.name for file in files if not file.exists()]
    if missing and list(folder.glob("*.bin")):
        raise ModelError(
            f"{folder} holds pickled .bin weights, which are not read because opening them runs "
            "code: convert them with transformers' save_pretrained(..., safe_serialization=True)"
        )
    if missing:
        raise ModelError(
            f"{folder} lacks {', '.join(missing)}; only safetensors are read (where a model has "
            "none but pickled .bin weights, transformers' save_pretrained converts them)"
        )
    return files


def _tensors(files: Iterable[Path]) -> Iterable[tuple[str, np.ndarray]]:
    for file in files:
        try:
            with safe_open(file, framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    yield name, opened.get_tensor(name)
        except Exception as error:  # safetensors raises its own kinds for torn headers and data
            raise ModelError(f"{file} can't be read: {error}") from error


def _read_params(folder: Path, model: Model, dtype) -> dict[str, Any]:
    family = FAMILIES[model.hf_config["model_type"]]
    rules = {rule.name: rule for rule in family.rules(model.config)}
    wanted = jax.eval_shape(model.init, jax.random.key(0))
    params: dict[str, Any] = {}
    problems = []
    found = set()
    rows: dict[str, dict[int, jax.Array]] = {}
    for name, tensor in _tensors(_weight_files(folder)):
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
            shape = get_path(wanted, path).shape[0 if rule.index is None else 1 :]
            if leaf.shape != shape:
                problems.append(f"{name} gives {path} the shape {leaf.shape}, not {shape}")
            leaf = jnp.asarray(leaf, dtype)
            if rule.index is None:
                set_path(params, path, leaf)
            else:
                rows.setdefault(path, {})[rule.index] = leaf
    problems += [f"{name} is missing" for name in rules if name not in found]
    if problems:
        shown = "; ".join(problems[:12]) + (
            f"; and {len(problems) - 12} more" * (len(problems) > 12)
        )
        raise ModelError(f"the weights in {folder} do not fit their config.json: {shown}")
    for path, pieces in rows.items():
        set_path(params, path, jnp.stack([pieces[i] for i in range(len(pieces))]))
    if (folder / VALUE_HEAD_FILE).exists():
        for name, leaf in _tensors([folder / VALUE_HEAD_FILE]):
            set_path(params, f"value_head/{name.replace('.', '/')}", jnp.asarray(leaf, dtype))
    return params
