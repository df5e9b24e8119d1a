"""Llama 1 to 3, and what is built as they are (SmolLM2, TinyLlama): rotary, RMS norm, gated MLP."""

from collections.abc import Mapping
from typing import Any

from jaxppo.models.families.common import LLAMA_FILES, decoder, llama_fields, llama_rules
from jaxppo.models.tables import Family
from jaxppo.models.transformer import DecoderConfig


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads a Llama `config.json`."""
    fields = llama_fields(hf) | {"mlp_bias": bool(hf.get("mlp_bias", False))}
    return decoder(hf, tied=False, **fields)


FAMILY = Family(config=config, rules=llama_rules, **LLAMA_FILES)
