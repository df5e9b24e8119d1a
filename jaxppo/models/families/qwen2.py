"""Qwen2 and Qwen2.5: Llama with biases on query, key and value, and windows in upper layers."""

from collections.abc import Mapping
from typing import Any

from jaxppo.models.families.common import (
    LLAMA_FILES,
    decoder,
    llama_fields,
    llama_rules,
    window_fields,
)
from jaxppo.models.tables import Family
from jaxppo.models.transformer import DecoderConfig


def qwen_windows(hf: Mapping[str, Any]) -> dict:
    """Layers from `max_window_layers` on have windows, if `use_sliding_window`."""
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    first = hf.get("max_window_layers", 28)
    return window_fields(hf, [i >= first for i in range(hf["num_hidden_layers"])], window)


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads a Qwen2 `config.json`."""
    fields = llama_fields(hf) | {"qkv_bias": True, "out_bias": False}
    return decoder(hf, tied=False, **fields, **qwen_windows(hf))


FAMILY = Family(config=config, rules=llama_rules, **LLAMA_FILES)
