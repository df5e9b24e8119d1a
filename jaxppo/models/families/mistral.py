"""Mistral: Llama with a window on every layer."""

from collections.abc import Mapping
from typing import Any

from jaxppo.models.families.common import LLAMA_FILES, decoder, llama_fields, llama_rules
from jaxppo.models.tables import Family
from jaxppo.models.transformer import DecoderConfig


def windows_everywhere(hf: Mapping[str, Any], default: int | None = None) -> dict:
    """The same window on every layer, or none."""
    window = hf.get("sliding_window", default)
    return {"windows": (window,) * hf["num_hidden_layers"] if window else ()}


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads a Mistral `config.json`."""
    # Ministral mixes kinds of layers under the same name; transformers then ignores the mixture
    neutral = {"layer_types": None}
    fields = llama_fields({"num_key_value_heads": 8, **hf}) | {"qkv_bias": False, "out_bias": False}
    return decoder(hf, tied=False, neutral=neutral, **fields, **windows_everywhere(hf, 4096))


FAMILY = Family(config=config, rules=llama_rules, **LLAMA_FILES)
