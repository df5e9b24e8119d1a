"""Adapters as PEFT folders: `adapter_config.json` and `adapter_model.safetensors`.

Where a checkpoint fuses layers that are apart here (query, key and value in one matrix), the
adapters of the parts become one adapter of their ranks together: its A holds theirs side by side,
its B holds theirs as blocks. The function is the same to the last bit of exact arithmetic.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxppo.models.bundle import Model, with_options
from jaxppo.models.families import FAMILIES
from jaxppo.models.folders import ModelError, read_json, read_tensors, write_json, write_tensors
from jaxppo.models.tables import Rule, get_path

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_ODD = 7919  # a length that no axis has


def save_adapter(directory: str | Path, model: Model, params, *, base: str | Path) -> None:
    """Writes the adapters of `params` as a folder that `peft` loads onto the base model.

    Args:
      directory: made if need be.
      model: its `config.lora_scale` is alpha / rank.
      params: with `lora_a` and `lora_b` beside kernels, see `add_lora`.
      base: the name or path of the base model, for the config.

    Raises:
      ValueError: there are no adapters.
      OSError: the disk refuses.
    """
    tensors, ranks, in_first = [], {}, False
    for rule, paths in _kernels(model):
        layers = [get_path(params, path.removesuffix("/kernel")) for path in paths]
        adapted = [layer for layer in layers if "lora_a" in layer]
        if not adapted:
            continue
        module = rule.name.removesuffix(".weight")
        rank = sum(layer["lora_a"].shape[1] for layer in adapted)
        blocks, at = [], 0
        for layer in layers:
            block = np.zeros((rank, layer["kernel"].shape[1]), np.float32)
            if "lora_b" in layer:
                rows = layer["lora_b"].shape[0]
                block[at : at + rows] = layer["lora_b"]
                at += rows
            blocks.append(block)
        a = np.concatenate([np.asarray(layer["lora_a"], np.float32) for layer in adapted], axis=1)
        b = rule.transform.save(*blocks)
        if _in_axis(rule, layers) == 0:
            b, in_first = b.T, True
        ranks[module] = rank
        for name, x in (("lora_A", a.T), ("lora_B", b)):
            key = f"{_PREFIX}{module}.{name}.weight"
            tensors.append((key, x.dtype, x.shape, lambda x=x: x))
    if not tensors:
        raise ValueError("these parameters hold no adapters; add_lora makes them")
    common = min(ranks.values())
    scale = model.config.lora_scale
    others = {module: rank for module, rank in ranks.items() if rank != common}
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(directory / WEIGHTS_FILE, tensors)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": common,
        "lora_alpha": common * scale,
        "rank_pattern": others,
        "alpha_pattern": {module: rank * scale for module, rank in others.items()},
        "target_modules": sorted(ranks),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": in_first,
        "inference_mode": True,
    }
    write_json(directory / CONFIG_FILE, config)


def load_adapter(directory: str | Path, model: Model, params) -> tuple[Model, dict[str, Any]]:
    """Reads a PEFT folder of adapters onto a base model's parameters, which are not changed.

    Returns:
      `(model, params)`, the model with the adapters' scale.

    Raises:
      ModelError: the folder is damaged, its adapters are of a kind that is not supported, or of
        layers that this model does not have.
    """
    directory = Path(directory)
    config = read_json(directory / CONFIG_FILE)
    neutral = {"peft_type": "LORA", "bias": "none", "use_dora": False, "use_rslora": False}
    neutral |= {"modules_to_save": None, "layer_replication": None}
    odd = [f"{k}={config[k]}" for k, x in neutral.items() if (config.get(k) or x) != x]
    if odd:
        raise ModelError(f"{directory} asks for {', '.join(odd)}: not supported")
    if not (directory / WEIGHTS_FILE).exists():
        raise ModelError(f"{directory} lacks {WEIGHTS_FILE}; pickled adapters are not read")
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in read_tensors([directory / WEIGHTS_FILE]):
        module, _, rest = name.removeprefix(_PREFIX).rpartition(".lora_")
        found.setdefault(module, {})[rest.split(".")[0]] = np.array(tensor, np.float32)
    scale = config["lora_alpha"] / config["r"]
    params = _copied(params)
    prefix = FAMILIES[model.hf_config["model_type"]].prefix
    for rule, paths in _kernels(model):
        module = rule.name.removesuffix(".weight")
        pair = found.pop(module, None) or found.pop(module.removeprefix(prefix), None)
        if pair is None:
            continue
        if pair.keys() != {"A", "B"}:
            raise ModelError(f"{directory} holds half of the adapter of {module}")
        a, b = pair["A"].T, pair["B"]
        own = _pattern(config, "alpha", module, config["lora_alpha"]) / a.shape[1]
        layers = [get_path(params, path.removesuffix("/kernel")) for path in paths]
        blocks = rule.transform.load(b.T if _in_axis(rule, layers) == 0 else b)
        fresh = not any(block.any() for block in blocks)
        for layer, block in zip(layers, blocks):
            used = np.ones(len(block), bool) if fresh else (block != 0).any(1)
            if not used.any():
                continue  # fusing filled with zeros what belongs to the parts beside it
            if a.shape[0] != layer["kernel"].shape[0] or block.shape[1] != layer["kernel"].shape[1]:
                raise ModelError(f"the adapter of {module} in {directory} has other shapes")
            layer["lora_a"] = jnp.asarray(a[:, used])
            layer["lora_b"] = jnp.asarray(block[used] * (own / scale))
    if found:
        raise ModelError(f"{directory} adapts what this model has not: {', '.join(sorted(found))}")
    return with_options(model, lora_scale=scale), params


def _kernels(model: Model) -> list[tuple[Rule, tuple[str, ...]]]:
    """The rules of linear layers' weights."""
    rules = FAMILIES[model.hf_config["model_type"]].rules(model.config)
    return [(rule, rule.paths) for rule in rules if rule.paths[0].endswith("/kernel")]


def _in_axis(rule: Rule, layers) -> int:
    """Which axis of the checkpoint's weight its inputs are on."""
    zero = np.zeros((), np.int8)
    fake = [np.broadcast_to(zero, (_ODD, layer["kernel"].shape[1])) for layer in layers]
    return rule.transform.save(*fake).shape.index(_ODD)


def _pattern(config: Mapping[str, Any], name: str, module: str, default: float) -> float:
    patterns = config.get(f"{name}_pattern") or {}
    for key, value in patterns.items():
        if module == key or module.endswith(f".{key}"):
            return value
    return default


def _copied(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copied(x) if isinstance(x, Mapping) else x for k, x in tree.items()}
