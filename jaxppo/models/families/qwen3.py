"""Qwen3: Llama with norms on the heads of queries and keys, and windows in upper layers."""

from collections.abc import Mapping
from typing import Any

from jaxppo.models.families.common import LLAMA_FILES, decoder, llama_fields, llama_rules
from jaxppo.models.families.qwen2 import qwen_windows
from jaxppo.models.tables import Family
from jaxppo.models.transformer import DecoderConfig


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads a Qwen3 `config.json`."""
    fields = llama_fields(hf, head_dim=128)
    return decoder(hf, tied=False, qk_norm="head", **fields, **qwen_windows(hf))


FAMILY = Family(config=config, rules=llama_rules, **LLAMA_FILES)
